"""What decoders generate, against transformers on the same weights."""

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.models.generate import beam_search, generate, prompts, stream
from jaxtrain.models.sampling import Own, adjusted, make_sampling, truncate
from tests.hf import models


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "qwen3", "gemma2", "gemma3", "mixtral", "olmoe"),
        *("deepseek v3", "gpt oss", "qwen3 next"),
    ],
)
@pytest.mark.parametrize(("penalty", "beams"), [(1.0, 1), (1.6, 1), (1.6, 3)])
def test_tokens_are_those_that_transformers_generates(name, penalty, beams, tmp_path):
    models.transformers()
    torch = pytest.importorskip("torch")

    folder, prompts = models.save(name, tmp_path), models.TOKENS[:, :9]
    expected = models.opened(folder).generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=int),
        max_new_tokens=12,
        do_sample=False,
        num_beams=beams,
        length_penalty=0.6,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    form = {"max_new_tokens": 12, "repetition_penalty": penalty}
    if beams == 1:
        found = generate(config, params, prompts, temperature=0.0, **form)
    else:
        found, _ = beam_search(config, params, prompts, beams=beams, length_penalty=0.6, **form)
    np.testing.assert_array_equal(found, expected[:, 9:])
    # The penalty of a search is for log probabilities, of which a sure model has none to multiply.
    assert penalty == 1.0 or beams > 1 or len(np.unique(found)) > 5


@pytest.mark.parametrize("window", [None, 3, 1, 99])
@pytest.mark.parametrize("written", [0, 2, 3])
def test_scores_are_adjusted_as_transformers_processes_them(window, written):
    processors = models.transformers().generation.logits_process
    torch = pytest.importorskip("torch")

    r = np.random.default_rng(written)
    scores, ids = r.standard_normal((2, 9)).astype(np.float32), r.integers(0, 9, (2, 5 + written))
    sampling = make_sampling(
        9, repetition_penalty=1.7, repetition_window=window, min_tokens=3, eod=[4, 7]
    )
    padded, new = (np.pad(x, ((0, 0), (0, 2)), constant_values=8) for x in (ids[:, :5], ids[:, 5:]))
    lengths = np.array([5, 5])
    found = jax.jit(adjusted)(sampling, Own(padded, lengths), new, written, scores)
    seen = torch.tensor(ids if window is None else ids[:, -window:])
    expected = processors.RepetitionPenaltyLogitsProcessor(1.7)(seen, torch.tensor(scores))
    least = processors.MinNewTokensLengthLogitsProcessor(5, 3, torch.tensor([4, 7]))
    expected = least(torch.tensor(ids), expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isinf(found[:, [4, 7]]).all() == (written < 3)


@pytest.mark.parametrize("cuts", [{}, {"top_k": 20}, {"top_k": 25, "top_p": 0.7}])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_logits_are_cut_as_transformers_cuts_them(cuts, min_p):
    processors = models.transformers().generation.logits_process
    torch = pytest.importorskip("torch")
    scores = np.random.default_rng(0).normal(0, 3, (64, 40)).astype(np.float32)
    expected = torch.tensor(scores)
    for name, kind in (("top_k", "TopKLogitsWarper"), ("top_p", "TopPLogitsWarper")):
        if name in cuts:
            expected = getattr(processors, kind)(cuts[name])(None, expected)
    expected = processors.MinPLogitsWarper(min_p)(None, expected)
    found = truncate(scores, **{"top_k": None, "top_p": None} | cuts, min_p=min_p)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_row_is_as_long_as_it_is_to_be(beams, tmp_path):
    torch = pytest.importorskip("torch")
    folder, rows = models.save("llama", tmp_path), models.TOKENS[:, :9]
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    form = {"max_new_tokens": 9, "repetition_penalty": 1.6}
    free = np.asarray(generate(config, params, rows, temperature=0.0, **form))
    # One that a row would write too early, and one that the other writes as soon as it may.
    ends = [int(free[0, 1]), int(free[1, 5])]
    expected = models.opened(folder).generate(
        torch.tensor(rows),
        attention_mask=torch.ones(rows.shape, dtype=int),
        do_sample=False,
        num_beams=beams,
        min_new_tokens=5,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **form,
    )[:, 9:]
    given = form | {"eod": ends, "min_tokens": 5}
    if beams > 1:
        found, _ = beam_search(config, params, rows, beams=beams, **given)
    else:
        found = generate(config, params, rows, temperature=0.0, **given)
        batch = prompts(config, rows, temperature=0.0, **given)
        told = np.stack(list(stream(config, params, batch)), axis=1)
        np.testing.assert_array_equal(told, found[:, : told.shape[1]])
    # Behind the end there is the first end here, and padding there.
    expected = np.pad(expected, ((0, 0), (0, 9 - expected.shape[1])), constant_values=ends[0])
    np.testing.assert_array_equal(found, expected)
    assert not np.isin(np.asarray(found)[:, :5], ends).any()
    assert beams > 1 or found[1, 5] == ends[1] != found[1, 6] == ends[0]
