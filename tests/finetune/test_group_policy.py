"""Losses of rewarded answers against their definitions in NumPy, and the rows that they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.finetune.group_policy import WEIGHTS, GroupPolicy, answer_rows, policy_loss

B, T, LONGEST = 6, 7, 5


def made(seed=0):
    """Log-probabilities of a policy and its reference, and a batch; one answer is empty."""
    rng = np.random.default_rng(seed)
    lengths = np.array([1, 3, 5, 2, 4, 0])
    at = np.arange(T) - rng.integers(0, 2, (B, 1))
    mask = ((at >= 0) & (at < lengths[:, None])).astype(np.float32)
    log_p, sampled, reference = (-rng.uniform(0, 3, (B, T)).astype(np.float32) for _ in range(3))
    batch = {"mask": mask, "sampled": sampled * mask}
    batch["advantage"] = rng.normal(size=B).astype(np.float32)
    return log_p, reference, batch


def definition(log_p, reference, batch, how):
    """Loss, its gradient by log p, and metrics, token by token in float64."""
    total, counts = 0.0, batch["mask"].sum(axis=1)
    gradient = np.zeros((B, T))
    weight = {"sequence": (counts > 0).sum(), "token": counts.sum()}
    weight["constant"] = (counts > 0).sum() * LONGEST
    for b, t in zip(*np.nonzero(batch["mask"]), strict=True):
        p, q = np.float64(log_p[b, t]), np.float64(batch["sampled"][b, t])
        ratio = 1.0 if how.cap is None else min(np.exp(p - q), how.cap)
        d = np.float64(reference[b, t]) - p
        share = 1 / counts[b] if how.weight == "sequence" else 1.0
        total -= share * (batch["advantage"][b] * ratio - how.kl * (np.exp(d) - d - 1))
        gradient[b, t] = -share * (batch["advantage"][b] * ratio + how.kl * (np.exp(d) - 1))
    return total / weight[how.weight], gradient / weight[how.weight]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("more", [{}, {"kl": 0.3, "cap": 1.2}], ids=["plain", "kl and cap"])
def test_loss_and_gradient_are_the_definition(weight, more):
    how, (log_p, reference, batch) = GroupPolicy(weight=weight, **more), made()

    def loss(log_p):
        given = {"longest": LONGEST, "reference": reference if how.kl else None}
        return policy_loss(log_p, batch, how, **given).means()["loss"]

    found, gradient = jax.value_and_grad(loss)(jnp.asarray(log_p))
    wanted, of = definition(log_p, reference, batch, how)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, of, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_microbatches_of_any_lengths_are_the_whole_batch(weight):
    """With a mean of means, an answer of one token would weigh as one of five."""
    how, (log_p, _, batch) = GroupPolicy(weight=weight), made()
    optimizer = jt.make_optimizer(name="sgd", learning_rate=1.0)

    def loss(params, batch, rng):
        return policy_loss(batch["x"] * params["scale"], batch, how, longest=LONGEST)

    found = []
    for accumulate in (1, 3, 6):
        state = jt.init_state(lambda rng: {"scale": jnp.ones(T)}, optimizer, jax.random.key(0))
        step = jt.build_train_step(loss, optimizer, accumulate=accumulate)
        found.append(jax.jit(step)(state, batch | {"x": log_p}))
    for state, metrics in found[1:]:
        np.testing.assert_allclose(state.params["scale"], found[0][0].params["scale"], rtol=1e-5)
        for name in ("loss", "sampler_gap", "sampler_ratio"):
            np.testing.assert_allclose(metrics[name], found[0][1][name], rtol=1e-5)


def test_what_lies_behind_an_answer_may_be_anything():
    log_p, reference, batch = made()
    how = GroupPolicy(kl=0.1, cap=2.0)
    poisoned = np.where(batch["mask"] > 0, log_p, np.nan)
    loss = lambda x: policy_loss(x, batch, how, reference=reference).means()["loss"]  # noqa: E731
    found, gradient = jax.value_and_grad(loss)(jnp.asarray(poisoned))
    assert found == loss(log_p)
    assert np.isfinite(gradient).all()


def test_advantages_are_of_groups():
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1, 0.5, 0, 1, 0], np.float32)
    groups = rewards.reshape(3, 4).astype(np.float64)
    centred = groups - groups.mean(axis=1, keepdims=True)
    wanted = centred / (groups.std(axis=1, keepdims=True) + 1e-4)
    found = GroupPolicy(4).advantages(jnp.asarray(rewards))
    np.testing.assert_allclose(found, wanted.reshape(-1), rtol=1e-5, atol=1e-6)


def test_rows_hold_each_answer_behind_its_prompt():
    rng, end, P, N = np.random.default_rng(0), 9, 5, 4
    prompts, lengths = rng.integers(10, 99, (20, P)), rng.integers(1, P + 1, 20)
    new, log_p = rng.integers(5, 12, (20, N)), -rng.uniform(0, 1, (20, N)).astype(np.float32)
    for row in new:  # as a sampler fills it
        ends = np.flatnonzero(row == end)
        row[ends[0] if len(ends) else N :] = end
    rows = answer_rows(*map(jnp.asarray, (prompts, lengths, new, log_p)), end)
    for b in range(20):
        count = min(list(new[b]).index(end) + 1 if end in new[b] else N, N)
        text = [*prompts[b, : lengths[b]], *new[b, :count]]
        assert rows["tokens"][b, : len(text)].tolist() == text
        at = np.flatnonzero(rows["mask"][b])
        assert rows["targets"][b, at].tolist() == new[b, :count].tolist()
        np.testing.assert_array_equal(rows["sampled"][b, at], log_p[b, :count])
        assert not np.delete(np.asarray(rows["sampled"][b]), at).any()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"size": 1}, "`size` is 1: a reward is compared"),
        ({"kl": -1.0}, "`kl` is -1.0: give 0 or more"),
        ({"cap": 0.0}, "`cap` is 0.0: give a number above 0"),
        ({"weight": "mean"}, "`weight` is 'mean': use one of sequence"),
    ],
)
def test_numbers_that_it_cannot_have_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        GroupPolicy(**given).checked()
