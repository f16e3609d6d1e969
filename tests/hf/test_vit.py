"""ViT against transformers: outputs, loss, gradients and bits; and every mesh as one device."""

import functools

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.models import vit
from tests.compare import noisy
from tests.hf import models

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=[8, 12],
    patch_size=4,
    num_channels=3,
)
MODELS = {
    "classes": ("AutoModelForImageClassification", SIZES | dict(num_labels=5)),
    "none, no biases of q, k and v": ("AutoModel", SIZES | dict(qkv_bias=False, image_size=8)),
}
# Values are compared, and how fast they are computed does not matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    models.transformers()

    @functools.cache
    def save(name):
        folder, (head, fields) = tmp_path_factory.mktemp("model"), MODELS[name]
        model = models.random_model(head, "vit", fields, lambda path, x: "norm" in path)
        model.save_pretrained(folder)
        return folder

    return save


def batch(image, rows=4):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((rows, *image)).astype(np.float32)
    label = rng.integers(0, 5, rows).astype(np.int32)
    return {"image": images, "label": label, "mask": np.ones(rows, np.float32)}


def theirs(name, folder, rows, gradients=None):
    """What transformers computes: outputs and the loss; gradients are saved as a model would be."""
    import torch

    model = getattr(models.transformers(), MODELS[name][0]).from_pretrained(folder).eval()
    pixels = torch.tensor(rows["image"].transpose(0, 3, 1, 2))
    if name != "classes":
        return model(pixel_values=pixels).last_hidden_state.detach().numpy(), None
    found = model(pixel_values=pixels, labels=torch.tensor(rows["label"], dtype=torch.int64))
    if gradients is not None:
        found.loss.backward()
        for x in model.parameters():
            x.data = x.grad
        model.save_pretrained(gradients)
    return found.logits.detach().numpy(), float(found.loss.detach())


@pytest.mark.parametrize("name", MODELS)
def test_outputs_loss_gradients_and_bits_are_those_of_transformers(name, folder_of, tmp_path):
    folder = folder_of(name)
    config = hf.read_config(folder)
    params, rows = hf.load(hf.open_weights(folder)), batch(config.image)
    expected, loss = theirs(name, folder, rows, tmp_path / "expected")

    @quick_jit
    def ours(params):
        if config.classes is None:
            return vit.encode(config, params, rows), None
        mean = lambda params: vit.loss_fn(config)(params, rows, None).means()["loss"]  # noqa: E731
        return vit.logits(config, params, rows), jax.value_and_grad(mean)(params)

    got, more = ours(params)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, atol=1e-4)
    if more is not None:
        np.testing.assert_allclose(more[0], loss, rtol=1e-5)
        hf.save(tmp_path / "gradients", config, more[1])
        found, grads = (
            safetensors.tensors_in(tmp_path / name) for name in ("gradients", "expected")
        )
        assert found.keys() == grads.keys()
        for path, grad in grads.items():
            got = found[path][...]
            np.testing.assert_allclose(got, grad[...], atol=2e-5, rtol=1e-3, err_msg=path)
    hf.save(tmp_path / "same", config, hf.open_weights(folder))
    expected = models.tensors(folder)
    poolers = {path for path in expected if path.startswith("pooler.")}
    assert len(poolers) == (2 if config.classes is None else 0)
    got = models.tensors(tmp_path / "same")
    assert got == {path: x for path, x in expected.items() if path not in poolers}
    assert hf.read_config(tmp_path / "same") == config


@pytest.mark.slow
def test_a_trained_step_comes_back(folder_of, tmp_path):
    config = hf.read_config(folder_of("classes"))
    rows, weights = batch(config.image), hf.open_weights(folder_of("classes"))
    state = models.step(vit, config, weights, rows, quick_jit)
    hf.save(tmp_path / "out", config, state.params)
    after, before = (
        theirs("classes", path, rows)[0] for path in (tmp_path / "out", folder_of("classes"))
    )
    np.testing.assert_allclose(vit.logits(config, state.params, rows), after, atol=1e-4)
    assert np.abs(after - before).max() > 1e-2


# 25 patches and one for the class, so that tensor axes split the residual stream.
CONFIG = vit.ViTConfig(
    image=(10, 10, 1), patch=2, layers=2, width=32, heads=4, classes=5, dropout=0.2
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("pipe=2,fsdp=2,tensor=2", "f32"),
        ("pipe=2,data=2,tensor=2,zero=2", "f32"),
        ("data=2,fsdp=2,tensor=2", "f32"),
        ("data=8,zero=3", "f32"),
        ("pipe=2", "bf16"),
    ],
)
def test_every_mesh_agrees_with_one_device(layout, policy):
    noisy.parity(vit, CONFIG, batch(CONFIG.image, 16), layout, steps=2, policy=policy)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="images of 8x8 cannot be cut into patches of 3"):
        vit.ViTConfig(image=(8, 8, 1), patch=3, layers=1, width=32, heads=4)
    with pytest.raises(ValueError, match=r"images have the shape \(8, 4, 1\), and the model's are"):
        vit.embed(CONFIG, {}, {"image": np.ones((1, 8, 4, 1))})
