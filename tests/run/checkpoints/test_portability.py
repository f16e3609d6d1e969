"""A checkpoint goes from any mesh to any other, and from any number of processes to any other."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain.build import (
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    restore_state,
    to_checkpoint,
)
from jaxtrain.models import decoder
from jaxtrain.models.generate import generate
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.main import parse
from jaxtrain.run.trained import load
from tests.run.survive.processes import free_port, together
from tests.run.test_loop import losses

ROOT = pathlib.Path(__file__).parents[3]
SMALL = ["--layers", "4", "--width", "16", "--heads", "2", "--seq-len", "16", "--steps", "6"]
SMALL += ["--global-batch", "16", "--held-out-bytes", "2000", "--sample-tokens", "0"]
SMALL += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "1", "--log-every", "1"]
INTERLEAVED = "--pipeline.microbatches 2 --pipeline.schedule interleaved --pipeline.virtual 2"
PIPE = "--pipeline.microbatches 4"
# Devices: all kinds of layouts over them, in flags.
LAYOUTS = {
    "data 8": "--mesh.data 8",
    "data 2 x fsdp 2 x tensor 2": "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2",
    "fsdp 4": "--mesh.data 1 --mesh.fsdp 4",
    "pipe 2 x virtual 2 x tensor 2": f"--mesh.data 1 --mesh.pipe 2 --mesh.tensor 2 {INTERLEAVED}",
    "one device": "--mesh.data 1",
    "pipe 4 x fsdp 2": f"--mesh.data 1 --mesh.pipe 4 --mesh.fsdp 2 {PIPE}",
    "zero 3 on data 2": "--mesh.data 2 --zero 3",
    "pipe 3, of which one has two": f"--mesh.data 1 --mesh.pipe 3 {PIPE}",
    "pipe 2 x virtual 2 x data 4": f"--mesh.data 4 --mesh.pipe 2 {INTERLEAVED}",
    "data 8 again": "--mesh.data 8",
}


def size_of(flags: str) -> int:
    words = flags.split()
    sizes = [int(words[i + 1]) for i, word in enumerate(words) if word.startswith("--mesh.")]
    return int(np.prod(sizes))


def experiment_of(texts, flags: str, *more: str):
    config = parse(gpt.Config, [*SMALL, "--data", texts, *flags.split(), *more])
    return gpt.build(config)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_every_layout_holds_the_same_bits_and_gives_them_on(texts, tmp_path, optimizer):
    """Round after round into the next layout, from a state in which no two layers are alike."""
    flags = ["--optimizer.name", optimizer, "--optimizer.accumulate", "2"]
    first = experiment_of(texts, "--mesh.data 8", *flags)
    state = make_state(first, make_experiment_mesh(first))
    leaves, structure = jax.tree.flatten(state)
    r = np.random.default_rng(0)

    def noise(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, np.floating):
            return jax.device_put(r.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)
        return leaf

    state = jax.tree.unflatten(structure, [noise(leaf) for leaf in leaves])
    expected = digest(state)
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(0, state)
        for step, (name, layout) in enumerate(LAYOUTS.items(), 1):
            experiment = experiment_of(texts, layout, *flags)
            mesh = jt.make_mesh(
                **experiment.layout.mesh.sizes, devices=jax.devices()[: size_of(layout)]
            )
            abstract = make_abstract_state(experiment, mesh)
            state = restore_state(experiment, abstract, checkpoints.restore)
            for leaf, wanted in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
                assert (leaf.shape, leaf.sharding) == (wanted.shape, wanted.sharding), name
            natural = to_checkpoint(experiment, state)
            assert digest(natural) == expected, name
            checkpoints.save(step, natural)


def test_a_run_kept_in_bfloat16_is_read_and_generates_in_it(texts, tmp_path):
    experiment = experiment_of(texts, "--mesh.data 1", "--precision", "pure_bf16")
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    state = make_state(experiment, mesh)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, config=json.loads(json.dumps(experiment.metadata.config)))
    model, params, _ = load(str(tmp_path), 1)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    assert digest({"params": params}) == digest({"params": state.params})
    ((token,),) = generate(
        model, params, [[1, 2]], max_new_tokens=1, rng=jax.random.key(0), temperature=0.0
    )
    logits = decoder.logits(model, params, np.array([[1, 2]]))[0, -1]
    assert logits[token] == pytest.approx(float(logits.max()), abs=0.02)  # of rounding


def launch(texts, run, *, processes: int, devices: int, steps: int, flags: str) -> list[str]:
    """Runs the worker in every process and returns what each printed."""
    port = free_port()
    command = [sys.executable, "-m", "tests.workers.move"]
    arguments = [*SMALL, "--data", texts, "--run-dir", str(run), *flags.split()]
    commands = [
        [*command, *map(str, (process, processes, port, devices, steps)), *arguments]
        for process in range(processes)
    ]
    return together(commands, cwd=ROOT)


def moved(texts, run, **options_) -> set[str]:
    printed = launch(texts, run, steps=0, **options_)
    return {line for text in printed for line in text.splitlines() if line.startswith("digest")}


def start(texts, run) -> str:
    """A checkpoint of eight devices in this process; returns its digest."""
    experiment = experiment_of(texts, "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2")
    state = make_state(experiment, make_experiment_mesh(experiment))
    with Checkpointer(run / "checkpoints") as checkpoints:
        checkpoints.save(0, state)
    return digest(state)


@pytest.mark.slow
def test_two_processes_of_four_devices_go_on_from_one_of_eight_and_back(texts, tmp_path):
    expected = start(texts, tmp_path)
    flags = f"--mesh.data 2 --mesh.pipe 2 --mesh.tensor 2 {INTERLEAVED}"
    found = moved(texts, tmp_path, processes=2, devices=4, flags=flags)
    assert found == {f"digest {expected}"}
    experiment = experiment_of(texts, "--mesh.data 1 --mesh.fsdp 8")
    abstract = make_abstract_state(experiment, make_experiment_mesh(experiment))
    reader = Checkpointer(tmp_path / "checkpoints")
    assert reader.latest_step() == 1
    assert digest(restore_state(experiment, abstract, reader.restore)) == expected


PROCESSES = [
    (4, 2, "--mesh.data 8"),
    (2, 4, f"--mesh.data 4 --mesh.pipe 2 {INTERLEAVED}"),
    (1, 8, "--mesh.data 1 --mesh.fsdp 8"),
    (4, 2, "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --zero 1"),
    (2, 2, f"--mesh.data 1 --mesh.pipe 4 {PIPE}"),
    (3, 1, f"--mesh.data 1 --mesh.pipe 3 {PIPE}"),  # one of them has two layers
    (1, 1, "--mesh.data 1"),
    (2, 4, "--mesh.data 4 --mesh.tensor 2"),
]


@pytest.mark.slow
def test_digests_survive_a_tour_of_process_counts(texts, tmp_path):
    expected = start(texts, tmp_path)
    for processes, devices, flags in PROCESSES:
        found = moved(texts, tmp_path, processes=processes, devices=devices, flags=flags)
        assert found == {f"digest {expected}"}, (processes, devices, flags)


@pytest.mark.slow
def test_training_goes_on_over_process_counts_with_the_very_next_batches(texts, tmp_path):
    """Two steps in each place; another order of the data would give other losses."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    total = 2 * len(PROCESSES)
    launch(texts, whole, processes=1, devices=1, steps=total, flags="--mesh.data 1")
    for number, (processes, devices, flags) in enumerate(PROCESSES, 1):
        more = " --resume" if number > 1 else ""
        launch(
            texts, parts, processes=processes, devices=devices, steps=2 * number, flags=flags + more
        )
    expected, found = losses(whole), losses(parts)
    assert sorted(found) == sorted(expected) == list(range(1, total + 1))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step
