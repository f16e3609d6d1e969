"""Four workers, one of them four times as slow: synchronous, asynchronous and local updates."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.studies.sweep import CURVES, SMALL, Rows, Study, apart
from jaxtrain.methods.asynchrony import Workers, simulate

LOSS, SYNCHRONOUS, LOCAL = "held-out loss", "synchronous", "local updates, a meeting in 20 steps"
SPEEDS, MEETING = (1.0, 1.0, 1.0, 4.0), 20
WORKERS = "--workers.seconds 1 1 1 4"
LATE = f"{WORKERS} --workers.late 32"


def seconds(name: str, logged: Mapping[str, Any], size: int, steps: np.ndarray) -> np.ndarray:
    """Simulated seconds: of the log, or of replicas, each with a quarter of a batch, which wait
    for the slowest where they meet."""
    if name != LOCAL:
        return np.interp(steps, logged["train/seconds"].steps, logged["train/seconds"].values)
    updates = int(steps[-1])
    each = [simulate(Workers((s,)), updates, seed=i).seconds_U for i, s in enumerate(SPEEDS)]
    passed = np.diff(np.stack(each)[:, MEETING - 1 :: MEETING] / len(SPEEDS), prepend=0.0)
    at = MEETING * np.arange(1, passed.shape[1] + 1)
    return np.interp(steps, at, np.cumsum(passed.max(axis=0)))


def sent(name: str, logged: Mapping[str, Any], size: int, steps: np.ndarray) -> np.ndarray:
    """MiB between workers and a server: gradients there and parameters back, or replicas both ways
    where they meet."""
    del logged
    late = name.startswith("asynchronous")
    times = 1 if late else len(SPEEDS) / MEETING if name == LOCAL else len(SPEEDS)
    return steps * times * 2 * 4 * size / 2**20


def conclude(rows: Rows) -> str:
    """Says what each form costs and gains."""
    ends = {name: np.mean([curve[-1][-1] for curve in row[CURVES]]) for name, row in rows.items()}
    told = (
        f"{name}: {apart(rows, name, SYNCHRONOUS, LOSS)} in {end / ends[SYNCHRONOUS]:.2f} of the "
        "seconds"
        for name, end in list(ends.items())[1:]
    )
    return f"Against synchronous updates, {'; '.join(told)}."


STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 300 --eval-every 20 "
    "--optimizer.name adamw",
    settings={
        SYNCHRONOUS: f"{WORKERS} --workers.backup 0",
        "without the slowest": f"{WORKERS} --workers.backup 1",
        LOCAL: f"--local.replicas 4 --local.every {MEETING}",
        "asynchronous": LATE,
        "asynchronous, a third of the rate": f"{LATE} --optimizer.learning-rate 0.001",
        "asynchronous, tempered": f"{LATE} --workers.temper 0.5",
        "asynchronous, at most 4 late": f"{WORKERS} --workers.late 4",
        "asynchronous, at most 2 ahead": f"{LATE} --workers.bound 2",
    },
    shown={LOSS: "eval/loss"},
    conclude=conclude,
    over={"steps": lambda name, logged, size, steps: steps, "MiB sent": sent, "seconds": seconds},
)
