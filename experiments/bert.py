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
from jaxtrain import data, hf
from jaxtrain.experiment import no_batches
from jaxtrain.hf.encoders import label_fields
from jaxtrain.host.paths import as_path
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.remat import REMAT
from jaxtrain.optim.rules import LEARNING_RATES
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.parallel.stack import Stack
from jaxtrain.planning.balance import stack_for
from jaxtrain.run import trained
from jaxtrain.run.options import PipelineOptions, make_optimizer
from jaxtrain.run.provenance import ROUNDED, SAME
from jaxtrain.run.trained import TOKENIZER_FILE
from jaxtrain.state import TrainState

HELD_OUT = 0.2
# Its tests are about all the other packages, and larger than them together.
NO_PACKAGE = {"test"}
# What a tokenizer calls the token that begins a row and the one that masks: BERT's, RoBERTa's.
FIRST, MASK = ("[CLS]", "<s>"), ("[MASK]", "<mask>")
# Of a rule's own peak rate, the share that suits weights that have learned.
TUNING = 0.3
BASELINE_ROWS = 50_000

MAY_CHANGE = {
    "remat": ROUNDED,
    "attention": ROUNDED,
    # Where they lie; what they hold has a fingerprint.
    "data": SAME,
    "tokenizer": SAME,
    "init_from": SAME,
    "examples": SAME,
    "held_out_rows": "same bits, evaluated on other rows",
    "held_out_text": "same bits, evaluated on other text",
}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains an encoder on text."""

    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)

    task: Literal["mask", "classify"] = "mask"
    """mask: fill in masked tokens; classify: of which package, or folder, a fragment is."""
    model: Literal[tuple(encoder.PRESETS)] = "tiny"  # type: ignore[valid-type]
    """Which preset; the flags layers to attention change it."""
    init_from: str | None = None
    """A run of this experiment or a Hugging Face folder to begin with: its model (instead of a
    preset), its weights, and its tokenizer.json unless --tokenizer is given."""
    layers: int | None = None
    """Depth."""
    width: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    dropout: float | None = None
    """Rate on embeddings and residual branches."""
    attention_dropout: float | None = None
    """Rate on attention weights; no fused kernel offers it."""
    remat: Literal[REMAT] | None = None  # type: ignore[valid-type]
    """What a block keeps for its backward pass, as for experiments.gpt."""
    attention: str | None = None
    """Attention kernel: auto, xla, cudnn or pallas (GPUs), splash (TPUs)."""

    data: str = "python"
    """Text to learn: "python" (the standard library's source), or a folder of texts; to classify,
    one with a folder of texts for each class."""
    tokenizer: str | None = None
    """A tokenizer.json with a mask, or a number: a BPE tokenizer of that many tokens is trained
    first (unigram:N and wordpiece:N: one of those); left out, 4096."""
    classes: int = 10
    """To classify: the largest packages or folders, so many."""
    mask_rate: float = 0.15
    """Share of the tokens that are predicted."""
    held_out_rows: int = 2500
    """Rows to evaluate on, at most."""
    examples: int = 8
    """Held-out tokens or fragments to show when training is over."""

    steps: int = 500
    """Train steps."""
    global_batch: int = 32
    """Rows per step, over all devices."""
    seq_len: int | None = None
    """Tokens per row; left out, the model's."""


@dataclasses.dataclass(frozen=True)
class Text:
    """What is learned: rows to train on and held out, their tokenizer, and names of classes."""

    tokenizer: data.SubwordTokenizer
    train: Any
    held_out: Any
    classes: tuple[str, ...]
    files: tuple[int, int]
    fingerprints: Mapping[str, str]


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it.

    Raises:
      ValueError: for options that do not fit each other.
    """
    for name, least in (("classes", 2), ("held_out_rows", 1), ("examples", 0)):
        if (value := getattr(config, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give at least {least}")
    if config.task == "classify":
        _import_sklearn()  # before anything is trained
    split = split_of(config)
    tokenizer = open_tokenizer(config, split)
    model = model_config(config, tokenizer.vocab_size)
    text = (masked_text if config.task == "mask" else classified_text)(config, split, tokenizer)
    begun = {"pretrained_model": _digest(repr(source_of(config)[0]))} if config.init_from else {}
    step = outline(config, vocab_size=tokenizer.vocab_size)
    told = special_tokens(config, tokenizer)
    told |= label_fields(text.classes) if text.classes else {}
    return dataclasses.replace(
        step,
        **config.batches_of(text.train, text.held_out),
        config=dict(step.config) | {"tokenizer": TOKENIZER_FILE, "special_tokens": told},
        files={TOKENIZER_FILE: tokenizer.to_json()},
        fingerprints=text.fingerprints
        | {"vocabulary": tokenizer.fingerprint, "order_of_rows": str(data.ORDER_VERSION)}
        | begun,
        facts=facts(config, model, text),
        conclude=functools.partial(
            conclude_masked if config.task == "mask" else conclude_classified, config, model, text
        ),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text: enough to compile its step, for `jaxtrain plan`.

    Args:
      config: the flags.
      vocab_size: the tokenizer's; left out, what the flags say.

    Raises:
      ValueError: for options that do not fit each other.
    """
    if vocab_size is None:
        sized = data.trained_kind(tokenizer_name(config))
        vocab_size = sized[1] + 2 if sized else open_tokenizer(config).vocab_size
    model = model_config(config, vocab_size)
    length = config.seq_len or model.seq_len
    batch = batch_shapes(config, length)
    pipeline = dataclasses.asdict(config.pipeline)
    stack = stack_for(
        encoder.stages(model),
        functools.partial(encoder.init, model),
        batch_shapes(dataclasses.replace(config, global_batch=1), length),
        layers=model.layers,
        pipe=config.mesh.pipe,
        virtual=config.pipeline.virtual,
        balance=pipeline.pop("balance"),
        recompute=config.pipeline.remat == "full",
    )
    stages = dataclasses.replace(encoder.stages(model), stacked=stack)
    start = {}
    if config.init_from is not None:
        start = {"params": lambda: weights_of(config, model, stack)}
    predictions = 1 if config.task == "classify" else batch["places"].shape[1]
    rates = {name: TUNING * rate for name, rate in LEARNING_RATES.items()}
    return config.experiment(
        "bert",
        init_fn=lambda rng: stack.cut(encoder.init(model, rng)),
        loss_fn=loss_from_stages(stages),
        optimizer=make_optimizer(
            config.optimizer,
            steps=config.steps,
            default_rates=rates if config.init_from else {},
            stacked=stack.axes,
        ),
        batch=batch,
        train_batches=no_batches,
        rules=Rules(encoder.RULES),
        gather="model",
        stages=stages,
        pipeline=pipeline | {"virtual": stack.virtual},
        may_change=MAY_CHANGE,
        items_per_step=config.global_batch * length,
        item="tokens",
        flops_per_step=float(
            config.global_batch
            * encoder.flops_per_row(model, length=length, predictions=predictions)
        ),
        flops_formula=encoder.FLOPS_FORMULA,
        config={
            "model": dataclasses.asdict(model),
            "form": "encoder",
            "family": family_of(config),
        },
        **({"best_metric": "accuracy", "best_mode": "max"} if config.task == "classify" else {}),
        **start,
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
    """The preset, or the model that the run begins from, changed by the flags that were given."""
    names = ("layers", "width", "heads", "dropout", "attention_dropout", "remat", "attention")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.init_from is None:
        model = dataclasses.replace(encoder.PRESETS[config.model](), vocab_size=vocab_size)
        given |= {} if config.seq_len is None else {"seq_len": config.seq_len}
        if {"width", "heads"} & given.keys():
            given |= {"kv_heads": None, "mlp_width": None, "head_dim": None}
    else:
        for name in ("model", "layers", "width", "heads"):
            if (value := getattr(config, name)) != getattr(Config, name):
                raise ValueError(
                    f"--{name} {value} is not for --init-from, whose folder says what the model "
                    "is: leave one of them out"
                )
        model = source_of(config)[0]
        if vocab_size > model.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens and the model in '{config.init_from}' "
                f"{model.vocab_size}: give --tokenizer the model's own tokenizer.json"
            )
    head = {"head": "tokens", "classes": None}
    if config.task == "classify":
        head = {"head": "classes", "classes": config.classes}
    model = dataclasses.replace(model, **given, **head)
    if (config.seq_len or 0) > model.seq_len:
        raise ValueError(
            f"--seq-len {config.seq_len} is more than the {model.seq_len} positions that the model "
            f"in '{config.init_from}' has: give at most that"
        )
    if config.mesh.tensor and model.heads % config.mesh.tensor:  # 0 is the mesh's to refuse
        raise ValueError(
            f"--mesh.tensor {config.mesh.tensor} does not divide {model.heads} heads: use a divisor"
        )
    return model


def source_of(config: Config) -> tuple[EncoderConfig, bool]:
    """The model that the run begins from, and whether it is in a Hugging Face folder.

    Raises:
      ValueError: there is none, or no encoder.
    """
    folder = as_path(config.init_from)
    hugging = not (folder / "checkpoints").exists()
    if hugging and not (folder / "config.json").exists():
        raise ValueError(
            f"'{folder}' is no run and no Hugging Face folder: give one with checkpoints, or with "
            "config.json and safetensors"
        )
    model = hf.read_config(config.init_from) if hugging else trained.model(config.init_from)
    if not isinstance(model, EncoderConfig):
        raise ValueError(f"the model in '{folder}' is no encoder: experiments.gpt trains decoders")
    return model, hugging


def weights_of(config: Config, model: EncoderConfig, stack: Stack) -> dict[str, Any]:
    """The weights that the run begins from: of another task, without the head."""
    own, hugging = source_of(config)
    if hugging:
        return hf.open_weights(config.init_from, model, stack=stack)
    params = trained.load(config.init_from)[1]
    if (own.head, own.classes) != (model.head, model.classes):
        del params["head"]
    return stack.cut(params)


def family_of(config: Config) -> str:
    """The Hugging Face family that the run is exported as."""
    if config.init_from is None:
        return "roberta" if config.model.startswith("roberta") else "bert"
    hugging = source_of(config)[1]
    return hf.family_name(config.init_from) if hugging else trained.family(config.init_from)


def tokenizer_name(config: Config) -> str:
    """The tokenizer's flag, or the file of the folder that the run begins from.

    Raises:
      ValueError: the folder has none, or bytes are asked for, which have no mask.
    """
    if config.tokenizer == "bytes":
        raise ValueError("--tokenizer bytes has no token to mask with: give a number, or a file")
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "4096"
    source_of(config)  # It has checks of its own.
    path = as_path(config.init_from) / TOKENIZER_FILE
    if not path.exists():
        raise ValueError(f"'{config.init_from}' has no {TOKENIZER_FILE}: give --tokenizer")
    return str(path)


def open_tokenizer(config: Config, split: data.Split | None = None) -> data.SubwordTokenizer:
    """Loads the tokenizer, or trains it on the split and adds BERT's tokens."""
    name, kept = tokenizer_name(config), trained.kept_file(config.run, TOKENIZER_FILE)
    tokenizer = data.open_tokenizer(name, split, kept=kept)
    if data.trained_kind(name) and kept is None:
        return tokenizer.adding(FIRST[0], MASK[0])
    return tokenizer


def special_id(tokenizer: data.SubwordTokenizer, names: Sequence[str]) -> int:
    """The first of some special tokens that a tokenizer has.

    Raises:
      ValueError: it has none.
    """
    for name in names:
        if (id := tokenizer.special_id(name.encode())) is not None:
            return id
    raise ValueError(
        f"the tokenizer has no token {' or '.join(names)}: give --tokenizer an encoder's, as of "
        "BERT or RoBERTa, or a number"
    )


def special_tokens(config: Config, tokenizer: data.SubwordTokenizer) -> dict[str, Any]:
    """What an export says of tokens that begin, end, pad and mask a row."""
    ours = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cls_token_id": special_id(tokenizer, FIRST),
        "sep_token_id": int(tokenizer.eod),
        "mask_token_id": special_id(tokenizer, MASK),
    }
    if config.init_from is None:
        return ours if family_of(config) == "bert" else ours | {"pad_token_id": 1}
    hugging = source_of(config)[1]
    found = (hf if hugging else trained).special_tokens(config.init_from) or {}
    return ours | {name: found[name] for name in ours.keys() & found.keys()}


def split_of(config: Config) -> data.Split:
    """The documents to train on, and those that no task trains on."""
    if config.data == "python":
        return data.python_stdlib(held_out=HELD_OUT)
    return data.text_folder(config.data, held_out=HELD_OUT)


def masked_text(config: Config, split: data.Split, tokenizer: data.SubwordTokenizer) -> Text:
    """Rows with masked tokens: held-out ones always with the same."""
    store = data.cached_store(split, tokenizer)
    ends = {"first": special_id(tokenizer, FIRST), "last": int(tokenizer.eod)}
    length = config.seq_len or model_config(config, tokenizer.vocab_size).seq_len
    masking = {"mask": special_id(tokenizer, MASK), "vocab_size": tokenizer.vocab_size}
    corpora = store.corpus("train"), store.corpus("held_out")
    train, held_out = (data.Fragments(corpus, length, **ends) for corpus in corpora)
    some = _sample(held_out, config.held_out_rows)
    return Text(
        tokenizer,
        data.MaskedTokens(train, **masking, rate=config.mask_rate, seed=config.seed),
        data.MaskedTokens(some, **masking, rate=config.mask_rate, seed=0),
        (),
        tuple(len(corpus.starts) for corpus in corpora),
        {"text": corpora[0].fingerprint, "held_out_text": corpora[1].fingerprint},
    )


def classified_text(config: Config, split: data.Split, tokenizer: data.SubwordTokenizer) -> Text:
    """Rows with the package, or the folder, that they are of."""
    classes = largest_classes(split, config)
    number = {name: label for label, name in enumerate(classes)}
    ends = {"first": special_id(tokenizer, FIRST), "last": int(tokenizer.eod)}
    length = config.seq_len or model_config(config, tokenizer.vocab_size).seq_len
    rows, files, prints = [], [], []
    for side in split:
        chosen = [each for each in side if class_of(each.name) in number]
        corpus = data.tokenize(chosen, tokenizer)
        labels = [number[class_of(each.name)] for each in chosen]
        rows.append(data.Fragments(corpus, length, **ends, labels=labels))
        files.append(len(chosen))
        prints.append(corpus.fingerprint)
    held_out = _sample(rows[1], config.held_out_rows)
    kept = {"text": prints[0], "held_out_text": prints[1], "classes": ", ".join(classes)}
    return Text(tokenizer, rows[0], held_out, classes, tuple(files), kept)


def class_of(name: str) -> str:
    """The package or folder of a document; empty outside of all.

    >>> class_of("json/tool/x.py"), class_of("abc.py")
    ('json', '')
    """
    return name.partition("/")[0] if "/" in name else ""


def largest_classes(split: data.Split, config: Config) -> tuple[str, ...]:
    """The packages with the most bytes, of those that have files on both sides of the split.

    Raises:
      ValueError: there are fewer than asked for.
    """
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
    shown = [rows[i] for i in np.linspace(0, len(rows) - 1, config.examples).astype(int)]
    batch = {name: np.stack([row[name] for row in shown]) for name in ("tokens", "segments")}
    guesses = predict(config, model, state, batch).argmax(-1)
    lines += ["", "masked in held-out text, what stood there, and what it guessed:", ""]
    for row, guess_T in zip(shown, guesses, strict=True):
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
    places = np.linspace(0, len(labels) - 1, config.examples).astype(int)
    shown = [text.held_out[i] for i in places]
    batch = {name: np.stack([row[name] for row in shown]) for name in ("tokens", "segments")}
    guesses = predict(config, model, state, batch).argmax(-1)
    for row, guess in zip(shown, guesses, strict=True):
        inside = row["tokens"][1 : int(row["segments"].sum()) - 1]
        words = " ".join(text.tokenizer.decode(inside).split())
        was, said = text.classes[row["label"]], text.classes[guess]
        lines.append(f"  {words[:60]:60}  {was:16} {said}")
    return lines


def predict(
    config: Config, model: EncoderConfig, state: TrainState, batch: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The trained model's logits."""
    stack = outline(config, vocab_size=model.vocab_size).stack

    def logits(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return encoder.logits(model, stack.natural(params), batch)

    return np.asarray(jax.jit(logits)(state.params, batch))


def baseline(text: Text) -> float:
    """The accuracy of logistic regression on the counted words of the same rows."""
    sklearn = _import_sklearn()
    words = sklearn.feature_extraction.text.TfidfVectorizer(
        token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), min_df=2, sublinear_tf=True
    )

    def side(rows: Any) -> tuple[list[str], list[int]]:
        found = [rows[i] for i in range(min(len(rows), BASELINE_ROWS))]
        cut = (row["tokens"][1 : int(row["segments"].sum()) - 1] for row in found)
        return [text.tokenizer.decode(ids) for ids in cut], [int(row["label"]) for row in found]

    (train, labels), (held_out, wanted) = side(text.train), side(text.held_out)
    regression = sklearn.linear_model.LogisticRegression(C=10.0, max_iter=300)
    regression.fit(words.fit_transform(train), labels)
    return float(regression.score(words.transform(held_out), wanted))


def facts(config: Config, model: EncoderConfig, text: Text) -> dict[str, str]:
    """What the header says of the model and its text."""
    name = "the Python standard library's source" if config.data == "python" else config.data
    rows, files = (len(text.train), len(text.held_out)), text.files
    task = f"{config.mask_rate:.0%} of the tokens are to be filled in"
    if text.classes:
        task = f"which of {len(text.classes)}: {', '.join(text.classes)}"
    return {
        "task": task,
        "model": f"{config.init_from or config.model}: "
        f"{encoder.parameter_count(model) / 1e6:.1f} M parameters, {model.layers} layers, "
        f"{model.width} wide, {model.heads} heads, {text.tokenizer.vocab_size:,} tokens",
        "text": f"{name}: {rows[0]:,} rows of {files[0]:,} files to train on, {rows[1]:,} rows of "
        f"{files[1]:,} others held out",
        "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
    }


def _sample(rows: data.Fragments, number: int) -> list[dict[str, Any]]:
    """So many rows, evenly spread over all."""
    places = np.linspace(0, len(rows) - 1, min(number, len(rows))).astype(int)
    return [rows[int(place)] for place in places]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _import_sklearn() -> Any:
    try:
        import sklearn.feature_extraction.text
        import sklearn.linear_model
    except ImportError:
        raise ValueError(
            "the baseline comes with scikit-learn: install it with pip install -e '.[vision]'"
        ) from None
    return sklearn


if __name__ == "__main__":
    jt.main(Config, build)
