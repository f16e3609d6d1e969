"""Rows that clients hold: who has which, and those of the clients that are drawn for a round.

Shapes: N rows of a source, M clients, C of them in a round.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxtrain.data.loader import RowSource
from jaxtrain.data.poisson import each_drawn, room_for

Partition = Literal["iid", "shards", "dirichlet", "labels"]
# Shards of a client, as McMahan et al. have them.
SHARDS = 2


def partition(
    labels_N: Sequence[int], how: Partition, *, clients: int, seed: int, alpha: float = 0.5
) -> list[np.ndarray]:
    """Deals the rows of a source to clients.

    Args:
      labels_N: the label of each row, at least 0.
      how: ``iid`` deals evenly at random. ``shards`` sorts by label, cuts into two shards for each
        client and deals those at random (McMahan et al. 2017, https://arxiv.org/abs/1602.05629).
        ``dirichlet`` deals the rows of each label by shares from a Dirichlet distribution
        (Yurochkin et al. 2019, https://arxiv.org/abs/1905.12022), so that sizes differ too.
        ``labels`` makes a client of each label.
      clients: M, which ``labels`` does not read.
      seed: of the draws.
      alpha: concentration of ``dirichlet``: the smaller, the fewer labels a client has.

    Returns:
      The indices of each client's rows, in order; clients without any are left out.

    Raises:
      ValueError: there are fewer rows than clients, or shards.

    >>> [rows.tolist() for rows in partition([1, 0, 1, 0], "labels", clients=2, seed=0)]
    [[1, 3], [0, 2]]
    """
    labels_N, rng = np.asarray(labels_N), np.random.default_rng(seed)
    shuffled_N = rng.permutation(len(labels_N))
    by_label = [shuffled_N[labels_N[shuffled_N] == label] for label in np.unique(labels_N)]
    pieces, what = (clients * SHARDS, "shards") if how == "shards" else (clients, "clients")
    if how != "labels" and not 1 <= pieces <= len(labels_N):
        raise ValueError(
            f"`clients` is {clients} and there are {len(labels_N)} rows for {pieces} {what}: give "
            "1 or more, and fewer than rows"
        )
    if how == "labels":
        dealt = by_label
    elif how == "iid":
        dealt = np.array_split(shuffled_N, clients)
    elif how == "shards":
        shards = np.array_split(np.concatenate(by_label), pieces)
        hands = rng.permutation(pieces).reshape(clients, SHARDS)
        dealt = [np.concatenate([shards[i] for i in hand]) for hand in hands]
    else:
        ends = [rng.dirichlet(np.full(clients, alpha)).cumsum()[:-1] for _ in by_label]
        cuts = [(len(rows) * end).astype(int) for rows, end in zip(by_label, ends, strict=True)]
        parts = [np.split(rows, cut) for rows, cut in zip(by_label, cuts, strict=True)]
        dealt = [np.concatenate(own) for own in zip(*parts, strict=True)]
    return [np.sort(rows) for rows in dealt if len(rows)]


class ClientRows:
    """The rows of drawn clients: a source for `Batches`, of which batch number ``step`` is a round.

    A batch has N places for the rows of each of C clients; those that are not filled are zeros,
    mask included. C of all clients are drawn, by the seed and the round.

    Args:
      rows: the source.
      clients: the indices of each client's rows, of :func:`partition`.
      per_round: C, at most as many as there are clients.
      local_batch: rows of a client's batch, which divides N; 0 for all that a client has.

    ``size`` is N, the most rows that a client has, filled up to whole batches, and ``room`` the
    number of clients that a batch has places for: C.
    """

    def __init__(
        self, rows: RowSource, clients: Sequence[np.ndarray], *, per_round: int, local_batch: int
    ):
        if not 1 <= per_round <= len(clients):
            raise ValueError(
                f"`per_round` is {per_round} and {len(clients)} clients have rows: give from 1 to "
                "as many"
            )
        self.rows, self.clients, self.per_round, self.room = rows, clients, per_round, per_round
        most = max(map(len, clients))
        self.local_batch = local_batch or most
        self.size = -(-most // self.local_batch) * self.local_batch
        self._zeros = {name: np.zeros_like(value) for name, value in rows[0].items()}

    def __len__(self) -> int:
        return len(self.rows) + 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index] if index < len(self.rows) else self._zeros

    def drawn(self, seed: int, round: int) -> np.ndarray:
        """Returns the clients of a round, [C]."""
        rng = np.random.default_rng((seed, round))
        return rng.choice(len(self.clients), self.per_round, replace=False)

    def places(self, clients: Sequence[int]) -> np.ndarray:
        """Returns the indices of the rows of clients, [C * N], and of zeros behind them; fewer
        clients than there is room for lie evenly over it, and so over devices."""
        found_CN = np.full((self.room, self.size), len(self.rows))
        for number, client in enumerate(clients):
            own_N = found_CN[number * self.room // len(clients)]
            own_N[: len(self.clients[client])] = self.clients[client]
        return found_CN.reshape(-1)

    def row_order(self, *, seed: int, global_batch: int) -> Callable[[int], int]:
        """Returns what takes a position of the endless sequence of rounds to a row's index."""
        of_round = functools.lru_cache(4)(lambda round: self.places(self.drawn(seed, round)))

        def place(position: int) -> int:
            return int(of_round(position // global_batch)[position % global_batch])

        return place


class PoissonClients(ClientRows):
    """The rows of clients that are each in a round by a draw of their own (Poisson sampling), as
    rounds that are private to a client need (McMahan et al. 2018,
    https://arxiv.org/abs/1710.06963). ``row[leaf]`` numbers the client of a row, from 1; 0 is
    padding. Draws are a function of the seed of `Batches` and of the round.

    Args:
      rows, clients, local_batch: as for :class:`ClientRows`.
      per_round: the number of clients that a round has on average.
      leaf: the name of the leaf.
      divisor: of the clients that a batch has room for.

    Raises:
      ValueError: a row is of two clients; and when a round is made, more clients are drawn than a
        batch has room for.
    """

    def __init__(
        self, rows: RowSource, clients: Sequence[np.ndarray], *, leaf: str, divisor=1, **given: int
    ):
        super().__init__(rows, clients, **given)
        self.rate = self.per_round / len(clients)
        self.room, self._leaf = room_for(len(clients), self.rate, divisor), leaf
        self._owner = np.zeros(len(rows) + 1, np.int32)
        for number, own in enumerate(clients, 1):
            if (twice := self._owner[own]).any():
                raise ValueError(
                    f"clients {twice.max()} and {number} have a row in common, and a row is of the "
                    "client that its number says: give each client rows of its own"
                )
            self._owner[own] = number

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {self._leaf: self._owner[index]}

    def drawn(self, seed: int, round: int) -> np.ndarray:
        """Returns the clients of a round, in order."""
        every = np.arange(len(self.clients))
        return each_drawn(every, self.rate, seed=seed, step=round, room=self.room)
