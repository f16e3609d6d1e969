"""Finding the answer to a question in a context, as in SQuAD (Rajpurkar et al. 2016, 2018).

A context that is longer than a row is read in several, which overlap; a row without the answer
points at its first token, and a question of which all rows do so best has no answer.

Shapes: R rows, T positions, N tokens of a context.
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.masking import FIRST, special_id, texts_row
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA = "spans", common.BY_ACCURACY
PREDICTED = {"types": "T", "span": "2", "mask": ""}
# Tokens of an answer at most, as in BERT's script for SQuAD.
LONGEST = 30


def open_rows(config: Any) -> tuple[Any, data.Split, Any]:
    """The config, the texts, and both sides of rows."""
    fields = ("question", "context")
    sides = data.read_rows(config.data, fields, held_out=common.HELD_OUT)
    if sides is None:
        raise ValueError(
            f"--task answers reads rows of question, context and answers, and '{config.data}' has "
            "none"
        )
    return config, data.texts_of_rows(sides, fields), sides


def answers_of(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The answers of a row and where they start: of lists of text and answer_start (also flattened
    to fields with a dot), or of a list of such; a question that has none has an empty list.

    >>> answers_of({"context": "a b", "answers": {"text": ["b"], "answer_start": [2]}})
    [('b', 2)]
    """
    flat = {name: row.get(f"answers.{name}") for name in ("text", "answer_start")}
    answers = flat if row.get("answers") is None else row["answers"]
    if isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
        answers = {name: [each.get(name) for each in answers] for name in flat}
    texts, starts = (isinstance(answers, dict) and answers.get(name) for name in flat)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise ValueError(
            f"the question {row['question'][:60]!r} has answers that are no lists of text and "
            "answer_start: write them as SQuAD does, in JSON lines or Parquet"
        )
    for text, start in zip(texts, starts, strict=True):
        if not text or row["context"][start : start + len(text)] != text:
            raise ValueError(
                f"the question {row['question'][:60]!r} has the answer {text!r} at {start}, where "
                "its context has something else: correct answer_start, in letters from 0"
            )
    return list(zip(texts, starts, strict=True))


def text_of(
    config: Any, model: EncoderConfig, opened: Any, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows of questions and contexts; held-out questions are evaluated whole."""
    sides = opened[0], data.spread(opened[1], config.held_out_rows)
    train, held_out = (AnswerRows(config, model, tokenizer, rows) for rows in sides)
    task = f"where in its context an answer stands; rows share {config.stride} tokens"
    read = ("question", "context", "answers", "answers.text", "answers.answer_start")
    return common.Text(tokenizer, train, held_out, task=task, **common.of_sides(sides, *read))


class AnswerRows:
    """Questions and parts of their contexts: rows for batches.

    Attributes:
      questions: the rows that were read, with their ``answers`` as pairs of text and start.
      windows: of each row the number of its question and the first token of its part.
      letters: of each context where in it its tokens begin and end, [N, 2].
    """

    def __init__(
        self,
        config: Any,
        model: EncoderConfig,
        tokenizer: data.SubwordTokenizer,
        rows: Sequence[Mapping[str, Any]],
    ):
        self.length, self.typed = common.row_length(config, model), (model.token_types or 1) > 1
        self.ends = special_id(tokenizer, FIRST), int(tokenizer.eod)
        self.questions = [dict(row) | {"answers": answers_of(row)} for row in rows]
        asked = tokenizer.encode_batch([row["question"] for row in rows])
        self._asked = [tokens[: self.length // 2] for tokens in asked]
        placed = tokenizer.encode_placed([row["context"] for row in rows])
        self._contexts, self.letters = zip(*placed, strict=True)
        self.windows = []
        for number, (tokens, context) in enumerate(zip(self._asked, self._contexts, strict=True)):
            room = self.length - 3 - len(tokens)
            if room <= config.stride:
                raise ValueError(
                    f"--stride is {config.stride}, and a row of {self.length} tokens has {room} "
                    "for a context: give fewer, or a larger --seq-len"
                )
            step = room - config.stride
            count = 1 + max(0, -(-(len(context) - room) // step))
            self.windows += [(number, i * step) for i in range(count)]

    def __len__(self) -> int:
        return len(self.windows)

    def before(self, number: int) -> int:
        """The place in a row of the first token of a context."""
        return len(self._asked[number]) + 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, first = self.windows[index]
        before = self.before(number)
        part = self._contexts[number][first : first + self.length - before - 1]
        row = texts_row(self.ends, self._asked[number], part, self.length, typed=self.typed)
        span = np.zeros(2, np.int32)
        for text, start in self.questions[number]["answers"][:1]:
            starts_N, stops_N = self.letters[number].T
            ends = (
                int(np.searchsorted(stops_N, start, side="right")),
                int(np.searchsorted(starts_N, start + len(text))) - 1,
            )
            if first <= ends[0] <= ends[1] < first + len(part):
                span = np.array(ends, np.int32) - first + before
        return row | {"span": span, "mask": np.float32(1)}


def conclude(
    config: Any,
    model: EncoderConfig,
    text: common.Text,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how well held-out questions were answered, by SQuAD's measures, and shows some."""
    del means
    rows, may_lack = text.held_out, not all(each["answers"] for each in text.train.questions)
    logits = common.outputs(
        model, state, rows, lambda logits_BT2: logits_BT2, size=config.global_batch
    )
    found = best_answers(rows, logits, may_lack=may_lack)
    golds = [[said for said, _ in each["answers"]] or [""] for each in rows.questions]
    pairs = list(zip(found, golds, strict=True))
    exact, f1 = (
        np.mean([max(measure(said, gold) for gold in each) for said, each in pairs])
        for measure in (exact_match, word_f1)
    )
    lines = [f"held-out: {exact:.1%} exact, F1 {f1:.1%} of {len(golds):,} questions"]
    if config.examples:
        lines += ["", "held-out questions, an answer, and what it says:", ""]
    for number in data.spread(range(len(golds)), config.examples):
        asked = " ".join(rows.questions[number]["question"].split())
        lines.append(f"  {asked[:60]:60}  {golds[number][0]!r:16} {found[number]!r}")
    return lines


def best_answers(
    rows: AnswerRows, logits_RT2: Sequence[np.ndarray], *, may_lack: bool
) -> list[str]:
    """The most probable answer to each question in all of its rows, of `LONGEST` tokens at most;
    empty where there may be none, and every row says so."""
    best = [(-np.inf, "")] * len(rows.questions)
    none = np.full(len(best), np.inf)
    for (number, first), logits_T2 in zip(rows.windows, logits_RT2, strict=True):
        before, letters_N2 = rows.before(number), rows.letters[number][first:]
        count = min(len(letters_N2), rows.length - before - 1)
        starts_N, ends_N = logits_T2[before : before + count].T
        none[number] = min(none[number], logits_T2[0].sum())
        if not count:
            continue
        fits_NN = np.tri(count, k=LONGEST - 1, dtype=bool) & np.tri(count, dtype=bool).T
        scores_NN = np.where(fits_NN, starts_N[:, None] + ends_N, -np.inf)
        i, j = np.unravel_index(scores_NN.argmax(), scores_NN.shape)
        said = rows.questions[number]["context"][letters_N2[i, 0] : letters_N2[j, 1]].strip()
        best[number] = max(best[number], (float(scores_NN[i, j]), said))
    return [
        "" if may_lack and lack > score else said
        for (score, said), lack in zip(best, none.tolist(), strict=True)
    ]


def words_of(text: str) -> list[str]:
    """The words of a text as SQuAD compares them.

    >>> words_of("The answer, an 'Apple'!")
    ['answer', 'apple']
    """
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def exact_match(said: str, gold: str) -> float:
    """Whether two answers have the same words."""
    return float(words_of(said) == words_of(gold))


def word_f1(said: str, gold: str) -> float:
    """The harmonic mean of precision and recall of words.

    >>> round(word_f1("the red apple", "an apple"), 3), word_f1("the", "")
    (0.667, 1.0)
    """
    a, b = words_of(said), words_of(gold)
    if not a or not b:
        return float(a == b)
    both = (collections.Counter(a) & collections.Counter(b)).total()
    return 2 * both / (len(a) + len(b))
