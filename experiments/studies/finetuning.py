"""Whole weights, low-rank additions or the last layer tuned on new text, and what is forgotten."""

import sysconfig

from experiments.studies.sweep import SMALL, Rows, Study, apart, mean

SIZE, BEGUN = "--layers 2 --width 64 --heads 2", "--init-from {study}/begun/trial-0"
NEW, OLD, SCRATCH, UNTUNED = "new text's loss", "old text's loss", "from scratch", "untuned"


def conclude(rows: Rows) -> str:
    """Names the best on the new text, and says how much of the old text each forgets."""
    tuned = [name for name in rows if name not in (SCRATCH, UNTUNED)]
    best = min(tuned, key=lambda name: mean(rows, name, NEW))
    forgotten = (f"{apart(rows, name, UNTUNED, OLD)} by {name}" for name in tuned)
    return (
        f"On the new text {best} has the lowest loss, {apart(rows, best, SCRATCH, NEW)} against "
        f"{SCRATCH}. The loss of the old text changes by {', '.join(forgotten)}."
    )


STUDY = Study(
    flags=f"{SMALL} --data {sysconfig.get_path('include')} --also-held-out python --steps 200 "
    "--optimizer.name adamw",
    begins=f"{SMALL} {SIZE} --steps 600",
    settings={
        SCRATCH: f"{SIZE} --optimizer.learning-rate 0.01",
        UNTUNED: f"{BEGUN} --optimizer.learning-rate 0",
        "all weights": f"{BEGUN} --optimizer.learning-rate 0.003",
        "additions of rank 8": f"{BEGUN} --lora.rank 8 --optimizer.learning-rate 0.01",
        "the last layer": f"{BEGUN} --optimizer.rate-multipliers ^embed/=0 ^blocks/=0,1 "
        "--optimizer.learning-rate 0.003",
    },
    shown={NEW: "eval/loss", OLD: "eval/old/loss"},
    conclude=conclude,
)
