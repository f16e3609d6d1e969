"""Train an encoder on text: ``python -m experiments.bert``.

By default a small BERT learns to fill in masked tokens of the running Python's own standard
library. ``--task classify`` then trains it to tell from a fragment of source code which of the ten
largest packages it is of, beside a baseline of counted words (TF-IDF and logistic regression). The
same files are held out of both tasks, by a hash of their path.

    python -m experiments.bert --run-dir runs/masked
    python -m experiments.bert --task classify
    python -m experiments.bert --task classify --init-from runs/masked
    python -m experiments.bert --init-from BERT --data my_texts/
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments import language
from jaxtrain import data
from jaxtrain.hf.encoders import label_fields
from jaxtrain.host import extras
from jaxtrain.host.least import check_least
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.optim.rules import LEARNING_RATES
from jaxtrain.state import TrainState

# Peak rates that suit an encoder, at random and trained (jaxtrain/data/README.md has figures).
RATES = {"muon": 2e-3}
# A published model is tuned with that of BERT's paper (Devlin et al. 2019, appendix A.3).
PUBLISHED = RATES | {"adamw": 5e-5}
HELD_OUT = 0.2
# Its tests are about all the other packages, and larger than them together.
NO_PACKAGE = {"test"}
# What a tokenizer calls the token that begins a row and the one that masks: BERT's, RoBERTa's.
FIRST, MASK = ("[CLS]", "<s>"), ("[MASK]", "<mask>")
BASELINE_ROWS = 50_000
_MODULES = "sklearn.feature_extraction.text", "sklearn.linear_model"
_NEEDS = "the baseline comes with scikit-learn"
_sklearn = functools.partial(extras.load, _NEEDS, "vision", *_MODULES)


@dataclasses.dataclass(frozen=True)
class Config(language.Config):
    """Trains an encoder on text."""

    form = "encoder"

    task: Literal["mask", "classify"] = "mask"
    """Task to learn: mask fills in masked tokens; classify names the package or folder that a
    fragment is of, or the label of a row."""
    model: Literal[tuple(encoder.PRESETS)] = "tiny"  # type: ignore[valid-type]
    data: str = "python"
    """Text to learn: "python" (the standard library's source), or a folder of texts; to classify,
    one with a folder of texts for each class, or rows of text, label and perhaps text_pair (JSONL,
    CSV, TSV, Parquet; a file, or a folder with train.* and validation.*)."""
    tokenizer: str | None = None
    """A tokenizer.json with a mask, or a number: a BPE tokenizer of that many tokens is trained
    first (unigram:N and wordpiece:N: one of those); left out, 4096."""
    classes: int = 10
    """Number of classes: the largest packages or folders; labelled rows have all of theirs."""
    class_weights: bool = False
    """Weigh labelled rows by their class, so that all classes count the same in training."""
    mask_rate: float = 0.3
    """Share of the tokens that are predicted; BERT's was 0.15."""
    held_out_rows: int = 2500
    """Rows to evaluate on, at most."""
    examples: int = 8
    """Held-out tokens or fragments to show when training is over."""

    steps: int = 800
    global_batch: int = 32
    seq_len: int | None = None
    """Tokens per row; left out, the model's."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows to train on and held-out rows, of how many files and which, their tokenizer, and the
    names of classes."""

    tokenizer: data.SubwordTokenizer
    train: Any
    held_out: Any
    files: tuple[int, ...]
    prints: tuple[str, ...]
    classes: tuple[str, ...] = ()

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the text, by name."""
        found = dict(zip(("text", "held_out_text"), self.prints, strict=True))
        return found | ({"classes": ", ".join(self.classes)} if self.classes else {})


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it."""
    if config.task == "classify":
        _sklearn()  # before anything is trained
    labelled = config.task == "classify" and config.data != "python"
    sides = labelled and data.read_rows(config.data, (config.field, "label"), held_out=HELD_OUT)
    if sides:
        names = {str(row["label"]) for side in sides for row in side}
        config = dataclasses.replace(config, classes=len(names))
    elif config.class_weights:
        raise ValueError(
            "--class-weights is for labelled rows: give --task classify and --data with rows of "
            "text and label, or leave it out"
        )
    check_least(config, classes=2, held_out_rows=1, examples=0)
    fields = (config.field, "text_pair")
    split = data.texts_of_rows(sides, fields) if sides else split_of(config)
    tokenizer = open_tokenizer(config, split)
    model = model_config(config, tokenizer.vocab_size)
    rows_of, conclude = {
        "mask": (masked_text, conclude_masked),
        "classify": (labelled_text if sides else classified_text, conclude_classified),
    }[config.task]
    text = rows_of(config, model, sides or split, tokenizer)
    config = config.of_rows(text.train)
    step = outline(config, vocab_size=tokenizer.vocab_size)
    told = special_tokens(config, tokenizer)
    told |= label_fields(text.classes) if text.classes else {}
    return step.with_(
        **config.batches_of(text.train, text.held_out),
        **language.of_text(config, step, tokenizer, text.fingerprints, special_tokens=told),
        facts=language.facts(config, model, facts(config, text)),
        conclude=functools.partial(conclude, config, model, text),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text; ``vocab_size``, left out, is what the flags say."""
    check_tokenizer(config)
    model = model_config(config, vocab_size or language.vocab_size(config, added=2))
    length = row_length(config, model)
    batch = batch_shapes(config, length)
    classes = config.task == "classify"
    predictions = 1 if classes else batch["places"].shape[1]
    flops = encoder.flops_per_row(model, length=length, predictions=predictions)
    rates = RATES if config.source is None or config.source.is_run else PUBLISHED
    accuracy = {"best_metric": "accuracy", "best_mode": "max", "derived": lambda means: {}}
    family = "roberta" if config.model.startswith("roberta") else "bert"
    return language.outline(
        config,
        "bert",
        model,
        batch,
        rates=(language.tuning_rates(LEARNING_RATES) if config.source else {}) | rates,
        stored={} if config.source else {"family": family},
        items_per_step=config.global_batch * length,
        flops_per_step=float(config.global_batch * flops),
        **(accuracy if classes else {}),
    )


def batch_shapes(config: Config, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a batch, without any text."""
    shapes = data.packed_shapes(config.global_batch, length)
    rows = {name: shapes[name] for name in ("tokens", "segments")}
    size, kinds = (config.global_batch,), {"label": np.int32, "mask": np.float32}
    if config.task == "mask":
        size += (data.predictions(length, config.mask_rate),)
        kinds = {"places": np.int32, "targets": np.int32, "mask": np.float32}
    return rows | {name: jax.ShapeDtypeStruct(size, kind) for name, kind in kinds.items()}


def model_config(config: Config, vocab_size: int) -> EncoderConfig:
    """The preset, or the model that the run begins with, changed by the flags that were given."""
    classes = config.classes if config.task == "classify" else None
    own = {"head": "tokens" if classes is None else "classes", "classes": classes}
    if config.source is not None:  # whose positions stay, however short the rows
        own["seq_len"] = config.source.model.seq_len
    return language.model_config(config, vocab_size, **own)


def row_length(config: Config, model: EncoderConfig) -> int:
    """Tokens per row."""
    return config.seq_len or model.seq_len


def check_tokenizer(config: Config) -> None:
    """Refuses bytes, which have no mask."""
    if language.tokenizer_name(config) == "bytes":
        raise ValueError("--tokenizer bytes has no token to mask with: give a number, or a file")


def open_tokenizer(config: Config, split: data.Split) -> data.SubwordTokenizer:
    """Loads the tokenizer, or trains it on the split and adds BERT's tokens."""
    check_tokenizer(config)
    name, kept = language.tokenizer_options(config).values()
    tokenizer = data.open_tokenizer(name, split, kept=kept)
    trained = data.trained_kind(name) and kept is None
    return tokenizer.adding(FIRST[0], MASK[0]) if trained else tokenizer


def special_id(tokenizer: data.SubwordTokenizer, names: Sequence[str]) -> int:
    """The first of some special tokens that a tokenizer has."""
    for name in names:
        if (id := tokenizer.special_id(name.encode())) is not None:
            return id
    raise ValueError(
        f"the tokenizer has no token {' or '.join(names)}: give --tokenizer an encoder's, as of "
        "BERT or RoBERTa, or a number"
    )


def special_tokens(config: Config, tokenizer: data.SubwordTokenizer) -> dict[str, Any]:
    """Returns an export's fields for the tokens that begin, end, pad and mask a row."""
    ours = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cls_token_id": special_id(tokenizer, FIRST),
        "sep_token_id": int(tokenizer.eod),
        "mask_token_id": special_id(tokenizer, MASK),
    }
    if config.source is None:
        return ours | ({"pad_token_id": 1} if config.model.startswith("roberta") else {})
    found = config.source.told("special_tokens") or {}
    return ours | {name: found[name] for name in ours.keys() & found.keys()}


def split_of(config: Config) -> data.Split:
    """The documents to train on, and those that no task trains on."""
    return data.open_text(config.data, field=config.field, held_out=HELD_OUT)


def masked_text(
    config: Config, model: EncoderConfig, split: data.Split, tokenizer: data.SubwordTokenizer
) -> Text:
    """Rows with masked tokens: held-out ones always with the same."""
    store = data.cached_store(split, tokenizer)
    corpora = store.corpus("train"), store.corpus("held_out")
    train, held_out = (fragments(config, model, tokenizer, corpus) for corpus in corpora)
    masking = {"mask": special_id(tokenizer, MASK), "vocab_size": tokenizer.vocab_size}
    masking["rate"] = config.mask_rate
    return Text(
        tokenizer,
        data.MaskedTokens(train, **masking, seed=config.seed),
        data.MaskedTokens(data.spread(held_out, config.held_out_rows), **masking, seed=0),
        tuple(len(corpus.starts) for corpus in corpora),
        tuple(corpus.fingerprint for corpus in corpora),
    )


def classified_text(
    config: Config, model: EncoderConfig, split: data.Split, tokenizer: data.SubwordTokenizer
) -> Text:
    """Rows with the package, or the folder, that they are of."""
    classes = largest_classes(split, config)
    number = {name: label for label, name in enumerate(classes)}
    rows, files, prints = [], [], []
    for side in split:
        chosen = [each for each in side if class_of(each.name) in number]
        corpus = data.tokenize(chosen, tokenizer)
        labels = [number[class_of(each.name)] for each in chosen]
        rows.append(fragments(config, model, tokenizer, corpus, labels=labels))
        files.append(len(chosen))
        prints.append(corpus.fingerprint)
    held_out = data.spread(rows[1], config.held_out_rows)
    return Text(tokenizer, rows[0], held_out, tuple(files), tuple(prints), classes)


def labelled_text(
    config: Config,
    model: EncoderConfig,
    sides: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: data.SubwordTokenizer,
) -> Text:
    """Rows that say their class themselves; of what is too long for one, the end is cut off."""
    names = {str(row["label"]) for side in sides for row in side}
    # Labels 0 to 10 keep their numbers.
    classes = tuple(sorted(names, key=int if all(map(str.isdecimal, names)) else str))
    train, held_out = (LabelledRows(config, model, tokenizer, rows, classes) for rows in sides)
    if config.class_weights:
        counts_K = np.bincount(train.labels, minlength=len(classes))
        train.weights_K = len(train) / len(classes) / np.maximum(counts_K, 1)
    some, files = data.spread(held_out, config.held_out_rows), tuple(map(len, sides))
    prints = tuple(hashlib.sha256(repr(rows).encode()).hexdigest()[:32] for rows in sides)
    return Text(tokenizer, train, some, files, prints, classes)


class LabelledRows:
    """Texts, or pairs of them, with their classes: rows for batches, as those of Fragments."""

    def __init__(
        self,
        config: Config,
        model: EncoderConfig,
        tokenizer: data.SubwordTokenizer,
        rows: Sequence[Mapping[str, Any]],
        classes: Sequence[str],
    ):
        self.length = row_length(config, model)
        self.ends = special_id(tokenizer, FIRST), int(tokenizer.eod)
        self.unread = [name for name in rows[0] if name not in (config.field, "text_pair", "label")]
        self.labels = np.array([classes.index(str(row["label"])) for row in rows], np.int32)
        self.weights_K, self.typed = np.ones(len(classes)), (model.token_types or 1) > 1
        parts = ([str(row.get(name) or "") for row in rows] for name in (config.field, "text_pair"))
        self._tokens = [tokenizer.encode_batch(part) for part in parts]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (first, last), label = self.ends, self.labels[index]
        text, pair = (part[index].tolist() for part in self._tokens)
        while len(text) + len(pair) > self.length - 2 - bool(pair):
            (text if len(text) >= len(pair) else pair).pop()
        both = [first, *text, last], [*pair, last] if pair else []
        tokens_T, segments_T, types_T = np.zeros((3, self.length), np.int32)
        stop = len(both[0]) + len(both[1])
        tokens_T[:stop], segments_T[:stop] = both[0] + both[1], 1
        types_T[len(both[0]) : stop] = self.typed
        row = {"tokens": tokens_T, "segments": segments_T, "types": types_T}
        return row | {"label": label, "mask": np.float32(self.weights_K[label])}


def fragments(
    config: Config,
    model: EncoderConfig,
    tokenizer: data.SubwordTokenizer,
    corpus: data.Corpus,
    *,
    labels: Sequence[int] | None = None,
) -> data.Fragments:
    """A corpus as rows, each between the tokens that begin and end one."""
    ends = {"first": special_id(tokenizer, FIRST), "last": int(tokenizer.eod)}
    return data.Fragments(corpus, row_length(config, model), **ends, labels=labels)


def class_of(name: str) -> str:
    """The package or folder of a document; empty outside of all.

    >>> class_of("json/tool/x.py"), class_of("abc.py")
    ('json', '')
    """
    return name.partition("/")[0] if "/" in name else ""


def largest_classes(split: data.Split, config: Config) -> tuple[str, ...]:
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


def conclude_masked(
    config: Config,
    model: EncoderConfig,
    text: Text,
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says how many masked tokens were right, beside always the same guess, and shows some."""
    rows = [text.held_out[i] for i in range(len(text.held_out))]
    targets = np.concatenate([row["targets"][row["mask"] > 0] for row in rows])
    often = np.bincount(targets).max() / len(targets)
    lines = [
        f"held-out: {means['accuracy']:.1%} of {len(targets):,} masked tokens right, loss "
        f"{means['loss']:.3f} nats; always the most frequent token is right in {often:.1%}"
    ]
    if not config.examples:
        return lines
    lines += ["", "masked in held-out text, what stood there, and what it guessed:", ""]
    for row, guess_T in guesses(config, model, text, state):
        place, target = int(row["places"][0]), int(row["targets"][0])
        before, after, was, said = (
            text.tokenizer.decode(ids)
            for ids in (
                row["tokens"][max(1, place - 10) : place],
                row["tokens"][place + 1 : min(place + 8, int(row["segments"].sum()) - 1)],
                [target],
                [int(guess_T[place])],
            )
        )
        context = " ".join(f"{before}____{after}".split())
        lines.append(f"  {context[:68]:68}  {was.strip()!r:14} {said.strip()!r}")
    return lines


def conclude_classified(
    config: Config,
    model: EncoderConfig,
    text: Text,
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
    if not config.examples:
        return lines
    lines += ["", "held-out fragments, where they are from, and what it says:", ""]
    for row, guess in guesses(config, model, text, state):
        words = " ".join(text.tokenizer.decode(inside(row)).split())
        was, said = text.classes[row["label"]], text.classes[guess]
        lines.append(f"  {words[:60]:60}  {was:16} {said}")
    return lines


def guesses(
    config: Config, model: EncoderConfig, text: Text, state: TrainState
) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Some held-out rows, each with what the trained model finds most probable."""
    rows = data.spread(text.held_out, config.examples)
    names = rows[0].keys() & {"tokens", "segments", "types"}
    batch = {name: np.stack([row[name] for row in rows]) for name in names}

    def best(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return encoder.logits(model, params, batch).argmax(-1)

    return list(zip(rows, np.asarray(jax.jit(best)(state.params, batch)), strict=True))


def inside(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """The tokens of a row between its ends."""
    return row["tokens"][1 : int(row["segments"].sum()) - 1]


def baseline(text: Text) -> float:
    """The accuracy of logistic regression on the counted words of the same rows."""
    sklearn = _sklearn()
    words = sklearn.feature_extraction.text.TfidfVectorizer(
        token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), min_df=2, sublinear_tf=True
    )

    def side(rows: Any) -> tuple[list[str], list[int]]:
        found = [rows[i] for i in range(min(len(rows), BASELINE_ROWS))]
        texts = [text.tokenizer.decode(inside(row)) for row in found]
        return texts, [int(row["label"]) for row in found]

    (train, labels), (held_out, wanted) = side(text.train), side(text.held_out)
    regression = sklearn.linear_model.LogisticRegression(C=10.0, max_iter=300)
    regression.fit(words.fit_transform(train), labels)
    return float(regression.score(words.transform(held_out), wanted))


def facts(config: Config, text: Text) -> dict[str, str]:
    """Returns the header's facts about the task and its text."""
    rows, files = (len(text.train), len(text.held_out)), text.files
    task = f"{config.mask_rate:.0%} of the tokens are to be filled in"
    if text.classes:
        task = f"which of {len(text.classes)}: {', '.join(text.classes)}"
    told = {
        "task": task,
        "text": f"{language.text_name(config)}: {rows[0]:,} rows of {files[0]:,} texts to train "
        f"on, {rows[1]:,} rows of {files[1]:,} others held out",
    }
    if isinstance(text.train, LabelledRows) and text.train.unread:
        told["not read"] = f"the fields {', '.join(text.train.unread)}"
    return told


if __name__ == "__main__":
    jt.main(Config, build)
