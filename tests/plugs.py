"""What holds for an engine or a method of one's own, defined in a test and nowhere else."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import optax

import jaxtrain as jt
from jaxtrain.engines.plain import plain
from tests import commands, problems

MESH = "data=2,fsdp=2,tensor=2"
RULES = [("up/kernel$", ("embed", "mlp")), ("up/bias$", ("mlp",)), ("down/kernel$", ("mlp", None))]


class Config(jt.Config):
    """The regression of :mod:`tests.problems`."""


def experiment(config, **own):
    """Its experiment, whose loss is a sum over rows, with what a test has of its own."""
    batch = problems.make_batch(rows=64)
    rows = [{name: x[i] for name, x in batch.items()} for i in range(64)]
    return config.experiment(
        "own",
        init_fn=problems.init,
        loss_fn=jt.row_wise(problems.loss_fn),
        optimizer=jt.make_optimizer("adamw", 1e-2, eps=1e-4),
        rules=jt.Rules(RULES),
        **config.batches_of(rows[:48], rows[48:]),
        **own,
    )


def clipped(loss_fn, bound=0.5):
    """Gradients of every example by itself, each cut to the same norm, and summed."""
    alone = plain(loss_fn)

    def engine(params, model_state, batch, rng, loss_scale):
        def one(example):
            row = jax.tree.map(lambda x: x[None], example)
            sums = alone(params, model_state, row, rng, loss_scale)
            shrunk = jnp.minimum(1.0, bound / jnp.maximum(optax.tree.norm(sums.grads), 1e-12))
            return dataclasses.replace(sums, grads=jax.tree.map(lambda g: g * shrunk, sums.grads))

        return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(batch))

    return engine


def check(module, named, tmp_path, capsys):
    """Trains it, resumes it to the bit, plans it, and compares it with one device; its header."""
    name, flags = module.__name__, ["--global-batch", "16", "--accumulate", "2"]
    mesh = [*flags, *(f"--mesh.{size}" for size in MESH.split(","))]

    def trained(folder, *more):
        given = ["--run-dir", str(tmp_path / folder), "--steps", "4", "--save-every", "2"]
        jt.main(module.Config, module.build, [*given, *mesh, *more])
        return (tmp_path / folder / "checkpoints/4/manifest/metadata").read_text()

    whole = trained("whole")
    header = " ".join(capsys.readouterr().out.split())
    assert named in header
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/4")
    assert trained("again", "--resume") == whole  # its checksums
    assert "resumed at step 2" in capsys.readouterr().out
    layouts = ["--layout", MESH, "--layout", "data=4"]
    status, out, err = commands.run(capsys, "parity", name, *layouts, *flags)
    assert (status, "2 of 2 meshes agree" in out) == (0, True), out + err
    status, out, err = commands.run(capsys, "plan", name, "--target", "cpu:8", *mesh)
    assert (status, named in " ".join(out.split())) == (0, True), out + err
    return header
