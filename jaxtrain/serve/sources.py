"""The engine of an encoder-decoder: prompts are sources, read whole, and answers their targets.

Shapes: R readers, S positions of a source, T positions of a target, B slots, L layers, G heads,
K features per head.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.models.decoding import START, Cache, SourceDecoder
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.serve.engine import Engine, Request, check_rows
from jaxtrain.serve.pages import PagePool
from jaxtrain.serve.programs import Drawn, Rows, drawn_of


class SourceEngine(Engine):
    """Writes the targets of many sources at once, as :class:`Engine` continues prompts.

    One program reads sources, of several requests at once, into their slots, and one writes a token
    of each slot. Both have fixed shapes, so a target has the same bits whoever shares a batch.

    Args:
      model, params: the model; it computes in the dtype of ``params``.
      slots, readers, mesh: as for :class:`Engine`.
      longest: most tokens of a source, and of a target; left out, those of the model's training.
    """

    def __init__(
        self,
        model: T5Config,
        params: Any,
        *,
        slots: int = 16,
        readers: int = 4,
        longest: int | None = None,
        mesh: Mesh | None = None,
    ):
        check_rows(slots, readers)
        if longest is not None and longest < 2:
            raise ValueError(f"`longest` is {longest}: give at least 2")
        self.sources, self.longest = longest or model.source_len, longest or model.target_len
        # A slot is a page, and holds nothing that another could read.
        self.chunk = self.page = 1 + self.longest
        self._set_up(model, slots, readers, self.page, mesh)
        self.pool = PagePool(1 + slots, 1)
        self._table = np.zeros((slots, 1), np.int32)
        decoder, dtype = SourceDecoder(model), params["embed"]["tokens"].dtype
        empty = functools.partial(decoder.empty, slots, self.sources, self.longest, dtype)
        with self._on_mesh():
            self._caches, self._params = jax.jit(empty)(), [params]
        self._reads = jax.jit(functools.partial(read, decoder), donate_argnums=1)
        self._writes = jax.jit(functools.partial(advance, decoder), donate_argnums=1)

    def _own(self, request: Request) -> Sequence[int]:
        del request
        return (START,)

    def _check_room(self, request: Request) -> None:
        if (count := len(request.prompt)) > self.sources:
            raise ValueError(
                f"the prompt has {count} tokens, which exceeds the {self.sources} of a source"
            )
        if request.max_tokens > self.longest:
            raise ValueError(
                f"max_tokens is {request.max_tokens}, which exceeds the {self.longest} of a target"
            )

    def _read(self, slots: Sequence[int]) -> None:
        tokens_RS = np.zeros((self._readers, self.sources), np.int32)
        lengths_R = np.ones(self._readers, np.int32)
        slots_R = np.full(self._readers, len(self.rows), np.int32)  # beyond all: nobody's
        for index, slot in enumerate(slots):
            row = self.rows[slot]
            row.read = len(row.request.prompt)
            tokens_RS[index, : row.read], lengths_R[index] = row.request.prompt, row.read
            slots_R[index], self._last[slot] = slot, START
        with self._on_mesh():
            given = tokens_RS, lengths_R, slots_R
            self._caches = self._reads(self._params, self._caches, *given)


def read(
    decoder: SourceDecoder,
    params: Sequence[Any],
    cache: Cache,
    tokens_RS: jax.Array,
    lengths_R: jax.Array,
    slots_R: jax.Array,
) -> Cache:
    """Reads sources into the slots of a cache; those of no slot are dropped."""
    new = *decoder.read(params[0], tokens_RS, lengths_R), lengths_R[None]
    put = lambda x, y: x.at[:, slots_R].set(y, mode="drop")  # noqa: E731
    return decoder.pinned(Cache(cache.k, cache.v, jax.tree.map(put, cache.source, new)))


def advance(
    decoder: SourceDecoder, params: Sequence[Any], cache: Cache, rows: Rows
) -> tuple[Cache, Drawn]:
    """Reads a token of each slot, and draws the one that follows it."""
    given = rows.tokens, rows.start, rows.count
    logits_BV, cache = decoder.extend(params[0], cache, *given)
    at_B1, one_B = (rows.start + rows.count)[:, None], jnp.ones_like(rows.count)
    return decoder.pinned(cache), drawn_of(decoder, rows, logits_BV[:, None], at_B1, one_B)
