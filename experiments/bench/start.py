"""Start-up: seconds from nothing to the metrics of step 1 of the default run, without and with
compiled programs on disk.

Each variant is a process of its own, started in turn and ended when it has logged step 1: one with
an empty cache of programs, one with a cache that the row has filled before.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from experiments.bench import Rounds, Variant, row
from jaxtrain.host.paths import read_if_there

COMMAND = [sys.executable, "-m", "experiments.gpt", "--log-every", "1"]


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """A first start of the default run, up to the metrics of step 1, against a later one."""

    rounds: int = 5


class Start:
    """Starts the run and ends it when it has logged step 1.

    Args:
      cache: the folder of compiled programs; left out, an empty one each time.
    """

    def __init__(self, cache: str | None = None):
        self._cache = cache

    def __call__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = pathlib.Path(folder, "run")
            process = subprocess.Popen(
                [*COMMAND, "--run-dir", str(run)],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": self._cache or f"{folder}/cache"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while b"train/loss" not in read_if_there(run / "log.jsonl"):
                if process.poll() is not None:
                    raise SystemExit(f"the run ended with {process.returncode}: {COMMAND}")
                time.sleep(0.005)
            process.kill()
            process.wait()


def main(config: Config) -> None:
    """Runs the row and prints it."""
    with tempfile.TemporaryDirectory() as filled:
        starts = {"empty cache": Start(), "filled cache": Start(filled)}
        variants = {name: Variant(start) for name, start in starts.items()}
        row("start", config, variants, {"run": " ".join(COMMAND[1:])}, children=True)
