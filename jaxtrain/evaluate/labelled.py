"""A trained classifier on labelled rows, by groups of them."""

import json
from typing import Any

import jax
import numpy as np

from jaxtrain import data
from jaxtrain.data.masking import FIRST, special_id, texts_row
from jaxtrain.evaluate.groups import GAP, by_group
from jaxtrain.evaluate.scoring import SHORTEST
from jaxtrain.host.paths import as_path, exists
from jaxtrain.models import encoder
from jaxtrain.run import trained
from jaxtrain.serve.opening import Opened
from jaxtrain.sharding.rules import batch_parts

ALL = "all"


def classified(
    path: str,
    opened: Opened,
    *,
    mesh: Any,
    group: str | None = None,
    field: str = "text",
    rows: int = 16,
) -> dict[str, dict[str, Any]]:
    """Returns the accuracy and F1 of a classifier on rows of text, label and perhaps text_pair: of
    ``all`` and, where ``group`` names a field, of each group, and their ``gap``, as
    :func:`jaxtrain.evaluate.groups.by_group` has them.

    Args:
      path: JSON lines, CSV, TSV or Parquet, or a folder of such.
      opened: the model, whose folder has the names of its classes.
      mesh: where it lies.
      group, field: the fields of a row that have its group and its text.
      rows: of a batch.

    Raises:
      ValueError: the model is no classifier, there are no such rows, or a label is none of its.
    """
    model, tokenizer = opened.model, opened.tokenizer
    if getattr(model, "head", "") != "classes":
        raise ValueError(
            f"the model in '{opened.folder}' has no classes: give one that is trained by "
            "experiments.bert --task classify, or a BertForSequenceClassification"
        )
    names = _class_names(opened.folder)
    table = data.read_table(path, (field, "label", *([group] if group else [])))
    labels = [str(row["label"]) for row in table]
    if unknown := sorted(set(labels) - names.keys()):
        raise ValueError(
            f"'{path}' has the label {unknown[0]!r}, and the model knows {', '.join(names)}: "
            "rename it, or leave such rows out"
        )
    parts = ([str(row.get(name) or "") for row in table] for name in (field, "text_pair"))
    texts, pairs = (tokenizer.encode_batch(part) for part in parts)
    longest = max(len(a) + len(b) for a, b in zip(texts, pairs, strict=True)) + 3
    length = min(model.seq_len, max(SHORTEST, 1 << (longest - 1).bit_length()))
    ends = special_id(tokenizer, FIRST), int(tokenizer.eod)
    run = jax.jit(lambda params, batch: encoder.logits(model, params, batch).argmax(-1))
    size, guesses = -(-rows // batch_parts(mesh)) * batch_parts(mesh), []
    typed = (model.token_types or 1) > 1
    for start in range(0, len(table), size):
        chosen = [min(start + i, len(table) - 1) for i in range(size)]
        made = [texts_row(ends, texts[i], pairs[i], length, typed=typed) for i in chosen]
        batch = {name: np.stack([row[name] for row in made]) for name in made[0]}
        with jax.set_mesh(mesh):
            guesses.append(np.asarray(run(opened.params, batch)))
    guesses_N = np.concatenate(guesses)[: len(table)]
    labels_N = np.array([names[label] for label in labels])
    found = by_group(labels_N, guesses_N, np.zeros(len(table), int), (ALL,))
    del found[GAP]
    if group is not None:
        groups = sorted({str(row[group]) for row in table})
        groups_N = np.array([groups.index(str(row[group])) for row in table])
        found |= by_group(labels_N, guesses_N, groups_N, groups)
    return found


def _class_names(folder: str) -> dict[str, int]:
    """The number of each class of a run, or of a Hugging Face folder, by its name."""
    if exists(as_path(folder) / "checkpoints"):
        told = trained.stored(folder).get("special_tokens") or {}
    else:
        told = json.loads((as_path(folder) / "config.json").read_text())
    if not told.get("id2label"):
        raise ValueError(f"'{folder}' has no names of classes (id2label): export the run again")
    return {str(name): int(number) for number, name in told["id2label"].items()}
