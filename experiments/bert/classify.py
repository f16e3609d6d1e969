"""Telling the class of a text, or of a pair of texts: its package, its folder, or its label; or a
score of it, or any of several labels.

Shapes: B rows of a batch, N rows, C classes or labels.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.bert import common
from jaxtrain import data
from jaxtrain.data.enclosed import TextRows, label_of
from jaxtrain.evaluate import heads
from jaxtrain.evaluate.groups import by_group, table_lines
from jaxtrain.evaluate.several import correlations, label_f1
from jaxtrain.host import extras
from jaxtrain.loss import Sum, WeightedLoss
from jaxtrain.methods.group_dro import group_dro
from jaxtrain.methods.population import Population
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.state import TrainState

HEAD, METADATA, FIELDS = "classes", common.BY_ACCURACY, "text and label"
PREDICTED = {"mask": ""}
# By the head that learns each: the axis of the label in a batch, and of what else its rows have.
TARGETS = {"classes": {"label": ""}, "score": {"label": "", "row": ""}, "labels": {"label": "C"}}
# Its tests are about all the other packages, and larger than them together.
NO_PACKAGE = {"test"}
BASELINE_ROWS = 50_000
# The accuracy of the group that has the least, by which checkpoints are chosen where groups weigh.
WORST = "worst_group_accuracy"
_MODULES = "sklearn.feature_extraction.text", "sklearn.linear_model"
_NEEDS = "the baseline comes with scikit-learn"
_sklearn = functools.partial(extras.load, _NEEDS, "vision", *_MODULES)


def open_rows(config: Any) -> tuple[Any, data.Split, Any]:
    """The config with all classes or labels of labelled rows, their texts, and both sides of them;
    of text without labels None."""
    if config.target == "classes":
        _sklearn()  # before anything is trained
    sides = None
    if config.data != "python":
        # A row may have none of several labels.
        fields = (config.field, *([] if config.target == "labels" else ["label"]))
        sides = data.read_rows(config.data, fields, held_out=common.HELD_OUT)
    if sides is None:
        return config, common.split_of(config), None
    config = dataclasses.replace(config, classes=len(names_of(config, sides)))
    return config, data.texts_of_rows(sides, (config.field, "text_pair")), sides


def names_of(config: Any, sides: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """The names of all classes or labels of rows, in their order; a score has none. Raises
    ValueError for labels of another target."""
    rows = [row for side in sides for row in side]
    if config.target == "classes":
        _check_classes(config, [row["label"] for row in rows])
        names = {str(row["label"]) for row in rows}
        common.check_several("label", config.data, names)
    else:
        told = [label_of(config.target, row) for row in rows]
        names = set(itertools.chain.from_iterable(told)) if config.target == "labels" else set()
    if not names and config.target == "labels":
        raise ValueError(f"'{config.data}' has no row with a label: give rows that have some")
    # Labels 0 to 10 keep their numbers.
    return tuple(sorted(names, key=int if all(map(str.isdecimal, names)) else str))


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
    """Rows that say their label themselves; of what is too long for one, the end is cut off."""
    classes = names_of(config, sides)
    train, held_out = (LabelledRows(config, model, tokenizer, rows, classes) for rows in sides)
    if config.class_weights:
        train.weights_N = equal_weights(train.labels, len(classes))[train.labels]
    of_groups = {} if config.group is None else _grouped(config, sides, train, held_out)
    some = data.spread(held_out, config.held_out_rows)
    if config.target == "score":  # each has its place in the evaluation
        some = [row | {"row": np.int32(place)} for place, row in enumerate(some)]
    read = (config.field, "text_pair", "label", *([config.group] if config.group else []))
    task, more = "a score of a text, by its squared error", {}
    if classes:
        several = "any" if config.target == "labels" else "which"
        task = f"{several} of {len(classes)}: {', '.join(classes)}"
    if config.target == "score":
        loss = loss_and_rows(model, config.held_out_rows)
        more = {"best_metric": "pearson", "derived": of_scores, "eval_loss_fn": loss}
    elif config.target == "labels":
        more = {"best_metric": "micro_f1", "derived": of_labels}
    found = common.of_sides(sides, *read) | {"classes": classes, "more": more} | of_groups
    return common.Text(tokenizer, train, some, task=task, **found)


def loss_and_rows(model: EncoderConfig, N: int) -> Callable[..., WeightedLoss]:
    """Returns the loss of a model of scores, with the label and the score of each of N held-out
    rows at its place ``row`` int32 [B]: ranks are of all rows at once, and no sum over rows."""

    def loss(params: Any, batch: Mapping[str, jax.Array], rng: Any) -> WeightedLoss:
        scores_B1 = encoder.logits(model, params, batch, rng)
        found, at_BN = encoder.logits_loss(model, scores_B1, batch), jax.nn.one_hot(batch["row"], N)
        columns = {"_labels": batch["label"], "_scores": scores_B1[:, 0], "_rows": batch["mask"]}
        sums = {name: Sum((x_B[:, None] * at_BN).sum(0)) for name, x_B in columns.items()}
        return WeightedLoss(found.total, found.weight, sums)

    return loss


def of_scores(means: Mapping[str, Any]) -> dict[str, float]:
    """The correlations of an evaluation's scores with the labels of its rows."""
    if "_rows" not in means:  # of a train step
        return {}
    labels_N, scores_N, rows_N = (np.ravel(means[f"_{x}"]) for x in ("labels", "scores", "rows"))
    return correlations(labels_N[rows_N > 0], scores_N[rows_N > 0])


def of_labels(means: Mapping[str, Any]) -> dict[str, float]:
    """F1 of the labels of a batch or a set, of all together and the mean of each one's."""
    return label_f1(*(np.asarray(means[f"_{name}"]) for name in ("right", "told", "said")))


def _check_classes(config: Any, labels: Sequence[Any]) -> None:
    """Refuses labels that are scores, or several of a row, before each is taken for a class."""
    target, kind, found = "labels", "lists", [x for x in labels if isinstance(x, list)]
    with contextlib.suppress(TypeError, ValueError):  # those are names
        if decimals := [x for x in labels if float(x) % 1 > 0]:
            target, kind, found = "score", "decimal numbers", decimals
    if found:
        raise ValueError(
            f"'{config.data}' has {kind} as labels, such as {found[0]}, of which --target classes "
            f"would make {len(set(map(str, labels))):,} classes: give --target {target}, or name "
            "classes by words or whole numbers"
        )


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
    """Texts, or pairs of them, with their labels: rows for batches, as those of Fragments."""

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
        self.numbered = config.target == "score"
        if config.target == "classes":
            self.labels = np.array([classes.index(str(row["label"])) for row in rows], np.int32)
        else:
            told = [label_of(config.target, row) for row in rows]
            told = told if self.numbered else [[name in each for name in classes] for each in told]
            self.labels = np.array(told, np.float32)
        self.weights_N = np.ones(len(rows))
        self.groups_NG: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = {} if self.groups_NG is None else {"group": self.groups_NG[index]}
        own |= {"row": np.int32(index)} if self.numbered else {}
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
    if config.target == "classes":
        often = np.bincount(labels).max() / len(labels)
        try:
            counted = f"TF-IDF with logistic regression: {baseline(text):.1%}"
        except ValueError as error:  # The run is complete, whatever it cannot be compared with.
            counted = f"no TF-IDF baseline, as {error}"
        lines = [
            f"held-out: {means['accuracy']:.1%} of {len(labels):,} fragments right, {begun}",
            f"{counted}; always the largest: {often:.1%}",
        ]
    else:
        lines = list(heads.lines("held-out", {**means, "count": len(labels)}))
    if text.groups:
        size = min(config.global_batch, len(labels))
        guesses = common.outputs(model, state, text.held_out, lambda x: x.argmax(-1), size=size)
        numbers = np.array([row["group"].argmax() for row in text.held_out])
        found = by_group(labels, guesses, numbers, text.groups)
        lines += ["", f"held-out, by {config.group}:", *table_lines(found)]
    if not config.examples:
        return lines
    lines += ["", "held-out texts, what they are, and what it says:", ""]
    for row, guess in common.guesses(config, model, text, state):
        words = " ".join(text.tokenizer.decode(common.inside(row)).split())
        was, said = (_shown(text, each) for each in (row["label"], guess))
        lines.append(f"  {words[:60]:60}  {was:16} {said}")
    return lines


def _shown(text: common.Text, value: np.ndarray) -> str:
    """A label of a batch, or what the model says, in words."""
    if np.ndim(value) == 0:
        return text.classes[value] if text.classes else f"{value:.4g}"
    return ", ".join(x for x, has in zip(text.classes, value, strict=True) if has) or "none"


def baseline(text: common.Text) -> float:
    """The accuracy of logistic regression on the counted words of the same rows. Raises ValueError
    where these have one class, or no word twice."""
    sklearn = _sklearn()
    words = sklearn.feature_extraction.text.TfidfVectorizer(
        token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), min_df=2, sublinear_tf=True
    )

    def side(rows: Any) -> tuple[list[str], list[int]]:
        found = [rows[i] for i in range(min(len(rows), BASELINE_ROWS))]
        texts = [text.tokenizer.decode(common.inside(row)) for row in found]
        return texts, [int(row["label"]) for row in found]

    (train, labels), (held_out, wanted) = side(text.train), side(text.held_out)
    if len(set(labels)) < 2:
        raise ValueError("the rows to train on have one class")
    try:
        counts = words.fit_transform(train)
    except ValueError:
        raise ValueError("no two rows to train on share a word") from None
    regression = sklearn.linear_model.LogisticRegression(C=10.0, max_iter=300)
    regression.fit(counts, labels)
    return float(regression.score(words.transform(held_out), wanted))
