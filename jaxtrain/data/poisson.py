"""Poisson sampling: every row of a source is in a batch by a draw of its own.

The accounting of differential privacy is of that; shuffled epochs that are reported as such may
leak four times as much (Annamalai et al. 2024, https://arxiv.org/abs/2411.10614).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.data.enclosed import QuestionRows
from jaxtrain.data.loader import Batches, RowSource
from jaxtrain.data.masking import VERSIONS, CorruptedSpans
from jaxtrain.data.mixtures import Mixture

# The probability that a step draws more rows than a batch holds.
_OVERFLOW = 1e-12


class PoissonBatches(Batches):
    """Global batches of rows that are each drawn with one probability, whatever the others are.

    Batch `step` is a function of the seed and the step, and has one shape: the rows that are drawn
    come first, and rows of zeros after them. ``batch[leaf]`` numbers them, from 1 by their place in
    the source, and padding 0.

    Args:
      source: as for `Batches`. One whose indices continue after its last row, so that every epoch
        draws anew, does so in every step.
      examples: the number of rows that a batch has on average.
      seed: at least 0.
      leaf: the name of the leaf.
      bands: steps draw in turn from so many parts of the source, row r being of part r mod `bands`.
      divisor: of the rows of a batch.

    Raises:
      ValueError: a part has fewer rows than `examples`, or an example is in several rows; and when
        a batch is made, more rows are drawn than it holds.
    """

    def __init__(
        self, source: RowSource, *, examples: int, seed: int, leaf: str, bands=1, divisor=1
    ):
        self.rate = examples * bands / len(source)
        if self.rate > 1:
            raise ValueError(
                f"a batch has {examples} of {len(source)} rows on average, in {bands} parts: give "
                "a smaller global batch, or fewer `private.bands`"
            )
        _check_rows(source)
        size = room_for(math.ceil(len(source) / bands), self.rate, divisor)
        self._rows, self._bands, self._anew = len(source), bands, hasattr(source, "row_order")
        self._drawn_by, self._drawn = seed, functools.lru_cache(maxsize=8)(self.drawn)
        super().__init__(_Numbered(source, leaf), global_batch=size, seed=0, shuffle=False)

    def drawn(self, step: int) -> np.ndarray:
        """Returns which rows batch `step` has, in the order of the source."""
        rows = np.arange(step % self._bands, self._rows, self._bands)
        return each_drawn(rows, self.rate, seed=self._drawn_by, step=step, room=self.global_batch)

    def source_index(self, position: int) -> int:
        """Returns which row of the numbered source stands at `position`; 0 is padding."""
        step, row = divmod(position, self.global_batch)
        found = self._drawn(step)
        if row >= len(found):
            return 0
        return 1 + int(found[row]) + (step * self._rows if self._anew else 0)


def room_for(count: int, rate: float, divisor: int = 1) -> int:
    """Returns the places, a multiple of `divisor`, that one of 10^12 draws exceeds which take each
    of `count` with the probability `rate`."""
    from scipy import stats  # a second to import

    room = int(stats.binom.isf(_OVERFLOW, count, rate)) if rate < 1 else count
    return -(-room // divisor) * divisor


def each_drawn(among: np.ndarray, rate: float, *, seed: int, step: int, room: int) -> np.ndarray:
    """Returns which are drawn in a step, each by itself with the probability `rate`, in order;
    raises ValueError where they are more than `room`."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, step]))
    found = among[rng.random(len(among)) < rate]
    if len(found) > room:
        raise ValueError(
            f"batch {step} draws {len(found)} and has {room} places, and drawing again is another "
            "sampling: give another seed"
        )
    return found


def _check_rows(source: Any) -> None:
    """Raises ValueError where a row is more, or less, than one example."""
    why, inner = None, (getattr(source, name, None) for name in ("source", "rows"))
    if isinstance(source, Mixture) or getattr(source, "mixup", 0):
        why = "the data mix rows ({}): use one source, without mixup"
    elif isinstance(source, CorruptedSpans):
        why = f"each stretch of text is {VERSIONS} rows of T5 ({{}}): use rows that are one each"
    elif isinstance(source, QuestionRows) and len(source.windows) > len(source.contexts):
        why = "the rows of a long context overlap ({}): give longer rows, or shorter contexts"
    if why is not None:
        fault, mend = why.format(type(source).__name__).split(": ")
        raise ValueError(
            f"{fault}, and private training draws each row by itself, as one example: {mend}"
        )
    for each in inner:
        if each is not None:
            _check_rows(each)


class _Numbered:
    """A source behind a row of zeros, with the numbers of its rows."""

    def __init__(self, source: RowSource, leaf: str):
        self._source, self._leaf = source, leaf
        self._zeros = {name: np.zeros_like(value) for name, value in source[0].items()}

    def __len__(self) -> int:
        return 1 + len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        together = getattr(
            self._source, "__getitems__", lambda given: map(self._source.__getitem__, given)
        )
        rows = iter(together([index - 1 for index in indices if index]))
        number = lambda n: np.int32(1 + (n - 1) % len(self._source) if n else 0)  # noqa: E731
        return [(next(rows) if n else self._zeros) | {self._leaf: number(n)} for n in indices]
