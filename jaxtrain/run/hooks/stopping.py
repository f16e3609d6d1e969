"""The early end of a run: agreed on by all processes, and known when it is resumed."""

import json
from collections.abc import Sequence

from etils import epath

from jaxtrain.host import distributed, storage
from jaxtrain.host.exit_codes import ALERTED, DONE, PREEMPTED
from jaxtrain.host.paths import read_if_there
from jaxtrain.run.folder import STOPPED
from jaxtrain.run.hook import Ending, Hook
from jaxtrain.run.observe import terminal
from jaxtrain.run.observe.alerts import Alerts
from jaxtrain.run.survive.peer_group import PeerGroup


def ending(step: int, hooks: Sequence[Hook], peers: PeerGroup, alerts: Alerts) -> Ending | None:
    """Returns how the loop ends after ``step``, just dispatched, or None.

    Every process must call it; all receive the same answer. The wish of one hook of the user's, in
    any process, becomes the agreement of all, as does that of a signal or of an alert in the first
    process.
    """
    for hook in hooks:
        if answer := hook.stops(step):
            named = f"{type(hook).__name__} asked for it"
            peers.want_stop(answer if isinstance(answer, str) else named)
    if not peers.stops(step):
        return None
    if peers.reason is None:
        return Ending(PREEMPTED, step)
    alerted = distributed.from_first_process(lambda: alerts.stopped_for == peers.reason)
    return Ending(ALERTED if alerted else DONE, step, peers.reason)


def stopped_before(run_dir: epath.Path, step: int, *, go_on: bool) -> Ending | None:
    """Returns how a run was stopped on purpose after this very step, that of its newest checkpoint,
    and says so; with ``go_on`` forgets it, and returns None."""

    def read() -> dict | None:
        path = run_dir / STOPPED
        text = read_if_there(path)
        stop = json.loads(text) if text else None
        # What is forgotten is not to be found where the run, on its way on, comes to that step.
        if stop is not None and (go_on or stop.get("step") != step):
            path.unlink(missing_ok=True)
            return None
        return stop

    what = f"the look for {run_dir / STOPPED}"
    stop = distributed.from_first_process(lambda: storage.retrying(read, what))
    if stop is None:
        return None
    terminal.print_lines(
        [
            f"{run_dir} was stopped on purpose after step {step} ({stop['reason']}) and is trained "
            "no further: to go on, give --accept-changes stopped"
        ]
    )
    return Ending(stop.get("code", DONE), step, stop["reason"])
