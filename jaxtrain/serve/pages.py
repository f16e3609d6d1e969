"""Which pages of keys and values are whose, and which beginnings of prompts they hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np


class PagePool:
    """Pages 1 .. count - 1; page 0 takes what stands in padding, and is nobody's.

    A chunk of a prompt that has been read is known by all tokens up to its end. Its pages are
    shared by requests that begin alike, and stay, when nobody uses them, until they are needed.

    Args:
      count: pages.
      per_chunk: pages of a chunk.
    """

    def __init__(self, count: int, per_chunk: int):
        self.count, self.per_chunk = count, per_chunk
        self._free = list(range(count - 1, 0, -1))
        self._uses = [0] * count
        self._known: dict[bytes, tuple[int, ...]] = {}  # by the digest of a beginning
        self._digest: dict[int, bytes] = {}  # of a known chunk, by its first page
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # known, unused; the oldest first

    @property
    def free(self) -> int:
        """Number of pages that a request may take."""
        return len(self._free) + self.per_chunk * len(self._idle)

    def take(self, shared: Sequence[int], count: int) -> list[int] | None:
        """Takes ``shared``, which :meth:`beginning` has found, and so many others; None, and
        nothing, where there are too few."""
        idle = sum(self._uses[page] == 0 for page in shared)
        if count > self.free - idle:
            return None
        for page in shared:
            self._uses[page] += 1
            self._idle.pop(self._digest.get(page, b""), None)
        while len(self._free) < count:
            self._forget_first()
        own = [self._free.pop() for _ in range(count)]
        for page in own:
            self._uses[page] = 1
        return [*shared, *own]

    def give_back(self, pages: Sequence[int]) -> None:
        """Gives back what :meth:`take` gave. Later chunks first: they are forgotten before those
        that they continue."""
        starts = range(0, len(pages), self.per_chunk)
        for start in reversed(starts):
            chunk = pages[start : start + self.per_chunk]
            for page in chunk:
                self._uses[page] -= 1
            if (digest := self._digest.get(chunk[0])) is None:
                self._free.extend(chunk)
            elif not self._uses[chunk[0]]:
                self._idle[digest] = None

    def beginning(self, digests: Sequence[bytes]) -> list[int]:
        """Returns the pages of the chunks that are known, of those that ``digests`` name in order
        from the first."""
        pages: list[int] = []
        for digest in digests:
            if digest not in self._known:
                break
            pages.extend(self._known[digest])
        return pages

    def forget(self) -> None:
        """Forgets all beginnings that nobody uses."""
        while self._idle:
            self._forget_first()

    def _forget_first(self) -> None:
        digest, _ = self._idle.popitem(last=False)
        pages = self._known.pop(digest)
        del self._digest[pages[0]]
        self._free.extend(pages)

    def know(self, digest: bytes, pages: Sequence[int]) -> None:
        """Keeps a chunk that has been read, unless another request has read the same."""
        if digest not in self._known:
            self._known[digest] = tuple(pages)
            self._digest[pages[0]] = digest


def digests_of(prompt: Sequence[int], chunk: int, adapter: int = 0) -> list[bytes]:
    """Names each whole chunk of a prompt by all tokens up to its end, and by who has read them.

    >>> a, b = digests_of([1, 2, 3, 4, 5], 2), digests_of([1, 2, 9, 4], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    """

    def all_of() -> Iterator[bytes]:
        so_far = hashlib.blake2b(adapter.to_bytes(8, "little"), digest_size=16)
        tokens = np.asarray(prompt, np.int32)
        for start in range(0, len(tokens) - chunk + 1, chunk):
            so_far.update(tokens[start : start + chunk].tobytes())
            yield so_far.digest()

    return list(all_of())
