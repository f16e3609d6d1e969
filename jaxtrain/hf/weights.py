"""Hugging Face folders (config.json and safetensors) as our models, and back, bit for bit.

Reading opens files and copies nothing: parameters are :class:`~jaxtrain.hf.table.Weight`, of which
``init_state(params=)`` and :func:`load` read the slices of each device. Folders may be in a bucket.
"""

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import safetensors
from jaxtrain.hf.families import family_for, family_of
from jaxtrain.hf.family import Family, ModelConfig
from jaxtrain.hf.quantized import config_of, dequantized, encoded, nf4_group, read_format
from jaxtrain.hf.table import Row, Weight, assemble, by_tensor
from jaxtrain.host.paths import as_path, exists, is_file, json_text, listed, read_json
from jaxtrain.models.config import head_of
from jaxtrain.models.vit import ViTConfig
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import Kind, Packed, pack
from jaxtrain.optim.balance import SHARES
from jaxtrain.tree import PyTree, is_a, map_named, named_leaves

SHARD_BYTES = 5 * 10**9
# The regex by which Qwen's tokenizers split texts.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PREPROCESSOR = "preprocessor_config.json"
SPECIAL_TOKENS = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "cls", "sep", "mask"))


def read_config(folder: str | Path) -> ModelConfig:
    """Returns the model that a folder's config.json describes, as its family's config.

    The lengths of its rows are the longest that it has.

    Raises:
      FileNotFoundError, ValueError: there is none, or it is of a model that is not known here.
    """
    return read_model(folder)[1]


def family_name(folder: str | Path) -> str:
    """Returns the family of a folder's model, such as ``"llama"``."""
    return read_model(folder)[0].name


def group_of(folder: str | Path, kind: Kind) -> int | None:
    """Returns how many inputs share a scale in a folder of codes as those of ``kind``; None where
    all do, or where its codes are others."""
    folder = as_path(folder)
    format = read_format(read_json(folder / "config.json").get("quantization_config"))
    if format is None or format.method != "bitsandbytes":
        return format.group if format is not None and kind == f"int{format.bits}" else None
    return nf4_group(safetensors.tensors_in(folder)) if kind.startswith("nf4") else None


def special_tokens(folder: str | Path) -> dict[str, Any]:
    """Returns what a folder's config.json says of tokens that begin, end and pad a text."""
    theirs = read_json(as_path(folder) / "config.json")
    return {name: theirs[name] for name in SPECIAL_TOKENS if name in theirs}


def check_token_ids(fields: Mapping[str, Any], path: Any) -> None:
    """Raises ValueError where a field of special tokens has an id beyond int32, as of token ids."""
    for name in SPECIAL_TOKENS:
        ids = fields.get(name)
        for id in ids if isinstance(ids, list) else [ids]:
            if type(id) is int and not -(2**31) <= id < 2**31:
                raise ValueError(f"'{path}' has {name} {id}: no token has such an id; correct it")


def pixels(folder: str | Path) -> dict[str, Any] | None:
    """Returns the mean and deviation by channel, of pixels from 0 to 1, that a folder's
    preprocessor_config.json says its model's images are normalized with; None where it says none.

    Raises:
      ValueError: it says something else of pixels.
    """
    path = as_path(folder) / PREPROCESSOR
    theirs = read_json(path) if is_file(path) else {"do_normalize": False}
    if not theirs.get("do_normalize", True):
        return None
    found = {name: theirs.get(f"image_{name}") for name in ("mean", "std")}
    scale = theirs.get("rescale_factor", 1 / 255)
    lists = all(
        isinstance(x, list) and x and all(type(each) in (int, float) for each in x)
        for x in found.values()
    )
    if not lists or 0 in found["std"] or not theirs.get("do_rescale", True) or scale != 1 / 255:
        raise ValueError(
            f"'{path}' does not normalize pixels from 0 to 1 by an image_mean and an image_std"
        )
    return found


def preprocessor(config: ViTConfig, pixels: Mapping[str, Any] | None) -> str:
    """Returns the preprocessor_config.json of a model whose images are normalized so."""
    height, width, _ = config.image
    fields = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": pixels is not None,
    }
    return json_text(fields | {f"image_{name}": value for name, value in (pixels or {}).items()})


def open_weights(folder: str | Path, config: ModelConfig | None = None) -> dict[str, Any]:
    """Returns a folder's parameters under our paths, of which nothing has been read yet.

    Args:
      folder: with config.json and model.safetensors, or shards and their index.
      config: the folder's model, perhaps with other lengths of rows, dropout or rematerialisation,
        or with another head, of which the tree then has what the folder has: ``init_state`` makes
        the rest. None means as it is.

    Returns:
      A tree for ``init_state(params=)``, or for :func:`load`, of leaves with shape, dtype and
      slices, layers in natural order (:meth:`jaxtrain.Stack.cut` takes them).

    Raises:
      FileNotFoundError, ValueError: there is no model, or a tensor is missing, has another shape,
        or is one that the model has no place for.

    >>> import tempfile
    >>> from jaxtrain.models import decoder
    >>> config = decoder.DecoderConfig(vocab_size=5, seq_len=4, layers=1, width=8, heads=2)
    >>> params, folder = decoder.init(config, jax.random.key(0)), tempfile.mkdtemp()
    >>> save(folder, config, params)
    >>> open_weights(folder)["blocks"]["attn"]["q"]["kernel"].shape
    (1, 8, 8)
    """
    folder = as_path(folder)
    family, own = read_model(folder)
    config = config or own
    rows, shapes = family.rows_of(config)
    tensors = _named_as(family, config, folder)
    used: set[str] = set()
    sizes = named_leaves(shapes)
    most = max(sizes[path].shape[0] for path, row in rows.items() if row.stacked)
    if most > len(tensors):  # before there are as many names
        raise ValueError(f"'{folder}' has {len(tensors)} tensors for {most} layers in config.json")

    # A head that the folder lacks is initialised anew; another head of the folder is ignored, also
    # where its tensor has the name and the shape of one that is lacking.
    new_head = head_of(config) != head_of(own)
    own_rows = family.rows_of(own)[0] if new_head else {}
    others = {row.theirs for row in own_rows.values()}

    def weight(path: str, shape: jax.ShapeDtypeStruct) -> Weight | None:
        row = rows[path]
        lead, inner = shape.shape[: row.lead], shape.shape[row.lead :]
        wanted = row.their_shape(inner, config.vocab_size)
        if math.prod(lead) > len(tensors):
            raise ValueError(
                f"'{folder}' has {len(tensors)} tensors, and config.json says {math.prod(lead)} "
                f"experts in all, of which {path!r} is made"
            )
        names = row.names(*lead)
        of_head = new_head and path.startswith("head/")
        lacks = (name not in tensors or tensors[name].shape != wanted for name in names)
        is_others = path not in own_rows and row.theirs in others
        if of_head and (is_others or any(lacks)):
            return None
        for name in names:
            if name not in tensors:
                raise ValueError(f"'{folder}' lacks the tensor {name!r}, of which {path!r} is made")
            got, _ = tensors[name].shape, tensors[name].dtype  # one that is not read here raises
            if got != wanted and not (row.shorter and got[0] > wanted[0] and got[1:] == wanted[1:]):
                raise ValueError(
                    f"'{folder}' has {name!r} with the shape {list(got)}, and config.json says "
                    f"{list(wanted)} for it"
                )
        used.update(names)
        places = np.arange(1, math.prod(lead) + 1).reshape(lead)
        places = np.maximum(places - row.first, 0)
        return Weight(row, [tensors[name] for name in names], places, tuple(inner))

    found = map_named(weight, shapes)  # None is no leaf
    for copy, original in _copies(family, rows).items():
        if copy in tensors and copy not in others:
            _check_tied(folder, family, tensors, copy, original)
            used.add(copy)
    unread = f"{family.buffers}|{family.heads}" if new_head else family.buffers
    for name in tensors.keys() - used:
        if not re.search(unread, name):
            raise ValueError(
                f"'{folder}' has the tensor {name!r}, for which a {family.architecture} of its "
                "config.json has no place"
            )
    return found


def load(params: PyTree, shardings: PyTree | None = None, *, dtype: Any = None) -> PyTree:
    """Reads parameters to devices, every process the slices of its own alone.

    Args:
      shardings: one for all, or a tree of them; None means the default device.
      dtype: of the arrays; None means the file's.
    """
    named = named_leaves(params)
    places = dict.fromkeys(named, shardings)
    if shardings is not None and not isinstance(shardings, jax.sharding.Sharding):
        places = named_leaves(shardings)
    arrays = {}
    # The largest first: while one is read, it is in memory twice.
    for name in sorted(named, key=lambda name: -np.prod(named[name].shape)):
        weight, place = named[name], places[name]
        if place is None:
            arrays[name] = jnp.asarray(np.asarray(weight), dtype)
            continue
        read = functools.partial(_read_as, weight, dtype or weight.dtype)
        array = jax.make_array_from_callback(weight.shape, place, read)
        arrays[name] = jax.block_until_ready(array)  # what was read is let go of before the next
    return map_named(lambda name, _: arrays[name], params)


def save(
    folder: str | Path,
    config: ModelConfig,
    params: PyTree,
    *,
    family: str | None = None,
    dtype: Any = None,
    quantize: Kind | None = None,
    group: int | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    fields: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder that ``from_pretrained`` of transformers opens.

    One parameter at a time is on the host.

    Args:
      folder: new, or empty.
      config: the model.
      params: its parameters, layers in natural order: arrays of this process's devices or the
        host's, or :func:`open_weights`. Kernels may be packed.
      family: such as ``"mistral"``; None means the first that has such a model.
      dtype: float32, float16 or bfloat16; None means that of each parameter.
      quantize: codes of the kernels of attention and MLP: int4 and int8 as compressed-tensors, nf4
        as bitsandbytes; None means none. Those that are packed so keep their codes.
      group: inputs that share a scale, as for :func:`jaxtrain.ops.packed.pack`.
      max_shard_bytes: of one file.
      fields: more fields of config.json, such as ``eos_token_id``.
      files: more text files by name, such as a tokenizer.json.

    Raises:
      ValueError: no family has such a model; the folder is not empty; a parameter is spread over
        processes, has another shape than the config says, or a dtype that no file has, or cannot be
        quantized so; a value is infinite in the file's dtype, which leaves the folder unfinished.
    """
    folder = as_path(folder)
    chosen = family_for(config, family)
    theirs = chosen.config_json(config)
    check_new(folder)
    rows, shapes = chosen.rows_of(config)
    leaves, shapes = named_leaves(params, is_a(Packed)), named_leaves(shapes)
    leaves = {path: x for path, x in leaves.items() if not re.search(SHARES, path)}
    for path in sorted(shapes.keys() | leaves.keys()):
        got, wanted = (list(x[path].shape) if path in x else None for x in (leaves, shapes))
        if got != wanted:
            raise ValueError(f"parameter {path!r} has shape {got}, and the config says {wanted}")
        if not getattr(leaves[path], "is_fully_addressable", True):
            raise ValueError(
                f"parameter {path!r} is spread over processes: save a checkpoint, and export that "
                "in one process"
            )
    kinds = {}
    dtypes = {path: getattr(x, "dtype", np.float32) for path, x in leaves.items()}
    dtypes = {path: np.dtype(dtype or x) for path, x in dtypes.items()}
    known = safetensors.DTYPES.values()
    for path, kind in dtypes.items():
        if kind not in known:
            raise ValueError(
                f"parameter {path!r} would be {kind} in the file: give dtype as one of "
                f"{', '.join(d.name for d in known)}"
            )
    for parts in by_tensor(rows).values():  # of parts of one tensor, a dtype that has them all
        widest = np.dtype(jnp.result_type(*(dtypes[row.ours] for row in parts)))
        dtypes |= {row.ours: widest for row in parts}
    common = max(dtypes.values(), key=lambda d: sum(d == other for other in dtypes.values()))
    coded = {x for x in rows if quantize is not None and re.search(Quantize.targets[0], x)}
    code, like = functools.partial(_coded, leaves, kind=quantize, group=group, dtype=common), {}
    if coded and quantize != "nf4" and _is_conv1d(chosen):
        raise ValueError(
            f"`quantize` is {quantize!r}: {chosen.name} keeps its kernels as Conv1D, which "
            "compressed-tensors does not quantize; use nf4"
        )
    for name, of, _ in _tensors(rows, shapes):
        shape = shapes[of[0].ours].shape[of[0].lead :]
        shape, path = of[0].their_shape(shape, config.vocab_size), of[0].ours
        if path in coded and path not in like:
            like[path] = code(of, (0,), np.zeros(shape, np.float32))
        for end, part in like.get(path, {"": None}).items():
            of_part = (shape, dtypes[path]) if part is None else (part.shape, part.dtype)
            kinds[_part_name(chosen.stored(config, name), end)] = of_part
    folder.mkdir(parents=True, exist_ok=True)
    whole = dtypes | dict.fromkeys(coded, np.dtype(np.float32))

    def all_tensors() -> Iterator[tuple[str, np.ndarray]]:
        found = written(rows, leaves, config, whole)
        for (name, of, at), (_, value) in zip(_tensors(rows, shapes), found, strict=True):
            parts = code(of, at, value) if of[0].ours in coded else {"": value}
            for end, part in parts.items():
                yield _part_name(chosen.stored(config, name), end), part

    safetensors.write(folder, kinds, all_tensors(), max_shard_bytes=max_shard_bytes)
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    theirs |= {"dtype": common.name, "torch_dtype": common.name} | dict(fields or {})
    if coded:
        left = [
            x.theirs for x in rows.values() if x.ours.endswith("kernel") and x.ours not in coded
        ]
        skipped = [x.removesuffix(".weight") for x in (*left, *chosen.copies)]
        packed = [x for x in leaves.values() if isinstance(x, Packed) and x.kind == quantize]
        if packed:
            most = max(packed, key=lambda x: x.scale.shape[-2])
            group = most.shape[-2] // most.scale.shape[-2] if most.scale.shape[-2] > 1 else None
        elif quantize != "int8":
            group = group or 64
        theirs["quantization_config"] = config_of(quantize, group, skipped)
    (folder / "config.json").write_text(json_text(theirs))
    text = (files or {}).get("tokenizer.json")
    if chosen.name == "qwen2" and text is not None and not _as_qwen(json.loads(text)):
        warnings.warn(
            "AutoTokenizer of transformers opens the tokenizer of every qwen2 model as Qwen's, "
            f"which cuts texts otherwise than this tokenizer.json: open '{folder}' with "
            "PreTrainedTokenizerFast",
            stacklevel=2,
        )


def _as_qwen(tokenizer: Mapping[str, Any]) -> bool:
    """Returns True where Qwen2Tokenizer, which reads tokens and merges alone, cuts texts alike."""
    model = tokenizer.get("model", {})
    steps = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or []
    alike = model.get("type") == "BPE" and not model.get("ignore_merges")
    alike &= [step["type"] for step in steps] == ["Split", "ByteLevel"]
    alike &= (tokenizer.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
    return alike and steps[0]["pattern"] == {"Regex": QWEN_WORDS}


def _part_name(name: str, end: str) -> str:
    return name.removesuffix(".weight") + end if end else name


def _coded(
    leaves: Mapping[str, Any],
    of: Sequence[Row],
    at: tuple[int, ...],
    value: np.ndarray,
    *,
    kind: Kind,
    group: int | None,
    dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """The parts of a tensor that is quantized, with the scales of what is packed so already."""
    kernel_DF = np.ascontiguousarray(value if of[0].axes is None else value.T)
    own, scale = [leaves[row.ours] for row in of], None
    kinds = ("nf4", "nf4-double") if kind == "nf4" else (kind,)
    if all(isinstance(x, Packed) and x.kind in kinds for x in own):
        group = len(kernel_DF) // own[0].scale.shape[-2]
        if kind != "nf4":  # of nf4 the largest number of a group tells the scale
            parts = [np.asarray(x.scale[at]).view(np.float32) for x in own]
            scale = np.concatenate(parts, axis=-1)
    try:
        return dict(encoded(pack(kernel_DF, kind, group, scale=scale), dtype))
    except ValueError as error:
        raise ValueError(f"parameter {of[0].ours!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of :func:`check` for a parameter, or for several that share their tensors."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...] | None
    equal: bool


def check(folder: str | Path) -> Iterator[Checked]:
    """Reads every tensor of a folder as ours, writes it as theirs and reads it again, in memory.

    Yields:
      Per template of names, whether all bits were the same in both directions.

    Raises:
      As :func:`open_weights`, and ValueError where config.json does not come back.
    """
    folder = as_path(folder)
    family, config = read_model(folder)
    weights = named_leaves(open_weights(folder))
    tensors = _named_as(family, config, folder)
    again = family.settle(family.config(family.config_json(config)), lambda: tensors)
    if again != config:
        raise ValueError(f"the config.json of '{folder}' does not come back as it was")
    rows, _ = family.rows_of(config)
    for group in by_tensor(rows).values():
        ours = {row.ours: np.asarray(weights[row.ours]) for row in group}
        dtypes = {path: x.dtype for path, x in ours.items()}
        back = dict(written({row.ours: row for row in group}, ours, config, dtypes))
        equal = all(_same_bits(tensors[name][...], value) for name, value in back.items())
        for row in group:
            again = [back[name] for name in row.names(*ours[row.ours].shape)]
            weight = dataclasses.replace(weights[row.ours], tensors=again)
            equal &= _same_bits(np.asarray(weight), ours[row.ours])
        names = tuple(group[0].names(*ours[group[0].ours].shape))
        shapes, theirs = tuple(x.shape for x in ours.values()), tensors[names[0]]
        yield Checked(tuple(ours), names, shapes, theirs.shape, theirs.dtype, group[0].axes, equal)


def not_read(folder: str | Path) -> list[str]:
    """Returns the tensors of a folder that no parameter is made of: buffers, copies of the table of
    a tied model, and heads that the model of its config.json lacks."""
    family, config = read_model(folder)
    rows, shapes = family.rows_of(config)
    sizes = {path: leaf.shape for path, leaf in named_leaves(shapes).items()}
    names = {name for path, row in rows.items() for name in row.names(*sizes[path])}
    tensors = _named_as(family, config, as_path(folder))
    return sorted(tensors.keys() - names)


def written(
    rows: Mapping[str, Row],
    leaves: Mapping[str, Any],
    config: ModelConfig,
    dtypes: Mapping[str, np.dtype],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields their tensors of our parameters, by name; one group of parameters is on the host."""
    held: tuple[Any, dict[str, np.ndarray]] = (None, {})
    for name, group, at in _tensors(rows, leaves):
        if held[0] is not group:
            held = group, {row.ours: np.asarray(merge(leaves[row.ours])) for row in group}
        layers = [held[1][row.ours][at] for row in group]
        layers = [cast(x, dtypes[r.ours], r.ours) for x, r in zip(layers, group, strict=True)]
        yield name, assemble(group, layers, config.vocab_size)


def cast(x: np.ndarray, dtype: np.dtype, path: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        out = x.astype(dtype)
    if out.dtype != x.dtype and np.any(np.isinf(out) & np.isfinite(x)):
        raise ValueError(
            f"parameter {path!r} has values that are infinite in {dtype}: export it as bfloat16 or "
            "float32"
        )
    return out


def _tensors(
    rows: Mapping[str, Row], leaves: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[Row], tuple[int, ...]]]:
    """Their tensors in the order of files: name, the rows that are its parts, and the place in our
    leading axes."""
    for group in by_tensor(rows).values():
        sizes = leaves[group[0].ours].shape
        for name, at in zip(group[0].names(*sizes), group[0].places(*sizes), strict=True):
            yield name, group, at


def read_model(folder: str | Path) -> tuple[Family, ModelConfig]:
    """Returns the family and the config of a folder's model."""
    path = as_path(folder) / "config.json"
    if not is_file(path):
        raise FileNotFoundError(f"there is no config.json in '{folder}'")
    theirs = read_json(path)
    check_token_ids(theirs, path)
    try:
        read_format(theirs.pop("quantization_config", None))
        family = family_of(theirs)
        config = family.config(theirs)
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}': {error}") from None
    return family, family.settle(config, lambda: safetensors.tensors_in(path.parent))


def _named_as(family: Family, config: ModelConfig, folder: Path) -> dict[str, Any]:
    """A folder's tensors by the names of the table: some files leave a prefix out of all, some have
    the one table of a tied model as that of the head alone, and old ones name norms as TensorFlow
    does."""
    format = read_format(read_json(folder / "config.json").get("quantization_config"))
    tensors = safetensors.tensors_in(folder)
    tensors = dequantized(tensors, format, conv1d=_is_conv1d(family))
    tensors = {re.sub(*family.old_names, name): x for name, x in tensors.items()}
    found = {_NORMS.sub(lambda x: _NORM_NAMES[x[0]], name): x for name, x in tensors.items()}
    if not any(name.startswith(family.prefix) for name in tensors):
        bare = {row.theirs.removeprefix(family.prefix).split(".")[0] for row in family.rows}
        bare -= {row.theirs.split(".")[0] for row in family.rows}
        found = {
            family.prefix + name if name.split(".")[0] in bare else name: tensor
            for name, tensor in found.items()
        }
    for copy, original in _copies(family, family.rows_of(config)[0]).items():
        if original not in found and copy in found:
            found[original] = found.pop(copy)
    return found


def _is_conv1d(family: Family) -> bool:
    return any(row.axes is None and row.ours.endswith("attn/out/kernel") for row in family.rows)


_NORMS = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_NORM_NAMES = {"gamma": "weight", "beta": "bias"}


def check_new(folder: Path) -> None:
    """Refuses a folder whose files transformers would take for the new model's."""
    if is_file(folder):
        raise ValueError(f"'{folder}' is a file: give a folder")
    if exists(folder / "config.json"):
        raise ValueError(f"'{folder}' holds a model already: give another folder")
    if listed(folder, "*.safetensors"):  # config.json is what save writes last
        raise ValueError(f"'{folder}' holds an unfinished export: remove it")
    if found := min(listed(folder), default=None):
        raise ValueError(f"'{folder}' is not empty, it has {found.name!r}: give another folder")


def _copies(family: Family, rows: Mapping[str, Row]) -> dict[str, str]:
    names = {row.theirs for row in rows.values()}
    return {copy: original for copy, original in family.copies.items() if copy not in names}


def _check_tied(
    folder: Path, family: Family, tensors: Mapping[str, Any], name: str, original: str
) -> None:
    copy, table = tensors[name], tensors[original]
    parts = (slice(row, row + 4096) for row in range(0, table.shape[0], 4096))
    same = copy.shape == table.shape and copy.dtype == table.dtype
    if not same or not all(_same_bits(copy[part], table[part]) for part in parts):
        may_differ = any(row.theirs == name for row in family.rows)
        mend = "say tie_word_embeddings=false, or " if may_differ else ""
        raise ValueError(
            f"config.json of '{folder}' ties {name} to {original}, and they differ: {mend}leave "
            f"{name} out"
        )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()


def _read_as(weight: Weight, dtype: Any, index: Sequence[slice]) -> np.ndarray:
    return weight[index].astype(dtype, copy=False)
