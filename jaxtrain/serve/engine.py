"""The engine of a server: requests of any length share two programs of fixed shapes.

One program reads chunks of prompts, of several requests at once, and one writes a token of each
slot. A request takes a free slot and the pages of its whole answer, so that none is set aside; it
joins at the next step, and nothing is compiled after the start. There are no threads and no network
here: :meth:`Engine.step` is called by whoever drives it.

**Same prompt, same bits.** The tokens and log-probabilities of a request do not depend on who
shares a batch, on its slot, its pages, or on a beginning that another has read. That holds for one
configuration of the engine (slots, readers, chunk, page, dtype, mesh, machine), by four rules: two
programs, neither of one row alone; chunks begin at multiples of their size; the softmax of a row is
summed over pages in the row's order; a row draws by its own seed and position.

Shapes: B rows, C tokens of a chunk, P pages of a row, V vocabulary.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.models import decoder as decoders
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import CausalDecoder, check_pages, check_positions, unscaled
from jaxtrain.models.exact import TILE, ExactDecoder, check_mesh
from jaxtrain.models.sampling import History, RowSampling
from jaxtrain.ops.cached import Rounded
from jaxtrain.ops.linear import kernel_rules
from jaxtrain.ops.per_device import split_over
from jaxtrain.ops.row_adapters import Additions, with_adapters
from jaxtrain.serve.pages import PagePool, digests_of
from jaxtrain.serve.programs import BIASES, ENDS, Drawn, Rows, advance, embedded, scored, speculate
from jaxtrain.sharding.rules import param_shardings


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked: to continue ``prompt``, at least one token, by ``max_tokens`` or until one of
    ``ends`` is written, which is none of the first ``min_tokens``; by an adapter of the engine, or
    the model alone. The penalties, and ``logit_bias`` by token, are those of
    :func:`jaxtrain.models.sampling.adjusted_rows`."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ends: frozenset[int] = frozenset()
    top_logprobs: int = 0
    adapter: str | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def adjusts(self) -> bool:
        """Whether something changes the logits before the temperature."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return self.min_tokens > 0 or penalties != (1, 0, 0) or bool(self.logit_bias)


class Event(NamedTuple):
    """A token that a request has received.

    Args:
      number: of the request, as :meth:`Engine.submit` gave it.
      logprob: of the token, before penalties, temperature and truncation.
      top: the most probable tokens and their log-probabilities, as many as were asked for.
      reason: "stop" or "length" with the last token, None before.
    """

    number: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    reason: str | None


@dataclasses.dataclass
class _Row:
    number: int
    request: Request
    pages: list[int]
    digests: list[bytes]
    read: int  # tokens of the prompt that are in pages
    written: int = 0


class Engine:
    """Continues many prompts at once.

    Args:
      model, params: the model; it computes in the dtype of ``params``.
      slots: requests that are answered at once, at least 2.
      readers: prompts that are read at once, at least 2.
      chunk: tokens of a prompt that are read at once, a multiple of ``page``.
      page: positions of a page.
      longest: most tokens of a prompt and its answer; left out, the model's ``seq_len``.
      pages: number of pages; left out, as many as all slots can fill. What slots leave unused keeps
        beginnings of prompts.
      mesh: on which ``params`` lie, split over ``tensor``; None for one device.
      adapters: low-rank additions by path, by the name of each adapter; rows of one batch may have
        different ones.
      draft: a smaller model of the same tokens and its parameters, which proposes tokens; None to
        write one at a time.
      drafts: tokens that it proposes in a step.
      exact: whether the log-probabilities are, to the bit, those that
        :func:`jaxtrain.models.exact.log_probs` gives a trainer, whatever the sizes here.
      cache: "int8" for keys and values of 8 bits, with a scale for each position and head; None for
        the dtype of ``params``.

    Raises:
      ValueError: for sizes that do not fit.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Any,
        *,
        slots: int = 16,
        readers: int = 4,
        chunk: int = 64,
        page: int = 64,
        longest: int | None = None,
        pages: int | None = None,
        mesh: Mesh | None = None,
        adapters: Mapping[str, Additions] = {},
        draft: tuple[DecoderConfig, Any] | None = None,
        drafts: int = 4,
        exact: bool = False,
        cache: Literal["int8"] | None = None,
    ):
        longest = row_length(model, longest, least=2)
        check_positions(model, longest)
        check_rows(slots, readers)
        if page < 1:
            raise ValueError(f"`page` is {page}: give at least 1 position")
        if chunk < 1 or chunk % page:
            raise ValueError(
                f"`chunk` is {chunk}: it must be a multiple of `page`, which is {page}"
            )
        if draft is not None:
            _check_draft(draft[0], model, longest, drafts)
        if exact:
            _check_exact(page, mesh, adapters, cache)
        self._set_up(model, slots, readers, longest, mesh)
        self.longest, self.chunk, self.page, self.exact = longest, chunk, page, exact
        self.adapters += tuple(adapters)
        self.most = -(-longest // page)  # pages of a row
        pages = 1 + slots * self.most if pages is None else pages
        if pages <= self.most:
            raise ValueError(
                f"`pages` is {pages}: a request of {longest} tokens takes {self.most}, and one "
                "more is for padding"
            )
        self.pool = PagePool(pages, chunk // page)
        self._table = np.zeros((slots, self.most), np.int32)
        self._drafts = 0 if draft is None else drafts
        with self._on_mesh():
            if adapters:
                params, places = with_adapters(params, adapters), None
                if mesh is not None:
                    rules = kernel_rules(decoders.RULES, params)
                    places = param_shardings(params, mesh, rules)
                params = jax.device_put(params, places)
            both = [(model, params), *([draft] if draft else [])]
            self._caches = [_empty(*each, pages, page, mesh, cache) for each in both]
        models, self._params = [CausalDecoder(each) for each, _ in both], [p for _, p in both]
        if exact:  # A draft only guesses.
            models[0] = ExactDecoder(model)
        self._reads = jax.jit(functools.partial(advance, models), donate_argnums=1)
        self._writes = self._reads
        if draft is not None:
            self._writes = jax.jit(functools.partial(speculate, models, drafts), donate_argnums=1)
        self._score = jax.jit(functools.partial(scored, models[0]))
        self._embed = jax.jit(functools.partial(embedded, model))

    def _set_up(
        self, model: Any, slots: int, readers: int, positions: int, mesh: Mesh | None
    ) -> None:
        """Sets what engines of all models have: rows of so many positions, and what is handed over
        of them."""
        self.model, self._mesh = model, mesh
        self.rows: list[_Row | None] = [None] * slots
        self.waiting: collections.deque[_Row] = collections.deque()
        self._numbers, self._readers, self._drafts = 0, readers, 0
        self.adapters, self.exact = (None,), False
        # Tokens that a draft has guessed, and those of them that the model has written.
        self.guessed = self.right = 0
        self._sampling = unasked(model, slots)
        self._history = np.zeros((slots, positions), np.int32)
        self._last = np.zeros(slots, np.int32)
        self._adapter = np.zeros(slots, np.int32)
        # Handed over where no row's tokens are read.
        empty = {size: np.zeros((size, positions), np.int32) for size in (slots, readers)}
        self._no_history = {size: self._put(tokens) for size, tokens in empty.items()}

    def _put(self, tokens: np.ndarray) -> jax.Array:
        place = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        return jax.device_put(tokens, place)

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    @property
    def programs(self) -> int:
        """Number of programs that have been compiled."""
        return sum(each._cache_size() for each in {self._reads, self._writes})

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the configuration: of equal ones on equal machines a request has the same bits."""
        dtypes = sorted({str(x.dtype) for x in jax.tree.leaves((self._params, self._caches))})
        kind = jax.devices()[0].device_kind, jax.__version__
        sizes = len(self.rows), self._readers, self.chunk, self.page, self._drafts
        mesh = None if self._mesh is None else dict(self._mesh.shape)
        whole = repr((self.model, sizes, self.exact, dtypes, mesh, kind)).encode()
        return "fp_" + hashlib.blake2b(whole, digest_size=6).hexdigest()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered or waits."""
        return bool(self.waiting) or any(row is not None for row in self.rows)

    def warm_up(self) -> None:
        """Compiles both programs, so that the first request waits for neither."""
        self.submit(Request([0], min(2, self.longest - 1)))
        while self.is_busy:
            self.step()

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number; raises ValueError for one that cannot be
        answered."""
        tokens = np.asarray(request.prompt)
        if not tokens.size:
            raise ValueError("the prompt is empty: give at least one token")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}: ask for at least one token")
        if not 0 <= request.min_tokens <= request.max_tokens:
            raise ValueError(
                f"min_tokens is {request.min_tokens}: give a whole number from 0 to max_tokens, "
                f"which is {request.max_tokens}"
            )
        if request.min_tokens and len(request.ends) > ENDS:
            raise ValueError(
                f"min_tokens is given with {len(request.ends)} tokens that end an answer: at most "
                f"{ENDS} can be held back"
            )
        if len(request.logit_bias) > BIASES:
            raise ValueError(
                f"logit_bias has {len(request.logit_bias)} tokens: give at most {BIASES}"
            )
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            raise ValueError(
                f"the prompt has tokens from {tokens.min()} to {tokens.max()}: the vocabulary has "
                f"{self.model.vocab_size}"
            )
        if request.adapter not in self.adapters:
            raise ValueError(
                f"the adapter is {request.adapter!r}: there are {', '.join(self.adapters[1:])}"
            )
        self._check_room(request)
        self._numbers += 1
        # What an adapter reads has keys and values of its own.
        own = self.adapters.index(request.adapter)
        digests = digests_of(request.prompt, self.chunk, own)
        self.waiting.append(_Row(self._numbers, request, [], digests, 0))
        return self._numbers

    def _own(self, request: Request) -> Sequence[int]:
        """The tokens that an answer follows in its row."""
        return request.prompt

    def _check_room(self, request: Request) -> None:
        """Raises ValueError where a row is too short for a request."""
        count = len(request.prompt)
        if count + request.max_tokens > self.longest:
            raise ValueError(
                f"the prompt has {count} tokens: with max_tokens={request.max_tokens} that "
                f"exceeds the {self.longest} of this server"
            )

    def cancel(self, number: int) -> None:
        """Frees what a request holds; nothing where it has ended."""
        self.waiting = collections.deque(row for row in self.waiting if row.number != number)
        for slot, row in enumerate(self.rows):
            if row is not None and row.number == number:
                self._leave(slot)

    def step(self) -> list[Event]:
        """Reads a chunk of waiting prompts, writes a token of every other request, or as many as a
        draft has guessed and one more, and returns what was written."""
        self._admit()
        taken = {s: row.read < len(row.request.prompt) for s, row in enumerate(self.rows) if row}
        reading = [slot for slot, reads in taken.items() if reads]
        writing = [slot for slot, reads in taken.items() if not reads]
        reading = sorted(reading, key=lambda slot: self.rows[slot].number)[: self._readers]
        # Both are under way before either is waited for.
        read = self._read(reading) if reading else None
        wrote = self._write(writing) if writing else None
        events = []
        if read is not None:
            drawn = jax.device_get(read)
            for index, slot in enumerate(reading):
                if (row := self.rows[slot]).read == len(row.request.prompt):
                    events.extend(self._receive(slot, drawn, index))
        if wrote is not None:
            drawn = jax.device_get(wrote)
            for slot in writing:
                self.guessed += self._count(self.rows[slot]) - 1
                self.right += int(drawn.count[slot]) - 1
                events.extend(self._receive(slot, drawn, slot))
        return events

    def score(
        self, tokens: Sequence[int], top: int = 0, adapter: str | None = None
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """Returns the log-probability of every token but the first, and so many alternatives, by
        the forward pass of training: of a row padded to a power of two, or to ``longest``."""
        row = np.zeros((2, self._padded(len(tokens))), np.int32)  # Never a row alone.
        row[0, : len(tokens)] = tokens
        adapter_B = np.full(2, self.adapters.index(adapter), np.int32)
        with self._on_mesh():
            logprobs, ids, values = jax.device_get(self._score(self._params[0], row, adapter_B))
        found = []
        for at in range(len(tokens) - 1):
            best = zip(ids[at, :top].tolist(), values[at, :top].tolist(), strict=True)
            found.append((float(logprobs[at]), tuple(best)))
        return found

    def groups(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the numbers of rows that :meth:`embed` takes together: as many as readers, of
        lengths that are padded alike."""
        sizes = collections.defaultdict(list)
        for number, row in enumerate(rows):
            sizes[self._padded(len(row))].append(number)
        n = self._readers
        return [those[i : i + n] for those in sizes.values() for i in range(0, len(those), n)]

    def embed(
        self,
        rows: Sequence[Sequence[int]],
        *,
        pooling: str = "mean",
        adapter: str | None = None,
    ) -> np.ndarray:
        """Returns the last hidden states [rows, width] in float32, of unit length: the mean over a
        row's tokens, or with ``pooling`` "last" that of its last one. A row's bits do not depend on
        others of its group."""
        size = self._padded(len(rows[0]))
        tokens_BT = np.zeros((self._readers, size), np.int32)
        count_B = np.ones(self._readers, np.int32)
        for index, row in enumerate(rows):
            tokens_BT[index, : len(row)], count_B[index] = row, len(row)
        adapter_B = np.full(self._readers, self.adapters.index(adapter), np.int32)
        with self._on_mesh():
            found = self._embed(self._params[0], tokens_BT, count_B, adapter_B, pooling == "last")
        return jax.device_get(found)[: len(rows)]

    def _padded(self, length: int) -> int:
        """How many positions a row of so many has where it is read at once."""
        return max(2, min(1 << (length - 1).bit_length(), self.longest))

    def _admit(self) -> None:
        """Gives waiting requests free slots, in their order."""
        for slot, taken in enumerate(self.rows):
            if taken is not None or not self.waiting:
                continue
            row = self.waiting[0]
            request = row.request
            # At least one token is read: its logits are the first that count.
            shared = self.pool.beginning(row.digests[: (len(request.prompt) - 1) // self.chunk])
            own = self._own(request)
            need = -(-(len(own) + request.max_tokens) // self.page)
            pages = self.pool.take(shared, need - len(shared))
            if pages is None:
                return
            self.waiting.popleft()
            row.pages, row.read = pages, len(shared) * self.page
            self.rows[slot] = row
            self._table[slot] = 0
            self._table[slot, : len(pages)] = pages
            top_k = min(request.top_k or self.model.vocab_size, self.model.vocab_size)
            chosen = request.temperature, top_k, request.top_p, request.min_p
            chosen += (request.seed % 2**32,)
            chosen += request.repetition_penalty, request.frequency_penalty
            held = sorted(request.ends) if request.min_tokens else []
            held += [-1] * (ENDS - len(held))
            chosen += request.presence_penalty, request.min_tokens, held, len(own)
            filled = [*request.logit_bias.items(), *[(self.model.vocab_size, 0.0)] * BIASES]
            chosen += tuple(zip(*filled[:BIASES], strict=True))
            self._history[slot, : len(own)] = own
            for array, value in zip(self._sampling, chosen, strict=True):
                array[slot] = value
            self._adapter[slot] = self.adapters.index(request.adapter)

    def _read(self, slots: Sequence[int]) -> Drawn:
        B, C = self._readers, self.chunk
        tokens_BC = np.zeros((B, C), np.int32)
        start_B, count_B = np.zeros(B, np.int32), np.zeros(B, np.int32)
        for index, slot in enumerate(slots):
            row = self.rows[slot]
            part = row.request.prompt[row.read : row.read + C]
            tokens_BC[index, : len(part)] = part
            start_B[index], count_B[index] = row.read, len(part)
            if len(part) == C:
                first = row.read // self.page
                pages = row.pages[first : first + self.pool.per_chunk]
                self.pool.know(row.digests[row.read // C], pages)
            row.read += len(part)
        own = np.zeros(B, np.int32)
        own[: len(slots)] = slots
        table = np.where(np.arange(B)[:, None] < len(slots), self._table[own], 0)
        return self._call(self._reads, slots, own, table, tokens_BC, start_B, count_B)

    def _write(self, slots: Sequence[int]) -> Drawn:
        B = len(self.rows)
        start_B, count_B = np.zeros(B, np.int32), np.zeros(B, np.int32)
        for slot in slots:
            row = self.rows[slot]
            start_B[slot] = len(self._own(row.request)) + row.written - 1
            count_B[slot] = self._count(row)
        table = np.where(count_B[:, None] > 0, self._table, 0)
        last_B1 = self._last[:, None]
        return self._call(self._writes, slots, np.arange(B), table, last_B1, start_B, count_B)

    def _count(self, row: _Row) -> int:
        """Most tokens that a row may be written in a step."""
        return min(1 + self._drafts, row.request.max_tokens - row.written)

    def _call(self, program, slots, own, table, tokens_BC, start_B, count_B) -> Drawn:
        sampling = RowSampling(*(x[own] for x in self._sampling))
        want = any(self.rows[slot].request.top_logprobs for slot in slots)
        asked = np.array(any(self.rows[slot].request.adjusts for slot in slots))
        rows = Rows(table, tokens_BC, start_B, count_B, sampling, want, self._adapter[own], None)
        # Copies: what is handed over is read while the host goes on.
        rows = jax.tree.map(np.array, rows)
        history = self._put(self._history[own]) if asked else self._no_history[len(own)]
        rows = rows._replace(history=History(history, asked))
        with self._on_mesh():
            self._caches, drawn = program(self._params, self._caches, rows)
        return drawn

    def _receive(self, slot: int, drawn: Drawn, index: int) -> list[Event]:
        row, events = self.rows[slot], []
        request, n = row.request, row.request.top_logprobs
        for at in range(drawn.count[index]):
            token = int(drawn.tokens[index, at])
            self._history[slot, len(self._own(request)) + row.written] = token
            row.written += 1
            self._last[slot] = token
            reason = "length" if row.written == request.max_tokens else None
            reason = "stop" if token in request.ends else reason
            tops = drawn.top_tokens[index, at, :n], drawn.top_logprobs[index, at, :n]
            top = tuple(zip(*(x.tolist() for x in tops), strict=True))
            logprob = float(drawn.logprobs[index, at])
            events.append(Event(row.number, token, logprob, top, reason))
            if reason:
                self._leave(slot)
                break
        return events

    def _leave(self, slot: int) -> None:
        self.pool.give_back(self.rows[slot].pages)
        self.rows[slot] = None


def check_rows(slots: int, readers: int) -> None:
    """Raises ValueError for programs of one row."""
    for name, value in (("slots", slots), ("readers", readers)):
        if value < 2:
            raise ValueError(
                f"`{name}` is {value}: a row alone is computed in another order; give 2 or more"
            )


def row_length(model: DecoderConfig, longest: int | None, *, least: int) -> int:
    """Returns how many tokens a row may have: ``longest``, or what the model was trained with, as
    far as a cache can hold it. Raises ValueError for fewer than ``least``, and beyond learned
    positions."""
    longest = unscaled(model, model.seq_len) if longest is None else longest
    if longest < least:
        raise ValueError(f"`longest` is {longest}: give at least {least}")
    if model.positions == "learned" and longest > model.seq_len:
        raise ValueError(f"`longest` is {longest}: the model has {model.seq_len} learned positions")
    return longest


def _key_heads(model: DecoderConfig, heads: int) -> int:
    """Key heads of a page, as :func:`jaxtrain.models.decoding.pin_cache` has them on a mesh."""
    parts = split_over("heads")[1]
    return int(np.lcm(heads, parts)) if model.heads % parts == 0 else heads


def unasked(model: DecoderConfig, rows: int) -> RowSampling:
    """Returns how rows choose their tokens that ask for nothing: the most probable ones."""
    zero, whole = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    return RowSampling(
        temperature=zero,
        top_k=np.full(rows, model.vocab_size, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=zero.copy(),
        seed=np.zeros(rows, np.uint32),
        repetition=np.ones(rows, np.float32),
        frequency=zero.copy(),
        presence=zero.copy(),
        least=whole,
        ends=np.full((rows, ENDS), -1, np.int32),
        begin=whole.copy(),
        biased=np.full((rows, BIASES), model.vocab_size, np.int32),
        bias=np.zeros((rows, BIASES), np.float32),
    )


def cache_shapes(
    model: DecoderConfig, dtype: Any, pages: int, page: int, mesh: Mesh | None, kind: str | None
) -> Any:
    """Shapes of the keys and of the values of so many pages, and where they lie."""
    check_pages(model)
    place = None
    if mesh is not None:
        parts = PartitionSpec(None, None, "tensor" if mesh.shape["tensor"] > 1 else None)
        place = NamedSharding(mesh, parts)

    def one(heads: int, features: int) -> Any:
        shape = model.layers, pages, _key_heads(model, heads), page, features
        if kind is None:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        codes = jax.ShapeDtypeStruct(shape, jnp.int8, sharding=place)
        scale = jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=place)
        return Rounded(codes, scale, jnp.dtype(dtype))

    return tuple(one(*each) for each in model.block.cached)


def _empty(
    model: DecoderConfig, params: Any, pages: int, page: int, mesh: Mesh | None, kind: str | None
) -> tuple[Any, Any]:
    """Keys and values of pages that nothing has been read into."""
    dtype = params["embed"]["tokens"].dtype
    shapes = cache_shapes(model, dtype, pages, page, mesh, kind)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def _check_exact(page: int, mesh: Mesh | None, adapters: Mapping, cache: str | None) -> None:
    """Raises ValueError for what changes the order of sums, or what a trainer does not have."""
    if page != TILE:
        raise ValueError(f"`page` is {page} and `exact` is set: sums are of {TILE} positions there")
    if adapters:
        raise ValueError(
            "`adapters` are given and `exact` is set: a trainer adds one adapter in another order; "
            "merge it into the model"
        )
    if cache is not None:
        raise ValueError(f"`cache` is {cache!r} and `exact` is set: a trainer rounds no keys")
    check_mesh({} if mesh is None else dict(mesh.shape))


def _check_draft(draft: DecoderConfig, model: DecoderConfig, longest: int, drafts: int) -> None:
    if drafts < 1:
        raise ValueError(f"`drafts` is {drafts}: give at least 1 token")
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"`draft` has {draft.vocab_size} tokens, and the model {model.vocab_size}: give one of "
            "the same tokens"
        )
    if draft.positions == "learned" and draft.seq_len < longest:
        raise ValueError(
            f"`draft` has {draft.seq_len} learned positions: give a `longest` of at most that"
        )
    check_positions(draft, longest)
