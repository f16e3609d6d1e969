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
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import jax

from experiments import options
from jaxtrain import data
from jaxtrain.experiment import Experiment
from jaxtrain.models import gpt
from jaxtrain.models.generate import generate as continue_text
from jaxtrain.models.remat import REMAT
from jaxtrain.ops.attention import explain_choice
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.parallel.stack import Stack
from jaxtrain.precision import POLICIES, Policy
from jaxtrain.state import TrainState

TOKENIZER_FILE = "tokenizer.json"
# Of the text to train on, what the byte model to compare with counts: seconds, of any corpus.
BASELINE_BYTES = 40_000_000


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a GPT on text."""

    run: options.Run = dataclasses.field(default_factory=options.RunOptions)
    mesh: options.MeshOptions = dataclasses.field(default_factory=options.MeshOptions)
    pipeline: options.PipelineOptions = dataclasses.field(default_factory=options.PipelineOptions)
    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=options.OptimizerOptions
    )

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
    accumulate: int = 1
    """Microbatches per step, in one scan; their gradients are summed weighted by tokens."""
    steps_per_call: options.StepsPerCall = 1
    precision: Literal[POLICIES] = "f32"  # type: ignore[valid-type]
    """Dtypes; bf16 keeps float32 parameters and optimizer state."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is split over the data axis too: 1 optimizer state, 2 gradients, 3 parameters."""
    seed: int = 0
    """Of parameters, dropout and the order of the text."""
    sample_tokens: int = 250
    """Length of the text written when training is over; 0 writes none."""
    simulate_devices: options.SimulateDevices = 0
    distributed: options.Processes = dataclasses.field(default_factory=options.ProcessOptions)


def build(config: Config) -> Experiment:
    """Builds the experiment: everything that is trained, planned or checked follows from it.

    Raises:
      ValueError: for options that do not fit each other.
    """
    options.check_seed(config.seed)
    for name in ("held_out_bytes", "sample_tokens"):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it is a size")
    split = open_text(config)
    tokenizer = open_tokenizer(config, split)
    step = outline(config, vocab_size=tokenizer.vocab_size)
    model = model_config(config, tokenizer.vocab_size)
    held_out = take_bytes(split.held_out, config.held_out_bytes)
    train_rows = data.PackedTokens(options.tokenize(split.train, tokenizer), model.seq_len)
    eval_corpus = options.tokenize(held_out, tokenizer)
    eval_rows = data.PackedTokens(eval_corpus, model.seq_len)
    batches = data.Batches(train_rows, global_batch=config.global_batch, seed=config.seed)
    bpe = isinstance(tokenizer, data.BPETokenizer)
    return dataclasses.replace(
        step,
        batch=batches.shapes,
        train_batches=lambda start, sharding: batches.stream(
            start,
            sharding=sharding,
            prefetch=max(2, min(config.steps_per_call, config.steps)),
        ),
        eval_batches=lambda sharding: data.eval_batches(
            eval_rows, config.global_batch, sharding=sharding
        ),
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


def outline(config: Config, *, vocab_size: int | None = None) -> Experiment:
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
    policy = Policy.named(config.precision)
    stages = gpt.stages(model, virtual=stack_of(config).virtual)
    stack = stages.stacked
    return Experiment(
        name="gpt",
        init_fn=lambda rng: stack.cut(gpt.init(model, rng)),
        loss_fn=loss_from_stages(stages),
        optimizer=options.make_optimizer(
            config.optimizer,
            steps=config.steps,
            stacked=stack.axes,
        ),
        batch=data.packed_shapes(config.global_batch, model.seq_len),
        train_batches=options.no_batches,
        steps=config.steps,
        mesh=dataclasses.asdict(config.mesh),
        rules=Rules(gpt.RULES),
        gather="model",
        stages=stages,
        pipeline=dataclasses.asdict(config.pipeline) | {"virtual": stack.virtual},
        policy=policy,
        accumulate=config.accumulate,
        steps_per_call=config.steps_per_call,
        zero=config.zero,
        seed=config.seed,
        may_change=options.may_change(config),
        items_per_step=tokens,
        flops_per_step=float(gpt.flops_per_token(model) * tokens),
        flops_formula=gpt.FLOPS_FORMULA,
        config={
            "experiment": "gpt",
            "module": "experiments.gpt",
            "flags": dataclasses.asdict(config),
            "model": dataclasses.asdict(model),
        },
    )


def stack_of(config: Config) -> Stack:
    """How the parameters are stacked by layer: cut for an interleaved pipeline alone."""
    return Stack(virtual=config.pipeline.virtual if config.mesh.pipe != 1 else 1)


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
        if (kept := options.kept_file(config.run, TOKENIZER_FILE)) is not None:
            return data.BPETokenizer.load(kept)
        texts = (document.text for document in split.train)
        return data.BPETokenizer.train(texts, int(config.tokenizer))
    return data.BPETokenizer.load(config.tokenizer)


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
    tokens = options.tokenize(held_out, tokenizer)
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
    params = jax.jit(stack_of(config).natural)(state.params)
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
