"""A policy that learns from its own answers, sampled exactly, or by parameters that are rounded."""

from experiments.studies.sweep import SMALL, Rows, Study, apart, mean

WRONG, UNTRAINED, EXACT, ROUNDED = "wrong answers", "untrained", "exact", "bfloat16"
GAP, BEGUN = "sampler gap", "--init-from {study}/begun/trial-0"


def conclude(rows: Rows) -> str:
    """Says how many fewer answers are wrong, and what a rounded sampler changes."""
    more = (f"{apart(rows, name, UNTRAINED, WRONG)} with {name}" for name in rows)
    return (
        f"The share of {WRONG} changes by {', '.join(list(more)[1:])}. The log-probability of a "
        f"token in training is that of the exact sampler to {mean(rows, EXACT, GAP):g} nats, and "
        f"that of a rounded one to {mean(rows, ROUNDED, GAP):.2g}, with which the share of {WRONG} "
        f"is {apart(rows, ROUNDED, EXACT, WRONG)} from the exact one's."
    )


STUDY = Study(
    module="experiments.grpo",
    begins=f"{SMALL} --layers 2 --width 96 --heads 2 --steps 600",
    flags="--steps 40 --log-every 5",
    settings={
        UNTRAINED: f"{BEGUN} --optimizer.learning-rate 0 --steps 1",
        EXACT: f"{BEGUN} --sampler exact",
        ROUNDED: f"{BEGUN} --sampler bfloat16",
        "bfloat16, capped": f"{BEGUN} --sampler bfloat16 --grpo.cap 2",
    },
    shown={WRONG: "eval/loss", GAP: "train/sampler_gap"},
    traces={"sampler gap, nats": "train/sampler_gap", "reward": "train/reward"},
    conclude=conclude,
)
