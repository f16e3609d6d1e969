"""A policy that learns from its own answers, sampled exactly, or by parameters that are rounded."""

from experiments.studies.sweep import SMALL, Rows, Study, apart, mean

RIGHT, UNTRAINED, EXACT, ROUNDED = "right answers", "untrained", "exact", "bfloat16"
BEGUN = "--init-from {study}/begun/trial-0"


def conclude(rows: Rows) -> str:
    """Says how many more answers are right, and what a rounded sampler changes."""
    more = (f"{apart(rows, name, UNTRAINED, RIGHT)} with {name}" for name in rows)
    gap = mean(rows, ROUNDED, "sampler gap")
    return (
        f"The share of {RIGHT} changes by {', '.join(list(more)[1:])}. The log-probability of a "
        f"token in training is that of the exact sampler to {mean(rows, EXACT, 'sampler gap'):g} "
        f"nats, and that of a rounded one to {gap:.2g}: {apart(rows, ROUNDED, EXACT, RIGHT)}."
    )


STUDY = Study(
    module="experiments.grpo",
    begins=f"{SMALL} --layers 2 --width 96 --heads 2 --steps 600",
    flags="--steps 40 --eval-every 0 --log-every 5",
    settings={
        UNTRAINED: f"{BEGUN} --optimizer.learning-rate 0 --steps 1",
        EXACT: f"{BEGUN} --sampler exact",
        ROUNDED: f"{BEGUN} --sampler bfloat16",
        "bfloat16, capped": f"{BEGUN} --sampler bfloat16 --grpo.cap 2",
    },
    shown={
        "wrong answers": "eval/loss",
        RIGHT: "eval/reward",
        "sampler gap": "train/sampler_gap",
        "ratio": "train/sampler_ratio",
    },
    conclude=conclude,
)
