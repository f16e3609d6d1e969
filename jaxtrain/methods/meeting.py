"""What local updates and federated rounds share: an outer optimizer, means by weight, and a pull
towards the parameters of the last meeting.

Shapes: R replicas or clients.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.engines.members import AXIS, at, check_engine, parts_of
from jaxtrain.host.least import check_least
from jaxtrain.loss import SUMS
from jaxtrain.methods.method import Method, within
from jaxtrain.optim.averages import keeps_averages
from jaxtrain.sharding.placement import free_axes, sizes_are_final
from jaxtrain.tree import PyTree, map_named, named_leaves

Outer = Literal["average", "sgd", "nesterov", "adam", "yogi"]
RATES = {"average": 1.0, "sgd": 1.0, "nesterov": 0.7, "adam": 0.01, "yogi": 0.01}
_anchor: contextvars.ContextVar[PyTree] = contextvars.ContextVar("anchor", default=None)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What becomes of parameters that several have trained by themselves."""

    outer: Outer = "average"
    """Optimizer of the mean displacement: average takes the plain mean, nesterov is DiLoCo's,
    adam and yogi are FedOpt's."""
    rate: float | None = None
    """Learning rate of the outer optimizer; left out, 1 (sgd), 0.7 (nesterov) or 0.01 (adam,
    yogi)."""
    momentum: float = 0.9
    """Momentum of nesterov."""
    proximal: float = 0.0
    """Strength of a pull towards the parameters of the last meeting (FedProx)."""
    flag: ClassVar[str] = "meeting"

    def __post_init__(self) -> None:
        check_least(self, proximal=0, rate=0, momentum=0)
        if self.momentum >= 1:
            raise ValueError(f"`{self.flag}.momentum` is {self.momentum}: give less than 1")
        if self.outer != "nesterov" and self.momentum != type(self).momentum:
            raise ValueError(
                f"`{self.flag}.momentum` is {self.momentum} and `{self.flag}.outer` {self.outer}, "
                "which has none: give nesterov, or leave it out"
            )
        if self.outer == "average" and self.rate is not None:
            raise ValueError(
                f"`{self.flag}.rate` is {self.rate} and `{self.flag}.outer` average, which has no "
                "rate: give sgd, nesterov, adam or yogi"
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


def check_apart(experiment: Any, flag: str, R: int) -> None:
    """Raises ValueError where so many cannot train an experiment each by itself.

    ``flag`` is the name of their number, and the rows of a batch are theirs in equal parts.
    """
    if experiment.method != Method():
        raise ValueError(
            f"`{flag}` is given and the experiment has a method of its own: leave one out"
        )
    check_engine(experiment)
    if experiment.layout.zero:
        raise ValueError(
            f"`zero` is {experiment.layout.zero}, which spreads what each of `{flag}` {R} has of "
            "its own over the axis that they stand on: spread it over fsdp"
        )
    if experiment.layout.offload_optimizer:
        raise ValueError(
            f"`offload_optimizer` is given and the optimizer's state is that of each of `{flag}` "
            f"{R}, which stays on its devices: leave it out"
        )
    rows = {x.shape[0] for x in jax.tree.leaves(experiment.data.batch) if x.shape}
    if len(rows) > 1:
        raise ValueError(
            f"`{flag}` is {R} and leaves of a batch have {min(rows)} and {max(rows)} rows: each "
            "must have as many, or be a scalar; repeat it for every row, or let the loss function "
            "close over it"
        )
    cuts = R * experiment.layout.microbatches(experiment.layout.mesh.pipe)
    if left := [n for n in rows if n % cuts]:
        raise ValueError(
            f"`{flag}` is {R} and a batch has {left[0]} rows, which they share and take in "
            f"{cuts // R} microbatches: give a multiple of {cuts} rows"
        )


def check_averages(opt_state: PyTree) -> None:
    """Raises ValueError where an optimizer keeps averages of the parameters."""
    if keeps_averages(opt_state):
        raise ValueError(
            "the optimizer keeps averages of the parameters, which replicas would each have of "
            "their own: leave --optimizer.ema out; where replicas meet they are averaged too"
        )


def joined(metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Metrics of all replicas, or steps: means by weight, sums of weights and of what was left out,
    and what a loss reports by the sums of all that count, where they were kept."""
    metrics, weight_R = dict(metrics), metrics["weight"]
    losses_R = metrics.pop(SUMS, None)
    if len(weight_R) == 1:
        return at(metrics, 0)
    found = jax.tree.map(mean_by(weight_R), metrics)
    found |= {name: metrics[name].sum(0) for name in ("weight", "skipped")}
    if losses_R is None:
        return found
    counts = lambda x: jnp.where((weight_R != 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0)  # noqa: E731
    losses_R = jax.tree.map(counts, losses_R)
    add = lambda total, loss: (total + loss, None)  # noqa: E731
    # A cut that leaves out the first would be sent between devices.
    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), losses_R)
    loss, _ = jax.lax.scan(add, nothing, losses_R)
    return found | {name: x for name, x in loss.means().items() if name != "loss"}


def check_parts(flag: str, R: int) -> None:
    """Raises ValueError where the mesh that is traced does not split so many evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS in free_axes(mesh) and sizes_are_final() and parts_of(R) == 1:
        raise ValueError(
            f"`{flag}` is {R} and mesh axis {AXIS!r} has size {mesh.shape[AXIS]}: "
            "give a multiple of it, so that each part has its own"
        )


def mean_by(weight_R: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns the mean of arrays [R, ...] by weight."""
    return lambda x: shares_by(weight_R)(x).sum(0)


def shares_by(weight_R: jax.Array) -> Callable[[jax.Array], jax.Array]:
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


def pulled_to(anchor: PyTree) -> AbstractContextManager[None]:
    """Optimizers of :func:`with_pull` that are traced within pull towards these parameters."""
    return within(_anchor, anchor)


def with_pull(optimizer: Any, strength: float) -> Any:
    """An optimizer that is given the gradient of ``strength / 2 |x - anchor|^2`` besides."""
    if not isinstance(optimizer, optax.GradientTransformation):
        return lambda stack: with_pull(optimizer(stack), strength)
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        now, then = named_leaves(params), named_leaves(_anchor.get())

        def pull(name: str, g: jax.Array) -> jax.Array:
            return g + strength * (now[name] - then[name]).astype(g.dtype)

        # What a mask leaves out of the gradients has no leaf there.
        return inner.update(map_named(pull, grads), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
