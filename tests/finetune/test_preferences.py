"""Losses of preferences are their papers' formulas, of whole conversations, on every mesh and
however rows are packed."""

import dataclasses
import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.build import build_step, make_experiment_mesh, make_state
from jaxtrain.compare.parity import worst
from jaxtrain.data.chat import TEMPLATES
from jaxtrain.experiment import Experiment
from jaxtrain.finetune import preferences
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.models import decoder
from jaxtrain.optim.masks import resolve
from jaxtrain.stages import run_layers
from jaxtrain.tree import map_named, named_leaves
from tests import problems
from tests.problems import record_gradients

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}
BETA, T, ROWS, STEPS = 0.4, 32, 8, 2
MODEL = decoder.DecoderConfig(vocab_size=257, seq_len=T, layers=2, width=16, heads=2)
LOG_PROBS = functools.partial(decoder.log_probs, MODEL)
HOW = {name: preferences.Preference(name, BETA) for name in preferences.LOSSES}
DPO = preferences.Preferences(LOG_PROBS, HOW["dpo"])
PAIRED = [name for name in HOW if name != "kto_unpaired"]


def definition(policy, reference, beta):
    """Equation 7 of the paper, of log-probabilities [pairs, 2] in float64."""
    (chosen, rejected), (was_chosen, was_rejected) = policy.T, reference.T
    h = beta * (chosen - was_chosen - rejected + was_rejected)
    return -np.log(1 / (1 + np.exp(-h)))


def of_trl(name, policy, reference, length, beta, gamma):
    """The losses and rewards of the pairs of one row, of torch's sums [pairs, 2], as TRL's trainers
    write them: DPO's (of which ipo takes means, and kto_pair), CPO's (simpo) and ORPO's."""
    import torch
    from torch.nn.functional import logsigmoid

    if name == "reward":  # of the last tokens' scores
        return -logsigmoid(beta * (policy[:, 0] - policy[:, 1])), policy
    if name in ("ipo", "simpo", "orpo"):
        policy, reference = policy / length, reference / length
    (chosen, rejected), (was_chosen, was_rejected) = policy.T, reference.T
    logits = (chosen - rejected) - (was_chosen - was_rejected)
    rewards = beta * (policy - reference if name in ("dpo", "ipo", "kto") else policy)
    if name == "dpo":
        return -logsigmoid(beta * logits), rewards
    if name == "ipo":
        return (logits - 1 / (2 * beta)) ** 2, rewards
    if name == "kto":
        chosen_kl = (chosen - was_chosen).mean().clamp(min=0).detach()
        rejected_kl = (rejected - was_rejected).mean().clamp(min=0).detach()
        first = 1 - torch.sigmoid(beta * (chosen - was_chosen - rejected_kl))
        second = 1 - torch.sigmoid(beta * (chosen_kl - (rejected - was_rejected)))
        return (first + second) / 2, rewards
    if name == "simpo":
        return -logsigmoid(beta * (chosen - rejected - gamma / beta)), rewards
    log_odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return -chosen - beta * logsigmoid(log_odds), rewards


@functools.cache
def labelled():
    """Answers with labels, of which a row holds several, and a batch."""
    r, plain, documents = np.random.default_rng(4), data.ChatTemplate(TEMPLATES["plain"]), []
    for n in range(30):
        told = ["".join(r.choice(list("abcdé"), r.integers(1, 7))) for _ in range(2)]
        record = {"prompt": told[0], "completion": told[1], "label": bool(r.random() < 0.6)}
        documents += plain.conversations(str(n), record)
    rows = data.PairedTokens(data.tokenize(documents, data.ByteTokenizer()), T)
    return rows, data.Batches(rows, global_batch=ROWS, seed=1)


@functools.cache
def packed():
    """Preferences of such lengths that a row holds from one to several of them, and a batch."""
    r, plain, documents = np.random.default_rng(3), data.ChatTemplate(TEMPLATES["plain"]), []
    for n in range(24):
        longest = (5, 20, 20) if n % 3 else (3, 4, 4)
        texts = ["".join(r.choice(list("abcdé"), r.integers(1, most))) for most in longest]
        texts = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        documents += plain.conversations(str(n), texts | {"chosen": texts["chosen"] + "!"})
    rows = data.PairedTokens(data.tokenize(documents, data.ByteTokenizer()), T)
    return rows, data.Batches(rows, global_batch=ROWS, seed=1)


def params_of(rng):
    """Policy and reference, which differ."""
    ours, theirs = (decoder.init(MODEL, key) for key in jax.random.split(rng))
    return DPO.back(DPO.params(ours)), theirs


def both(rng):
    ours, theirs = params_of(rng)
    theirs = DPO.params(theirs)
    ours = ours | {"reference": theirs["reference"]}
    return ours | {"blocks": ours["blocks"] | {"reference": theirs["blocks"]["reference"]}}


def sums_of(params, corpus, pairs):
    """Log-probabilities [pairs, 2] of what counts, each conversation a row of its own."""
    tokens, counts = np.zeros((2, 2 * len(pairs), T + 1), np.int32)
    for row, index in enumerate(2 * pair + side for pair in pairs for side in (0, 1)):
        own, start = corpus.document(index), int(corpus.starts[index])
        tokens[row, : len(own)] = own
        counts[row, : len(own)] = corpus.counts[start : start + len(own)]
    logits = decoder.logits(MODEL, params, tokens[:, :-1])
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)[..., 0]
    return (found * counts[:, 1:]).sum(axis=1).reshape(-1, 2)


@pytest.mark.parametrize("name", PAIRED)
def test_losses_and_gradients_are_those_of_the_papers(name):
    torch = pytest.importorskip("torch")
    r = np.random.default_rng(0)
    policy, reference = -np.abs(r.normal(1, 1, (2, 3, 2, 7))).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 3, 3, 3]])
    segments = np.stack([segments, [[1] * 7, [1, 1, 0, 0, 0, 0, 0]], np.zeros((2, 7), int)])
    mask = (r.random(segments.shape) < 0.7) * (segments > 0).astype(np.float32)
    mask[0, 0, [0, 3, 5]] = mask[0, 1, [0, 1, 4]] = mask[1, :, 0] = 1  # none is without tokens
    batch = {"mask": mask, "segments": segments}

    def sums(x, row, numbers):
        counted = x[row] * torch.tensor(mask[row])
        if name == "reward":
            own = lambda side, s: x[row, side][np.flatnonzero(segments[row, side] == s)[-1]]  # noqa: E731
        else:
            own = lambda side, s: counted[side][torch.tensor(segments[row, side] == s)].sum()  # noqa: E731
        return torch.stack([torch.stack([own(0, s), own(1, s)]) for s in numbers])

    ours = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    all_of = ours, torch.tensor(reference, dtype=torch.float64), torch.ones_like(ours)
    rows = [[sums(x, *row) for x in all_of] for row in ((0, (1, 2, 3)), (1, (1,)))]
    losses, rewards = zip(*(of_trl(name, *row, BETA, 0.3) for row in rows), strict=True)
    losses, rewards = torch.cat(losses), torch.cat(rewards).detach().numpy()
    losses.sum().backward()

    how = dataclasses.replace(HOW[name], gamma=0.3 if name == "simpo" else None)
    theirs = reference if how.has_reference else None

    def loss(policy):
        return preferences.pair_loss(policy, batch, how, reference=theirs)

    found = loss(policy)
    np.testing.assert_allclose(found.total, losses.sum().item(), rtol=1e-5)
    means = found.means()
    assert found.weight == 4
    expected = rewards.mean(axis=0)
    np.testing.assert_allclose([means["reward_chosen"], means["reward_rejected"]], expected, 1e-4)
    np.testing.assert_allclose(means["margin"], expected[0] - expected[1], 1e-4)
    assert means["accuracy"] == (rewards[:, 0] > rewards[:, 1]).mean()
    gradient = jax.grad(lambda policy: loss(policy).total)(policy)
    np.testing.assert_allclose(gradient, ours.grad, rtol=1e-4, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


def experiment_of(batch, name="dpo", **given):
    change, model = dataclasses.replace(DPO, how=HOW[name]), MODEL
    if name == "reward":
        model = dataclasses.replace(MODEL, head="score")
        change = dataclasses.replace(change, log_probs=functools.partial(decoder.scores, model))
    stages = change.stages(decoder.stages(model))
    optimizer = optax.chain(
        record_gradients(), jt.make_optimizer("adamw", 1e-3, eps=1e-4, freeze=change.freeze)
    )
    given = {"gather": "model", "pipeline": {"microbatches": 4, "schedule": "1f1b"}} | given
    given = problems.with_layout(given)
    return Experiment.of(
        name="preferences",
        init_fn=both if HOW[name].has_reference else functools.partial(decoder.init, model),
        loss_fn=jt.loss_from_stages(stages),
        stages=stages,
        optimizer=optimizer,
        rules=change.rules(decoder.RULES),
        batch=batch,
        train_batches=None,
        steps=STEPS,
        **given,
    )


@functools.cache
def trained(axes=(), accumulate=1, name="dpo"):
    """Metrics, gradients, moments and parameters after some steps on a batch."""
    batch = (labelled if name == "kto_unpaired" else packed)()[1].batch(0)
    experiment = experiment_of(batch, name, mesh=dict(axes), accumulate=accumulate)
    mesh = make_experiment_mesh(experiment, jax.devices()[: math.prod(dict(axes).values())])
    state = make_state(experiment, mesh)
    step = build_step(experiment, state, mesh)
    train = jt.compile_step(
        step, state, batch, mesh=mesh, rules=experiment.task.rules, compiler_options=FAST
    )
    for _ in range(STEPS):
        state, metrics = train(state, batch)
    names = ("loss", "weight", "accuracy", "margin", "reward_chosen", "reference_point")
    metrics = {name: metrics[name] for name in names if name in metrics}
    return jax.device_get((metrics, state.opt_state, state.params))


@pytest.mark.slow
def test_packed_pairs_have_the_loss_and_gradients_of_each_conversation_alone():
    rows, batches = packed()
    corpus, batch = rows.corpus, batches.batch(0)
    counts = batch["segments"].max(axis=(1, 2))
    assert (counts.min(), counts.max() > 2) == (1, True)
    begins = [
        rows._begin[slice(*rows._first[row : row + 2]), 0]
        for row in map(batches.source_index, range(ROWS))
    ]
    pairs = np.searchsorted(corpus.starts, np.concatenate(begins)) // 2
    ours, theirs = params_of(jax.random.key(5))
    reference = np.asarray(sums_of(theirs, corpus, pairs), np.float64)

    def mean(ours):
        h = BETA * (sums_of(ours, corpus, pairs) - reference.astype(np.float32))
        return jax.nn.softplus(h[:, 1] - h[:, 0]).mean()

    expected = jax.grad(mean)(ours)
    policy = np.asarray(sums_of(ours, corpus, pairs), np.float64)
    losses = definition(policy, reference, BETA)
    alone = lambda params, rows, rng=None: log_probs(params, rows)  # noqa: E731
    flat = {name: x.reshape(-1, T) for name, x in batch.items()}
    known = batch | {"reference": np.asarray(alone(theirs, flat)).reshape(ROWS, 2, T)}
    by_batch = preferences.preference_loss(alone, HOW["dpo"])
    by_weights = preferences.preference_loss(
        alone, HOW["dpo"], reference=lambda params, rows: alone(theirs, rows)
    )
    np.testing.assert_allclose(by_batch(ours, known, None).means()["loss"], losses.mean(), 1e-5)
    step = jt.build_train_step(by_weights, record_gradients(), accumulate=2)
    state = jt.init_state(lambda rng: ours, record_gradients(), jax.random.key(0))
    state, metrics = jax.jit(step)(state, batch)
    assert metrics["weight"] == len(pairs) == counts.sum()
    np.testing.assert_allclose(metrics["loss"], losses.mean(), rtol=1e-5)
    assert worst(state.opt_state, expected)[0] < 1e-4
    with pytest.raises(ValueError, match=r"no array 'reference' .* or give preference_loss"):
        by_batch(ours, batch, None)


def test_answers_with_labels_have_the_loss_and_gradients_of_trl():
    """KTOTrainer's loss, of conversations each in a row of its own; its batch is a row here."""
    rows, batches = labelled()
    corpus, batch = rows.corpus, batches.batch(0)
    texts = [corpus.document(2 * i + int(len(corpus.document(2 * i)) == 1)) for i in range(30)]
    prompts, label = rows._prompts, [len(corpus.document(2 * i)) > 1 for i in range(30)]
    ours, theirs = params_of(jax.random.key(5))

    def gains(params, prompt, answers):
        """Of each prompt with an answer, [n]."""
        tokens, counts = np.zeros((2, len(prompt), T + 1), np.int32)
        for row, (i, j) in enumerate(zip(prompt, answers, strict=True)):
            both = [*texts[i][: prompts[i]], *texts[j][prompts[j] :]]
            tokens[row, : len(both)] = both
            counts[row, prompts[i] : len(both)] = 1

        def sums(params):
            logits = decoder.logits(MODEL, params, tokens[:, :-1])
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)
            return (found[..., 0] * counts[:, 1:]).sum(axis=1)

        return sums(params) - sums(theirs)

    at = [range(*rows._first[row : row + 2]) for row in map(batches.source_index, range(ROWS))]
    pairs = [rows._pair[list(each)] for each in at]
    assert max(map(len, pairs)) > 2

    every = np.concatenate(pairs)
    row = np.repeat(np.arange(ROWS), list(map(len, pairs)))

    def total(ours):
        own, other = (gains(ours, every, each) for each in (every, (every - 1) % 30))
        sums = jax.ops.segment_sum(jnp.stack([other, jnp.ones_like(other)]).T, row, ROWS)
        kl = jax.lax.stop_gradient(jnp.maximum(sums[:, 0] / sums[:, 1], 0))
        over = BETA * (own - kl[row])
        bad = 2 * (1 - jax.nn.sigmoid(-over))
        return jnp.where(np.array(label)[every], 1 - jax.nn.sigmoid(over), bad).sum()

    how = preferences.Preference("kto_unpaired", BETA, gamma=2.0)
    stages = dataclasses.replace(DPO, how=how).stages(decoder.stages(MODEL))
    params, loss = both(jax.random.key(5)), jt.loss_from_stages(stages)

    def of_stages(params):
        found = loss(params, batch, None)
        return found.total, found.weight

    (found, weight), grads = _now(jax.value_and_grad(of_stages, has_aux=True), params)
    expected, wanted = _now(jax.value_and_grad(total), ours)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert worst(DPO.back(grads), wanted)[0] < 1e-4
    assert weight == len(every)


def _now(function, params):
    return jax.jit(function).lower(params).compile(FAST)(params)


def test_stages_are_the_loss_of_policy_and_reference():
    batch = packed()[1].batch(0)
    ours, theirs = params_of(jax.random.key(5))
    stages = DPO.stages(decoder.stages(MODEL))
    alone = lambda params, rows, rng=None: log_probs(params, rows)  # noqa: E731
    by_weights = lambda _, rows: alone(theirs, rows)  # noqa: E731
    plain = preferences.preference_loss(alone, HOW["dpo"], reference=by_weights)
    found = jt.loss_from_stages(stages)(both(jax.random.key(5)), batch, None).means()
    for name, expected in plain(ours, batch, None).means().items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_reference_does_not_drop():
    model = dataclasses.replace(MODEL, dropout=0.5)
    stages = DPO.stages(decoder.stages(model))
    params, batch = both(jax.random.key(5)), packed()[1].batch(0)
    dropped, whole = (stages.embed(params, batch, key) for key in (jax.random.key(0), None))
    np.testing.assert_array_equal(dropped["reference"], whole["reference"])
    assert (dropped["policy"] != whole["policy"]).any()


def log_probs(params, rows):
    x = decoder.embed(MODEL, params, rows)
    return LOG_PROBS(params, run_layers(decoder.stages(MODEL), params, x, rows, None), rows)


@pytest.mark.slow
def test_what_is_the_reference_stays():
    _, opt_state, params = trained()
    before = jax.device_get(make_state(experiment_of(packed()[1].shapes), None).params)
    kept = [both["reference"] for both in (params, params["blocks"])]
    was = [both["reference"] for both in (before, before["blocks"])]
    jax.tree.map(np.testing.assert_array_equal, kept, was)
    assert not any("reference" in name for name in jt.tree.named_leaves(opt_state[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "accumulate"),
    [
        pytest.param((), 4, marks=pytest.mark.slow),
        ((("data", 2), ("fsdp", 2), ("tensor", 2)), 2),
        pytest.param((("pipe", 2), ("data", 2)), 1, marks=pytest.mark.slow),
        pytest.param((("data", 4), ("tensor", 2)), 1, marks=pytest.mark.slow),
        pytest.param((("fsdp", 4),), 2, marks=pytest.mark.slow),
        pytest.param((("pipe", 2), ("fsdp", 2), ("tensor", 2)), 1, marks=pytest.mark.slow),
    ],
)
def test_accumulation_meshes_and_pipelines_agree_with_one_device(axes, accumulate):
    for found, expected in zip(trained(axes, accumulate), trained(), strict=True):
        error, where = worst(found, expected)[:2]
        assert error < 1e-5, where


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOW if name != "dpo"])
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param((("data", 2), ("fsdp", 2), ("tensor", 2)), marks=pytest.mark.slow),
        (("pipe", 2),),
    ],
)
def test_other_losses_agree_with_one_device(name, axes):
    accumulate = 1 if axes[0][0] == "pipe" else 2
    for found, expected in zip(trained(axes, accumulate, name), trained(name=name), strict=True):
        error, where = worst(found, expected)[:2]
        assert error < 1e-5, where


def test_a_loss_without_a_reference_has_no_second_model():
    change = dataclasses.replace(DPO, how=HOW["orpo"])
    params = decoder.init(MODEL, jax.random.key(0))
    assert jax.tree.structure(change.params(params)) == jax.tree.structure(params)
    assert not change.freeze
    batch = packed()[1].batch(0)
    x = change.stages(decoder.stages(MODEL)).embed(params, batch, None)
    assert x.keys() == {"policy"}
    found = jt.loss_from_stages(change.stages(decoder.stages(MODEL)))(params, batch, None)
    plain = preferences.preference_loss(lambda p, rows, rng: log_probs(p, rows), HOW["orpo"])
    np.testing.assert_allclose(found.total, plain(params, batch, None).total, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_low_rank_additions_the_base_is_there_once(dora):
    """The reference is the model without additions, and has copies of what else trains."""
    batch, lora = packed()[1].batch(0), LoRA(rank=1, dora=dora, train=("^final_norm/",))
    base = decoder.init(MODEL, jax.random.key(0))
    params = lora.params(base, jax.random.key(1))
    change = dataclasses.replace(DPO, frozen=lora.freeze)
    both = change.params(params)
    kept = named_leaves(both).keys() - named_leaves(params).keys()
    assert kept == {"reference/final_norm/scale", "reference/final_norm/bias"}
    r = np.random.default_rng(0)
    more = lambda x: x + 0.1 * r.normal(size=x.shape).astype("f")  # noqa: E731
    moved = map_named(lambda n, x: more(x) if re.search("/b$|magnitude$|^final", n) else x, both)
    loss = jt.loss_from_stages(change.stages(decoder.stages(MODEL)))

    def copied(params, batch, rng):
        alone = lambda params, rows, rng=None: log_probs(params, rows)  # noqa: E731
        return preferences.preference_loss(
            alone, HOW["dpo"], reference=lambda _, rows: alone(base, rows)
        )(params, batch, rng)

    policy = change.back(moved)
    sides = ((loss, moved), (copied, policy))
    found, expected = (
        jax.jit(jax.grad(lambda p, f=f: f(p, batch, None).total)).lower(p).compile(FAST)(p)
        for f, p in sides
    )
    trains = jax.tree.map(lambda still: not still, lora.freeze(policy))
    found = change.back(found)
    pairs = zip(*map(jax.tree.leaves, (found, expected, trains)), strict=True)
    errors = [float(abs(a - b).max() / abs(b).max()) for a, b, is_trained in pairs if is_trained]
    assert len(errors) > 10
    assert max(errors) < 1e-4

    optimizer = jt.make_optimizer("adamw", 1e-3, freeze=lambda p: jax.tree.map(
        operator.or_, lora.freeze(p), resolve("freeze", change.freeze, p)))  # fmt: skip
    state = jt.init_state(lambda rng: both, optimizer, jax.random.key(0))
    step = jt.build_train_step(loss, optimizer)
    compiled = jax.jit(step).lower(state, batch).compile(FAST)
    size = sum(x.nbytes for x in jax.tree.leaves(base))
    kept = compiled.memory_analysis().argument_size_in_bytes
    assert size < kept - sum(x.nbytes for x in batch.values()) < 1.5 * size


def test_models_of_several_stacks_are_refused():
    stages = dataclasses.replace(decoder.stages(MODEL), shared=("embed",))
    with pytest.raises(
        ValueError, match=r"in one stack 'blocks' of layers that share no parameters.*use pref"
    ):
        DPO.stages(stages)
