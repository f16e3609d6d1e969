"""Four workers, one of them four times as slow: synchronous, asynchronous and local updates."""

from experiments.studies.sweep import SMALL, Rows, Study, apart, mean

LOSS, SECONDS, SYNCHRONOUS = "held-out loss", "simulated seconds", "synchronous"
WORKERS = "--workers.seconds 1 1 1 4"
LATE = f"{WORKERS} --workers.late 32"


def conclude(rows: Rows) -> str:
    """Says what each form costs and gains."""
    told = (
        f"{name}: {apart(rows, name, SYNCHRONOUS, LOSS)} in "
        f"{mean(rows, name, SECONDS) / mean(rows, SYNCHRONOUS, SECONDS):.2f} of the seconds"
        for name in list(rows)[1:]
    )
    return f"Against synchronous updates, {'; '.join(told)}."


STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 300 --optimizer.name adamw",
    settings={
        SYNCHRONOUS: f"{WORKERS} --workers.backup 0",
        "without the slowest": f"{WORKERS} --workers.backup 1",
        "asynchronous": LATE,
        "asynchronous, a third of the rate": f"{LATE} --optimizer.learning-rate 0.001",
        "asynchronous, tempered": f"{LATE} --workers.temper 0.5",
        "asynchronous, at most 4 late": f"{WORKERS} --workers.late 4",
        "asynchronous, at most 2 ahead": f"{LATE} --workers.bound 2",
    },
    shown={LOSS: "eval/loss", SECONDS: "train/seconds", "delay": "train/delay"},
    conclude=conclude,
)
