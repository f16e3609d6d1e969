"""Safetensors files: tensors that are read slice by slice, and shards that are written in turn.

A file is the length of its header (8 bytes, little-endian), the header in JSON (the dtype, shape
and place of each tensor), and the tensors' bytes: https://huggingface.co/docs/safetensors. Nothing
in it is executed, and of its bytes no more is read than is asked for. bfloat16 stays bfloat16.
"""

import dataclasses
import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.data.blocks import BlockCache, key_of
from jaxtrain.host import storage
from jaxtrain.host.paths import file_system, is_file, is_remote, json_text, listed, look, read_json

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
# Of the parts of quantized weights.
PARTS = {"U8": np.dtype(np.uint8), "I8": np.dtype(np.int8)}
PARTS |= {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
PARTS |= {"F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E8M0": np.dtype(jnp.float8_e8m0fnu)}
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[^/\\\0]+\.safetensors")  # a plain name
# The header of a published model with thousands of tensors has under one megabyte.
HEADER_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file; ``tensor[slices]`` is a view of that part, mapped while it is held. Of a
    file in a bucket it is read by ranges, whole rows, which are kept on the disk within a bound."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, ...]
    code: str

    @property
    def dtype(self) -> np.dtype:
        """Its dtype. Raises ValueError where it is not one that is read here, which is no fault of
        a tensor without use."""
        if self.code not in DTYPES:
            raise ValueError(
                f"'{self.path}' has the tensor {self.name!r} in {self.code}: only "
                f"{', '.join(DTYPES)} are read here"
            )
        return DTYPES[self.code]

    @property
    def stored(self) -> np.ndarray:
        """All of it, parts of quantized weights too, mapped while it is held."""
        return self._part(PARTS.get(self.code) or self.dtype, ...)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._part(self.dtype, index)

    def _part(self, dtype: np.dtype, index: Any) -> np.ndarray:
        if not is_remote(self.path):
            there = np.memmap(self.path, dtype, "r", self.offset, self.shape or (1,))
            return there.reshape(self.shape)[index]
        # Of what lies together the least: whole rows.
        first, row = 0, math.prod(self.shape[1:]) * dtype.itemsize
        rows = self.shape[0] if self.shape else 1
        if isinstance(index, tuple) and index and isinstance(index[0], slice):
            first, stop, step = index[0].indices(rows)
            rows, index = max(0, stop - first), (slice(None, None, step), *index[1:])
        data = _read(self.path, self.offset + first * row, self.offset + (first + rows) * row)
        return np.frombuffer(data, dtype).reshape((rows, *self.shape[1:])[: len(self.shape)])[index]


def tensors_in(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    """Returns the tensors of a model's files by name: of one file, or else of an index's shards.
    ``stem`` is the name of the one file. Raises FileNotFoundError where there is no model, and
    ValueError where the weights are pickled; a file or the index is not what it should be."""
    # Where a folder has both, transformers reads the single file too.
    if is_file(folder / f"{stem}.safetensors"):
        return _tensors(folder / f"{stem}.safetensors")
    if stem == "model" and is_file(folder / INDEX):
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and _SHARD.fullmatch(file) for file in places.values()
        ):
            raise ValueError(f"'{folder / INDEX}' has no weight_map of tensors to files beside it")
        shards = sorted(set(places.values()))
        if missing := [file for file in shards if not is_file(folder / file)]:
            raise FileNotFoundError(f"there is no {missing[0]} in '{folder}', which {INDEX} names")
        files = {file: _tensors(folder / file) for file in shards}
        for name, file in places.items():
            if name not in files[file]:
                raise ValueError(f"'{folder / file}' lacks the tensor {name!r}, which {INDEX} says")
        # Names that the index leaves out are kept, so that the caller misses nothing.
        unnamed = {name: each for found in files.values() for name, each in found.items()}
        return unnamed | {name: files[file][name] for name, file in places.items()}
    pickled = next((path.name for path in sorted(listed(folder, "*.bin"))), None)
    if pickled is not None:
        raise ValueError(
            f"'{folder}' holds pickled weights ({pickled}), and reading those runs whatever code "
            "is in them: have transformers save the model again, as safetensors"
        )
    index = f" and no {INDEX}" if stem == "model" else ""
    raise FileNotFoundError(f"there is no {stem}.safetensors{index} in '{folder}'")


def write(
    folder: Path,
    kinds: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int,
    stem: str = "model",
) -> None:
    """Writes a model's tensors to one file, or to shards with an index, in a folder that exists.

    ``kinds`` has the shape and dtype of every tensor, in the order in which they come; one of them
    is held at a time. A shard has no more than ``max_shard_bytes``, unless a single tensor has.
    """
    shards, room = [{}], max_shard_bytes
    for name, (shape, dtype) in kinds.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = (shape, dtype, size)
        room -= size
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        index = {"metadata": {"total_size": sum(s for shard in shards for *_, s in shard.values())}}
        index["weight_map"] = {n: f for f, shard in zip(files, shards, strict=True) for n in shard}
        (folder / INDEX).write_text(json_text(index))
    codes = {dtype: code for code, dtype in (DTYPES | PARTS).items()}
    tensors = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (shape, dtype, size) in shard.items():
            place = [end, end := end + size]
            header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, (shape, dtype, _) in shard.items():
                given, value = next(tensors)
                assert (given, value.shape, value.dtype) == (name, shape, dtype)
                out.write(np.ascontiguousarray(value).view(np.uint8).data)


def _tensors(path: Path) -> dict[str, Tensor]:
    if not is_remote(path) and not stat.S_ISREG(os.stat(path).st_mode):  # reading may never end
        raise ValueError(f"'{path}' is a pipe or a device: give a regular file")
    _cache_of.cache_clear()  # a file may have been written again since
    size = look(path).size
    length = int.from_bytes(_read(path, 0, min(8, size)), "little")
    whole = length <= min(size - 8, HEADER_BYTES)
    text = _read(path, 8, 8 + length) if whole else b""
    try:
        header = json.loads(text, object_pairs_hook=_object)
        header.pop("__metadata__", None)
        entries = {n: (of["dtype"], of["shape"], of["data_offsets"]) for n, of in header.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is not a safetensors file, or was cut short") from error
    found = {name: _tensor(path, 8 + length, size, name, *of) for name, of in entries.items()}
    places = sorted(place for *_, place in entries.values())
    starts, ends = zip(*places, strict=True) if places else ((), ())
    if (*starts, size - 8 - length) != (0, *ends):  # as the reference library demands
        raise ValueError(f"'{path}' is damaged: tensors overlap, leave a hole or end early")
    return found


def _read(path: Path, start: int, stop: int) -> bytes:
    if not is_remote(path):
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    cache, size = _cache_of(path)
    return cache.read(path.name, start, stop, size)


@functools.cache
def _cache_of(path: Path) -> tuple[BlockCache, int]:
    """What keeps the blocks of a file in a bucket, and its size; another where the file is."""
    system, name = file_system(path)
    about = storage.retrying(lambda: system.info(name), f"'{path}'")
    return BlockCache(path.parent, key_of(path, [about])), about["size"]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _tensor(
    path: Path, data: int, size: int, name: str, code: Any, shape: Any, place: Any
) -> Tensor:
    if not isinstance(code, str) or not _sizes(shape) or not _sizes(place) or len(place) != 2:
        raise ValueError(
            f"'{path}' is damaged: dtype {code!r}, shape {shape!r} and data_offsets {place!r} of "
            f"{name!r} say no place"
        )
    start, end = place
    fits = start <= end <= size - data
    if (dtype := (DTYPES | PARTS).get(code)) is not None:
        fits &= end - start == math.prod(shape) * dtype.itemsize
    if not fits:
        raise ValueError(f"'{path}' is cut short or damaged: {name!r} does not lie within it")
    return Tensor(path, name, data + start, tuple(shape), code)


def _sizes(found: Any) -> bool:
    """Whether it is a list of sizes that some tensor may have."""
    sizes = isinstance(found, list) and len(found) <= 8
    return sizes and all(type(n) is int and 0 <= n < 1 << 48 for n in found)
