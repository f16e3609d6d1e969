"""Rows of an encoder's tasks, their text and what begins and ends them."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain import data
from jaxtrain.data.enclosed import row_ends
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HELD_OUT = 0.2
# The metadata of an experiment whose loss is not of a token of text.
BY_ACCURACY = {"best_metric": "accuracy", "best_mode": "max", "derived": lambda means: {}}


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows to train on and held-out rows, of how many files and which; the task in words, their
    tokenizer, names of classes and groups, fields that are not read, and more of the experiment."""

    tokenizer: data.SubwordTokenizer
    train: Any
    held_out: Any
    files: tuple[int, ...]
    prints: tuple[str, ...]
    task: str
    classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the text, by name."""
        found = dict(zip(("text", "held_out_text"), self.prints, strict=True))
        named = {"classes": self.classes, "groups": self.groups}
        return found | {name: ", ".join(each) for name, each in named.items() if each}


def row_length(config: Any, model: EncoderConfig) -> int:
    """Tokens per row."""
    return config.seq_len or model.seq_len


def check_several(kind: str, path: str, names: Collection[str]) -> None:
    """Refuses rows that all have one label or tag, of which there is nothing to learn."""
    if len(names) < 2:
        raise ValueError(
            f"'{path}' has one {kind} in all of its rows, {min(names)!r}: a classifier needs two; "
            "give rows of both"
        )


def split_of(config: Any) -> data.Split:
    """The documents to train on, and those that no task trains on."""
    return data.open_text(config.data, field=config.field, held_out=HELD_OUT)


def fragments(
    config: Any,
    model: EncoderConfig,
    tokenizer: data.SubwordTokenizer,
    corpus: data.Corpus,
    *,
    labels: Sequence[int] | None = None,
) -> data.Fragments:
    """A corpus as rows, each between the tokens that begin and end one."""
    first, _, last = row_ends(tokenizer)
    length = row_length(config, model)
    return data.Fragments(corpus, length, first=first, last=last, labels=labels)


def guesses(
    config: Any, model: EncoderConfig, text: Text, state: TrainState
) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Some held-out rows, each with what the trained model finds most probable."""
    rows = data.spread(text.held_out, config.examples)
    says = {"score": lambda logits: logits[:, 0], "labels": lambda logits: logits > 0}
    best = says.get(model.head, lambda logits: logits.argmax(-1))
    best = outputs(model, state, rows, best, size=len(rows))
    return list(zip(rows, best, strict=True))


def outputs(
    model: EncoderConfig,
    state: TrainState,
    rows: Any,
    best: Callable[[jax.Array], jax.Array],
    *,
    size: int,
) -> np.ndarray:
    """What the trained model says of each row: ``best`` of its logits, ``size`` rows at a time."""
    names = rows[0].keys() & {"tokens", "segments", "types"}
    step = jax.jit(lambda params, batch: best(encoder.logits(model, params, batch)))
    found = []
    for start in range(0, len(rows), size):
        part = [rows[min(start + i, len(rows) - 1)] for i in range(size)]
        batch = {name: np.stack([row[name] for row in part]) for name in names}
        found.append(np.asarray(step(state.params, batch)))
    return np.concatenate(found)[: len(rows)]


def inside(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """The tokens of a row between its ends."""
    return row["tokens"][1 : int(row["segments"].sum()) - 1]


def of_sides(sides: Iterable[Sequence[Mapping[str, Any]]], *read: str) -> dict[str, Any]:
    """The fields of a :class:`Text` that say which rows it has, of both sides."""
    sides = list(sides)
    prints = tuple(hashlib.sha256(repr(rows).encode()).hexdigest()[:32] for rows in sides)
    unread = tuple(name for name in sides[0][0] if name not in read)
    return {"files": tuple(map(len, sides)), "prints": prints, "unread": unread}
