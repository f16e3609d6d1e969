"""Synchronous training against replicas that train by themselves and meet now and then."""

from experiments.studies.sweep import SMALL, Rows, Study, apart

LOSS, SYNCHRONOUS = "held-out loss", "synchronous"
FOUR = "--local.replicas 4 --local.every"


def conclude(rows: Rows) -> str:
    """Says what each form of local updates costs."""
    told = (f"{apart(rows, name, SYNCHRONOUS, LOSS)} with {name}" for name in rows)
    return f"Four replicas change the {LOSS} by {', '.join(list(told)[1:])}."


STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 600 --optimizer.name adamw",
    settings={
        SYNCHRONOUS: "",
        "the mean of every 5 steps": f"{FOUR} 5",
        "the mean of every 50 steps": f"{FOUR} 50",
        "nesterov of every 50 steps": f"{FOUR} 50 --local.outer nesterov",
        "the same by halves": f"{FOUR} 50 --local.outer nesterov --local.fragments 2",
    },
    shown={LOSS: "eval/loss"},
    conclude=conclude,
)
