"""Finding the answer to a question in a context, as in SQuAD (Rajpurkar et al. 2016, 2018).

A context that is longer than a row is read in several, which overlap; a row without the answer
points at its first token, and a question of which all rows do so best has no answer.

Shapes: R rows, T positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.enclosed import QuestionRows, best_answers
from jaxtrain.evaluate.answers import answers_of, exact_match, word_f1
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA = "spans", common.BY_ACCURACY
PREDICTED = {"types": "T", "span": "2", "mask": ""}


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


def text_of(
    config: Any, model: EncoderConfig, opened: Any, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows of questions and contexts; held-out questions are evaluated whole."""
    sides = opened[0], data.spread(opened[1], config.held_out_rows)
    train, held_out = (AnswerRows(config, model, tokenizer, rows) for rows in sides)
    task = f"where in its context an answer stands; rows share {train.stride} tokens"
    read = ("question", "context", "answers", "answers.text", "answers.answer_start")
    return common.Text(tokenizer, train, held_out, task=task, **common.of_sides(sides, *read))


class AnswerRows(QuestionRows):
    """Questions and parts of their contexts: rows for batches. ``questions`` has the rows that were
    read, with their ``answers`` as pairs of text and start."""

    def __init__(
        self,
        config: Any,
        model: EncoderConfig,
        tokenizer: data.SubwordTokenizer,
        rows: Sequence[Mapping[str, Any]],
    ):
        self.questions = [dict(row) | {"answers": answers_of(row)} for row in rows]
        parts = ([row[name] for row in rows] for name in ("question", "context"))
        options = {"stride": config.stride, "typed": (model.token_types or 1) > 1}
        super().__init__(tokenizer, *parts, common.row_length(config, model), **options)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (number, first), count = self.windows[index], len(self.part(index))
        span = np.zeros(2, np.int32)
        for text, start in self.questions[number]["answers"][:1]:
            starts_N, stops_N = self.letters[number].T
            ends = (
                int(np.searchsorted(stops_N, start, side="right")),
                int(np.searchsorted(starts_N, start + len(text))) - 1,
            )
            if first <= ends[0] <= ends[1] < first + count:
                span = np.array(ends, np.int32) - first + self.before(number)
        return super().__getitem__(index) | {"span": span, "mask": np.float32(1)}


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
    best = best_answers(rows, logits)
    found = ["" if may_lack and each.is_none else each.text for each in best]
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
