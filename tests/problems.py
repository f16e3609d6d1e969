"""A small regression with ragged masks, shared by the tests of the core."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.compare.parity import worst
from jaxtrain.layout import Layout, MeshShape
from jaxtrain.loss import WeightedLoss, row_wise
from jaxtrain.tree import map_named

ROWS, INPUTS, HIDDEN, OUTPUTS = 16, 8, 32, 4
EXTRA = 0.1


def init(rng: jax.Array) -> dict:
    one, two = jax.random.split(rng)
    return {
        "up": {"kernel": 0.3 * jax.random.normal(one, (INPUTS, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": 0.3 * jax.random.normal(two, (HIDDEN, OUTPUTS))},
    }


def loss_fn(params: dict, batch: dict, rng: jax.Array | None) -> WeightedLoss:
    del rng
    x_ND = batch["x"].astype(params["up"]["kernel"].dtype)
    hidden_NH = jnp.tanh(x_ND @ params["up"]["kernel"] + params["up"]["bias"])
    y_NO = (hidden_NH @ params["down"]["kernel"]).astype(jnp.float32)
    error_N = jnp.square(y_NO - batch["y"]).mean(-1)
    mask_N = batch["mask"]
    return WeightedLoss(
        total=(error_N * mask_N).sum(),
        weight=mask_N.sum(),
        metrics={
            "largest": (jnp.abs(y_NO).max(-1) * mask_N).sum(),
            "half": (mask_N.sum() / 2, 1.0),
        },
    )


def noisy_loss(params: dict, batch: dict, rng: jax.Array | None) -> WeightedLoss:
    """``loss_fn`` with dropout on its inputs, so that whoever resumes must restore randomness."""
    if rng is not None:
        keep = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
        batch = batch | {"x": jnp.where(keep, batch["x"], 0.0)}
    return loss_fn(params, batch, rng)


def make_batch(seed: int = 0, rows: int = ROWS, keep: float = 0.7) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    mask = (r.random(rows) < keep).astype(np.float32)
    mask[0] = 1.0
    return {
        "x": r.normal(size=(rows, INPUTS)).astype(np.float32),
        "y": r.normal(size=(rows, OUTPUTS)).astype(np.float32),
        "mask": mask,
    }


def with_extra(params: dict, batch: dict, rng: jax.Array | None) -> WeightedLoss:
    """``loss_fn`` with a term of every row, whatever that weighs."""
    loss = loss_fn(params, batch, rng)
    hidden_NH = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    extra = jnp.square(hidden_NH @ params["down"]["kernel"]).sum()
    return WeightedLoss(loss.total + EXTRA * extra, loss.weight, loss.metrics)


def reference(params: dict, batch: dict, extra: float = 0.0) -> tuple[float, dict, float]:
    """Mean loss, its gradients and the weight, in NumPy float64, by hand; see ``with_extra``.

    Where the weight is 0 they are sums.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    b = {k: np.asarray(v, np.float64) for k, v in batch.items()}
    weight = b["mask"].sum()
    hidden = np.tanh(b["x"] @ p["up"]["kernel"] + p["up"]["bias"])
    y = hidden @ p["down"]["kernel"]
    difference = y - b["y"]
    loss = (np.square(difference).mean(-1) * b["mask"]).sum() + extra * np.square(y).sum()
    parts = weight or 1.0
    d_y = 2 * (difference / OUTPUTS * b["mask"][:, None] + extra * y) / parts
    d_hidden = d_y @ p["down"]["kernel"].T * (1 - hidden**2)
    grads = {
        "up": {"kernel": b["x"].T @ d_hidden, "bias": d_hidden.sum(0)},
        "down": {"kernel": hidden.T @ d_y},
    }
    return loss / parts, grads, weight


def with_noise(params: dict, scale: float = 0.1) -> dict:
    """Parameters of a model with noise on them, so that no bias is zero."""
    noise = lambda name, x: jax.random.normal(jax.random.key(len(name)), x.shape)  # noqa: E731
    return map_named(lambda name, x: x + scale * noise(name, x), params)


def assert_agree(found: dict, expected: dict, tolerance: float) -> None:
    """Compares parts of training, leaf by leaf; layers [V, L / V, ...] are [L, ...] reshaped."""
    found = jax.tree.map(lambda a, b: np.reshape(a, np.shape(b)), found, expected)
    errors = {part: worst(found[part], expected[part]) for part in expected}
    assert not {part: e for part, e in errors.items() if e[0] > tolerance}, errors


def record_gradients() -> optax.GradientTransformation:
    """Keeps the latest gradient in the optimizer's state, where it can be compared."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


def with_layout(given: dict, base: Layout | None = None) -> dict:
    """Moves what are fields of a layout into one; a mesh may be sizes by name, data being -1.

    ``when`` is the layout's ``gather``, as an experiment has one, too."""
    names = Layout.__dataclass_fields__.keys() - {"gather"}
    own = {name: given[name] for name in names & given.keys()}
    others = {name: x for name, x in given.items() if name not in own and name != "when"}
    own |= {"gather": given["when"]} if "when" in given else {}
    if isinstance(own.get("mesh"), dict):
        own["mesh"] = MeshShape(**own["mesh"])
    if isinstance(own.get("pipeline"), dict):
        own |= {f"pipeline.{name}": x for name, x in own.pop("pipeline").items()}
    return others | ({"layout": (base or Layout()).with_(own)} if own else {})


@row_wise
def least_squares(params, batch, rng):
    """The squared error of weighted rows."""
    error = ((batch["x"] @ params["a"] + params["b"] - batch["y"]) ** 2).sum(-1)
    return WeightedLoss(total=(batch["mask"] * error).sum(), weight=batch["mask"].sum())


def weighted_rows(features):
    """Parameters to begin ``least_squares`` with, and its batches by number."""

    def rows(number):
        rng = np.random.default_rng(100 + number)
        x = rng.normal(size=(8, features))
        made = {"x": x, "y": x @ np.ones((features, 2)) + rng.normal(size=(8, 2))}
        made["mask"] = rng.integers(1, 5, 8)
        return {name: value.astype(np.float32) for name, value in made.items()}

    return {"a": np.ones((features, 2), np.float32) / 2, "b": np.zeros(2, np.float32)}, rows
