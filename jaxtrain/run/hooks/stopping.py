"""A run that a hook has ended on purpose: agreed on by all processes, and known when resumed."""

import json

from etils import epath

from jaxtrain.host import distributed
from jaxtrain.run.folder import STOPPED
from jaxtrain.run.hooks import Hook
from jaxtrain.run.observe import terminal
from jaxtrain.run.survive.lifeline import Lifeline


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
        return False  # Preemption hears of it, in all processes.


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
        text = path.read_text()
        # What is forgotten is not to be found where the run, on its way on, comes to that step.
        if go_on or json.loads(text).get("step") != step:
            path.unlink()
            return "{}"
        return text

    stop = json.loads(distributed.from_first_process(read))
    if not stop:
        return None
    terminal.print_lines(
        [
            f"{run_dir} was stopped on purpose after step {step} ({stop['reason']}) and is trained "
            "no further: to go on, give --accept-changes stopped"
        ]
    )
    return stop["reason"]
