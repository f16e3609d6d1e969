"""Pairs of sentences: scores against whole logits in NumPy, intervals against the normal law."""

import csv
import json
import math

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import data, hf
from jaxtrain.data.enclosed import FIRST, MASK
from jaxtrain.evaluate import scoring
from jaxtrain.evaluate.intervals import interval
from jaxtrain.evaluate.pairs import preferences
from jaxtrain.evaluate.scoring import MaskedScorer
from jaxtrain.hf.opening import Opened
from jaxtrain.models import encoder
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.commands import refused, run
from tests.evaluate.test_evaluate import log_softmax, opened

PAIRS = [
    {"more": "He was an engineer.", "less": "She was an engineer.", "kind": "work"},
    {"more": "A man wept", "less": "A woman wept", "kind": "tears"},
    {"more": "They are loud", "less": "They are quiet and shy", "kind": "work"},
    {"more": "the same", "less": "the same", "kind": "tears"},
]


def write_pairs(path, rows=PAIRS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def drawn(tokens):
    config = encoder.EncoderConfig(vocab_size=tokens, seq_len=40, layers=2, width=32, heads=4)
    params = encoder.init(config, jax.random.key(0))
    return config, jax.tree.map(
        lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 1}, {"fsdp": 2, "tensor": 2}])
def test_each_token_is_scored_where_it_alone_is_masked(axes):
    config, params = drawn(61)
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    placed = jax.device_put(params, param_shardings(params, mesh, as_rules(encoder.RULES)))
    rng = np.random.default_rng(0)
    sentences = [rng.integers(5, 61, n).tolist() for n in (12, 1)]
    scorer = MaskedScorer(config, placed, mesh=mesh, ends=(1, 2), mask=3, rows=4)
    for tokens, found in zip(sentences, scorer(sentences), strict=True):
        rows = np.tile([1, *tokens, 2], (len(tokens), 1))
        places = np.arange(len(tokens))
        rows[places, places + 1] = 3
        batch = {"tokens": rows, "segments": np.ones_like(rows)}
        logits = np.float64(encoder.logits(config, params, batch)[places, places + 1])
        logits -= logits.max(-1, keepdims=True)
        wanted = logits[places, tokens] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    with pytest.raises(ValueError, match="a sentence has 39 tokens: give 1 to 38"):
        scorer([[7] * 39])


@pytest.mark.slow
def test_a_decoder_prefers_the_sentence_that_it_finds_likelier(tmp_path, monkeypatch):
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    monkeypatch.setattr(scoring, "find_model", lambda folder: (folder, model.model, False))
    found = preferences(write_pairs(tmp_path / "pairs.csv"), model, mesh=mesh)["whole"]

    def nats(text):
        tokens = [256, *text.encode()]
        logp = log_softmax(model, tokens[:-1])
        return sum(logp[t, token] for t, token in enumerate(tokens[1:]))

    apart = np.array([nats(row["more"]) - nats(row["less"]) for row in PAIRS])
    wins = np.where(np.abs(apart) < 1e-6, 0.5, apart > 0)
    assert found["all"]["pairs"] == 4
    assert found["all"]["share"] == pytest.approx(wins.mean())
    assert found["all"]["nats"] == pytest.approx(apart.mean(), rel=1e-4)
    assert found["work"]["nats"] == pytest.approx(apart[[0, 2]].mean(), rel=1e-4)
    assert found["tears"]["share"] == pytest.approx(wins[[1, 3]].mean())
    low, high = found["all"]["nats_interval"]
    assert apart.min() <= low <= apart.mean() <= high <= apart.max()


def test_an_encoder_is_asked_of_what_both_sentences_share(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    own = data.SubwordTokenizer.train([b"He was a man, she a woman."], 262)
    own = own.adding(FIRST[0], MASK[0])
    config, params = drawn(own.vocab_size)
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    rows = [{"more": "a man x", "less": "a cat x"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    found = preferences(str(path), Opened(config, params, own, "", ((), ())), mesh=mesh)
    ends, mask = (own.special_id(b"[CLS]"), own.eod), own.special_id(b"[MASK]")
    scorer = MaskedScorer(config, params, mesh=mesh, ends=ends, mask=mask)
    more, less = (own.encode(rows[0][side]).tolist() for side in ("more", "less"))
    one, two = scorer([more, less])
    assert found["whole"]["all"]["nats"] == pytest.approx(one.sum() - two.sum(), abs=1e-5)
    assert set(found["whole"]) == {"all"}
    # What differs is in the middle: as many tokens before it and behind it are the same.
    before = next(i for i, (a, b) in enumerate(zip(more, less, strict=False)) if a != b)
    both = enumerate(zip(more[::-1], less[::-1], strict=False))
    behind = next(i for i, (a, b) in both if a != b)
    kept = [x[:before].sum() + x[len(x) - behind :].sum() for x in (one, two)]
    middle = set(more[before : len(more) - behind]) & set(less[before : len(less) - behind])
    assert min(before, behind) > 0
    assert not middle
    assert found["shared"]["all"]["nats"] == pytest.approx(kept[0] - kept[1], abs=1e-5)
    hf.save(tmp_path / "model", config, params, files={"tokenizer.json": own.to_json()})
    given = ["evaluate", "--model", str(tmp_path / "model"), "--rows", "4"]
    out = tmp_path / "results.jsonl"
    status, printed, _ = run(capsys, *given, "--pairs", str(path), "--out", str(out))
    assert status == 0
    assert "shared  all                        1 pairs  likelier" in printed
    stored = json.loads(out.read_text())["pairs"][str(path)]
    assert stored["whole"]["all"]["nats"] == pytest.approx(found["whole"]["all"]["nats"], abs=1e-5)
    told = refused(capsys, *given, "--data", "python")
    assert "has the head 'tokens', which predicts nothing" in told
    (tmp_path / "bad.csv").write_text("more,other\na,b\n")
    assert "row 1 has no 'less'" in refused(capsys, *given, "--pairs", str(tmp_path / "bad.csv"))


def test_the_interval_of_a_mean_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = interval(np.mean, values)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)
    assert interval(np.mean, values) == (low, high)
    a, b = values, values * 2 + 1  # rows that belong together stay together
    low, high = interval(lambda x, y: float((y - 2 * x).mean()), a, b)
    assert low == pytest.approx(1)
    assert high == pytest.approx(1)
