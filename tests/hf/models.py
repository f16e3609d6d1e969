"""Small models of transformers, randomly initialised and saved, that ours are compared with."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import hf

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e3,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

YARN = dict(rope_type="yarn", rope_theta=1e3, factor=4.0, beta_fast=4.0)
YARN |= dict(original_max_position_embeddings=32)

DYNAMIC = dict(rope_type="dynamic", rope_theta=1e3, factor=4.0)

PHI3 = SIZES | dict(pad_token_id=0)
LONG = dict(rope_type="longrope", rope_theta=1e3, original_max_position_embeddings=16)
LONG |= dict(
    short_factor=[1.0, 1.1, 1.3, 2.0, 2.5, 3.0], long_factor=[1.0, 2.0, 4.0, 5.0, 7.0, 9.0]
)

GEMMA = SIZES | dict(num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=10)
GEMMA2 = GEMMA | dict(sliding_window=5, final_logit_softcapping=3.0, attn_logit_softcapping=2.0)
ROPES = {
    "full_attention": dict(rope_type="linear", rope_theta=1e3, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=50.0),
}
GEMMA3 = GEMMA | dict(sliding_window=5, rope_parameters=ROPES, num_hidden_layers=7)

GPT_OSS = SIZES | dict(num_hidden_layers=3, head_dim=12, sliding_window=5, intermediate_size=20)
GPT_OSS |= dict(num_local_experts=5, num_experts_per_tok=3)
DEEPSEEK = SIZES | dict(num_hidden_layers=3, num_key_value_heads=4, first_k_dense_replace=1)
DEEPSEEK |= dict(q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
DEEPSEEK |= dict(v_head_dim=6, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3)
DEEPSEEK |= dict(moe_intermediate_size=20, n_group=4, topk_group=2, routed_scaling_factor=1.5)
DEEPSEEK |= dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0))

QWEN3_NEXT = SIZES | dict(num_hidden_layers=4, head_dim=16, num_experts=5, num_experts_per_tok=3)
QWEN3_NEXT |= dict(moe_intermediate_size=20, shared_expert_intermediate_size=20)
QWEN3_NEXT |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
QWEN3_NEXT |= dict(linear_key_head_dim=8, linear_value_head_dim=6)

# By name: the model type and its fields. The first six are in the everyday tests.
MODELS = {
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", SIZES | dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "mistral": ("mistral", SIZES | dict(sliding_window=5)),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", SIZES | dict(head_dim=12)),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma2": ("gemma2", GEMMA2),
    "gpt2, untied, exact gelu": (
        "gpt2",
        GPT2 | dict(n_inner=40, activation_function="gelu", tie_word_embeddings=False),
    ),
    "llama 2": ("llama", SIZES | dict(num_key_value_heads=4)),
    "mistral, no window": ("mistral", SIZES | dict(sliding_window=None, head_dim=6)),
    "qwen2, window": (
        "qwen2",
        SIZES | dict(use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "qwen2, some windows": (
        "qwen2",
        SIZES
        | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
        | dict(num_hidden_layers=3),
    ),
    "llama, linear rope": (
        "llama",
        SIZES | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e3, factor=4.0)),
    ),
    "gemma2, untied, no caps": (
        "gemma2",
        GEMMA
        | dict(sliding_window=9, tie_word_embeddings=False)
        | dict(final_logit_softcapping=None, attn_logit_softcapping=None),
    ),
    "gemma2, other windows": (
        "gemma2",
        GEMMA2 | dict(layer_types=["full_attention"] * 2 + ["sliding_attention"]),
    ),
    "gemma3, cap, two layers": (
        "gemma3_text",
        GEMMA3
        | dict(num_hidden_layers=2, tie_word_embeddings=False, num_key_value_heads=1)
        | dict(final_logit_softcapping=3.0),
    ),
    "mixtral": (
        "mixtral",
        SIZES | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=6),
    ),
    "olmoe": ("olmoe", SIZES | dict(num_experts=4, num_experts_per_tok=2)),
    "qwen3 moe": (
        "qwen3_moe",
        SIZES
        | dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20, head_dim=12)
        | dict(norm_topk_prob=True),
    ),
    "qwen3 moe, not normalised": (
        "qwen3_moe",
        SIZES | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=8),
    ),
    "gpt oss": ("gpt_oss", GPT_OSS),
    "gpt oss, other windows": (
        "gpt_oss",
        GPT_OSS
        | dict(layer_types=["full_attention"] * 2 + ["sliding_attention"])
        | dict(rope_parameters=YARN | dict(beta_slow=1.0)),
    ),
    "deepseek v3": ("deepseek_v3", DEEPSEEK),
    "deepseek v3, halves": (
        "deepseek_v3",
        DEEPSEEK
        | dict(rope_parameters=None, rope_interleave=False, first_k_dense_replace=0)
        | dict(n_group=1, topk_group=1, num_hidden_layers=2, v_head_dim=12),
    ),
    "qwen3 next": ("qwen3_next", QWEN3_NEXT),
    "qwen3 next, other layers": (
        "qwen3_next",
        QWEN3_NEXT
        | dict(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
        | dict(linear_conv_kernel_dim=3, shared_expert_intermediate_size=40),
    ),
    "qwen3, yarn": ("qwen3", SIZES | dict(head_dim=16, rope_parameters=YARN)),
    "llama, yarn, no whole pairs": (
        "llama",
        SIZES | dict(rope_parameters=YARN | dict(attention_factor=1.5, truncate=False)),
    ),
    "phi3": (
        "phi3",
        PHI3
        | dict(partial_rotary_factor=0.75, sliding_window=9, num_attention_heads=2)
        | dict(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=LONG),
    ),
    "phi3, short rows": (
        "phi3",
        PHI3
        | dict(rope_parameters=LONG | dict(original_max_position_embeddings=32))
        | dict(partial_rotary_factor=0.75, num_attention_heads=2),
    ),
    "phi3, nothing scaled": ("phi3", PHI3 | dict(num_key_value_heads=4)),
    "llama, longrope": (
        "llama",
        SIZES | dict(rope_parameters=LONG | dict(attention_factor=1.25), head_dim=12),
    ),
    "llama, dynamic": (
        "llama",
        SIZES | dict(rope_parameters=DYNAMIC, max_position_embeddings=16, head_dim=6),
    ),
    "qwen3, tied": ("qwen3", SIZES | dict(head_dim=8, tie_word_embeddings=True)),
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 24))


@functools.cache
def transformers():
    """The library, quiet; a test that needs it is left out where it is not installed."""
    pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def save(name, folder, *, dtype="float32", **options):
    """Saves a model whose every parameter is random, so that each of them counts."""
    import torch

    kind, fields = MODELS[name]
    # Gemma's norms multiply by one more than they have.
    one = lambda path, x: x.ndim == 1 and "bias" not in path and "gemma" not in kind  # noqa: E731
    if kind == "qwen3_next":  # whose gated norm alone is not
        one = lambda path, x: path.endswith("linear_attn.norm.weight")  # noqa: E731
    model = random_model("AutoModelForCausalLM", kind, fields, one)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def random_model(head, kind, fields, one):
    """A model of the library whose every parameter is random, about 1 where ``one(path, x)``."""
    import torch

    library = transformers()
    torch.manual_seed(0)
    model = getattr(library, head).from_config(library.AutoConfig.for_model(kind, **fields))
    with torch.no_grad():
        for path, x in model.named_parameters():
            x.copy_(0.3 * torch.randn(x.shape) + (1.0 if one(path, x) else 0))
        for path, x in model.named_buffers():
            if path.endswith("correction_bias"):
                x.copy_(0.1 * torch.randn(x.shape))
    return model


def logits(folder, tokens=TOKENS):
    """What transformers computes of a folder, in float32."""
    import torch

    model = opened(folder)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def gradients(folder, tokens, targets):
    """The mean loss of a folder's model, and its gradients by name."""
    import torch

    model = opened(folder)
    logits = model(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    found = {name: x.grad.numpy() for name, x in model.named_parameters()}
    # Who keeps a layer's experts in one tensor, gates and ups side by side.
    for name in [name for name in found if name.endswith("experts.gate_up_proj")]:
        block, down = name.removesuffix(".gate_up_proj"), found[name.replace("gate_up", "down")]
        gates, ups = np.split(found[name], 2, axis=1)
        for kind, experts in {"gate": gates, "up": ups, "down": down}.items():
            found |= {f"{block}.{e}.{kind}_proj.weight": x for e, x in enumerate(experts)}
    return float(loss.detach()), found


def opened(folder):
    """A folder's model; by its own code, for other attention knows no soft cap."""
    import torch

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers().AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def differing(folder, again):
    """Fields of config.json, as transformers reads it, that are others in a second folder."""
    read = transformers().AutoConfig.from_pretrained
    fields, others = (read(path).to_dict() for path in (folder, again))
    return {key for key in fields if fields[key] != others.get(key)} - {"_name_or_path"}


def check_bits(folder, tmp_path, **given):
    """A folder is loaded and saved with the same bits; returns the fields that differ, and files.

    Twice: a parameter is an array once, and read from the files the other time.
    """
    config, arrays, shards = hf.read_config(folder), tmp_path / "arrays", tmp_path / "shards"
    hf.save(arrays, config, hf.load(hf.open_weights(folder)), **given)
    hf.save(shards, config, hf.open_weights(arrays), max_shard_bytes=10_000, **given)
    for saved in (arrays, shards):
        assert tensors(saved) == tensors(folder)
        assert hf.read_config(saved) == config
    assert all(found.equal for found in hf.check(shards))
    return differing(folder, shards), list(shards.glob("*.safetensors"))


def step(module, config, params, batch, jit=jax.jit):
    """The state of a model after one step from some parameters."""
    optimizer = optax.sgd(0.1)
    init = functools.partial(module.init, config)
    state = jt.init_state(init, optimizer, jax.random.key(0), params=params)
    return jit(jt.build_train_step(module.loss_fn(config), optimizer))(state, batch)[0]


def tensors(folder):
    """All tensors of a folder as the library safetensors reads them: dtype, shape and bits."""
    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                x = file.get_tensor(name)
                bits = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (str(x.dtype), tuple(x.shape), bits)
    return found
