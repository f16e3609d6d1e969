"""Every bit of an exact run is the same on any number of devices from two on."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments import bert, gpt, t5, vision
from jaxtrain import build
from jaxtrain.compare import parity
from jaxtrain.decisions import Kind, Why
from jaxtrain.engines.exact import grains_of_a_device
from jaxtrain.layout import Layout
from jaxtrain.models import decoder
from jaxtrain.run.main import parse
from jaxtrain.sharding.collectives import tree_sum
from jaxtrain.step import scan_steps
from tests import problems
from tests.fuzz_exact import digest, trained

GRAINS, ROWS, LENGTH, STEPS = 8, 16, 12, 4
MODEL = dataclasses.replace(
    decoder.tiny(), layers=2, width=16, heads=2, mlp_width=48, vocab_size=64, dropout=0.2
)


def batch(number, rows=ROWS):
    r = np.random.default_rng(number)
    tokens = r.integers(0, 64, (rows, LENGTH + 1), dtype=np.int32)
    mask = (r.random((rows, LENGTH)) < 0.8).astype(np.float32)
    shared = {"segments": np.ones_like(mask, np.int32), "mask": mask}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]} | shared


def train(
    axes,
    *,
    zero=0,
    calls=1,
    accumulate=1,
    grains=GRAINS,
    optimizer="adamw",
    policy=None,
    model=MODEL,
    rows=ROWS,
):
    """Digests of the state, of the metrics of all steps and of an evaluation."""
    count = int(np.prod(list(axes.values())))
    mesh = jt.make_mesh(**axes, devices=jax.devices()[:count])
    chain = jt.make_optimizer(optimizer, 1e-2, clip_norm=0.5, stacked=("^blocks/",), ema=0.9)
    init = functools.partial(decoder.init, model)
    given = {"mesh": mesh, "zero": zero, "policy": policy, "rules": decoder.RULES, "whole": True}
    state = jt.init_state(init, chain, jax.random.key(0), **given)
    loss = jt.loss_from_stages(decoder.stages(model))
    own = {"gather": "model", "policy": policy, "exact": grains}
    step = jt.build_train_step(loss, chain, accumulate=accumulate, norms=True, **own)
    placed = {"mesh": mesh, "rules": decoder.RULES}
    batches = [batch(number, rows) for number in range(STEPS)]
    evaluate = jt.compile_step(
        jt.build_eval_step(loss, **own), state, batches[0], donate=False, **placed
    )
    told = []
    if calls > 1:
        step = scan_steps(step)
        batches = [batches[i : i + calls] for i in range(0, STEPS, calls)]
    compiled = jt.compile_step(step, state, batches[0], **placed)
    assert compiled.findings[Kind.EXACT] == (Why.GRAINS(grains=grains),)
    for given in batches:
        state, metrics = compiled(state, given)
        told.append(jax.device_get(metrics))
    flat = jax.tree.map(lambda *x: np.stack(x).ravel(), *told)
    held_out = evaluate(state, batch(99, rows)).means()
    return {"state": digest(state), "metrics": digest(flat), "held out": digest(held_out)}


@functools.cache
def on_two(**how):
    return train({"data": 2}, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"data": 8}, {"zero": 1}),
        ({"data": 2, "fsdp": 2}, {"zero": 3, "accumulate": 2, "calls": 2}),
    ],
)
def test_bits_are_those_of_two_devices(axes, how):
    assert train(axes, **how) == on_two()


FUZZ = [
    ("lamb", None), ("adafactor", "f32"), ("adamw", "bf16"), ("lion", "bf16"), ("adan", "fp16")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxtrain.precision.PrecisionWarning")
@pytest.mark.parametrize("seed", range(12))
def test_random_runs_have_the_bits_of_two_devices(seed):
    r = np.random.default_rng(seed)
    optimizer, policy = FUZZ[seed % len(FUZZ)]
    sizes = {"width": 8 * int(r.integers(2, 5)), "mlp_width": int(r.integers(17, 60))}
    model = dataclasses.replace(MODEL, layers=int(r.integers(1, 5)), **sizes)
    grains = int(r.choice([8, 16, 32]))
    how = {"optimizer": optimizer, "policy": policy, "model": model, "grains": grains}
    how["rows"] = grains * int(r.integers(1, 4))
    two = train({"data": 2}, **how)
    for axes in ({"data": 4, "fsdp": 2}, {"fsdp": 8}, {"fsdp": 2}):
        zero = int(r.integers(0, 4))
        assert train(axes, zero=zero, **how) == two, (axes, zero, how)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}])
def test_bits_are_those_of_the_same_cut(axes):
    assert train({"data": 2, "fsdp": 2} | axes) == train({"data": 1} | axes)


@pytest.mark.slow
def test_muon_has_the_same_bits_on_two_devices_and_eight():
    how = {"optimizer": "muon"}
    assert train({"data": 2, "fsdp": 4}, **how) == train({"data": 2}, **how)


TEXT = "--layers 2 --width 32 --heads 2 --optimizer.name adamw --exact 4 --global-batch 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (bert, f"{TEXT} --seq-len 64"),
        (t5, f"{TEXT} --held-out-bytes 4000"),
        (vision, "--model vit --optimizer.name adamw --exact 8 --global-batch 32"),
        (vision, "--model convnet --norm group --exact 8 --global-batch 32"),
    ],
)
def test_other_models_have_the_same_bits(module, flags):
    two, four = (run(module, flags, axes) for axes in ("data=2", "data=2,fsdp=2"))
    assert two == four


def run(module, flags, axes):
    """Digests of the state, of the metrics of three steps and of an evaluation."""
    return list(map(digest, trained(module, flags, axes)))


CUTS = f"{TEXT} --seq-len 16 --data {pathlib.Path(__file__).parent} --held-out-bytes 2000"
CUTS += " --dropout 0.1 --optimizer.clip-norm 0.1 --pipeline.microbatches 2"
MIXTURE = "--experts 4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "flags"),
    [
        ("pipe=2", ""),
        ("pipeline.schedule=interleaved,pipeline.virtual=2,pipe=2", "--layers 4 --precision bf16"),
        ("expert=2", MIXTURE),
        ("expert=2,dispatch=exchange", MIXTURE),
        ("pipe=2,expert=2", MIXTURE),
    ],
)
def test_pipelines_and_experts_have_the_bits_of_the_same_cut(cut, flags):
    others = "data=2" if "pipe=2,expert=2" in cut else "data=2,fsdp=2,zero=1"
    alone, more = (run(gpt, f"{CUTS} {flags}", f"{axes},{cut}") for axes in ("data=1", others))
    assert alone == more


@pytest.mark.slow
def test_what_is_dropped_in_a_pipeline_of_grains_is_what_an_ordinary_step_drops():
    for_loss = CUTS.replace("--exact 4", "--exact {}")
    (_, ordinary, _), (_, exact, _) = (
        trained(gpt, for_loss.format(n), "data=2,pipe=2") for n in (0, 4)
    )
    for own, other in zip(exact, ordinary, strict=True):
        np.testing.assert_allclose(own["loss"], other["loss"], rtol=2e-6)
        np.testing.assert_allclose(own["grad_norm"], other["grad_norm"], rtol=1e-4)


@pytest.mark.slow
def test_parity_compares_an_exact_layout_with_one_device_that_is_not():
    flags = f"{CUTS} --layers 2 --width 16 --mesh.data 2".replace("--dropout 0.1", "")
    experiment = gpt.build(parse(gpt.Config, flags.split()))
    assert experiment.layout.exact == 4
    (found,) = parity.compare(experiment, layouts=["data=2,pipe=2"], steps=1)
    assert (found.refusal, found.agrees(parity.TOLERANCE)) == (None, True)


def test_gradients_are_those_of_an_ordinary_step():
    """A regression in float64 NumPy, whose rows weigh differently."""
    params, rows = problems.init(jax.random.key(1)), problems.make_batch()
    mesh = jt.make_mesh(data=4, devices=jax.devices()[:4])
    chain = problems.record_gradients()
    given = {"params": params, "mesh": mesh}
    state = jt.init_state(problems.init, chain, jax.random.key(0), **given)
    step = jt.build_train_step(jt.row_wise(problems.loss_fn), chain, exact=8)
    found, metrics = jt.compile_step(step, state, rows, mesh=mesh)(state, rows)
    loss, grads, weight = problems.reference(params, rows)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert float(metrics["weight"]) == weight
    problems.assert_agree({"gradients": found.opt_state}, {"gradients": grads}, 1e-5)


def test_the_tree_is_the_same_however_it_is_cut():
    """Of random numbers, whose sums in another order differ."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=24).astype(np.float32))
    for parts in (1, 3, 6, 12, 24):
        nodes = jax.vmap(tree_sum)(x.reshape(parts, -1))
        assert float(tree_sum(nodes)) == float(tree_sum(x))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: grains_of_a_device(8, 3), "3 devices split the batch.*use 2 devices"),
        (lambda: grains_of_a_device(24, 4), "use 3 devices"),
        (lambda: grains_of_a_device(8, 4, 4), "`accumulate` of at most 2"),
        (lambda: Layout(exact=8, gather="layer"), "gather.*exact"),
        (lambda: Layout(exact=8, offload_optimizer=True), "offload_optimizer.*exact"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_loss_that_is_no_sum_over_rows_is_refused():
    with pytest.raises(ValueError, match=r"`exact` is 8 .* not declared a sum over rows"):
        jt.build_train_step(problems.loss_fn, problems.record_gradients(), exact=8)


@pytest.mark.parametrize("flags", ["--precision fp8 --count-rounding", ""])
def test_a_pipeline_refuses_what_a_step_without_one_refuses(flags):
    piped = gpt.build(parse(gpt.Config, f"{CUTS} --mesh.pipe 2 --mesh.data 1 {flags}".split()))
    if not flags:
        piped = piped.with_(stages=dataclasses.replace(piped.task.stages, row_wise=False))
    mesh = build.make_experiment_mesh(piped, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"`exact` is 4 .*(count_rounding|not declared a sum)"):
        build.build_step(piped, build.make_abstract_state(piped, mesh), mesh)


def test_one_device_is_refused():
    """Where BERT, T5 and Muon have other bits than on two."""
    with pytest.raises(ValueError, match=r"the mesh has one device.*use 2 devices or more"):
        train({"data": 1})


def centred(params, means, batch, rng):
    """A loss of rows less the means of rows before; what moves is a mean over rows, and a count."""
    rows_NF = batch["x"]
    nll = jnp.square((rows_NF - means["rows"]) @ params["w"] - batch["y"]).mean(-1)
    moved = {"rows": 0.9 * means["rows"] + 0.1 * rows_NF.mean(0), "steps": means["steps"] + 1}
    return jt.WeightedLoss(nll.sum(), jnp.float32(len(nll))), means | moved


def follow(axes, exact, declared=True, grains=6, **more):
    loss = jt.row_wise(centred) if declared else centred
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    r = np.random.default_rng(0)
    batches = [{"x": r.normal(1, 2, (24, 8)), "y": r.normal(0, 1, (24, 4))} for _ in range(3)]
    batches = jax.tree.map(np.float32, batches)
    still = jnp.array([jnp.inf, 0.1, 3e38])
    init = lambda rng: (  # noqa: E731
        {"w": jax.random.normal(rng, (8, 4)), "b": jnp.zeros(8)},
        {"rows": jnp.zeros(8), "steps": jnp.int32(0), "still": still} | more,
    )
    chain = optax.adam(1e-2)
    given = {"mesh": mesh, "rules": [("w", ("fsdp", None))]}
    how = {"has_model_state": True}
    state = jt.init_state(init, chain, jax.random.key(0), whole=True, **given, **how)
    step = jt.build_train_step(loss, chain, exact=grains if exact else 0, **how)
    train = jt.compile_step(step, state, batches[0], **given)
    evaluate = jt.build_eval_step(loss, exact=grains if exact else 0, **how)
    evaluate = jt.compile_step(evaluate, state, batches[0], donate=False, **given)
    for each in batches:
        state, _ = train(state, each)
    return state, evaluate(state, batches[0]).means()


@pytest.mark.parametrize(
    "axes", [pytest.param({"data": 6}, marks=pytest.mark.slow), {"data": 3, "fsdp": 2}]
)
def test_model_state_of_a_sum_over_rows_has_the_bits_of_three_devices_and_the_usual_values(axes):
    three, usual = (follow({"data": 3}, exact=exact) for exact in (True, False))
    assert digest(follow(axes, exact=True)) == digest(three)
    (found, means), (of, usual_means) = three, usual
    assert int(found.model_state["steps"]) == int(of.model_state["steps"]) == 3
    pairs = (found.params, of.params), (found.model_state, of.model_state), (means, usual_means)
    for each in pairs:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6), *each)
    np.testing.assert_array_equal(found.model_state["still"], of.model_state["still"])


def test_model_state_of_another_loss_is_refused():
    with pytest.raises(ValueError, match=r"the model has state, which is that of all rows"):
        follow({"data": 3}, exact=True, declared=False)
    with pytest.raises(ValueError, match=r"model state 'key' is a random key and `exact` 6"):
        follow({"data": 3}, exact=True, key=jax.random.key(0))
