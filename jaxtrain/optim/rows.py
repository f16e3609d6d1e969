"""Rules for tables of which a step reads few rows: a row without gradient stays as it is, exactly.

Shapes: V rows of a table, D width.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim import masks, numerics
from jaxtrain.optim.accumulation import accumulates
from jaxtrain.optim.averages import keeps_averages
from jaxtrain.optim.chains import clip_by_global_norm, deferred
from jaxtrain.optim.reports import nodes
from jaxtrain.tree import named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsState:
    """State of :func:`by_rows`: a sum for each row (None under sgd), and the paths of tables."""

    by_rows: ClassVar[bool] = True  # whatever it keeps of a table is of its rows

    sums: Any
    names: frozenset[str] = dataclasses.field(metadata={"static": True})


def tables_by_rows(opt_state: Any) -> frozenset[str] | None:
    """Returns the paths of the tables that :func:`by_rows` updates; None where it is not in use."""
    found = nodes(opt_state, lambda node: isinstance(node, RowsState))
    return frozenset().union(*(node.names for node in found)) if found else None


def by_rows(
    rest: optax.GradientTransformation,
    tables: masks.Mask,
    learning_rate: float,
    *,
    rule: Literal["adagrad", "sgd"] = "adagrad",
    eps: float = 1e-8,
    clip_norm: float | None = None,
    clip_order: float | Literal["max"] = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Updates tables row by row, and all other parameters by ``rest``.

    Row-wise Adagrad keeps one float32 s for each row w, as in DLRM (Naumov et al. 2019,
    https://arxiv.org/abs/1906.00091): ``s += mean(g^2)``, then ``w -= rate * g / (sqrt(s) + eps)``.

    Args:
      rest: the optimizer of the other parameters, which sees no table.
      tables: the tables [V, D], as a mask of :func:`jaxtrain.make_optimizer`.
      learning_rate: of the tables, a number.
      rule: ``adagrad``, or ``sgd``, which keeps no state.
      eps: added to the root.
      clip_norm, clip_order: as for :func:`jaxtrain.make_optimizer`, with one norm over all
        parameters, the tables too.

    Raises:
      ValueError: for a value out of range, and at ``init`` for a table that is no matrix, and for a
        ``rest`` that makes one update of several gradients or keeps averages of parameters.

    >>> tx = by_rows(optax.sgd(1.0), ("^table$",), 0.5)
    >>> params = {"table": jnp.zeros((2, 2)), "w": jnp.zeros(1)}
    >>> grads = {"table": jnp.array([[3.0, 3.0], [0.0, 0.0]]), "w": jnp.ones(1)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> updates["table"].tolist(), updates["w"].tolist()
    ([[-0.5, -0.5], [-0.0, -0.0]], [-1.0])
    """
    numerics.check_number("learning_rate", learning_rate, low=0.0)
    numerics.check_choice("rule", rule, choices=("adagrad", "sgd"))
    numerics.check_number("eps", eps, low=0.0)
    clip = optax.identity()
    if clip_norm is not None:
        order = math.inf if clip_order == "max" else clip_order
        clip = numerics.in_float32(clip_by_global_norm(clip_norm, order))
    rows = _row_wise(rule, learning_rate, eps)

    def chain_for(params: Any) -> optax.GradientTransformationExtraArgs:
        is_table = masks.resolve("tables", tables, params)
        masks.check_matrices("tables", is_table, params, ())
        others = jax.tree.map(lambda table: not table, is_table)
        return optax.chain(clip, optax.masked(rest, others), optax.masked(rows, is_table))

    def init(params: Any) -> Any:
        state = chain_for(params).init(params)
        for option, found in (("accumulate", accumulates(state)), ("ema", keeps_averages(state))):
            if found:
                raise ValueError(
                    f"`{option}` is given and tables are updated by rows, of which a step has "
                    "those that its own batch reads: leave it out"
                )
        return state

    return optax.GradientTransformationExtraArgs(init, deferred(chain_for).update)


def _row_wise(rule: str, rate: float, eps: float) -> optax.GradientTransformation:
    def init(params: Any) -> RowsState:
        zeros = lambda p: jnp.zeros(len(p), jnp.float32)  # noqa: E731
        sums = jax.tree.map(zeros, params) if rule == "adagrad" else None
        return RowsState(sums, frozenset(named_leaves(params)))

    def factor(s_V: jax.Array) -> jax.Array:
        # A row that never had a gradient has no root, whatever eps is.
        return jnp.where(s_V > 0, rate / (jnp.sqrt(jnp.where(s_V > 0, s_V, 1)) + eps), 0)[:, None]

    def update(grads: Any, state: RowsState, params: Any = None) -> tuple[Any, RowsState]:
        del params
        if rule == "sgd":
            return jax.tree.map(lambda g: (-rate * g).astype(g.dtype), grads), state
        more = lambda s, g: s + jnp.square(g.astype(jnp.float32)).mean(-1)  # noqa: E731
        sums = jax.tree.map(more, state.sums, grads)
        updates = jax.tree.map(lambda g, s: (-factor(s) * g).astype(g.dtype), grads, sums)
        return updates, dataclasses.replace(state, sums=sums)

    return optax.GradientTransformation(init, update)
