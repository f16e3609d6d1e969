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
import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import jax

import jaxtrain as jt
from jaxtrain import data, hf
from jaxtrain.experiment import no_batches
from jaxtrain.finetune import preferences
from jaxtrain.host.paths import as_path
from jaxtrain.models import gpt
from jaxtrain.models.generate import generate as continue_text
from jaxtrain.models.remat import REMAT
from jaxtrain.ops.attention import explain_choice
from jaxtrain.parallel.pipeline import loss_from_stages
from jaxtrain.parallel.sharding import Rules
from jaxtrain.parallel.stack import Stack
from jaxtrain.planning.balance import stack_for
from jaxtrain.precision import Policy
from jaxtrain.run.options import PipelineOptions, make_optimizer
from jaxtrain.run.provenance import ROUNDED, SAME
from jaxtrain.run.trained import TOKENIZER_FILE, kept_file
from jaxtrain.state import TrainState

# Of the text to train on, what the byte model to compare with counts: seconds, of any corpus.
BASELINE_BYTES = 40_000_000

# What a resumed run may have otherwise besides what all may, and what that means for its steps.
MAY_CHANGE = {
    "remat": ROUNDED,
    "scan_unroll": ROUNDED,
    "attention": ROUNDED,
    "sequence_parallel": ROUNDED,
    # Where they lie; what they hold has a fingerprint.
    "data": SAME,
    "field": SAME,
    "tokenizer": SAME,
    "init_from": SAME,
    "sample_tokens": SAME,
    "held_out_bytes": "same bits, evaluated on other text",
    "held_out_text*": "same bits, evaluated on other text",
}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains a GPT on text."""

    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)

    model: Literal[tuple(gpt.PRESETS)] = "tiny"  # type: ignore[valid-type]
    """Which preset; the flags layers to attention change it."""
    init_from: str | None = None
    """A Hugging Face folder to begin with: its model (instead of a preset), its weights, and its
    tokenizer.json unless --tokenizer is given."""
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
    sequence_parallel: bool = True
    """Between blocks, split rows over the tensor axis too, where their length divides: what a block
    keeps for its backward pass, and the work of norms, shrink by it."""
    z_loss: float | None = None
    """Coefficient of the squared log of the softmax's normaliser in the loss."""

    data: str = "python"
    """Text to learn: "python" (the standard library's source), a folder or file (text, JSONL,
    Parquet, Arrow), a store that `jaxtrain tokenize` has made, or several of those by shares:
    code=0.7:STORE1,docs=0.3:STORE2, and ;1000:code=0.5,docs=0.5 behind it from step 1000 on."""
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    tokenizer: str | None = None
    """"bytes", as where it is left out; a tokenizer.json; a number trains a BPE tokenizer of that
    many tokens first, and unigram:N or wordpiece:N one of those. Stores have their own."""
    packing: Literal["cut", "fit"] = "cut"
    """Rows to train on: the text cut every seq-len tokens, or whole documents, as many as fit. Of
    preferences whole pairs are placed, chosen and rejected side by side."""
    dpo_beta: float = 0.1
    """Of a store of preferences, which are learned by DPO: how dear it is to leave what the run
    begins with (--init-from)."""
    held_out_bytes: int = 300_000
    """Bytes of held-out text to evaluate on, in whole documents, of each source."""

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
    text = data.open_data(
        config.data,
        field=config.field,
        tokenizer=tokenizer_name(config),
        kept=kept_file(config.run, TOKENIZER_FILE),
    )
    tokenizer = text.tokenizer
    step = outline(config, vocab_size=tokenizer.vocab_size)
    model = model_config(config, tokenizer.vocab_size)
    rows = text.rows(model.seq_len, config.packing)
    texts = {
        name: (text.stores[name].corpus(), held_out)
        for name, held_out in text.held_out(config.held_out_bytes).items()
    }
    held_out_rows = {
        name: data.pack(held_out, model.seq_len) for name, (_, held_out) in texts.items()
    }
    subwords = isinstance(tokenizer, data.SubwordTokenizer)
    fingerprints, mixture = {}, {}
    if config.init_from is not None:
        own = repr(hf.read_config(config.init_from))
        fingerprints["pretrained_model"] = hashlib.sha256(own.encode()).hexdigest()
    for name, (train, held_out) in texts.items():
        of = f".{name}" if name else ""  # the only one has no name
        fingerprints |= {f"text{of}": train.fingerprint}
        fingerprints |= {f"held_out_text{of}": held_out.fingerprint}
    if isinstance(rows, data.Mixture):
        fingerprints |= {f"shares.{step}": told for step, told in text.spec.described().items()}
        mixture = {
            "best_metric": f"{next(iter(texts))}/loss",
            "counts": lambda step: {
                f"data/epochs/{name}": n
                for name, n in rows.epochs(step, config.global_batch).items()
            },
        }
    return dataclasses.replace(
        step,
        **config.batches_of(rows, held_out_rows.get("", held_out_rows)),
        **mixture,
        config=dict(step.config) | {"tokenizer": TOKENIZER_FILE if subwords else "bytes"},
        files={TOKENIZER_FILE: tokenizer.to_json()} if subwords else {},
        fingerprints=fingerprints
        | {"vocabulary": tokenizer.fingerprint, "order_of_rows": str(data.ORDER_VERSION)},
        facts=facts(config, model, texts, rows),
        conclude=functools.partial(conclude, config, model, tokenizer, texts),
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
        name = tokenizer_name(config)
        found = data.tokenizer_of_stores(data.parse_data(config.data), name)
        trained = data.trained_kind(name)
        if found is None and trained is None:
            found = data.open_tokenizer(name)
        vocab_size = trained[1] if found is None else found.vocab_size
    model = model_config(config, vocab_size)
    tokens = config.global_batch * model.seq_len
    stack = stack_of(config, model)
    stages = dataclasses.replace(gpt.stages(model), stacked=stack)
    pipeline = dataclasses.asdict(config.pipeline) | {"virtual": stack.virtual}
    del pipeline["balance"]
    start, family = {}, {}
    if config.init_from is not None:
        start = {"params": lambda: hf.open_weights(config.init_from, model, stack=stack)}
        family = {
            "family": hf.family_name(config.init_from),
            "special_tokens": hf.special_tokens(config.init_from),
        }
    experiment = config.experiment(
        "gpt",
        init_fn=lambda rng: stack.cut(gpt.init(model, rng)),
        loss_fn=loss_from_stages(stages),
        optimizer=make_optimizer(config.optimizer, steps=config.steps, stacked=stack.axes),
        batch=data.packed_shapes(config.global_batch, model.seq_len),
        train_batches=no_batches,
        rules=Rules(gpt.RULES, axes={} if config.sequence_parallel else {"residual": "context"}),
        gather="model",
        stages=stages,
        pipeline=pipeline,
        may_change=MAY_CHANGE,
        items_per_step=tokens,
        item="tokens",
        flops_per_step=float(gpt.flops_per_token(model) * tokens),
        flops_formula=gpt.FLOPS_FORMULA,
        config={"model": dataclasses.asdict(model)} | family,
        **start,
    )
    pairs = data.holds_pairs(data.parse_data(config.data))
    if config.dpo_beta != Config.dpo_beta and not pairs:
        raise ValueError(f"--dpo-beta {config.dpo_beta} is for preferences, and --data has none")
    return of_preferences(config, model, experiment) if pairs else experiment


def of_preferences(
    config: Config, model: gpt.GPTConfig, experiment: jt.Experiment
) -> jt.Experiment:
    """Makes of the experiment the one that learns preferences, against what it begins with."""
    if experiment.params is None:
        raise ValueError(
            "preferences refine a trained model: give the one to begin with, --init-from"
        )
    if not 0 < config.dpo_beta < math.inf:
        raise ValueError(f"--dpo-beta is {config.dpo_beta}: give a number above 0")
    if model.z_loss:
        raise ValueError(
            f"--z-loss {model.z_loss} is not for preferences, whose loss has no such term"
        )
    log_probs = functools.partial(gpt.log_probs, model)
    stages = preferences.dpo_stages(experiment.stages, log_probs, beta=config.dpo_beta)
    # The reference's forward pass is a third of what the policy costs; both read two rows.
    flops = experiment.flops_per_step * 2 * 4 / 3
    return dataclasses.replace(
        experiment,
        init_fn=lambda rng: preferences.with_reference(experiment.init_fn(rng)),
        params=lambda: preferences.with_reference(experiment.params()),
        loss_fn=loss_from_stages(stages),
        stages=stages,
        optimizer=make_optimizer(
            config.optimizer,
            steps=config.steps,
            stacked=stages.stacked.axes,
            freeze=preferences.FREEZE,
        ),
        batch=data.packed_shapes(config.global_batch, model.seq_len, pairs=True),
        rules=Rules(preferences.reference_rules(gpt.RULES)),
        items_per_step=2 * experiment.items_per_step,
        flops_per_step=flops,
        flops_formula=f"{gpt.FLOPS_FORMULA}, and a third of it for the reference",
    )


def stack_of(config: Config, model: gpt.GPTConfig) -> Stack:
    """How the parameters are stacked by layer: cut for a pipeline that is interleaved or uneven."""
    return stack_for(
        gpt.stages(model),
        functools.partial(gpt.init, model),
        data.packed_shapes(1, model.seq_len),
        layers=model.layers,
        pipe=config.mesh.pipe,
        virtual=config.pipeline.virtual,
        balance=config.pipeline.balance,
        recompute=config.pipeline.remat == "full",
    )


def tokenizer_name(config: Config) -> str:
    """The tokenizer's flag, or the file of the folder that the run begins from.

    Raises:
      ValueError: the folder has none, so that the model would read bytes, which it has not learned.
    """
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    path = as_path(config.init_from) / TOKENIZER_FILE
    if path.exists():
        return str(path)
    if data.tokenizer_of_stores(data.parse_data(config.data)) is None:
        raise ValueError(
            f"'{config.init_from}' has no {TOKENIZER_FILE}: give --tokenizer, which may be bytes"
        )
    return "bytes"


def model_config(config: Config, vocab_size: int) -> gpt.GPTConfig:
    """The preset, changed by the flags that were given."""
    names = ("layers", "width", "heads", "dropout", "attention_dropout", "remat", "scan_unroll")
    names += ("attention", "z_loss", "seq_len")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.init_from is None:
        preset = dataclasses.replace(gpt.PRESETS[config.model](), vocab_size=vocab_size)
    else:
        preset = pretrained(config, vocab_size)
    if {"width", "heads"} & given.keys():
        # These follow from the width unless the preset's are kept by keeping its width.
        given |= {"kv_heads": None, "mlp_width": None, "head_dim": None}
    model = dataclasses.replace(preset, **given)
    # A size of 0 is the mesh's to refuse.
    if config.mesh.tensor and (
        model.heads % config.mesh.tensor or model.kv_heads % config.mesh.tensor
    ):
        raise ValueError(
            f"--mesh.tensor {config.mesh.tensor} does not divide {model.heads} heads and "
            f"{model.kv_heads} key-value heads: use a divisor of both"
        )
    return model


def pretrained(config: Config, vocab_size: int) -> gpt.GPTConfig:
    """The model of the folder that the run begins from."""
    if config.model != Config.model:
        raise ValueError(
            f"--model {config.model} is not for --init-from, whose folder says what the model is: "
            "leave one of them out"
        )
    for name in ("layers", "width", "heads"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"--{name} {getattr(config, name)} is not for --init-from, whose folder says what "
                "the model is: leave it out"
            )
    model = hf.read_config(config.init_from)
    if not isinstance(model, gpt.GPTConfig):
        raise ValueError(
            f"'{config.init_from}' has a {hf.family_name(config.init_from)}, which is no decoder: "
            "give the folder of one; experiments.bert trains encoders and experiments.t5 encoders "
            "with a decoder"
        )
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the model in '{config.init_from}' "
            f"{model.vocab_size}: give --tokenizer the model's own tokenizer.json"
        )
    return model


def conclude(
    config: Config,
    model: gpt.GPTConfig,
    tokenizer: data.Tokenizer,
    texts: Mapping[str, tuple[data.Corpus, data.Corpus]],
    state: TrainState,
    means: Mapping[str, float],
) -> list[str]:
    """Says what the loss is in bits per byte, next to a byte model's, and shows a sample."""
    lines = []
    for name, (train, held_out) in texts.items() if jax.process_index() == 0 else ():
        of = f"{name}/" if name else ""
        if held_out.pairs:
            lines.append(
                f"{name + ': ' if name else ''}held-out loss {means[f'{of}loss']:.3f} nats per "
                f"preference, of which {means[f'{of}accuracy']:.1%} are as the text has them"
            )
            continue
        counted = len(held_out.tokens) - len(held_out.starts)
        nats = means[f"{of}loss"] - means.get(f"{of}z_loss", 0.0)
        bits = nats * counted / math.log(2) / held_out.num_bytes
        if held_out.counts is not None:
            lines.append(
                f"{name + ': ' if name else ''}held-out loss {nats:.3f} nats per token of the "
                f"assistant's, {held_out.counts.sum():,} of {counted:,}"
            )
            continue
        counts = data.first_texts(train.documents(tokenizer), BASELINE_BYTES)
        baseline = data.ngram_bits_per_byte(
            counts, (document.text for document in held_out.documents(tokenizer))
        )
        verdict = "beats" if bits < baseline else "does not beat"
        lines.append(
            f"{name + ': ' if name else ''}held-out loss {bits:.3f} bits per byte, which {verdict} "
            f"the order-2 byte model's {baseline:.3f} on the same {held_out.num_bytes:,} bytes"
        )
    if config.sample_tokens:
        lines += ["", "a sample it wrote:", "", *sample(config, model, tokenizer, state)]
    return lines


def sample(
    config: Config, model: gpt.GPTConfig, tokenizer: data.Tokenizer, state: TrainState
) -> list[str]:
    """Writes a text from nothing but an end of document, and returns its lines."""
    params = jax.jit(stack_of(config, model).natural)(state.params)
    if preferences.REFERENCE in params:
        params = preferences.without_reference(params)
    # A pretrained model may have more tokens than its tokenizer, which has no text for those.
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
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
    config: Config,
    model: gpt.GPTConfig,
    texts: Mapping[str, tuple[data.Corpus, data.Corpus]],
    rows: data.RowSource,
) -> dict[str, str]:
    """What the header says of the model and its text."""
    text = "the Python standard library's source" if config.data == "python" else config.data
    train, held_out = (sum(each[i].num_bytes for each in texts.values()) for i in (0, 1))
    mixture = {}
    if isinstance(rows, data.Mixture):
        epochs = rows.epochs(config.steps, config.global_batch)
        mixture["epochs"] = ", ".join(f"{name} {n:.2f}" for name, n in epochs.items())
        windows = ", ".join(f"{window:,}" for window in rows.windows)
        mixture["epochs"] += f"; the shares are exact over any {windows} rows"
    sources = rows.rows.values() if isinstance(rows, data.Mixture) else [rows]
    if left_out := sum(getattr(each, "left_out", 0) for each in sources):
        mixture["left out"] = f"{left_out:,} preferences that are longer than a row"
    dtype = Policy.named(config.precision).compute_dtype
    return {
        "model": f"{config.init_from or config.model}: "
        f"{gpt.parameter_count(model) / 1e6:.1f} M parameters, {model.layers} layers, "
        f"{model.width} wide, {model.heads} heads, {model.positions} positions, {model.norm}, "
        f"{model.mlp}",
        "text": f"{text}: {train / 1e6:.1f} MB to train on, {held_out / 1e6:.2f} MB held out",
        **mixture,
        "attention": explain_choice(
            model.attention,
            dtype=dtype,
            head_dim=model.block.head_dim,
            length=model.seq_len,
            dropout=model.attention_dropout,
        ),
        "optimizer": f"{config.optimizer.name}, {config.optimizer.schedule} schedule",
    }
