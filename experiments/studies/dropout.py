"""Rate of dropout on little text, read many times, and on much text, read once."""

import sysconfig

from experiments.studies.sweep import SMALL, Rows, Study, apart

# No file of the package `json` is among the standard library's held-out ones.
TEXTS = {"little text": f"{sysconfig.get_path('stdlib')}/json", "much text": "python"}
LOSS, RATES = "held-out loss", ("0", "0.2")


def conclude(rows: Rows) -> str:
    """Compares the last rate with none on both texts."""
    told = (f"{apart(rows, f'{x}, {RATES[-1]}', f'{x}, 0', LOSS)} on {x}" for x in TEXTS)
    return f"Dropout of {RATES[-1]} changes the {LOSS} by {' and '.join(told)}."


STUDY = Study(
    flags=f"{SMALL} --layers 2 --width 64 --heads 2 --steps 400 --also-held-out python",
    settings={
        f"{text}, {rate}": f"--data {path} --dropout {rate}"
        for text, path in TEXTS.items()
        for rate in RATES
    },
    shown={LOSS: "eval/old/loss"},
    conclude=conclude,
)
