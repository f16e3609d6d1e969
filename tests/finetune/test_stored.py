"""A student of stored answers: the loss is that of a teacher in the step where all are stored."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpt, teach
from jaxtrain import data
from jaxtrain.data import ByteTokenizer, taught
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.distill import Distillation, DistillText
from jaxtrain.models import decoder
from jaxtrain.ops.losses import stored_divergence
from jaxtrain.run import trained
from jaxtrain.tree import named_leaves

TEMPERATURE = 1.5
SIZES = {"seq_len": 16, "width": 16, "heads": 2, "global_batch": 8, "held_out_bytes": 0}
TEACHER = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=3, width=24, heads=2)


@pytest.mark.parametrize(("K", "chunk"), [(3, 2), pytest.param(11, None, marks=pytest.mark.slow)])
def test_divergence_of_stored_tokens_and_a_tail_is_that_of_coarse_distributions(K, chunk):
    torch = pytest.importorskip("torch")
    r, V = np.random.default_rng(0), 11
    x, kernel = r.normal(size=(2, 6, 5)), r.normal(size=(5, 16))
    targets, mask = r.integers(0, V, (2, 6)), r.integers(0, 3, (2, 6)) * 0.5
    log_p = torch.tensor(r.normal(size=(2, 6, V))).log_softmax(-1)
    ids = torch.tensor(np.stack([r.permutation(V)[:K] for _ in range(12)]).reshape(2, 6, K))
    stored = log_p.gather(-1, ids)
    rest = torch.log1p(-stored.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-15))
    rest = torch.full_like(rest, -6e4) if K == V else rest
    ours = [torch.tensor(a, requires_grad=True) for a in (x, kernel)]
    log_q = ((ours[0] @ ours[1])[..., :V] / TEMPERATURE).log_softmax(-1)
    kl = (stored.exp() * (stored - log_q.gather(-1, ids))).sum(-1)
    if K < V:
        others = log_q.exp().sum(-1) - log_q.gather(-1, ids).exp().sum(-1)
        kl = kl + (rest.exp() * (rest - others.log()[..., None]))[..., 0]
    expected = (kl * torch.tensor(mask)).sum()
    expected.backward()

    def loss(x, kernel):
        how = {"vocab_size": V, "temperature": TEMPERATURE, "chunk": chunk}
        log_probs = np.concatenate([stored, rest], -1)
        return stored_divergence(x, kernel, ids.numpy(), log_probs, targets, mask, **how)[2]

    arrays = [jnp.asarray(a, jnp.float32) for a in (x, kernel)]
    found, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays)
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    for grad, wanted in zip(grads, ours, strict=True):
        np.testing.assert_allclose(grad, wanted.grad, rtol=1e-4, atol=1e-5)


class Teaching(teach.Config):
    @property
    def teacher(self):
        weights = lambda model: decoder.init(TEACHER, jax.random.key(5))  # noqa: E731
        own = {"model": TEACHER, "weights": weights, "is_run": True, "tokenizer": ByteTokenizer}
        return types.SimpleNamespace(path="/nowhere", **own)


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} and then some words " * 20)
    return str(tmp_path / "text")


def of_stored(text, folder, **more):
    distill = DistillText(stored=folder, temperature=TEMPERATURE, mix=0.7)
    return gpt.build(gpt.Config(data=text, layers=2, distill=distill, **SIZES | more))


def first_batch(experiment):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with experiment.data.train_batches(0, place) as stream:
        return next(iter(stream))


def test_rows_bring_their_answers_and_others_are_refused(tmp_path):
    corpus = data.tokenize([data.Document("a", b"some words, and more")], data.ByteTokenizer())
    rows = data.PackedTokens(corpus, 8)
    about = taught.about_rows(rows, "bytes") | {"top": 2, "temperature": 1.0}
    ids = np.arange(3 * 8 * 2).reshape(3, 8, 2)
    log_probs = -np.arange(3 * 8 * 3.0).reshape(3, 8, 3)
    with pytest.raises(ValueError, match=r"holds no teacher's answers: make it by"):
        taught.read_about(tmp_path)
    parts = [(ids[:2], log_probs[:2]), (ids[2:], log_probs[2:])]
    assert taught.write_answers(tmp_path, about, parts, "float16") == 24 * (2 * 4 + 3 * 2)
    found = taught.Taught(rows, tmp_path, "bytes")
    for i in (0, -1):
        assert (found[i]["tokens"] == rows[i]["tokens"]).all()
        assert (found[i]["teacher_ids"] == ids[i]).all()
        assert (found[i]["teacher_log_probs"] == log_probs[i]).all()
    with pytest.raises(ValueError, match=r"are of other rows \(packing is PackedTokens there"):
        taught.Taught(data.FittedTokens(corpus, 8), tmp_path, "bytes")
    with pytest.raises(ValueError, match="`data` is a mixture, or grows: a teacher's"):
        taught.about_rows([], "bytes")


@pytest.mark.slow
def test_all_tokens_stored_give_the_loss_and_gradients_of_a_teacher_in_the_step(
    text, tmp_path, capsys
):
    out = str(tmp_path / "answers")
    given = {"data": text, "distill": DistillText(temperature=TEMPERATURE), "out": out, **SIZES}
    teach.main(Teaching(top=257, dtype="float32", **given))
    size = 16 * (4 * 257 + 4 * 258)
    rows = json.loads((tmp_path / "answers" / "teacher.json").read_text())["rows"]
    assert f"{rows:,} rows of 16 positions" in capsys.readouterr().out
    found = (tmp_path / "answers" / "answers.npy").stat().st_size
    assert 0 <= found - rows * size < 512  # its header
    stored = of_stored(text, out)
    plain = gpt.build(gpt.Config(data=text, layers=2, **SIZES))
    model = trained.read_model(plain.metadata.config, where="the test")
    loss = decoder.distillation_loss(model, TEACHER, temperature=TEMPERATURE, mix=0.7)
    init = functools.partial(decoder.init, TEACHER)
    change = Distillation(decoder.stages(TEACHER), init, loss, depth=2)
    in_step = apply(plain, change)
    params = plain.task.init_fn(jax.random.key(0))
    change = dataclasses.replace(change, weights=lambda: init(jax.random.key(5)))
    both = change.params(params)
    with stored.data.train_batches(
        0, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ) as stream:
        batch = next(iter(stream))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(
        lambda x: (x.shape, x.dtype), stored.data.batch
    )
    grad = lambda e: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda p: e.laid.loss_fn(p, batch, None).means()["loss"])
    )
    (found, grads), (expected, wanted) = grad(stored)(params), grad(in_step)(both)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    wanted = named_leaves(wanted)
    for name, g in named_leaves(grads).items():
        np.testing.assert_allclose(g, wanted[name], atol=1e-5 * np.abs(wanted[name]).max() + 1e-7)
    # Fewer tokens: other rows are refused by name, and the divergence is no more than that of all.
    teach.main(Teaching(top=4, **given))
    few = jax.jit(of_stored(text, out).laid.loss_fn)
    part = few(params, first_batch(of_stored(text, out)), None).means()["divergence"]
    whole = jax.jit(stored.laid.loss_fn)(params, batch, None).means()["divergence"]
    assert 0 < part < whole
    with pytest.raises(ValueError, match=r"are of other rows \(seq_len is 16 there and 8 here\)"):
        of_stored(text, out, seq_len=8)
    with pytest.raises(ValueError, match=r"--distill.temperature is 2\.0 and the answers"):
        gpt.build(gpt.Config(data=text, layers=2, distill=DistillText(stored=out), **SIZES))
