"""A population: several trainings in one program, which share what does not train.

Members differ in numbers of the optimizer, in seeds, and in the ranks and strengths of low-rank
additions. All see the same batches. Each computes what it would alone, to rounding: its numbers
are data to the program, and no constants that the compiler knows.

A population may be trained as Jaderberg et al. 2017 do (https://arxiv.org/abs/1711.09846): every so
many steps the best members take the place of the worst, with numbers of their own
(:func:`exploit`), and :func:`lineage` says of what segments a member's training was made.

Shapes: P members, E exploits.
"""

import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.engines.members import Together, at, check_engine, each, own_part, split_like
from jaxtrain.host.least import check_least
from jaxtrain.methods.method import Method, within
from jaxtrain.ops.attention import branch_shares
from jaxtrain.optim import frozen
from jaxtrain.sharding.stack import Stack
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, map_named, named_leaves

# What metrics of all members are called, and the number of the best in an evaluation.
ALL, BEST = "members/", "best/member"
# The member that each has copied last, and the flags of its optimizer's numbers, among metrics.
PARENT, FLAG = f"{ALL}parent", "optimizer."
# The part of the members that is copied over as many, and what their numbers are multiplied by.
QUARTER, FACTORS = 4, (0.8, 1.25)
_numbers: contextvars.ContextVar[Mapping[str, Any] | None]
_numbers = contextvars.ContextVar("numbers", default=None)


@dataclasses.dataclass(frozen=True)
class Population:
    """Several trainings in one program: of additions over one frozen model, or of whole models."""

    size: int | None = None
    """Number of members: a multiple of the combinations that vary gives, each of which then has so
    many seeds, from --seed on; left out, their number."""
    vary: tuple[str, ...] = ()
    """Flags of numbers and their values, as in lora.rank=4,8 optimizer.learning_rate=1e-4,3e-4;
    log:1e-4:1e-1:7 is seven numbers, equal factors apart. Members have all combinations. The flag
    seed is that of additions and dropout alone."""
    together: Together = "map"
    """Whether a device computes its members one after another, or all at once. A mesh axis data of
    which their number is a multiple has some of them on each part."""
    exploit_every: int | None = None
    """Number of steps between copies of members: the quarter with the lowest training loss of these
    steps is copied over the worst quarter, and the copies' varied numbers of the optimizer are
    multiplied by 0.8 or 1.25; left out, no member is copied."""

    def __post_init__(self) -> None:
        check_least(self, exploit_every=1)

    def members(self, seed: int = 0) -> list[dict[str, float]]:
        """Returns the flags of each member.

        Raises:
          ValueError: they cannot be read, or make another number of members.

        >>> Population(size=4, vary=("lora.rank=4,8",)).members()[1:3]
        [{'lora.rank': 4, 'seed': 1}, {'lora.rank': 8, 'seed': 0}]
        """
        values: dict[str, list[float]] = {}
        for text in self.vary:
            name, _, words = text.partition("=")
            try:
                found = _spread(words) if words.startswith("log:") else _listed(words)
            except ValueError:
                found = []
            if not found or name in values:
                raise ValueError(
                    f"`population.vary` has {text!r}: write each flag once, with its numbers, as "
                    "in optimizer.learning_rate=1e-4,3e-4 or log:1e-4:1e-1:7"
                )
            values[name] = found
        count = math.prod(map(len, values.values()))
        size = count if self.size is None else self.size
        if size < 1 or size % count or ("seed" in values and size != count):
            raise ValueError(
                f"`population.size` is {size}, and `population.vary` makes {count} members: give "
                + ("that" if "seed" in values else f"a multiple of {count}")
            )
        if "seed" not in values:
            values["seed"] = list(range(seed, seed + size // count))
        return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


class Member(NamedTuple):
    """A member: the ``init_fn`` of its training alone, the seed of that, the numbers that its
    optimizer has, and its flags for reports."""

    init_fn: Callable[[jax.Array], PyTree]
    seed: int
    numbers: Mapping[str, float]
    flags: Mapping[str, float] = {}


def follow(make: Callable[..., optax.GradientTransformation]) -> Callable[[Stack], Any]:
    """Returns an optimizer of an experiment whose numbers are those of the member that is traced:
    ``make(stack, **numbers)`` is called anew for each."""

    def optimizer(stack: Stack) -> optax.GradientTransformationExtraArgs:
        def now() -> optax.GradientTransformationExtraArgs:
            return optax.with_extra_args_support(make(stack, **_numbers.get() or {}))

        return optax.GradientTransformationExtraArgs(
            lambda params: now().init(params),
            lambda updates, state, params=None, **extra: now().update(
                updates, state, params, **extra
            ),
        )

    return optimizer


def populate(
    experiment: Any,
    members: Sequence[Member],
    *,
    together: Together = "map",
    exploit_every: int | None = None,
) -> Any:
    """Returns an :class:`jaxtrain.Experiment` that trains all members at once.

    Where the mesh axis ``data`` divides their number, each part has its own members, which see the
    whole batch; nothing is sent between them but the losses. Otherwise it splits the batch.

    Args:
      experiment: that of one member, whose parameters have the largest shapes of all; members with
        smaller ones have zeros behind, which additions keep: both factors are 0 there. What its
        optimizer freezes is there once; its optimizer is one of :func:`follow`.
      together: ``"map"`` or ``"vmap"``.
      exploit_every: steps from one :func:`exploit` to the next; None for none. It comes before the
        step, and never after the last.

    Metrics are those of the member with the least loss, and ``members/NAME`` of all; an evaluation
    chooses by the experiment's ``best_metric``, and ``best/member`` is the number. Where members
    are copied, ``members/parent`` are the last parents and ``members/optimizer.NAME`` the numbers
    that the step had: what :func:`lineage` reads.

    Raises:
      ValueError: the experiment has a method already, or a single member is to be copied.
    """
    inner = experiment.method
    if inner != Method() and not inner.of_members:
        raise ValueError(
            "a population is given and the experiment has a method of its own, such as replicas of "
            "local updates: leave one out"
        )
    check_engine(experiment)
    if exploit_every is not None and len(members) < 2:
        raise ValueError(
            f"`population.exploit_every` is {exploit_every} and there is 1 member, which has none "
            "to copy: give `population.size` or `population.vary` for more, or leave it out"
        )
    run = functools.partial(each, split=False, together=together)
    given = named_leaves(experiment.task.params()) if experiment.task.params else {}
    metadata, cast = experiment.metadata, experiment.policy.cast_to_param
    prefix, sign = experiment.deciding_set or "", {"min": 1, "max": -1}[metadata.best_mode]
    P, derive, chosen = len(members), metadata.derived, metadata.best_metric.removeprefix(prefix)

    def start(state: TrainState) -> TrainState:
        own = own_part(state.params, frozen(state.opt_state))

        def begun(member: Member) -> tuple[PyTree, jax.Array]:
            init_rng, rng = jax.random.split(jax.random.key(member.seed))
            made = member.init_fn(init_rng)
            made = made[0] if experiment.task.has_model_state else made
            drawn = named_leaves(cast(made))
            if missing := sorted(named_leaves(own).keys() - drawn.keys() - given.keys()):
                raise ValueError(
                    f"members of the population draw no {missing[0]!r}, which the experiment has: "
                    "make the population last, of the model that is trained"
                )

            def leaf(path: str, x: jax.Array) -> jax.Array:
                if path in given:
                    return x
                wider = [(0, n - m) for n, m in zip(x.shape, drawn[path].shape, strict=True)]
                return jnp.pad(drawn[path], wider) if wider else drawn[path]

            return map_named(leaf, own), rng

        params, rngs = zip(*map(begun, members), strict=True)
        alike = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (P, *x.shape)), dataclasses.replace(state, params=None)
        )
        stack = lambda *x: jnp.stack(x)  # noqa: E731
        own = dataclasses.replace(alike, params=jax.tree.map(stack, *params), rng=stack(*rngs))
        own = own if inner.start is None else jax.vmap(inner.start)(own)
        names = members[0].numbers
        numbers = {name: jnp.float32([m.numbers[name] for m in members]) for name in names}
        rest = {"opt_state": (), "loss_scale": None, "memory": None}
        rest["method"] = {"members": own, "numbers": numbers}
        if exploit_every is not None:
            rest["method"] |= {"losses": jnp.zeros((P, 2)), "parent": jnp.arange(P)}
        first = combine(at(own.params, 0), state.params)
        return dataclasses.replace(state, params=first, **rest)

    def population(step: Callable) -> Callable:
        step = inner.step(step)

        def all_members(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
            def one(member: Mapping[str, Any], batch: PyTree, shared: PyTree) -> Any:
                before = member["members"]
                whole = dataclasses.replace(before, params=combine(before.params, shared))
                with numbers_of(member["numbers"]):
                    after, metrics = step(whole, batch)
                params, _ = split_like(before.params, after.params)
                return dataclasses.replace(after, params=params), metrics

            kept = state.method
            if exploit_every is not None:
                is_time = (state.step > 0) & (state.step % exploit_every == 0)
                key = jax.random.fold_in(jax.random.key(experiment.seed), state.step)
                with branch_shares(exploit_every - 1, 1):
                    kept = jax.lax.cond(is_time, exploit, lambda kept, _: kept, kept, key)
            pairs = {name: kept[name] for name in ("members", "numbers")}
            own, metrics = run(one, pairs, batch, state.params)
            kept = kept | {"members": own}
            best = jnp.argmin(jnp.where(jnp.isfinite(metrics["loss"]), metrics["loss"], jnp.inf))
            scalars = {f"{ALL}{name}": x for name, x in metrics.items() if x.ndim == 1}
            # One that diverges leaves its own steps out, and no other's.
            losses = metrics["loss"]
            metrics = at(metrics, best) | scalars | {"skipped": metrics["skipped"].min()}
            if exploit_every is not None:
                # The loss of a step that is left out, for an overflow of its scale say, is NaN.
                made = jnp.isfinite(losses)
                kept["losses"] += jnp.stack([jnp.where(made, losses, 0), made], -1)
                metrics |= {f"{ALL}{FLAG}{name}": x for name, x in kept["numbers"].items()}
                metrics[PARENT] = kept["parent"]
            state = dataclasses.replace(
                state,
                step=state.step + 1,
                params=combine(at(own.params, 0), state.params),
                method=kept,
                skipped=state.skipped + metrics["skipped"],
            )
            return state, metrics

        return all_members

    def evaluation(step: Callable) -> Callable:
        def of_all(state: TrainState, batch: PyTree) -> Any:
            def one(own: TrainState, batch: PyTree, shared: PyTree) -> Any:
                return step(dataclasses.replace(own, params=combine(own.params, shared)), batch)

            return run(one, state.method["members"], batch, state.params)

        return of_all

    def told(means: Mapping[str, Any]) -> dict[str, Any]:
        if f"{ALL}loss" in means:  # of a train step
            return dict(derive(means))
        count = np.size(means["loss"])
        alone = [{n: np.reshape(x, (count, -1))[i] for n, x in means.items()} for i in range(count)]
        alone = [{n: x.item() if x.size == 1 else x for n, x in each.items()} for each in alone]
        alone = [each | dict(derive(each)) for each in alone]
        scores = [sign * each.get(chosen, each["loss"]) for each in alone]
        best = int(np.argmin(np.where(np.isfinite(scores), scores, np.inf)))
        every = {
            f"{ALL}{n}": np.array([each[n] for each in alone]) for n in alone[0] if n[0] != "_"
        }
        return alone[best] | every | {BEST: float(best)}

    def shown(state: TrainState, means: Mapping[str, Any]) -> tuple[TrainState, Any, list[str]]:
        best = int(means.get(f"{prefix}{BEST}", 0))
        params = jax.jit(lambda own, rest: combine(at(own, best), rest))(
            state.method["members"].params, state.params
        )
        means = dict(means)
        for path in [path for path in means if f"/{ALL}" in f"/{path}"]:
            means[path.replace(ALL, "")] = means[path][best]
        first = "" if exploit_every is None else " at first"
        lines = _table(members, means, prefix, first)
        return dataclasses.replace(state, params=params), means, lines

    own = {"evaluation": evaluation, "shown": shown, "updates": inner.updates}
    method = Method(population, start=start, **own)
    flops = experiment.task.flops_per_step
    own = {"derived": told, "flops_per_step": flops and P * flops}
    return experiment.with_(method=method, **own)


def exploit(kept: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """Copies the best quarter of the members over the worst, and multiplies the copies' numbers by
    0.8 or 1.25.

    Members are in the order of their mean training losses; those that have made no step come last,
    and are not copied. A member that takes another's parameters, optimizer and model state
    keeps its own key: with the same key the two would draw alike.

    Args:
      kept: what a population has in ``TrainState.method``: ``members``, ``numbers``, ``losses``
        (sums, and numbers of steps) and ``parent``, leaves [P, ...].
      key: decides which factor a number is multiplied by.

    Returns:
      The same, with sums of 0 and, as ``parent``, the number of the member that each was copied
      from: its own, where it was not.
    """
    own, losses = kept["members"], kept["losses"]
    P = len(losses)
    count, made = max(1, P // QUARTER), losses[:, 1] > 0
    means = losses[:, 0] / jnp.where(made, losses[:, 1], 1)
    order = jnp.argsort(jnp.where(made, means, jnp.inf), stable=True)
    best, worst = order[:count], order[-count:]
    parent = jnp.arange(P).at[worst].set(jnp.where(made[best], best, worst))
    copied = jax.tree.map(lambda x: x[parent], dataclasses.replace(own, rng=None, skipped=None))
    names, (low, high) = sorted(kept["numbers"]), FACTORS
    rises = jax.random.bernoulli(key, shape=(len(names), P))
    factors = jnp.where(parent == jnp.arange(P), 1, jnp.where(rises, high, low))
    numbers = {n: kept["numbers"][n][parent] * x for n, x in zip(names, factors, strict=True)}
    members = dataclasses.replace(copied, rng=own.rng, skipped=own.skipped)
    start = {"losses": jnp.zeros_like(losses), "parent": parent}
    return {"members": members, "numbers": numbers, **start}


def lineage(parents_EP: Sequence[Sequence[int]], member: int) -> list[int]:
    """Returns the member in whose place each segment of a member's training was: [E + 1] numbers.

    Trained alone in segments, each with the key and the numbers that this member had then, a
    training ends in the same bits.

    >>> lineage([[0, 1, 0], [1, 1, 2]], 0)  # a copy of 1 at the second exploit
    [1, 1, 0]
    """
    line = [member]
    for parent_P in reversed(parents_EP):
        line.append(int(parent_P[line[-1]]))
    return line[::-1]


def numbers_of(numbers: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Sets the numbers, such as traced ones of a member, that an optimizer of :func:`follow` is
    made of within."""
    return within(_numbers, numbers)


def _listed(words: str) -> list[float]:
    return [int(word) if word.isdecimal() else float(word) for word in words.split(",")]


def _spread(words: str) -> list[float]:
    """Reads log:LOW:HIGH:COUNT."""
    _, low, high, count = words.split(":")
    if not 0 < float(low) < float(high) or int(count) < 2:
        raise ValueError(words)
    # To four digits, so that a member's flags are what is typed to train it alone.
    return [float(f"{x:.4g}") for x in np.geomspace(float(low), float(high), int(count))]


def _table(
    members: Sequence[Member], means: Mapping[str, Any], prefix: str, first: str
) -> list[str]:
    """Says what each member has come to, and which is the best."""
    if f"{prefix}{BEST}" not in means:
        return []
    names = list(members[0].flags)
    rows = [["member", *(f"{name}{first}" for name in names), "held-out loss"]]
    losses = means[f"{prefix}{ALL}loss"]
    for number, (member, loss) in enumerate(zip(members, losses, strict=True)):
        rows.append([str(number), *(f"{member.flags[n]:g}" for n in names), f"{loss:.4f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.rjust(n) for x, n in zip(row, widths, strict=True)) for row in rows]
    return [*lines, f"the best is member {int(means[f'{prefix}{BEST}'])}", ""]
