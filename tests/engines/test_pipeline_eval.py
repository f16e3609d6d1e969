"""An evaluation on a pipe mesh: the sums of one device, in the memory of one stage."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxtrain as jt
from jaxtrain.build import compile_eval, compile_train, make_abstract_state, make_state
from tests.compare.test_parity import TOLERANCE, worst
from tests.engines import pipelines as small
from tests.engines.test_pipeline import FAST, ROWS, make_mesh, small_params

INTERLEAVED = {"schedule": "interleaved", "virtual": 2}


def state_of(params, mesh=None, rules=None):
    return jt.init_state(
        lambda rng: params, optax.sgd(1.0), jax.random.key(0), mesh=mesh, rules=rules
    )


@functools.cache
def one_device():
    evaluate = jt.build_eval_step(small.loss_fn)
    return jax.device_get(jax.jit(evaluate)(state_of(small_params()), small.make_batch(ROWS)))


EVALUATIONS = [
    ({"pipe": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}),
    ({"pipe": 2, "data": 2}, {"microbatches": 8, **INTERLEAVED}),
]
SLOW = [
    ({"pipe": 4, "data": 2}, {"microbatches": 2, "schedule": "gpipe"}),
    ({"pipe": 8}, {"microbatches": 1}),
    ({"pipe": 2, "fsdp": 2}, {"microbatches": 4, **INTERLEAVED, "counts": (3, 0, 4, 1)}),
    ({"pipe": 2, "data": 2, "tensor": 2}, {"microbatches": 3, **INTERLEAVED, "rows": 12}),
    ({"pipe": 4, "fsdp": 2}, {"microbatches": 16, **INTERLEAVED, "skip_bubbles": False}),
]


@pytest.mark.parametrize(
    ("axes", "options"),
    EVALUATIONS + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_an_evaluation_gives_the_sums_of_one_device(axes, options):
    mesh, options = make_mesh(axes), dict(options)
    stack = jt.Stack(virtual=options.get("virtual", 1), counts=options.pop("counts", None))
    count, stages = options.pop("rows", ROWS), dataclasses.replace(small.STAGES, stacked=stack)
    rules = [("^blocks/up", ("layers", "embed", "mlp")), ("^blocks/down", ("layers", "mlp", None))]
    state = state_of(stack.cut(small_params()), mesh, jt.Rules(rules, stacked=stack))
    batch = jax.tree.map(lambda x: x[:count], small.make_batch(ROWS))
    evaluate = jt.pipeline_eval_step(stages, mesh=mesh, **options)
    compiled = jt.compile_step(
        evaluate, state, batch, mesh=mesh, donate=False, compiler_options=FAST
    )
    expected = one_device()
    if count != ROWS:
        expected = jax.jit(jt.build_eval_step(small.loss_fn))(state_of(small_params()), batch)
    assert worst(jax.device_get(compiled(state, batch)), jax.device_get(expected))[0] < TOLERANCE


def test_a_metric_is_not_called_as_the_loss_itself():
    def head_loss(params, x, batch):
        return jt.WeightedLoss(x.sum(), batch["mask"].sum(), {"loss": x.sum()})

    stages, mesh = dataclasses.replace(small.STAGES, head_loss=head_loss), make_mesh({"pipe": 2})
    evaluate = jt.pipeline_eval_step(stages, mesh=mesh, microbatches=4)
    rules = [("^blocks/", ("layers", None, None))]
    state = state_of(small_params(), mesh, rules)
    with pytest.raises(ValueError, match="the loss calls a metric 'loss', as a train step calls"):
        jt.compile_step(evaluate, state, small.make_batch(ROWS), mesh=mesh, donate=False)


# ---- as part of an experiment

WIDTH, LAYERS = 128, 8


def wide_experiment(**changes):
    """Its parameters outweigh its activations by far."""

    def init_fn(rng):
        return {"blocks": {"w": 0.1 * jax.random.normal(rng, (LAYERS, WIDTH, WIDTH))}}

    def block(layer, x, batch, rng):
        return jnp.tanh(x @ layer["w"])

    def head_loss(params, x, batch):
        return jt.WeightedLoss((x.sum(-1) * batch["mask"]).sum(), batch["mask"].sum())

    def loss_fn(params, batch, rng):
        x, _ = jax.lax.scan(
            lambda x, w: (block({"w": w}, x, batch, rng), None), batch["x"], params["blocks"]["w"]
        )
        return head_loss(params, x, batch)

    shapes = {
        "x": jax.ShapeDtypeStruct((8, WIDTH), "float32"),
        "mask": jax.ShapeDtypeStruct((8,), "float32"),
    }
    return jt.Experiment.of(
        name="wide",
        init_fn=init_fn,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        batch=shapes,
        train_batches=None,
        steps=1,
        stages=jt.Stages(lambda params, batch, rng: batch["x"], block, head_loss),
        layout=jt.Layout.parse("pipe=4"),
        **changes,
    )


def test_an_evaluation_takes_the_memory_of_a_stage():
    experiment, mesh = wide_experiment(), make_mesh({"pipe": 4})
    state = make_abstract_state(experiment, mesh)
    unpipelined = experiment.with_(eval_loss_fn=experiment.task.loss_fn)
    found, whole = (
        compile_eval(e, state, e.data.batch, mesh).compiled.memory_analysis().temp_size_in_bytes
        for e in (experiment, unpipelined)
    )
    train = compile_train(experiment, state, mesh).compiled.memory_analysis().temp_size_in_bytes
    layer = 4 * WIDTH * WIDTH
    assert whole > LAYERS * layer
    assert found < 1.1 * layer  # the one that is being read, of two
    assert found < train / 4


@pytest.mark.parametrize("rows", [12, pytest.param(5, marks=pytest.mark.slow)])
def test_a_batch_of_any_number_of_rows_is_evaluated(rows):
    experiment, mesh = wide_experiment(), make_mesh({"pipe": 2})
    state = make_state(experiment, mesh)
    keys = jax.random.split(jax.random.key(1))
    batch = {"x": jax.random.normal(keys[0], (rows, WIDTH)), "mask": jnp.arange(rows) / rows}
    found = compile_eval(experiment, state, batch, mesh)(state, batch)
    expected = jax.jit(experiment.task.loss_fn)(jax.device_get(state.params), batch, None)
    assert worst(jax.device_get(found), jax.device_get(expected))[0] < TOLERANCE
