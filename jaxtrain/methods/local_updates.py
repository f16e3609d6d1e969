"""Local updates: replicas that train by themselves and meet every so many steps.

Each replica has its own rows of every batch, parameters and optimizer state. Where replicas meet,
what they have come to is averaged, by the weights of the batches that they saw, and the mean
displacement is a gradient of the outer optimizer. Federated averaging (McMahan et al. 2017,
https://arxiv.org/abs/1602.05629) averages alone, DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105) has Nesterov's momentum outside, FedOpt (Reddi et al. 2021,
https://arxiv.org/abs/2003.00295) adam or yogi, FedProx (Li et al. 2020,
https://arxiv.org/abs/1812.06127) a pull towards the parameters of the last meeting, and streaming
DiLoCo (Douillard et al. 2025, https://arxiv.org/abs/2501.18512) a part of the parameters at a time,
whose exchange is used some steps later.

The number of replicas is part of the mathematics, and the mesh is not: each part of the mesh axis
``data`` has its own replicas, and one device computes all of them one after another.

Shapes: R replicas.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.compressed import INT8, exchanged, two_stages, whole
from jaxtrain.engines.members import AXIS, at, each, own_part, split_like
from jaxtrain.host.least import check_least, given
from jaxtrain.loss import keeps_sums
from jaxtrain.methods.meeting import (
    Meeting,
    check_apart,
    check_averages,
    check_parts,
    joined,
    mean_by,
    pulled_to,
    shares_by,
    with_pull,
)
from jaxtrain.methods.method import Method, Step
from jaxtrain.ops.attention import branch_shares
from jaxtrain.optim import frozen
from jaxtrain.sharding.placement import specs_of
from jaxtrain.sharding.stack import Stack, of_model
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, map_named, named_leaves, owner_of, path_name

# Share of what a replica has come to, where what a meeting gives is taken up late.
MIX = 0.5


@dataclasses.dataclass(frozen=True)
class Local(Meeting):
    """Replicas that train by themselves and meet every so many steps (local SGD, DiLoCo)."""

    replicas: int | None = None
    """Number of replicas, which share the rows of a batch: a multiple of the mesh axis data, each
    part of which has its own; left out, there are none."""
    every: int = 50
    """Steps from one meeting of the replicas to the next; they meet after the last step too."""
    after: int = 0
    """Number of first steps that replicas meet after each of, before they meet after every so many
    (post-local SGD)."""
    fragments: int = 1
    """Number of parts of the parameters, which meet at different steps, each after every so many:
    the largest exchange is then so many times smaller."""
    bits: Literal[8, 32] = 32
    """Bits of each number that a meeting sends: 8 rounds what each replica has moved by to 255
    levels of a piece's largest, and what that comes to again."""
    delay: int = 0
    """Number of steps after which the result of a meeting is taken up, half and half with what a
    replica has come to by then (the overlap of streaming DiLoCo)."""
    inner: Literal["kept", "reset"] = "kept"
    """State of a replica's own optimizer after a meeting: kept, or as at the beginning, except the
    count of its schedule."""
    flag: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        check_least(self, replicas=1, every=1, after=0, fragments=1, delay=0)
        if (typed := given(self)) and self.replicas is None:
            name, value = next(iter(typed.items()))
            raise ValueError(
                f"`local.{name}` is {value} and there are no replicas: give `local.replicas` too"
            )
        super().__post_init__()
        if self.fragments > self.every:
            raise ValueError(
                f"`local.fragments` is {self.fragments} and `local.every` {self.every}: give at "
                "most one fragment for each step"
            )
        if self.inner == "reset" and self.fragments > 1:
            raise ValueError(
                f"`local.inner` is reset and `local.fragments` {self.fragments}, which meet at "
                "different steps and share the counts of an optimizer: give 1 fragment, or kept"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"`local.delay` is {self.delay} and `local.every` {self.every}: a meeting ends "
                "before the next one; give fewer steps than from one to the next"
            )


def local_updates(experiment: Any, local: Local) -> Any:
    """Returns a :class:`jaxtrain.Experiment` whose replicas each take a step, and meet in time.

    ``params`` and ``model_state`` of its state are those of the last meeting, which are evaluated,
    exported and sampled. A replica's key differs from the others', but for a single one. Metrics
    of the loss are of all replicas whose rows weigh something, and others means by weight.

    With one replica and the mean the bits are those of the plain step. With several, ``every`` 1,
    an inner rule without a state and the mean they are data parallel training, to rounding.

    Raises:
      ValueError: the experiment has a method already, keeps averages of parameters, or spreads
        parameters over the axis that replicas stand on.
    """
    if local.replicas is None:
        return experiment
    check_apart(experiment, "local.replicas", local.replicas)
    R, outer = local.replicas, local.outer_optimizer()

    def start(state: TrainState) -> TrainState:
        check_averages(state.opt_state)
        own = own_part(state.params, frozen(state.opt_state))
        alike = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (R, *x.shape)), dataclasses.replace(state, params=own)
        )
        keys = jax.vmap(lambda i: jax.random.fold_in(state.rng, i))(jnp.arange(R))
        # A single one draws as the run without replicas does.
        members = dataclasses.replace(alike, rng=alike.rng if R == 1 else keys)
        method = {"members": members, "weight": jnp.zeros((R, local.fragments))}
        pieces = _pieces(own, experiment.stack, local.fragments)
        if outer is not None:
            method["outer"] = [outer.init(_take(own, piece)) for piece in pieces]
        if local.delay:
            method["coming"] = [_take(own, piece) for piece in pieces]
            method["sent"] = jnp.zeros(local.fragments, bool)
        rest = {"opt_state": (), "loss_scale": None, "memory": None}
        return dataclasses.replace(state, **rest, method=method)

    def after(meeting: Callable[[TrainState], TrainState]) -> Callable[[TrainState], TrainState]:
        if local.inner == "kept":
            return meeting

        def begun_anew(state: TrainState) -> TrainState:
            state = meeting(state)
            with of_model((experiment.stack, False)):
                fresh = experiment.laid.optimizer.init(state.params)
            members = state.method["members"]
            opt_state = _anew(members.opt_state, fresh, state.params)
            members = dataclasses.replace(members, opt_state=opt_state)
            return dataclasses.replace(state, method=state.method | {"members": members})

        return begun_anew

    def regroup(state: TrainState, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        then = shapes.get("method/weight", (R,))[0]
        if then == R:
            return None

        def as_saved(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            mesh, spec = x.sharding.mesh, x.sharding.spec
            spec = spec if then % mesh.shape[AXIS] == 0 else P(None, *spec[1:])
            place = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct((then, *x.shape[1:]), x.dtype, sharding=place)

        def change(saved: TrainState) -> TrainState:
            """All begin where they last met; a count of an optimizer is the first replica's."""
            count_or_mean = lambda x: (  # noqa: E731
                x.mean(0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
            )
            of_all = saved.method["members"]
            one = at(dataclasses.replace(of_all, opt_state=None, params=None), 0)
            opt_state = jax.tree.map(count_or_mean, of_all.opt_state)
            one = dataclasses.replace(one, opt_state=opt_state, params=saved.params)
            began = start(dataclasses.replace(one, model_state=saved.model_state, rng=saved.rng))
            kept = {name: saved.method[name] for name in saved.method if name == "outer"}
            return dataclasses.replace(saved, method=began.method | kept)

        kept = state.method
        of_all = jax.tree.map(as_saved, (kept["members"], kept["weight"]))
        kept = kept | dict(zip(("members", "weight"), of_all, strict=True))
        return dataclasses.replace(state, method=kept), change

    def local_updates(step: Step) -> Step:
        def one(member: TrainState, batch: PyTree, shared: PyTree) -> tuple[TrainState, Any]:
            with pulled_to(shared), keeps_sums(True):
                full = dataclasses.replace(member, params=combine(member.params, shared))
                after, metrics = step(full, batch)
            params, _ = split_like(member.params, after.params)
            return dataclasses.replace(after, params=params), metrics

        def all_replicas(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
            check_parts("local.replicas", R)
            kept = state.method
            members, metrics = each(one, kept["members"], batch, state.params, split=True)
            weight = kept["weight"] + metrics["weight"][:, None]
            metrics = joined(metrics)
            now, kept = state.step + 1, kept | {"members": members, "weight": weight}
            skipped = state.skipped + metrics["skipped"]
            state = dataclasses.replace(state, step=now, skipped=skipped, method=kept)
            pieces = _pieces(at(members.params, 0), experiment.stack, local.fragments)
            for number, piece in enumerate(pieces):
                turn = now + number * local.every // local.fragments
                at_once = (now <= local.after) | (now == experiment.steps)
                is_time = turn % local.every == 0
                of = (number, piece, local)
                meet, same = after(functools.partial(_meet, *of)), lambda state: state
                with branch_shares(local.every - 1, 1):
                    if not local.delay:
                        state = jax.lax.cond(at_once | is_time, meet, same, state)
                        continue
                    comes = at_once | ((turn - local.delay) % local.every == 0)
                    comes &= kept["sent"][number]
                    take = after(functools.partial(_take_up, *of))
                    state = jax.lax.cond(comes, take, same, state)
                which = jnp.where(at_once, 2, is_time.astype(int))
                with branch_shares(local.every - 1, 1, 0):
                    ways = same, functools.partial(_send, *of), meet
                    state = jax.lax.switch(which, ways, state)
            return state, metrics

        return all_replicas

    own = {"method": Method(local_updates, start=start, regroup=regroup, every=local.every)}
    if local.proximal:
        own["optimizer"] = with_pull(experiment.optimizer, local.proximal)
    return experiment.with_(**own)


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
    return {
        name: leaves[name] if cut == slice(None) else leaves[name][(*front, cut)]
        for name, cut in piece.items()
    }


def _put(params: PyTree, piece: Piece, values: Mapping[str, jax.Array], *, lead: int = 0) -> PyTree:
    """Parameters with other values in a piece, broadcast over the axes before a parameter's own."""

    def put(name: str, x: jax.Array) -> jax.Array:
        if name not in piece:
            return x
        new = values[name].astype(x.dtype)
        new = jnp.broadcast_to(new, (*x.shape[:lead], *new.shape[new.ndim - x.ndim + lead :]))
        if piece[name] == slice(None):
            return new
        return jax.lax.dynamic_update_slice_in_dim(x, new, piece[name].start, lead)

    return map_named(put, params)


def _anew(states: PyTree, fresh: PyTree, params: PyTree) -> PyTree:
    """States [R, ...] of an optimizer in which each node that has numbers of parameters is fresh,
    with its counts; a schedule, which has none, goes on."""

    def node(path: tuple) -> tuple:
        fields = [i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)]
        return path[: fields[-1]] if fields else path

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(fresh)]
    names = named_leaves(params)
    moments = {node(path) for path in paths if owner_of(path_name(path), names) is not None}
    pick = lambda path, x, new: jnp.broadcast_to(new, x.shape) if node(path) in moments else x  # noqa: E731
    return jax.tree_util.tree_map_with_path(pick, states, fresh)


def _meet(number: int, piece: Piece, local: Local, state: TrainState) -> TrainState:
    """Takes a piece of the replicas' parameters through the outer optimizer, back to all of them;
    the model's state with the first."""
    met = _mean(number, piece, local, state)
    return _update(number, piece, local, state, met, lambda new, own: new)


def _send(number: int, piece: Piece, local: Local, state: TrainState) -> TrainState:
    """Keeps the mean of a piece of the replicas' parameters until it is taken up."""
    kept = dict(state.method)
    kept["coming"] = list(kept["coming"])
    kept["coming"][number] = _mean(number, piece, local, state)
    kept["sent"] = kept["sent"].at[number].set(True)
    kept["weight"] = kept["weight"].at[:, number].set(0)
    return dataclasses.replace(state, method=kept)


def _take_up(number: int, piece: Piece, local: Local, state: TrainState) -> TrainState:
    """Takes a mean through the outer optimizer, and mixes with it what replicas have come to."""
    weight, met = state.method["weight"], state.method["coming"][number]
    mix = lambda new, own: MIX * own + (1 - MIX) * new  # noqa: E731
    state = _update(number, piece, local, state, met, mix)
    # The steps since then count for the next meeting.
    kept = state.method | {"weight": weight, "sent": state.method["sent"].at[number].set(False)}
    return dataclasses.replace(state, method=kept)


def _mean(number: int, piece: Piece, local: Local, state: TrainState) -> dict[str, jax.Array]:
    """The mean, by weight, of a piece of the replicas' parameters: what a meeting sends."""
    shares, members = shares_by(state.method["weight"][:, number]), state.method["members"]
    there, before = _take(members.params, piece, lead=1), _take(state.params, piece)
    # Some of the layers do not divide over pipe as all do.
    specs = specs_of(state.params) or {}
    cut = [name for name in piece if piece[name] != slice(None)]
    specs |= {name: P(None, *specs[name][1:]) for name in cut if name in specs}
    if local.bits == 32:
        return exchanged(whole, jax.tree.map(shares, there), specs=specs)[0]
    moved = jax.tree.map(lambda x, then: shares(x - then), there, before)
    total = exchanged(functools.partial(two_stages, INT8), moved, specs=specs)[0]
    return jax.tree.map(lambda x, by: x + by.astype(x.dtype), before, total)


def _update(
    number: int,
    piece: Piece,
    local: Local,
    state: TrainState,
    met: dict[str, jax.Array],
    taken: Callable[[jax.Array, jax.Array], jax.Array],
) -> TrainState:
    """Takes a piece's mean through the outer optimizer; a replica takes ``taken(new, own)``."""
    kept, members, outer = dict(state.method), state.method["members"], local.outer_optimizer()
    new, before = met, _take(state.params, piece)
    if outer is not None:
        displaced = jax.tree.map(jnp.subtract, before, met)
        kept["outer"] = list(kept["outer"])
        updates, kept["outer"][number] = outer.update(displaced, kept["outer"][number], before)
        new = optax.apply_updates(before, updates)
    model_state, own = state.model_state, members.model_state
    if number == 0:
        mean = mean_by(kept["weight"][:, number])
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
        model_state = jax.tree.map(lambda x: mean(x) if inexact(x) else x[0], own)
        own = jax.tree.map(lambda x, m: jnp.broadcast_to(m, x.shape), own, model_state)
    there = _take(members.params, piece, lead=1)
    params = _put(members.params, piece, jax.tree.map(taken, new, there), lead=1)
    kept["members"] = dataclasses.replace(members, params=params, model_state=own)
    kept["weight"] = kept["weight"].at[:, number].set(0)
    params = _put(state.params, piece, new)
    return dataclasses.replace(state, params=params, model_state=model_state, method=kept)
