"""How often a model's classes, tags, answers and texts are right.

Shapes: N rows or words, K classes.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.enclosed import label_of
from jaxtrain.evaluate.answers import answers_of, exact_match, word_f1
from jaxtrain.evaluate.groups import accuracy, by_group, class_measures, macro_f1, table_lines
from jaxtrain.evaluate.several import correlations, label_f1
from jaxtrain.host import pictures
from jaxtrain.predict.heads import Model, head_of, predictions, records_of, spans_of

# Classes that are printed, the most frequent ones; and of how many a picture has names and numbers.
PRINTED, NAMED, NUMBERED = 30, 40, 12


def report(
    model: Model, path: str, group: str | None = None
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Returns the measures of a file of rows that say what is right, and of classes and tags the
    counts [K, K] of what each is taken for. Of classes, ``group`` may name a field by which rows
    are told apart (:func:`jaxtrain.evaluate.groups.by_group`).

    Raises:
      ValueError: there are no rows, or one lacks what is right, or has a class that is none of the
        model's.
    """
    head, kind = head_of(model), model.kind
    may_lack = head.gold == "answers" or kind == "labels"
    fields = head.fields if may_lack else (*head.fields, head.gold)
    if group is not None and (head.gold != "label" or kind in ("score", "labels")):
        raise ValueError(f"--group is {group}, and the model has no classes: leave it out")
    records, groups = records_of(path, (*fields, *([group] if group else []))), []
    right = []
    for row in records:
        right.append(_right(model, head.gold, row))
        groups.append(str(row.get(group)))
    if not right:
        raise ValueError(f"'{path}' has no row: name a file of rows")
    if head.gold == "answers":
        model = dataclasses.replace(model, unanswerable=[""] in right)
    said = predictions(model, path)
    if kind == "score":
        sides = np.array(right), np.array([each["score"] for each in said])
        error = float(np.square(sides[0] - sides[1]).mean())
        return {"count": len(right), "loss": error} | correlations(*sides), None
    if kind == "labels":
        return _of_labels(model.classes, right, [each["labels"] for each in said]), None
    if head.gold in ("answers", "target"):
        same = exact_match if head.gold == "answers" else operator.eq
        sums = np.zeros(2)
        for texts, each in zip(right, said, strict=True):
            sums += [max(near(each["text"], text) for text in texts) for near in (same, word_f1)]
        exact, f1 = (sums / len(right)).tolist()
        return {"count": len(right), "exact": exact, "f1": f1}, None
    if head.gold == "label":
        labels = [each["label"] for each in said]
        found, counts = _of_classes(model.classes, right, labels)
        if group is not None:
            sides = (np.array([model.classes.index(x) for x in side]) for side in (right, labels))
            names = sorted(set(groups))
            numbers_N = np.array([names.index(name) for name in groups])
            found["groups"] = by_group(*sides, numbers_N, names)
        return found, counts
    told = []
    for names, each in zip(right, said, strict=True):  # without words that have no place in a row
        kept = [pair for pair in zip(names, each["tags"], strict=True) if pair[1] is not None]
        told.append(tuple(zip(*kept, strict=True)) or ((), ()))
    flat = ([name for sides in told for name in sides[side]] for side in (0, 1))
    found, counts = _of_classes(model.classes, *flat)
    if any(name.startswith("B-") for name in model.classes):
        found["spans"] = _of_spans(told)
    return found, counts


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a report in words; of means of an evaluation, with the ``count`` of rows, a line."""
    if "pearson" in found:
        scores = ", ".join(f"{each} {found[each]:.4f}" for each in ("pearson", "spearman"))
        yield f"{name}: {scores}, squared error {found['loss']:.4g} of {found['count']:,} rows"
    elif "accuracy" not in found:
        yield f"{name}: {found['exact']:.1%} exact, F1 {found['f1']:.1%} of {found['count']:,} rows"
    else:
        every = f"F1 of all labels {found['micro_f1']:.1%}, " if "micro_f1" in found else ""
        yield (
            f"{name}: {found['accuracy']:.1%} right of {found['count']:,}, {every}mean F1 of "
            f"classes {found['macro_f1']:.1%}"
        )
    if "classes" not in found:
        return
    if spans := found.get("spans"):
        scores = ", ".join(f"{each} {spans[each]:.1%}" for each in ("precision", "recall", "f1"))
        yield f"spans: {scores}"
    order = sorted(found["classes"].items(), key=lambda item: -item[1]["count"])
    yield f"{'':<30} {'precision':>10} {'recall':>10} {'f1':>10} {'count':>10}"
    for each, of in order[:PRINTED]:
        shares = " ".join(f"{of[x]:>10.1%}" for x in ("precision", "recall", "f1"))
        yield f"{each[:30]:<30} {shares} {of['count']:>10,}"
    if len(order) > PRINTED:
        yield f"and {len(order) - PRINTED:,} rarer classes"
    yield from table_lines(found["groups"]) if "groups" in found else ()


def draw(names: Sequence[str], counts_KK: np.ndarray, path: Any) -> None:
    """Draws what each class is taken for: a row for each, dark where most are. Raises ImportError
    where matplotlib is not installed."""
    K = len(names)
    side = 2.5 + 0.3 * min(K, NAMED)
    figure = pictures.new_figure(side, side)
    axes = figure.add_subplot()
    shares_KK = counts_KK / np.maximum(counts_KK.sum(1, keepdims=True), 1)
    axes.imshow(shares_KK, cmap="Blues", vmin=0, vmax=1)
    pictures.finish_axes(axes, "what each class is taken for", x="taken for", y="is")
    axes.grid(visible=False)
    if K <= NAMED:
        axes.set_xticks(range(K), [name[:20] for name in names], rotation=90, fontsize=8)
        axes.set_yticks(range(K), [name[:20] for name in names], fontsize=8)
    for (i, j), count in np.ndenumerate(counts_KK) if K <= NUMBERED else ():
        ink = "white" if shares_KK[i, j] > 0.5 else "black"
        axes.text(j, i, f"{count:,}", ha="center", va="center", color=ink, fontsize=7)
    pictures.save_figure(figure, path)


def _right(model: Model, gold: str, row: Mapping[str, Any]) -> Any:
    """What is right of a row: the name of its class, those of its words, or texts."""
    if gold == "answers":
        return [text for text, _ in answers_of(row)] or [""]
    if gold == "target":
        return [str(row[gold])]
    if gold == "label":
        if model.kind not in ("score", "labels"):
            return _named(model, row[gold])
        found = label_of(model.kind, row)
        return found if model.kind == "score" else [_named(model, name) for name in found]
    if not isinstance(row[gold], list) or len(row[gold]) != len(row["tokens"]):
        raise ValueError(
            f"the row {str(row)[:80]} must have lists of tokens and tags of one length"
        )
    return [_named(model, each) for each in row[gold]]


def _named(model: Model, value: Any) -> str:
    """The name of a class that a row has, which may be its number."""
    names = model.classes
    if str(value) in names:
        return str(value)
    if str(value).isdecimal() and int(value) < len(names):
        return names[int(value)]
    raise ValueError(
        f"a row has the class {value!r}, which is none of the model's: {', '.join(names)[:200]}"
    )


def _of_classes(
    names: Sequence[str], right_N: Sequence[str], said_N: Sequence[str]
) -> tuple[dict[str, Any], np.ndarray]:
    number = {name: i for i, name in enumerate(names)}
    sides = tuple(np.array([number[x] for x in side], int) for side in (right_N, said_N))
    counts_KK = np.zeros((len(names), len(names)), int)
    np.add.at(counts_KK, sides, 1)
    measures = class_measures(*sides, len(names))
    del measures["occurs"]
    by_name = {
        name: {each: float(values[i]) for each, values in measures.items()}
        | {"count": int(counts_KK[i].sum())}
        for i, name in enumerate(names)
    }
    found = {
        "count": len(sides[0]),
        "accuracy": accuracy(*sides) if len(sides[0]) else 0.0,
        "macro_f1": macro_f1(*sides) if len(sides[0]) else 0.0,
        "classes": by_name,
    }
    return found, counts_KK


def _of_labels(names: Sequence[str], *names_of: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The measures of the labels that rows have, and that they are said to have; a row is right
    where all of its are."""
    right_NK, said_NK = (np.array([[x in row for x in names] for row in side]) for side in names_of)
    counts = [x_NK.sum(0) for x_NK in (right_NK & said_NK, right_NK, said_NK)]
    by_name = {
        name: {"precision": hits / max(said, 1), "recall": hits / max(told, 1)}
        | {"f1": 2 * hits / max(told + said, 1), "count": told}
        for name, hits, told, said in zip(names, *(x_K.tolist() for x_K in counts), strict=True)
    }
    accuracy = float((right_NK == said_NK).all(1).mean())
    found = {"count": len(right_NK), "accuracy": accuracy, "classes": by_name}
    return found | label_f1(*counts)


def _of_spans(told: Sequence[Sequence[Sequence[str]]]) -> dict[str, float]:
    """The precision, recall and F1 of spans, of which kind, first and last word are right."""
    right, said = (
        {(n, *each.values()) for n, sides in enumerate(told) for each in spans_of(sides[side])}
        for side in (0, 1)
    )
    hits = len(right & said)
    return {
        "precision": hits / max(len(said), 1),
        "recall": hits / max(len(right), 1),
        "f1": 2 * hits / max(len(said) + len(right), 1),
    }
