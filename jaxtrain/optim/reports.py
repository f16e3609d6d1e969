"""Reports that an optimizer's state makes of itself; a train step adds them to its metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def reports(opt_state: Any, *, since: Any = None) -> dict[str, jax.Array]:
    """Returns what the transformations in an optimizer state report, by name.

    A transformation reports by its state: a node of it (a named tuple, a registered dataclass) with
    a method ``reports() -> dict`` from names to scalars, or to arrays such as one number for each
    layer. Floats are of the latest update; integers are counts, from the start on.
    :func:`jaxtrain.build_update` adds them to the metrics of the step, the counts as what that step
    has added.

    ``make_optimizer`` reports ``learning_rate`` and, with ``skip_spikes``, ``spike``: the updates
    left out, and with ``watch_every`` the norms of every layer. ``optax.inject_hyperparams``
    reports its ``learning_rate`` where nothing else does, and each group of
    ``optax.multi_transform`` its own, ``learning_rate/GROUP``. Where several nodes report one name,
    the first in flattening order does.

    Args:
      opt_state: state of any optax transformation; traced is fine.
      since: an earlier state, from which the counts are taken; None for the start.

    Returns:
      Arrays (with the leading axes of a vmapped state) by name; most are scalars.

    >>> from jaxtrain.optim import make_optimizer
    >>> {k: float(v) for k, v in reports(make_optimizer("sgd", 0.5).init(jnp.ones(2))).items()}
    {'learning_rate': 0.5}
    """
    told: dict[str, Any] = {}
    for node in nodes(opt_state, lambda node: callable(getattr(node, "reports", None))):
        told = node.reports() | told
    for node in nodes(opt_state, lambda node: isinstance(getattr(node, "hyperparams", None), dict)):
        told = {k: v for k, v in node.hyperparams.items() if k == "learning_rate"} | told
    for node in nodes(opt_state, lambda node: isinstance(node, optax.transforms.PartitionState)):
        for group, inner in node.inner_states.items():
            rate = reports(inner).get("learning_rate")
            told |= {} if rate is None else {f"learning_rate/{group}": rate}
    told = {name: jnp.asarray(value) for name, value in told.items()}
    if since is not None:
        before = reports(since)
        told |= {k: v - before[k] for k, v in told.items() if jnp.issubdtype(v.dtype, jnp.integer)}
    return told


def nodes(opt_state: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """Returns the nodes of a state that are ``wanted``, outer ones before what is in them."""
    found = []

    def visit(node: Any) -> bool:
        if wanted(node):
            found.append(node)
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    return found
