"""The relation in which the devices' numbers stand to the value that one device has."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Kinds that a correct program may have on its way to a result.
RIGHT = frozenset(["same", "sum", "share", "mean", "max", "min", "padded"])
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


@dataclasses.dataclass(frozen=True)
class Relation:
    """How a value on a mesh is made of that on one device.

    Args:
      kind: "same"; "sum", "mean", "max" or "min" where that over the devices of ``axes`` is the
        value; "share" where each has the same part of it, and the sum is the value; "padded" where
        it has more entries behind; "times" where it is ``factor`` times the value (or a sum over
        ``axes`` is); "order" where it has the same numbers in another order; "none".
      axes: mesh axes of the reduction that is still to come. A dimension in which a program stacks
        its devices is an axis here too, named "dimension 0".
      split: the dimensions that are split, and over which axes.
      factor: for "times", and the number of shares.
      error: the distance from being the same, relative in the 2-norm.
    """

    kind: str
    axes: tuple[str, ...] = ()
    split: tuple[tuple[int, tuple[str, ...]], ...] = ()
    factor: float = 1.0
    error: float = 0.0

    @property
    def right(self) -> bool:
        """Whether a correct program may have such a value on its way."""
        return self.kind in RIGHT


def relate(found: Any, expected: Any, axes: Mapping[str, int], bound: float) -> Relation | None:
    """Finds the relation of a value to that of one device.

    Args:
      found: each device's array, [sizes of axes..., *local shape].
      expected: that of one device.
      axes: sizes of the mesh axes that ``found`` is stacked over.
      bound: the distance in the 2-norm that rounding may make.

    Returns:
      None where the shapes cannot be compared.

    >>> relate(np.float64([1, 3]), np.float64(4), {"data": 2}, 1e-6).kind
    'sum'
    >>> relate(np.float64([[1], [3]]), np.float64([1, 3]), {"data": 2}, 1e-6).split
    ((0, ('data',)),)
    """
    found, expected = _floats(found), _floats(expected)
    candidates = list(_assembled(found, expected.shape, axes))
    if not candidates:
        return Relation("none", error=math.inf) if found.ndim - len(axes) == expected.ndim else None
    norm = _norm(expected)
    errors = []
    for split, padded, whole, _ in candidates:
        errors.append(_distance(whole, expected))
        if errors[-1] <= bound:
            return Relation("padded" if padded else "same", split=split)
    candidates = [c for c in candidates if not c[1]]
    for split, _, whole, rest in candidates:
        for over in _subsets(rest):
            dims = tuple(map(rest.index, over))
            count = math.prod(whole.shape[d] for d in dims)
            for kind, reduce in REDUCTIONS.items():
                if _distance(reduce(whole, axis=dims), expected) <= bound:
                    shared = kind == "sum" and _distance(whole * count, expected) <= bound * count
                    kind = "share" if shared else kind
                    return Relation(kind, over, split, count, error=min(errors) / (norm or 1))
    error = min(errors, default=math.inf) / (norm or 1)
    sizes = [size for size in axes.values() if size > 1]
    usual = {float(math.prod(s)) for n in range(1, 4) for s in itertools.combinations(sizes, n)}
    for split, _, whole, rest in candidates:
        for over in ((), *_subsets(rest)):
            total = whole.sum(tuple(map(rest.index, over)))
            one = total.reshape(-1, *expected.shape)[0]
            factor = float((one * expected).sum()) / (norm * norm) if norm else 0.0
            likely = expected.size > 1 or any(np.isclose(factor, [n, 1 / n]).any() for n in usual)
            if likely and factor and _distance(total, factor * expected) <= bound * abs(factor):
                return Relation("times", over, split, factor, error)
    for split, _, whole, _ in candidates:
        one = whole.reshape(-1, *expected.shape)[0]
        ordered = np.sort(one, None), np.sort(expected, None)
        if _distance(whole, one) <= bound and np.ptp(expected) and _distance(*ordered) <= bound:
            return Relation("order", split=split, error=error)
    return Relation("none", error=error)


def _assembled(found: Any, shape: Sequence[int], axes: Mapping[str, int]) -> Iterator[tuple]:
    """Puts the devices' parts together in every way that fits the shape of the whole.

    Yields:
      What is split, whether entries behind were cut off, the wholes [rest..., *shape] and the axes
      of the rest.
    """
    local = found.shape[len(axes) :]
    if len(local) != len(shape):
        return
    pairs = list(zip(local, shape, strict=True))
    stacked = [n // m if m and n > m and n % m == 0 else 1 for n, m in pairs]
    for stacks in dict.fromkeys((tuple(stacked), (1,) * len(local))):
        sizes = dict(axes) | {f"dimension {d}": n for d, n in enumerate(stacks)}
        names = [name for name, size in sizes.items() if size > 1]
        own = [n // m for n, m in zip(local, stacks, strict=True)]
        # [axes..., then a stack and what is stacked of each dimension]
        x = found.reshape((*axes.values(), *itertools.chain(*zip(stacks, own, strict=True))))
        places = {name: i for i, name in enumerate(axes)}
        places |= {f"dimension {d}": len(axes) + 2 * d for d in range(len(local))}
        orders = [o for n in range(len(names) + 1) for o in itertools.permutations(names, n)]
        options = [_fitting(n, m, orders, sizes) for n, m in zip(own, shape, strict=True)]
        for choice in itertools.product(*options):
            used = [name for over in choice for name in over]
            if len(set(used)) == len(used):
                rest = [name for name in names if name not in used]
                order = [place for name, place in places.items() if name not in used]
                for d, over in enumerate(choice):
                    order += [*map(places.get, over), len(axes) + 2 * d + 1]
                whole = [n * math.prod(map(sizes.get, o)) for n, o in zip(own, choice, strict=True)]
                y = x.transpose(order).reshape((*(sizes[name] for name in rest), *whole))
                split = tuple((d, over) for d, over in enumerate(choice) if over)
                yield split, tuple(whole) != tuple(shape), y[(..., *map(slice, shape))], rest


def _fitting(
    size: int, wanted: int, orders: Sequence[tuple], sizes: Mapping[str, int]
) -> list[tuple]:
    """The axes over which a dimension may be split: those that fit, else those that leave the
    fewest entries over."""
    totals = {over: size * math.prod(sizes[name] for name in over) for over in orders}
    least = min((total for total in totals.values() if total >= wanted), default=None)
    return [over for over, total in totals.items() if total == least]


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]


def _floats(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0)))


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest distance of the arrays that ``found`` stacks; equal infinities have none."""
    with np.errstate(invalid="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        off = np.where(same, 0, found - expected)
    off = np.abs(np.nan_to_num(off, nan=np.inf, posinf=np.inf, neginf=np.inf))
    dims = tuple(range(off.ndim - expected.ndim, off.ndim))
    return float(np.sqrt(np.square(off).sum(dims)).max(initial=0))
