"""Shared parts of the experiments on text: model flags, pretrained sources and tokenizers.

`experiments.gpt`, `experiments.bert` and `experiments.t5` each add their rows of text, their loss
and the lines that they print when training is over.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain import data, hf
from jaxtrain.compile import compile_step
from jaxtrain.data.chat import TEMPLATE
from jaxtrain.experiment import no_batches
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.constrain import Constrain
from jaxtrain.finetune.distill import Distill, Distillation
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf.family import OURS
from jaxtrain.hf.opening import find_model, labels_of
from jaxtrain.host.paths import as_path, exists
from jaxtrain.layout import Effect, Layout
from jaxtrain.methods.population import Population
from jaxtrain.models import decoder, mup
from jaxtrain.models.config import head_of, stacked_layers
from jaxtrain.models.experts import upcycled
from jaxtrain.models.generate import Weights, generate_step, prompts
from jaxtrain.ops.packed import Kind
from jaxtrain.run import provenance, trained
from jaxtrain.run.folder import CHECKPOINTS, CONFIG, WATERMARKS
from jaxtrain.run.trained import TOKENIZER_FILE, kept_file
from jaxtrain.sharding.rules import Rules, batch_parts
from jaxtrain.tree import map_named, named_leaves

# What a resumed run may have otherwise besides what all may, and what that means for its steps.
MAY_CHANGE = {
    # Where they lie; what they hold has a fingerprint.
    **dict.fromkeys(("data", "field", "chat_template", "tokenizer"), Effect.SAME),
    **dict.fromkeys(("init_from", "adapter"), Effect.SAME),
    "distill.teacher": Effect.SAME,
    # Of what is said when training is over.
    **dict.fromkeys(("sample_tokens", "examples", "beams"), Effect.SAME),
    "shares": Effect.LATER,
    "grow_every": Effect.LATER,
    **dict.fromkeys(("held_out_rows", "held_out_bytes", "held_out_text*"), Effect.EVALUATION),
    **dict.fromkeys(("also_held_out", "text.old"), Effect.EVALUATION),
}
# Which experiment trains models of which form.
TRAINED_BY = {"decoder": "gpt", "encoder": "bert", "encoder-decoder": "t5", "vit": "vision"}
TRAINED_BY |= {"clip": "clip", "llava": "caption", "convnet": "vision"}


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """The flags of a model of text."""

    # Of the experiment, and no flags: a key of `trained.FORMS`, and the tokenizer where none is
    # given and neither the text nor what the run begins with has one.
    form: ClassVar[str]
    default_tokenizer: ClassVar[str] = "4096"

    model: str = "tiny"
    """Which preset; the flags layers to attention change it."""
    init_from: str | None = None
    """A run of this experiment, a Hugging Face folder, or a name on its hub (ORG/NAME or
    ORG/NAME@REVISION) to begin with: its model (instead of a preset), its weights, and its
    tokenizer.json unless --tokenizer is given."""
    layers: int | None = None
    """Depth; of an encoder and a decoder, that of each."""
    width: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    dropout: float | None = None
    """Rate on embeddings and residual branches."""
    attention_dropout: float | None = None
    """Rate on attention weights; no fused kernel offers it."""
    data: str = "python"
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    also_held_out: str | None = None
    """Text as for --data, which is not trained on and of which the held-out loss is measured too,
    as old/loss: what a model forgets that is tuned on other text."""
    tokenizer: str | None = None
    lora: LoRA = dataclasses.field(default_factory=LoRA)
    hold_frozen_in: Literal["param", "compute"] = "param"
    """Dtype of weights that do not train: that of parameters, or the one that they are computed
    with, which takes half the memory under bf16 and leaves every step the same. Weights that are
    merged and exported are rounded to it."""
    population: Population = dataclasses.field(default_factory=Population)
    adapter: str | None = None
    """A folder of PEFT's files, with LoRA's additions to the model of --init-from to begin with;
    it says their ranks, targets and alpha."""
    quantize: Kind | None = None
    """Codes of 4 or 8 bits that hold the kernels of attention and MLP under the additions of
    --lora.rank (QLoRA)."""
    quantize_aware: Literal["int4", "int8", "nf4"] | None = None
    """Codes that the kernels of attention and MLP are rounded to wherever they are multiplied, so
    that the exported codes (jaxtrain hf export --quantize) are the model that was trained."""
    keep_zeros: bool = False
    """Weights of attention and MLP that are 0 in the model of --init-from, which may have been
    pruned, stay 0."""

    @property
    def models(self) -> types.ModuleType:
        """The module of its models."""
        return trained.FORMS[self.form][1]

    @functools.cached_property
    def source(self) -> "Source | None":
        """The model that the run starts from; None for random weights."""
        return None if self.init_from is None else open_source(self.init_from, self.form)

    @functools.cached_property
    def teacher(self) -> "Source | None":
        """The model to learn from; None for the text alone."""
        return open_teacher(self.distill, self.form) if hasattr(self, "distill") else None


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to begin with: that of a run, or of a Hugging Face folder, in ``path``."""

    path: str
    model: trained.Model
    is_run: bool

    def told(self, name: str) -> Any:
        """Returns a fact about the model, by its name in :func:`jaxtrain.run.trained.stored`."""
        if self.is_run:
            return trained.stored(self.path).get(name)
        return getattr(hf, "family_name" if name == "family" else name)(self.path)

    @property
    def image(self) -> tuple[int, int, int]:
        """Height, width and channels of the images that it sees."""
        return getattr(self.model.image, "image", self.model.image)

    @property
    def context(self) -> int:
        """The positions that it had before any tuning on shorter rows."""
        return max(self.model.seq_len, (self.is_run and self.told("context")) or 0)

    def tokenizer(self) -> data.Tokenizer | None:
        """The tokenizer whose tokens it has learned; None where nothing says which."""
        path = as_path(self.path) / TOKENIZER_FILE
        if exists(path):
            return data.SubwordTokenizer.load(path)
        return data.ByteTokenizer() if self.is_run else None

    def weights(
        self, model: trained.Model, pieces: Sequence[Sequence[int]] | None = None
    ) -> dict[str, Any]:
        """Its weights, for a model that may have shorter rows and other tokens, made of ``pieces``
        (:func:`pieces_of`); of another head, without that, and of one with experts without
        routers."""
        if (count := getattr(model, "experts", None)) and self.model.experts is None:
            dense = self.weights(dataclasses.replace(model, experts=None), pieces)
            return upcycled(dense, count)
        own = getattr(self.model, "vocab_size", None)
        if pieces is not None:
            params = self.weights(dataclasses.replace(model, vocab_size=own))
            return with_tokens(params, model, pieces, own)
        if not self.is_run:
            return hf.open_weights(self.path, model)
        params = trained.load(self.path)[1]
        if head_of(self.model) != head_of(model):
            params.pop("head", None)
        if getattr(model, "positions", None) == "learned" and hasattr(model, "seq_len"):
            removed = self.model.seq_len - model.seq_len
            table = params["embed"]["positions"]
            params["embed"]["positions"] = table[: len(table) - removed]
        return params


def pieces_of(
    old: data.Tokenizer, new: data.Tokenizer, own: int, size: int
) -> list[Sequence[int]] | None:
    """Returns, of each of ``size`` new tokens, the old ones that it is made of: itself, or those of
    its text. None where all are old, under their ids; ``own`` is how many the old model has."""
    names = [getattr(each, "vocabulary", {}) for each in (old, new)]
    if type(old) is type(new) and names[0].items() <= names[1].items():
        found = {id: [id] for id in range(own) if id < old.vocab_size or id >= new.vocab_size}
        if len(found) == size:
            return None
    else:
        found = {id: [names[0][name]] for name, id in names[1].items() if name in names[0]}
    found.setdefault(int(new.eod), [int(old.eod)])
    texts = new.token_pieces(np.arange(min(new.vocab_size, size)))
    for id, pieces in enumerate(old.encode_inside(texts)):
        found.setdefault(id, [piece for piece in pieces.tolist() if piece < own])
    return [found.get(id, []) for id in range(size)]


def with_tokens(
    params: dict[str, Any], model: Any, pieces: Sequence[Sequence[int]], own: int
) -> dict[str, Any]:
    """Returns parameters for all tokens of a model, made of those of ``own`` others: a row of the
    table, and of a head of its own, is the mean of the rows of its pieces, or of all rows where it
    has none."""
    init = trained.FORMS[trained.form_of(model)][1].init
    lengths_V = np.array([len(each) for each in pieces])
    places = np.repeat(np.arange(len(pieces)), lengths_V)
    flat = np.fromiter(itertools.chain.from_iterable(pieces), np.int64)

    def shapes(vocab_size: int) -> dict[str, Any]:
        sized = dataclasses.replace(model, vocab_size=vocab_size)
        return named_leaves(jax.eval_shape(functools.partial(init, sized), jax.random.key(0)))

    wanted, more = shapes(model.vocab_size), shapes(model.vocab_size + model.vocab_multiple)

    def grown(name: str, x: Any) -> Any:
        sizes = zip(wanted[name].shape, more[name].shape, strict=True)
        axis = next((axis for axis, (a, b) in enumerate(sizes) if a != b), None)
        if axis is None:
            return x
        rows_V = np.moveaxis(np.asarray(x), axis, 0)
        out_V = np.zeros((wanted[name].shape[axis], *rows_V.shape[1:]), np.float32)
        np.add.at(out_V, places, rows_V[flat])
        made_V = out_V[: len(pieces)]
        made_V /= np.maximum(lengths_V, 1).reshape(-1, *[1] * (rows_V.ndim - 1))
        made_V[lengths_V == 0] = rows_V[:own].mean(axis=0, dtype=np.float32)
        out_V = out_V.astype(rows_V.dtype)
        return np.moveaxis(out_V, 0, axis)

    return map_named(grown, params)


def open_source(path: str, form: str) -> Source:
    """Opens what ``--init-from`` names, having downloaded a model of the hub; no weight is read."""
    path, model, is_run = find_model(path)
    own = trained.form_of(model)
    if own == "convnet":
        raise ValueError(
            f"the model in '{path}' is a ConvNet, with which no run begins: --resume its own"
        )
    if own != form:
        raise ValueError(
            f"the model in '{path}' is of the form {own}, not {form}: train it with "
            f"experiments.{TRAINED_BY[own]}"
        )
    return Source(path, model, is_run)


def open_teacher(distill: Distill, *forms: str) -> Source | None:
    """Opens what ``--distill.teacher`` names, as :func:`open_source` does; None without one."""
    if distill.teacher is None:
        return None
    path, model, is_run = find_model(distill.teacher)
    if (own := trained.form_of(model)) not in forms:
        raise ValueError(
            f"the teacher in '{path}' is of the form {own}, and a student of the form {forms[0]} "
            f"learns from the form {' or '.join(forms)}: give such a teacher"
        )
    return Source(path, model, is_run)


def tokenizer_name(config: Config) -> str:
    """The tokenizer's flag, or the file of what the run begins with or learns from, or the
    experiment's own.

    Raises:
      ValueError: what the run begins with has none, so that the model would read tokens that it has
        not learned.
    """
    if config.tokenizer is not None:
        return config.tokenizer
    if begun := config.source or config.teacher:
        # A run to resume goes on with its own copy, and the end of a document that it began with.
        copy = kept_file(config.run, TOKENIZER_FILE)
        path = as_path(begun.path) / TOKENIZER_FILE
        if copy or exists(path):
            return str(copy or path)
        if begun.is_run:
            return "bytes"
    if data.tokenizer_of_stores(data.parse_data(config.data)) is not None:
        return "bytes"  # which means theirs
    if config.source is not None:
        raise ValueError(
            f"'{config.init_from}' has no {TOKENIZER_FILE}: give --tokenizer, which may be bytes"
        )
    return config.default_tokenizer


def check_old(config: Config, found: data.Tokenizer, wanted: data.Tokenizer) -> None:
    """Raises ValueError where the text of --also-held-out has another tokenizer than --data."""
    if found.fingerprint != wanted.fingerprint:
        raise ValueError(
            f"--also-held-out is {config.also_held_out}: it must have the tokenizer of --data "
            f"{config.data}; give --tokenizer a file"
        )


def tokenizer_options(config: Config) -> dict[str, Any]:
    """The arguments of :func:`jaxtrain.data.open_data` that are the tokenizer."""
    return {"tokenizer": tokenizer_name(config), "kept": kept_file(config.run, TOKENIZER_FILE)}


def vocab_size(config: Config, *, added: int = 0) -> int:
    """The number of tokens, by the flags alone: a tokenizer that would be trained is taken to reach
    its size, and to be given so many more by the experiment."""
    if (found := _tokenizer(config)) is not None:
        return found.vocab_size
    return data.trained_kind(tokenizer_name(config))[1] + added


def _tokenizer(config: Config) -> data.Tokenizer | None:
    """The tokenizer that the flags say; None for one that is to be trained."""
    name = tokenizer_name(config)
    found = data.tokenizer_of_stores(data.parse_data(config.data), name)
    return found if found or data.trained_kind(name) else data.open_tokenizer(name)


def check_same_tokens(source: Source, tokenizer: data.Tokenizer) -> None:
    """Raises ValueError where a model has been trained on another tokenizer's tokens."""
    own = source.tokenizer()
    if own is None or own.fingerprint != tokenizer.fingerprint:
        why = "has learned the tokens of another tokenizer than this text's"
        raise ValueError(
            f"the teacher in '{source.path}' {why if own else f'has no {TOKENIZER_FILE}'}: give a "
            f"run, or a folder with a {TOKENIZER_FILE}, and --tokenizer the same"
        )


def check_same_labels(source: Source, names: Sequence[str]) -> None:
    """Raises ValueError where a teacher's classes, labels or tags are not those of the data."""
    if (own := labels_of(source.path, source.model)) != list(names):
        own, wanted = (", ".join(x[:9]) + ", ..." * (len(x) > 9) or "none" for x in (own, names))
        raise ValueError(
            f"the teacher in '{source.path}' has the labels {own}, and the data {wanted}: give a "
            "teacher of the same labels in the same order"
        )


def model_config(config: Config, vocab_size: int, /, **own: Any) -> Any:
    """The preset, or the model that the run begins with, changed by the flags that have the name of
    one of its fields, and by what the experiment changes itself; one from scratch has as many
    tokens, rows of its tables and types of tokens as its teacher."""
    kind, source = trained.FORMS[config.form][0], config.source
    if source is None and config.teacher and vocab_size <= config.teacher.model.vocab_size:
        vocab_size = config.teacher.model.vocab_size
        names = {f.name for f in dataclasses.fields(kind)} & {"vocab_multiple", "token_types"}
        own |= {name: getattr(config.teacher.model, name) for name in names}
    if source is None:
        preset = dataclasses.replace(config.models.PRESETS[config.model](), vocab_size=vocab_size)
    else:
        _check_source(config, vocab_size)
        size = max(vocab_size, source.model.vocab_size)
        preset = dataclasses.replace(source.model, vocab_size=size)
    names = {field.name for field in dataclasses.fields(kind)} & vars(config).keys()
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if {"width", "heads"} & given.keys():
        # These follow from the width unless the preset's are kept by keeping its width.
        follow = {"kv_heads", "mlp_width", "head_dim", "rope_dim", "v_dim"}
        follow &= {field.name for field in dataclasses.fields(kind)} - given.keys()
        given |= dict.fromkeys(follow)
    if config.layout.attention is not None:
        given["attention"] = "auto"  # which leaves it to the layout
    model = dataclasses.replace(preset, **given | own)
    tensor = config.layout.mesh.tensor  # a size of 0 is the mesh's to refuse
    if tensor and (model.heads % tensor or model.kv_heads % tensor):
        raise ValueError(
            f"--mesh.tensor {tensor} does not divide {model.heads} heads and {model.kv_heads} "
            "key-value heads: use a divisor of both"
        )
    return model


def of_width(config: Any, model: Any, model_config: Callable[[Any, int], Any]) -> dict[str, Any]:
    """The arguments of an experiment by which rates are those of the preset's width.

    Args:
      config: with a field ``parametrization``.
      model_config: makes a model of a config, of so many tokens.
    """
    if config.parametrization == "standard":
        return {}
    if config.init_from is not None:
        raise ValueError(
            "--parametrization is mup and --init-from is given: muP says how weights are drawn, "
            "and those are trained already; leave one of them out"
        )
    sizes = dict.fromkeys(
        {"width", "heads", "kv_heads"} & {f.name for f in dataclasses.fields(config)}
    )
    base = model_config(dataclasses.replace(config, layout=Layout(), **sizes), model.vocab_size)
    scale = config.optimizer.muon_scale or "rms"
    found = mup.factors(model, base, rule=config.optimizer.name, muon_scale=scale)
    multipliers = {"rate_multipliers": found.rate_of, "decay_multipliers": found.decay_of}
    return {"init_fn": mup.init(model, found), "multipliers": multipliers}


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError where a flag says a size that the model of --init-from has already."""
    for name in names:
        default = getattr(type(config), name, None)
        if (value := getattr(config, name, default)) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is not for --init-from, whose folder says "
                "what the model is: leave one of them out"
            )


def _check_source(config: Config, vocab_size: int) -> None:
    """Refuses flags that do not fit what the run begins with."""
    check_sizes(config, "model", "layers", "width", "heads", "kv_heads")
    model = config.source.model
    own, asked = getattr(model, "experts", None), getattr(config, "experts", None)
    if own is not None and asked not in (None, own):
        raise ValueError(
            f"--experts {asked} is not for the model in '{config.init_from}', which has {own}: "
            "give a model without any, or leave it out"
        )
    if vocab_size > model.vocab_size and None in (_tokenizer(config), config.source.tokenizer()):
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the model in '{config.init_from}' "
            f"{model.vocab_size}: the rows of others are made of those of the model's own, so give "
            "--tokenizer a tokenizer.json, and a model that has one"
        )
    if model.positions == "learned" and (config.seq_len or 0) > model.seq_len:
        raise ValueError(
            f"--seq-len {config.seq_len} is more than the {model.seq_len} positions that the model "
            f"in '{config.init_from}' has: give at most that"
        )


def _pieces(config: Config, model: Any) -> list[Sequence[int]] | None:
    """What the tokens of the config are made of, of those that the run begins with; None where they
    are the same, or nothing says which those are."""
    if getattr(model, "vocab_size", None) is None:
        return None
    found, source = _tokenizer(config), config.source
    if found is None or (old := source.tokenizer()) is None:
        return None
    return pieces_of(old, found, source.model.vocab_size, model.vocab_size)


def outline(
    config: Config,
    name: str,
    model: Any,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    stored: Mapping[str, Any] = {},
    **given: Any,
) -> jt.Experiment:
    """Builds an experiment without its text: enough to compile its step, for `jaxtrain plan`.
    ``stored`` is more of what a checkpoint's config says, ``given`` more arguments of
    :meth:`jaxtrain.Config.experiment`."""
    source = config.source
    begun = {}
    if source is not None:
        begun = {name: source.told(name) for name in ("family", "special_tokens")}
        if model.positions == "rope":
            begun["context"] = source.context
    experiment = config.experiment(
        name,
        batch=batch,
        train_batches=no_batches,
        may_change=MAY_CHANGE,
        item="tokens",
        flops_formula=config.models.FLOPS_FORMULA,
        config={"model": dataclasses.asdict(model), "form": config.form} | begun | dict(stored),
        **of_layers(config, model) | {"derived": perplexity} | given,
    )
    return with_additions(config, model, experiment)


def with_additions(config: Config, model: Any, experiment: jt.Experiment) -> jt.Experiment:
    """Returns the experiment with LoRA's additions, where flags ask for them; of a model with
    another head than it begins with, that trains too."""
    lora, source, found = config.lora, config.source, {}
    constrain = Constrain(config.keep_zeros, config.quantize_aware)
    if constrain != Constrain():
        if lora.rank is not None or config.adapter is not None:
            raise ValueError(
                "--quantize-aware and --keep-zeros are for whole kernels, and low-rank additions "
                "are neither rounded nor 0: leave --lora.rank and --adapter out"
            )
        # Codes are those of the numbers that are kept, not of those that are computed with.
        keep = r"/(attn|cross|mlp)/.*kernel/" if constrain.rounded else experiment.policy.keep
        policy = dataclasses.replace(experiment.policy, keep=keep)
        experiment = apply(experiment, constrain, policy=policy)
    if config.adapter is not None:
        if source is None or lora != LoRA(train=lora.train):
            mend = "leave --lora.rank and the like out" if source else "give that with --init-from"
            raise ValueError(
                f"--adapter is {config.adapter}: it has its own ranks, over a model; {mend}"
            )
        own, found = hf.adapters.read(config.adapter, model, family=source.told("family"))
        lora = dataclasses.replace(own, train=lora.train)
    if lora == LoRA():
        if config.quantize is not None:
            raise ValueError(
                f"--quantize is {config.quantize}: packed kernels do not train; give --lora.rank, "
                "whose additions do"
            )
        return experiment
    if lora.rank is None:
        raise ValueError("--lora.rank is not given, and other flags of --lora are: give it too")
    if source is not None and head_of(source.model) != head_of(model):
        lora = dataclasses.replace(lora, train=(*lora.train, "^head/"))
    changed = apply(experiment, lora)
    if config.quantize is not None:
        of_files = source is not None and not source.is_run
        group = hf.group_of(source.path, config.quantize) if of_files else None
        changed = apply(changed, Quantize(config.quantize, group, keep=lora.train))
    begin = changed.task.params
    return changed.with_(params=lambda: hf.adapters.placed(begin(), found)) if found else changed


def with_teacher(
    config: Any,
    model: Any,
    experiment: jt.Experiment,
    loss: Callable[..., Any],
    *,
    length: int | None = None,
    flops: Callable[[Any], float] | None = None,
    **sizes: Any,
) -> jt.Experiment:
    """Returns the experiment whose model learns from that of --distill.teacher too, where flags ask
    for one.

    Args:
      loss: ``(model, teacher, **numbers)`` to the last stage that :class:`Distillation` takes.
      length: tokens of a row.
      flops: a step's, of a model.
      sizes: fields of the teacher that are not as before.
    """
    if config.teacher is None:
        if config.distill != type(config.distill)():
            raise ValueError(
                "--distill.teacher is not given, and other flags of --distill are: give it too"
            )
        return experiment
    source, form = config.teacher, trained.form_of(config.teacher.model)
    if length and source.model.positions == "learned" and source.model.seq_len < length:
        raise ValueError(
            f"the rows have {length} tokens and the teacher in '{source.path}' "
            f"{source.model.seq_len} positions: give --seq-len {source.model.seq_len} or less"
        )
    module, made = trained.FORMS[form][1], form != "convnet"
    sizes |= {"attention": model.attention} if made else {}
    teacher = dataclasses.replace(source.model, **sizes)
    change = Distillation(
        module.stages(teacher) if made else None,
        functools.partial(module.init if made else module.variables, teacher),
        loss(model, teacher, **config.distill.numbers()),
        depth=stacked_layers(model),
        weights=functools.partial(source.weights, teacher),
        teacher_rules=module.RULES,
        cost=flops(teacher) / 3 / flops(model) if flops else 0.0,
    )
    taught = apply(experiment, change)
    return taught if taught.task.params else taught.with_(params=lambda: change.params({}))


def of_layers(config: Any, model: Any) -> dict[str, Any]:
    """The arguments of an experiment that are its model, made of layers, and its first weights."""
    module, source = config.models, config.source
    return {
        "init_fn": functools.partial(module.init, model),
        "params": None if source is None else lambda: source.weights(model, _pieces(config, model)),
        "loss_fn": None,
        "rules": Rules(module.RULES, batch=module.BATCH),
        "gathers_layers": True,
        "stages": module.stages(model),
    }


def perplexity(means: Mapping[str, Any]) -> dict[str, float]:
    """The exponential of the mean cross-entropy of a token.

    >>> perplexity({"loss": 1.5, "z_loss": 0.5}), perplexity({"loss": 1000.0})
    ({'perplexity': 2.718281828459045}, {'perplexity': inf})
    """
    with np.errstate(over="ignore"):
        return {"perplexity": float(np.exp(nats_of(means)))}


def nats_of(means: Mapping[str, Any], of: str = "") -> float:
    """The mean cross-entropy of a token of the evaluation set ``of`` (``"name/"``): the loss
    without what else it is made of."""
    if f"{of}cross_entropy" in means:  # where a teacher has a part in the loss
        return means[f"{of}cross_entropy"]
    return means[f"{of}loss"] - sum(means.get(f"{of}{part}", 0.0) for part in decoder.ADDED)


def text_fields(
    config: Config,
    step: jt.Experiment,
    tokenizer: data.Tokenizer,
    fingerprints: Mapping[str, str],
    *,
    chat_template: str | None = None,
    **stored: Any,
) -> dict[str, Any]:
    """The arguments of an experiment that are its tokenizer, and by what its text is known again.

    ``stored`` is more of what a checkpoint's config says than the outline has.
    """
    if config.lora.rank is not None and config.source is None:  # which a plan may lack
        raise ValueError(
            f"--lora.rank is {config.lora.rank}: weights that stay have to be trained ones; give a "
            "model with --init-from"
        )
    if config.keep_zeros and config.source is None:
        raise ValueError(
            "--keep-zeros is given without a model to begin with, whose zeros they are: give one "
            "with --init-from"
        )
    files = {} if config.source is None else trained.beside(config.source.path)
    if chat_template is not None:
        files[TEMPLATE] = chat_template
    subwords = isinstance(tokenizer, data.SubwordTokenizer)
    if subwords:
        files[TOKENIZER_FILE] = tokenizer.to_json()
    stored["tokenizer"] = TOKENIZER_FILE if subwords else "bytes"
    own = {"vocabulary": tokenizer.fingerprint} | origin(config)
    return {
        "config": dict(step.metadata.config) | stored,
        "files": files,
        "fingerprints": dict(fingerprints) | own,
    }


def origin(config: Any) -> dict[str, str]:
    """Returns the fingerprints of the order of rows, and of the models that the run begins with and
    learns from."""
    found = {"order_of_rows": str(data.ORDER_VERSION)}
    of = {"begun_from": config.source, "taught_by": getattr(config, "teacher", None)}
    return found | {name: fingerprint_of(each.model) for name, each in of.items() if each}


def fingerprint_of(model: Any) -> str:
    """Returns a hash of the fields of a model's config that say what its weights mean."""
    fields = [field for field in dataclasses.fields(model) if field.name not in OURS]
    told = {f.name: value for f in fields if (value := getattr(model, f.name)) != f.default}
    told = json.dumps(told, sort_keys=True, default=dataclasses.asdict)  # of parts of a model
    return hashlib.sha256(told.encode()).hexdigest()


def facts(config: Config, model: Any, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the header's facts about the model, and ``own``: the experiment's about its text."""
    millions = config.models.parameter_count(model) / 1e6
    depths = [getattr(model, name, None) for name in ("layers", "decoder_layers")]
    return {
        "model": f"{config.init_from or config.model}: {millions:.1f} M parameters, "
        f"{' + '.join(str(n) for n in depths if n is not None)} layers, {model.width} wide, "
        f"{model.heads} heads, {model.positions} positions, {model.norm}, {model.mlp}, "
        f"{model.vocab_size:,} tokens",
        **own,
    }


def write(
    model: trained.Model,
    params: Any,
    rows: Sequence[Any],
    *,
    rules: Rules,
    lengths: Sequence[int] | None = None,
    max_new_tokens: int,
    size: int | None = None,
    beams: int = 1,
    images: Sequence[np.ndarray] | None = None,
    **sampling: Any,
) -> np.ndarray:
    """Writes the new tokens of each prompt or source, int32 [rows, max_new_tokens], by parameters
    where training has left them.

    All processes call it: the parameters lie on all of them. Prompts are padded to one length, and
    ``lengths`` are their own, ``images`` what each has beside its tokens; ``size`` is the most rows
    of a batch. Other arguments are those of
    :func:`jaxtrain.models.generate.generate_step` and :func:`jaxtrain.models.generate.prompts`.
    """
    step = generate_step(model, max_new_tokens=max_new_tokens, beams=beams)
    weights, mesh = Weights(params), jax.tree.leaves(params)[0].sharding.mesh
    # Batches of one size are one program; all devices that split them have rows.
    size, parts = min(size or len(rows), len(rows)), batch_parts(mesh)
    size = -(-size // parts) * parts
    batches = []
    for start in range(0, len(rows), size):
        part = [min(index, len(rows) - 1) for index in range(start, start + size)]
        sampling["prompt_lengths"] = lengths and [lengths[index] for index in part]
        if images is not None:
            sampling["image"] = np.stack([images[index] for index in part])
        tokens = [rows[index] for index in part]
        batches.append(prompts(model, tokens, max_new_tokens=max_new_tokens, **sampling))
    # One token goes through one layer at a time, and has no positions to split.
    if mesh.shape["pipe"] > 1 or mesh.shape["context"] > 1:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        write = jax.jit(step, out_shardings=whole)
    else:
        write = compile_step(step, weights, batches[0], mesh=mesh, rules=rules, donate=False)
    return np.concatenate([write(weights, batch) for batch in batches])[: len(rows)]


def until(tokens: np.ndarray, eod: int) -> np.ndarray:
    """The tokens before the end."""
    ends = np.flatnonzero(tokens == eod)
    return tokens[: ends[0]] if len(ends) else tokens


def tuning_rates(rates: Mapping[str, float]) -> dict[str, float]:
    """The share of the optimizers' own peak rates that suits weights that have learned."""
    return {name: 0.3 * rate for name, rate in rates.items()}


def watermarks(config: Config, every: int) -> data.Watermarks | None:
    """Returns the log of what a run's steps have seen of its growing store, which a run to resume
    has in its folder or its checkpoints; None for a store that is taken as it is."""
    spec = data.parse_data(config.data)
    path = spec.paths.get("")
    if not every:
        return None
    if path is None or not data.is_store(path):
        raise ValueError(
            f"--grow-every is {every} and --data {config.data} is not a token store: give the "
            "folder of one, which jaxtrain tokenize makes"
        )
    if config.private.is_on:
        raise ValueError(
            f"--grow-every is {every} and training is private: its guarantee is of a fixed number "
            "of rows; leave one of them out"
        )
    log: list[dict[str, Any]] = []
    if kept := kept_file(config.run, WATERMARKS):
        log = [json.loads(line) for line in kept.read_text().splitlines()]
    elif kept := kept_file(config.run, CHECKPOINTS):
        with contextlib.suppress(FileNotFoundError):  # killed before its first checkpoint
            log = trained.stored(str(kept.parent)).get(WATERMARKS, [])
    return data.Watermarks(path, every=every, log=log, begun=parts_begun(config))


def parts_begun(config: Config) -> int | None:
    """Returns how many appended parts of its store a run to resume has begun with, by the
    fingerprint in its folder; None for other runs and data."""
    path, kept = data.parse_data(config.data).paths.get(""), kept_file(config.run, CONFIG)
    if kept is None or path is None or not data.is_store(path):
        return None
    record = provenance.read_record(kept.parent) or {}
    return data.open_store(path).parts_with(record.get("provenance", {}).get("text"))


def text_name(config: Config) -> str:
    """Returns the name of the text in the header."""
    return "the Python standard library's source" if config.data == "python" else config.data
