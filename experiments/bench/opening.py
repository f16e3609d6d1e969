"""Opening a token store of the size of a training run, in a process of its own, and reading it at
random: seconds, memory, tokens per second. The store is made first, of random bytes."""

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from experiments.bench import Rounds, print_row
from jaxtrain import data

# What every process of a run does with the store, after its imports.
CHILD = """
import json, sys, time
from jaxtrain import data

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))

before, own = resident("VmRSS"), resident("RssAnon")
begun = time.perf_counter()
text = data.open_data(sys.argv[1])
rows = text.rows(1024)
text.held_out(300_000)
batches = data.Batches(rows, global_batch=16, seed=0)
batches.batch(0)
opened = time.perf_counter()
found = {"seconds": opened - begun, "mib": resident("VmRSS") - before}
count = int(sys.argv[2])
for step in range(1, count + 1):
    batches.batch(step)
found["tokens_per_second"] = count * 16 * 1024 / (time.perf_counter() - opened)
# Pages of the files that were read are the system's, which takes them back at need.
print(json.dumps(found | {"own_mib_after_batches": resident("RssAnon") - own}))
"""


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Opening a store, and reading it at random, in a process of its own."""

    tokens: int = 10**9
    """Approximate number of tokens in the store; each takes two bytes in the temporary folder."""
    mean: int = 1000
    """Bytes of a document."""
    batches: int = 300
    """Batches of 16 x 1024 tokens to read."""
    rounds: int = 5


def main(config: Config) -> None:
    """Runs the row and prints it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        held_out = config.tokens // 20
        sides = (config.tokens - held_out, held_out)
        split = data.Split(*(data.Documents(lambda n=n: documents(n, config.mean)) for n in sides))
        store = data.write_store(split, data.ByteTokenizer(), path)
        command = [sys.executable, "-c", CHILD, path, str(config.batches)]
        rounds = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(config.rounds)
        ]
        about = {name: len(getattr(store.corpus(), name)) for name in ("tokens", "starts")}
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    results = {"opened": {name: round(value, 3) for name, value in medians.items()}}
    about |= {"batch": (16, 1024), "measured_peak_bytes": None}
    print_row("opening", config, about, results)


def documents(size: int, mean: int) -> Iterator[data.Document]:
    """Documents of random letters and of so many bytes together, the same ones each time."""
    r = np.random.default_rng(size)
    letters = r.integers(97, 123, 1 << 22, dtype=np.uint8).tobytes()
    for number in itertools.count():
        if number % 4096 == 0:
            lengths, starts = r.geometric(1 / mean, 4096), r.integers(0, len(letters) // 2, 4096)
        start, length = int(starts[number % 4096]), int(lengths[number % 4096])
        yield data.Document(str(number), letters[start : start + length])
        size -= length + 1
        if size <= 0:
            return
