"""Snapshots of a run in the memory of its hosts, between two checkpoints on storage.

A snapshot is a checkpoint in ``hosts://`` (:mod:`jaxtrain.host.hosts_memory`): it counts when every
process has written its part and the copy of that, and it is compared with its checksums when it is
read. The hosts hold one, and a second while that is being written.
"""

import contextlib
from collections.abc import Callable

import jax

from jaxtrain.host import distributed, hosts_memory, storage
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError
from jaxtrain.run.checkpoints.reader import in_all_processes
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Hook
from jaxtrain.run.hooks.saving import save
from jaxtrain.run.observe.journal import FROM_MEMORY, SAVE_FAILED, Journal
from jaxtrain.run.observe.terminal import print_lines
from jaxtrain.state import TrainState


class Snapshots(Hook, contextlib.AbstractContextManager):
    """Takes a snapshot after every ``memory_every`` steps of a run while it is open; one that fails
    is an event, the first of them a line too, and the run goes on."""

    def __init__(self, run: Run):
        self.run, self._memory, self._told = run, _memory_of(run.journal), False

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(storage.StorageError):  # A run that ends needs no snapshot.
            self._memory.__exit__(*error)

    def on_step(self, step: int, state: TrainState) -> None:
        if step % self.run.options.memory_every or step == self.run.steps:
            return
        with self.run.journal.ledger.phase("save"):
            try:
                save(self.run, self._memory, step, state)
            except storage.StorageError as error:
                self.run.journal.event(SAVE_FAILED, error=str(error))
                if not self._told:
                    self.run.progress.note(f"warning: {error}; the run continues without it")
                self._told = True


def newest_snapshot(
    journal: Journal, read: Callable[[Checkpointer, int], TrainState], *, newer_than: int | None
) -> TrainState | None:
    """Reads the newest snapshot of a run that is whole; all processes call it alike.

    Args:
      journal: of the run, and open.
      read: reads a step of a directory of checkpoints.
      newer_than: the newest checkpoint on storage, if any.

    Returns:
      The state; None where there is no snapshot of that step or a later one. Snapshots that cannot
      be read are told in a sentence each, and deleted.
    """
    memory, on_storage = _memory_of(journal), -1 if newer_than is None else newer_than
    for step in reversed([step for step in memory.steps() if step >= on_storage]):
        since = storage.now()
        try:
            with journal.ledger.phase("restore"):
                state = read(memory, step)
        except (DamagedCheckpointError, storage.StorageError) as error:
            print_lines([f"warning: {error}; this copy in memory is not used"])
            if jax.process_index() == 0:
                (memory.directory / str(step)).rmtree(missing_ok=True)
            in_all_processes([0])  # all wait until it is gone
            continue
        seconds = round(storage.now() - since, 3)
        journal.event(FROM_MEMORY, step=step, seconds=seconds, newest_checkpoint=newer_than)
        print_lines([f"step {step} was read from the memory of the hosts in {seconds:.1f} s"])
        return state
    return None


def _memory_of(journal: Journal) -> Checkpointer:
    """The snapshots of the run that a journal is of."""
    identity = distributed.from_first_process(lambda: journal.identity)
    return Checkpointer(f"{hosts_memory.SCHEME}://{identity}/snapshots", keep=1, keep_best=0)
