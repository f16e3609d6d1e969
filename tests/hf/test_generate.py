"""What decoders generate, against transformers on the same weights."""

import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.models.generate import beam_search, generate
from tests.hf import models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize(("penalty", "beams"), [(1.0, 1), (1.6, 1), (1.6, 3)])
def test_tokens_are_those_that_transformers_generates(name, penalty, beams, tmp_path):
    models.transformers()
    import torch

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
