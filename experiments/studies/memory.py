"""Accumulation and rematerialisation: the same loss, less memory, more time."""

from experiments.studies.sweep import APART, Rows, Study, mean


def conclude(rows: Rows) -> str:
    """Says what the smallest step costs."""
    first, least = next(iter(rows)), min(rows, key=lambda name: mean(rows, name, "temporaries"))
    less, time = (mean(rows, least, c) / mean(rows, first, c) for c in ("temporaries", "CPU time"))
    return (
        f"{least} needs {less:.2f} of the temporaries of {first}, and {time:.2f} of its CPU time. "
        f"Losses of steps differ by {max(mean(rows, name, APART) for name in rows):.1g} at most."
    )


STUDY = Study(
    flags="--layers 4 --width 128 --heads 4 --seq-len 128 --global-batch 8 --steps 24",
    settings={
        f"accumulate {parts}, remat {kept}": f"--accumulate {parts} --remat {kept}"
        for parts in (1, 4)
        for kept in ("none", "dots", "full")
    },
    shown={
        "held-out loss": "held_out",
        APART: APART,
        "temporaries": "temporary_bytes",
        "CPU time": "cpu_ratio",
    },
    conclude=conclude,
    seeds=1,
    in_turns=True,
)
