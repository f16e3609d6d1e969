"""Train an encoder-decoder on text: ``python -m experiments.t5``.

By default a small T5 learns to fill in spans that are cut out of the Python standard library's
source, as T5 is pretrained. With ``--task name`` it reads the body of a function, without its name
and docstring, and writes both: the name, and the first line of the docstring. Files are split into
train and held-out by a hash of their path. Minutes on 2 CPU cores.

    python -m experiments.t5 --run-dir runs/spans
    jaxtrain hf export --run runs/spans --out spans
    python -m experiments.t5 --task name --init-from spans
"""

import ast
import collections
import dataclasses
import functools
import hashlib
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import jaxtrain as jt
from experiments.gpt import MAY_CHANGE, kept_file, tokenizer_name
from jaxtrain import data, hf
from jaxtrain.experiment import no_batches
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.generate_target import START, beam_search, generate
from jaxtrain.models.remat import REMAT
from jaxtrain.ops.attention import explain_choice
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.parallel.stack import Stack
from jaxtrain.precision import Policy
from jaxtrain.run.options import PipelineOptions, make_optimizer
from jaxtrain.run.trained import TOKENIZER_FILE
from jaxtrain.state import TrainState

# Of the text, T5 cuts out this share, in spans of so many tokens (Raffel et al. 2020, section 3.3).
NOISE, SPAN = 0.15, 3
# Every stretch of text is a row so many times, each with other spans.
VERSIONS = 4
# Tokens that stand for spans, where the tokenizer has none.
SENTINELS = 100


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains an encoder-decoder on text."""

    pipeline: PipelineOptions = dataclasses.field(
        default_factory=lambda: PipelineOptions(schedule="interleaved")
    )

    task: Literal["spans", "name"] = "spans"
    """What to learn: to fill in spans of text, or to name functions of Python."""
    model: Literal[tuple(t5.PRESETS)] = "tiny"  # type: ignore[valid-type]
    """Which preset; the flags layers to attention change it."""
    init_from: str | None = None
    """A Hugging Face folder to begin with: its model (instead of a preset), its weights, and its
    tokenizer.json unless --tokenizer is given."""
    layers: int | None = None
    """Depth of the encoder and of the decoder."""
    width: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    dropout: float | None = None
    """Rate on embeddings and residual branches."""
    attention_dropout: float | None = None
    """Rate on attention weights."""
    remat: Literal[REMAT] | None = None  # type: ignore[valid-type]
    """What a block keeps for its backward pass: all, the results of products (on the device, or
    offload: on the host), those of attention alone, or its input."""
    scan_unroll: int | None = None
    """Layers per iteration of the scan over layers; left out, few layers on one CPU device are
    unrolled and others are not."""
    attention: str | None = None
    """Attention kernel: auto or xla; no fused one has a bias."""
    z_loss: float | None = None
    """Coefficient of the squared log of the softmax's normaliser in the loss."""
    source_len: int | None = None
    """Tokens that the encoder reads, at most; left out, the preset's."""
    target_len: int | None = None
    """Tokens that the decoder writes, at most; left out, the preset's."""

    data: str = "python"
    """Text: "python" (the standard library's source), or a folder or file of text; for spans a
    store that `jaxtrain tokenize` has made too."""
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    tokenizer: str | None = None
    """"bytes"; a tokenizer.json; a number trains a BPE tokenizer of that many tokens first, which
    is what is done where it is left out, with 4,096."""
    held_out_bytes: int = 200_000
    """Bytes of held-out text to evaluate the filling of spans on."""

    steps: int = 200
    """Train steps."""
    global_batch: int = 32
    """Rows per step, over all devices."""
    examples: int = 256
    """Held-out rows that targets are written for when training is over; 0 writes none."""
    beams: int = 1
    """Targets that are followed at a time; 1 always takes the most probable token."""


class Pair(NamedTuple):
    """What is read, and what is to be written of it."""

    source: str
    target: str


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it.

    Raises:
      ValueError: for options that do not fit each other.
    """
    for name in ("held_out_bytes", "examples"):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it is a size")
    text = data.open_data(
        config.data,
        field=config.field,
        tokenizer=chosen_tokenizer(config),
        kept=kept_file(config.run, TOKENIZER_FILE),
    )
    if "" not in text.found:
        raise ValueError(f"--data {config.data} names several sources: give one")
    tokenizer = text.tokenizer
    step = outline(config, vocab_size=tokenizer.vocab_size)
    model = model_config(config, tokenizer.vocab_size)
    rows_of = {"spans": span_rows, "name": name_rows}[config.task]
    train, held_out, facts, conclude = rows_of(config, model, text)
    subwords = isinstance(tokenizer, data.SubwordTokenizer)
    fingerprints = {}
    if config.init_from is not None:
        own = repr(hf.read_config(config.init_from))
        fingerprints["pretrained_model"] = hashlib.sha256(own.encode()).hexdigest()
    return dataclasses.replace(
        step,
        **config.batches_of(train, held_out),
        config=dict(step.config) | {"tokenizer": TOKENIZER_FILE if subwords else "bytes"},
        files={TOKENIZER_FILE: tokenizer.to_json()} if subwords else {},
        fingerprints=fingerprints
        | {"text": train.fingerprint, "held_out_text": held_out.fingerprint}
        | {"vocabulary": tokenizer.fingerprint, "order_of_rows": str(data.ORDER_VERSION)},
        facts=model_facts(config, model) | facts,
        conclude=conclude,
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
        name = chosen_tokenizer(config)
        trained = data.trained_kind(name)
        vocab_size = trained[1] if trained else data.open_tokenizer(name).vocab_size
    if config.pipeline.balance:
        raise ValueError("--pipeline.balance weighs one stack of layers, and a T5 has two")
    model = model_config(config, vocab_size)
    stack = Stack(t5.STACKS, virtual=config.pipeline.virtual if config.mesh.pipe > 1 else 1)
    stages = dataclasses.replace(t5.stages(model), stacked=stack)
    pipeline = dataclasses.asdict(config.pipeline) | {"virtual": stack.virtual}
    del pipeline["balance"]
    start, family = {}, {}
    if config.init_from is not None:
        start = {"params": lambda: hf.open_weights(config.init_from, model, stack=stack)}
        family = {
            "family": hf.family_name(config.init_from),
            "special_tokens": hf.special_tokens(config.init_from),
        }
    rows = {"source": model.source_len, "source_segments": model.source_len}
    rows |= dict.fromkeys(("tokens", "targets", "mask"), model.target_len)
    batch = {
        name: jax.ShapeDtypeStruct(
            (config.global_batch, length), np.float32 if name == "mask" else np.int32
        )
        for name, length in rows.items()
    }
    return config.experiment(
        "t5",
        init_fn=lambda rng: stack.cut(t5.init(model, rng)),
        loss_fn=loss_from_stages(stages),
        optimizer=make_optimizer(config.optimizer, steps=config.steps, stacked=stack.axes),
        batch=batch,
        train_batches=no_batches,
        rules=Rules(t5.RULES),
        gather="model",
        stages=stages,
        pipeline=pipeline,
        may_change=MAY_CHANGE | {"examples": MAY_CHANGE["data"], "beams": MAY_CHANGE["data"]},
        items_per_step=config.global_batch * (model.source_len + model.target_len),
        item="tokens",
        flops_per_step=float(t5.flops_per_row(model) * config.global_batch),
        flops_formula=t5.FLOPS_FORMULA,
        config={"model": dataclasses.asdict(model), "form": "encoder-decoder"} | family,
        **start,
    )


def chosen_tokenizer(config: Config) -> str:
    """The tokenizer's flag, the file of the folder that the run begins from, or one to train."""
    if config.tokenizer is None and config.init_from is None:
        return "4096"
    return tokenizer_name(config)


def model_config(config: Config, vocab_size: int) -> t5.T5Config:
    """The preset, or the folder's model, changed by the flags that were given."""
    names = ("layers", "width", "heads", "dropout", "attention_dropout", "remat", "scan_unroll")
    names += ("attention", "z_loss", "source_len", "target_len")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.init_from is None:
        preset = t5.PRESETS[config.model]()
        preset = dataclasses.replace(preset, vocab_size=vocab_size + SENTINELS)
    else:
        preset = pretrained(config, vocab_size)
    if "layers" in given:
        given["decoder_layers"] = None
    if {"width", "heads"} & given.keys():
        # These follow from the width unless the preset's are kept by keeping its width.
        given |= {"kv_heads": None, "mlp_width": None, "head_dim": None}
    model = dataclasses.replace(preset, **given)
    # A size of 0 is the mesh's to refuse.
    if config.mesh.tensor and model.heads % config.mesh.tensor:
        raise ValueError(
            f"--mesh.tensor {config.mesh.tensor} does not divide {model.heads} heads: use a "
            f"divisor of {model.heads}"
        )
    return model


def pretrained(config: Config, vocab_size: int) -> t5.T5Config:
    """The model of the folder that the run begins from, with the preset's lengths of rows."""
    for name in ("model", "layers", "width", "heads"):
        if getattr(config, name) != getattr(Config, name):
            raise ValueError(
                f"--{name} {getattr(config, name)} is not for --init-from, whose folder says what "
                "the model is: leave one of them out"
            )
    model, tiny = hf.read_config(config.init_from), t5.tiny()
    if not isinstance(model, t5.T5Config):
        raise ValueError(
            f"'{config.init_from}' has a {hf.family_name(config.init_from)}, which is no "
            "encoder-decoder: give it to experiments.gpt, or the folder of a T5"
        )
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the model in '{config.init_from}' "
            f"{model.vocab_size}: give --tokenizer the model's own tokenizer.json"
        )
    return dataclasses.replace(model, source_len=tiny.source_len, target_len=tiny.target_len)


def model_facts(config: Config, model: t5.T5Config) -> dict[str, str]:
    """What the header says of the model."""
    return {
        "model": f"{config.init_from or config.model}: {t5.parameter_count(model) / 1e6:.1f} M "
        f"parameters, {model.layers} + {model.decoder_layers} layers, {model.width} wide, "
        f"{model.heads} heads, {model.mlp}",
        "attention": explain_choice(
            model.attention,
            dtype=Policy.named(config.precision).compute_dtype,
            head_dim=model.block.head_dim,
            length=model.source_len,
            dropout=model.attention_dropout,
            only_xla="attention without a bias",
        ),
        "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
    }


class SpanRows:
    """Stretches of a corpus with spans cut out: rows for batches.

    A span becomes one token that stands for it, a sentinel; the target is every sentinel, followed
    by what it stands for, and the end. Which spans depends on the number of the row alone.

    Args:
      corpus: the text.
      tokenizer: its tokenizer.
      model: whose ``source_len`` and ``target_len`` the rows fill.

    Raises:
      ValueError: the target is too short for the spans of a source, or the text for one row.
    """

    def __init__(self, corpus: data.Corpus, tokenizer: data.Tokenizer, model: t5.T5Config):
        self.corpus, self.model, self.eod = corpus, model, tokenizer.eod
        self.fingerprint = f"{corpus.fingerprint}, {VERSIONS} times"
        self.sentinels = sentinels(tokenizer)
        # The longest stretch whose source, with its end, is not too long.
        self.length, self.cut, self.spans = next(
            (length, *spans_of(length))
            for length in range(2 * model.source_len, 0, -1)
            if length - spans_of(length)[0] + spans_of(length)[1] < model.source_len
        )
        if self.sentinels[: self.spans].max() >= model.vocab_size or self.spans > SENTINELS:
            raise ValueError(
                f"--source-len {model.source_len} has {self.spans} spans, and the model has not as "
                "many tokens to stand for them: use a shorter source, or --task name"
            )
        if self.cut + self.spans >= model.target_len:
            raise ValueError(
                f"--target-len {model.target_len} is too short for the spans of --source-len "
                f"{model.source_len}: give at least {self.cut + self.spans + 1}"
            )
        if len(corpus.tokens) < self.length:
            raise ValueError(
                f"the text has {len(corpus.tokens)} tokens, and a row of --source-len "
                f"{model.source_len} needs {self.length}: give more text or a shorter source"
            )

    def __len__(self) -> int:
        return VERSIONS * (len(self.corpus.tokens) // self.length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        version, place = divmod(int(index), len(self) // VERSIONS)
        tokens = np.asarray(self.corpus.tokens[place * self.length : (place + 1) * self.length])
        rng = np.random.default_rng((place, version))
        cut, kept = (
            np.diff([0, *np.sort(rng.choice(np.arange(1, n), self.spans - 1, False)), n])
            for n in (self.cut, self.length - self.cut)
        )
        source, target, at = [], [], 0
        for number, (before, span) in enumerate(zip(kept, cut, strict=True)):
            source += [*tokens[at : at + before], self.sentinels[number]]
            target += [self.sentinels[number], *tokens[at + before : at + before + span]]
            at += before + span
        return row(self.model, [*source, self.eod], [*target, self.eod])


def spans_of(length: int) -> tuple[int, int]:
    """Returns how many of so many tokens are cut out, and in how many spans.

    >>> spans_of(141)
    (21, 7)
    """
    cut = max(1, round(NOISE * length))
    return cut, max(1, round(cut / SPAN))


def sentinels(tokenizer: data.Tokenizer) -> np.ndarray:
    """The tokens that stand for spans: T5's own tokenizers have them, behind others they follow."""
    if isinstance(tokenizer, data.SubwordTokenizer):
        own = [tokenizer.special_id(b"<extra_id_%d>" % n) for n in range(SENTINELS)]
        if None not in own:
            return np.array(own)
    return tokenizer.vocab_size + np.arange(SENTINELS)


def row(model: t5.T5Config, source: Sequence[int], target: Sequence[int]) -> dict[str, np.ndarray]:
    """A row of a batch, padded; what is too long loses its end, and keeps its last token."""

    def padded(tokens: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        kept = [*tokens[: length - 1], tokens[-1]] if len(tokens) > length else tokens
        row_T = np.zeros(length, np.int32)
        row_T[: len(kept)] = kept
        return row_T, np.arange(length) < len(kept)

    source_S, seen_S = padded(source, model.source_len)
    targets_T, counts_T = padded(target, model.target_len)
    return {
        "source": source_S,
        "source_segments": seen_S.astype(np.int32),
        "tokens": np.concatenate([[START], targets_T[:-1]]).astype(np.int32),
        "targets": targets_T,
        "mask": counts_T.astype(np.float32),
    }


def span_rows(config: Config, model: t5.T5Config, text: data.TextData) -> tuple[Any, ...]:
    """Rows to train on and held out, facts for the header, and what concludes the run."""
    store, tokenizer = text.stores[""], text.tokenizer
    corpora = store.corpus(), text.held_out(config.held_out_bytes)[""]
    train, held_out = (SpanRows(corpus, tokenizer, model) for corpus in corpora)
    sizes = [corpus.num_bytes / 1e6 for corpus in corpora]
    facts = {
        "text": f"{sizes[0]:.1f} MB to train on, {sizes[1]:.2f} MB held out",
        "task": f"{train.spans} spans, {train.cut} tokens of {train.length}, to be filled in",
    }
    return train, held_out, facts, functools.partial(conclude_spans, config, model, text, held_out)


def conclude_spans(config, model, text, held_out: SpanRows, state: TrainState, means) -> list[str]:
    """Says how many tokens of spans were right, next to the most frequent one, and shows some."""
    train = text.stores[""].corpus().tokens
    first = np.asarray(train[: min(len(train), 1_000_000)])
    counts = np.bincount(first, minlength=text.tokenizer.vocab_size)
    frequent = int(counts.argmax())
    right = weight = 0.0
    for index in range(min(len(held_out), 1000)):
        found = held_out[index]
        right += float(((found["targets"] == frequent) * found["mask"]).sum())
        weight += float(found["mask"].sum())
    lines = [
        f"held-out tokens of spans: {means['accuracy']:.1%} right, given those before them; always "
        f"the most frequent token: {right / weight:.1%}"
    ]
    if not config.examples or jax.process_index():
        return lines
    (shown,) = [held_out[len(held_out) // 2]]
    written = write(config, model, state, [shown], eod=held_out.eod)[0]
    names = {int(id): f"<{n}>" for n, id in enumerate(held_out.sentinels)}
    parts = {
        "the text": shown["source"][shown["source_segments"] > 0][:-1],
        "the spans": shown["targets"][shown["mask"] > 0][:-1],
        "it wrote": until(written, held_out.eod),
    }
    for name, tokens in parts.items():
        lines += ["", f"{name}:", "", *spelled(text.tokenizer, tokens, names).splitlines()]
    return lines


def spelled(tokenizer: data.Tokenizer, tokens: Iterable[int], names: Mapping[int, str]) -> str:
    """The text of tokens, some of which have names."""
    out, held = [], []
    for token in map(int, tokens):
        if token in names or token >= tokenizer.vocab_size:
            out += [tokenizer.decode(held), names.get(token, "<?>")]
            held = []
        else:
            held.append(token)
    return "".join([*out, tokenizer.decode(held)])


class NameRows:
    """Functions without their names, and their names: rows for batches."""

    def __init__(self, pairs: list[Pair], tokenizer: data.Tokenizer, model: t5.T5Config):
        self.pairs, self.model, self.eod = pairs, model, tokenizer.eod
        digest = hashlib.sha256(repr([tuple(pair) for pair in pairs]).encode())
        self.fingerprint = digest.hexdigest()
        self._tokens = [
            tokenizer.encode_batch([getattr(pair, side) for pair in pairs]) for side in Pair._fields
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = (side[index].tolist() for side in self._tokens)
        return row(self.model, [*source, self.eod], [*target, self.eod])


def name_rows(config: Config, model: t5.T5Config, text: data.TextData) -> tuple[Any, ...]:
    """As :func:`span_rows`, of functions.

    Raises:
      ValueError: the text is a store, or has no function with a docstring.
    """
    found = text.found[""]
    if isinstance(found, data.Store):
        raise ValueError(f"--task name reads files of Python, and '{config.data}' is a token store")
    pairs = [list(functions(side)) for side in found]
    for side, of in zip(pairs, ("to train on", "held out"), strict=True):
        if not side:
            raise ValueError(
                f"--task name finds no function with a docstring in the files {of} of "
                f"'{config.data}'"
            )
    train, held_out = (NameRows(side, text.tokenizer, model) for side in pairs)
    facts = {
        "text": f"{len(train):,} functions to train on, {len(held_out):,} held out, of other files",
        "task": "the name of a function and the first line of its docstring, of its body",
    }
    return (
        train,
        held_out,
        facts,
        functools.partial(conclude_names, config, model, train, held_out, text.tokenizer),
    )


def functions(documents: Iterable[data.Document]) -> Iterator[Pair]:
    """Yields the functions with a docstring in files of Python; what is no Python 3 is left out."""
    for document in documents:
        if b"def " not in document.text or not re.search(rb"\"\"\"|'''", document.text):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are deprecated, in others' code
            try:
                tree = ast.parse(document.text)
            except (SyntaxError, ValueError):
                continue
        lines = document.text.decode("utf-8", "replace").splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = (ast.get_docstring(node) or "").strip()
                if docstring and len(node.body) > 1:
                    yield as_pair(node, docstring, lines)


def as_pair(node: Any, docstring: str, lines: Sequence[str]) -> Pair:
    """A function's body without its name (``_`` wherever it stands), and what it is called.

    >>> text = 'def half(x):\\n    "Halves."\\n    return x / 2'
    >>> as_pair(ast.parse(text).body[0], "Halves.", text.splitlines())
    Pair(source='(x)\\nreturn x / 2', target='half: Halves.')
    """
    body = "\n".join(lines[node.body[0].end_lineno : node.end_lineno])
    body = re.sub(rf"\b{re.escape(node.name)}\b", "_", textwrap.dedent(body))
    return Pair(
        f"({ast.unparse(node.args)})\n{body}", f"{node.name}: {docstring.splitlines()[0].strip()}"
    )


def conclude_names(
    config, model, train: NameRows, held_out: NameRows, tokenizer, state: TrainState, means
) -> list[str]:
    """Says how well held-out functions were named, next to the most frequent name, with samples."""
    del means
    if not config.examples or jax.process_index():
        return []
    chosen = np.linspace(0, len(held_out) - 1, min(config.examples, len(held_out))).astype(int)
    rows = [held_out[index] for index in chosen]
    written = write(config, model, state, rows, eod=tokenizer.eod)
    texts = [spelled(tokenizer, until(tokens, tokenizer.eod), {}) for tokens in written]
    wanted = [held_out.pairs[index].target for index in chosen]
    names = collections.Counter(name_of(pair.target) for pair in train.pairs)
    name = names.most_common(1)[0][0]
    lines_of = collections.Counter(p.target for p in train.pairs if name_of(p.target) == name)
    frequent = lines_of.most_common(1)[0][0]
    lines = [f"{len(rows)} held-out functions          exact name   token F1"]
    for told, found in (("the model", texts), (f"always {name}", [frequent] * len(rows))):
        exact = np.mean([name_of(a) == name_of(b) for a, b in zip(found, wanted, strict=True)])
        f1 = np.mean([token_f1(a, b) for a, b in zip(found, wanted, strict=True)])
        lines.append(f"  {told:<30} {exact:10.1%} {f1:10.1%}")
    lines += ["", "some of them:"]
    for index in np.linspace(0, len(rows) - 1, min(5, len(rows))).astype(int):
        lines += ["", f"  it is     {wanted[index]}", f"  it wrote  {texts[index]}"]
    return lines


def name_of(target: str) -> str:
    """The name in a target.

    >>> name_of("half: Halves.")
    'half'
    """
    return target.partition(":")[0].strip()


def token_f1(found: str, wanted: str) -> float:
    """Returns the harmonic mean of precision and recall of words, those within names too.

    >>> token_f1("get_name: Return it.", "set_name: Return it now.")
    0.75
    """
    a, b = (
        collections.Counter(re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text))
        for text in (found, wanted)
    )
    both = (a & b).total()
    return 2 * both / (a.total() + b.total()) if both else 0.0


def until(tokens: np.ndarray, eod: int) -> np.ndarray:
    """The tokens before the end."""
    ends = np.flatnonzero(tokens == eod)
    return tokens[: ends[0]] if len(ends) else tokens


def write(config, model: t5.T5Config, state: TrainState, rows: list, *, eod: int) -> np.ndarray:
    """Writes the targets of rows, a batch at a time: int32 [rows, target_len]."""
    virtual = config.pipeline.virtual if config.mesh.pipe > 1 else 1
    params = jax.jit(Stack(t5.STACKS, virtual=virtual).natural)(state.params)
    out = []
    for start in range(0, len(rows), config.global_batch):
        part = rows[start : start + config.global_batch]
        # Batches of one size, so that they are one program.
        part = part + part[-1:] * (min(config.global_batch, len(rows)) - len(part))
        given = {
            "source_lengths": [int(each["source_segments"].sum()) for each in part],
            "max_new_tokens": model.target_len,
            "eod": eod,
        }
        source = np.stack([each["source"] for each in part])
        if config.beams > 1:
            written, _ = beam_search(model, params, source, beams=config.beams, **given)
        else:
            written = generate(model, params, source, temperature=0.0, **given)
        out.append(np.asarray(written))
    return np.concatenate(out)[: len(rows)]


if __name__ == "__main__":
    jt.main(Config, build)
