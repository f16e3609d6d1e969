"""Profiles on demand: a trace of some steps, for steps that are named, for a signal or an alert."""

import signal
import tempfile
import threading

import jax
from etils import epath

from jaxtrain.build import call_end
from jaxtrain.host.paths import is_remote
from jaxtrain.host.storage import why
from jaxtrain.run.context import Run
from jaxtrain.run.folder import TENSORBOARD
from jaxtrain.run.hook import Hook
from jaxtrain.run.observe.journal import TRACE
from jaxtrain.run.observe.profile.trace import FILES
from jaxtrain.state import TrainState

# The steps that a signal or an alert has traced.
STEPS = 5


class Profiling(Hook):
    """Traces steps into ``tensorboard/plugins/profile/``, where TensorBoard's profile plugin looks.

    Steps that are named are traced by all processes into one folder, an alert's by the first
    process, SIGUSR1's by the one that gets it. The devices are waited for before and after, so that
    the trace has these steps alone; their times are left out of the throughput. An evaluation would
    be in it too, and perhaps its compilation, so a trace ends before one. A trace that fails is
    said, and the run goes on.

    It is to come after all other hooks, and its :attr:`ending`, the hook that ends a trace, before
    those that evaluate.
    """

    def __init__(self, run: Run):
        self.run = run
        self.ending = Hook()
        self.ending.on_step = self.end
        named = run.options.profiled
        self._named = named and between_evaluations(*named, every=run.options.eval_every)
        self._joint = False
        self._signalled = threading.Event()
        self._steps: tuple[int, int] | None = None
        self._folder, self._name = epath.Path(), ""
        self._before = None

    def __enter__(self) -> "Profiling":
        on_main = threading.current_thread() is threading.main_thread()
        # What somebody else does with the signal is left to them.
        free = on_main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        if free and self.run.options.handle_signals:
            signal.signal(signal.SIGUSR1, lambda *_: self._signalled.set())
            self._before = signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)
        if self._steps is not None:
            self._end(self.run.journal.step)  # The run ends before the trace would have.

    def on_step(self, step: int, state: TrainState) -> None:
        """Begins a trace that is asked for."""
        last = None if self._steps is not None else self._asked(step)
        if last and step < self.run.steps:
            jax.block_until_ready(state)
            self._begin(step + 1, last)

    def end(self, step: int, state: TrainState) -> None:
        """Ends the trace that has come to its last step."""
        if self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self._end(step)

    def _asked(self, step: int) -> int | None:
        """The last step to trace from the next call on; None where nobody has asked."""
        steps = self.run.steps
        next_end = call_end(step, steps, self.run.steps_per_call)
        self._joint = bool(self._named) and step < self._named[0] <= next_end
        if self._joint:
            return max(self._named[1], next_end)
        wanted = self.run.alerts.wanted
        if self._signalled.is_set() or "trace" in wanted:
            self._signalled.clear()
            wanted.discard("trace")
            every = self.run.options.eval_every or steps
            return min(max(step + STEPS, next_end), step + every - step % every, steps)
        return None

    def _begin(self, first: int, last: int) -> None:
        process, several = jax.process_index(), jax.process_count() > 1
        self._joint &= several
        apart = self._joint or is_remote(self.run.owner.path)
        folder = epath.Path(tempfile.mkdtemp()) if apart else self._kept
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows every call, and says nothing of the devices
        of_process = f"-process-{process}" if process and not self._joint else ""
        options.session_id = name = f"steps-{first}-{last}{of_process}"
        try:
            if process == 0:  # what an attempt with other processes has left of these steps
                (self._kept / "plugins/profile" / name).rmtree(missing_ok=True)
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:
            self.run.progress.note(f"step {first}: no trace can be made: {why(error)}")
            return
        self._steps, self._folder, self._name = (first, last), folder, name
        self.run.rate.pause()

    def _end(self, last: int) -> None:
        first, self._steps = self._steps[0], None
        try:
            jax.profiler.stop_trace()
            made, kept = (x / "plugins/profile" / self._name for x in (self._folder, self._kept))
            if made != kept:
                _move(made, kept, f"process-{jax.process_index()}" if self._joint else None)
        except Exception as error:
            self.run.progress.note(f"step {last}: the trace is lost: {why(error)}")
            return
        finally:
            self.run.rate.pause()
        self.run.journal.event(TRACE, first=first, last=last, folder=str(kept))
        self.run.progress.note(f"steps {first} to {last} are traced in {kept}")

    @property
    def _kept(self) -> epath.Path:
        return self.run.owner.path / TENSORBOARD


def between_evaluations(first: int, last: int, *, every: int) -> tuple[int, int]:
    """Returns the longest stretch of steps without an evaluation between two of them.

    >>> between_evaluations(20, 25, every=20), between_evaluations(20, 25, every=0)
    ((21, 25), (20, 25))
    """
    inner = range(first + -first % every, last, every) if every else ()
    stretches = zip([first, *(step + 1 for step in inner)], [*inner, last], strict=True)
    return max(stretches, key=lambda stretch: stretch[1] - stretch[0])


def _move(folder: epath.Path, to: epath.Path, name: str | None) -> None:
    """Moves a trace's files; with a name what is read alone, for one host's are called alike."""
    to.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if name is None:
            path.copy(to / path.name, overwrite=True)
        elif path.name.endswith(FILES[1:]):
            path.copy(to / f"{name}{FILES[1:]}", overwrite=True)
    folder.parents[2].rmtree()
