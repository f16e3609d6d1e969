"""What makes a Llama of the decoder whose defaults are GPT-2's."""

LLAMA = {
    "kv_heads": 2,
    "positions": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tied": False,
}
