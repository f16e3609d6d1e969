"""A small decoder's step on a mesh, compiled fast: what the golden tests read."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from experiments import gpt
from jaxtrain.models import decoder
from jaxtrain.planning.hlo import read_program
from jaxtrain.run.options import OptimizerOptions
from jaxtrain.sharding.rules import Rules
from tests import forms

LAYERS = 3
# No two sizes alike, so that a shape says what it is of.
FORM = forms.LLAMA | {"kv_heads": None}
CONFIG = decoder.DecoderConfig(
    vocab_size=320, seq_len=24, layers=LAYERS, width=64, heads=8, mlp_width=176, **FORM
)
ROWS = 16
FAST = {"xla_backend_optimization_level": 0}


def compile_gpt(
    *,
    loss=None,
    clip_norm=None,
    zero=0,
    rows=ROWS,
    devices=None,
    policy=None,
    config=CONFIG,
    logical=None,
    **axes,
):
    """Compiles an AdamW step of the decoder.

    Args:
      loss: changes the loss function; ``loss(loss_fn)``.
      logical: what carries logical axes, as ``Rules(axes=...)``.
      **axes: of the mesh.

    Returns:
      The compiled step, its state's shapes, and its mesh.
    """
    mesh = jt.make_mesh(**axes, devices=devices)
    policy = policy or jt.Policy.f32()
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=clip_norm, stacked=jt.Stack().axes)
    rules = Rules(decoder.RULES, axes=logical or {})
    state = state_of(config, optimizer, mesh, rules=rules, zero=zero, policy=policy)
    loss_fn = decoder.loss_fn(config)
    step = jt.build_train_step(
        loss(loss_fn) if loss else loss_fn,
        optimizer,
        policy=policy,
        gradient_shardings=jt.gradient_shardings(state, zero=zero),
        gather="model",
    )
    platform = mesh.devices.flat[0].platform
    options = FAST if platform == "cpu" else None
    batch = batch_shapes(rows, config.seq_len)
    train = jt.compile_step(step, state, batch, mesh=mesh, rules=rules, compiler_options=options)
    return train, state, mesh


def gpt_config(**sizes):
    """Flags of ``experiments.gpt`` for a small decoder in bfloat16."""
    return gpt.Config(optimizer=OptimizerOptions(name="adamw"), precision="bf16", **sizes)


def state_of(config, optimizer, mesh, **given):
    """The shapes of a decoder's state; ``given`` is for ``jt.abstract_state``."""
    init = functools.partial(decoder.init, config)
    return jt.abstract_state(init, optimizer, mesh=mesh, **{"rules": decoder.RULES} | given)


def batch_shapes(rows, seq_len, *more):
    """The shapes of a batch, with ``more`` arrays of integers."""
    tokens = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
    mask = jax.ShapeDtypeStruct((rows, seq_len), jnp.float32)
    return dict.fromkeys(("tokens", "targets", *more), tokens) | {"mask": mask}


def collectives(train, mesh, *, least=64):
    """The collectives that move at least so many bytes (the rest are losses and norms)."""
    program = read_program(train.compiled.as_text(), mesh)
    assert None not in program.loops
    return [c for c in program.collectives if c.payload >= least]


def with_constraint(sharding, *path):
    """A loss that first pins one of its parameters to a sharding."""

    def change(loss_fn):
        def loss(params, batch, rng):
            leaf = functools.reduce(operator.getitem, path, params)
            pinned = jax.lax.with_sharding_constraint(leaf, sharding)
            return loss_fn(_replaced(params, path, pinned), batch, rng)

        return loss

    return change


def needing_whole(*path):
    """A loss with a penalty for which every device needs the whole of one of its parameters.

    (A constraint alone does not do it: the TPU and GPU compilers see through it.)
    """

    def change(loss_fn):
        def loss(params, batch, rng):
            leaf = functools.reduce(operator.getitem, path, params)
            whole = jax.lax.with_sharding_constraint(leaf, P())
            ranked = jax.lax.with_sharding_constraint(jnp.sort(whole.reshape(-1)), P())
            found = loss_fn(params, batch, rng)
            penalty = 1e-6 * (ranked * jnp.arange(ranked.size)).sum()
            return dataclasses.replace(found, total=found.total + penalty)

        return loss

    return change


def _replaced(tree, path, value):
    if not path:
        return value
    return dict(tree) | {path[0]: _replaced(tree[path[0]], path[1:], value)}


def numbered(shapes):
    """``["f32[2,3]", ...]`` as tuples of sizes without ones, sorted."""
    found = [s[s.index("[") + 1 : -1] for s in shapes]
    return sorted(tuple(sorted(int(n) for n in f.split(",") if n and int(n) > 1)) for f in found)


def with_layers(count):
    return dataclasses.replace(CONFIG, layers=count)
