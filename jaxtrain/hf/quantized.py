"""Weights of 1 to 8 bits in Hugging Face folders: read as the numbers that they stand for, and
written.

NF4 of bitsandbytes, GPTQ, AWQ, pack-quantized and int-quantized of compressed-tensors, fp8 in
blocks and MXFP4 are read; compressed-tensors (int4, int8) and NF4 are written.

Shapes: D inputs, F outputs, G groups of inputs that share a scale. A dense layer of PyTorch is
[F, D].
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.hf.block_floats import Fp8Blocks, Mxfp4Blocks
from jaxtrain.ops.packed import NF4, Kind, Packed

_STATE = ".quant_state.bitsandbytes__nf4"
# The inputs that may share a scale in bitsandbytes.
NF4_GROUPS = tuple(2**n for n in range(5, 13))
# The places in which AWQ's kernel wants the columns of a word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,), "compressed-tensors": range(1, 9)}
# The end of the name of a tensor that each quantized module has, and of all that it has.
_OLD = ".qweight", r"\.(qweight|qzeros|scales|g_idx)"
_NAMES = {
    "bitsandbytes": (f".weight{_STATE}", r"\.weight(\..+)?"),
    "gptq": _OLD,
    "awq": _OLD,
    "compressed-tensors": (".weight_scale", r"\.weight(_\w+)?"),
    "fp8": (".weight_scale_inv", r"\.weight(_scale_inv)?"),
    "mxfp4": ("_scales", r"_(blocks|scales)"),
}


@dataclasses.dataclass(frozen=True)
class Format:
    """How a folder's weights are quantized, by its config.json.

    Args:
      method: bitsandbytes, gptq, awq, compressed-tensors, fp8 or mxfp4.
      bits: of an integer code.
      group: inputs that share a scale; None means all, or what the tensors say.
      first: GPTQ's first version, which stores a zero point as the number below it.
      block: outputs and inputs of fp8 that share a scale.
    """

    method: str
    bits: int = 4
    group: int | None = None
    first: bool = False
    block: tuple[int, int] = (128, 128)


def read_format(theirs: Mapping[str, Any]) -> Format | None:
    """Returns what a ``quantization_config`` says, and None for what is empty. Raises ValueError
    for formats that are not read."""

    def known(name: str, value: Any, *values: Any) -> Any:
        if value not in values:
            raise ValueError(
                f"quantization_config has {name}={value!r}, which is not read: only "
                f"{', '.join(map(repr, values))}; export the model in one of these or without codes"
            )
        return value

    if not theirs:
        return None
    _check_objects(quantization_config=theirs)
    old = "bitsandbytes" if "bnb_4bit_quant_type" in theirs else None
    method = known("quant_method", theirs.get("quant_method", old), *_NAMES)
    if method == "bitsandbytes":
        known("bnb_4bit_quant_type", theirs.get("bnb_4bit_quant_type"), "nf4")
        return Format(method)
    if method == "mxfp4":
        return Format(method)
    if method == "fp8":
        known("fmt", theirs.get("fmt", "e4m3"), "e4m3")
        block = theirs.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
            raise ValueError(
                f"quantization_config has weight_block_size={block!r}, which is not read: only two "
                "sizes; export the model with scales of blocks or without codes"
            )
        return Format(method, block=tuple(block))
    if method == "compressed-tensors":
        known("format", theirs.get("format"), "pack-quantized", "int-quantized", "naive-quantized")
        in_words = theirs["format"] == "pack-quantized" and not _in_a_stream(theirs.get("version"))
        writer, groups = theirs.get("version"), theirs.get("config_groups") or {}
        _check_objects(config_groups=groups)
        schemes = list(groups.values())
        known("the number of config_groups", len(schemes), 1)
        _check_objects(config_group=schemes[0])
        known("input_activations", schemes[0].get("input_activations"), None)
        theirs = schemes[0].get("weights") or {}
        _check_objects(weights=theirs)
        known("type", theirs.get("type", "int"), "int")
    if method == "awq":
        known("version", str(theirs.get("version", "gemm")).lower(), "gemm")
    version = theirs.get("checkpoint_format") or "gptq"
    first = method == "gptq" and known("checkpoint_format", version, "gptq", "gptq_v2") == "gptq"
    name = "num_bits" if method == "compressed-tensors" else "bits"
    bits = known(name, theirs.get(name), *_BITS[method])
    if method == "compressed-tensors" and in_words and 32 % bits:
        raise ValueError(
            f"quantization_config has version={writer!r} and {bits} bits: before 0.18 "
            "compressed-tensors packed them in another way, which is not read; save the model "
            "again with a newer version"
        )
    group = theirs.get("group_size") or 0
    if type(group) is not int:
        raise ValueError(f"quantization_config has group_size={group!r}: it must be a whole number")
    return Format(method, bits, max(group, 0) or None, first)


def _check_objects(**fields: Any) -> None:
    for name, value in fields.items():
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}, which is no JSON object: correct config.json")


def _in_a_stream(version: Any) -> bool:
    """Returns True for versions of compressed-tensors that pack codes across words."""
    numbers = re.match(r"(\d+)\.(\d+)", str(version))
    return numbers is not None and tuple(map(int, numbers.groups())) >= (0, 18)


def nf4_group(tensors: Mapping[str, Any]) -> int | None:
    """Returns how many inputs share a scale in the tensors of a folder of bitsandbytes."""
    states = (x for name, x in tensors.items() if name.endswith(_STATE))
    return next((json.loads(_bytes(x).tobytes())["blocksize"] for x in states), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantized:
    """A float32 tensor, of parts by the end of their names; it is made when it is read.

    Args:
      parts: tensors of the file.
      format: how they are to be read.
      conv1d: whether it is [D, F], as a Conv1D of transformers has it.
    """

    parts: Mapping[str, Any]
    format: Format
    conv1d: bool = False
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        method, parts = self.format.method, self.parts
        if method == "bitsandbytes":
            shape = self._state["shape"]
        elif ".weight_shape" in parts:
            shape = parts[".weight_shape"].stored[...].tolist()
        elif method == "compressed-tensors":
            shape = parts[".weight"].shape
        else:  # [G, F], and a word of several codes along one of two axes
            *_, F = parts[".scales"].shape
            rows = parts[".qweight"].shape[0]
            shape = F, rows * 32 // self.format.bits if method == "gptq" else rows
        return tuple(shape[::-1] if self.conv1d else shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        if self.format.method == "bitsandbytes":
            whole_FD = self._nf4()
        else:
            scale_FG, zero_FG, group_D = self._grid()
            codes_FD = self._codes().astype(np.int16) - zero_FG[:, group_D]
            whole_FD = codes_FD.astype(np.float32) * scale_FG[:, group_D]
        return (whole_FD.T if self.conv1d else whole_FD)[index]

    def scale(self, kind: Kind) -> np.ndarray | None:
        """Returns the scales, float32 [F, G] (of a Conv1D [G, F]), of what ``kind`` has the same
        codes and scales for: integers of as many bits about 0, in groups of adjoining inputs."""
        if kind != f"int{self.format.bits}" or self.format.method == "bitsandbytes":
            return None
        scale_FG, zero_FG, group_D = self._grid()
        adjoining = np.arange(group_D.size) * scale_FG.shape[1] // group_D.size
        if np.any(zero_FG) or not np.array_equal(group_D, adjoining):
            return None
        return scale_FG.T if self.conv1d else scale_FG

    def _grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scales and zeros, about 0, [F, G], and the group of each input."""
        method, parts = self.format.method, self.parts
        old, (F, D) = method != "compressed-tensors", self.shape[:: -1 if self.conv1d else 1]
        ends = ("_scale", "_zero_point", "_g_idx")
        names = (".scales", ".qzeros", ".g_idx") if old else [f".weight{end}" for end in ends]
        scale, zero, group_D = (parts[x].stored if x in parts else None for x in names)
        scale_FG = np.float32(scale.T if old else scale.reshape(-1, scale.shape[-1]))
        if zero is None:
            zero = np.int16(0)
        elif zero.dtype == np.int32:
            zero_GF = _unpacked(zero if old else zero.T, self.format.bits)
            zero_GF = _ordered(zero_GF) if method == "awq" else zero_GF
            # A stored 15 of the first version means 16.
            zero = zero_GF.T[:F] + self.format.first - 2 ** (self.format.bits - 1)
        if group_D is None:
            group_D = np.arange(D) // (self.format.group or -(-D // scale_FG.shape[1]))
        return *(np.broadcast_to(x, (F, scale_FG.shape[1])) for x in (scale_FG, zero)), group_D

    def _codes(self) -> np.ndarray:
        """Codes about 0, [F, D]."""
        bits, parts = self.format.bits, {name: x.stored for name, x in self.parts.items()}
        if ".weight" in parts:
            return parts[".weight"]
        if ".weight_packed" in parts:
            codes = _unpacked(parts[".weight_packed"], bits)[:, : parts[".weight_shape"][1]]
        elif self.format.method == "awq":
            codes = _ordered(_unpacked(parts[".qweight"], bits)).T
        else:
            codes = _unpacked(parts[".qweight"].T, bits)
        return codes - 2 ** (bits - 1)

    @property
    def _state(self) -> Mapping[str, Any]:
        return json.loads(_bytes(self.parts[f".weight{_STATE}"]).tobytes())

    def _nf4(self) -> np.ndarray:
        parts = {name.removeprefix(".weight"): part for name, part in self.parts.items()}
        pairs, state = _bytes(parts[""]), self._state
        if "nested_offset" in state:
            inner = parts[".nested_quant_map"][...][_bytes(parts[".absmax"])]
            outer = np.repeat(parts[".nested_absmax"][...], state["nested_blocksize"])
            scale = inner * outer[: inner.size] + np.float32(state["nested_offset"])
        else:
            scale = parts[".absmax"][...]
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(state["shape"])
        scale = np.repeat(scale, state["blocksize"])[: codes.size].reshape(state["shape"])
        return parts[".quant_map"][...][codes] * scale


def dequantized(
    tensors: Mapping[str, Any], format: Format | None, *, conv1d: bool = False
) -> dict[str, Any]:
    """Returns a file's tensors, of those that are quantized one for each weight.

    Args:
      tensors: of a file.
      format: of the quantized ones; None means that there are none.
      conv1d: whether the model's dense layers are Conv1D of transformers.
    """
    found = dict(tensors)
    if format is None:
        return found
    end, pattern = _NAMES[format.method]
    modules = {name.removesuffix(end): {} for name in tensors if name.endswith(end)}
    for name in tensors:
        part = re.fullmatch(rf"(.+?)({pattern})", name)
        if part is not None and part[1] in modules:
            modules[part[1]][part[2]] = found.pop(name)
    for module, parts in modules.items():
        if format.method == "mxfp4":
            found[module] = Mxfp4Blocks(*_both(module, parts, "_blocks", "_scales"))
        elif format.method == "fp8":
            both = _both(module, parts, ".weight", ".weight_scale_inv")
            found[f"{module}.weight"] = Fp8Blocks(*both, format.block)
        else:
            found[f"{module}.weight"] = Dequantized(parts, format, conv1d)
    return found


def _both(module: str, parts: Mapping[str, Any], *ends: str) -> list[Any]:
    for end in ends:
        if end not in parts:
            raise ValueError(f"there is no {module + end!r} beside {module + min(parts)!r}")
    return [parts[end] for end in ends]


def encoded(kernel: Packed, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a quantized weight by the ends of their names, after the module's.

    Args:
      kernel: [D, F], of NumPy arrays: int4 and int8 as compressed-tensors' pack-quantized, nf4 as
        bitsandbytes.
      dtype: of scales in compressed-tensors, which has to hold them.

    Raises:
      ValueError: it does not hold them, or bitsandbytes has no such groups.
    """
    D, F = kernel.shape
    scale_FG = np.ascontiguousarray(kernel.scale.view(np.float32).T)
    codes_DF = kernel.codes
    if kernel.kind != "int8":
        codes_DF = np.stack([codes_DF >> 4, codes_DF & 15], axis=1).reshape(D, F)
    codes_FD = np.ascontiguousarray(codes_DF.T)
    if kernel.kind == "nf4":
        group = D // scale_FG.shape[1]
        if group not in NF4_GROUPS:
            raise ValueError(
                f"nf4 in groups of {group} inputs is not read by bitsandbytes: pack it with a "
                f"`group` of {', '.join(map(str, NF4_GROUPS))}"
            )
        state = {"quant_type": "nf4", "blocksize": group, "dtype": "float32"}
        yield ".weight", (codes_FD[:, ::2] << 4 | codes_FD[:, 1::2]).reshape(-1, 1)
        yield ".weight.absmax", scale_FG.reshape(-1)
        yield ".weight.quant_map", NF4
        text = json.dumps(state | {"shape": [F, D]}).encode()
        yield f".weight{_STATE}", np.frombuffer(text, np.uint8)
        return
    if kernel.kind == "int8":
        codes_FD = (codes_FD.astype(np.int16) + 128).astype(np.uint8)
    with np.errstate(over="ignore", under="ignore"):
        rounded_FG = scale_FG.astype(dtype)
    if np.any(rounded_FG.astype(np.float32) != scale_FG):
        raise ValueError(f"{dtype} does not hold its scales: export it as bfloat16 or float32")
    yield ".weight_packed", _words(codes_FD, int(kernel.kind[3:]))
    yield ".weight_scale", rounded_FG
    yield ".weight_shape", np.array([F, D])


def config_of(kind: Kind, group: int | None, skipped: list[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a folder of weights that :func:`encoded` has made.

    Args:
      kind: of all kernels.
      group: inputs that share a scale; None means all.
      skipped: modules that are not quantized.
    """
    if kind == "nf4":
        how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        how |= {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8"}
        return how | {"bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": skipped}
    weights = {"num_bits": int(kind[3:]), "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights}
    scheme |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": skipped,
    }


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes int16 of int32 words along the last axis, the lowest bits first, across words too."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(stream, axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits].reshape(*words.shape[:-1], -1, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0].astype(np.int16)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`_unpacked`; the last word is filled up with zeros."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[-1] % (32 // bits))))
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), -1, "little").view(np.int32)


def _ordered(codes: np.ndarray) -> np.ndarray:
    words = codes.reshape(*codes.shape[:-1], -1, 8)
    return words[..., _AWQ_ORDER].reshape(codes.shape)


def _bytes(tensor: Any) -> np.ndarray:
    size = 1 if tensor.code == "U8" else tensor.dtype.itemsize  # of what the bytes are stored as
    return np.memmap(tensor.path, np.uint8, "r", tensor.offset, int(np.prod(tensor.shape)) * size)
