"""Small models of transformers, randomly initialised and saved, that ours are compared with."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest

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

# By name: the model type and its fields. The first five are in the everyday tests.
MODELS = {
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", SIZES | dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "mistral": ("mistral", SIZES | dict(sliding_window=5)),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", SIZES | dict(head_dim=12)),
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
    library = transformers()
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(kind, **fields))
    with torch.no_grad():
        for path, x in model.named_parameters():
            x.copy_(0.3 * torch.randn(x.shape) + (1.0 if x.ndim == 1 and "bias" not in path else 0))
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def logits(folder, tokens=TOKENS):
    """What transformers computes of a folder, in float32."""
    import torch

    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def tensors(folder):
    """All tensors of a folder as the library safetensors reads them: dtype, shape and bits."""
    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                x = file.get_tensor(name)
                bits = x.contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = (str(x.dtype), tuple(x.shape), bits)
    return found
