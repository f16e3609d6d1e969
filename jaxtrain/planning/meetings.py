"""Meetings of replicas: the bytes that they send, and the interval that hides a slow network."""

import dataclasses
import math

from jaxtrain.engines.members import AXIS
from jaxtrain.host.memory import human_bytes, human_seconds
from jaxtrain.planning.hlo import Collective, Program
from jaxtrain.planning.roofline import wire_seconds
from jaxtrain.planning.targets import Target

# The largest share of the time that meetings may take where a network counts as hidden.
HIDDEN = 0.05


@dataclasses.dataclass(frozen=True)
class Meetings:
    """The exchange of replicas that meet every so many steps (``--local.*``).

    Args:
      every: steps from one meeting to the next.
      fast, crossing: bytes that one device sends in a meeting over the fast links, and over the
        slow network between slices or hosts.
      seconds: of a meeting's exchange, at the links' bandwidth; None where it is not known.
      step_seconds: of a step without meetings; None where it is not known.
    """

    every: int
    fast: float
    crossing: float
    seconds: float | None = None
    step_seconds: float | None = None

    def least(self, share: float = HIDDEN) -> int | None:
        """Returns the least number of steps between meetings for which meetings that nothing hides
        take at most a share of the time; None where a time is not known.

        >>> Meetings(50, 0.0, 1e9, seconds=0.4, step_seconds=0.1).least(share=0.05)
        76
        """
        if self.seconds is None or not self.step_seconds:
            return None
        # A hair below, since 0.4 (1 - 0.05) is rounded.
        steps = self.seconds * (1 - share) / (share * self.step_seconds) - 1e-9
        return max(1, math.ceil(steps))

    def __str__(self) -> str:
        links = {"the fast links": self.fast, "the slow network": self.crossing}
        bytes_ = lambda sent: human_bytes(round(sent))  # noqa: E731
        per_step = [f"{bytes_(n / self.every)} over {link}" for link, n in links.items() if n]
        text = (
            f"replicas meet every {self.every} steps and send {' and '.join(per_step) or 'nothing'}"
            f" per device and step, {bytes_(self.fast + self.crossing)} in a meeting"
        )
        if (least := self.least()) is None:
            return text
        return (
            f"{text}; a meeting takes {human_seconds(self.seconds)} and a step "
            f"{human_seconds(self.step_seconds)}: from --local.every {least} on, meetings that "
            f"nothing hides take at most {HIDDEN:.0%} of the time"
        )


def between_replicas(collective: Collective) -> bool:
    """Whether a collective goes along the axis of replicas: in a meeting, or of a few scalars."""
    return AXIS in collective.axes


def meetings_of(program: Program, target: Target, every: int) -> Meetings:
    """Adds up the traffic of a meeting from a compiled step, whose traffic is a mean over steps."""
    known = target.chip.link_bytes_per_s is not None
    fast = crossing = seconds = 0.0
    for c in filter(between_replicas, program.collectives):
        times = every * c.executions
        fast += times * (c.sent - c.crossing)
        crossing += times * c.crossing
        if known:
            seconds += times * sum(wire_seconds(c.kind, c.sent, c.crossing, target.chip, 1.0))
    return Meetings(every, fast, crossing, seconds if known else None)
