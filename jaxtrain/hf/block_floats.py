"""Weights of 8 and 4 bits whose blocks share a scale, read part by part as what they stand for:
fp8 as DeepSeek-V3's and MXFP4 as GPT-OSS's.

Shapes: D inputs, F outputs, E experts, G = D / 32 blocks of inputs.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

MX = 32  # values of a block of MXFP4, two in a byte, the earlier one in its low half
_E2M1 = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Blocks:
    """A float32 tensor [F, D], of e4m3 values times the scale of each block of it.

    Args:
      weight: the tensor of values [F, D].
      scales: the tensor of scales, one for each block; the last blocks may be smaller.
      block: outputs and inputs of a block.

    Raises:
      ValueError: there are more or fewer scales than blocks.
    """

    weight: Any
    scales: Any
    block: tuple[int, int]
    dtype = np.dtype(np.float32)

    def __post_init__(self) -> None:
        wanted = tuple(-(-size // each) for size, each in zip(self.shape, self.block, strict=True))
        if self.scales.shape != wanted:
            raise ValueError(
                f"'{self.scales.path}' has {self.scales.name!r} with the shape "
                f"{list(self.scales.shape)}, and blocks of {list(self.block)} of a weight "
                f"{list(self.shape)} have {list(wanted)} scales"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        parts = _parts(index, self.shape)
        places = (
            np.arange(size)[part] // each
            for size, part, each in zip(self.shape, parts, self.block, strict=True)
        )
        scale_FD = self.scales.stored[np.ix_(*places)].astype(np.float32)
        return self.weight.stored[parts].astype(np.float32) * scale_FD


@dataclasses.dataclass(frozen=True, eq=False)
class Mxfp4Blocks:
    """A float32 tensor [E, D, F], of e2m1 values in blocks of 32 inputs times a power of two (OCP
    Microscaling Formats 1.0).

    Args:
      codes: the tensor of values [E, F, G, 16], uint8.
      scales: the tensor of exponents [E, F, G], e8m0 as uint8.
    """

    codes: Any
    scales: Any
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        E, F, G = self.scales.shape
        return E, MX * G, F

    def __getitem__(self, index: Any) -> np.ndarray:
        experts, inputs, outputs = _parts(index, self.shape)
        low, high = inputs.start // MX, -(-inputs.stop // MX)
        here = experts, outputs, slice(low, high)
        pairs = self.codes.stored[here]
        scale_EFG = self.scales.stored[here].view(jnp.float8_e8m0fnu).astype(np.float32)
        values = _E2M1[np.stack([pairs & 15, pairs >> 4], axis=-1)]
        values = values.reshape(*scale_EFG.shape, MX) * scale_EFG[..., None]
        within = slice(inputs.start - MX * low, inputs.stop - MX * low)
        return values.reshape(*scale_EFG.shape[:2], -1)[..., within].swapaxes(1, 2)


def _parts(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """One slice for each axis, of a tuple of these or the ellipsis."""
    index = (slice(None),) * len(shape) if index is Ellipsis else index
    return tuple(slice(*x.indices(size)) for x, size in zip(index, shape, strict=True))
