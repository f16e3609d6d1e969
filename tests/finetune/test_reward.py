"""Reward models have the scores, loss and gradients of transformers' sequence classifiers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.finetune.preferences import Preference, Preferences
from jaxtrain.hf.families import family_for
from jaxtrain.models import decoder
from jaxtrain.tree import named_leaves

SHAPE = {"vocab_size": 61, "seq_len": 16, "layers": 2, "width": 16, "heads": 2, "head": "score"}
GPT2 = decoder.DecoderConfig(**SHAPE)
LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": False}
LLAMA = decoder.DecoderConfig(**SHAPE, **LLAMA)
PAD = 60


def test_scores_loss_and_gradients_are_those_of_transformers(tmp_path):
    """Two pairs lie packed in one row here, and each conversation padded in its own there."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = decoder.init(LLAMA, jax.random.key(0))
    params["head"]["score"]["kernel"] *= 20
    hf.save(tmp_path / "out", LLAMA, params, fields={"pad_token_id": PAD})
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (type(model).__name__, model.config.num_labels) == ("LlamaForSequenceClassification", 1)

    r, lengths = np.random.default_rng(0), np.array([[5, 7], [8, 6]])  # of pairs, of sides
    texts = [[r.integers(0, PAD, n) for n in pair] for pair in lengths]
    batch = {name: np.zeros((1, 2, 16), np.int32) for name in ("tokens", "segments", "positions")}
    padded = np.full((2, 2, 10), PAD)
    for pair, side in np.ndindex(2, 2):
        text, at = texts[pair][side], lengths[:pair, side].sum()
        place = slice(at, at + len(text))
        batch["tokens"][0, side, place], batch["segments"][0, side, place] = text, pair + 1
        batch["positions"][0, side, place] = np.arange(len(text))
        padded[pair, side, : len(text)] = text
    batch |= {"targets": batch["tokens"], "mask": np.ones((1, 2, 16), np.float32)}

    change = Preferences(functools.partial(decoder.scores, LLAMA), Preference("reward"))
    loss = jt.loss_from_stages(change.stages(decoder.stages(LLAMA)))
    value = lambda params: loss(params, batch, None).total / 2  # noqa: E731
    found, grads = jax.jit(jax.value_and_grad(value))(params)
    tokens = torch.tensor(padded.reshape(4, 10))
    score = model(tokens, attention_mask=tokens != PAD).logits.reshape(2, 2)
    means = loss(params, batch, None).means()
    ours = [means["reward_chosen"], means["reward_rejected"]]
    np.testing.assert_allclose(ours, score.detach().mean(0), rtol=1e-4, atol=1e-6)
    expected = -torch.nn.functional.logsigmoid(score[:, 0] - score[:, 1]).mean()
    expected.backward()
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    assert found > 0.1
    theirs = dict(model.named_parameters())
    for path, name in (
        ("head/score/kernel", "score"),
        ("blocks/attn/q/kernel", "model.layers.1.self_attn.q_proj"),
    ):
        own = named_leaves(grads)[path]
        own = own[1] if path.startswith("blocks") else own
        wanted = theirs[f"{name}.weight"].grad.numpy().T
        np.testing.assert_allclose(own, wanted, rtol=1e-3, atol=1e-4 * abs(wanted).max())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_folders_come_back_and_other_heads_begin_anew(config, tmp_path):
    params = decoder.init(config, jax.random.key(0))
    hf.save(tmp_path / "score", config, params)
    assert hf.read_config(tmp_path / "score") == config
    again = hf.load(hf.open_weights(tmp_path / "score"))
    jax.tree.map(np.testing.assert_array_equal, again, params)

    tokens = dataclasses.replace(config, head="tokens")
    hf.save(tmp_path / "tokens", tokens, decoder.init(tokens, jax.random.key(1)))
    begun = named_leaves(hf.open_weights(tmp_path / "tokens", config))
    assert named_leaves(params).keys() - begun.keys() == {"head/score/kernel"}
    assert not any(name.startswith("head/") for name in begun)


def test_several_labels_are_refused():
    theirs = family_for(GPT2).config_json(GPT2) | {"id2label": {"0": "no", "1": "yes"}}
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has 2 labels: only one"):
        family_for(GPT2).config(theirs)


def test_a_reward_model_predicts_no_tokens():
    params, tokens = decoder.init(GPT2, jax.random.key(0)), np.zeros((1, 4), int)
    with pytest.raises(ValueError, match="a reward model predicts no tokens"):
        decoder.logits(GPT2, params, tokens)
