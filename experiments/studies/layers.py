"""Depth against width, with about as many parameters in the layers."""

from experiments.studies.sweep import SMALL, Study

STUDY = Study(
    flags=f"{SMALL} --steps 300",
    settings={
        "1 layer, 128 wide": "--layers 1 --width 128 --heads 8",
        "2 layers, 88 wide": "--layers 2 --width 88 --heads 4",
        "4 layers, 64 wide": "--layers 4 --width 64 --heads 4",
        "16 layers, 32 wide": "--layers 16 --width 32 --heads 2",
    },
    shown={"held-out loss": "eval/loss"},
)
