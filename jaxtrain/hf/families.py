"""The families: for each, names of tensors and fields of ``config.json``, read both ways."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from jaxtrain.hf import encoders
from jaxtrain.hf.table import REQUIRED, Field, Row, T
from jaxtrain.models import encoder, encoder_decoder, gpt, vit
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.models.gpt import GPTConfig
from jaxtrain.models.vit import ViTConfig
from jaxtrain.ops.activations import GATED
from jaxtrain.ops.rotary import Llama3Scaling
from jaxtrain.parallel.stack import Stack
from jaxtrain.tree import named_leaves

ModelConfig = GPTConfig | EncoderConfig | T5Config | ViTConfig

# Fields of config.json that change no logits, no loss and no gradient.
INERT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cls_token_id",
    "directionality",
    "dtype",
    "encoder_stride",
    "eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "mask_token_id",
    "max_sequence_length",
    "max_window_layers",
    "model_type",
    "n_ctx",
    "n_positions",
    "n_special",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "pooler_act",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_output_size",
    "pooler_size_per_head",
    "pooler_type",
    "predict_special_tokens",
    "pretraining_tp",
    "problem_type",
    "reorder_and_upcast_attn",
    "return_dict",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Fields that change nothing at this value alone.
OFF = {
    "position_embedding_type": "absolute",
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}
# Our fields that no other model tells: of training and of speed.
OURS = {"attention", "attention_dropout", "dropout", "remat", "scan_unroll", "loss_chunk", "z_loss"}
OURS |= {"source_len", "target_len"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
      name: ``model_type`` in config.json.
      architecture: as in config.json.
      rows: its tensors; those of parameters that a model lacks do not count.
      fields: of config.json, by their names.
      ours: what all its models have in common here.
      fixed: fields of config.json that have one value, which is meant where they are absent too.
      read, write: how config.json says what takes more than one field: positions and windows.
      prefix: of names, which some files leave out.
      buffers: a regex of tensors that are no parameters, or that no model here has.
      model: the class of our configs.
      module: has ``init(config, rng)`` of them.
      gated_rows: those that stand for others where the MLP has a gate.
      settle: corrects a config by the names of the folder's tensors, which a function returns.
      others: architectures of other heads, with one and the same model.
      heads: a regex of the tensors of heads.
      copies: tensors that some files have, though they are others again: their names to those of
        the others. A name that is a parameter's of a model is no copy there.
    """

    name: str
    architecture: str
    rows: tuple[Row, ...]
    fields: Mapping[str, Field]
    ours: Mapping[str, Any]
    fixed: Mapping[str, Any]
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda theirs: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    prefix: str = ""
    buffers: str = "$^"
    model: type = GPTConfig
    module: Any = gpt
    gated_rows: tuple[Row, ...] = ()
    settle: Callable[[Any, Callable[[], Collection[str]]], Any] = lambda config, names: config
    others: tuple[str, ...] = ()
    heads: str = "$^"
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """All that are known."""
        return (self.architecture, *self.others)

    @property
    def stack(self) -> Stack:
        """How the parameters of its models are stacked by layer."""
        return Stack(tuple(dict.fromkeys(r.ours.split("/")[0] for r in self.rows if r.stacked)))

    def config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        """Makes our config of the fields of a config.json.

        Raises:
          ValueError: a field is missing, or unknown, or has a value that no model here has.
        """
        theirs, ours = dict(theirs), dict(self.ours)
        for name, value in self.fixed.items():
            if theirs.pop(name, value) != value:
                raise ValueError(f"only {name}={value!r} is known here of {self.architecture}")
        ours |= self.read(theirs)
        for name, field in self.fields.items():
            value = theirs.pop(name, field.default)
            if value is REQUIRED:
                raise ValueError(f"it has no {name}, which {self.architecture} needs")
            if field.ours == "norm_eps":
                _check_positive(name, value)
            if field.values is not None and value not in list(field.values):  # it may be a list
                known = ", ".join(map(str, field.values))
                raise ValueError(f"{name}={value!r} is not known here: only {known}")
            value = value if field.values is None else field.values[value]
            if ours.setdefault(field.ours, value) != value:
                raise ValueError(
                    f"{name}={value!r} differs from the other fields that are {field.ours} here, "
                    f"{ours[field.ours]!r}: no model here has both"
                )
        for name, value in theirs.items():
            off = name in OFF and value == OFF[name]
            if name not in INERT and value is not None and not off:
                raise ValueError(f"{name}={value!r} is not known here, and may change the model")
        if ours.get("head_dim") and ours["head_dim"] * ours["heads"] == ours["width"]:
            ours["head_dim"] = None
        return self.model(**ours)

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the fields of config.json, of which :meth:`config` makes the same model.

        Raises:
          ValueError: the family has no such model.
        """
        if not isinstance(config, self.model):
            raise ValueError(f"{self.name} has no {type(config).__name__}")
        theirs = {"architectures": [self.architecture], "model_type": self.name}
        block = dataclasses.asdict(config.block)
        for name, field in self.fields.items():
            value = block.get(field.ours, getattr(config, field.ours))
            if field.values is not None:
                words = [word for word, ours in field.values.items() if ours == value]
                if not words:
                    raise ValueError(f"{self.name} has no {field.ours}={value!r}")
                value = words[0]
            theirs[name] = value
        theirs |= self.write(config) | self.fixed
        wanted, got = _essence(config), _essence(self.config(theirs))
        for name, value in wanted.items():
            if got[name] != value:
                raise ValueError(f"{self.name} has {name}={got[name]!r} and the model {value!r}")
        return theirs

    def rows_of(self, config: ModelConfig) -> tuple[dict[str, Row], Any]:
        """Returns the row of every parameter of a model by its path, and the tree of shapes."""
        shapes = jax.eval_shape(lambda: self.module.init(config, jax.random.key(0)))
        rows = {row.ours: row for row in self.rows}
        rows |= {row.ours: row for row in self.gated_rows if config.mlp in GATED}
        return {path: rows[path] for path in named_leaves(shapes)}, shapes

    def stored(self, config: ModelConfig, name: str) -> str:
        """The name in a file: where there is no head, nothing has a prefix."""
        return name.removeprefix(self.prefix) if getattr(config, "head", "") == "none" else name

    def parameter_count(self, config: ModelConfig) -> int:
        """Counts what is in the tensors of a model."""
        rows, shapes = self.rows_of(config)
        sizes = 0
        for path, leaf in named_leaves(shapes).items():
            row, inner = rows[path], leaf.shape[rows[path].stacked :]
            times = leaf.shape[0] if row.stacked else 1
            sizes += times * math.prod(row.their_shape(inner, config.vocab_size)) // row.part[1]
        return sizes


def family_of(theirs: Mapping[str, Any]) -> Family:
    """Returns the family that a config.json names.

    Raises:
      ValueError: there is none of it here.
    """
    known = {name: each for each in FAMILIES.values() for name in each.architectures}
    named, kind = theirs.get("architectures"), theirs.get("model_type")
    if named is not None and not isinstance(named, list):
        raise ValueError(f"architectures={named!r} is not a list of names")
    named = list(map(str, named or []))
    if kind is None and not named:
        raise ValueError("it names no model_type and no architectures")
    found = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None and len(named) == 1:
        found = known.get(named[0])
    if found is None:
        told = (
            f"model_type is {kind}" if kind is not None else f"architecture is {', '.join(named)}"
        )
        raise ValueError(
            f"its {told}, of which there is none here, but {', '.join(FAMILIES)} "
            f"({', '.join(known)})"
        )
    if named and (len(named) > 1 or named[0] not in found.architectures):
        raise ValueError(
            f"its architecture is {', '.join(named)}, and of {found.name} there is only "
            f"{' or '.join(found.architectures)} here"
        )
    return found


def family_for(config: ModelConfig, name: str | None = None) -> Family:
    """Returns the first family that has such a model, or the one of that name.

    Raises:
      ValueError: there is none, or it has not.
    """
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family is {name!r}: use one of {', '.join(FAMILIES)}")
    reasons = []
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        if not isinstance(config, family.model):
            reasons.append(f"{family.name} has no {type(config).__name__}")
            continue
        try:
            family.config_json(config)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return family
    raise ValueError(f"no Hugging Face family has this model: {'; '.join(reasons)}")


def _essence(config: ModelConfig) -> dict[str, Any]:
    """What makes the function that a model is."""
    fields = dataclasses.asdict(config) | dataclasses.asdict(config.block)
    if config.positions == "learned":
        del fields["rope_theta"]
    return {name: value for name, value in fields.items() if name not in OURS | {"vocab_multiple"}}


def _read_rope(theirs: dict[str, Any], default: Any) -> dict[str, Any]:
    """Rotary positions: ``rope_theta`` and ``rope_scaling``, or both in ``rope_parameters``."""
    found = {"rope_theta": theirs.pop("rope_theta", default)}
    for name in ("rope_scaling", "rope_parameters"):
        more = theirs.pop(name, None)
        if more is not None and not isinstance(more, dict):
            raise ValueError(f"{name}={more!r} is not an object")
        found |= more or {}
    theta, kinds = found.pop("rope_theta"), [found.pop("rope_type", None), found.pop("type", None)]
    kind = kinds[0] or kinds[1] or "default"
    if theta is REQUIRED:
        raise ValueError("it has no rope_theta")
    for name, value in {"rope_theta": theta, **found}.items():
        if name in ("rope_theta", *_LLAMA3):
            _check_positive(name, value)
    if kind == "llama3" and found.keys() == set(_LLAMA3):
        return {"rope_theta": theta, "rope_scaling": Llama3Scaling(*map(found.get, _LLAMA3))}
    if kind != "default" or found:
        raise ValueError(
            f"rope_type={kind!r} with {', '.join(found) or 'nothing'} is not known here: only "
            f"'default', and 'llama3' with {', '.join(_LLAMA3)}"
        )
    return {"rope_theta": theta, "rope_scaling": None}


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number above 0")


# In the order of Llama3Scaling.
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _write_rope(config: GPTConfig) -> dict[str, Any]:
    scaling = config.rope_scaling and dict(zip(_LLAMA3, config.rope_scaling, strict=True))
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": "llama3"} | scaling,
    }


_SLIDING = "sliding_attention"


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    if config.width % config.heads:
        raise ValueError(
            f"llama has no width={config.width} that is not a multiple of heads={config.heads}"
        )
    return _write_rope(config)


def _read_qwen(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, and a window of all layers or of none."""
    used, window = theirs.pop("use_sliding_window", False), theirs.pop("sliding_window", 4096)
    window = window if used else None
    layers, first = theirs.get("num_hidden_layers", 0), theirs.get("max_window_layers", 28)
    kinds = theirs.pop("layer_types", None)
    for name, value in {"num_hidden_layers": layers, "max_window_layers": first}.items():
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r} must be a whole number")
    if kinds is None:
        slides = [window is not None and l >= first for l in range(layers)]
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types={kinds!r} has no kind for each of {layers} layers")
    elif unknown := [kind for kind in kinds if kind not in ("full_attention", _SLIDING)]:
        raise ValueError(
            f"layer_types has {unknown[0]!r}, which is not known here: only 'full_attention' and "
            f"{_SLIDING!r}"
        )
    else:
        slides = [kind == _SLIDING for kind in kinds]
    if any(slides) and window is None:
        raise ValueError(
            f"layer_types has {_SLIDING!r}, and use_sliding_window and sliding_window give no "
            "window"
        )
    if any(slides) and not all(slides):
        raise ValueError("some layers have a sliding window and others none: not known here")
    return {"window": window if all(slides) else None} | _read_rope(theirs, REQUIRED)


def _write_qwen(config: GPTConfig) -> dict[str, Any]:
    slides = config.window is not None
    kind = _SLIDING if slides else "full_attention"
    return {
        "use_sliding_window": slides,
        "sliding_window": config.window,
        "max_window_layers": 0 if slides else config.layers,
        "layer_types": [kind] * config.layers,
    } | _write_rope(config)


def _read_t5(theirs: dict[str, Any]) -> dict[str, Any]:
    """One rate of dropout, and whether the head has weights of its own and a scaled input."""
    rate, tied = theirs.pop("dropout_rate", 0.1), theirs.pop("tie_word_embeddings", True)
    scaled, mlp = theirs.pop("scale_decoder_outputs", tied), theirs.get("feed_forward_proj", "relu")
    form = ("gelu_new" if mlp == "gated-gelu" else mlp, mlp == "gated-gelu")
    told = theirs.pop("dense_act_fn", form[0]), theirs.pop("is_gated_act", form[1])
    if told != form:
        raise ValueError(f"dense_act_fn, is_gated_act are {told} and feed_forward_proj={mlp!r}")
    return {"dropout": rate, "attention_dropout": rate, "tied": tied, "scaled_head": scaled}


def _write_t5(config: T5Config) -> dict[str, Any]:
    if config.scaled_head and not config.tied:
        raise ValueError("t5 has no scaled_head=True with tied=False")
    tied = {"tie_word_embeddings": config.tied, "scale_decoder_outputs": config.scaled_head}
    gated = config.mlp == "geglu"
    form = {"dense_act_fn": "gelu_new" if gated else config.mlp, "is_gated_act": gated}
    return tied | form | {"dropout_rate": config.dropout}


def _settle_t5(config: T5Config, names: Callable[[], Collection[str]]) -> T5Config:
    # Since its version 5 transformers calls every head tied, and shares it unless the file has it.
    own = not config.scaled_head and config.tied and "lm_head.weight" in names()
    return dataclasses.replace(config, tied=config.tied and not own)


GPT2_ROWS = (
    Row("embed/tokens", "transformer.wte.weight", vocab=0),
    Row("embed/positions", "transformer.wpe.weight", shorter=True),
    Row("blocks/norm_attn/scale", "transformer.h.{l}.ln_1.weight"),
    Row("blocks/norm_attn/bias", "transformer.h.{l}.ln_1.bias"),
    Row("blocks/attn/q/kernel", "transformer.h.{l}.attn.c_attn.weight", part=(0, 3)),
    Row("blocks/attn/q/bias", "transformer.h.{l}.attn.c_attn.bias", part=(0, 3)),
    Row("blocks/attn/k/kernel", "transformer.h.{l}.attn.c_attn.weight", part=(1, 3)),
    Row("blocks/attn/k/bias", "transformer.h.{l}.attn.c_attn.bias", part=(1, 3)),
    Row("blocks/attn/v/kernel", "transformer.h.{l}.attn.c_attn.weight", part=(2, 3)),
    Row("blocks/attn/v/bias", "transformer.h.{l}.attn.c_attn.bias", part=(2, 3)),
    Row("blocks/attn/out/kernel", "transformer.h.{l}.attn.c_proj.weight"),
    Row("blocks/attn/out/bias", "transformer.h.{l}.attn.c_proj.bias"),
    Row("blocks/norm_mlp/scale", "transformer.h.{l}.ln_2.weight"),
    Row("blocks/norm_mlp/bias", "transformer.h.{l}.ln_2.bias"),
    Row("blocks/mlp/up/kernel", "transformer.h.{l}.mlp.c_fc.weight"),
    Row("blocks/mlp/up/bias", "transformer.h.{l}.mlp.c_fc.bias"),
    Row("blocks/mlp/down/kernel", "transformer.h.{l}.mlp.c_proj.weight"),
    Row("blocks/mlp/down/bias", "transformer.h.{l}.mlp.c_proj.bias"),
    Row("final_norm/scale", "transformer.ln_f.weight"),
    Row("final_norm/bias", "transformer.ln_f.bias"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

# Qwen 2 has the biases, Qwen 3 the norms of q and k, Llama and Mistral neither.
LLAMA_ROWS = (
    Row("embed/tokens", "model.embed_tokens.weight", vocab=0),
    Row("blocks/norm_attn/scale", "model.layers.{l}.input_layernorm.weight"),
    Row("blocks/attn/q/kernel", "model.layers.{l}.self_attn.q_proj.weight", T),
    Row("blocks/attn/q/bias", "model.layers.{l}.self_attn.q_proj.bias"),
    Row("blocks/attn/norm_q/scale", "model.layers.{l}.self_attn.q_norm.weight"),
    Row("blocks/attn/k/kernel", "model.layers.{l}.self_attn.k_proj.weight", T),
    Row("blocks/attn/k/bias", "model.layers.{l}.self_attn.k_proj.bias"),
    Row("blocks/attn/norm_k/scale", "model.layers.{l}.self_attn.k_norm.weight"),
    Row("blocks/attn/v/kernel", "model.layers.{l}.self_attn.v_proj.weight", T),
    Row("blocks/attn/v/bias", "model.layers.{l}.self_attn.v_proj.bias"),
    Row("blocks/attn/out/kernel", "model.layers.{l}.self_attn.o_proj.weight", T),
    Row("blocks/norm_mlp/scale", "model.layers.{l}.post_attention_layernorm.weight"),
    Row("blocks/mlp/gate/kernel", "model.layers.{l}.mlp.gate_proj.weight", T),
    Row("blocks/mlp/up/kernel", "model.layers.{l}.mlp.up_proj.weight", T),
    Row("blocks/mlp/down/kernel", "model.layers.{l}.mlp.down_proj.weight", T),
    Row("final_norm/scale", "model.norm.weight"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

_BIAS = "SelfAttention.relative_attention_bias.weight"

T5_ROWS = (
    Row("embed/tokens", "shared.weight", vocab=0),
    Row("distance/encoder/table", f"encoder.block.0.layer.0.{_BIAS}"),
    Row("encoder/attn/q/kernel", "encoder.block.{l}.layer.0.SelfAttention.q.weight", T),
    Row("encoder/attn/k/kernel", "encoder.block.{l}.layer.0.SelfAttention.k.weight", T),
    Row("encoder/attn/v/kernel", "encoder.block.{l}.layer.0.SelfAttention.v.weight", T),
    Row("encoder/attn/out/kernel", "encoder.block.{l}.layer.0.SelfAttention.o.weight", T),
    Row("encoder/norm_attn/scale", "encoder.block.{l}.layer.0.layer_norm.weight"),
    Row("encoder/mlp/up/kernel", "encoder.block.{l}.layer.1.DenseReluDense.wi.weight", T),
    Row("encoder/mlp/down/kernel", "encoder.block.{l}.layer.1.DenseReluDense.wo.weight", T),
    Row("encoder/norm_mlp/scale", "encoder.block.{l}.layer.1.layer_norm.weight"),
    Row("encoder_norm/scale", "encoder.final_layer_norm.weight"),
    Row("distance/decoder/table", f"decoder.block.0.layer.0.{_BIAS}"),
    Row("decoder/attn/q/kernel", "decoder.block.{l}.layer.0.SelfAttention.q.weight", T),
    Row("decoder/attn/k/kernel", "decoder.block.{l}.layer.0.SelfAttention.k.weight", T),
    Row("decoder/attn/v/kernel", "decoder.block.{l}.layer.0.SelfAttention.v.weight", T),
    Row("decoder/attn/out/kernel", "decoder.block.{l}.layer.0.SelfAttention.o.weight", T),
    Row("decoder/norm_attn/scale", "decoder.block.{l}.layer.0.layer_norm.weight"),
    Row("decoder/cross/q/kernel", "decoder.block.{l}.layer.1.EncDecAttention.q.weight", T),
    Row("decoder/cross/k/kernel", "decoder.block.{l}.layer.1.EncDecAttention.k.weight", T),
    Row("decoder/cross/v/kernel", "decoder.block.{l}.layer.1.EncDecAttention.v.weight", T),
    Row("decoder/cross/out/kernel", "decoder.block.{l}.layer.1.EncDecAttention.o.weight", T),
    Row("decoder/norm_cross/scale", "decoder.block.{l}.layer.1.layer_norm.weight"),
    Row("decoder/mlp/up/kernel", "decoder.block.{l}.layer.2.DenseReluDense.wi.weight", T),
    Row("decoder/mlp/down/kernel", "decoder.block.{l}.layer.2.DenseReluDense.wo.weight", T),
    Row("decoder/norm_mlp/scale", "decoder.block.{l}.layer.2.layer_norm.weight"),
    Row("final_norm/scale", "decoder.final_layer_norm.weight"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

T5_GATED_ROWS = (
    Row("encoder/mlp/gate/kernel", "encoder.block.{l}.layer.1.DenseReluDense.wi_0.weight", T),
    Row("encoder/mlp/up/kernel", "encoder.block.{l}.layer.1.DenseReluDense.wi_1.weight", T),
    Row("decoder/mlp/gate/kernel", "decoder.block.{l}.layer.2.DenseReluDense.wi_0.weight", T),
    Row("decoder/mlp/up/kernel", "decoder.block.{l}.layer.2.DenseReluDense.wi_1.weight", T),
)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    rows=GPT2_ROWS,
    fields={
        "vocab_size": Field("vocab_size"),
        "n_positions": Field("seq_len"),
        "n_embd": Field("width"),
        "n_layer": Field("layers"),
        "n_head": Field("heads"),
        "n_inner": Field("mlp_width", None),
        "activation_function": Field(
            "mlp",
            "gelu_new",
            {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"},
        ),
        "layer_norm_epsilon": Field("norm_eps", 1e-5),
        "resid_pdrop": Field("dropout", 0.1),
        "embd_pdrop": Field("dropout", 0.1),
        "attn_pdrop": Field("attention_dropout", 0.1),
        "tie_word_embeddings": Field("tied", True),
    },
    ours={"positions": "learned", "norm": "layernorm", "bias": True},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
    },
    prefix="transformer.",
    buffers=r"\.attn\.(masked_)?bias$",
    copies={"lm_head.weight": "transformer.wte.weight"},
)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    rows=LLAMA_ROWS,
    fields={
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("seq_len"),
        "hidden_size": Field("width"),
        "num_hidden_layers": Field("layers"),
        "num_attention_heads": Field("heads"),
        "num_key_value_heads": Field("kv_heads", None),
        "head_dim": Field("head_dim", None),
        "intermediate_size": Field("mlp_width"),
        "hidden_act": Field("mlp", "silu", {"silu": "swiglu"}),
        "rms_norm_eps": Field("norm_eps", 1e-6),
        "attention_dropout": Field("attention_dropout", 0.0),
        "tie_word_embeddings": Field("tied", False),
    },
    ours={"positions": "rope", "norm": "rmsnorm", "bias": False},
    fixed={"attention_bias": False, "mlp_bias": False, "is_encoder_decoder": False},
    read=lambda theirs: _read_rope(theirs, 10000.0),
    write=_write_llama,
    buffers=r"rotary_emb\.inv_freq$",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    fields=LLAMA.fields
    | {"num_key_value_heads": Field("kv_heads"), "sliding_window": Field("window")},
    fixed={"is_encoder_decoder": False},
    read=lambda theirs: _read_rope(theirs, REQUIRED),
    write=_write_rope,
)

QWEN2 = dataclasses.replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=LLAMA.fields | {"num_key_value_heads": Field("kv_heads")},
    ours=LLAMA.ours | {"qkv_bias": True},
    fixed={"is_encoder_decoder": False},
    read=_read_qwen,
    write=_write_qwen,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=QWEN2.fields | {"head_dim": Field("head_dim")},
    ours=LLAMA.ours | {"qk_norm": True},
    fixed={"attention_bias": False, "is_encoder_decoder": False},
)

BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    rows=encoders.BERT_ROWS,
    fields=encoders.FIELDS | {"max_position_embeddings": Field("seq_len", 512)},
    ours={"norm": "layernorm", "bias": True},
    fixed={
        "is_decoder": False,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "tie_word_embeddings": True,
    },
    read=functools.partial(encoders.read_head, encoders.BERT_HEADS),
    write=functools.partial(encoders.write_head, encoders.BERT_HEADS),
    prefix="bert.",
    # What predicts the next sentence, and where it alone is left, the layer that pools for it.
    buffers=r"\.position_ids$|^bert\.pooler\.|^cls\.seq_relationship\.",
    model=EncoderConfig,
    module=encoder,
    others=tuple(encoders.BERT_HEADS)[1:],
    heads=encoders.OF_HEADS,
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)

ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture="RobertaForMaskedLM",
    rows=encoders.ROBERTA_ROWS,
    fields=encoders.FIELDS,
    read=encoders.read_roberta,
    write=encoders.write_roberta,
    prefix="roberta.",
    buffers=r"\.position_ids$|(^|\.)pooler\.",
    others=tuple(encoders.ROBERTA_HEADS)[1:],
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)

T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    rows=T5_ROWS,
    gated_rows=T5_GATED_ROWS,
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("width"),
        "d_kv": Field("head_dim"),
        "d_ff": Field("mlp_width"),
        "num_layers": Field("layers"),
        "num_decoder_layers": Field("decoder_layers", None),
        "num_heads": Field("heads"),
        "relative_attention_num_buckets": Field("buckets", 32),
        "relative_attention_max_distance": Field("max_distance", 128),
        "layer_norm_epsilon": Field("norm_eps", 1e-6),
        "feed_forward_proj": Field("mlp", "relu", {"relu": "relu", "gated-gelu": "geglu"}),
    },
    ours={"source_len": 512, "target_len": 114},
    fixed={"is_encoder_decoder": True, "is_decoder": False, "decoder_start_token_id": 0},
    read=_read_t5,
    write=_write_t5,
    # In some files, and never read.
    buffers=r"EncDecAttention\.relative_attention_bias\.weight$",
    model=T5Config,
    module=encoder_decoder,
    settle=_settle_t5,
    copies=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        "shared.weight",
    ),
)

VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    rows=encoders.VIT_ROWS,
    fields=encoders.VIT_FIELDS,
    ours={"norm": "layernorm", "bias": True},
    fixed={"is_encoder_decoder": False},
    read=encoders.read_vit,
    write=encoders.write_vit,
    prefix="vit.",
    buffers=r"(^|\.)pooler\.",
    model=ViTConfig,
    module=vit,
    others=tuple(encoders.VIT_HEADS)[1:],
    heads=encoders.OF_HEADS,
)

DECODERS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)
FAMILIES = {family.name: family for family in (*DECODERS, BERT, ROBERTA, VIT, T5)}
