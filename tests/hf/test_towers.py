"""CLIP and SigLIP against transformers: logits, loss, gradients and bits."""

import functools
import json

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.models import clip
from tests.hf import models

LAYERS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
IMAGE = LAYERS | dict(image_size=8, patch_size=4, num_channels=3)
TEXT = LAYERS | dict(vocab_size=61, max_position_embeddings=12, hidden_size=24)
MODELS = {
    "clip": dict(vision_config=IMAGE, text_config=TEXT | dict(eos_token_id=60), projection_dim=20),
    "clip, old": dict(
        vision_config=IMAGE, text_config=TEXT | dict(eos_token_id=2), projection_dim=20
    ),
    "siglip": dict(vision_config=IMAGE, text_config=TEXT | dict(projection_size=32)),
}
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    models.transformers()

    @functools.cache
    def save(name):
        near_one = lambda path, x: "norm" in path or path == "logit_scale"  # noqa: E731
        folder, kind = tmp_path_factory.mktemp("model"), name.split(",")[0]
        model = models.random_model("AutoModel", kind, MODELS[name], near_one)
        model.save_pretrained(folder)
        return folder

    return save


def batch(rows=5):
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 60, (rows, 12)).astype(np.int32)
    for row, end in enumerate(rng.integers(4, 12, rows)):
        tokens[row, end:] = 60  # its first place ends the text
    images = rng.standard_normal((rows, 8, 8, 3)).astype(np.float32)
    return {"image": images, "tokens": tokens, "mask": np.ones(rows, np.float32)}


def theirs(folder, rows, gradients):
    """The logits of all pairs and the loss; gradients are saved as a model would be."""
    import torch

    model = models.transformers().AutoModel.from_pretrained(folder).eval()
    found = model(
        input_ids=torch.tensor(rows["tokens"], dtype=torch.int64),
        pixel_values=torch.tensor(rows["image"].transpose(0, 3, 1, 2)),
        return_loss=True,
    )
    found.loss.backward()
    for x in model.parameters():
        x.data = x.grad
    model.save_pretrained(gradients)
    return found.logits_per_image.detach().numpy(), float(found.loss.detach())


@pytest.mark.parametrize(
    "name",
    ["clip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clip, old", "siglip"))],
)
def test_logits_loss_gradients_and_bits_are_those_of_transformers(name, folder_of, tmp_path):
    folder = folder_of(name)
    config, rows = hf.read_config(folder), batch()
    params = hf.load(hf.open_weights(folder))
    expected, loss = theirs(folder, rows, tmp_path / "expected")

    def mean(params):
        found = clip.encode(config, params, rows)
        return clip.loss(config, params, found, rows).means()["loss"]

    ours = lambda params: (clip.logits(config, params, rows), jax.value_and_grad(mean)(params))  # noqa: E731
    got, more = quick_jit(ours)(params)
    assert np.ptp(expected) > 0.3
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(more[0], loss, rtol=1e-5)
    hf.save(tmp_path / "gradients", config, more[1])
    found, grads = (safetensors.tensors_in(tmp_path / x) for x in ("gradients", "expected"))
    assert found.keys() == grads.keys()
    for path, grad in grads.items():
        close = {"atol": 2e-5, "rtol": 1e-3, "err_msg": path}
        np.testing.assert_allclose(found[path][...], grad[...], **close)
    hf.save(tmp_path / "same", config, hf.open_weights(folder))
    assert models.tensors(tmp_path / "same") == models.tensors(folder)
    assert hf.read_config(tmp_path / "same") == config
    assert all(each.equal for each in hf.check(folder))


def test_configs_of_files_as_published_are_read(tmp_path):
    """Older files say what generation is, repeat a tower, or leave out what is as in the first."""
    old = {"top_k": 50, "temperature": 1.0, "eos_token_id": 2, "dropout": 0.0, "is_decoder": False}
    again = {"hidden_size": 512, "projection_dim": 512}
    clips = {"text_config": old | again, "vision_config": {"patch_size": 32, "hidden_size": 768}}
    clips |= {"text_config_dict": again, "vision_config_dict": None, "logit_scale_init_value": 2.7}
    siglip = {"text_config": {"model_type": "siglip_text_model"}, "vision_config": {}}

    def read(kind, theirs):
        (tmp_path / "config.json").write_text(json.dumps(theirs | {"model_type": kind}))
        return hf.read_config(tmp_path)

    found = read("clip", clips | {"architectures": ["CLIPModel"]})
    # ViT-B/32 of OpenAI, and below SigLIP base/16, as published.
    assert clip.parameter_count(found) == 151_277_313
    assert found.text.end is None
    found = read("siglip", siglip)
    assert clip.parameter_count(found) == 203_155_970
    with pytest.raises(ValueError, match=r"text_config_dict=.* says other things"):
        read("clip", clips | {"text_config_dict": {"hidden_size": 256}})
    with pytest.raises(ValueError, match="only vision_use_head=True is known"):
        read("siglip", siglip | {"vision_config": {"vision_use_head": False}})
