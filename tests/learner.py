"""An experiment that learns well in a second, and badly where a flag says so: ``tests.learner``.

Shapes: N rows, I inputs, H width, C classes.
"""

import contextlib
import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.run import options

ROWS, HELD_OUT, INPUTS, CLASSES = 4096, 512, 32, 10


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Learns the classes that a random network of one hidden layer gives to random inputs."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(name="adamw", learning_rate=0.01)
    )
    steps: int = 150
    global_batch: int = 32
    width: int = 64
    layers: int = 2
    rows: int = ROWS
    """Rows to train on."""
    labels: Literal["true", "drawn"] = "true"
    """Labels that the inputs tell, or labels drawn at random."""
    order: Literal["drawn", "sorted"] = "drawn"
    """Rows in an order that is drawn, or sorted by label, pass after pass."""
    residual: bool = True
    """Add each layer to what comes in; without, it takes its place, through a sigmoid."""
    scale: float = 1.0
    """Factor of the inputs, which are normalised behind the first product."""
    unused: bool = False
    """Have a parameter that the loss does not read."""


def make_rows(config):
    r = np.random.default_rng(0)
    x_NI = r.normal(size=(ROWS + HELD_OUT, INPUTS)).astype(np.float32)
    hidden_NH = np.tanh(x_NI @ r.normal(size=(INPUTS, 16)) / INPUTS**0.5)
    label_N = (hidden_NH @ r.normal(size=(16, CLASSES))).argmax(1)
    if config.labels == "drawn":
        label_N = r.integers(CLASSES, size=label_N.size)
    x_NI *= config.scale
    rows = [{"x": x, "label": np.int32(label)} for x, label in zip(x_NI, label_N, strict=True)]
    return rows[: config.rows], rows[ROWS:]


def build(config):
    H, train, held_out = config.width, *make_rows(config)

    def init(rng):
        keys = jax.random.split(rng, 3)
        normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5  # noqa: E731
        params = {
            "embed": {"kernel": normal(keys[0], INPUTS, H)},
            "blocks": {"kernel": normal(keys[1], config.layers, H, H)},
            "head": {"kernel": normal(keys[2], H, CLASSES)},
        }
        return params | ({"unused": {"kernel": jnp.ones((H, H))}} if config.unused else {})

    def embed(params, batch, rng):
        kernel = params["embed"]["kernel"]
        x_NH = batch["x"].astype(kernel.dtype) @ kernel
        return x_NH / (jnp.abs(x_NH).mean(-1, keepdims=True) if config.scale != 1 else 1)

    def block(layer, x_NH, batch, rng):
        y_NH = x_NH @ layer["kernel"]
        return x_NH + jax.nn.relu(y_NH) if config.residual else jax.nn.sigmoid(y_NH)

    def head_loss(params, x_NH, batch):
        log_NC = jax.nn.log_softmax((x_NH @ params["head"]["kernel"]).astype(jnp.float32))
        nll_N = -jnp.take_along_axis(log_NC, batch["label"][:, None], 1)[:, 0]
        return jt.WeightedLoss(nll_N.sum(), jnp.float32(nll_N.size))

    data = config.batches_of(train, held_out)
    if config.order == "sorted":
        train, size = sorted(train, key=lambda row: row["label"]), config.global_batch

        @contextlib.contextmanager
        def stream(start, sharding):
            def batch(step):
                rows = [train[i % len(train)] for i in range(step * size, (step + 1) * size)]
                return jax.tree.map(lambda *x: np.stack(x), *rows)

            yield (jax.device_put(batch(step), sharding) for step in itertools.count(start))

        data["train_batches"] = stream
    stages = jt.Stages(embed, block, head_loss, stacked="blocks")
    return config.experiment("learner", init_fn=init, stages=stages, **data)


if __name__ == "__main__":
    jt.main(Config, build)
