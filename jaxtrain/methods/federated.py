"""Federated rounds: drawn clients train on rows of their own, and the server averages them.

A step of such a run is a round, and its batch is what the drawn clients hold
(:class:`jaxtrain.data.ClientRows`). Each begins with the server's parameters and a new state of the
optimizer, passes over its rows so many times in batches of its own, and what it has come to counts
by the weight of its rows: federated averaging (McMahan et al. 2017,
https://arxiv.org/abs/1602.05629). One pass in one batch is FedSGD. The mean displacement may be a
gradient of an outer optimizer (FedOpt, Reddi et al. 2021, https://arxiv.org/abs/2003.00295), and
clients may be pulled to where they began (FedProx, Li et al. 2020,
https://arxiv.org/abs/1812.06127).

Rounds may be private to a client: ``private`` clips and adds noise to what clients have moved by
(:class:`jaxtrain.methods.clipped_clients.ClippedClients`).

Clients lie on the parts of the mesh axis ``data``, and one device computes all of them one after
another. Sums of whole numbers (``clip``) do not go by an order, so that the mesh changes no bit.

Shapes: C clients of a round, N places for the rows of each, B rows of a batch, K steps.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.data.clients import Partition
from jaxtrain.engines.members import each, own_part, split_like
from jaxtrain.engines.plain import trainable
from jaxtrain.engines.private import numbered
from jaxtrain.host.least import check_least
from jaxtrain.loss import keeps_sums
from jaxtrain.methods.clipped_clients import ClippedClients
from jaxtrain.methods.meeting import (
    Meeting,
    check_apart,
    check_averages,
    check_parts,
    joined,
    mean_by,
    pulled_to,
    with_pull,
)
from jaxtrain.methods.method import Method, Step
from jaxtrain.methods.secure import to_float, to_integers
from jaxtrain.optim import frozen
from jaxtrain.sharding.placement import free_axes
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, is_count, map_named, named_leaves, to_accum_dtype


@dataclasses.dataclass(frozen=True)
class Federated(Meeting):
    """Clients that are drawn for a round, train on rows of their own, and are averaged (FedAvg)."""

    clients: int = 50
    """Number of clients that the rows are dealt to."""
    per_round: int = 5
    """Number of clients that are drawn for a round: a multiple of the mesh axis data, each part of
    which has its own."""
    epochs: int = 1
    """Passes of a client over its rows in a round."""
    partition: Partition = "iid"
    """Rows of a client: iid deals them evenly, shards by two pieces of rows sorted by label,
    dirichlet by shares of each label, and labels makes a client of each (of text: package)."""
    alpha: float = 0.5
    """Concentration of dirichlet: the smaller, the fewer labels a client has."""
    clip: float | None = None
    """Largest change of a number by a client, beyond which it is clipped: changes are summed as
    whole numbers of 32 bits, as secure aggregation sums them. Left out, as floats."""
    flag: ClassVar[str] = "federated"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, clients=1, per_round=1, epochs=1, alpha=1e-6, clip=1e-6)


def federated(
    experiment: Any, how: Federated, *, local_batch: int, private: ClippedClients | None = None
) -> Any:
    """Returns a :class:`jaxtrain.Experiment` of which a step is a round of clients.

    ``params`` of its state are the server's, and the optimizer's state is that which clients begin
    each round with. Metrics of the loss are of all steps of clients that weigh something, and
    others means by weight.

    Args:
      experiment: that of a client's step, but for its batch, which holds the rows of all clients of
        a round: N places for each, of which those without a row of its own have ``mask`` 0.
      how: the round; ``clients``, ``partition`` and ``alpha`` are for who makes the batches.
      local_batch: B, rows of a client's step.
      private: what becomes of clients' updates in place of their mean by weight. A batch may have
        the leaf ``drawn`` of :class:`jaxtrain.data.PoissonClients` then, by which clients draw, and
        those that it numbers 0 count nothing; ``per_round`` is the number that it has room for.

    Raises:
      ValueError: the experiment has a method or model state, keeps averages of parameters, or
        spreads parameters over the axis that clients stand on; or rows do not divide.
    """
    C, outer = how.per_round, how.outer_optimizer()
    check_apart(experiment, "federated.per_round", C)
    if experiment.task.has_model_state:
        raise ValueError(
            f"experiment {experiment.name!r} has model state, such as BatchNorm's statistics, and "
            "clients' batches have places without rows: give a model without it"
        )
    if private is not None and how.clip is not None:
        raise ValueError(
            f"`federated.clip` is {how.clip} and training is private: rounded to whole numbers, an "
            "update may be larger than the noise is for; leave federated.clip out"
        )
    (rows,) = {x.shape[0] for x in jax.tree.leaves(experiment.data.batch) if x.shape}
    if rows // C % local_batch:
        raise ValueError(
            f"`local_batch` is {local_batch} and a client has {rows // C} places: give a divisor"
        )

    def moving(state: TrainState) -> PyTree:
        """The parameters that clients move: to no other is noise added."""
        if private is None:
            return own_part(state.params, frozen(state.opt_state))
        counts = set(filter(is_count, named_leaves(state.params)))
        return trainable(state.params, frozen(state.opt_state) | counts)[0]

    def start(state: TrainState) -> TrainState:
        check_averages(state.opt_state)
        if outer is None:
            return state
        return dataclasses.replace(state, method={"outer": outer.init(moving(state))})

    def federated(step: Step) -> Step:
        client = client_round(step, epochs=how.epochs, local_batch=local_batch)

        def one(member: tuple[jax.Array, jax.Array], *given: PyTree) -> tuple[PyTree, Any]:
            key, number = member
            # Where no device waits for others, clients that are not drawn are not computed.
            if private is None or free_axes(jax.sharding.get_abstract_mesh()):
                return client(key, *given)
            shapes = jax.eval_shape(client, key, *given)
            zeros = lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
            return jax.lax.cond(number > 0, client, zeros, key, *given)

        def federated_round(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
            check_parts("federated.per_round", C)
            key = jax.random.fold_in(state.rng, state.step)
            numbers_C = jnp.arange(C)
            if private is not None:
                numbers, batch = numbered(batch)
                numbers_C = numbers.reshape(C, -1).max(1)
            keys_C = jax.vmap(functools.partial(jax.random.fold_in, key))(numbers_C)
            members = keys_C, numbers_C
            params_C, metrics_CK = each(one, members, batch, state, split=True)
            before = moving(state)
            if private is None:
                new = _joined(how, state, params_C, metrics_CK["weight"].sum(1))
            else:
                after_C, _ = split_like(before, params_C)
                moved_C = to_accum_dtype(jax.tree.map(jnp.subtract, after_C, before))
                mean, told = private(moved_C, numbers_C > 0, key)
                new = jax.tree.map(lambda x, u: x + u.astype(x.dtype), before, mean)
            if outer is not None:
                displaced = jax.tree.map(jnp.subtract, before, new)
                updates, kept = outer.update(displaced, state.method["outer"], before)
                new = optax.apply_updates(before, updates)
                state = dataclasses.replace(state, method={"outer": kept})
            metrics = joined(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), metrics_CK))
            if private is not None:  # a run may end by the number of steps that are left out
                metrics |= told | {"skipped": jnp.zeros_like(metrics["skipped"])}
            now = {"step": state.step + 1, "skipped": state.skipped + metrics["skipped"]}
            return dataclasses.replace(state, params=combine(new, state.params), **now), metrics

        return federated_round

    own = {}
    if how.proximal:
        own["optimizer"] = with_pull(experiment.optimizer, how.proximal)
    check = None if private is None else private.check
    return experiment.with_(method=Method(federated, start=start, check=check), **own)


def client_round(step: Step, *, epochs: int, local_batch: int) -> Any:
    """Returns ``client(key, rows, state) -> (params, metrics)``: what one client does in a round.

    It takes a key, rows [N, ...] and the server's state, and returns the parameters that train, and
    the metrics of all steps [K, ...]. Rows without weight come last: all batches but one are whole.
    """

    def client(key: jax.Array, rows: PyTree, state: TrainState) -> tuple[PyTree, Any]:
        # XLA's partitioner aborts on a lookup in split rows within a shard_map.
        if free_axes(jax.sharding.get_abstract_mesh()):
            rows = jax.lax.with_sharding_constraint(rows, P())
        order_key, key = jax.random.split(key)
        (N,) = {x.shape[0] for x in jax.tree.leaves(rows) if x.shape}
        mask = rows.get("mask") if isinstance(rows, dict) else None
        counts_N = jnp.ones(N, bool) if mask is None else (mask.reshape(N, -1) != 0).any(1)

        def order(key: jax.Array) -> jax.Array:
            draws_N = jnp.where(counts_N, jax.random.uniform(key, (N,)), 2.0)
            return jnp.argsort(draws_N).reshape(-1, local_batch)

        def local(state: TrainState, places_B: jax.Array) -> tuple[TrainState, Any]:
            return step(state, jax.tree.map(lambda x: x[places_B] if jnp.ndim(x) else x, rows))

        orders_KB = jax.vmap(order)(jax.random.split(order_key, epochs)).reshape(-1, local_batch)
        begun = dataclasses.replace(state, step=jnp.zeros_like(state.step), rng=key, method=None)
        with pulled_to(state.params), keeps_sums(True):
            after, metrics_K = jax.lax.scan(local, begun, orders_KB)
        return own_part(after.params, frozen(state.opt_state)), metrics_K

    return client


def _joined(how: Federated, state: TrainState, params_C: PyTree, weight_C: jax.Array) -> PyTree:
    """The mean of the clients' parameters by weight."""
    if how.clip is None:
        return jax.tree.map(mean_by(weight_C), params_C)
    C, most, total = len(weight_C), jnp.abs(weight_C).max(), weight_C.sum()
    share_C = weight_C / jnp.where(most > 0, most, 1.0)
    scale = jnp.where(total != 0, most / jnp.where(total != 0, total, 1.0), 0.0)
    before = named_leaves(state.params)

    def mean(name: str, x: jax.Array) -> jax.Array:
        moved = jnp.clip((x - before[name]).astype(jnp.float32), -how.clip, how.clip)
        moved *= share_C.reshape(C, *[1] * (x.ndim - 1))
        total = to_integers(moved, clip=how.clip, clients=C).sum(0, dtype=jnp.uint32)
        return before[name] + (to_float(total, clip=how.clip, clients=C) * scale).astype(x.dtype)

    return map_named(mean, params_C)
