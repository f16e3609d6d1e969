"""A policy that learns sums of two numbers of two digits by rewards of its own answers."""

from experiments.studies.samplers import BEGUN, UNTRAINED, WRONG
from experiments.studies.sweep import Study

STUDY = Study(
    module="experiments.grpo",
    begins="--data sums --seq-len 64 --global-batch 16 --sample-tokens 0 --layers 2 --width 96 "
    "--heads 2 --steps 400",
    flags="--data sums --prompt-tokens 7 --new-tokens 4 --global-batch 64 --grpo.size 16 "
    "--optimizer.learning-rate 1e-3 --optimizer.b2 0.99 --steps 150 --log-every 5",
    settings={
        UNTRAINED: f"{BEGUN} --optimizer.learning-rate 0 --steps 1",
        "rewarded": BEGUN,
    },
    shown={WRONG: "eval/loss"},
    traces={"right answers to prompts of training": "train/reward"},
)
