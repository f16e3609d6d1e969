"""Which parameters a rule applies to: masks and stacked axes, chosen by path and by rank per layer.

A mask is a tree of bools with the structure of the parameters. Wherever an option asks for one it
takes a callable ``params -> mask`` or a sequence of regexes, of which any may match (``re.search``)
the parameter's path.

Stacked parameters hold one layer per index of their leading axes, as ``lax.scan`` and pipelines
want them: ``stacked=(r"^blocks/",)`` says that every parameter below ``blocks`` has one such axis,
``{r"^blocks/": 2}`` that it has two, and :class:`jaxtrain.tree.LayerRows` that some of the layers
there are padding. The first pattern that matches decides.
"""

import contextlib
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim import numerics
from jaxtrain.sharding.stack import of_model
from jaxtrain.tree import LayerRows, is_a, map_named, named_leaves

Mask = Callable[[Any], Any] | Sequence[str]
Stacked = Sequence[str] | Mapping[str, int | LayerRows]


class Times(NamedTuple):
    """Multipliers that are the product of pairs and of a function; see ``multipliers``."""

    pairs: Sequence[tuple[str, Any]]
    factor_of: Callable[[str], Any]


Multipliers = Callable[[str], Any] | Sequence[tuple[str, Any]] | Times

# Whole words of a path: `norm1`, `attn_norm`, `LayerNorm_0`, `ln_f`, but not `normal_proj`.
_NORM_OR_BIAS = re.compile(
    r"(^|/)(\w*_)?(layer|rms|batch|group|instance)?norm(\d+|_\w+)?(/|$)"
    r"|(^|/)(ln|bn|gn)(_?\w{1,2})?(/|$)"
    r"|(^|/|_)(bias|scale)$",
    re.IGNORECASE,
)
# Tables: `embed`, `tok_embedding`, `wte`; and output layers: `lm_head`, `logits`; not `multi_head`.
_TABLE = re.compile(r"(^|/)(\w*embed\w*|wte|wpe)(/|$)", re.IGNORECASE)
_HEAD = re.compile(r"(^|/)((\w*_)?head(_?\d+)?|(\w*_)?logits|classifier)(/|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"(^|/)experts/")
_MULTI_HEAD = re.compile(r"(^|/)multi_?head(_?\d+)?(/|$)", re.IGNORECASE)


def by_path(patterns: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a callable ``params -> mask`` of bools, True where any of ``patterns`` is found
    (``re.search``) in the path, such as ``blocks/attn/q/kernel``.

    Raises:
      ValueError: if ``patterns`` is a lone string or holds a regex that does not compile.

    >>> by_path((r"^embed/", r"bias$"))({"embed": {"table": 0}, "fc": {"w": 0, "bias": 0}})
    {'embed': {'table': True}, 'fc': {'bias': True, 'w': False}}
    """
    compiled = [pattern for pattern, _ in _compile("the sequence of patterns", patterns)]
    return lambda params: map_named(
        lambda name, _: any(pattern.search(name) for pattern in compiled), params
    )


def decay_mask(params: Any, *, stacked: Stacked = ()) -> Any:
    """Returns the default mask of weight decay: True for matrices, False for norms and biases.

    A parameter decays unless its rank per layer is below 2, or a word of its path says norm
    (``norm1``, ``attn_norm``, ``LayerNorm_0``, ``ln_f``, ...), or its path ends in ``bias`` or
    ``scale``. Embeddings decay. Stacked axes do not count as rank; see the module.

    >>> params = {"blocks": {"w": jnp.ones((4, 8, 8)), "b": jnp.ones((4, 8))}}
    >>> decay_mask(params, stacked=(r"^blocks/",))
    {'blocks': {'b': False, 'w': True}}
    """
    return map_named(
        lambda name, p, n: jnp.ndim(p) - n >= 2 and not _NORM_OR_BIAS.search(name),
        params,
        stacked_axes(params, stacked),
    )


def hidden_matrices(params: Any, *, stacked: Stacked = ()) -> Any:
    """Returns Muon's default mask: True for matrices (rank 2 per layer) of hidden layers.

    False for embeddings (a word of the path holds ``embed``, or is ``wte``, ``wpe``), for output
    layers (``head``, ``lm_head``, ``logits``, ``classifier``), for norms and biases by name as in
    ``decay_mask``, and for every other rank: whether axes of a rank-3 kernel belong to its input or
    its output cannot be read off its shape.

    >>> params = {"wte": jnp.ones((16, 8)), "blocks": {"w": jnp.ones((4, 8, 8))}}
    >>> hidden_matrices(params, stacked=(r"^blocks/",))
    {'blocks': {'w': True}, 'wte': False}
    """
    return map_named(
        lambda name, p, n: (
            jnp.ndim(p) - n == 2 and not (_NORM_OR_BIAS.search(name) or _is_table_or_head(name))
        ),
        params,
        stacked_axes(params, stacked),
    )


def is_table(name: str) -> bool:
    """Whether a parameter is a table, by its path: a word of it holds ``embed``, or is ``wte`` or
    ``wpe``. Each of its rows belongs to one token or position.

    >>> is_table("embed/tokens"), is_table("blocks/attn/q/kernel")
    (True, False)
    """
    return _TABLE.search(name) is not None


def stacked_axes(params: Any, stacked: Stacked) -> Any:
    """Returns a tree of ints like ``params``: how many leading axes of each parameter index layers,
    0 where no pattern matches.

    The first match of the regexes, or of the mapping from regex to the number of axes, decides.

    Raises:
      ValueError: if a parameter has fewer axes than its pattern says, or ``stacked`` is malformed.

    >>> stacked_axes({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(2)}, {r"^a/": 1})
    {'a': {'w': 1}, 'b': 0}
    """
    rules = _compile("stacked", stacked)

    def count(name: str, p: Any) -> int:
        axes = next((axes for pattern, axes in rules if pattern.search(name)), 0)
        axes = axes.axes if isinstance(axes, LayerRows) else axes
        if jnp.ndim(p) < axes:
            raise ValueError(
                f"parameter {name!r} has shape {jnp.shape(p)}, too few axes for the {axes} stacked "
                "axes that 'stacked' gives it; narrow the pattern"
            )
        return axes

    return map_named(count, params)


def per_matrix(params: Any, stacked: Stacked) -> dict[str, int]:
    """Returns ``stacked`` for rules of matrices: kernels of experts, [..., E, D, F] below a part
    ``experts`` of their path, have one more leading axis.

    >>> params = {"blocks": {"experts": {"up": jnp.ones((2, 3, 4, 5))}}}
    >>> per_matrix(params, (r"^blocks/",))
    {'^blocks/experts/up$': 2}
    """
    axes = named_leaves(stacked_axes(params, stacked))

    def count(name: str, p: Any) -> int:
        return axes[name] + (_EXPERTS.search(name) is not None and jnp.ndim(p) == axes[name] + 3)

    return {f"^{re.escape(name)}$": count(name, p) for name, p in named_leaves(params).items()}


def layer_rows(params: Any, stacked: Stacked) -> Any:
    """Returns a tree of arrays: of each parameter, the row of every layer; see ``stacked_axes``.

    >>> layer_rows({"a": jnp.ones((2, 2, 3))}, {"^a": 2})
    {'a': array([0, 1, 2, 3])}
    """
    rules = _compile("stacked", stacked)

    def rows(name: str, p: Any, axes: int) -> np.ndarray:
        found = next((axes for pattern, axes in rules if pattern.search(name)), None)
        padded = isinstance(found, LayerRows)
        return np.array(found.places) if padded else np.arange(math.prod(jnp.shape(p)[:axes]))

    return map_named(rows, params, stacked_axes(params, stacked))


def warn_of_stack(
    name: str, given: Stacked | None, params: Any, *, per_layer: bool, by_rank: bool
) -> None:
    """Warns where an optimizer, told the axes ``given`` (None: nothing), would take the layers of a
    stack of its model for one parameter, and it matters to its rule or to what decays."""
    stack, exact = of_model.value
    if stack is None or not (exact or (given is None and stack.fits(params))):
        return
    known, wanted = (jax.tree.leaves(stacked_axes(params, x)) for x in (given or (), stack.axes))
    if all(n >= m for n, m in zip(known, wanted, strict=True)):
        return
    masks = (decay_mask(params, stacked=axes) for axes in (given or (), stack.axes))
    if per_layer or (by_rank and operator.ne(*masks)):
        warnings.warn(
            f"optimizer {name!r} takes the layers stacked below {stack.key!r} for one parameter: "
            f"give make_optimizer stacked=jaxtrain.{stack}.axes, or stacked=() where those are no "
            "layers",
            stacklevel=2,
        )


def check_matches(option: str, patterns: Sequence[str] | Mapping[str, int], params: Any) -> None:
    """Raises ValueError if a pattern matches no parameter: a typo that would do nothing. Those
    that something around the optimizer has masked out (``optax.MaskedNode``) are parameters too."""
    names = list(named_leaves(params, is_a(optax.MaskedNode)))
    for pattern, _ in _compile(option, patterns):
        if names and not any(pattern.search(name) for name in names):
            raise ValueError(
                f"`{option}` pattern {pattern.pattern!r} matches no parameter; "
                f"the paths are like {names[0]!r}"
            )


def resolve(option: str, mask: Mask, params: Any) -> Any:
    """Returns the tree of bools that ``mask``, a callable or patterns, gives for ``params``. Raises
    ValueError if the tree's structure is not that of ``params``, or a pattern or the callable
    selects nothing."""
    if not callable(mask):
        check_matches(option, mask, params)
        return by_path(mask)(params)
    tree = mask(params)
    if jax.tree.structure(tree) != jax.tree.structure(params):
        wanted, given = named_leaves(params), named_leaves(tree)
        odd = next((n for n in [*wanted, *given] if (n in wanted) != (n in given)), "")
        raise ValueError(
            f"`{option}` must return a tree of bools with the structure of the parameters; "
            f"they differ at {odd!r}"
        )
    tree = jax.tree.map(bool, tree)
    if not any(jax.tree.leaves(tree)) and (names := list(named_leaves(params))):
        raise ValueError(
            f"`{option}` selects no parameter; the paths are like {names[0]!r}: select one, or "
            "leave out what it is for"
        )
    return tree


def multipliers(option: str, given: Multipliers, params: Any, *, stacked: Stacked = ()) -> Any:
    """Returns the factor of each parameter, as a tree of numbers or of arrays that broadcast.

    Args:
      option: what it is for, for messages.
      given: pairs of a path regex and a factor, of which the first that matches decides (1 where
        none does), or a function from path to factor, or the product of both (``Times``). A factor
        is a number of at least 0; that of a stacked parameter may be an array with one number for
        each layer.
      params, stacked: a tree of arrays, and which of their leading axes index layers.

    Raises:
      ValueError: if a pattern matches no parameter, or a factor is negative or has another shape.

    >>> params = {"blocks": {"w": jnp.ones((2, 3))}, "b": jnp.ones(3)}
    >>> multipliers("rate_multipliers", [("^b$", 2.0)], params)
    {'b': 2.0, 'blocks': {'w': 1}}
    >>> decay = [("^blocks/", [0.5, 1.0])]
    >>> multipliers("rate_multipliers", decay, params, stacked=("^blocks/",))["blocks"]["w"].shape
    (2, 1)
    """
    if isinstance(given, Times):
        both = (multipliers(option, each, params, stacked=stacked) for each in given)
        return jax.tree.map(operator.mul, *both)
    factor_of = given
    if not callable(given):
        pairs = given if isinstance(given, Sequence) else [given]
        if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"`{option}` is {given!r}; write pairs: (('^head/', 0.5),)")
        check_matches(option, [pattern for pattern, _ in given], params)
        factor_of = lambda name: next((f for p, f in given if re.search(p, name)), 1)  # noqa: E731

    def factor(name: str, p: Any, axes: int, rows: np.ndarray) -> Any:
        value, layers = factor_of(name), jnp.shape(p)[:axes]
        if np.shape(value) not in {(), rows.shape if layers else (), layers}:
            takes = f"a number, or one for each of its {len(rows)} layers"
            raise ValueError(
                f"`{option}` of parameter {name!r} has shape {np.shape(value)}; it must be "
                f"{takes if layers else 'a number, for it is not stacked'}"
            )
        with contextlib.suppress(jax.errors.TracerArrayConversionError):
            for number in np.ravel(np.asarray(value)):
                numerics.check_number(option, number, low=0.0, of=f" of parameter {name!r}")
        if np.ndim(value) == 0:
            return value
        value = jnp.asarray(value, jnp.float32)
        if len(rows) != math.prod(layers):
            value = jnp.zeros(math.prod(layers)).at[rows].set(value)
        return jnp.reshape(value, layers + (1,) * (jnp.ndim(p) - axes))

    return map_named(factor, params, stacked_axes(params, stacked), layer_rows(params, stacked))


def check_matrices(option: str, mask: Any, params: Any, stacked: Stacked) -> None:
    """Raises ValueError if ``mask`` is True at a parameter that is no matrix per layer."""

    def check(name: str, p: Any, n: int, selected: bool) -> None:
        if selected and jnp.ndim(p) - n < 2:
            raise ValueError(
                f"`{option}` selects parameter {name!r}, whose shape per layer is "
                f"{jnp.shape(p)[n:]}; only rank 2 and above will do"
            )

    map_named(check, params, stacked_axes(params, stacked), mask)


def _is_table_or_head(name: str) -> bool:
    return is_table(name) or _HEAD.search(_MULTI_HEAD.sub("/", name)) is not None


def _compile(
    option: str, patterns: Sequence[str] | Mapping[str, int]
) -> list[tuple[re.Pattern[str], Any]]:
    if isinstance(patterns, str):
        # A string is a sequence of one-letter patterns, which match nearly everything.
        raise ValueError(f"`{option}` is the string {patterns!r}; write ({patterns!r},)")
    pairs = patterns.items() if isinstance(patterns, Mapping) else [(p, 1) for p in patterns]
    rules = []
    for pattern, axes in pairs:
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"`{option}` pattern {pattern!r} is not a regex: {error}") from None
        if not isinstance(axes, LayerRows):
            axes = numerics.check_integer(f"{option}[{pattern!r}]", axes, low=0)
        rules.append((compiled, axes))
    return rules
