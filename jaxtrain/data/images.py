"""Images and their labels as rows: of an array, of a folder by class, or of a Parquet file.

Shape legend: N images, H height, W width, C channels.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.blocks import BlockCache, key_of
from jaxtrain.data.loader import spread
from jaxtrain.data.masking import MaskedTokens
from jaxtrain.data.rows import opened_npz
from jaxtrain.data.sources import find_files, hash_fraction
from jaxtrain.host import extras
from jaxtrain.host.memory import check_fits
from jaxtrain.host.paths import (
    as_path,
    exists,
    is_folder,
    is_remote,
    listed,
    look,
    read_object,
    told_of,
)

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
HELD_OUT = 0.2
_SAMPLE = 32  # images whose bands say those of all
_HEADERS = 10_000  # images at most of which the headers are read at the start: half a second
_GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")
_MAX_CLASSES = 1_000_000
_NEEDS = "images are decoded by Pillow"
_pillow = functools.partial(extras.load, _NEEDS, "vision", "PIL.Image", "PIL.ImageOps")


class Images:
    """Random access to images: rows of ``image`` [H, W, C] float32, ``label`` int32, ``mask`` 1.

    Args:
      images: by index, as [H, W, C]: bytes are scaled to 0 to 1, floats stay as they are.
      labels_N: the class of each, from 0.
      chosen: which of them are rows, in order; None for all.
    """

    def __init__(self, images: Any, labels_N: np.ndarray, chosen: np.ndarray | None = None):
        self.images, self.labels_N = images, labels_N
        self.chosen = np.arange(len(labels_N)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = int(self.chosen[index])
        image = self.images[index]
        scale = 255 if image.dtype == np.uint8 else 1
        return {
            "image": (image / scale).astype(np.float32),
            "label": self.labels_N[index],
            "mask": np.float32(1),
        }


@dataclasses.dataclass(frozen=True)
class Normalized:
    """Rows, such as :class:`Images`, whose images [H, W, C] are less a mean and divided by a
    deviation, each a number for each channel."""

    rows: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index]
        mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
        return row | {"image": (row["image"] - mean) / std}


@dataclasses.dataclass(frozen=True)
class Augmented:
    """Rows whose images are moved, mirrored and mixed at random, anew in every epoch: a source for
    `Batches`. What is drawn is a function of the seed, the row and the epoch.

    Args:
      rows: such as :class:`Images`.
      seed: of the draws; that of the order of rows is the seed of `Batches`.
      crop: up to how many pixels an image moves along each axis; zeros come in.
      flip: whether half of the images are mirrored, left to right.
      mixup: the parameter of the Beta distribution of the share of an image; the rest is another
        image's (Zhang et al. 2018, https://arxiv.org/abs/1710.09412). The label is drawn by the
        shares, so the loss is on average that of both labels. 0 mixes none.
    """

    rows: Any
    seed: int
    crop: int = 0
    flip: bool = False
    mixup: float = 0.0

    # Indices go on after the last row, so that every epoch draws anew.
    row_order = MaskedTokens.row_order

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, index))
        row = self.rows[index % len(self)]
        image, label = self._moved(row["image"], rng), row["label"]
        if self.mixup:
            share, other = rng.beta(self.mixup, self.mixup), self.rows[rng.integers(len(self))]
            image = share * image + (1 - share) * self._moved(other["image"], rng)
            label = label if rng.random() < share else other["label"]
        return row | {"image": np.ascontiguousarray(image, np.float32), "label": label}

    def _moved(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        (height, width, _), edge = image.shape, self.crop
        y, x = rng.integers(0, 2 * edge + 1, 2)
        image = np.pad(image, ((edge, edge), (edge, edge), (0, 0)))[y : y + height, x : x + width]
        return image[:, ::-1] if self.flip and rng.random() < 0.5 else image


@dataclasses.dataclass(frozen=True)
class LabelledImages:
    """Labelled images to train on and held out, as `open_images` returns them.

    Attributes:
      train, held_out: rows; none is in both.
      classes: names of the classes, by label.
      fingerprint: another where the images are others: of a file by its content, of a folder by
        the names and sizes in it.
    """

    train: Images
    held_out: Images
    classes: tuple[str, ...]
    fingerprint: str

    @property
    def shape(self) -> tuple[int, ...]:
        """H, W and C."""
        return self.train[0]["image"].shape


def open_images(path: str | os.PathLike[str], *, size: int | None = None) -> LabelledImages:
    """Opens images with labels; files of images are decoded when a row is asked for.

    A fifth of them is held out, by a hash of the file's name or of the row's number.

    Args:
      path: on a disk or in a bucket: a folder with a folder of images for each class; a
        ``.parquet`` file with the columns `image` (of bytes, or as Hugging Face writes it) and
        `label`, held in memory as it is; or an ``.npz`` of `images` [N, H, W] or [N, H, W, C] and
        `labels` [N].
      size: the height and width that files of images are brought to; left out, all must have those
        of the first. All are RGB, unless those of a sample are grey.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: no images, fewer than two classes, a label that is no class, or an image that
        cannot be decoded, has another shape than the first, or has colours among grey ones. What
        the headers say of that (of 10,000 at most, and of none in a folder of a bucket) is told
        here, the rest on reading.
      ImportError: Pillow, or for Parquet pyarrow, is not installed.
    """
    path = as_path(path)
    if not exists(path):
        raise FileNotFoundError(f"'{path}' does not exist: give a folder, a .parquet or an .npz")
    read = {".parquet": _of_parquet, ".npz": _of_arrays}.get(path.suffix)
    read = _of_folder if is_folder(path) else read
    if read is None:
        raise ValueError(f"'{path}' holds no images: give a folder by class, a .parquet or an .npz")
    images, labels, classes, names, stamp = read(path, size)
    if (different := len(np.unique(labels))) < 2:
        raise ValueError(
            f"'{path}' holds {len(labels)} image(s) of {different} class(es): give two or more"
        )
    ranks = np.array([hash_fraction(name) for name in names])
    held = ranks < HELD_OUT
    if not held.any() or held.all():
        held = ranks == ranks.min()
    sides = (Images(images, labels, np.flatnonzero(side)) for side in (~held, held))
    stamp = hashlib.sha256(f"{stamp} {size} {HELD_OUT}".encode()).hexdigest()[:32]
    return LabelledImages(*sides, classes, stamp)


def images_of(
    sources: Sequence[Any], names: Sequence[str], shape: tuple[int, int, int]
) -> Sequence[np.ndarray]:
    """Returns images brought to a model's height, width and channels, decoded when they are asked
    for.

    Args:
      sources: files, on a disk or in a bucket, or the bytes of such.
      names: of each, in what is said of it.
    """
    return _Encoded(sources, names, None, shape)


def read_images(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads the arrays of an .npz: `images` [N, H, W, C], and `labels` [N], which it may lack; with
    the errors of :func:`open_images`."""
    _, (images, *labels) = _arrays(as_path(path), "images", "labels", needed=1)
    if images.ndim not in (3, 4) or any(x.shape != images.shape[:1] for x in labels):
        raise ValueError(
            f"'{path}' has images {images.shape}: they must be [N, H, W] or [N, H, W, C], and "
            "labels, where there are any, [N]"
        )
    return images[..., None] if images.ndim == 3 else images, labels[0] if labels else None


class _Encoded:
    """Images that are decoded by Pillow when they are asked for: files, or bytes."""

    def __init__(
        self,
        encoded: Sequence[Any],
        names: Sequence[str],
        size: int | None,
        shape: tuple[int, int, int] | None = None,
    ):
        self._encoded, self._names, self._shape = encoded, names, shape
        self._size = None if size is None else (size, size)
        if shape is not None:
            self._size, self._grey = (shape[1], shape[0]), shape[2] == 1
            self._others = "the model's images are grey"
        elif len(names):
            self._others = f"{names[0]} is grey, as others are"
            sample = spread(range(len(names)), _SAMPLE)
            # One grey image, though it were the first, makes no colours grey.
            self._grey = all(self._open(index).mode in _GREY for index in sample)
            self._shape = self[0].shape

    def __getitem__(self, index: int) -> np.ndarray:
        image = self._open(index)
        if image.mode.startswith("I;16"):  # of which Pillow makes white
            pixels = np.rint(np.asarray(image) / 257).astype(np.uint8)
            image = _pillow().Image.fromarray(pixels)
        grey = image.mode in _GREY
        image = image.convert("L" if grey and self._grey else "RGB")
        if self._size is not None:
            image = image.resize(self._size)
        pixels = np.atleast_3d(np.asarray(image))
        if self._grey and not grey:
            if (pixels != pixels[..., :1]).any():
                raise ValueError(
                    f"{self._names[index]} has colours and {self._others}: bring all to RGB, or "
                    "all to grey"
                )
            pixels = pixels[..., :1]
        if self._shape is not None and pixels.shape != self._shape:
            raise ValueError(
                f"{self._names[index]} has the shape {pixels.shape} and {self._names[0]} has "
                f"{self._shape}: give `image_size`, to which all are brought"
            )
        return pixels

    def check_headers(self) -> None:
        """Raises ValueError where a header is of no image, or of another size than the first's."""
        first, turned = None, 0
        for index in spread(range(len(self._names)), _HEADERS):
            with self._header(index) as image:
                size = image.size
            first = first or size
            if self._size is None and size != first and turned < _SAMPLE:
                turned += 1
                self[index]  # which is refused, unless it is turned by a tag

    def _open(self, index: int) -> Any:
        with self._header(index) as opened:
            opened.load()
            with contextlib.suppress(Exception):  # Broken tags are common, and turn nothing.
                _pillow().ImageOps.exif_transpose(opened, in_place=True)
        if opened.mode in ("I", "F"):
            name = self._names[index]
            raise ValueError(f"{name} has pixels of 32 bits, of no known range: give 8 or 16 bits")
        return opened

    @contextlib.contextmanager
    def _header(self, index: int) -> Iterator[Any]:
        """An image of which the header is read; what its decoder raises names it."""
        pillow, name = _pillow(), self._names[index]
        source = self._encoded[index]
        source = source.as_py() if hasattr(source, "as_py") else source
        source = source.get("bytes") if isinstance(source, dict) else source
        if source is None:
            raise ValueError(
                f"{name} has no bytes of an image: the column is of bytes, or of structs with bytes"
            )
        source = io.BytesIO(source) if isinstance(source, bytes) else _content(source)
        try:
            with pillow.Image.open(source) as opened:
                yield opened
        # Decoders raise what they like; the system's own errors are the loader's to judge.
        except Exception as error:
            if getattr(error, "errno", None):
                raise
            unknown = isinstance(error, pillow.UnidentifiedImageError)  # which names an object
            why = "" if unknown else f" ({error})"
            raise ValueError(f"{name} is no image, or damaged{why}") from None


def _of_folder(path: Path, size: int | None) -> tuple[Any, ...]:
    found = [
        f"{folder.name}/{name}"
        for folder in listed(path)
        if is_folder(folder) and not folder.name.startswith(".")  # as .ipynb_checkpoints
        for name in find_files(folder, SUFFIXES)
    ]
    found.sort(key=lambda name: name.split("/"))
    classes = tuple(sorted({name.split("/")[0] for name in found}))
    number = {name: label for label, name in enumerate(classes)}
    labels = np.array([number[name.split("/")[0]] for name in found], np.int32)
    files, names = [str(path / name) for name in found], [f"'{path / name}'" for name in found]
    if is_remote(path):  # a listing for each folder, and not a request for each file
        folders = {name.rpartition("/")[0] for name in found}
        told = {f"{each}/{n}": x for each in folders for n, x in told_of(path / each).items()}
        bytes_of = [told[name]["size"] for name in found]
    else:
        bytes_of = [look(file).size for file in files]
    # Not times nor the folder's own path: a copy elsewhere is the same images.
    stamp = repr([*zip(found, bytes_of, strict=True)])
    if is_remote(path):
        # But what is kept of them is of these very files.
        key = key_of(path, (told[name] for name in found))
        files = _InBucket(str(path), key, found, bytes_of)
    images = _Encoded(files, names, size)
    if not is_remote(path):
        images.check_headers()
    return images, labels, classes, found, stamp


@dataclasses.dataclass(frozen=True)
class _InBucket:
    """Files of a folder in a bucket, in order; what was read lies on the disk, within a bound."""

    folder: str
    key: str
    names: list[str]
    sizes: list[int]

    def __getitem__(self, index: int) -> bytes:
        name, size = self.names[index], self.sizes[index]
        # Not a field, as it cannot go to another process.
        cache = _block_cache(self.folder, self.key)
        return cache.read(name, 0, size, size)


@functools.cache
def _block_cache(folder: str, key: str) -> BlockCache:
    return BlockCache(as_path(folder), key)


def _content(path: str | os.PathLike[str]) -> Path | io.BytesIO:
    """What opens a file: its path, or the bytes of one in a bucket."""
    return io.BytesIO(read_object(path)) if is_remote(path) else path


def _of_parquet(path: Path, size: int | None) -> tuple[Any, ...]:
    pyarrow = extras.load("reading Parquet needs pyarrow", "text", "pyarrow.parquet")
    content = _content(path)
    stamp = _stamp(content)
    try:
        about = pyarrow.parquet.read_metadata(content)
        groups = map(about.row_group, range(about.num_row_groups))
        check_fits(sum(group.total_byte_size for group in groups), f"'{path}'")
        table = pyarrow.parquet.read_table(content)
    except pyarrow.ArrowException as error:
        raise ValueError(f"'{path}' is cut short or damaged ({error})") from None
    if not {"image", "label"} <= set(table.column_names):
        raise ValueError(f"'{path}' has the columns {table.column_names}: it needs image and label")
    rows = range(table.num_rows)
    images = _Encoded(table["image"], [f"'{path}' row {row}" for row in rows], size)
    images.check_headers()
    labels = np.array(table["label"].to_pylist())
    return images, *_classes(labels, path), [str(row) for row in rows], stamp


def _of_arrays(path: Path, size: int | None) -> tuple[Any, ...]:
    if size is not None:
        raise ValueError(f"`image_size` is {size}: the arrays of '{path}' have a size of their own")
    content, (images, labels) = _arrays(path, "images", "labels")
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"'{path}' has images {images.shape} and labels {labels.shape}: they must be [N, H, W] "
            "or [N, H, W, C], and [N]"
        )
    images = images[..., None] if images.ndim == 3 else images
    names = [str(row) for row in range(len(labels))]
    return images, *_classes(labels, path), names, _stamp(content)


def _arrays(
    path: Path, *names: str, needed: int | None = None
) -> tuple[Path | io.BytesIO, list[np.ndarray]]:
    """Reads arrays of an .npz, of which the first are images; those beyond ``needed`` it may lack.
    Returns what :func:`_content` gives of it besides."""
    content = _content(path)
    failed = f"'{path}' cannot be read: it needs {' and '.join(names)}"
    with opened_npz(content, failed) as arrays:
        beyond = [name for name in names[needed:] if name in arrays] if needed else []
        images, *labels = (arrays[name] for name in [*names[:needed], *beyond])
    if images.dtype not in (np.uint8, bool) and not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            f"'{path}' has images of {images.dtype}, whose range nobody knows: give uint8, or "
            "floats of the range to train on"
        )
    return content, [images, *labels]


def _classes(labels: np.ndarray, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns labels as int32, and the names of the classes."""
    if not np.issubdtype(labels.dtype, np.integer) or (labels.size and labels.min() < 0):
        raise ValueError(f"'{path}' has labels that are no integers from 0: give those of classes")
    if labels.size and labels.max() >= _MAX_CLASSES:
        raise ValueError(
            f"'{path}' has the label {labels.max()}, of which there would be as many classes: "
            f"number them from 0, below {_MAX_CLASSES}"
        )
    return labels.astype(np.int32), tuple(map(str, range(int(labels.max(initial=-1)) + 1)))


def _stamp(content: Path | io.BytesIO) -> str:
    """The content of a file, of :func:`_content`."""
    if isinstance(content, io.BytesIO):
        return hashlib.sha256(content.getbuffer()).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
