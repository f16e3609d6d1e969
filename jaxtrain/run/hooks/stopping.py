"""What ends the loop before its last step, and the sign of life that the watchdog waits for."""

import json

from etils import epath

from jaxtrain.host import distributed
from jaxtrain.run.folder import STOPPED
from jaxtrain.run.hooks import Hook
from jaxtrain.run.observe import terminal
from jaxtrain.run.survive.accidents import ConsecutiveSkips
from jaxtrain.run.survive.lifeline import Lifeline
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


class Agreeing(Hook):
    """A user's hook, whose wish to end the run becomes the agreement of all processes."""

    def __init__(self, hook: Hook, peers: Lifeline):
        self.on_step, self.on_metrics = hook.on_step, hook.on_metrics
        self.on_evaluation = hook.on_evaluation
        self.hook, self.peers = hook, peers

    def stops(self, step: int) -> bool:
        if answer := self.hook.stops(step):
            named = f"{type(self.hook).__name__} asked for it"
            self.peers.want_stop(answer if isinstance(answer, str) else named)
        return False  # Preempting hears of it, in all processes.


def stopped_before(run_dir: epath.Path, step: int, *, go_on: bool) -> str | None:
    """Returns why a run was stopped on purpose after this very step, and says so.

    Args:
      run_dir: the run's folder.
      step: the one that its newest checkpoint is of.
      go_on: forgets it, and returns None.
    """

    def read() -> str:
        path = run_dir / STOPPED
        if not path.exists():
            return "{}"
        if go_on:
            path.unlink()
        return "{}" if go_on else path.read_text()

    stop = json.loads(distributed.from_first_process(read))
    if stop.get("step") != step:
        return None
    terminal.print_lines(
        [
            f"{run_dir} was stopped on purpose after step {step} ({stop['reason']}) and is trained "
            "no further: to go on, give --accept-changes stopped"
        ]
    )
    return stop["reason"]
