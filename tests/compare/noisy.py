"""Experiments of the shipped models with noise on what they start from, compared over layouts."""

import contextlib

import jax
import optax

import jaxtrain as jt
from jaxtrain.compare.parity import compare
from tests import problems


def experiment_of(module, model, train, *, gather=None, when=None, **pipeline):
    """Two steps of a model on the batches of ``train``, of which those from the third are held out.

    No bias is zero. The layers are in natural order: what they are compared with, on one device, is
    not cut as they are in a pipeline.
    """
    return jt.Experiment.of(
        name="noisy",
        init_fn=lambda rng: problems.with_noise(module.init(model, rng), 0.02),
        loss_fn=None,
        optimizer=optax.adamw(1e-2, eps=1e-4),
        batch=jax.eval_shape(lambda: train[0]),
        train_batches=lambda start, sharding: contextlib.nullcontext(iter(train)),
        eval_batches=lambda sharding: train[2:],
        steps=2,
        rules=jt.Rules(module.RULES, batch=module.BATCH),
        gather=gather,
        stages=module.stages(model),
        **problems.with_layout({"when": when, "pipeline": {"microbatches": 4} | pipeline}),
    )


def parity(module, model, batch, layout, **options):
    """Raises where a mesh computes otherwise than one device, of a model of which no bias is 0."""
    return jt.parity(
        lambda rng: problems.with_noise(module.init(model, rng)),
        module.loss_fn(model),
        batch,
        rules=jt.Rules(module.RULES, batch=module.BATCH),
        stages=module.stages(model),
        gather="model",
        layouts=[layout],
        **options,
    )


def chunks_on(layout, options):
    """How many chunks of layers a layout has at least, 2 or more: a model has a layer for each."""
    return max(2, jt.Layout.parse(layout).mesh.pipe * options.get("virtual", 1))


def errors_of(experiment, layout, policy="f32"):
    """The largest error of each part on a layout, and its leaf."""
    (found,) = compare(experiment, layouts=[layout], steps=2, policy=policy)
    assert found.refusal is None
    parts = {"evaluation", "loss", "gradients", "parameters", "optimizer state"}
    assert found.worst.keys() == parts
    return found.worst
