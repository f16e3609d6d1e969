"""Defines :class:`Layout`: how a step is laid out over devices and scheduled, as one value.

Two layouts of one task compute the same numbers, to rounding. Flags, resuming, parity, plans and
searches are functions of this value.
"""

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from jaxtrain.host.least import check_least
from jaxtrain.ops.attention import IMPLEMENTATIONS
from jaxtrain.ops.context import EXCHANGES
from jaxtrain.ops.dispatch import DISPATCHES
from jaxtrain.ops.remat import REMAT
from jaxtrain.sharding.mesh import AXES, fill_sizes


class Effect(enum.Enum):
    """Effect of another setting on the later steps of a resumed run; its value is for people."""

    NONE = "of a start, and no change"
    SAME = "same bits"
    ROUNDED = "the same mathematics, other bits"
    EVALUATION = "same bits, evaluated on other data"
    LATER = "others, from that step on"
    CODE = "other code"
    VERSION = "a flag of another version"
    UNSAVED = "none was saved before"
    UNCOMPARED = "not comparable between versions"


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis of the mesh; -1 takes what the others leave."""

    data: int = -1
    """Splits the batch; parameters are copied."""
    fsdp: int = 1
    """Splits the batch, and parameters, gradients and optimizer state."""
    tensor: int = 1
    """Splits heads, MLP width and vocabulary."""
    pipe: int = 1
    """Splits the layers; see the pipeline options."""
    context: int = 1
    """Splits the positions of rows, which attention exchanges for heads where this divides them."""
    expert: int = 1
    """Splits the experts of a mixture, and the batch everywhere else."""
    dcn_data: int = 1
    """Number of TPU slices (or hosts) that the data axis spans: the part of it that crosses the
    slow network."""
    dcn_fsdp: int = 1
    """Number of TPU slices (or hosts) that the fsdp axis spans."""
    dcn_pipe: int = 1
    """Number of TPU slices (or hosts) that the pipe axis spans."""

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of :func:`jaxtrain.make_mesh`."""
        return dataclasses.asdict(self)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes alone."""
        return {name: size for name, size in self.sizes.items() if name in AXES}

    @property
    def devices(self) -> int:
        """Number of devices; -1 where an axis takes what there is."""
        sizes = self.axes.values()
        return -1 if -1 in sizes else math.prod(sizes)

    @property
    def slow(self) -> dict[str, int]:
        """Number of slices or hosts that each mesh axis spans."""
        return {axis: self.sizes.get(f"dcn_{axis}", 1) for axis in AXES}

    @property
    def islands(self) -> int:
        """Number of slices or hosts, between which the network is slow."""
        return math.prod(self.slow.values())

    def filled(self, devices: int) -> Self:
        """Returns the shape on so many devices, with a number in place of -1.

        Raises:
          ValueError: the sizes do not multiply to ``devices``.
        """
        return dataclasses.replace(self, **fill_sizes(self.axes, devices))


@dataclasses.dataclass(frozen=True)
class PipelineLayout:
    """The schedule of microbatches through the stages of a mesh with a pipe axis."""

    schedule: Literal["1f1b", "interleaved", "gpipe"] = "1f1b"
    """Pipeline schedule: 1f1b keeps few microbatches in memory, interleaved has the smaller bubble,
    gpipe has neither advantage."""
    microbatches: int = 8
    """Microbatches per step; with --exact, of each grain."""
    virtual: int = 1
    """Chunks of layers per device, above 1 for interleaved only."""
    remat: Literal["full", "none"] = "full"
    """full runs a stage again for its backward pass; none keeps its residuals instead."""
    balance: bool = False
    """Place layers on stages so that the busiest, with the embedding or the head, has least to do;
    layers that do not divide are always placed so."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a step over devices, and its schedule.

    >>> layout = Layout.parse("data=2,tensor=4,zero=1,pipeline.microbatches=16")
    >>> str(layout)
    'data=2,tensor=4,zero=1,pipeline.microbatches=16'
    >>> layout.flags()
    ['--mesh.data=2', '--mesh.tensor=4', '--zero=1', '--pipeline.microbatches=16']
    """

    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage on the data axis: 1 splits optimizer state, 2 gradients too, 3 parameters too."""
    accumulate: int = 1
    """Microbatches per step, in one scan; their gradients are summed by weight."""
    gather: Literal["layer", "step"] | None = None
    """When weights that fsdp splits (or data, with --zero 3) are made whole: layer by layer in each
    microbatch, or once per step for all of them; left out, once per step where memory allows."""
    remat: Literal[REMAT] | None = None  # type: ignore[valid-type]
    """Activations that a block stores for the backward pass: none recomputes nothing, dots stores
    matrix products (offload: in host memory), save_attention stores attention only, full stores
    only the block's input. Left out, the model's own choice."""
    scan_unroll: int | None = None
    """Layers per iteration of the scan over layers; left out, few layers on one CPU device are
    unrolled and others are not."""
    attention: Literal[IMPLEMENTATIONS] | None = None  # type: ignore[valid-type]
    """Attention kernel: auto, xla, cudnn (GPU) or splash (TPU). T5 needs xla, the only kernel
    with a bias. Left out, the model's own choice."""
    exchange: Literal[EXCHANGES] | None = None  # type: ignore[valid-type]
    """Exchange of attention where --mesh.context splits rows: heads for positions, keys (all of a
    row on each device) or ring (those of one device at a time). Left out, heads where the axis
    divides them, else a ring for long rows, else keys."""
    dispatch: Literal[DISPATCHES] | None = None  # type: ignore[valid-type]
    """Way of tokens to the experts that --mesh.expert splits: gather (all tokens on all of its
    devices) or exchange (each token to the devices of its experts). Left out, the exchange where
    that takes half the traffic at most."""
    sequence_parallel: bool = True
    """Split rows between blocks over the tensor axis too, where their length divides; this shrinks
    the memory that a block keeps for its backward pass, and the work of norms."""
    pipeline: PipelineLayout = dataclasses.field(default_factory=PipelineLayout)
    steps_per_call: int = 1
    """Train steps in one compiled call, for steps that take hardly longer than their dispatch;
    evaluations and checkpoints fall between calls. Slower where a CPU convolves."""
    exact: int = 0
    """Grains of the global batch, a power of two at best, whose gradients are added in one order:
    every number of devices from 2 on then has the same bits along data and fsdp, and all weights
    are gathered for the grains of a device. 0 adds gradients in the fastest order."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory; only the update of each step brings it to the
    devices."""
    offload_parameters: bool = False
    """Keep the parameters of the stacked layers in host memory; each layer is fetched where the
    forward and the backward pass compute it, and all of them for the update. It needs --remat full,
    dots or another that computes layers again."""
    hide_communication: bool = True
    """Compile with the options that hide communication behind compute, on targets that have any."""
    deterministic: bool = False
    """Compile programs that give the same bits in every run on GPUs, which costs time; other
    devices always do."""

    # What another value of a field means for the steps to come, where it is more than rounding.
    MEANING: typing.ClassVar[Mapping[str, Effect]] = {"offload_optimizer": Effect.SAME}
    # Fields of which another value changes no bit of an exact run.
    EXACT: typing.ClassVar[tuple[str, ...]] = (
        *("mesh.data", "mesh.fsdp", "mesh.dcn_data", "mesh.dcn_fsdp"),
        *("zero", "accumulate", "steps_per_call", "hide_communication"),
    )

    def __post_init__(self) -> None:
        check_least(self, accumulate=1, steps_per_call=1, exact=0)
        for name, value in (*((name, True) for name in self.offloads), ("gather", "layer")):
            if self.exact and getattr(self, name) == value:
                raise ValueError(
                    f"`{name}` is {value!r} and `exact` {self.exact}, with which a device has all "
                    "weights for its grains, and updates its part in place: leave one of them out"
                )
        if self.offloads and self.steps_per_call > 1:
            raise ValueError(
                f"`steps_per_call` is {self.steps_per_call} with `{self.offloads[0]}`: the state "
                "of a call's steps does not leave the devices in between; give 1"
            )

    @classmethod
    def parse(cls, text: str, base: "Layout | None" = None) -> "Layout":
        """Reads a layout such as ``"data=2,tensor=4"`` or ``"data=8,zero=1,remat=full"``.

        Args:
          text: fields by name, those of a pipeline as ``pipeline.microbatches=16``.
          base: has the fields that ``text`` leaves out, except the mesh, whose axes are then of
            size 1, and ``zero``, which is 0; the default layout if left out.

        Raises:
          ValueError: for a name that no layout has, or a value that its field cannot have.
        """
        base, fields = cls() if base is None else base, _fields(cls)
        found: dict[str, Any] = {"mesh": MeshShape(data=1), "zero": 0}
        for entry in filter(None, (word.strip() for word in text.split(","))):
            name, sign, value = (word.strip() for word in entry.partition("="))
            path = name.replace("-", "_")
            path = f"mesh.{path}" if f"mesh.{path}" in fields else path
            if path not in fields or not sign:
                raise ValueError(
                    f"layout {text!r} is not known, for {name!r}: write sizes of the mesh axes, "
                    "and what else is a flag of a layout, such as data=2,tensor=4 or data=8,zero=1"
                )
            try:
                found[path] = _read(fields[path], value)
            except ValueError as error:
                raise ValueError(f"layout {text!r} has {name}={value}: {error}") from None
        return base.with_(found)

    def with_(self, changes: Mapping[str, Any]) -> "Layout":
        """Returns the layout with other values, by the path of their field (``"mesh.data"``)."""
        inner: dict[str, Any] = {}
        for path, value in changes.items():
            group, _, name = path.rpartition(".")
            if group:
                inner[group] = dataclasses.replace(
                    inner.get(group, getattr(self, group)), **{name: value}
                )
            else:
                inner[name] = value
        return dataclasses.replace(self, **inner)

    def changes(self, since: "Layout | None" = None) -> dict[str, Any]:
        """Returns the values by the path of their field where they are not those of ``since``."""
        since = type(self)() if since is None else since
        then, now = since.values(), self.values()
        return {path: value for path, value in now.items() if value != then[path]}

    def values(self) -> dict[str, Any]:
        """Returns all values by the path of their field, as flags name it."""
        return {
            path: functools.reduce(getattr, path.split("."), self) for path in _fields(type(self))
        }

    def flags(self, since: "Layout | None" = None) -> list[str]:
        """Returns the flags that make this layout of ``since``."""
        return [_flag_of(path, x) for path, x in self.changes(since).items()]

    def text(self, since: "Layout | None" = None) -> str:
        """Returns the mesh, and what else is not as in ``since``: :meth:`parse` reads it."""
        named = {axis: size for axis, size in self.mesh.sizes.items() if size != 1}
        named |= {"zero": self.zero} if self.zero else {}
        return _joined(named | self._beside_mesh(since)) or "data=1"

    def __str__(self) -> str:
        return self.text()

    @property
    def choices(self) -> str:
        """Fields that differ from their defaults, as text, without those of the mesh."""
        return _joined(self._beside_mesh())

    def _beside_mesh(self, since: "Layout | None" = None) -> dict[str, Any]:
        found = self.changes(since).items()
        return {path: value for path, value in found if not path.startswith("mesh.")}

    @property
    def offloads(self) -> tuple[str, ...]:
        """Fields by which state lies in the memory of the host."""
        names = ("offload_optimizer", "offload_parameters")
        return tuple(name for name in names if getattr(self, name))

    def may_change(self) -> dict[str, Effect]:
        """Returns what another value of each field means for the steps of a run, by its path; one
        that may not change in an exact run is not there."""
        effects = {path: self.MEANING.get(path, Effect.ROUNDED) for path in _fields(type(self))}
        if self.exact:
            return dict.fromkeys((*self.EXACT, "microbatches"), Effect.SAME)
        return effects

    def microbatches(self, pipe: int) -> int:
        """Returns the number of parts in which a step on ``pipe`` stages takes its batch."""
        return self.pipeline.microbatches if pipe > 1 else self.accumulate


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The types of all fields of a layout by their paths, in order."""
    found, types_of = {}, typing.get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        inner = types_of[name]
        nested = dataclasses.is_dataclass(inner)
        found |= {f"{name}.{n}": x for n, x in _fields(inner).items()} if nested else {name: inner}
    return found


def _read(kind: Any, text: str) -> Any:
    arms = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if text == "default":
            return None
        return _read(next(arm for arm in arms if arm is not types.NoneType), text)
    if typing.get_origin(kind) is typing.Literal:
        for value in arms:
            if text == str(value):
                return value
        raise ValueError(f"give one of {', '.join(map(str, arms))}")
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("give true or false")
        return text == "true"
    if not text.removeprefix("-").isdecimal():
        raise ValueError("give a whole number")
    return int(text)


def _joined(named: Mapping[str, Any]) -> str:
    words = {path: "default" if x is None else str(x).lower() for path, x in named.items()}
    return ",".join(f"{path}={word}" for path, word in words.items())


def _flag_of(path: str, value: Any) -> str:
    """Returns the flag that sets a field of a layout, by its path."""
    name = path.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}".replace("--no-pipeline.", "--pipeline.no-")
    return f"--{name}={value}"
