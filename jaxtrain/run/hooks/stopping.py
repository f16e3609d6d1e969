"""What ends the loop before its last step, and the sign of life that the watchdog waits for."""

from jaxtrain.run.hooks import Hook
from jaxtrain.run.survive.accidents import ConsecutiveSkips
from jaxtrain.run.survive.preemption import Preemption
from jaxtrain.run.survive.watchdog import Watchdog
from jaxtrain.state import TrainState


class Alive(Hook):
    """Tells the watchdog of every call that is dispatched: that waits for the one before it."""

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog

    def on_step(self, step: int, state: TrainState) -> None:
        del state
        self.watchdog.beat(f"after the dispatch of step {step}")


class Skips(ConsecutiveSkips, Hook):
    """Ends the loop where too many steps in a row were skipped."""

    def stops(self, step: int) -> bool:
        del step
        return self.too_many_at is not None


class Preempting(Preemption, Hook):
    """Ends the loop where all processes have agreed to."""
