"""LLaVA against transformers: logits, loss, gradients, what it writes, and bits."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.models import generate, llava
from tests.hf import models

LAYERS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
IMAGE = LAYERS | dict(image_size=8, patch_size=4, num_channels=3, model_type="clip_vision_model")
TEXT = LAYERS | dict(vocab_size=61, max_position_embeddings=32, hidden_size=24)
TEXT |= dict(model_type="llama", num_key_value_heads=2, num_hidden_layers=2)
LLAVA = dict(vision_config=IMAGE, text_config=TEXT, image_token_index=60)
MODELS = {
    "llava": LLAVA,
    "the last layer, its own token too": LLAVA
    | dict(vision_feature_layer=-1, vision_feature_select_strategy="full"),
    "mistral": LLAVA | dict(text_config=TEXT | dict(model_type="mistral", sliding_window=5)),
    "qwen2, tied": LLAVA
    | dict(
        text_config=TEXT | dict(model_type="qwen2", tie_word_embeddings=True),
        tie_word_embeddings=True,
        vision_feature_layer=1,
    ),
}
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
everyday = ["llava", *(pytest.param(x, marks=pytest.mark.slow) for x in [*MODELS][1:])]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    models.transformers()

    @functools.cache
    def save(name):
        folder = tmp_path_factory.mktemp("model")
        near_one = lambda path, x: "norm" in path  # noqa: E731
        kind = "AutoModelForImageTextToText"
        models.random_model(kind, "llava", MODELS[name], near_one).save_pretrained(folder)
        return folder

    return save


def batch(config, rows=3):
    """The last row is of text alone, and padding behind a caption counts nowhere."""
    rng, N = np.random.default_rng(0), config.positions_of_image
    tokens = rng.integers(3, 60, (rows, 14)).astype(np.int32)
    for row in range(rows - 1):
        tokens[row, row + 1 : row + 1 + N] = config.image_token
    mask = np.ones((rows, 14), np.float32)
    mask[:, :7], mask[:, -2:] = 0, 0
    images = rng.standard_normal((rows, 8, 8, 3)).astype(np.float32)
    return {"image": images, "tokens": tokens, "targets": np.roll(tokens, -1, 1), "mask": mask}


def theirs(folder, rows, gradients):
    """Logits, the loss of captions, and what they write; gradients are saved as a model would
    be."""
    import torch

    model = models.transformers().AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokens = torch.tensor(rows["tokens"], dtype=torch.int64)
    pixels = torch.tensor(rows["image"].transpose(0, 3, 1, 2))[:-1]  # of rows that have one
    found = model(input_ids=tokens, pixel_values=pixels).logits
    log_p = found.log_softmax(-1)
    log_p = log_p.gather(2, torch.tensor(rows["targets"], dtype=torch.int64)[..., None])[..., 0]
    mask = torch.tensor(rows["mask"])
    loss = -(log_p * mask).sum() / mask.sum()
    loss.backward()
    given = {"input_ids": tokens[:2, :8], "pixel_values": pixels, "max_new_tokens": 5}
    written = model.generate(**given, do_sample=False)[:, 8:]
    for x in model.parameters():
        x.data = torch.zeros_like(x) if x.grad is None else x.grad
    model.save_pretrained(gradients)
    return found.detach().numpy(), float(loss.detach()), written.numpy()


@pytest.mark.parametrize("name", everyday)
def test_a_model_is_that_of_transformers(name, folder_of, tmp_path):
    folder = folder_of(name)
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    rows = batch(config)
    expected, loss, written = theirs(folder, rows, tmp_path / "expected")
    mean = lambda params: llava.loss_fn(config)(params, rows, None).means()["loss"]  # noqa: E731
    ours = lambda params: (llava.logits(config, params, rows), jax.value_and_grad(mean)(params))  # noqa: E731
    got, (value, grads) = quick_jit(ours)(params)
    assert np.ptp(expected) > 0.3
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    hf.save(tmp_path / "gradients", config, grads)
    found, grads = (safetensors.tensors_in(tmp_path / x) for x in ("gradients", "expected"))
    assert found.keys() == grads.keys()
    for path, grad in grads.items():
        close = {"atol": 2e-5, "rtol": 1e-3, "err_msg": path}
        np.testing.assert_allclose(found[path][...], grad[...], **close)
    given = {"temperature": 0.0, "max_new_tokens": 5, "image": rows["image"][:2]}
    new = generate.generate(config, params, rows["tokens"][:2, :8], **given)
    np.testing.assert_array_equal(new, written)
    hf.save(tmp_path / "same", config, hf.open_weights(folder))
    assert models.tensors(tmp_path / "same") == models.tensors(folder)
    assert hf.read_config(tmp_path / "same") == config
    assert all(each.equal for each in hf.check(folder))


def test_files_as_published_are_read(tmp_path, folder_of):
    """They leave out what is as in the first model, and have other names of the tower."""

    def read(theirs):
        (tmp_path / "config.json").write_text(json.dumps(theirs | {"model_type": "llava"}))
        return hf.read_config(tmp_path)

    vision = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096}
    vision |= {"model_type": "clip_vision_model", "num_attention_heads": 16, "vocab_size": 32000}
    vision |= {"num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}
    text = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    text |= {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    named = {"ignore_index": -100, "image_token_index": 32000, "pad_token_id": 32001}
    found = read(named | {"text_config": text, "vision_config": vision})  # of llava-1.5-7b-hf
    assert llava.parameter_count(found) == 7_063_427_072
    assert (found.positions_of_image, found.image.layers, found.unread_layers) == (576, 23, 1)
    for wrong, why in (
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "its image tower is 'siglip"),
        ({"text_config": {"model_type": "opt"}}, "its text model is 'opt'"),
        ({"vision_feature_layer": [-2, -5]}, "must be the number of one of 12 layers"),
        ({"vision_feature_select_strategy": "cls"}, "'cls' is none of default, full"),
        ({"image_token_id": 7, "image_token_index": 8}, "give one"),
        ({"projector_hidden_act": "relu"}, "only projector_hidden_act='gelu' is known"),
    ):
        with pytest.raises(ValueError, match=why):
            read(wrong)
    folder, old = folder_of("llava"), tmp_path / "old"
    old.mkdir()
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): x[...]
        for name, x in safetensors.tensors_in(folder).items()
    }
    from safetensors.numpy import save_file

    save_file(renamed, old / "model.safetensors")
    (old / "config.json").write_text((folder / "config.json").read_text())
    assert all(each.equal for each in hf.check(old))
    config = hf.read_config(folder)
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, mlp="gelu"))
    with pytest.raises(ValueError, match="llava has no such decoder"):
        hf.save(tmp_path / "none", config, {})
