"""Importing the package, against importing what it is built on, each in a process of its own."""

import dataclasses
import functools
import subprocess
import sys

from experiments.bench import Rounds, Variant, row

CODE = {
    "jax, flax.nnx, optax": "import jax, flax.nnx, optax",
    "jaxtrain": "import jaxtrain",
}


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Importing jaxtrain, against importing jax, flax.nnx and optax."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    variants = {
        name: Variant(functools.partial(subprocess.run, [sys.executable, "-c", code], check=True))
        for name, code in CODE.items()
    }
    row("imports", config, variants, {"code": CODE}, children=True)
