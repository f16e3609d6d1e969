"""Wrong layouts in a few lines each; the line to be named ends in ``# planted``.

A bug is what each device of a mesh computes, ``bug(wrong, params, batch)``; without ``wrong`` it is
right. Shapes: N rows, D features, H hidden, O outputs, B sequences, T positions, V words, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import all_gather, axis_index, pmax, pmean, psum
from jax.sharding import PartitionSpec as P

import jaxtrain as jt

N, D, H, O, V = 16, 8, 16, 4, 24
R = np.random.default_rng(0)
PARAMS = {
    "up": np.float32(R.normal(size=(D, H)) / 3),
    "down": np.float32(R.normal(size=(H, O)) / 4),
}
BATCH = {"x": np.float32(R.normal(size=(N, D))), "y": np.float32(R.normal(size=(N, O)))}
BATCH["mask"] = np.float32(R.random(N) < 0.5)
TOKENS, TABLE = R.integers(0, V, (4, 16)), np.float32(R.normal(size=(V, D)))
# Made where JAX has its devices.
KEY = functools.partial(jax.random.key, 0)
STATE = lambda: jt.init_state(init_fn, optax.sgd(0.1), KEY())  # noqa: E731
STACKS = tuple(np.float32(R.normal(size=(8, D, D))) for _ in range(2))
WHOLE, BY_ROW, SPLIT = P(), P("data"), {"up": P(None, "tensor"), "down": P("tensor")}


class Bug(NamedTuple):
    """A bug: the function, its mesh, where it was met, and the step and its arguments."""

    function: Callable
    axes: dict[str, int]
    note: str
    step: Callable
    args: tuple


BUGS: dict[str, Bug] = {}


def planted(*args, note="", specs=(WHOLE, BY_ROW), out=WHOLE, mapped=True, **axes) -> Callable:
    """Registers what each device computes, or, where it is not ``mapped``, the step itself."""

    def register(function):
        def step(wrong, *args):
            local = functools.partial(function, wrong)
            # Nothing says over which axes results differ: that check would refuse half of these.
            how = {"in_specs": specs, "out_specs": out, "check_vma": False}
            return jax.shard_map(local, **how)(*args) if mapped else local(*args)

        bug = Bug(function, axes, note, step, args or (PARAMS, BATCH))
        BUGS[function.__name__] = bug
        return function

    return register


def model(params: Any, x_ND: Any) -> Any:
    return jnp.tanh(x_ND @ params["up"]) @ params["down"]


def errors(params: Any, batch: Any) -> Any:
    return jnp.square(model(params, batch["x"]) - batch["y"]).sum(-1)


def masked_sum(params: Any, batch: Any) -> Any:
    return (errors(params, batch) * batch["mask"]).sum()


@planted(data=8)
def loss_not_summed(wrong, params, batch):
    total = (errors(params, batch) * batch["mask"]).sum()  # planted
    return total if wrong else psum(total, "data")


@planted(data=8)
def gradient_not_summed(wrong, params, batch):
    grads = jax.grad(masked_sum)(params, batch)
    grads = grads if wrong else psum(grads, "data")
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)  # planted


@planted(specs=(SPLIT, BY_ROW), data=2, tensor=4)
def summed_twice(wrong, params, batch):
    y_NO = psum(model(params, batch["x"]), "tensor")
    y_NO = psum(y_NO, "tensor") if wrong else y_NO  # planted
    return psum(jnp.square(y_NO - batch["y"]).sum(), "data")


@planted(specs=(SPLIT, BY_ROW), data=2, tensor=4)
def summed_over_another_axis(wrong, params, batch):
    y_NO = psum(model(params, batch["x"]), "data" if wrong else "tensor")  # planted
    return psum(jnp.square(y_NO - batch["y"]).sum(), "data")


@planted(note="F5", data=4)
def mean_of_means(wrong, params, batch):
    total, weight = masked_sum(params, batch), batch["mask"].sum()
    if wrong:
        return pmean(total / weight, "data")  # planted
    return psum(total, "data") / psum(weight, "data")


@planted(data=8)
def mean_for_sum(wrong, params, batch):
    grads = jax.grad(masked_sum)(params, batch)
    return (pmean if wrong else psum)(grads, "data")  # planted


@planted(PARAMS, BATCH, KEY, specs=(P(), BY_ROW, P()), data=8)
def key_shared_by_shards(wrong, params, batch, key):
    rows = len(batch["x"])
    keep_NO = jax.random.bernoulli(key, 0.5, (rows if wrong else N, O))  # planted
    if not wrong:
        keep_NO = keep_NO[axis_index("data") * rows + jnp.arange(rows)]
    return psum((model(params, batch["x"]) * keep_NO).sum(), "data")


@planted(PARAMS, BATCH, KEY, note="F5", specs=(P(), BY_ROW, P()), data=8)
def key_by_device(wrong, params, batch, key):
    key = jax.random.fold_in(key, axis_index("data")) if wrong else key  # planted
    hidden_NH = jnp.tanh(batch["x"] @ params["up"]) + jax.random.normal(key, (H,))
    return psum(jnp.square(hidden_NH).sum(), "data")


@planted(data=8)
def clipped_before_the_sum(wrong, params, batch):
    grads = jax.grad(masked_sum)(params, batch)
    grads = grads if wrong else psum(grads, "data")
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))  # planted
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    return psum(grads, "data") if wrong else grads


@planted(*STACKS, note="F3", specs=P("pipe"), out=P("pipe"), pipe=4)
def norm_of_a_part_of_the_stack(wrong, p_LDD, g_LDD):
    squares = jnp.stack([jnp.square(p_LDD).sum(), jnp.square(g_LDD).sum()])
    norms = jnp.sqrt(squares if wrong else psum(squares, "pipe"))  # planted
    return p_LDD - 0.1 * norms[0] / norms[1] * g_LDD  # a trust ratio for all layers


@planted(PARAMS, BATCH["x"][:10], note="F9", mapped=False, data=8)
def padded_rows_count(wrong, params, x_ND):
    more = -len(x_ND) % jax.sharding.get_abstract_mesh().size
    y_NO = model(params, jnp.pad(x_ND, ((0, more), (0, 0))))
    loss_N = jax.nn.logsumexp(y_NO, axis=-1) * (1 if wrong else jnp.arange(len(y_NO)) < 10)
    return loss_N.sum() / 10  # planted


HALF = BATCH | {"mask": np.float32(np.arange(N) * (np.arange(N) % 8 < 4))}


@planted(PARAMS, HALF, note="F1", data=4)  # two devices have no weight
def part_of_weight_zero(wrong, params, batch):
    penalised = lambda p: masked_sum(p, batch) + 0.1 * errors(p, batch).sum()  # noqa: E731
    weight = batch["mask"].sum()
    seed = jnp.where(weight > 0, 1 / weight, 0) if wrong else jnp.float32(1)  # planted
    (grads,) = jax.vjp(penalised, params)[1](seed)
    return psum(jax.tree.map(lambda g: g * (weight if wrong else 1), grads), "data")


@planted(BATCH["x"], specs=BY_ROW, out=BY_ROW, data=8)
def statistics_of_own_rows(wrong, x_ND):
    mean, square = x_ND.mean(0), jnp.square(x_ND).mean(0)
    mean, square = (mean, square) if wrong else pmean((mean, square), "data")
    return (x_ND - mean) / jnp.sqrt(square - mean * mean + 1e-3)  # planted


@planted(BATCH["x"], TABLE, specs=(P(), P("tensor")), tensor=4)
def softmax_over_own_words(wrong, x_ND, table_VD):
    logits_NV = x_ND @ table_VD.T
    most_N = pmax(logits_NV.max(-1), "tensor")
    total_N = jnp.exp(logits_NV - most_N[:, None]).sum(-1)
    total_N = total_N if wrong else psum(total_N, "tensor")
    return (jnp.log(total_N) + most_N).mean()  # planted


@planted(TOKENS, TABLE, specs=(P(None, "context"), P()), context=4)
def positions_begin_anew(wrong, tokens_BT, table_VD):
    t_T = jnp.arange(tokens_BT.shape[1])  # planted
    t_T = t_T if wrong else t_T + axis_index("context") * len(t_T)
    x_BTD = table_VD[tokens_BT] + jnp.sin(t_T / 10)[:, None]
    return psum(jnp.square(x_BTD).sum(), "context")


@planted(TOKENS, TABLE, specs=(P(None, "context"), P()), context=4)
def targets_of_own_part(wrong, tokens_BT, table_VD):
    size = tokens_BT.shape[1]
    all_BT = tokens_BT if wrong else all_gather(tokens_BT, "context", axis=1, tiled=True)
    next_BT = jnp.roll(all_BT, -1, axis=1)  # planted
    if not wrong:
        next_BT = next_BT[:, axis_index("context") * size + jnp.arange(size)]
    return psum((table_VD[tokens_BT] * table_VD[next_BT]).sum(), "context")


@planted(specs=(SPLIT, BY_ROW), out=SPLIT, data=2, tensor=4)
def sum_differentiated_in_the_map(wrong, params, batch):
    def loss(params):
        y_NO = model(params, batch["x"])
        y_NO = psum(y_NO, "tensor") if wrong else whole(y_NO)  # planted
        return jnp.square(y_NO - batch["y"]).sum()

    return psum(jax.grad(loss)(params), "data")


@jax.custom_vjp
def whole(x):
    return psum(x, "tensor")


whole.defvjp(lambda x: (whole(x), None), lambda _, g: (g,))


@planted(BATCH["x"], BATCH["y"], specs=(P(("data", "tensor")), P()), data=2, tensor=4)
def gathered_in_another_order(wrong, x_ND, y_NO):
    axes = ("tensor", "data") if wrong else ("data", "tensor")
    x_ND = all_gather(x_ND, axes, axis=0, tiled=True)  # planted
    return x_ND.T @ y_NO


@planted(note="no shard_map", mapped=False, data=8)
def rate_by_devices(wrong, params, batch):
    rate = 0.01 / (jax.sharding.get_abstract_mesh().size if wrong else 1)
    grads = jax.grad(masked_sum)(params, jax.lax.with_sharding_constraint(batch, BY_ROW))
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)  # planted


@planted(BATCH["x"], note="a vmap over devices, as pmap was used", mapped=False, data=8)
def median_of_own_rows(wrong, x_ND):
    parts = jax.sharding.get_abstract_mesh().size if wrong else 1
    x_PND = x_ND.reshape(parts, -1, D)
    x_PND -= jax.vmap(lambda x: jnp.sort(x, 0)[len(x) // 2])(x_PND)[:, None]  # planted
    return jnp.abs(x_PND).sum()


def init_fn(rng):
    return jax.tree.map(jnp.asarray, PARAMS)


@planted(STATE, BATCH, note="a jaxtrain step", mapped=False, data=8)
def no_sum_over_rows(wrong, state, batch):
    def loss_fn(params, batch, rng):
        y_NO = model(params, batch["x"])
        total = jnp.square(y_NO.sum(0)).sum()  # planted
        return jt.WeightedLoss(total, jnp.float32(len(y_NO)))

    loss_fn = jt.row_wise(loss_fn) if wrong else loss_fn
    return jt.build_train_step(loss_fn, optax.sgd(0.1), gather="step")(state, batch)
