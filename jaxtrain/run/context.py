"""What a run is told, and what its parts share while it lasts."""

import dataclasses

from jax.sharding import Mesh

from jaxtrain.experiment import Experiment
from jaxtrain.run.folder import Ownership
from jaxtrain.run.observe.terminal import Progress
from jaxtrain.run.observe.throughput import Throughput
from jaxtrain.run.observe.writers import Writer
from jaxtrain.run.survive.lifeline import Lifeline
from jaxtrain.run.survive.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run lives and how often it reports.

    Args:
      run_dir: Its folder (local, or a bucket such as gs://...); left out, the next free number
        under runs/.
      resume: Continue the run in run_dir; left out, the newest under runs/.
      auto_resume: Resume where run_dir holds a checkpoint, and begin where it holds none yet: one
        command for a run that is started again and again.
      overwrite: Delete the run in run_dir first; files that no run writes stay.
      accept_changes: Resume although these flags, or what else is named, are not as they were: the
        steps to come are then those of another run. "stopped" goes on with a run that a hook has
        stopped on purpose; "all" accepts everything.
      log_every: Steps between lines in the logs.
      eval_every: Steps between evaluations; 0 evaluates only at the end.
      save_every: Steps between checkpoints; 0 for none but the one at the end.
      save_minutes: Minutes between checkpoints, besides those; 0 for none.
      save_best: Save after every evaluation that is the best so far.
      keep: Newest checkpoints to keep; the best one is kept as well.
      handle_signals: Save and exit with code 75 on SIGTERM and SIGINT; a second one stops at once.
      watch_peers: Of several processes, end all where one has died, and stop all at the same step.
      hang_minutes: Exit with code 76 and print all stacks where no step (with --steps-per-call, no
        call) ends for so long; 0 never.
      max_consecutive_skips: Stop where so many steps in a row were not finite or spikes; 0 never.
    """

    run_dir: str | None = None
    resume: bool = False
    auto_resume: bool = False
    overwrite: bool = False
    accept_changes: tuple[str, ...] = ()
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    save_minutes: float = 0.0
    save_best: bool = False
    keep: int = 3
    handle_signals: bool = True
    watch_peers: bool = True
    hang_minutes: float = 30.0
    max_consecutive_skips: int = 20

    def __post_init__(self) -> None:
        least = {"log_every": 1, "eval_every": 0, "save_every": 0, "save_minutes": 0, "keep": 1}
        for name, low in least.items():
            # Written so that NaN is refused too.
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {low}")


@dataclasses.dataclass(frozen=True)
class Run:
    """What the built-in hooks of one run share.

    Args:
      experiment, options: what is trained, and how it is reported.
      mesh: where.
      owner: the claim to the run's folder, ``owner.path``.
      peers: joins the processes.
      watchdog: is told of everything that has ended.
      log: takes values of steps.
      progress: the line of progress, and notes above it.
      rate: times the steps.
    """

    experiment: Experiment
    options: RunOptions
    mesh: Mesh
    owner: Ownership
    peers: Lifeline
    watchdog: Watchdog
    log: Writer
    progress: Progress
    rate: Throughput
