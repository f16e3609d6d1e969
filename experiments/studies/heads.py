"""Number of heads at a fixed width, and of heads that have keys and values of their own."""

from experiments.studies.sweep import SMALL, Study

STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --steps 300",
    settings={
        "1 head": "--heads 1",
        "2 heads": "--heads 2",
        "4 heads": "--heads 4",
        "8 heads": "--heads 8",
        "8 heads, 1 of keys and values": "--heads 8 --kv-heads 1",
    },
    shown={"held-out loss": "eval/loss"},
)
