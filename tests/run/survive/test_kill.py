"""A run that is killed with SIGKILL, again and again, is bit for bit the run that nobody killed."""

import json
import random
import signal

import jax
import pytest

from experiments.gpt import Config, build
from jaxtrain import cli, hf
from jaxtrain.build import make_abstract_state, make_experiment_mesh
from jaxtrain.models import decoder
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.main import parse
from tests.run.survive.processes import Process, last_step, logged

# Everything that a step carries over: dropout (random keys), a loss scale that changes, gradients
# summed over calls, and a window of past losses.
FLAGS = "--layers 1 --width 16 --heads 2 --seq-len 16 --global-batch 8 --held-out-bytes 500"
FLAGS += " --sample-tokens 0 --precision fp16 --dropout 0.1 --optimizer.name adamw --log-every 1"
FLAGS += " --optimizer.accumulate 3 --optimizer.skip-spikes 3 --save-every 4"


def start(tmp_path, texts, run, steps, *more):
    flags = [*FLAGS.split(), "--data", str(texts), "--steps", str(steps), "--run-dir", str(run)]
    name = f"{len(list(tmp_path.glob('*.err'))):02d}"
    return Process(["-m", "experiments.gpt", *flags, *more], tmp_path, name)


def being_saved(run):
    """Whether a checkpoint is half written at this moment."""
    return any("tmp" in path.name for path in (run / "checkpoints").glob("*"))


def kill_during_a_save(process, run, rng, reached):
    process.until(lambda: last_step(run) > reached and being_saved(run))


def kill_in_a_step(process, run, rng, reached):
    target = reached + rng.randint(1, 12)
    process.until(lambda: last_step(run) >= target)


def kill_before_a_step(process, run, rng, reached):
    before = list(run.glob("tensorboard/*"))
    process.until(lambda: list(run.glob("tensorboard/*")) != before)


def final_digest(texts, run, steps):
    """The digest of the last checkpoint, read here, on a mesh of 8 devices."""
    flags = [*FLAGS.split(), "--data", str(texts), "--steps", str(steps)]
    experiment = build(parse(Config, flags))
    checkpoints = Checkpointer(run / "checkpoints")
    assert checkpoints.latest_step() == steps
    state = checkpoints.restore(make_abstract_state(experiment, make_experiment_mesh(experiment)))
    assert int(state.step) == steps
    assert state.loss_scale is not None
    return digest(state)


def kill_and_resume(tmp_path, texts, moments, *, steps, seed, more=()):
    rng = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(tmp_path, texts, whole, steps, *more)
    kills = 0
    try:
        for moment in moments:
            resume = ["--resume"] if killed.exists() else []
            process = start(tmp_path, texts, killed, steps, *resume, *more)
            try:
                moment(process, killed, rng, last_step(killed))
                if not process.ended():
                    process.send(signal.SIGKILL)
                    assert process.code() == -signal.SIGKILL
                    kills += 1
                else:
                    assert process.code() == 0, process.errors
            finally:
                process.end()
        process = start(tmp_path, texts, killed, steps, "--resume", *more)
        assert process.code() == 0, process.errors
        assert undisturbed.code() == 0, undisturbed.errors
    finally:
        process.end()
        undisturbed.end()
    assert final_digest(texts, killed, steps) == final_digest(texts, whole, steps)
    # Every batch was seen once: each step is logged once, with the same loss.
    losses = [
        [(line["step"], line["train/loss"]) for line in logged(run) if "train/loss" in line]
        for run in (whole, killed)
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, steps + 1))
    assert json.loads((killed / "config.json").read_text())["module"] == "experiments.gpt"
    return kills


@pytest.mark.slow
def test_two_kills_one_of_them_during_a_save(texts, tmp_path):
    moments = [kill_in_a_step, kill_during_a_save]
    assert kill_and_resume(tmp_path, texts, moments, steps=40, seed=0) == 2


@pytest.mark.slow
def test_kills_of_a_run_with_many_steps_per_call(texts, tmp_path):
    moments, more = [kill_in_a_step, kill_during_a_save], ["--steps-per-call", "4"]
    # Not a multiple of 4: the last call is shorter.
    assert kill_and_resume(tmp_path, texts, moments, steps=62, seed=0, more=more) == 2


@pytest.mark.slow
def test_twenty_kills_at_every_kind_of_moment(texts, tmp_path):
    kinds = [kill_in_a_step, kill_during_a_save, kill_in_a_step, kill_before_a_step]
    moments = [kinds[i % len(kinds)] for i in range(24)]
    kills = kill_and_resume(tmp_path, texts, moments, steps=400, seed=1)
    assert kills >= 20


KILLED = """
import os, pathlib, signal, sys, time
import jaxtrain as jt
from experiments import gpt

class Killer(jt.Hook):
    def on_step(self, step, state):
        if step == 6:
            while not pathlib.Path(sys.argv[1], "checkpoints/4").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

jt.main(gpt.Config, gpt.build, sys.argv[2:], hooks=[Killer()])
"""


@pytest.mark.slow
def test_an_adapter_of_a_killed_run_that_goes_on_elsewhere_has_the_same_bytes(texts, tmp_path):
    """It is killed in step 6 on one device and goes on from step 4 on four, as one does that has
    stopped there."""
    model = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=2, width=16, heads=2)
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(0)))
    flags = ["--init-from", str(tmp_path / "model"), "--tokenizer", "bytes", "--lora.rank", "2"]
    flags += ["--data", str(texts), "--global-batch", "8", "--held-out-bytes", "500"]
    flags += ["--sample-tokens", "0", "--optimizer.name", "adamw", "--optimizer.schedule"]
    flags += ["constant", "--optimizer.warmup-steps", "1", "--save-every", "4", "--dropout", "0.1"]
    one, four = ["--simulate-devices", "1"], ["--simulate-devices", "4", "--mesh.fsdp", "2"]
    found = []
    for name in ("killed", "stopped"):
        run, out = str(tmp_path / name), tmp_path / f"{name}-adapter"
        own = [*flags, "--run-dir", run]
        command = ["-m", "experiments.gpt", *own, *one, "--steps", "4"]
        if name == "killed":
            command = ["-c", KILLED, run, *own, *one, "--steps", "8"]
        process = Process(command, tmp_path, name)
        assert process.code() == (-signal.SIGKILL if name == "killed" else 0), process.errors
        more = ["--steps", "8", "--resume", *four, "--mesh.data", "2"]
        process = Process(["-m", "experiments.gpt", *own, *more], tmp_path, f"{name}-2")
        assert process.code() == 0, process.errors
        cli.main(["hf", "export", "--run", run, "--adapter", "--out", str(out)])
        found.append((out / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1]
