"""Hugging Face weights and configs, both ways: see README.md beside this file."""

from jaxtrain.hf import adapters
from jaxtrain.hf.weights import (
    check,
    family_name,
    group_of,
    load,
    open_weights,
    pixels,
    read_config,
    save,
    special_tokens,
)

__all__ = [
    "adapters",
    "check",
    "family_name",
    "group_of",
    "load",
    "open_weights",
    "pixels",
    "read_config",
    "save",
    "special_tokens",
]
