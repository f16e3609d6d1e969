"""The families of decoders: GPT-2, Llama, Mistral, Phi, Qwen, Gemma, and mixtures of experts."""

import dataclasses
import re
from typing import Any

from jaxtrain.hf import positions
from jaxtrain.hf.family import Family
from jaxtrain.hf.table import GELUS, REQUIRED, SHAPE, Field, Row, T, dense, norm
from jaxtrain.models.config import deltas_of, windows_of
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.ops.rotary import LongScaling, YarnScaling


def _check_width(family: str, config: DecoderConfig) -> dict[str, Any]:
    if config.width % config.heads:
        raise ValueError(
            f"{family} has no width={config.width} that is not a multiple of heads={config.heads}"
        )
    return {}


def _read_qwen(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, and a window of all layers, of some or of none."""
    used, window = theirs.pop("use_sliding_window", False), theirs.pop("sliding_window", 4096)
    window = window if used else None
    layers, first = theirs.get("num_hidden_layers", 0), theirs.get("max_window_layers", 28)
    for name, value in {"num_hidden_layers": layers, "max_window_layers": first}.items():
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r} must be a whole number")
    slides = [window is not None and l >= first for l in range(layers)]
    return positions.read_kinds(theirs, slides, window) | positions.read_rope(theirs, REQUIRED)


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    slides = windows_of(config)
    return {
        "use_sliding_window": any(slides),
        "max_window_layers": slides.index(True) if any(slides) else config.layers,
        **positions.write_kinds(config),
        **positions.write_rope(config),
    }


def _read_gemma2(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, and a window of every other layer."""
    slides = [l % 2 == 0 for l in range(positions.positive(theirs, "num_hidden_layers"))]
    found = positions.read_kinds(theirs, slides, theirs.pop("sliding_window", 4096))
    return found | positions.read_rope(theirs, 10000.0)


def _read_gemma3(theirs: dict[str, Any]) -> dict[str, Any]:
    """A window of all layers but every sixth, and rotary positions of both kinds of layers."""
    every = positions.positive(theirs, "sliding_window_pattern", 6)
    slides = [(l + 1) % every != 0 for l in range(positions.positive(theirs, "num_hidden_layers"))]
    found = positions.read_kinds(theirs, slides, theirs.pop("sliding_window", 4096))
    return positions.read_two_ropes(theirs, found, {"rope_theta": 1e6, "rope_local_base_freq": 1e4})


GPT2_ROWS = (
    Row("embed/tokens", "transformer.wte.weight", vocab=0),
    Row("embed/positions", "transformer.wpe.weight", shorter=True),
    *norm("blocks/norm_attn", "transformer.h.{l}.ln_1"),
    *dense("blocks/attn/q", "transformer.h.{l}.attn.c_attn", None, part=(0, 3)),
    *dense("blocks/attn/k", "transformer.h.{l}.attn.c_attn", None, part=(1, 3)),
    *dense("blocks/attn/v", "transformer.h.{l}.attn.c_attn", None, part=(2, 3)),
    *dense("blocks/attn/out", "transformer.h.{l}.attn.c_proj", None),
    *norm("blocks/norm_mlp", "transformer.h.{l}.ln_2"),
    *dense("blocks/mlp/up", "transformer.h.{l}.mlp.c_fc", None),
    *dense("blocks/mlp/down", "transformer.h.{l}.mlp.c_proj", None),
    *norm("final_norm", "transformer.ln_f"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

# Qwen 2 has the biases, Qwen 3 the norms of q and k, Llama and Mistral neither.
LLAMA_ROWS = (
    Row("embed/tokens", "model.embed_tokens.weight", vocab=0),
    Row("blocks/norm_attn/scale", "model.layers.{l}.input_layernorm.weight"),
    *dense("blocks/attn/q", "model.layers.{l}.self_attn.q_proj"),
    Row("blocks/attn/norm_q/scale", "model.layers.{l}.self_attn.q_norm.weight"),
    *dense("blocks/attn/k", "model.layers.{l}.self_attn.k_proj"),
    Row("blocks/attn/norm_k/scale", "model.layers.{l}.self_attn.k_norm.weight"),
    *dense("blocks/attn/v", "model.layers.{l}.self_attn.v_proj"),
    Row("blocks/attn/out/kernel", "model.layers.{l}.self_attn.o_proj.weight", T),
    Row("blocks/norm_mlp/scale", "model.layers.{l}.post_attention_layernorm.weight"),
    Row("blocks/mlp/gate/kernel", "model.layers.{l}.mlp.gate_proj.weight", T),
    Row("blocks/mlp/up/kernel", "model.layers.{l}.mlp.up_proj.weight", T),
    Row("blocks/mlp/down/kernel", "model.layers.{l}.mlp.down_proj.weight", T),
    Row("final_norm/scale", "model.norm.weight"),
    Row("head/kernel", "lm_head.weight", T, vocab=1),
)

# Llama's, with queries, keys and values in one tensor, and gates and ups in another.
_OF_PHI = "model.layers.{l}."
PHI3_ROWS = (
    *(row for row in LLAMA_ROWS if not re.match("blocks/(mlp/(gate|up)|attn/[^o])", row.ours)),
    *(Row(f"blocks/attn/{x}/kernel", f"{_OF_PHI}self_attn.qkv_proj.weight", T) for x in "qkv"),
    *(
        Row(f"blocks/mlp/{x}/kernel", f"{_OF_PHI}mlp.gate_up_proj.weight", T, part=(i, 2))
        for i, x in enumerate(("gate", "up"))
    ),
)


def _phi3_parts(config: DecoderConfig) -> dict[str, dict[str, Any]]:
    """Of the tensor of queries, keys and values, the heads of each."""
    q, kv = config.heads, config.block.kv_heads
    placed = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
    return {
        f"blocks/attn/{x}/": {"part": (first, q + 2 * kv), "parts": count}
        for x, (first, count) in placed.items()
    }


def _read_phi3(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of a part of a head, each frequency of which may have its own divisor."""
    part = positions.take_rotated(theirs, 1.0)
    width, heads = (positions.positive(theirs, x) for x in ("hidden_size", "num_attention_heads"))
    theirs.setdefault("original_max_position_embeddings", 4096)  # goes before that in the object
    found = positions.read_rope(theirs, 10000.0)
    theirs.pop("original_max_position_embeddings", None)  # nothing else reads it
    size = theirs.get("head_dim") or width // heads
    return found | {"rope_dim": int(size * part) if part < 1 else None}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    rope, scaling = positions.write_rope(config), config.rope_scaling
    if not isinstance(scaling, LongScaling | None):
        raise ValueError("phi3 has positions that are scaled by longrope alone, or not")
    whole = {"original_max_position_embeddings": scaling.length} if scaling else {}
    part = {"partial_rotary_factor": positions.rotated_part(config)}
    # Where it is left out transformers takes 32000, a token like others or none.
    return rope | part | whole | {"pad_token_id": None}


# Llama's, but for the norms around both branches.
GEMMA_ROWS = (
    *(row for row in LLAMA_ROWS if row.ours != "blocks/norm_mlp/scale"),
    Row("blocks/norm_attn_out/scale", "model.layers.{l}.post_attention_layernorm.weight"),
    Row("blocks/norm_mlp/scale", "model.layers.{l}.pre_feedforward_layernorm.weight"),
    Row("blocks/norm_mlp_out/scale", "model.layers.{l}.post_feedforward_layernorm.weight"),
)


def _with_experts(block: str, experts: str, **names: str) -> tuple[Row, ...]:
    """Llama's rows with experts in the place of the MLP: the block's name, and those of kernels."""
    rows = (row for row in LLAMA_ROWS if not row.ours.startswith("blocks/mlp/"))
    mlps = (
        Row(f"blocks/experts/{ours}/kernel", f"{block}.{experts}.{{e}}.{theirs}.weight", T)
        for ours, theirs in names.items()
    )
    return *rows, Row("blocks/experts/router/kernel", f"{block}.gate.weight", T), *mlps


MIXTRAL_ROWS = _with_experts(
    "model.layers.{l}.block_sparse_moe", "experts", gate="w1", up="w3", down="w2"
)
MOE_ROWS = _with_experts(
    "model.layers.{l}.mlp", "experts", gate="gate_proj", up="up_proj", down="down_proj"
)


def _read_qwen_moe(theirs: dict[str, Any]) -> dict[str, Any]:
    """As of Qwen; the number of experts has two names, and a dense layer's width has no use."""
    theirs.pop("intermediate_size", None)
    if (number := theirs.pop("num_local_experts", None)) is not None:
        theirs.setdefault("num_experts", number)
    return _read_qwen(theirs)


# Biases everywhere, sinks, and all experts of a layer in one tensor, gates and ups by turns.
_OF_OSS = "model.layers.{l}.mlp"
GPT_OSS_ROWS = (
    *(row for row in LLAMA_ROWS if not re.match("blocks/(mlp|attn/(norm|out))", row.ours)),
    *dense("blocks/attn/out", "model.layers.{l}.self_attn.o_proj"),
    Row("blocks/attn/sinks", "model.layers.{l}.self_attn.sinks"),
    Row("blocks/experts/router/kernel", f"{_OF_OSS}.router.weight", T),
    Row("blocks/experts/router/shift", f"{_OF_OSS}.router.bias"),
    *(
        Row(f"blocks/experts/{ours}/{leaf}", f"{_OF_OSS}.experts.{theirs}", part=part, strided=many)
        for leaf, end in (("kernel", ""), ("bias", "_bias"))
        for ours, theirs, part, many in (
            ("gate", f"gate_up_proj{end}", (0, 2), True),
            ("up", f"gate_up_proj{end}", (1, 2), True),
            ("down", f"down_proj{end}", (0, 1), False),
        )
    ),
)

# Latent attention, a router's bias and shared experts; the first layers have Llama's MLP.
DEEPSEEK_V3_ROWS = (
    *(row for row in MOE_ROWS if not re.match("blocks/attn/(q|k|v|norm)", row.ours)),
    Row("blocks/experts/router/bias", "model.layers.{l}.mlp.gate.e_score_correction_bias"),
    Row("blocks/attn/q_down/kernel", "model.layers.{l}.self_attn.q_a_proj.weight", T),
    Row("blocks/attn/norm_q/scale", "model.layers.{l}.self_attn.q_a_layernorm.weight"),
    Row("blocks/attn/q/kernel", "model.layers.{l}.self_attn.q_b_proj.weight", T),
    Row("blocks/attn/kv_down/kernel", "model.layers.{l}.self_attn.kv_a_proj_with_mqa.weight", T),
    Row("blocks/attn/norm_kv/scale", "model.layers.{l}.self_attn.kv_a_layernorm.weight"),
    Row("blocks/attn/kv/kernel", "model.layers.{l}.self_attn.kv_b_proj.weight", T),
    Row("blocks/mlp/gate/kernel", "model.layers.{l}.mlp.shared_experts.gate_proj.weight", T),
    Row("blocks/mlp/up/kernel", "model.layers.{l}.mlp.shared_experts.up_proj.weight", T),
    Row("blocks/mlp/down/kernel", "model.layers.{l}.mlp.shared_experts.down_proj.weight", T),
)


# Layers of the gated delta rule, full attention with a gate, and a shared expert with one.
_OF_DELTA = "model.layers.{l}.linear_attn"
QWEN3_NEXT_ROWS = (
    *MOE_ROWS,
    *(
        Row(f"blocks/mlp/{name}/kernel", f"{_OF_OSS}.shared_expert.{name}_proj.weight", T)
        for name in ("gate", "up", "down")
    ),
    Row("blocks/shared_gate/kernel", f"{_OF_OSS}.shared_expert_gate.weight", T),
)
DELTA_ROWS = (
    Row("blocks/attn/qkvz/kernel", f"{_OF_DELTA}.in_proj_qkvz.weight", T),
    Row("blocks/attn/ba/kernel", f"{_OF_DELTA}.in_proj_ba.weight", T),
    Row("blocks/attn/conv", f"{_OF_DELTA}.conv1d.weight", (2, 1, 0)),
    Row("blocks/attn/shift", f"{_OF_DELTA}.dt_bias"),
    Row("blocks/attn/log_rate", f"{_OF_DELTA}.A_log"),
    Row("blocks/attn/norm_out/scale", f"{_OF_DELTA}.norm.weight"),
    Row("blocks/attn/out/kernel", f"{_OF_DELTA}.out_proj.weight", T),
)


_KINDS = "full_attention", "linear_attention"


def _read_qwen3_next(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of a part of a head, and the layers of either kind."""
    theirs.pop("intermediate_size", None)  # of dense layers, which it lacks
    layers = positions.positive(theirs, "num_hidden_layers")
    every = positions.positive(theirs, "full_attention_interval", 4)
    usual = [_KINDS[(l + 1) % every != 0] for l in range(layers)]
    kinds = theirs.pop("layer_types", None) or usual
    if len(kinds) != layers or not {*kinds} <= {*_KINDS}:
        raise ValueError(f"layer_types={kinds!r} must say {' or '.join(_KINDS)} {layers} times")
    delta = tuple(map(_KINDS.index, kinds))
    repeats = (n for n in range(1, layers + 1) if delta == delta[:n] * (layers // n))
    part = positions.take_rotated(theirs, 0.25)
    size = positions.positive(theirs | {"head_dim": theirs.get("head_dim", 256)}, "head_dim")
    wide = positions.positive(theirs, "shared_expert_intermediate_size", 512)
    mlp = theirs.get("moe_intermediate_size", 512)
    if wide % mlp:
        raise ValueError(
            f"shared_expert_intermediate_size={wide} must be a multiple of moe_intermediate_size="
            f"{mlp}"
        )
    return positions.read_rope(theirs, 10000.0) | {
        "delta_pattern": tuple(map(bool, delta[: next(repeats)])),
        "rope_dim": int(size * part) if part < 1 else None,
        "shared_experts": wide // mlp,
    }


def _write_qwen3_next(config: DecoderConfig) -> dict[str, Any]:
    if config.shared_experts is None:
        raise ValueError("qwen3_next has shared experts, and the model lacks them")
    rope = {"rope_type": "default"} | (positions.write_rope(config)["rope_scaling"] or {})
    rope |= {"partial_rotary_factor": positions.rotated_part(config)}
    return {
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "layer_types": [_KINDS[delta] for delta in deltas_of(config)],
        "shared_expert_intermediate_size": config.shared_experts * config.mlp_width,
    }


def _read_gpt_oss(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, scaled where nothing is said of them, and a window of every other layer."""
    for ours in ("experts_per_token", "initial_context_length"):  # of the first files, said twice
        theirs.pop(ours, None)
    if not theirs.get("rope_scaling") and theirs.get("rope_parameters") is None:
        theirs["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        }
    slides = [l % 2 == 0 for l in range(positions.positive(theirs, "num_hidden_layers"))]
    found = positions.read_kinds(theirs, slides, theirs.pop("sliding_window", 128))
    return found | positions.read_rope(theirs, 150000.0)


def _write_gpt_oss(config: DecoderConfig) -> dict[str, Any]:
    rope = positions.write_rope(config)
    if isinstance(scaling := config.rope_scaling, YarnScaling):  # theirs say these in any case
        rope["rope_scaling"] |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow}
    elif scaling is None:  # null would mean their usual scaling
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    return positions.write_kinds(config) | rope


def _read_deepseek(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, the sizes of a head's parts, and layers without experts."""
    for name in ("head_dim", "qk_head_dim"):  # which transformers writes, and does not read
        theirs.pop(name, None)
    free, rotated = (
        positions.positive(theirs, f"qk_{name}_head_dim", size)
        for name, size in (("nope", 128), ("rope", 64))
    )
    first, width = theirs.pop("first_k_dense_replace", 3), theirs.pop("intermediate_size", 18432)
    dense = {"dense_layers": first or None, "dense_width": width if first else None}
    return (
        positions.read_latent_rope(theirs)
        | dense
        | {
            "head_dim": free + rotated,
            "rope_dim": rotated,
        }
    )


def _write_deepseek(config: DecoderConfig) -> dict[str, Any]:
    if config.kv_rank is None or config.q_rank is None or config.shared_experts is None:
        raise ValueError(
            "deepseek_v3 has latent vectors of queries and of keys, and shared experts: the model "
            "lacks one of them"
        )
    return positions.write_rope(config) | {
        "qk_nope_head_dim": config.block.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "first_k_dense_replace": config.dense_layers or 0,
        "intermediate_size": config.dense_width or config.mlp_width,
    }


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
        "activation_function": Field("mlp", "gelu_new", GELUS),
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
    fields=SHAPE
    | {
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("seq_len"),
        "num_key_value_heads": Field("kv_heads", None),
        "head_dim": Field("head_dim", None),
        "hidden_act": Field("mlp", "silu", {"silu": "swiglu"}),
        "rms_norm_eps": Field("norm_eps", 1e-6),
        "attention_dropout": Field("attention_dropout", 0.0),
        "tie_word_embeddings": Field("tied", False),
    },
    ours={"positions": "rope", "norm": "rmsnorm", "bias": False},
    fixed={"attention_bias": False, "mlp_bias": False, "is_encoder_decoder": False},
    read=lambda theirs: positions.read_rope(theirs, 10000.0),
    write=lambda config: _check_width("llama", config) | positions.write_rope(config),
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
    read=lambda theirs: positions.read_rope(theirs, REQUIRED),
    write=positions.write_rope,
)

PHI3 = dataclasses.replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    rows=PHI3_ROWS,
    fields=LLAMA.fields
    | {"sliding_window": Field("window", None), "rms_norm_eps": Field("norm_eps", 1e-5)},
    fixed=LLAMA.fixed | {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    read=_read_phi3,
    write=_write_phi3,
    sized=_phi3_parts,
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
    fields=QWEN2.fields | {"head_dim": Field("head_dim", 128)},
    ours=LLAMA.ours | {"qk_norm": True},
    fixed={"attention_bias": False, "is_encoder_decoder": False},
)

MIXTRAL = dataclasses.replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    rows=MIXTRAL_ROWS,
    fields=MISTRAL.fields
    | {
        "num_local_experts": Field("experts", 8),
        "num_experts_per_tok": Field("experts_per_token", 2),
        "rms_norm_eps": Field("norm_eps", 1e-5),
    },
    ours=LLAMA.ours | {"routing": "softmax_normalised"},
    read=lambda theirs: positions.read_rope(theirs, 1e6),
)

_ROUTED = {
    "num_experts_per_tok": Field("experts_per_token", 8),
    "norm_topk_prob": Field("routing", False, {False: "softmax", True: "softmax_normalised"}),
}
QWEN3_MOE = dataclasses.replace(
    QWEN3,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rows=MOE_ROWS,
    fields={name: f for name, f in QWEN2.fields.items() if name != "intermediate_size"}
    | {"moe_intermediate_size": Field("mlp_width", 768), "num_experts": Field("experts", 128)}
    | _ROUTED,
    fixed=QWEN3.fixed | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    read=_read_qwen_moe,
)

QWEN3_NEXT = dataclasses.replace(
    QWEN3_MOE,
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rows=QWEN3_NEXT_ROWS,
    delta_rows=DELTA_ROWS,
    fields=QWEN3_MOE.fields
    | {
        "num_key_value_heads": Field("kv_heads", 2),
        "head_dim": Field("head_dim", 256),
        "moe_intermediate_size": Field("mlp_width", 512),
        "num_experts": Field("experts", 512),
        "num_experts_per_tok": Field("experts_per_token", 10),
        "norm_topk_prob": Field("routing", True, _ROUTED["norm_topk_prob"].values),
        "linear_conv_kernel_dim": Field("delta_taps", 4),
        "linear_key_head_dim": Field("delta_key_dim", 128),
        "linear_value_head_dim": Field("delta_value_dim", 128),
        "linear_num_key_heads": Field("delta_key_heads", 16),
        "linear_num_value_heads": Field("delta_heads", 32),
    },
    ours=QWEN3.ours | {"norm_offset": True, "out_gate": True, "shared_gate": True},
    read=_read_qwen3_next,
    write=_write_qwen3_next,
    # The module that predicts more tokens, which no model here has.
    buffers=r"rotary_emb\.inv_freq$|^mtp\.",
)

OLMOE = dataclasses.replace(
    LLAMA,
    name="olmoe",
    architecture="OlmoeForCausalLM",
    rows=MOE_ROWS,
    fields={name: f for name, f in LLAMA.fields.items() if name != "head_dim"}
    | {"num_experts": Field("experts", 64), "rms_norm_eps": Field("norm_eps", 1e-5)}
    | _ROUTED,
    ours=LLAMA.ours | {"qk_norm": "whole"},
    fixed={"attention_bias": False, "clip_qkv": None, "is_encoder_decoder": False},
    write=lambda config: _check_width("olmoe", config) | positions.write_rope(config),
)

GPT_OSS = dataclasses.replace(
    LLAMA,
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    rows=GPT_OSS_ROWS,
    fields=LLAMA.fields
    | {
        "num_key_value_heads": Field("kv_heads", 8),
        "head_dim": Field("head_dim", 64),
        "hidden_act": Field("mlp", "silu", {"silu": "swiglu_clamped"}),
        "rms_norm_eps": Field("norm_eps", 1e-5),
        "num_local_experts": Field("experts", 128),
        "num_experts_per_tok": Field("experts_per_token", 4),
    },
    ours=LLAMA.ours | {"bias": True, "sinks": True, "routing": "softmax_normalised"},
    fixed={
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "is_encoder_decoder": False,
    },
    read=_read_gpt_oss,
    write=_write_gpt_oss,
)

DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rows=DEEPSEEK_V3_ROWS,
    dense_rows=tuple(row for row in LLAMA_ROWS if row.ours.startswith("blocks/mlp/")),
    fields={
        name: f for name, f in LLAMA.fields.items() if name not in ("intermediate_size", "head_dim")
    }
    | {
        "num_key_value_heads": Field("kv_heads", 128),
        "moe_intermediate_size": Field("mlp_width", 2048),
        "n_routed_experts": Field("experts", 256),
        "n_shared_experts": Field("shared_experts", 1),
        "num_experts_per_tok": Field("experts_per_token", 8),
        "routed_scaling_factor": Field("routed_scale", 2.5),
        "n_group": Field("groups", 8),
        "topk_group": Field("groups_per_token", 4),
        "q_lora_rank": Field("q_rank", 1536),
        "kv_lora_rank": Field("kv_rank", 512),
        "v_head_dim": Field("v_dim", 128),
        "rope_interleave": Field("rope_pairs", True, {True: "adjacent", False: "halves"}),
    },
    ours=LLAMA.ours | {"routing": "sigmoid"},
    fixed={
        "attention_bias": False,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "is_encoder_decoder": False,
    },
    read=_read_deepseek,
    write=_write_deepseek,
    # The module that predicts a second token, which no model here has.
    buffers=r"rotary_emb\.inv_freq$|^model\.layers\.61\.",
)

_GEMMA_SHAPE = {name: f for name, f in LLAMA.fields.items() if name != "hidden_act"}

GEMMA2 = dataclasses.replace(
    LLAMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    rows=GEMMA_ROWS,
    fields=_GEMMA_SHAPE
    | {
        "num_key_value_heads": Field("kv_heads", 4),
        "head_dim": Field("head_dim", 256),
        "hidden_activation": Field(
            "mlp", "gelu_pytorch_tanh", dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "geglu")
        ),
        "query_pre_attn_scalar": Field("query_pre_attn_scalar", 256),
        "attn_logit_softcapping": Field("attention_softcap", 50.0),
        "final_logit_softcapping": Field("logit_softcap", 30.0),
        "tie_word_embeddings": Field("tied", True),
    },
    ours=LLAMA.ours | {"norm_offset": True, "norm_position": "sandwich", "embed_scale": True},
    fixed={"attention_bias": False, "is_encoder_decoder": False},
    read=_read_gemma2,
    write=lambda config: (
        _check_width("gemma2", config)
        | positions.write_kinds(config)
        | positions.write_rope(config)
    ),
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields={name: f for name, f in GEMMA2.fields.items() if f.ours != "attention_softcap"}
    | {"final_logit_softcapping": Field("logit_softcap", None)},
    ours=GEMMA2.ours | {"qk_norm": True},
    # Which transformers does not read there.
    fixed=GEMMA2.fixed | {"attn_logit_softcapping": None},
    read=_read_gemma3,
    write=lambda config: (
        _check_width("gemma3_text", config)
        | positions.write_kinds(config)
        | positions.write_two_ropes(config)
    ),
)


def _with_scores(family: Family) -> Family:
    """Returns the family with its reward models: sequence classifiers of one label."""
    kind = re.sub("(ForCausalLM|LMHeadModel)$", "", family.architecture)
    kind += "Text" if family.name == "gemma3_text" else ""
    scoring = f"{kind}ForSequenceClassification"

    def read(theirs: dict[str, Any]) -> dict[str, Any]:
        head = {"head": "tokens"}
        if (theirs.get("architectures") or [""])[0] == scoring:
            labels, number = theirs.get("id2label"), theirs.pop("num_labels", None)
            if (number := len(labels) if labels else number or 2) != 1:
                raise ValueError(f"{scoring} has {number} labels: only one, a score, is known here")
            head = {"head": "score"}
        return family.read(theirs) | head

    def write(config: DecoderConfig) -> dict[str, Any]:
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        scores = {"architectures": [scoring], **labels} if config.head == "score" else {}
        return family.write(config) | scores

    rows = (*family.rows, Row("head/score/kernel", "score.weight", T))
    own = {"rows": rows, "others": (scoring,), "heads": r"^(lm_head|score)\."}
    return dataclasses.replace(family, read=read, write=write, **own)


DENSE = (GPT2, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, GEMMA2, GEMMA3)
MIXTURES = (MIXTRAL, OLMOE, QWEN3_MOE, QWEN3_NEXT, GPT_OSS, DEEPSEEK_V3)
DECODERS = tuple(map(_with_scores, (*DENSE, *MIXTURES)))
