"""Start-up: seconds to step 1 of the default run, without and with compiled programs on disk.

Each variant is a process of its own, started in turn: one with an empty cache of programs, one with
a cache that the row has filled before.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile

from experiments.bench import Variant, interleave, print_row

COMMAND = [sys.executable, "-m", "experiments.gpt", "--steps", "1", "--sample-tokens", "0"]


@dataclasses.dataclass(frozen=True)
class Config:
    """A first start of the default run, up to the end of step 1, against a later one."""

    rounds: int = 3
    """Timed rounds."""
    held_out_bytes: int = 20_000
    """Held-out text, which both evaluate when they are done."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    with tempfile.TemporaryDirectory() as folder:
        filled = os.path.join(folder, "filled")

        def start(cache: str | None) -> Variant:
            def run() -> None:
                with tempfile.TemporaryDirectory() as empty:
                    subprocess.run(
                        [
                            *COMMAND,
                            *("--held-out-bytes", str(config.held_out_bytes)),
                            *("--run-dir", os.path.join(empty, "run")),
                        ],
                        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache or empty},
                        check=True,
                        capture_output=True,
                    )

            return Variant(run, {})

        variants = {"empty cache": start(None), "filled cache": start(filled)}
        results = interleave(variants, rounds=config.rounds)
    for result in results.values():
        # That of this process, which only waits.
        del result["cpu_ratio"]
    print_row("start", {"run": " ".join(COMMAND[1:])}, results)
