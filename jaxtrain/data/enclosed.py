"""Texts, words and questions as rows for an encoder: between the tokens that begin and end one.

Shapes: R rows, T positions of a row, N tokens of a text, W words.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.tokenizers import SubwordTokenizer, Tokenizer

# What a tokenizer calls the token that begins a row and the one that masks: BERT's, RoBERTa's.
FIRST, MASK = ("[CLS]", "<s>"), ("[MASK]", "<mask>")
# Tokens of an answer at most, as in BERT's script for SQuAD.
LONGEST = 30


def special_id(tokenizer: Tokenizer, names: Sequence[str]) -> int:
    """The first of some special tokens that a tokenizer has."""
    for name in names:
        if (id := tokenizer.special_id(name.encode())) is not None:
            return id
    raise ValueError(
        f"the tokenizer has no token {' or '.join(names)}: give --tokenizer an encoder's, as of "
        "BERT or RoBERTa, or a number"
    )


class Ends(NamedTuple):
    """The tokens that begin a row, stand between two texts, and end it."""

    first: int
    between: tuple[int, ...]
    last: int


def row_ends(tokenizer: SubwordTokenizer) -> Ends:
    """The tokens that a tokenizer's file puts around texts; where it puts none, what it calls the
    first one, and the end of a document."""
    first, between, last = tokenizer.around
    if first and between and last:
        return Ends(first[0], between, last[-1])
    eod = int(tokenizer.eod)
    return Ends(special_id(tokenizer, FIRST), (eod,), eod)


def enclosed(
    ends: Ends,
    text: Sequence[int],
    pair: Sequence[int],
    length: int,
    *,
    typed: bool = True,
) -> dict[str, np.ndarray]:
    """A row [T] of tokens between those that begin and end one, and perhaps a second text of
    another type, which ends too."""
    first, between, last = ends
    both = [first, *text, *(between if len(pair) else [last])], [*pair, last] if len(pair) else []
    tokens_T, segments_T, types_T = np.zeros((3, length), np.int32)
    stop = len(both[0]) + len(both[1])
    tokens_T[:stop], segments_T[:stop] = both[0] + both[1], 1
    types_T[len(both[0]) : stop] = typed
    return {"tokens": tokens_T, "segments": segments_T, "types": types_T}


def label_of(target: str, row: Mapping[str, Any]) -> Any:
    """What a row's ``label`` is to a head: the number of a ``score``, or the names of ``labels``: a
    list, or a text with commas; an empty one has none.

    >>> label_of("score", {"label": "3.8"}), label_of("labels", {"label": "joy, love"})
    (3.8, ['joy', 'love'])
    """
    value = row.get("label", 0)  # a field that is not there is no empty one
    if target == "score":
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise ValueError(f"the row {str(row)[:80]} has no number as its label: a score is one")
    if isinstance(value, str) and not value.startswith("["):
        value = [name for each in value.split(",") if (name := each.strip())]
    if not isinstance(value, list) or not {type(name) for name in value} <= {str, int}:
        raise ValueError(
            f"the row {str(row)[:80]} has no names as its label: give JSON lines with lists of "
            "names, or names between commas"
        )
    return [str(name) for name in value]


class TextRows:
    """Texts, or pairs of them where the second is not empty; of what is too long for a row, the end
    of the longer one is cut off."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        pairs: Sequence[str],
        length: int,
        *,
        typed: bool,
    ):
        self.length, self.typed, self.ends = length, typed, row_ends(tokenizer)
        self._tokens = [tokenizer.encode_batch(part) for part in (texts, pairs)]

    def __len__(self) -> int:
        return len(self._tokens[0])

    def size(self, index: int) -> int:
        """The tokens of a row without its padding."""
        text, pair = (len(part[index]) for part in self._tokens)
        return min(text + pair + self._added(pair), self.length)

    def _added(self, pair: Any) -> int:
        return 2 + (len(self.ends.between) if pair else 0)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        text, pair = (part[index].tolist() for part in self._tokens)
        while len(text) + len(pair) > self.length - self._added(pair):
            (text if len(text) >= len(pair) else pair).pop()
        return enclosed(self.ends, text, pair, self.length, typed=self.typed)


class WordRows:
    """Words in a row each text, of which the first token of each stands for the word.

    Attributes:
      words: of each row the numbers of the words that have a place in it: a tokenizer may make
        nothing of a word.
      places: where in the row the first token of each of those stands.
      cut: words that find no place in their row, for it is too short.
    """

    def __init__(self, tokenizer: SubwordTokenizer, rows: Sequence[Sequence[str]], length: int):
        self.length, self.ends, self.cut = length, row_ends(tokenizer), 0
        self._tokens, self.words, self.places = [], [], []
        placed = tokenizer.encode_placed([" ".join(words) for words in rows])
        for words, (ids_N, letters_N2) in zip(rows, placed, strict=True):
            sizes_W = np.array([len(word) for word in words], int)
            begins_W = np.cumsum(sizes_W + 1) - sizes_W - 1
            first_W = np.searchsorted(letters_N2[:, 1], begins_W, side="right")
            starts_N = np.append(letters_N2[:, 0], np.iinfo(int).max)
            told_W = starts_N[first_W] < begins_W + sizes_W
            fits_W = told_W & (first_W < length - 2)
            self.cut += int((told_W & ~fits_W).sum())
            self._tokens.append(ids_N[: length - 2])
            self.words.append(np.flatnonzero(fits_W))
            self.places.append(1 + first_W[fits_W])

    def __len__(self) -> int:
        return len(self._tokens)

    def size(self, index: int) -> int:
        """The tokens of a row without its padding."""
        return len(self._tokens[index]) + 2

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return enclosed(self.ends, self._tokens[index], (), self.length)


class QuestionRows:
    """Questions and parts of their contexts: one that is longer than a row is read in several,
    which share ``stride`` tokens; None takes 128, or a third of a row where that is less.

    Attributes:
      contexts: the text of each question's.
      windows: of each row the number of its question and the first token of its part.
      letters: of each context where in it its tokens begin and end, [N, 2].
    """

    def __init__(
        self,
        tokenizer: SubwordTokenizer,
        questions: Sequence[str],
        contexts: Sequence[str],
        length: int,
        *,
        stride: int | None,
        typed: bool,
    ):
        self.length, self.typed, self.ends = length, typed, row_ends(tokenizer)
        self.contexts = contexts
        self.stride = stride = min(128, length // 3) if stride is None else stride
        asked = tokenizer.encode_batch(questions)
        self._asked = [tokens[: length // 2] for tokens in asked]
        placed = tokenizer.encode_placed(contexts)
        self._contexts, self.letters = zip(*placed, strict=True) if placed else ((), ())
        self.windows = []
        for number, context in enumerate(self._contexts):
            room = length - 1 - self.before(number)
            if room <= stride:
                raise ValueError(
                    f"--stride is {stride}, and a row of {length} tokens has {room} for a "
                    "context: give fewer, or longer rows"
                )
            step = room - stride
            count = 1 + max(0, -(-(len(context) - room) // step))
            self.windows += [(number, i * step) for i in range(count)]

    def __len__(self) -> int:
        return len(self.windows)

    def before(self, number: int) -> int:
        """The place in a row of the first token of a context."""
        return 1 + len(self._asked[number]) + len(self.ends.between)

    def part(self, index: int) -> np.ndarray:
        """The tokens of a context that a row has."""
        number, first = self.windows[index]
        return self._contexts[number][first : first + self.length - self.before(number) - 1]

    def size(self, index: int) -> int:
        """The tokens of a row without its padding."""
        return self.before(self.windows[index][0]) + len(self.part(index)) + 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        asked = self._asked[self.windows[index][0]]
        return enclosed(self.ends, asked, self.part(index), self.length, typed=self.typed)


class Answer(NamedTuple):
    """The most probable answer of a context.

    Args:
      text, start, stop: what it says, and where in its context, in letters.
      probability: that it begins and ends there, of all places in its row, and none.
      none: that there is no answer, in the row in which that is least probable.
      is_none: whether that is more probable than the answer, by the sums of logits.
    """

    text: str = ""
    start: int = 0
    stop: int = 0
    probability: float = 0.0
    none: float = 1.0
    is_none: bool = True


def best_answers(rows: QuestionRows, logits_RT2: Sequence[np.ndarray]) -> list[Answer]:
    """The most probable answer to each question in all of its rows, of `LONGEST` tokens at most."""
    scores, best = [-np.inf] * len(rows.contexts), [Answer()] * len(rows.contexts)
    lacks, none = np.full((2, len(best)), np.inf)
    for index, logits_T2 in enumerate(logits_RT2):
        number, first = rows.windows[index]
        before, letters_N2 = rows.before(number), rows.letters[number][first:]
        count = len(rows.part(index))
        starts_N, ends_N = np.float64(logits_T2[before : before + count]).T
        lack = float(logits_T2[0].sum())  # of the row's first token, which says that there is none
        both = zip(logits_T2[0], (starts_N, ends_N), strict=True)
        total = sum(np.logaddexp.reduce([none_1, *x_N]) for none_1, x_N in both)
        lacks[number] = min(lacks[number], lack)
        none[number] = min(none[number], float(np.exp(lack - total)))
        if not count:
            continue
        fits_NN = np.tri(count, k=LONGEST - 1, dtype=bool) & np.tri(count, dtype=bool).T
        scores_NN = np.where(fits_NN, starts_N[:, None] + ends_N, -np.inf)
        i, j = np.unravel_index(scores_NN.argmax(), scores_NN.shape)
        if (score := float(scores_NN[i, j])) > scores[number]:
            start, stop = int(letters_N2[i, 0]), int(letters_N2[j, 1])
            said = rows.contexts[number][start:stop]
            start += len(said) - len(said.lstrip())
            said = said.strip()
            scores[number] = score
            best[number] = Answer(said, start, start + len(said), float(np.exp(score - total)))
    return [
        each._replace(none=float(p), is_none=bool(lack > score))
        for each, p, lack, score in zip(best, none, lacks, scores, strict=True)
    ]
