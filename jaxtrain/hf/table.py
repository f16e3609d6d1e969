"""A family's table: which of our parameters is which part of which tensor, and which of our fields
is which of theirs, read in both directions.

Shapes: L layers, D width. A stacked parameter of ours is a tensor per layer of theirs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.sharding.stack import LayerOrder

REQUIRED = object()
# Their axes in our order: a dense layer of PyTorch is [outputs, inputs].
T = (1, 0)


@dataclasses.dataclass(frozen=True)
class Field:
    """Our counterpart of a field of their ``config.json``.

    Args:
      ours: our name of the field.
      default: the value that a ``config.json`` without the field means.
      values: our value by theirs, where the two have different names.
    """

    ours: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None


# Fields that most families call alike, and GELUs.
SHAPE = {
    "hidden_size": Field("width"),
    "num_hidden_layers": Field("layers"),
    "num_attention_heads": Field("heads"),
    "intermediate_size": Field("mlp_width"),
}
GELUS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
      theirs: the name of their tensor; with ``{l}`` there is one for each layer, with ``{e}`` of
        each expert there.
      axes: their axes in the order of ours; None means as they are.
      part: (i, n): ours begins with part i of n equal ones along our last axis.
      parts: of how many of them it is.
      strided: the parts are not one behind the other, but ours is every n-th feature.
      vocab: our axis over the vocabulary, which ours pads with zeros.
      first: the first layer that has such a tensor; of those before it ours is 0, and unread.
      shorter: whether ours may have fewer rows than theirs, the first ones.
      ones: how many of our axes, the first ones, are of size 1 and theirs lack.
      offset, stride: the number that their names have of our first layer, and how many further that
        of the next one is.

    >>> Row("up/kernel", "fc.{l}.weight", T).their_shape((8, 32))
    (32, 8)
    """

    ours: str
    theirs: str
    axes: tuple[int, ...] | None = None
    part: tuple[int, int] = (0, 1)
    parts: int = 1
    strided: bool = False
    vocab: int | None = None
    shorter: bool = False
    ones: int = 0
    first: int = 0
    offset: int = 0
    stride: int = 1

    @property
    def stacked(self) -> bool:
        """Whether there is a tensor for each layer."""
        return "{l}" in self.theirs

    @property
    def lead(self) -> int:
        """How many of our leading axes number their tensors."""
        return self.stacked + ("{e}" in self.theirs)

    def places(self, *sizes: int) -> list[tuple[int, ...]]:
        """Where in our leading axes, of such sizes, each of their tensors stands."""
        return [
            at for at in np.ndindex(*sizes[: self.lead]) if at[:1] >= (self.first,)[: self.lead]
        ]

    def names(self, *sizes: int) -> list[str]:
        """Their names: one for each layer that has it and each expert, or one."""
        return [
            self.theirs.format(
                **dict(zip("le", (at[0] * self.stride + self.offset, *at[1:]), strict=False))
            )
            if at
            else self.theirs
            for at in self.places(*sizes)
        ]

    def their_shape(self, shape: Sequence[int], vocab_size: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor, given that of one layer of ours."""
        sizes = list(shape[self.ones :])
        if not sizes:
            return ()
        sizes[-1] = sizes[-1] * self.part[1] // self.parts
        if self.vocab is not None:
            sizes[self.vocab] = vocab_size
        return tuple(sizes[i] for i in np.argsort(self.order(sizes)))

    def read(self, tensor: Any, index: Sequence[slice], out: np.ndarray) -> None:
        """Copies the part ``index`` of one layer of ours from a tensor to ``out``, which is 0."""
        index, out = index[self.ones :], out[(0,) * self.ones + (...,)]
        if not index:
            out[...] = tensor[()]
            return
        axes = self.order(tensor.shape)
        sizes = [tensor.shape[i] for i in axes]
        number, parts = self.part
        mine = self.place(sizes[-1])
        sizes[-1] = mine.stop - mine.start
        first = [0] * (len(sizes) - 1) + [0 if self.strided else mine.start]
        ours = [
            slice(at + min(part.start, size), at + min(part.stop, size))
            for part, size, at in zip(index, sizes, first, strict=True)
        ]
        if self.strided:
            ours[-1] = slice(parts * ours[-1].start, parts * ours[-1].stop)
        block = tensor[tuple(ours[i] for i in np.argsort(axes))].transpose(axes)
        block = block[..., number::parts] if self.strided else block
        out[tuple(slice(size) for size in block.shape)] = block

    def place(self, size: int) -> slice:
        """Our part of their axis of such a size, if it is not strided."""
        first, count = self.part
        return slice(first * size // count, (first + self.parts) * size // count)

    def order(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Their axes in our order."""
        return self.axes or tuple(range(len(shape)))


def dense(ours: str, theirs: str, axes: tuple[int, ...] | None = T, **part: Any) -> tuple[Row, Row]:
    """The rows of a dense layer's kernel and bias."""
    kernel = Row(f"{ours}/kernel", f"{theirs}.weight", axes, **part)
    return kernel, Row(f"{ours}/bias", f"{theirs}.bias", **part)


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    """The rows of a norm's scale and bias."""
    return Row(f"{ours}/scale", f"{theirs}.weight"), Row(f"{ours}/bias", f"{theirs}.bias")


def assemble(
    rows: Sequence[Row], layers: Sequence[np.ndarray], vocab_size: int | None
) -> np.ndarray:
    """Returns a tensor of theirs, the inverse of :meth:`Row.read`: of the rows that are parts of
    it, in order, and one layer of our parameter of each; ``vocab_size`` is how much of a padded
    axis is theirs."""
    row = rows[0]
    if row.strided:
        whole = np.stack(layers, axis=-1).reshape(*layers[0].shape[:-1], -1)
    else:
        whole = np.concatenate(layers, axis=-1) if len(rows) > 1 else np.asarray(layers[0])
    if row.vocab is not None:
        whole = whole[(slice(None),) * row.vocab + (slice(vocab_size),)]
    whole = whole.reshape(whole.shape[row.ones :])
    return whole.transpose(np.argsort(row.order(whole.shape)))


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of ours that is read from their tensors, slice by slice, when it is asked for.

    It stands where an array would in ``init_state(params=)``: no more is read than the slices of
    this process's devices.

    Args:
      tensors: theirs, one for each layer, or expert of a layer.
      places: the number of the tensor, from 1, at every place of our leading axes, and 0 where
        those are padding; an array without axes where the parameter is not stacked.
      inner: the shape of one of them.
    """

    row: Row
    tensors: Sequence[Any]
    places: np.ndarray
    inner: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter in our model."""
        return (*self.places.shape, *self.inner)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensors in their file."""
        return np.result_type(*{tensor.dtype for tensor in self.tensors})

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        lead = self.places.ndim
        index = [slice(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)]
        places = self.places[tuple(index[:lead])]
        inner = index[lead:]
        out = np.zeros((*places.shape, *(part.stop - part.start for part in inner)), self.dtype)
        for place, number in np.ndenumerate(places):
            if number:
                self.row.read(self.tensors[number - 1], inner, out[place])
        return out

    def scales(self, kind: str) -> "Weight | None":
        """Returns the scales [..., G, F] of codes of 4 or 8 bits that the file has and ``kind`` has
        too; None where it has other ones, or none."""
        found = [getattr(tensor, "scale", lambda kind: None)(kind) for tensor in self.tensors]
        if any(each is None or each.shape != found[0].shape for each in found):
            return None
        groups = found[0].shape[self.row.order(found[0].shape)[0]]
        return dataclasses.replace(self, tensors=found, inner=(groups, self.inner[-1]))

    def cut(self, order: LayerOrder) -> "Weight":
        """Returns the weight as a :class:`jaxtrain.Stack` cuts it, of which nothing is read yet."""
        return dataclasses.replace(self, places=order.split(self.places))

    def repeated(self, count: int) -> "Weight":
        """Returns the weight so many times along a second axis, of which nothing is read yet."""
        places = np.broadcast_to(self.places[:, None], (len(self.places), count))
        return dataclasses.replace(self, places=places)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)


def by_tensor(rows: Mapping[str, Row]) -> dict[tuple[str, int], list[Row]]:
    """Groups rows by the template of their tensors and the first layer of these, parts in order."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows.values():
        groups.setdefault((row.theirs, row.offset), []).append(row)
    return {name: sorted(group, key=lambda row: row.part) for name, group in groups.items()}
