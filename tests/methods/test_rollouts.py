"""Steps that learn from rewards of the model's own answers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import grpo
from jaxtrain.build import compile_train, make_experiment_mesh, make_state
from jaxtrain.experiment import Experiment
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.constrain import Constrain
from jaxtrain.finetune.group_policy import GroupPolicy, Rewarded, policy_loss
from jaxtrain.layout import Layout
from jaxtrain.methods.rollouts import Rollouts, rollouts
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.generate import Prompts, Weights, scored_step
from jaxtrain.models.sampling import make_sampling
from jaxtrain.sharding.rules import Rules

VOCAB, P, N, END = 30, 7, 5, 3
SIZES = {"layers": 2, "width": 32, "heads": 4}
MODEL = DecoderConfig(vocab_size=VOCAB, seq_len=P + N, positions="rope", **SIZES)
HELD = GroupPolicy(size=4, kl=0.05)
EXPERTS = dataclasses.replace(MODEL, mlp="swiglu", experts=4, experts_per_token=2)


def many_sevens(tokens_BP, lengths_B, new_BN):
    """The share of new tokens that are below half of the vocabulary."""
    return (new_BN < VOCAB // 2).mean(axis=1)


def prompts(count=8, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, VOCAB, (count, P)).astype(np.int32)
    return {"tokens": tokens, "lengths": rng.integers(2, P + 1, count).astype(np.int32)}


def experiment(layout="", model=MODEL, sampler="same", how=HELD, rate=1e-2):
    own = Rollouts(model, many_sevens, end=END, longest=N, sampler=sampler)
    made = Experiment.of(
        name="rewarded",
        init_fn=functools.partial(decoder.init, model),
        stages=decoder.stages(model),
        rules=Rules(decoder.RULES, batch=decoder.BATCH),
        gathers_layers=True,
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), prompts()),
        train_batches=None,
        optimizer=jt.make_optimizer(name="adamw", learning_rate=rate, clip_norm=1.0, eps=1e-4),
        steps=3,
        layout=Layout.parse(layout),
    )
    change = Rewarded(functools.partial(decoder.log_probs, model), how, longest=N)
    made = apply(made, change, method=rollouts(own, how))
    if sampler == "exact":
        made = made.with_(stages=None, loss_fn=grpo.exact_loss(change, model))
    return made


def trained(made, steps=3):
    count = math.prod(made.layout.mesh.sizes.values())
    mesh = make_experiment_mesh(made, jax.devices()[:count])
    state = make_state(made, mesh)
    step = compile_train(made, state, mesh)
    metrics = []
    for i in range(steps):
        state, found = step(state, prompts(seed=i))
        metrics.append(jax.device_get(found))
    natural = made.laid.rules.stacked.natural
    return jax.device_get((natural(state.params), state.opt_state)), metrics


@functools.cache
def on_one(sampler="same", model=MODEL):
    return trained(experiment(sampler=sampler, model=model))


def agree(found, wanted):
    for name in ("reward", "length"):  # the same answers
        of = ([float(metrics[name]) for metrics in each[1]] for each in (found, wanted))
        assert next(of) == pytest.approx(next(of))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5), found[0], wanted[0]
    )


@pytest.mark.slow
def test_a_mesh_draws_the_same_answers_and_learns_the_same():
    agree(trained(experiment("data=2,tensor=2,accumulate=2")), on_one())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=8", "fsdp=4,zero=3", "data=2,fsdp=2,accumulate=4,zero=1"])
def test_more_meshes_do_too(layout):
    agree(trained(experiment(layout)), on_one())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "data=2,fsdp=2"])
def test_an_exact_sampler_tells_what_training_computes_to_the_bit(layout):
    found = trained(experiment(layout, sampler="exact"))
    for metrics in found[1]:
        assert metrics["sampler_gap"] == 0
        assert metrics["sampler_ratio"] == 1
    assert found[1][-1]["kl"] > 0
    if layout:
        agree(found, on_one("exact"))


@pytest.mark.slow
def test_a_rounded_sampler_drifts_and_its_weights_are_capped():
    (*_, last), how = on_one()[1], GroupPolicy(size=4, cap=1.001)
    assert 0 < last["sampler_gap"] < 1e-5
    rounded = trained(experiment(sampler="bfloat16", how=how))[1][-1]
    assert rounded["sampler_gap"] > 1e-4
    other = trained(experiment(sampler="bfloat16", how=dataclasses.replace(how, cap=None)))[1][-1]
    assert rounded["loss"] != other["loss"]


@pytest.mark.slow
def test_tokens_go_to_the_experts_that_they_were_sampled_with():
    params = decoder.init(EXPERTS, jax.random.key(0))
    batch, keys = prompts(), jax.random.split(jax.random.key(1), 8)
    given = Prompts(batch["tokens"], batch["lengths"], keys, make_sampling(VOCAB, eod=END))
    found = jax.jit(scored_step(EXPERTS, max_new_tokens=N))(Weights(params), given)
    assert found.routes.shape == (8, 2, P + N - 1, 2)
    rows = []

    def step(state, batch):
        rows.append(jax.tree.map(jnp.shape, batch))
        return state, {}

    own = Rollouts(EXPERTS, many_sevens, end=END, longest=N)
    state = jt.init_state(lambda rng: params, jt.make_optimizer(name="sgd", learning_rate=0.1),
                          jax.random.key(0))  # fmt: skip
    jax.eval_shape(rollouts(own, GroupPolicy(2)).step(step), state, prompts())
    assert rows[0]["routes"] == (16, 2, P + N, 2)
    agree(trained(experiment("data=2,expert=2", model=EXPERTS)), on_one(model=EXPERTS))


@pytest.mark.slow
def test_a_row_is_drawn_alike_whoever_is_beside_it():
    params = decoder.init(MODEL, jax.random.key(0))
    batch, keys = prompts(), jax.random.split(jax.random.key(1), 8)
    sampling = make_sampling(VOCAB, eod=END)
    for is_exact in (False, True):
        step = jax.jit(scored_step(MODEL, max_new_tokens=N, exact=is_exact))
        given = batch["tokens"], batch["lengths"], keys
        whole = step(Weights(params), Prompts(*given, sampling))
        part = step(Weights(params), Prompts(*(x[2:5] for x in given), sampling))
        np.testing.assert_array_equal(part.tokens, whole.tokens[2:5])
        close = np.testing.assert_array_equal if is_exact else np.testing.assert_allclose
        close(part.log_p, whole.log_p[2:5], **({} if is_exact else {"rtol": 1e-5}))


def test_log_probabilities_are_the_models():
    params = decoder.init(MODEL, jax.random.key(0))
    own = Rollouts(MODEL, many_sevens, end=END, longest=N)
    batch = prompts() | {"lengths": np.full(8, P, np.int32)}
    found = jax.jit(own.answer)(params, batch, jax.random.key(2))
    logits_of = jax.jit(functools.partial(decoder.logits, MODEL, params))
    for b in range(8):
        length = batch["lengths"][b]
        text = np.array([*batch["tokens"][b, :length], *found.tokens[b]])
        logits = np.float64(logits_of(text[None, :-1])[0])
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        log_p = log_p[np.arange(len(text) - 1), text[1:]]
        answer = np.asarray(found.tokens[b])
        count = list(answer).index(END) + 1 if END in answer else N
        np.testing.assert_allclose(
            found.log_p[b, :count], log_p[length - 1 :][:count], rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_rewards_rise():
    made = experiment(how=GroupPolicy(size=8, weight="sequence"), rate=3e-3)
    _, metrics = trained(made, steps=20)
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.3


def test_lines_are_judged_as_python_and_as_sums():
    prompt = np.zeros((3, 9), np.int32)
    for row, text in enumerate((b"x\n  f(a[", b"\n47+38=", b"\nwhile(")):
        prompt[row, : len(text)] = np.frombuffer(text, np.uint8)
    lengths = np.array([8, 7, 7])
    new = np.full((3, 6), grpo.NEWLINE)
    for row, text in enumerate((b"0])", b"85", b"x):")):
        new[row, : len(text)] = np.frombuffer(text, np.uint8)
    right = functools.partial(grpo.rewards, grpo.is_python)
    assert right(prompt, lengths, new).tolist() == [1, 0, 1]
    assert grpo.rewards(grpo.is_sum, prompt, lengths, new).tolist() == [0, 1, 0]
    new[0, 2] = ord("}")
    new[1] = ord("8")  # which has no end
    assert right(prompt, lengths, new).tolist() == [0, 0, 1]


def test_changes_that_freeze_nothing_freeze_nothing_together():
    made = apply(experiment(how=GroupPolicy(size=4)), Constrain(False, "int8"))
    assert not made.task.freeze
    with pytest.raises(ValueError, match="mesh axis 'pipe' has size 2, and answers"):
        made.with_(layout=Layout.parse("pipe=2"))


def test_rows_without_advantages_are_refused():
    with pytest.raises(ValueError, match="the batch has mask and no advantage"):
        policy_loss(jnp.zeros((1, 2)), {"mask": jnp.ones((1, 2))})
