"""What decoders generate, against transformers on the same weights."""

import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.models.generate import generate
from tests.hf import models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("penalty", [1.0, 1.6])
def test_tokens_are_those_that_transformers_generates(name, penalty, tmp_path):
    models.transformers()
    import torch

    folder, prompts = models.save(name, tmp_path), models.TOKENS[:, :9]
    expected = models.opened(folder).generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=int),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    found = generate(
        config, params, prompts, max_new_tokens=12, temperature=0.0, repetition_penalty=penalty
    )
    np.testing.assert_array_equal(found, expected[:, 9:])
    assert penalty == 1.0 or len(np.unique(found)) > 5
