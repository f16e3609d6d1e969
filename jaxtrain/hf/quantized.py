"""Tensors that bitsandbytes has quantized to NF4, read as the numbers that they stand for."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_STATE = ".quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantized:
    """A float32 tensor, of parts by the end of their names; it is made when it is read."""

    parts: Mapping[str, Any]
    state: Mapping[str, Any]
    dtype = np.dtype(np.float32)
    shape = property(lambda self: tuple(self.state["shape"]))

    def __getitem__(self, index: Any) -> np.ndarray:
        pairs, state = _bytes(self.parts[""]), self.state
        if "nested_offset" in state:
            inner = self.parts[".nested_quant_map"][...][_bytes(self.parts[".absmax"])]
            outer = np.repeat(self.parts[".nested_absmax"][...], state["nested_blocksize"])
            scale = inner * outer[: inner.size] + np.float32(state["nested_offset"])
        else:
            scale = self.parts[".absmax"][...]
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(self.shape)
        scale = np.repeat(scale, state["blocksize"])[: codes.size].reshape(self.shape)
        return (self.parts[".quant_map"][...][codes] * scale)[index]


def dequantized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's tensors, those of NF4 as one each."""
    found = dict(tensors)
    for name in (name.removesuffix(_STATE) for name in tensors if name.endswith(_STATE)):
        parts = {
            x.removeprefix(name): found.pop(x) for x in tensors if f"{x}.".startswith(f"{name}.")
        }
        found[name] = Dequantized(parts, json.loads(_bytes(parts[_STATE]).tobytes()))
    return found


def _bytes(tensor: Any) -> np.ndarray:
    size = 1 if tensor.code == "U8" else tensor.dtype.itemsize  # of what the bytes are stored as
    return np.memmap(tensor.path, np.uint8, "r", tensor.offset, int(np.prod(tensor.shape)) * size)
