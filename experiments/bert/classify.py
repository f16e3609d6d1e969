"""Telling the class of a text, or of a pair of texts: its package, its folder, or its label."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.enclosed import TextRows
from jaxtrain.evaluate.groups import by_group, table_lines
from jaxtrain.host import extras
from jaxtrain.methods.group_dro import group_dro
from jaxtrain.methods.population import Population
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA, FIELDS = "classes", common.BY_ACCURACY, "text and label"
PREDICTED = {"label": "", "mask": ""}
# Its tests are about all the other packages, and larger than them together.
NO_PACKAGE = {"test"}
BASELINE_ROWS = 50_000
# The accuracy of the group that has the least, by which checkpoints are chosen where groups weigh.
WORST = "worst_group_accuracy"
_MODULES = "sklearn.feature_extraction.text", "sklearn.linear_model"
_NEEDS = "the baseline comes with scikit-learn"
_sklearn = functools.partial(extras.load, _NEEDS, "vision", *_MODULES)


def open_rows(config: Any) -> tuple[Any, data.Split, Any]:
    """The config with all classes of labelled rows, their texts, and both sides of them; of text
    without labels None."""
    _sklearn()  # before anything is trained
    sides = None
    if config.data != "python":
        sides = data.read_rows(config.data, (config.field, "label"), held_out=common.HELD_OUT)
    if sides is None:
        return config, common.split_of(config), None
    names = {str(row["label"]) for side in sides for row in side}
    config = dataclasses.replace(config, classes=len(names))
    return config, data.texts_of_rows(sides, (config.field, "text_pair")), sides


def text_of(
    config: Any, model: EncoderConfig, opened: Any, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows with their class: the package or the folder that they are of, or what they say."""
    make = classified_text if isinstance(opened, data.Split) else labelled_text
    return make(config, model, opened, tokenizer)


def classified_text(
    config: Any, model: EncoderConfig, split: data.Split, tokenizer: data.SubwordTokenizer
) -> common.Text:
    """Rows with the package, or the folder, that they are of."""
    classes = largest_classes(split, config)
    number = {name: label for label, name in enumerate(classes)}
    rows, files, prints = [], [], []
    for side in split:
        chosen = [each for each in side if class_of(each.name) in number]
        corpus = data.tokenize(chosen, tokenizer)
        labels = [number[class_of(each.name)] for each in chosen]
        rows.append(common.fragments(config, model, tokenizer, corpus, labels=labels))
        files.append(len(chosen))
        prints.append(corpus.fingerprint)
    held_out = data.spread(rows[1], config.held_out_rows)
    task = f"which of {len(classes)}: {', '.join(classes)}"
    return common.Text(tokenizer, rows[0], held_out, tuple(files), tuple(prints), task, classes)


def labelled_text(
    config: Any,
    model: EncoderConfig,
    sides: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: data.SubwordTokenizer,
) -> common.Text:
    """Rows that say their class themselves; of what is too long for one, the end is cut off."""
    names = {str(row["label"]) for side in sides for row in side}
    # Labels 0 to 10 keep their numbers.
    classes = tuple(sorted(names, key=int if all(map(str.isdecimal, names)) else str))
    train, held_out = (LabelledRows(config, model, tokenizer, rows, classes) for rows in sides)
    if config.class_weights:
        train.weights_N = equal_weights(train.labels, len(classes))[train.labels]
    of_groups = {} if config.group is None else _grouped(config, sides, train, held_out)
    some, task = data.spread(held_out, config.held_out_rows), ", ".join(classes)
    read = (config.field, "text_pair", "label", *([config.group] if config.group else []))
    found = common.of_sides(sides, *read) | {"classes": classes} | of_groups
    return common.Text(tokenizer, train, some, task=f"which of {len(classes)}: {task}", **found)


def check_groups(config: Any) -> None:
    """Refuses flags of groups that need others."""
    if config.group is None:
        if config.group_weights is not None:
            raise ValueError("--group-weights is given without --group: name the field of groups")
        return
    if config.group_weights == "dro" and config.population != Population():
        raise ValueError(
            "--group-weights dro is for one training, and --population makes several: give equal "
            "or fixed weights"
        )
    if config.group_rate < 0:
        raise ValueError(f"--group-rate is {config.group_rate}: give a number of at least 0")


def equal_weights(numbers_N: np.ndarray, count: int) -> np.ndarray:
    """Weights of rows by their number, from 0 to count - 1, with which all numbers count alike.

    >>> equal_weights(np.array([0, 0, 0, 1]), 2)
    array([0.66666667, 2.        ])
    """
    counts = np.bincount(numbers_N, minlength=count)
    return len(numbers_N) / count / np.maximum(counts, 1)


def _grouped(config: Any, sides: Sequence[Any], *rows: Any) -> dict[str, Any]:
    """Gives rows to train on and held out their groups, and those to train on the groups' weights;
    returns fields of a Text."""
    found = [[row.get(config.group) for row in side] for side in sides]
    if any(name in (None, "") for side in found for name in side):
        raise ValueError(f"--group is {config.group}: some rows lack that field; fill it in")
    groups = tuple(sorted({str(name) for side in found for name in side}))
    for part, side in zip(rows, found, strict=True):
        numbers = np.array([groups.index(str(name)) for name in side])
        part.groups_NG = np.eye(len(groups), dtype=np.float32)[numbers]
    train, numbers_N = rows[0], rows[0].groups_NG.argmax(1)
    counts_G = np.bincount(numbers_N, minlength=len(groups))
    more, weights = {"derived": functools.partial(of_groups, groups)}, config.group_weights
    if weights is not None:  # what it is for
        more["best_metric"] = WORST
    if weights == "dro":
        if not counts_G.all():
            name = groups[counts_G.argmin()]
            raise ValueError(f"--group-weights is dro: no row to train on is of the group {name!r}")
        more["method"] = group_dro(counts_G / counts_G.sum(), rate=config.group_rate)
    elif weights is not None:
        fixed = equal_weights(numbers_N, len(groups))
        if weights != "equal":
            fixed = _read_weights(weights, groups)
        train.weights_N = train.weights_N * fixed[numbers_N]
    return {"groups": groups, "more": more}


def of_groups(groups: Sequence[str], means: Mapping[str, Any]) -> dict[str, float]:
    """The loss and accuracy of each group that a batch or a set has rows of, by name, and the worst
    accuracy.

    >>> of_groups("ab", {"group_accuracy": [0.5, np.nan], "accuracy": 0.5})
    {'group/a/accuracy': 0.5, 'worst_group_accuracy': 0.5}
    """
    found = {
        f"group/{name}/{kind}": float(value)
        for kind in ("loss", "accuracy")
        for name, value in zip(groups, np.ravel(means.get(f"group_{kind}", ())), strict=False)
        if np.isfinite(value)
    }
    accuracies = [value for name, value in found.items() if name.endswith("/accuracy")]
    return found | ({WORST: min(accuracies)} if accuracies else {})


def _read_weights(text: str, groups: Sequence[str]) -> np.ndarray:
    pairs = [each.rpartition("=") for each in text.split(",")]
    try:
        found = {name: float(value) for name, _, value in pairs}
    except ValueError:
        found = {}
    if set(found) != set(groups) or not all(0 <= w < np.inf for w in found.values()):
        raise ValueError(
            f"--group-weights is {text}: give equal, dro, or a number of at least 0 for each "
            f"group, as in {','.join(f'{name}=1' for name in groups)}"
        )
    return np.array([found[name] for name in groups])


class LabelledRows(TextRows):
    """Texts, or pairs of them, with their classes: rows for batches, as those of Fragments."""

    def __init__(
        self,
        config: Any,
        model: EncoderConfig,
        tokenizer: data.SubwordTokenizer,
        rows: Sequence[Mapping[str, Any]],
        classes: Sequence[str],
    ):
        parts = ([str(row.get(name) or "") for row in rows] for name in (config.field, "text_pair"))
        typed = (model.token_types or 1) > 1
        super().__init__(tokenizer, *parts, common.row_length(config, model), typed=typed)
        self.labels = np.array([classes.index(str(row["label"])) for row in rows], np.int32)
        self.weights_N = np.ones(len(rows))
        self.groups_NG: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = {} if self.groups_NG is None else {"group": self.groups_NG[index]}
        return (
            super().__getitem__(index)
            | own
            | {"label": self.labels[index], "mask": np.float32(self.weights_N[index])}
        )


def class_of(name: str) -> str:
    """The package or folder of a document; empty outside of all.

    >>> class_of("json/tool/x.py"), class_of("abc.py")
    ('json', '')
    """
    return name.partition("/")[0] if "/" in name else ""


def largest_classes(split: data.Split, config: Any) -> tuple[str, ...]:
    """The packages with the most bytes, of those that have files on both sides of the split."""
    passed = NO_PACKAGE if config.data == "python" else set()
    sides = []
    for side in split:
        sizes = collections.Counter()
        for document in side:
            if (name := class_of(document.name)) and name not in passed:
                sizes[name] += len(document.text)
        sides.append(sizes)
    both = [name for name in sides[0] if sides[1][name]]
    if len(both) < config.classes:
        raise ValueError(
            f"--classes is {config.classes}, and '{config.data}' has {len(both)} folders with "
            "texts to train on and held out: give fewer"
        )
    both.sort(key=lambda name: (-sides[0][name] - sides[1][name], name))
    return tuple(sorted(both[: config.classes]))


def conclude(
    config: Any,
    model: EncoderConfig,
    text: common.Text,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how many fragments were right, beside counted words, and of which packages."""
    begun = f"from {config.init_from}" if config.init_from else "from scratch"
    labels = np.array([row["label"] for row in text.held_out])
    often = np.bincount(labels).max() / len(labels)
    lines = [
        f"held-out: {means['accuracy']:.1%} of {len(labels):,} fragments right, {begun}",
        f"TF-IDF with logistic regression: {baseline(text):.1%}; always the largest: {often:.1%}",
    ]
    if text.groups:
        size = min(config.global_batch, len(labels))
        guesses = common.outputs(model, state, text.held_out, lambda x: x.argmax(-1), size=size)
        numbers = np.array([row["group"].argmax() for row in text.held_out])
        found = by_group(labels, guesses, numbers, text.groups)
        lines += ["", f"held-out, by {config.group}:", *table_lines(found)]
    if not config.examples:
        return lines
    lines += ["", "held-out fragments, where they are from, and what it says:", ""]
    for row, guess in common.guesses(config, model, text, state):
        words = " ".join(text.tokenizer.decode(common.inside(row)).split())
        was, said = text.classes[row["label"]], text.classes[guess]
        lines.append(f"  {words[:60]:60}  {was:16} {said}")
    return lines


def baseline(text: common.Text) -> float:
    """The accuracy of logistic regression on the counted words of the same rows."""
    sklearn = _sklearn()
    words = sklearn.feature_extraction.text.TfidfVectorizer(
        token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), min_df=2, sublinear_tf=True
    )

    def side(rows: Any) -> tuple[list[str], list[int]]:
        found = [rows[i] for i in range(min(len(rows), BASELINE_ROWS))]
        texts = [text.tokenizer.decode(common.inside(row)) for row in found]
        return texts, [int(row["label"]) for row in found]

    (train, labels), (held_out, wanted) = side(text.train), side(text.held_out)
    regression = sklearn.linear_model.LogisticRegression(C=10.0, max_iter=300)
    regression.fit(words.fit_transform(train), labels)
    return float(regression.score(words.transform(held_out), wanted))
