"""Steps that read and write the rows of tables that their batch names, and no other row.

The rows of a table that a batch names, and what the optimizer keeps of them, are taken out first.
The step trains on these as if they were the whole table, with ids that count them, and the new rows
are put back in their places. So the gradient of a table has at most as many rows as the batch has
ids, and all else of a step (norms, clips, microbatches, loss scale, steps that are left out) needs
nothing of its own. The optimizer has to leave a row without gradient as it is, as
:func:`jaxtrain.optim.by_rows` does: then the step is that of whole tables.

A device takes out the rows that lie on it, for which nothing but ids is exchanged;
:func:`jaxtrain.ops.row_exchange.take_rows` exchanges rows, in the loss.

Shapes: V rows of the table, B ids of the batch, N of a device, R devices, C rows that each takes
out.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.methods.method import Method, Step
from jaxtrain.ops.row_exchange import axes_of_rows, distinct, divided, known, on_devices
from jaxtrain.optim.rows import tables_by_rows
from jaxtrain.sharding.placement import constrain
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, map_named, name_of, named_leaves, owner_of


def touched_rows(ids: Mapping[str, Sequence[str]]) -> Method:
    """Returns the method of a loss that reads tables by
    :func:`jaxtrain.ops.row_exchange.take_rows` alone.

    Its steps have no metric ``param_norm``, since nothing reads whole tables.

    Args:
      ids: by the path of each table, the paths of the batch leaves, int32 [B, ...], that are ids of
        its rows. A leaf is of one table.

    Raises:
      ValueError: for an engine that keeps a memory or takes each row of a batch by itself, and
        optimizer state on the host; when a step is traced, for an optimizer that does not update
        the tables row by row, or keeps more of them besides.
    """

    def touched_rows(step: Step) -> Step:
        def on_rows(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
            params, training = named_leaves(state.params), _training(state, ids)
            given, rows = named_leaves(batch), {}
            for table in sorted(training):
                own = {leaf: given[leaf] for leaf in ids[table]}
                rows[table], numbered = _find(len(params[table]), own)
                given |= numbered

            def of_rows(function: Callable[..., Any], *trees: PyTree) -> PyTree:
                def leaf(name: str, *each: jax.Array) -> jax.Array:
                    table = owner_of(name, params)
                    if table not in rows or each[0].shape[:1] != params[table].shape[:1]:
                        return each[-1]
                    return on_devices(axes_of_rows(len(each[0]))[0], function)(rows[table], *each)

                return map_named(leaf, *trees)

            parts = {name: getattr(state, name) for name in ("params", "opt_state")}
            few = {name: of_rows(_taken_out, part) for name, part in parts.items()}
            batch = map_named(lambda name, _: given[name], batch)
            after, metrics = step(dataclasses.replace(state, **few), batch)
            new = {n: of_rows(_put_back, part, getattr(after, n)) for n, part in parts.items()}
            metrics = {name: x for name, x in metrics.items() if name != "param_norm"}
            return dataclasses.replace(after, **new), metrics

        return on_rows

    return Method(touched_rows, check=_check)


def _find(V: int, ids: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Finds the rows that ids name.

    Returns:
      The place on its device of each row that is taken out [R C], from V / R on for none; and ids
      that count these rows, -1 for those that the table lacks.
    """
    axes, R = axes_of_rows(V)

    def of_device(*ids: jax.Array) -> tuple[jax.Array, ...]:
        own_N = jnp.concatenate([x.reshape(-1) for x in ids])
        all_B = jax.lax.all_gather(own_N, axes, tiled=True) if axes else own_N
        found_B, _ = distinct(known(all_B, V), V)
        first_R1 = jnp.searchsorted(found_B, V // R * jnp.arange(R + 1)).astype(jnp.int32)
        C, me = min(len(all_B), V // R), jax.lax.axis_index(axes) if axes else 0
        place_C = first_R1[me] + jnp.arange(C)
        here_C = found_B.at[place_C].get(mode="fill", fill_value=V) - me * (V // R)
        here_C = jnp.where(place_C < first_R1[me + 1], here_C, V // R + jnp.arange(C))
        owner_N = jnp.clip(own_N // (V // R), 0, R - 1)
        number_N = owner_N * C + jnp.searchsorted(found_B, own_N) - first_R1[owner_N]
        number_N = jnp.where(known(own_N, V) < V, number_N, -1).astype(own_N.dtype)
        *ends, _ = itertools.accumulate(x.size for x in ids)
        pieces = zip(jnp.split(number_N, ends), ids, strict=True)
        return here_C, *(x.reshape(like.shape) for x, like in pieces)

    here, *numbered = on_devices(axes, of_device)(*(divided(x, R) for x in ids.values()))
    cut = {leaf: x[: len(ids[leaf])] for leaf, x in zip(ids, numbered, strict=True)}
    return here, {leaf: constrain(x, "batch", *[None] * (x.ndim - 1)) for leaf, x in cut.items()}


def _taken_out(here_C: jax.Array, leaf: jax.Array) -> jax.Array:
    return leaf.at[here_C].get(mode="fill", fill_value=0)


def _put_back(here_C: jax.Array, leaf: jax.Array, rows_C: jax.Array) -> jax.Array:
    sure = {"unique_indices": True, "indices_are_sorted": True}
    return leaf.at[here_C].set(rows_C, mode="drop", **sure)


def _training(state: TrainState, ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Returns the tables that train, all of whose state is of their rows."""
    params, training = named_leaves(state.params), tables_by_rows(state.opt_state)
    if training is None or training - ids.keys() or ids.keys() - params.keys():
        raise ValueError(
            f"`ids` has the tables {', '.join(ids)} and the optimizer updates "
            f"{', '.join(sorted(training or ())) or 'none'} by rows, of the parameters "
            f"{', '.join(params)}: name these tables in jaxtrain.optim.by_rows and in `ids`"
        )
    by_rows = lambda node: getattr(node, "by_rows", False)  # noqa: E731
    for name, leaf in named_leaves(state.opt_state, by_rows).items():
        table = owner_of(name, params)
        if table in training and not by_rows(leaf) and leaf.shape[:1] == params[table].shape[:1]:
            raise ValueError(
                f"the optimizer keeps {name!r} of the table {table!r}, and a step has "
                "the rows that its own batch reads: leave out what keeps it"
            )
    return training


def _check(experiment: Any) -> None:
    engine = experiment.task.engine
    for name, found in (
        (f"engine {name_of(engine.make)}", engine.by_row or engine.init or engine.finish),
        ("offload_optimizer", experiment.layout.offload_optimizer),
    ):
        if found:
            raise ValueError(
                f"`{name}` is given and a step of experiment {experiment.name!r} has the rows of "
                "its tables that its batch reads, not whole gradients and state: leave it out"
            )
