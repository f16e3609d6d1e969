"""A population of adapters: the time of a step of all members, against their trainings alone."""

import dataclasses
import functools
import itertools
from typing import Any

import jax

import jaxtrain as jt
from experiments.bench import Rounds, Variant, row, stepping
from jaxtrain import build, data
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.methods.population import Member, follow, populate
from jaxtrain.models import decoder
from jaxtrain.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Members that train together, as ratios to one after another by a program of one."""

    members: int = 8
    """Members, each with a learning rate and a seed of its own."""
    rank: int = 8
    """Rank of their additions."""
    layers: int = 4
    width: int = 128
    seq_len: int = 128
    """Tokens per row."""
    global_batch: int = 8
    """Rows per step."""


def main(config: Config) -> None:
    """Prints the ratios."""
    sizes = {name: getattr(config, name) for name in ("layers", "width", "seq_len")}
    model = decoder.DecoderConfig(vocab_size=257, heads=4, **sizes)
    shapes = data.packed_shapes(config.global_batch, config.seq_len)
    batch = {name: jax.numpy.ones(x.shape, x.dtype) for name, x in shapes.items()}
    base = jax.device_get(decoder.init(model, jax.random.key(0)))

    def optimizer(stack: Any, learning_rate: float = 1e-3) -> Any:
        return jt.make_optimizer("adamw", learning_rate, stacked=stack.axes)

    made = jt.Experiment.of(
        name="population",
        init_fn=functools.partial(decoder.init, model),
        params=lambda: base,
        loss_fn=None,
        stages=decoder.stages(model),
        rules=Rules(decoder.RULES),
        optimizer=follow(optimizer),
        batch=batch,
        train_batches=None,
        steps=1,
    )
    made = apply(made, LoRA(rank=config.rank))
    numbers = [{"learning_rate": 1e-3 / (1 + i)} for i in range(config.members)]
    members = [Member(made.laid.init_fn, i, each) for i, each in enumerate(numbers)]
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    given = itertools.repeat(batch)

    def compiled(experiment: jt.Experiment) -> tuple[Any, Any]:
        state = build.make_state(experiment, mesh)
        return build.compile_train(experiment, state, mesh), state

    train, _ = compiled(made)
    alone = [
        stepping(train, build.make_state(made.with_(seed=i), mesh), given)
        for i in range(config.members)
    ]
    variants = {"one by one": Variant(lambda: [each.run() for each in alone])}
    for together in ("map", "vmap"):
        variants[together] = stepping(*compiled(populate(made, members, together=together)), given)
    row("population", config, variants, {"parameters": decoder.parameter_count(model)})
