"""Train a GPT on text: ``python -m experiments.gpt``.

By default a byte-level GPT learns the source code of the running Python's own standard library:
real text, found on every machine, files split into train and held-out by a hash of their path. On 2
CPU cores that takes under 6 minutes and ends at or below 2.15 bits per held-out byte.

    python -m experiments.gpt --help
    python -m experiments.gpt --model gpt2-124m --data my_texts/ --tokenizer tokenizer.json
    python -m experiments.gpt --simulate-devices 8 --mesh.data 2 --mesh.tensor 4 --steps 20
    python -m experiments.gpt.generate --run runs/gpt-1 --prompt "def "
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import jax

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.experiment import no_batches
from jaxtrain.host.paths import as_path
from jaxtrain.models import gpt
from jaxtrain.models.generate import generate as continue_text
from jaxtrain.models.remat import REMAT
from jaxtrain.ops.attention import explain_choice
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.parallel.stack import Stack
from jaxtrain.planning.balance import balanced, weigh
from jaxtrain.precision import Policy
from jaxtrain.run.options import PipelineOptions, make_optimizer
from jaxtrain.run.provenance import ROUNDED, SAME
from jaxtrain.state import TrainState

TOKENIZER_FILE = "tokenizer.json"
# Of the text to train on, what the byte model to compare with counts: seconds, of any corpus.
BASELINE_BYTES = 40_000_000

# What a resumed run may have otherwise besides what all may, and what that means for its steps.
MAY_CHANGE = {
    "remat": ROUNDED,
    "scan_unroll": ROUNDED,
    "attention": ROUNDED,
    # Where they lie; what they hold has a fingerprint.
    "data": SAME,
    "field": SAME,
    "tokenizer": SAME,
    "sample_tokens": SAME,
    "held_out_bytes": "same bits, evaluated on other text",
    "held_out_text": "same bits, evaluated on other text",
}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a GPT on text."""

    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)

    model: Literal[tuple(gpt.PRESETS)] = "tiny"  # type: ignore[valid-type]
    """Which preset; the flags layers to attention change it."""
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
    """What a block keeps for its backward pass: all, the results of products (on the device, or
    offload: on the host), those of attention alone, or its input."""
    scan_unroll: int | None = None
    """Layers per iteration of the scan over layers; left out, few layers on one CPU device are
    unrolled and others are not."""
    attention: str | None = None
    """Attention kernel: auto, xla, cudnn or pallas (GPUs), splash (TPUs)."""
    z_loss: float | None = None
    """Coefficient of the squared log of the softmax's normaliser in the loss."""

    data: str = "python"
    """Text to learn: "python" (the standard library's source), or a folder or file (text, JSONL,
    Parquet)."""
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json; a number trains a BPE tokenizer of that many tokens first."""
    held_out_bytes: int = 300_000
    """Bytes of held-out text to evaluate on, in whole documents."""

    steps: int = 350
    """Train steps."""
    global_batch: int = 16
    """Rows per step, over all devices."""
    seq_len: int | None = None
    """Tokens per row; left out, the preset's."""
    sample_tokens: int = 250
    """Length of the text written when training is over; 0 writes none."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it.

    Raises:
      ValueError: for options that do not fit each other.
    """
    for name in ("held_out_bytes", "sample_tokens"):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it is a size")
    split = open_text(config)
    tokenizer = open_tokenizer(config, split)
    step = outline(config, vocab_size=tokenizer.vocab_size)
    model = model_config(config, tokenizer.vocab_size)
    held_out = take_bytes(split.held_out, config.held_out_bytes)
    train_rows = data.PackedTokens(tokenize(split.train, tokenizer), model.seq_len)
    eval_corpus = tokenize(held_out, tokenizer)
    eval_rows = data.PackedTokens(eval_corpus, model.seq_len)
    bpe = isinstance(tokenizer, data.BPETokenizer)
    return dataclasses.replace(
        step,
        **config.batches_of(train_rows, eval_rows),
        config=dict(step.config) | {"tokenizer": TOKENIZER_FILE if bpe else "bytes"},
        files={TOKENIZER_FILE: tokenizer.to_json()} if bpe else {},
        fingerprints={
            "text": train_rows.corpus.fingerprint,
            "held_out_text": eval_corpus.fingerprint,
            "vocabulary": tokenizer.fingerprint,
            "order_of_rows": str(data.ORDER_VERSION),
        },
        facts=facts(config, model, train_rows.corpus, eval_corpus),
        conclude=functools.partial(conclude, config, model, tokenizer, split.train, held_out),
    )


def outline(config: Config, *, vocab_size: int | None = None) -> jt.Experiment:
    """Builds the experiment without its text: enough to compile its step, for `jaxtrain plan`.

    Args:
      config: the flags.
      vocab_size: the tokenizer's; left out, what the flags say (a tokenizer that would be trained
        is taken to reach its size).

    Raises:
      ValueError: for options that do not fit each other.
    """
    if vocab_size is None:
        digits = config.tokenizer.isdigit()
        vocab_size = int(config.tokenizer) if digits else open_tokenizer(config, None).vocab_size
    model = model_config(config, vocab_size)
    tokens = config.global_batch * model.seq_len
    stack = stack_of(config, model)
    stages = dataclasses.replace(gpt.stages(model), stacked=stack)
    pipeline = dataclasses.asdict(config.pipeline) | {"virtual": stack.virtual}
    del pipeline["balance"]
    return config.experiment(
        "gpt",
        init_fn=lambda rng: stack.cut(gpt.init(model, rng)),
        loss_fn=loss_from_stages(stages),
        optimizer=make_optimizer(config.optimizer, steps=config.steps, stacked=stack.axes),
        batch=data.packed_shapes(config.global_batch, model.seq_len),
        train_batches=no_batches,
        rules=Rules(gpt.RULES),
        gather="model",
        stages=stages,
        pipeline=pipeline,
        may_change=MAY_CHANGE,
        items_per_step=tokens,
        item="tokens",
        flops_per_step=float(gpt.flops_per_token(model) * tokens),
        flops_formula=gpt.FLOPS_FORMULA,
        config={"model": dataclasses.asdict(model)},
    )


def stack_of(config: Config, model: gpt.GPTConfig) -> Stack:
    """How the parameters are stacked by layer: cut for a pipeline that is interleaved or uneven."""
    if config.mesh.pipe == 1:
        return Stack()
    virtual, parts = config.pipeline.virtual, config.mesh.pipe * config.pipeline.virtual
    if not 1 < parts <= model.layers or not (config.pipeline.balance or model.layers % parts):
        return Stack(virtual=virtual)
    batch = data.packed_shapes(1, model.seq_len)
    weights = weigh(gpt.stages(model), functools.partial(gpt.init, model), batch)
    recompute = config.pipeline.remat == "full"
    counts = balanced(weights, layers=model.layers, stages=parts, recompute=recompute)
    return Stack(virtual=virtual, counts=counts)


def open_text(config: Config) -> data.Split:
    """Opens the train and held-out documents."""
    if config.data == "python":
        return data.python_stdlib()
    return data.text_folder(config.data, field=config.field)


def open_tokenizer(config: Config, split: data.Split | None) -> data.Tokenizer:
    """Makes, trains (on the split) or loads the tokenizer; a run that is resumed keeps its own."""
    if config.tokenizer == "bytes":
        return data.ByteTokenizer()
    if config.tokenizer.isdigit():
        # One that was trained is kept: checkpoints need that very one.
        if (kept := kept_file(config.run, TOKENIZER_FILE)) is not None:
            return data.BPETokenizer.load(kept)
        texts = (document.text for document in split.train)
        return data.BPETokenizer.train(texts, int(config.tokenizer))
    return data.BPETokenizer.load(config.tokenizer)


def kept_file(run: jt.RunOptions, name: str) -> os.PathLike | None:
    """The file that a run to resume has kept in its folder; None where there is none."""
    if not (run.resume or run.auto_resume) or run.run_dir is None:
        return None
    path = as_path(run.run_dir) / name
    return path if path.exists() else None


def tokenize(documents: Iterable[data.Document], tokenizer: data.Tokenizer) -> data.Corpus:
    """Encodes documents once and for all starts: tokens are kept in ``~/.cache/jaxtrain/tokens``
    (``$XDG_CACHE_HOME`` is heeded), or in memory where that folder cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    try:
        folder = pathlib.Path(home) / "jaxtrain" / "tokens"
        return data.tokenize(documents, tokenizer, cache_dir=folder)
    except OSError:
        return data.tokenize(documents, tokenizer)


def model_config(config: Config, vocab_size: int) -> gpt.GPTConfig:
    """The preset, changed by the flags that were given."""
    names = ("layers", "width", "heads", "dropout", "attention_dropout", "remat", "scan_unroll")
    names += ("attention", "z_loss", "seq_len")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    preset = gpt.PRESETS[config.model]()
    if {"width", "heads"} & given.keys():
        # These follow from the width unless the preset's are kept by keeping its width.
        given |= {"kv_heads": None, "mlp_width": None}
    model = dataclasses.replace(preset, vocab_size=vocab_size, **given)
    # A size of 0 is the mesh's to refuse.
    if config.mesh.tensor and (
        model.heads % config.mesh.tensor or model.kv_heads % config.mesh.tensor
    ):
        raise ValueError(
            f"--mesh.tensor {config.mesh.tensor} does not divide {model.heads} heads and "
            f"{model.kv_heads} key-value heads: use a divisor of both"
        )
    return model


def take_bytes(documents: Iterable[data.Document], limit: int) -> list[data.Document]:
    """Whole documents of up to ``limit`` bytes together, chosen by a hash of their names.

    Where none is that small, the first by hash alone. Reads the documents twice, and keeps only
    what it returns.
    """
    ranked = sorted(
        (data.hash_fraction(f"evaluate/{d.name}"), len(d.text), d.name) for d in documents
    )
    chosen: set[str] = set()
    for _, size, name in ranked:
        if size <= limit:
            chosen.add(name)
            limit -= size
    chosen = chosen or {name for _, _, name in ranked[:1]}
    return [document for document in documents if document.name in chosen]


def first_texts(documents: Iterable[data.Document], limit: int) -> Iterator[bytes]:
    """The texts of the first documents, until they have ``limit`` bytes together."""
    for document in documents:
        if limit <= 0:
            return
        limit -= len(document.text)
        yield document.text


def conclude(
    config: Config,
    model: gpt.GPTConfig,
    tokenizer: data.Tokenizer,
    train: data.Documents,
    held_out: list[data.Document],
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says what the loss is in bits per byte, next to a byte model's, and shows a sample."""
    tokens = tokenize(held_out, tokenizer)
    counted = len(tokens.tokens) - len(tokens.starts)
    bits = (means["loss"] - means.get("z_loss", 0.0)) * counted / math.log(2) / tokens.num_bytes
    lines = []
    if jax.process_index() == 0:  # which prints them
        texts = first_texts(train, BASELINE_BYTES)
        baseline = data.ngram_bits_per_byte(texts, (d.text for d in held_out))
        verdict = "beats" if bits < baseline else "does not beat"
        lines.append(
            f"held-out loss {bits:.3f} bits per byte, which {verdict} the order-2 byte model's "
            f"{baseline:.3f} on the same {tokens.num_bytes:,} bytes"
        )
    if config.sample_tokens:
        lines += ["", "a sample it wrote:", "", *sample(config, model, tokenizer, state)]
    return lines


def sample(
    config: Config, model: gpt.GPTConfig, tokenizer: data.Tokenizer, state: TrainState
) -> list[str]:
    """Writes a text from nothing but an end of document, and returns its lines."""
    params = jax.jit(stack_of(config, model).natural)(state.params)
    room = model.seq_len - 1 if model.positions == "learned" else config.sample_tokens
    written = continue_text(
        model,
        params,
        [[tokenizer.eod]],
        max_new_tokens=min(config.sample_tokens, room),
        rng=jax.random.key(config.seed),
        temperature=0.8,
        top_p=0.95,
    )
    return tokenizer.decode(written[0]).splitlines()


def facts(
    config: Config, model: gpt.GPTConfig, train: data.Corpus, held_out: data.Corpus
) -> dict[str, str]:
    """What the header says of the model and its text."""
    text = "the Python standard library's source" if config.data == "python" else config.data
    dtype = Policy.named(config.precision).compute_dtype
    return {
        "model": f"{config.model}: {gpt.parameter_count(model) / 1e6:.1f} M parameters, "
        f"{model.layers} layers, {model.width} wide, {model.heads} heads, {model.positions} "
        f"positions, {model.norm}, {model.mlp}",
        "text": f"{text}: {train.num_bytes / 1e6:.1f} MB to train on, "
        f"{held_out.num_bytes / 1e6:.2f} MB held out",
        "attention": explain_choice(
            model.attention,
            dtype=dtype,
            head_dim=model.head_dim,
            length=model.seq_len,
            dropout=model.attention_dropout,
        ),
        "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
    }
