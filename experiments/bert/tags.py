"""Telling the tag of every word, such as which names of persons and places a text has.

Tags that begin with B- and I- mark spans, which are counted whole: a span is right where its first
word, its last and its kind are (CoNLL 2003's measure; seqeval's default).

Shapes: B batch, T positions, C tags.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.enclosed import WordRows
from jaxtrain.loss import WeightedLoss
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA, FIELDS = "tags", common.BY_ACCURACY, "tokens and tags"
PREDICTED = {"types": "T", "targets": "T", "mask": "T"}


def open_rows(config: Any) -> tuple[Any, data.Split, Any]:
    """The config with all tags, the texts, and both sides of rows, whose tags are numbers."""
    sides = data.read_rows(config.data, ("tokens", "tags"), held_out=common.HELD_OUT)
    if sides is None:
        raise ValueError(f"--task tags reads rows of tokens and tags, and '{config.data}' has none")
    for row in (row for side in sides for row in side):
        words, tags = row["tokens"], row["tags"]
        if not all(isinstance(x, list) for x in (words, tags)) or len(words) != len(tags):
            raise ValueError(
                f"'{config.data}' has the row {str(row)[:80]}: tokens and tags must be lists of "
                "one length; write JSON lines or Parquet"
            )
        if not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"'{config.data}' has the row {str(row)[:80]}: tokens are words; put numbers in "
                "quotes"
            )
    names = names_of(config, {tag for side in sides for row in side for tag in row["tags"]})
    number = {name: i for i, name in enumerate(names)}
    number |= {i: i for i in range(len(names))}  # rows may have either
    sides = [[row | {"tags": [number[x] for x in row["tags"]]} for row in side] for side in sides]
    texts = [[{"text": " ".join(row["tokens"])} for row in side] for side in sides]
    config = dataclasses.replace(config, classes=len(names), tag_names=names)
    return config, data.texts_of_rows(texts, ["text"]), sides


def names_of(config: Any, found: set[Any]) -> tuple[str, ...]:
    """The names of all tags, in the order of their numbers; O comes first where rows have names."""
    given = config.tag_names
    if not found:
        raise ValueError(f"'{config.data}' has no word in any of its rows: give some")
    if all(type(tag) is int for tag in found):
        names = given or tuple(map(str, range(max(found) + 1)))
        strange = found - set(range(len(names)))
    else:
        names = given or tuple(sorted(map(str, found), key=lambda name: (name != "O", name)))
        strange = found - set(names)
    if strange:
        raise ValueError(
            f"'{config.data}' has the tag {min(strange, key=str)!r}, which is none of "
            f"{', '.join(names)}: name all by --tag-names, in the order of their numbers"
        )
    common.check_several("tag", config.data, names)
    return names


def text_of(
    config: Any, model: EncoderConfig, opened: Any, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows of words, of which the first token of each has the word's tag."""
    names = config.tag_names
    train, held_out = (TagRows(config, model, tokenizer, rows) for rows in opened)
    some = data.spread(held_out, config.held_out_rows)
    more, kinds = {}, [name[2:] if name[:2] in ("B-", "I-") else "" for name in names]
    if any(kinds):
        order = ["", *sorted(set(kinds) - {""})]
        kinds_C = np.array([order.index(kind) for kind in kinds])
        begins_C = np.array([name.startswith("B-") for name in names])
        more = {"derived": span_scores, "best_metric": "f1"}
        more["eval_loss_fn"] = loss_and_spans(model, kinds_C, begins_C)
    task = f"the tag of every word, of {len(names)}: {', '.join(names)}"
    if cut := train.cut + held_out.cut:
        task += f"; {cut:,} words are beyond the row's length and left out"
    found = common.of_sides(opened, "tokens", "tags") | {"classes": names, "more": more}
    return common.Text(tokenizer, train, some, task=task, **found)


class TagRows(WordRows):
    """Words with the numbers of their tags: rows for batches. A word of which the tokenizer makes
    nothing has no tag; ``cut`` counts the words that find no place in their row."""

    def __init__(
        self,
        config: Any,
        model: EncoderConfig,
        tokenizer: data.SubwordTokenizer,
        rows: Sequence[Mapping[str, Any]],
    ):
        words = [row["tokens"] for row in rows]
        super().__init__(tokenizer, words, common.row_length(config, model))
        both = zip(rows, self.words, strict=True)
        self._tags = [np.array(row["tags"], np.int32)[words] for row, words in both]

    def __getitem__(self, index: int) -> dict[str, Any]:
        targets_T, mask_T = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        targets_T[self.places[index]], mask_T[self.places[index]] = self._tags[index], 1
        return super().__getitem__(index) | {"targets": targets_T, "mask": mask_T}


def loss_and_spans(model: EncoderConfig, kinds_C: np.ndarray, begins_C: np.ndarray) -> Any:
    """Returns the loss of the model, with counts of spans: those in the text, those found, and
    those found that are right. ``kinds_C`` has the kind of each tag, 0 for none, and ``begins_C``
    whether it begins a span."""

    def loss(params: Any, batch: Mapping[str, jax.Array], rng: Any) -> WeightedLoss:
        logits_BTC = encoder.logits(model, params, batch, rng)
        found = encoder.logits_loss(model, logits_BTC, batch)
        counts = span_counts(
            *(
                (jnp.asarray(kinds_C)[tags_BT], jnp.asarray(begins_C)[tags_BT])
                for tags_BT in (batch["targets"], logits_BTC.argmax(-1))
            ),
            batch["mask"] > 0,
        )
        return dataclasses.replace(found, metrics={**found.metrics, **counts})

    return loss


def span_counts(
    told: tuple[jax.Array, jax.Array], said: tuple[jax.Array, jax.Array], is_word_BT: jax.Array
) -> dict[str, jax.Array]:
    """Counts spans of two taggings, each the kinds [B, T] and which begin one, of the words alone.

    A span begins at a tag that begins one, and where the kind is another than that of the word
    before; it ends before the next, or before a word of no kind.
    """
    order_BT = jnp.argsort(~is_word_BT, axis=1, stable=True)  # words first, without what is between

    def spans(kinds_BT: jax.Array, begins_BT: jax.Array) -> tuple[jax.Array, ...]:
        kinds_BT = jnp.take_along_axis(kinds_BT * is_word_BT, order_BT, axis=1)
        begins_BT = jnp.take_along_axis(begins_BT, order_BT, axis=1)
        before_BT = jnp.pad(kinds_BT[:, :-1], ((0, 0), (1, 0)))
        starts_BT = (kinds_BT > 0) & (begins_BT | (kinds_BT != before_BT))
        breaks_BT = starts_BT | (kinds_BT == 0)
        after_BT = jnp.pad(breaks_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        T = kinds_BT.shape[1]
        stops_BT = jax.lax.cummin(jnp.where(after_BT, jnp.arange(T), T), axis=1, reverse=True)
        return starts_BT, kinds_BT, stops_BT

    a, b = spans(*told), spans(*said)
    right_BT = a[0] & b[0] & (a[1] == b[1]) & (a[2] == b[2])
    named = {"spans_told": a[0], "spans_said": b[0], "spans_right": right_BT}
    return {name: x.sum().astype(jnp.float32) for name, x in named.items()}


def span_scores(means: Mapping[str, Any]) -> dict[str, float]:
    """The precision, recall and F1 of spans.

    >>> span_scores({"spans_told": 0.4, "spans_said": 0.2, "spans_right": 0.1})["recall"]
    0.25
    """
    if "spans_right" not in means:  # of a train step
        return {}
    right, said, told = (float(means[f"spans_{name}"]) for name in ("right", "said", "told"))
    return {
        "precision": right / said if said else 0.0,
        "recall": right / told if told else 0.0,
        "f1": 2 * right / (said + told) if said + told else 0.0,
    }


def conclude(
    config: Any,
    model: EncoderConfig,
    text: common.Text,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how many held-out tags and spans were right, and shows the words of some rows."""
    lines = [f"held-out: {means['accuracy']:.1%} of the tags right"]
    if "f1" in means:
        scores = (f"{name} {means[name]:.1%}" for name in ("precision", "recall", "f1"))
        lines[0] += f"; of spans {', '.join(scores)}"
    if not config.examples:
        return lines
    lines += ["", "a held-out word of some rows, its tag, and what it says:", ""]
    for row, guess_T in common.guesses(config, model, text, state):
        if not row["mask"].any():
            continue
        place = int((row["mask"] * (1 + (row["targets"] > 0))).argmax())  # a span's, if it has one
        stop = [*np.flatnonzero(row["mask"][place + 1 :]), row["segments"].sum() - 2 - place][0]
        word = text.tokenizer.decode(row["tokens"][place : place + 1 + stop]).strip()
        was, said = (text.classes[each[place]] for each in (row["targets"], guess_T))
        lines.append(f"  {word[:60]:60}  {was:16} {said}")
    return lines
