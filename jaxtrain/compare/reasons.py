"""Why an equation's result differs though its operands agree, in words."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.compare.recording import Value
from jaxtrain.compare.relations import Relation

SUMS = frozenset(["psum", "psum2", "psum_invariant", "psum_scatter", "reduce_scatter"])
DRAWS = ("random_bits", "random_gamma", "rng_")
UNEXPLAINED = "its operands agree and its result does not"
Operands = Sequence[tuple[Value, Relation]]


def reason(
    value: Value,
    relation: Relation,
    operands: Operands,
    *,
    numbers: Sequence[tuple[Any, Any]] = (),
    by_device: bool = False,
) -> str:
    """Says why a value differs, as the end of a sentence, by its relation to that of one device and
    those of its operands, the ``numbers`` in the equation here and on one device, and whether an
    operand depends on the device and on nothing else (``by_device``)."""
    partial = [r for _, r in operands if r.axes and r.right]
    partial.sort(key=lambda r: r.kind == "share")  # a share is as good as a sum to what is linear
    split = [r.split[0] for _, r in operands if r.split]
    axes = [axis for axis, size in value.axes.items() if size > 1]
    other = [(mine, one) for mine, one in numbers if not np.array_equal(mine, one)]
    if value.name == "exit":
        return _left(partial, split)
    if value.name in SUMS and (why := _summed(value, partial)):
        pass
    elif value.name.startswith(DRAWS):
        why = "the numbers drawn depend on the layout: each device draws for its own part"
        if axes and not np.ptp(np.float64(value.data), tuple(range(len(value.axes)))).any():
            why = f"a key is shared by the shards of {_names(axes)}: all draw the same numbers"
    elif value.name == "iota" and axes:
        why = f"every device of {_names(axes)} counts from 0: add the offset of its part"
    elif partial:
        why = _unfinished(value.name, partial)
    elif padded := [list(x.aval.shape) for x, r in operands if r.kind == "padded"]:
        why = f"its operand {padded[0]} is padded, and what is padded counts: mask it"
    elif other:
        why = "a number in it is {:.6g} here and {:.6g} on one device".format(*other[0])
    elif relation.kind == "order":
        why = "it has the numbers of one device in another order"
    elif by_device and value.name.startswith("random_"):
        why = "a key depends on the device: each draws its own numbers, whatever the layout"
    elif split:
        why = f"its operand's {_dimension(*split[0])}, so each device sees its own part"
    else:
        why = UNEXPLAINED
    times = f"; the result is {relation.factor:.6g} times that of one device"
    return why + (times if relation.kind == "times" else "")


def _left(partial: Sequence[Relation], split: Sequence[tuple]) -> str:
    """Why what leaves a ``shard_map`` is wrong."""
    if not partial:
        return (
            f"{_dimension(*split[0])}, and out_specs lack that" if split else "out_specs do not fit"
        )
    first, over = partial[0], _names(partial[0].axes)
    if first.kind == "share":
        return (
            f"it leaves the shard_map as 1/{first.factor:.6g} of the value on one device: a mean "
            f"over {over} is taken where a sum belongs, or a psum is missing"
        )
    part, mend = _kind(first)
    return f"it leaves the shard_map as {part}: a {mend} over {over} is missing"


def _summed(value: Value, partial: Sequence[Relation]) -> str | None:
    """Why a sum over devices is wrong."""
    params = value.equations[0].params
    over = params.get("axes", params.get("axis_name"))
    over = (over,) if isinstance(over, str) else tuple(over)
    if not partial:
        return f"every device of {_names(over)} has its operand whole, and they are added up"
    if set(partial[0].axes) & set(over):
        return None
    return f"its operand is {_kind(partial[0])[0]}, and the sum here is over {_names(over)}"


def _unfinished(name: str, partial: Sequence[Relation]) -> str:
    """Why an operation cannot take what is still to be reduced."""
    over = _names(partial[0].axes)
    if name == "div" and [r.kind for r in partial] == ["sum", "sum"]:
        why = f"it divides a partial sum over {over} by another, which makes a mean of means"
        return f"{why}: sum both over {over} first"
    part, mend = _kind(partial[0])
    return f"its operand is {part}: take the {mend} over {over} first"


def _kind(relation: Relation) -> tuple[str, str]:
    over = _names(relation.axes)
    return {
        "sum": (f"a partial sum over {over}", "psum"),
        "share": (f"1/{relation.factor:.6g} of the whole on every device of {over}", "psum"),
        "mean": (f"each device's own mean over {over}", "pmean"),
        "max": (f"each device's own maximum over {over}", "pmax"),
        "min": (f"each device's own minimum over {over}", "pmin"),
    }[relation.kind]


def _dimension(dimension: int, axes: Sequence[str]) -> str:
    return f"dimension {dimension} is split over {_names(axes)}"


def _names(axes: Sequence[str]) -> str:
    return " and ".join(repr(axis) for axis in axes)
