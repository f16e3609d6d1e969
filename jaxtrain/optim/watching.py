"""The norm of every layer's gradient, parameters and update, measured inside the step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.masks import Stacked, layer_rows, stacked_axes
from jaxtrain.optim.numerics import check_integer
from jaxtrain.tree import named_leaves

# What is measured, and what is reported of it besides: update_norm / param_norm.
NORMS = ("grad_norm", "param_norm", "update_norm")
RATIO = "update_ratio"

# The name of a stack, or of a parameter outside of stacks, and its number of layers, or None.
Group = tuple[str, int | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchState:
    """State of ``watch``.

    Attributes:
      inner_state: of the optimizer inside.
      count: int32 scalar, updates so far.
      norms: float32 [3, rows], the latest of each of ``NORMS``: the layers of each stack in natural
        order, then the other parameters; 0 before the first update.
      histograms: float32 [3, rows, bins + 1], how many values lie in each of so many equal parts of
        -r to r, and r: the largest magnitude in the row's stack. None without bins.
      groups: what the rows are, in order.
    """

    inner_state: Any
    count: jax.Array
    norms: jax.Array
    histograms: jax.Array | None
    groups: tuple[Group, ...] = dataclasses.field(metadata={"static": True})

    def reports(self) -> dict[str, jax.Array]:
        grad, param, update = (self.norms[..., i, :] for i in range(3))
        told = dict(zip(NORMS, (grad, param, update), strict=True))
        told[RATIO] = jnp.where(update == 0, 0.0, update / jnp.where(update == 0, 1.0, param))
        found, start = {}, 0
        for name, layers in self.groups:
            rows = start if layers is None else slice(start, start + layers)
            found |= {f"{kind}/{name}": values[..., rows] for kind, values in told.items()}
            for i, kind in enumerate(NORMS if self.histograms is not None else ()):
                each = self.histograms[..., i, rows, :]
                found[f"{kind.removesuffix('norm')}histogram/{name}"] = each
            start += layers or 1
        return found


def watch(
    tx: optax.GradientTransformation, every: int, *, bins: int = 0, stacked: Stacked = ()
) -> optax.GradientTransformationExtraArgs:
    """Runs ``tx`` and measures the norms of every layer, in every ``every``-th update.

    They are Euclidean: of the gradients as they come in, of the parameters before the update, and
    of the update. The state reports them (:func:`jaxtrain.optim.reports`), under names such as
    ``grad_norm/blocks`` (a vector [layers], in natural order however a pipeline has cut the stack)
    and ``grad_norm/head/kernel`` (a number, for each parameter outside of stacks); likewise
    ``param_norm``, ``update_norm`` and ``update_ratio``, the update's norm over the parameters': 0
    where nothing is updated, infinite where parameters of norm 0 are. The squares of one kind sum
    to the square of the norm over everything.

    With ``bins``, ``grad_histogram/blocks`` [layers, bins + 1] and so on hold how many values lie
    in each of so many equal parts of -r to r, and r: the largest magnitude in the stack or
    parameter.

    The first update is measured, and every one whose number ``every`` divides. The others cost
    nearly nothing, keep the last values and report those. What ``tx`` returns is unchanged.

    It belongs inside of what accumulates or leaves updates out, as ``make_optimizer(watch_every=)``
    puts it: then it counts updates that are made, and sees their whole gradient.

    Args:
      tx: the optimizer.
      every: updates between two measurements, at least 1.
      bins: parts of the histograms; 0 for none.
      stacked: which leading axes index layers; see :mod:`jaxtrain.optim.masks`.

    Returns:
      The transformation; call ``update(grads, state, params)``, with the parameters.

    Raises:
      ValueError: if ``every`` is no integer of at least 1; for an update without parameters.

    >>> from jaxtrain.optim import reports
    >>> params = {"blocks": {"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])}, "bias": jnp.ones(1)}
    >>> tx = watch(optax.sgd(0.5), every=10, stacked=("^blocks/",))
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> {name: x.tolist() for name, x in reports(state).items() if name.startswith("update")}
    {'update_norm/blocks': [2.5, 1.0], 'update_ratio/blocks': [0.5, 0.5], 'update_norm/bias': 0.5, \
'update_ratio/bias': 0.5}
    """
    every, bins = check_integer("every", every, low=1), check_integer("bins", bins, low=0)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        groups = tuple(_groups(params, stacked))
        rows = sum(layers or 1 for _, layers in groups)
        norms = jnp.zeros((len(NORMS), rows), jnp.float32)
        counts = jnp.zeros((len(NORMS), rows, bins + 1), jnp.float32) if bins else None
        return WatchState(tx.init(params), jnp.zeros([], jnp.int32), norms, counts, groups)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("watch measures the parameters: update(grads, state, params)")
        count = optax.safe_increment(state.count)
        due = (count == 1) | (count % every == 0)

        def measured(kind: int, *trees: Any) -> Any:
            last = (state.norms, state.histograms)
            last = jax.tree.map(lambda x: x[kind : kind + len(trees)], last)

            def measure() -> Any:
                norms = [_norms(tree, state.groups, stacked) for tree in trees]
                if not bins:
                    return jnp.stack(norms), None
                counts = [_histograms(tree, state.groups, stacked, bins) for tree in trees]
                return jnp.stack(norms), jnp.stack(counts)

            return jax.lax.cond(due, measure, lambda: last)

        new_updates, inner = tx.update(updates, state.inner_state, params, **extra)
        before, after = measured(0, updates, params), measured(2, new_updates)
        norms, counts = jax.tree.map(lambda *x: jnp.concatenate(x), before, after)
        return new_updates, WatchState(inner, count, norms, counts, state.groups)

    return optax.GradientTransformationExtraArgs(init, update)


def _groups(params: Any, stacked: Stacked) -> dict[Group, list[str]]:
    """The parameters of each group: stacks first, each by the first word of its paths."""
    axes = named_leaves(stacked_axes(params, stacked))
    rows = named_leaves(layer_rows(params, stacked))
    stacks: dict[Group, list[str]] = {}
    for name in axes:
        if axes[name]:
            stacks.setdefault((name.split("/")[0], len(rows[name])), []).append(name)
    words = [word for word, _ in stacks]
    # Stacks of several depths below one word are told apart by them.
    named = {
        (word if words.count(word) == 1 else f"{word}x{layers}", layers): names
        for (word, layers), names in stacks.items()
    }
    return named | {(name or "params", None): [name] for name in axes if not axes[name]}


def _norms(tree: Any, groups: tuple[Group, ...], stacked: Stacked) -> jax.Array:
    """The Euclidean norm of each row, float32 [rows]."""
    leaves, members = named_leaves(tree), _groups(tree, stacked)
    axes, rows = named_leaves(stacked_axes(tree, stacked)), named_leaves(layer_rows(tree, stacked))

    def squares(name: str) -> jax.Array:
        """Sums the squares in each layer of a parameter, in natural order; [1] without layers."""
        x, n = leaves[name], axes[name]
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        each = jnp.sum(jnp.square(x), axis=tuple(range(n, x.ndim))).ravel()
        natural = not n or np.array_equal(rows[name], np.arange(each.size))
        return each if natural else each[rows[name]]

    sums = [sum(map(squares, members[group])) for group in groups]
    return jnp.sqrt(jnp.concatenate(sums)).astype(jnp.float32)


def _histograms(tree: Any, groups: tuple[Group, ...], stacked: Stacked, bins: int) -> jax.Array:
    """The counts of each row and the largest magnitude in its group, float32 [rows, bins + 1]."""
    leaves, members = named_leaves(tree), _groups(tree, stacked)
    axes, rows = named_leaves(stacked_axes(tree, stacked)), named_leaves(layer_rows(tree, stacked))

    def largest(group: Group) -> jax.Array:
        each = [jnp.abs(leaves[name]).max().astype(jnp.float32) for name in members[group]]
        return jnp.stack(each).max()

    def counts(name: str, edges: jax.Array) -> jax.Array:
        x, n = leaves[name].astype(jnp.float32), axes[name]
        # An edge at a time: all at once are arrays of so many times the size of a parameter.
        below = jax.lax.map(lambda edge: (x <= edge).sum(tuple(range(n, x.ndim))), edges)
        each = jnp.diff(below.reshape(bins, -1).T, prepend=0, axis=-1).astype(jnp.float32)
        return each[rows[name]] if n else each

    found = []
    for group in groups:
        edges = (r := largest(group)) * jnp.linspace(-1.0, 1.0, bins + 1)[1:]
        each = sum(counts(name, edges) for name in members[group])
        found.append(jnp.concatenate([each, jnp.broadcast_to(r, (len(each), 1))], axis=1))
    return jnp.concatenate(found)
