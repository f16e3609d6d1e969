"""Dtypes of the compute and of the parameters: the loss, and the memory of the compiled step."""

from experiments.studies.sweep import SMALL, Study, lowest

NOTE = "A CPU's compiler widens bfloat16; the memory of a chip is that of jaxtrain plan --target."

STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 300",
    settings={
        "float32": "--precision f32",
        "bfloat16": "--precision bf16",
        "float16, scaled loss": "--precision fp16",
        "all in bfloat16": "--precision pure_bf16",
    },
    # Times of low precision on a CPU say nothing of a chip's, so none are shown.
    shown={
        "held-out loss": "held_out",
        "compiled": "compiled_bytes",
        "temporaries": "temporary_bytes",
    },
    conclude=lambda rows: f"{lowest(rows)}\n{NOTE}",
    in_turns=True,
)
