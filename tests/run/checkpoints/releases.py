"""Makes a run of this release, for later ones: ``python -m tests.run.checkpoints.releases``.

It writes ``earlier/VERSION.tar.xz``: the folder of a GPT of one narrow layer after step 4, its text
and in ``then.json`` what this release makes of it: the losses of steps 5 and 6, and weighted sums
of the tensors that it exports.
"""

import json
import pathlib
import shutil
import tarfile
import tempfile

import numpy as np

import jaxtrain as jt
from experiments import gpt
from jaxtrain import cli
from jaxtrain.hf import safetensors
from jaxtrain.run.main import parse

EARLIER = pathlib.Path(__file__).parent / "earlier"
FLAGS = "--model gpt2-124m --layers 1 --width 4 --heads 1 --seq-len 8 --global-batch 8"
FLAGS += " --held-out-bytes 500"
FLAGS += " --sample-tokens 0 --log-every 1 --save-every 4 --steps 6"
FLAGS += " --optimizer.schedule constant --optimizer.warmup-steps 1 --optimizer.ema 0.5"
KEPT = ("text.txt", "then.json", "run/checkpoints/**/*", "run/*.json", "run/*.jsonl")


def train(folder: pathlib.Path, *flags: str) -> dict[int, float]:
    """Trains the run in a folder to its end; returns the losses of its log by step."""
    given = [*FLAGS.split(), "--data", str(folder / "text.txt"), "--run-dir", str(folder / "run")]
    config = parse(gpt.Config, [*given, *flags])
    jt.fit(gpt.build(config), config.run)
    lines = map(json.loads, (folder / "run/log.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def export(folder: pathlib.Path) -> dict[str, float]:
    """Exports checkpoint 4; returns the sum of each tensor, weighted so that a transposed one has
    another."""
    out = folder / "exported"
    given = ["--run", str(folder / "run"), "--step", "4", "--out", str(out)]
    assert cli.main(["export", *given]) == 0
    found = {n: x[...].ravel().astype(np.float64) for n, x in safetensors.tensors_in(out).items()}
    return {name: float(np.cos(np.arange(x.size)) @ x) for name, x in found.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made) / "made"
        folder.mkdir()
        words = np.random.default_rng(0).choice(["mesh", "loss", "step", "grad"], 800)
        (folder / "text.txt").write_text(" ".join(words))
        train(folder, "--steps", "4")
        kept = shutil.copytree(folder, pathlib.Path(made) / "kept")
        sums, losses = export(folder), train(folder, "--resume")
        then = {"losses": {n: losses[n] for n in (5, 6)}, "sums": sums}
        (kept / "then.json").write_text(json.dumps(then, indent=2) + "\n")
        EARLIER.mkdir(exist_ok=True)
        with tarfile.open(EARLIER / f"{jt.__version__}.tar.xz", "x:xz") as file:
            for path in sorted(path for each in KEPT for path in kept.glob(each)):
                file.add(path, path.relative_to(kept), recursive=False)


if __name__ == "__main__":
    main()
