"""Decisions about a step as values: codes with facts, and all the sentences that they print as.

The plan, the header of a run and :meth:`jaxtrain.CompiledStep.report` print them; no program reads
a sentence.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.host.memory import human_bytes


class Kind(enum.Enum):
    """A decision about a step; its value is the name in reports."""

    REDUCTION = "gradients are reduced"
    GATHER = "weights are gathered"
    ENGINE = "gradients are computed"
    ATTENTION = "attention"
    CONTEXT = "rows are split"
    EXPERTS = "experts"
    HIDING = "communication is hidden"
    BITS = "bits are the same in every run"
    EXACT = "bits are the same on any number of devices"
    METHOD = "method"


class Why(enum.Enum):
    """The code of a reason; its value is the sentence. Facts that end in ``bytes`` are sizes."""

    BY = "by {name}"
    GRAINS = "by sums of {grains} grains in one order, and updates alike in all pieces"
    OPTIONS = "by {count} of XLA's options (hide_communication)"
    # Weights are gathered once per step, or layer by layer:
    ASKED = "as asked for"
    OFFLOADED = "for layers lie in the memory of the host, and are fetched one by one"
    ONE_MICROBATCH = "there is one microbatch"
    UNKNOWN_MEMORY = "the memory of {kind!r} is not known"
    ROOM = "with the state {kept_bytes} of {memory_bytes} would be kept, at most half"
    NO_ROOM = "with the state {kept_bytes} of {memory_bytes} would be kept, more than half"
    # Gradients are reduced in every microbatch:
    MODEL_STATE = "for the model has state, which is that of all rows"
    UNDECLARED = "for the loss is not declared a sum over rows (jaxtrain.row_wise)"
    NO_PROMISE = "for the gradient engine does not promise to be row-wise (Engine(row_wise=True))"
    MEMORY = "for the gradient engine's memory is that of all rows"
    UNPLACED = "for the step does not know how its parameters lie"
    ENGINE_DRAWS = "for the loss draws numbers, and the gradient engine is not jaxtrain's own"
    DRAWS = (
        "for the loss draws numbers otherwise than by jaxtrain.ops.numerics.drop, which draws row "
        "by row with keys of the kind threefry"
    )
    LAST = "for metric {metric!r} is the last of all parts"
    OTHER_ROWS = "for batch leaf {leaf!r} has {own} rows and others have {rows}"
    NO_LEADING_ROWS = "for not every leaf of the batch begins with its rows"
    INDIVISIBLE = "for its {rows} rows do not divide over {parts} devices"
    # A fused attention kernel needs:
    CHIP = "{chip}, and the backend is {backend!r}"
    NO_BIAS = "attention without a bias"
    NO_SINKS = "attention without sinks"
    NO_LEADING = "windows beyond which nothing is seen, and {count} global tokens are"
    OWN_KEYS = "keys of the queries' own documents"
    NO_DROPOUT = "no dropout on attention weights, and its rate is {rate}"
    KEYS = "as many keys as queries ({queries}), and they are {keys}"
    NO_SOFTCAP = "scores without a soft cap, and it is {softcap}"
    CAUSAL_WINDOW = "windows of causal attention alone, and it sees {each} to both sides"
    DTYPE = "bfloat16 or float16, and the queries are {dtype}"
    HEAD_WIDTH = "a head width that is a multiple of 8 up to 128, and it is {width}"
    EVEN_ROWS = "packed rows of an even length, and it is {length}"
    WHOLE_TILES = "rows whose length is a multiple of {lanes}, and it is {length}"
    DIVISIBLE = "{what} that mesh axes {axes} of size {parts} divide, and they are {size}"
    WHOLE_ROWS = "whole rows on each device, and those of its keys or queries are split over {axes}"
    # Attention where rows are split by position:
    HEADS_DIVIDE = "for {axes} of size {parts} divide its {heads} heads"
    FEW_HEADS = "for {axes} of size {parts} do not divide its {heads} heads"
    LONG_ROWS = (
        "for {axes} of size {parts} do not divide its {heads} heads, and attention to one device's "
        "keys by {positions} positions takes longer than to send them"
    )
    # Tokens and the experts of other devices:
    SPREAD = "for even routes take a token to {mean} of {places} devices"
    ONE_GRADIENT = "a gradient that is taken once, for its own has no derivative"

    def __call__(self, **facts: Any) -> "Reason":
        return Reason(self, facts)


class Reason(NamedTuple):
    """The reason of a decision.

    >>> print(Why.ROOM(kept_bytes=2**30, memory_bytes=2**36))
    with the state 1.0 GiB of 64.0 GiB would be kept, at most half
    """

    code: Why
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        sizes = {name: human_bytes(x) for name, x in self.facts.items() if name.endswith("bytes")}
        return self.code.value.format(**{**self.facts, **sizes})


class Gathered(NamedTuple):
    """The ``gather`` of :func:`jaxtrain.build_train_step`, and why; no reason without a choice."""

    gather: str | None
    reason: Reason | None = None

    def __str__(self) -> str:
        return f"{'once per step' if self.gather == 'step' else 'layer by layer'}: {self.reason}"


class Kernel(NamedTuple):
    """The attention kernel in use, the one that was wanted, and what that needs and lacks."""

    used: str
    wanted: str
    need: Reason | None = None

    def __str__(self) -> str:
        return self.used if self.need is None else f"{self.used} ({self.wanted} needs {self.need})"


class Positions(NamedTuple):
    """The exchange of attention whose rows are split by position, and why it is this one."""

    exchanged: (
        str  # "heads" for positions, all "keys", or those of one device at a time by a "ring"
    )
    reason: Reason

    def __str__(self) -> str:
        how = {
            "heads": "exchanges positions for heads",
            "keys": "gathers keys and values",
            "ring": "sends keys and values around a ring",
        }
        return f"attention {how[self.exchanged]}, {self.reason}"


class Dispatched(NamedTuple):
    """How tokens meet the experts of other devices, ``"gather"`` or ``"exchange"``, and why."""

    how: str
    reason: Reason

    def __str__(self) -> str:
        how = "are sent to their devices" if self.how == "exchange" else "are gathered"
        return f"tokens {how}, {self.reason}"


@dataclasses.dataclass(frozen=True)
class Reduced:
    """How the gradients of a step are reduced over the axes that split its batch.

    Over the axes ``once`` it is once per step, and over those of ``each``, which split weights or
    gradients, in each microbatch; over all in each, where there is an ``obstacle``. Weights may be
    made whole once per step too, and sums go over fast links first, ``in_shares`` over slow ones.
    """

    once: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    microbatches: int = 1
    gathers_once: bool = False
    in_shares: bool = False
    obstacle: Reason | None = None

    def __str__(self) -> str:
        if self.obstacle is not None:
            return f"in every microbatch, {self.obstacle}"
        found = [f"once per step over {' x '.join(self.once)}"] if self.once else []
        if self.in_shares:
            found[0] += ", on fast links first and in shares over the slow network"
        if self.gathers_once:
            found[0] += ", and weights are gathered once"
        if self.each:
            axes, n = " x ".join(self.each), self.microbatches
            found.append(
                f"over {axes} in each of {n} microbatches, whose weights or gradients it splits"
            )
        return "; ".join(found)


def describe(findings: Mapping[Kind, Sequence[Any]]) -> dict[str, str]:
    """Returns the decisions about a step as reports print them, by their names."""
    return {kind.value: "; ".join(map(str, found)) for kind, found in findings.items()}
