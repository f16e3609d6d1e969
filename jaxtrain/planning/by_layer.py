"""Divides a step's memory among the parts of a model, and names the rest.

Parameters, their optimizer state and their gradients are counted by the paths of the parameters;
what the forward pass keeps for the backward pass by the scopes of the operations that make it
(:mod:`.scopes`). Both get one name if a scope has the name of its parameters, as in
:class:`jaxtrain.Stages` and in the shipped layers.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxtrain.engines.plain import trainable
from jaxtrain.host.memory import human_bytes
from jaxtrain.optim import frozen_of
from jaxtrain.planning.liveness import Buffer
from jaxtrain.planning.scopes import scopes_of
from jaxtrain.planning.walk import inner_jaxpr
from jaxtrain.state import local_bytes
from jaxtrain.tree import named_leaves, owner_of

# What belongs to no part that is known.
OTHER = "other"
# Parts within a part that have less than this of all are told with it.
SMALL = 0.01
# How the kinds of memory of a part are drawn, and how wide the largest part is.
SHADES = {"parameters": "█", "optimizer_state": "▓", "gradients": "▒", "kept": "░"}
WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes on one device that belong to one part of a model.

    Args:
      name: path of its parameters, such as ``blocks/attn``.
      layers: number of the device's layers that have it; 0 outside of stacked layers.
      parameters, optimizer_state: bytes that are held throughout.
      kept: bytes that loops over layers keep for the backward pass, by the traced step.
    """

    name: str
    layers: int = 0
    parameters: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.optimizer_state + self.gradients + self.kept


def parts_of(
    state: Any, kept: Mapping[str, int] | None = None, experiment: Any = None
) -> tuple[Part, ...]:
    """Divides a train state, and what is kept, among the parts of the model, the largest first.

    The state is of shapes with shardings; one that is no :class:`jaxtrain.TrainState` has no parts.
    ``kept`` is bytes by part (:func:`kept_by_part`); of an experiment with stages the layers of a
    device are counted too.
    """
    if not (hasattr(state, "params") and hasattr(state, "opt_state")):
        return ()
    params, sums = named_leaves(state.params), collections.defaultdict(collections.Counter)
    stages = experiment and experiment.task.stages
    leads = {part.key: part.lead for part in experiment.stack.parts} if stages else {}
    layers = {}
    trains = named_leaves(trainable(state.params, frozen_of(state))[0])
    for name, leaf in params.items():
        sums[_part(name)]["parameters"] += local_bytes(leaf)
        sums[_part(name)]["gradients"] += local_bytes(leaf) if name in trains else 0
        if (lead := leads.get(key := name.partition("/")[0])) is not None:
            pipe = leaf.sharding.mesh.shape.get("pipe", 1)
            layers[key] = math.prod(leaf.shape[:lead]) // pipe
    for name, leaf in named_leaves(state.opt_state).items():
        owner = owner_of(name, params)
        sums[OTHER if owner is None else _part(owner)]["optimizer_state"] += local_bytes(leaf)
    for part, size in (kept or {}).items():
        sums[part]["kept"] += size
    least = SMALL * sum(each.total() for each in sums.values())
    for name in [name for name, each in sums.items() if "/" in name and each.total() < least]:
        sums[name.partition("/")[0]].update(sums.pop(name))
    parts = [
        Part(name, layers.get(name.partition("/")[0], 0), **each)
        for name, each in sums.items()
        if each.total()
    ]
    return tuple(sorted(parts, key=lambda part: -part.total))


def kept_by_part(kept: Mapping[Buffer, tuple[Any, Any]]) -> dict[str, int]:
    """Adds up by part what :func:`.walk.walk_step` has found that loops keep."""
    sums: dict[str, int] = collections.Counter()
    for buffer, (body, variable) in kept.items():
        scopes = _source(body, variable)
        if scopes is None:  # What a layer was given: that is of no operation in it.
            scopes = next(filter(None, map(_scopes, body.eqns)), ())[:1]
        sums["/".join(scopes[:2]) or OTHER] += buffer.size
    return dict(sums)


def table(parts: tuple[Part, ...], memory: Any) -> Table:
    """Draws the parts of a plan with what there is besides, which together are the peak."""
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(
        ("", "layers", "parameters", "optimizer", "gradients", "kept", "all", "")
    ):
        rows.add_column(name, justify="right" if 0 < i < 7 else "left", no_wrap=True)
    largest = max((part.total for part in parts), default=0) or 1
    for part in parts:
        sizes = [getattr(part, kind) for kind in SHADES]
        cells = [human_bytes(size) if size else "" for size in sizes]
        count = f"{part.layers}" if part.layers else ""
        bar = _bar(sizes, WIDTH * part.total / largest)
        rows.add_row(part.name, count, *cells, human_bytes(part.total), bar)
    for name, size in besides(parts, memory).items():
        rows.add_row(name, *[""] * 5, human_bytes(size))
    rows.add_row("peak", *[""] * 5, human_bytes(memory.peak), style="bold")
    shades = "  ".join(f"{shade} {kind.replace('_', ' ')}" for kind, shade in SHADES.items())
    rows.caption, rows.caption_justify = Text(shades), "left"
    return rows


def besides(parts: tuple[Part, ...], memory: Any) -> dict[str, int]:
    """Returns the bytes of a peak besides its parts, by name; with the parts they sum to the peak.

    The last is negative if gradients are not made yet, or used up, when memory is fullest.
    """
    found = {"batch": memory.batch, "other state": memory.other_state}
    rest = memory.peak - sum(part.total for part in parts) - sum(found.values())
    return found | {"not there at once" if rest < 0 else "comes and goes": rest}


def _part(path: str) -> str:
    """The part of the parameter at a path: two names of it, but not its own."""
    names = path.split("/")
    return "/".join(names[:-1][:2]) or path


def _scopes(equation: Any) -> tuple[str, ...]:
    return scopes_of(f"{equation.source_info.name_stack}/{equation.primitive.name}")[1]


def _source(jaxpr: Any, variable: Any) -> tuple[str, ...] | None:
    """The scopes of the operation that makes a variable; None for an argument of the jaxpr."""
    for equation in jaxpr.eqns:
        places = [i for i, made in enumerate(equation.outvars) if made is variable]
        if not places:
            continue
        called = inner_jaxpr(equation)
        inner = getattr(called, "jaxpr", called)
        if called is None or hasattr(inner.outvars[places[0]], "val"):
            return _scopes(equation)
        within = _source(inner, inner.outvars[places[0]])
        return (*_scopes(equation), *(within or ()))
    return None


def _bar(sizes: list[int], width: float) -> str:
    """Shades in the proportion of sizes, rounded so that their sum is."""
    drawn, end, total = "", 0.0, sum(sizes) or 1
    for size, shade in zip(sizes, SHADES.values(), strict=True):
        end += size / total * width
        drawn += shade * (round(end) - len(drawn))
    return drawn
