"""The check of a run's receipts: the chain, the checkpoints, and any segment repeated.

A segment is restored from the save before it, trained on the rows of its steps, and compared leaf
by leaf with its receipt, so nobody needs to trust whoever ran it. Other layouts, versions and chips
round differently: the lines say which of these are others here.
"""

import os
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from jaxtrain import build
from jaxtrain.experiment import Experiment
from jaxtrain.host.paths import as_path
from jaxtrain.run import receipts
from jaxtrain.run.checkpoints.checkpointer import leaf_digests
from jaxtrain.run.checkpoints.leaves import leaves_by_path, raw_array
from jaxtrain.run.checkpoints.manifest import is_stored
from jaxtrain.run.checkpoints.reader import Reader
from jaxtrain.run.folder import CHECKPOINTS, RECEIPTS
from jaxtrain.run.loop import train_loop
from jaxtrain.run.provenance import make_record
from jaxtrain.run.receipts import Segment
from jaxtrain.run.replay import load_run, state_of
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree


def check_run(run_dir: epath.PathLike) -> tuple[list[str], list[str]]:
    """Checks the chain of a run and every checkpoint that it keeps, without any code of the run.

    Returns:
      Lines that say what there is, and sentences on what is wrong.

    Raises:
      FileNotFoundError: the folder has no receipts.
      DamagedCheckpointError: a checkpoint is damaged.
    """
    lines, faults = _chain(run_dir)
    if faults:
        return [], faults
    checkpoints = Reader(as_path(run_dir) / CHECKPOINTS)
    checkpoints.check_sound()
    told, kept = [receipts.describe(lines)], {0, *checkpoints.steps()}
    for each in receipts.segments(lines):
        first, last, wanted = each.first["step"], each.last["step"], each.last["leaves"]
        for name, leaf in checkpoints.leaves(last) if last in kept else ():
            if wanted.get(name) != leaf_digests({name: leaf})[name]:
                faults.append(f"checkpoint {last} is not the state of its receipt: {name}")
        told.append(
            f"segment {each.number}: steps {first + 1} to {last}, state {each.last['state'][:16]}, "
            f"{'can' if first in kept else 'cannot'} be repeated"
        )
    return told, faults


def repeat(
    run_dir: epath.PathLike, number: int, *, module: str | None, flags: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Trains one segment of a run again and compares it with its receipt, bit for bit.

    Args:
      run_dir: the run's folder, in which nothing changes.
      number: the segment's number, from 1.
      module: the run's experiment, as for :func:`jaxtrain.run.replay.load_run`.
      flags: flags of the experiment that come in the place of the run's, such as another mesh's.

    Returns:
      Lines that say what was done, and sentences on what is not as the receipt has it.

    Raises:
      FileNotFoundError: the folder has no receipts.
      ValueError: there is no such segment, or the checkpoint from which it began is gone.
    """
    lines, faults = _chain(run_dir)
    if faults:
        return [], faults
    chain = receipts.segments(lines)
    if not 1 <= number <= len(chain):
        raise ValueError(f"`segment` is {number}: the run has segments 1 to {len(chain)}")
    segment = chain[number - 1]
    start, end = segment.first["step"], segment.last["step"]
    # Before JAX starts, because flags may simulate devices, and XLA's sums depend on its threads.
    threads = segment.start["record"].get("provenance", {}).get("threads")
    if isinstance(threads, int) and not flags:
        os.environ.setdefault("NPROC", str(threads))
    experiment = load_run(run_dir, module, step=start + 1, flags=flags)
    checkpoints = Reader(as_path(run_dir) / CHECKPOINTS)
    kept = {0, *checkpoints.steps()}
    if start not in kept:
        others = ", ".join(str(each.number) for each in chain if each.first["step"] in kept)
        raise ValueError(
            f"`segment` is {number}: checkpoint {start}, from which it began, has been deleted "
            f"(`keep`); segments that can be repeated: {others or 'none'}"
        )
    mesh = build.make_experiment_mesh(experiment)
    state, distances = state_of(experiment, mesh, checkpoints, start or None), []
    if other := _unequal(experiment, state, segment.first):
        faults = [receipts.listed(f"step {start} does not begin with its receipt's state", other)]
    else:
        state, faults = _trained(experiment, mesh, state, segment)
        if other := _unequal(experiment, state, segment.last):
            faults.append(receipts.listed(f"the state of step {end} has other bits", other))
            if end in kept:
                saved = state_of(experiment, mesh, checkpoints, end)
                distances = _distances(state, saved)
    kind = "other" if faults else "the same"
    told = f"segment {number}: steps {start + 1} to {end} repeated: {kind} bits"
    now = receipts.surroundings(make_record(experiment, mesh))
    changed = receipts.differences(segment.start, now) or ["nothing that a receipt records"]
    return [told, *distances, *(f"changed since: {each}" for each in changed)], faults


def _chain(run_dir: epath.PathLike) -> tuple[list[receipts.Line], list[str]]:
    """Reads and checks a run's chain; returns its lines, and what is wrong with it."""
    lines = receipts.read(run_dir)
    if not lines:
        raise FileNotFoundError(f"{run_dir} has no {RECEIPTS}: the run was made without --receipt")
    return lines, [f"{RECEIPTS}: {fault}" for fault in receipts.check(lines)]


def _unequal(experiment: Experiment, state: TrainState, line: receipts.Line) -> list[str]:
    leaves = leaf_digests(build.to_checkpoint(experiment, state))
    return receipts.unequal(line, {"leaves": leaves})


def _trained(
    experiment: Experiment, mesh: Mesh, state: TrainState, segment: Segment
) -> tuple[TrainState, list[str]]:
    """Trains over a segment; returns its last state, and the first step whose rows are others."""
    start, end, rows = segment.first["step"], segment.last["step"], []
    train, _ = build.compile_loop(experiment, state, mesh, start, end)
    lies = build.stream_shardings(experiment, mesh)
    with experiment.train_batches(start, lies) as batches:

        def noted() -> Iterator[PyTree]:
            for batch, digest in receipts.with_digests(batches):
                rows.append(digest)
                yield batch

        calls = {"steps": end, "steps_per_call": experiment.layout.steps_per_call}
        state = train_loop(train, state, noted(), **calls)
    pairs = enumerate(zip(rows, segment.last["rows"], strict=True), start + 1)
    other = [step for step, (found, then) in pairs if found != then]
    return state, [f"the rows of step {other[0]} are others than in the receipt"] if other else []


def _distances(found: TrainState, saved: TrainState) -> list[str]:
    """Says by how much the leaves differ that differ most, of two states in one order."""
    rows, others = [], leaves_by_path(saved)
    for name, leaf in leaves_by_path(found).items():
        if is_stored(leaf):
            a, b = (raw_array(x).astype(jnp.float32) for x in (leaf, others[name]))
            largest, size = float(jnp.abs(a - b).max()), float(jnp.abs(b).max())
            rows.append((largest / (size or 1.0), f"{name}: off by {largest:.3g} of {size:.3g}"))
    return [text for part, text in sorted(rows, reverse=True)[:5] if part]
