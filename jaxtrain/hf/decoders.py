"""The families of decoders: GPT-2, Llama, Mistral and Qwen."""

import dataclasses
from typing import Any

from jaxtrain.hf.family import Family, check_positive
from jaxtrain.hf.table import REQUIRED, Field, Row, T
from jaxtrain.models.gpt import GPTConfig
from jaxtrain.ops.rotary import Llama3Scaling


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
            check_positive(name, value)
    if kind == "llama3" and found.keys() == set(_LLAMA3):
        return {"rope_theta": theta, "rope_scaling": Llama3Scaling(*map(found.get, _LLAMA3))}
    if kind != "default" or found:
        raise ValueError(
            f"rope_type={kind!r} with {', '.join(found) or 'nothing'} is not known here: only "
            f"'default', and 'llama3' with {', '.join(_LLAMA3)}"
        )
    return {"rope_theta": theta, "rope_scaling": None}


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

DECODERS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)
