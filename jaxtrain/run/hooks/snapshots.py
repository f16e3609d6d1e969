"""Snapshots of a run in the memory of its hosts, between two checkpoints on storage.

A snapshot is a checkpoint in ``hosts://`` (:mod:`jaxtrain.host.hosts_memory`): it counts when every
process has written its part and the copy of that, and it is compared with its checksums when it is
read. The hosts hold one, and a second while that is being written.
"""

import contextlib
from collections.abc import Callable

from jaxtrain.host import distributed, hosts_memory, storage
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Hook
from jaxtrain.run.hooks.saving import save
from jaxtrain.run.observe.journal import FROM_MEMORY, SAVE_FAILED, Journal
from jaxtrain.run.observe.terminal import print_lines
from jaxtrain.state import TrainState


class Snapshots(Hook, contextlib.AbstractContextManager):
    """Takes a snapshot after every ``memory_every`` steps of a run while it is open; one that fails
    is an event, the first of them a line too, and the run goes on. Snapshots after step ``start``
    are deleted: the run continues from before them, where a newer checkpoint is damaged."""

    def __init__(self, run: Run, start: int):
        self.run, self._memory, self._told = run, _memory_of(run.journal), False
        self._memory.drop_after(start)

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
    """Returns the newest snapshot of a run that is whole, if it is none before the checkpoint
    ``newer_than`` on storage; ``read`` reads a step of a directory. One that cannot be read is
    told in a sentence, and deleted. All processes call it alike."""
    with _memory_of(journal) as memory, journal.ledger.phase("restore"):
        for step in reversed(memory.steps()):
            if newer_than is not None and step < newer_than:
                break
            since = storage.now()
            try:
                state = read(memory, step)
            except (DamagedCheckpointError, storage.StorageError) as error:
                print_lines([f"warning: {error}; this copy in memory is not used"])
                memory.drop_after(step - 1)
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
