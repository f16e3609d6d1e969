"""Which errors are one sentence, and which keep their traceback."""

import dataclasses
import errno

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain.run import refusal
from jaxtrain.run.main import load_config, main
from jaxtrain.serve.generate_command import GenerateOptions
from tests.workers import poisoned


class Mistaken(jt.Hook):
    """A hook and a writer with a mistake in them."""

    def on_step(self, step, state):
        raise ValueError("mine")

    def write(self, step, values):
        int("mine")

    def close(self):
        pass


def mistaken_loss(params, batch, rng):
    return jnp.sum(batch["x"]) * np.zeros(3).reshape(2)  # a ValueError of NumPy's


def run(tmp_path, build=poisoned.build, **plugs):
    main(poisoned.Config, build, ["--steps", "1", "--run-dir", str(tmp_path / "run")], **plugs)


@pytest.mark.parametrize("plug", ["hooks", "writers"])
def test_a_mistake_in_a_hook_or_writer_keeps_its_traceback(tmp_path, plug):
    with pytest.raises(ValueError, match="mine"):
        run(tmp_path, **{plug: [Mistaken()]})


def test_a_mistake_in_a_loss_keeps_its_traceback_and_one_of_its_shapes_is_refused(tmp_path, capsys):
    def build(config, **changes):
        return poisoned.build(config).with_(loss_fn=mistaken_loss, **changes)

    with pytest.raises(ValueError, match="cannot reshape"):
        run(tmp_path, build)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, lambda config: build(config, layout=jt.Layout.parse("data=3")))
    assert capsys.readouterr().err.startswith("error: mesh data 3 needs 3 devices")


def test_output_that_nobody_reads_is_no_refusal():
    with pytest.raises(BrokenPipeError), refusal.refusing():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_what_build_refuses_is_a_sentence(tmp_path, capsys):
    def build(config):
        raise ValueError(f"steps is {config.steps}: give an even number")

    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, build)
    assert capsys.readouterr().err == "error: steps is 1: give an even number\n"


def test_arguments_in_backticks_become_flags_and_nothing_else_does():
    for plain in ("metric eval_every is 3", "no run in save_every: log_every", "`eval_loss` is 3"):
        assert refusal.with_flags(plain, jt.RunOptions) == plain
    assert refusal.with_flags("`keep` is 0: save_every", jt.RunOptions) == "--keep is 0: save_every"


@dataclasses.dataclass(frozen=True)
class Own(jt.Config):
    """Has a flag of its own that other programs know by another name."""

    lr: float = 0.1


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        ("--lr", "optimizer.learning-rate"),
        ("--optimizer.lr", "optimizer.learning-rate"),
        ("--batch_size=3", "global-batch"),
        ("--output-dir", "run-dir"),
        ("--bf16", "precision"),
    ],
)
def test_what_other_programs_call_a_flag_names_ours(typed, flag, capsys):
    for read in (main_of_flags, load_of_flags):
        with pytest.raises(SystemExit, match="2"):
            read(typed)
        name = typed.partition("=")[0].replace("_", "-")
        wanted = f"error: {name} is no option of this program: the same is --{flag} here\n"
        assert capsys.readouterr().err == wanted


def main_of_flags(*flags):
    main(jt.Config, poisoned.build, flags)


def load_of_flags(*flags):
    load_config("tests.small", flags, command="plan")


def test_every_flag_that_is_named_so_is_one_and_a_flag_of_ones_own_stays():
    configs = (gpt.Config, GenerateOptions)
    flags = {flag for config in configs for *_, flag in refusal.all_flags(config)}
    aliases = [word for words in refusal._ELSEWHERE.values() for word in words.split()]
    assert set(refusal._ELSEWHERE) - flags <= {"epochs"}
    assert not flags & set(aliases)
    refusal.refuse_aliases(Own, ["--lr", "0.1", "--run-dir", "lr"])
