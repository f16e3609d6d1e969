"""Local updates: replicas that train by themselves and meet every so many steps.

Each replica has its own rows of every batch, parameters and optimizer state. Where replicas meet,
what they have come to is averaged, by the weights of the batches that they saw, and the mean
displacement is a gradient of the outer optimizer. Federated averaging (McMahan et al. 2017,
https://arxiv.org/abs/1602.05629) averages alone, DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105) has Nesterov's momentum outside, FedOpt (Reddi et al. 2021,
https://arxiv.org/abs/2003.00295) adam or yogi, FedProx (Li et al. 2020,
https://arxiv.org/abs/1812.06127) a pull towards the parameters of the last meeting, and streaming
DiLoCo (Douillard et al. 2025, https://arxiv.org/abs/2501.18512) a part of the parameters at a time.

The number of replicas is part of the mathematics, and the mesh is not: each part of the mesh axis
``data`` has its own replicas, and one device computes all of them one after another.

Shapes: R replicas.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.compressed import INT8, exchanged, two_stages
from jaxtrain.engines.members import AXIS, at, check_engine, each, own_part, parts_of
from jaxtrain.host.least import check_least
from jaxtrain.methods.method import Method, Step
from jaxtrain.ops.attention import branch_shares
from jaxtrain.optim import frozen
from jaxtrain.sharding.placement import free_axes, sizes_are_final, specs_of
from jaxtrain.sharding.stack import Stack
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, map_named, named_leaves, partition

Outer = Literal["average", "sgd", "nesterov", "adam", "yogi"]
RATES = {"average": 1.0, "sgd": 1.0, "nesterov": 0.7, "adam": 0.01, "yogi": 0.01}
_anchor: contextvars.ContextVar[PyTree] = contextvars.ContextVar("anchor", default=None)


@dataclasses.dataclass(frozen=True)
class Local:
    """Replicas that train by themselves and meet every so many steps (local SGD, DiLoCo)."""

    replicas: int | None = None
    """Number of replicas, which share the rows of a batch: a multiple of the mesh axis data, each
    part of which has its own; left out, there are none."""
    every: int = 50
    """Steps from one meeting of the replicas to the next; they meet after the last step too."""
    after: int = 0
    """Number of first steps that replicas meet after each of, before they meet after every so many
    (post-local SGD)."""
    outer: Outer = "average"
    """Optimizer of the mean displacement: average takes the mean of the replicas, nesterov is
    DiLoCo's, adam and yogi are FedOpt's."""
    rate: float | None = None
    """Learning rate of the outer optimizer; left out, 1 (sgd), 0.7 (nesterov) or 0.01 (adam,
    yogi)."""
    momentum: float = 0.9
    """Momentum of nesterov."""
    fragments: int = 1
    """Number of parts of the parameters, which meet at different steps, each after every so many:
    the largest exchange is then so many times smaller."""
    bits: Literal[8, 32] = 32
    """Bits of each number that a meeting sends: 8 rounds what each replica has moved by to 255
    levels of a piece's largest, and what that comes to again."""
    proximal: float = 0.0
    """Strength of a pull of each replica towards where it last met the others (FedProx)."""

    def __post_init__(self) -> None:
        check_least(self, replicas=1, every=1, after=0, fragments=1, proximal=0, rate=0, momentum=0)
        typed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if typed and self.replicas is None:
            name, value = typed[0].name, getattr(self, typed[0].name)
            raise ValueError(
                f"`local.{name}` is {value} and there are no replicas: give `local.replicas` too"
            )
        if self.outer != "nesterov" and "momentum" in {f.name for f in typed}:
            raise ValueError(
                f"`local.momentum` is {self.momentum} and `local.outer` {self.outer}, which has "
                "none: give nesterov, or leave it out"
            )
        if self.outer == "average" and self.rate is not None:
            raise ValueError(
                f"`local.rate` is {self.rate} and `local.outer` average, which has no rate: give "
                "sgd, nesterov, adam or yogi"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"`local.fragments` is {self.fragments} and `local.every` {self.every}: give at "
                "most one fragment for each step"
            )

    def outer_optimizer(self) -> optax.GradientTransformation | None:
        """Returns the outer optimizer; None for the mean."""
        rate = RATES[self.outer] if self.rate is None else self.rate
        made = {
            "average": lambda: None,
            "sgd": lambda: optax.sgd(rate),
            "nesterov": lambda: optax.sgd(rate, momentum=self.momentum, nesterov=True),
            "adam": lambda: optax.adam(rate, b2=0.99, eps=1e-3),
            "yogi": lambda: optax.yogi(rate, b2=0.99, eps=1e-3),
        }
        return made[self.outer]()


def local_updates(experiment: Any, local: Local) -> Any:
    """Returns a :class:`jaxtrain.Experiment` whose replicas each take a step, and meet in time.

    ``params`` and ``model_state`` of its state are those of the last meeting, which are evaluated,
    exported and sampled. A replica's key differs from the others', but for a single one. Metrics
    are means by weight.

    With one replica and the mean the bits are those of the plain step. With several, ``every`` 1,
    an inner rule without a state and the mean they are data parallel training, to rounding.

    Raises:
      ValueError: the experiment has a method already, keeps averages of parameters, or spreads
        parameters over the axis that replicas stand on.
    """
    if local.replicas is None:
        return experiment
    _check(experiment, local.replicas)
    R, outer = local.replicas, local.outer_optimizer()

    def start(state: TrainState) -> TrainState:
        if any("ema" in name.split("/") for name in named_leaves(state.opt_state)):
            raise ValueError(
                "the optimizer keeps averages of the parameters, which replicas would each have of "
                "their own: leave --optimizer.ema out; where replicas meet they are averaged too"
            )
        own = own_part(state.params, frozen(state.opt_state))
        alike = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (R, *x.shape)), dataclasses.replace(state, params=own)
        )
        keys = jax.vmap(lambda i: jax.random.fold_in(state.rng, i))(jnp.arange(R))
        # A single one draws as the run without replicas does.
        members = dataclasses.replace(alike, rng=alike.rng if R == 1 else keys)
        method = {"members": members, "weight": jnp.zeros((R, local.fragments))}
        if outer is not None:
            pieces = _pieces(own, experiment.stack, local.fragments)
            method["outer"] = [outer.init(_take(own, piece)) for piece in pieces]
        rest = {"opt_state": (), "loss_scale": None, "memory": None}
        return dataclasses.replace(state, **rest, method=method)

    def local_updates(step: Step) -> Step:
        def one(member: TrainState, batch: PyTree, shared: PyTree) -> tuple[TrainState, Any]:
            own = named_leaves(member.params)
            with _pulled_to(shared):
                whole = dataclasses.replace(member, params=combine(member.params, shared))
                after, metrics = step(whole, batch)
            params, _ = partition(lambda name, _: name in own, after.params)
            return dataclasses.replace(after, params=params), metrics

        def all_replicas(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
            _check_mesh(R)
            kept = state.method
            members, metrics = each(one, kept["members"], batch, state.params, split=True)
            weight = kept["weight"] + metrics["weight"][:, None]
            metrics = _joined(metrics)
            now, kept = state.step + 1, kept | {"members": members, "weight": weight}
            skipped = state.skipped + metrics["skipped"]
            state = dataclasses.replace(state, step=now, skipped=skipped, method=kept)
            pieces = _pieces(at(members.params, 0), experiment.stack, local.fragments)
            for number, piece in enumerate(pieces):
                is_time = (now + number * local.every // local.fragments) % local.every == 0
                is_time |= (now <= local.after) | (now == experiment.steps)
                meet = functools.partial(_meet, number, piece, local)
                with branch_shares(local.every - 1, 1):
                    state = jax.lax.cond(is_time, meet, lambda state: state, state)
            return state, metrics

        return all_replicas

    own = {"method": Method(local_updates, start=start)}
    if local.proximal:
        own["optimizer"] = _proximal(experiment.optimizer, local.proximal)
    return experiment.with_(**own)


def _check(experiment: Any, R: int) -> None:
    """Raises ValueError where an experiment cannot have so many replicas."""
    if experiment.method != Method():
        raise ValueError(
            "`local.replicas` is given and the experiment has a method of its own: leave one out"
        )
    check_engine(experiment)
    if experiment.layout.zero:
        raise ValueError(
            f"`zero` is {experiment.layout.zero}, which spreads what each replica has of its own "
            "over the axis that replicas stand on: spread it over fsdp"
        )
    if experiment.layout.offload_optimizer:
        raise ValueError(
            "`offload_optimizer` is given and the optimizer's state is that of each replica, which "
            "stays on its devices: leave it out"
        )
    rows = {x.shape[0] for x in jax.tree.leaves(experiment.data.batch) if x.shape}
    if len(rows) > 1:
        raise ValueError(
            f"`local.replicas` is {R} and leaves of a batch have {min(rows)} and {max(rows)} rows: "
            "each must have as many, or be a scalar; repeat it for every row, or let the loss "
            "function close over it"
        )
    cuts = R * experiment.layout.microbatches(experiment.layout.mesh.pipe)
    if left := [n for n in rows if n % cuts]:
        raise ValueError(
            f"`local.replicas` is {R} and a batch has {left[0]} rows, which they share and take in "
            f"{cuts // R} microbatches: give a multiple of {cuts} rows"
        )


# The part of the parameters that meets at a time: names, and of stacked ones the layers.
Piece = Mapping[str, slice]


def _pieces(own: PyTree, stack: Stack, count: int) -> list[Piece]:
    """Cuts parameters into so many pieces: layers in order, and whole what is not stacked, each
    where the least is."""
    leaves = named_leaves(own)
    pieces: list[dict[str, slice]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, x in leaves.items():
        if stack.holds(name):
            cuts = [x.shape[0] * i // count for i in range(count + 1)]
            for i, (first, end) in enumerate(itertools.pairwise(cuts)):
                pieces[i][name] = slice(first, end)
                sizes[i] += x.size // x.shape[0] * (end - first)
    for name, x in sorted(leaves.items(), key=lambda item: -item[1].size):
        if not stack.holds(name):
            least = sizes.index(min(sizes))
            pieces[least][name] = slice(None)
            sizes[least] += x.size
    return pieces


def _take(params: PyTree, piece: Piece, *, lead: int = 0) -> dict[str, jax.Array]:
    """A piece of parameters by path; ``lead`` axes stand before a parameter's own."""
    leaves, front = named_leaves(params), (slice(None),) * lead
    whole = lambda cut: cut == slice(None)  # noqa: E731
    return {n: leaves[n] if whole(cut) else leaves[n][(*front, cut)] for n, cut in piece.items()}


def _put(params: PyTree, piece: Piece, values: Mapping[str, jax.Array], *, lead: int = 0) -> PyTree:
    """Parameters with other values in a piece, broadcast over the axes before a parameter's own."""

    def put(name: str, x: jax.Array) -> jax.Array:
        if name not in piece:
            return x
        new = values[name].astype(x.dtype)
        if piece[name] == slice(None):
            return jnp.broadcast_to(new, x.shape)
        new = jnp.broadcast_to(new, (*x.shape[:lead], *new.shape))
        return jax.lax.dynamic_update_slice_in_dim(x, new, piece[name].start, lead)

    return map_named(put, params)


def _meet(number: int, piece: Piece, local: Local, state: TrainState) -> TrainState:
    """Takes a piece of the replicas' parameters through the outer optimizer, back to all of them;
    the model's state with the first."""
    kept, members, outer = dict(state.method), state.method["members"], local.outer_optimizer()
    mean = _mean_by(kept["weight"][:, number])
    there, before = _take(members.params, piece, lead=1), _take(state.params, piece)
    if local.bits == 32:
        met = jax.tree.map(mean, there)
    else:
        shares = _shares(kept["weight"][:, number])
        moved = jax.tree.map(lambda x, then: shares(x - then), there, before)
        whole = specs_of(state.params) or {}
        # Some of the layers do not divide over pipe as all do.
        cut = [name for name in piece if piece[name] != slice(None)]
        specs = whole | {name: P(None, *whole[name][1:]) for name in cut if name in whole}
        total = exchanged(functools.partial(two_stages, INT8), moved, specs=specs)[0]
        met = jax.tree.map(lambda x, by: x + by.astype(x.dtype), before, total)
    new = met
    if outer is not None:
        displaced = jax.tree.map(jnp.subtract, before, met)
        kept["outer"] = list(kept["outer"])
        updates, kept["outer"][number] = outer.update(displaced, kept["outer"][number], before)
        new = optax.apply_updates(before, updates)
    model_state, own = state.model_state, members.model_state
    if number == 0:
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
        model_state = jax.tree.map(lambda x: mean(x) if inexact(x) else x[0], own)
        own = jax.tree.map(lambda x, m: jnp.broadcast_to(m, x.shape), own, model_state)
    params = _put(members.params, piece, new, lead=1)
    kept["members"] = dataclasses.replace(members, params=params, model_state=own)
    kept["weight"] = kept["weight"].at[:, number].set(0)
    params = _put(state.params, piece, new)
    return dataclasses.replace(state, params=params, model_state=model_state, method=kept)


def _joined(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of all replicas: means by weight, and sums of weights and of what was left out."""
    if len(metrics["weight"]) == 1:
        return at(metrics, 0)
    sums = {name: metrics[name].sum(0) for name in ("weight", "skipped")}
    return jax.tree.map(_mean_by(metrics["weight"]), dict(metrics)) | sums


def _mean_by(weight_R: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns the mean of arrays [R, ...] by weight."""
    return lambda x: _shares(weight_R)(x).sum(0)


def _shares(weight_R: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns what each of arrays [R, ...] adds to their mean by weight; where all weights are 0,
    all count alike."""
    R, total = len(weight_R), weight_R.sum()
    share_R = jnp.where(total != 0, weight_R / jnp.where(total != 0, total, 1.0), 1.0 / R)

    def shares(x: jax.Array) -> jax.Array:
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
        share = share_R.reshape(R, *[1] * (x.ndim - 1)).astype(x.dtype)
        # What counts nothing may be NaN.
        return jnp.where(share != 0, x, 0) * share

    return shares


def _check_mesh(replicas: int) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS in free_axes(mesh) and sizes_are_final() and parts_of(replicas) == 1:
        raise ValueError(
            f"`local.replicas` is {replicas} and mesh axis {AXIS!r} has size {mesh.shape[AXIS]}: "
            "give a multiple of it, so that each part has replicas of its own"
        )


@contextlib.contextmanager
def _pulled_to(anchor: PyTree) -> Iterator[None]:
    token = _anchor.set(anchor)
    try:
        yield
    finally:
        _anchor.reset(token)


def _proximal(optimizer: Any, strength: float) -> Any:
    """An optimizer that is given the gradient of ``strength / 2 |x - anchor|^2`` besides."""
    if not isinstance(optimizer, optax.GradientTransformation):
        return lambda stack: _proximal(optimizer(stack), strength)
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        now, then = named_leaves(params), named_leaves(_anchor.get())

        def pull(name: str, g: jax.Array) -> jax.Array:
            return g + strength * (now[name] - then[name]).astype(g.dtype)

        # What a mask leaves out of the gradients has no leaf there.
        return inner.update(map_named(pull, grads), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
