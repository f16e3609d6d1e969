"""Compressed gradients of eight parts of a batch: the loss, and the bytes of a step."""

from experiments.studies.sweep import SMALL, Study

EIGHT = "--compress.parts 8 --compress.name"

STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 300 --optimizer.name adamw",
    settings={
        "all of it": f"{EIGHT} topk --compress.fraction 1",
        "int8": f"{EIGHT} int8",
        "sign": f"{EIGHT} sign",
        "powersgd, rank 8": f"{EIGHT} powersgd --compress.rank 8",
        "powersgd, rank 2": f"{EIGHT} powersgd --compress.rank 2",
        "topk, 5 %": f"{EIGHT} topk --compress.fraction 0.05",
        "topk, 1 %": f"{EIGHT} topk --compress.fraction 0.01",
    },
    shown={"held-out loss": "eval/loss", "exchanged": "train/exchanged_bytes"},
)
