"""Numbers shared by the optimizer stages: float32 arithmetic, and checks of what is concrete."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def in_float32(
    tx: optax.GradientTransformation, *, moment_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Runs ``tx`` in float32, whatever the dtypes of gradients, parameters and stored state.

    Half-precision inputs are widened before ``tx`` and its results narrowed after it, so that every
    state leaf keeps for ever the dtype that ``init`` gave it (a scan carry needs that) and updates
    come back in the dtype of the gradients. Without it ``0.999 * nu`` in bfloat16 is ``1.0 * nu``,
    a second moment that never decays, and norms lose their low bits in the squares.

    Args:
      moment_dtype: state is laid out as for parameters of at least this dtype; None means theirs.

    Returns:
      The transformation with the same state structure.

    >>> tx = in_float32(optax.scale_by_rms(decay=0.999))
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> updates, state = tx.update(w, tx.init(w), w)
    >>> updates.dtype.name, state.nu.dtype.name
    ('bfloat16', 'bfloat16')
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        if moment_dtype is not None:
            params = jax.tree.map(lambda p: _at_least(p, moment_dtype), params)
        return tx.init(params)

    def update(updates, state, params=None, **extra):
        wide = jax.tree.map(lambda x: _at_least(x, jnp.float32), (updates, state, params))
        new_updates, new_state = tx.update(*wide, **extra)
        return cast_like(new_updates, updates), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def cast_like(tree: Any, like: Any) -> Any:
    """Returns ``tree`` with the dtypes of ``like``, leaf by leaf."""

    def cast(x: Any, y: Any) -> jax.Array:
        x, y = jnp.asarray(x), jnp.asarray(y)
        # Random keys have a dtype of their own that astype refuses.
        return x if jnp.issubdtype(y.dtype, jax.dtypes.extended) else x.astype(y.dtype)

    return jax.tree.map(cast, tree, like)


def norm(
    leaves: Sequence[jax.Array], *, axis: tuple[int, ...] | None = None, keepdims: bool = False
) -> jax.Array:
    """Returns the 2-norm over ``axis`` of float32 arrays together, with a derivative of 0 at 0.

    Squares overflow from 1.8e19 on, so larger norms are sums of squares in units of 2^64. GPUs and
    TPUs read the arrays once for both sums, a CPU twice.

    >>> f"{float(norm([jnp.full(4, 3e19)])):.1e}"
    '6.0e+19'
    """

    def in_units(unit: float) -> jax.Array:
        square = sum(jnp.sum(jnp.square(x / unit), axis, keepdims=keepdims) for x in leaves)
        zero = square == 0
        return unit * jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))

    plain = in_units(1.0)
    return jnp.where(jnp.isinf(plain), in_units(2.0**64), plain)


def _at_least(x: Any, dtype: Any) -> jax.Array:
    x = jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < jnp.dtype(dtype).itemsize
    return x.astype(dtype) if narrow else x


def concrete(name: str, value: Any) -> float | None:
    """Returns ``value`` as a float, or None when it is traced and so cannot be looked at. Raises
    ValueError if ``value`` is neither a number nor a scalar array."""
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` is {value!r}; it must be a number or a scalar array") from None


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float | None = math.inf,
    open_low: bool = False,
    of: str = "",
) -> Any:
    """Returns ``value``; raises ValueError unless it is traced or in ``[low, high)``.

    With ``open_low`` that is ``(low, high)``. With ``high`` None infinity will do too, as for a
    threshold that is switched off. ``of`` follows the name in the error.
    """
    number = concrete(name, value)
    if number is None:
        return value
    above = number > low if open_low else number >= low
    if not (above and (high is None or number < high)):
        bounds = f"{'above' if open_low else 'at least'} {low:g}"
        if high is not None:
            bounds += " and finite" if high == math.inf else f" and below {high:g}"
        raise ValueError(f"`{name}`{of} is {number:g}; it must be {bounds}")
    return value


def check_choice(name: str, value: Any, *, choices: tuple[str, ...]) -> Any:
    """Returns ``value``; raises ValueError unless it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; it must be {' or '.join(map(repr, choices))}")
    return value


def check_integer(name: str, value: Any, *, low: int) -> int:
    """Returns ``value`` as an int; raises ValueError unless it is an integer >= ``low``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` is {value!r}; it must be an integer") from None
    if number < low:
        raise ValueError(f"`{name}` is {number}; it must be at least {low}")
    return number


def check_loss(name: str, value: Any) -> None:
    """Raises ValueError where an option's transformation is updated without ``value=loss``."""
    if value is None:
        raise ValueError(
            f"`{name}` needs a loss, and what calls the optimizer gives none, as optax.MultiSteps "
            "around it does not: call update(..., value=loss), or accumulate by "
            "make_optimizer(accumulate=)"
        )
