"""T5 and Flan-T5 both ways, against transformers: logits, the loss, gradients, and all bits."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf.families import FAMILIES
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.generate import beam_search, generate
from jaxtrain.tree import named_leaves
from tests.hf import models

T5 = dict(
    vocab_size=61,
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=0,
)
FLAN = T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
MODELS = {"t5": T5, "flan": FLAN, "flan, shared head": FLAN}
R = np.random.default_rng(0)
SOURCE, LABELS = R.integers(2, 61, (2, 24)), R.integers(2, 61, (2, 9))
SEEN = np.arange(24) < np.array([[24], [15]])
BATCH = {
    "source": SOURCE.astype(np.int32),
    "source_segments": SEEN.astype(np.int32),
    "tokens": np.pad(LABELS, ((0, 0), (1, 0)))[:, :-1].astype(np.int32),
    "targets": LABELS.astype(np.int32),
    "mask": np.ones(LABELS.shape, np.float32),
}
# Values are compared, and how fast they are computed does not matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
every_model = pytest.mark.parametrize(
    "name", [n if n == "flan" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)


def save(name, folder, *, dtype="float32", **options):
    """Saves a model whose every parameter is random, so that each of them counts."""
    library = models.transformers()
    import torch

    torch.manual_seed(0)
    config = library.T5Config(**MODELS[name])
    model = library.T5ForConditionalGeneration(config)
    if name == "flan":  # transformers 5 makes every new model with one table
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(61, 32))
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(0.2 * torch.randn(x.shape) + (1.0 if x.ndim == 1 else 0))
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def opened(folder):
    import torch

    library = models.transformers()
    model = library.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def theirs(folder):
    """Logits, the mean loss, and gradients by name."""
    import torch

    model, as_tensor = opened(folder), functools.partial(torch.tensor)
    out = model(
        input_ids=as_tensor(SOURCE),
        attention_mask=as_tensor(SEEN.astype(int)),
        labels=as_tensor(LABELS),
    )
    out.loss.backward()
    gradients = {name: x.grad.numpy() for name, x in model.named_parameters()}
    return out.logits.detach().numpy(), float(out.loss.detach()), gradients


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    models.transformers()
    return functools.cache(lambda name: save(name, tmp_path_factory.mktemp("model")))


def trained_form(folder):
    """The folder's model as it is trained without dropout."""
    return dataclasses.replace(hf.read_config(folder), dropout=0.0, attention_dropout=0.0)


@every_model
def test_logits_loss_and_gradients_are_those_of_transformers(name, folder_of):
    config = trained_form(folder_of(name))
    assert (config.tied, config.scaled_head) == (name != "flan", name == "t5")
    params = hf.load(hf.open_weights(folder_of(name)))
    logits, loss, expected = theirs(folder_of(name))
    assert np.abs(logits).max() > 0.5
    batch = jax.tree.map(jnp.asarray, BATCH)

    @quick_jit
    def both(params):
        def mean(params):
            return t5.loss_fn(config)(params, batch, None).means()["loss"]

        return t5.logits(config, params, batch), jax.value_and_grad(mean)(params)

    got, (mean, gradients) = both(params)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_allclose(mean, loss, rtol=1e-5)
    rows, _ = FAMILIES["t5"].rows_of(config)
    for path, gradient in named_leaves(gradients).items():
        names = rows[path].names(len(gradient))
        layers = gradient if rows[path].stacked else gradient[None]
        for each, layer in zip(names, layers, strict=True):
            layer = layer[:61] if path == "embed/tokens" else layer
            layer = layer[:, :61].T if path == "head/kernel" else layer
            found = layer.T if rows[path].axes and path != "head/kernel" else layer
            np.testing.assert_allclose(found, expected[each], atol=1e-4, err_msg=each)


@every_model
def test_what_is_loaded_and_saved_has_the_same_bits(name, folder_of, tmp_path):
    assert models.check_bits(folder_of(name), tmp_path)[0] == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_trained_step_comes_back(name, folder_of, tmp_path):
    config, batch = trained_form(folder_of(name)), jax.tree.map(jnp.asarray, BATCH)
    weights = hf.open_weights(folder_of(name), config)
    state = models.step(t5, config, weights, batch, quick_jit)
    hf.save(tmp_path / "out", config, state.params)
    ours = quick_jit(functools.partial(t5.logits, config))(state.params, batch)
    found, _, _ = theirs(tmp_path / "out")
    np.testing.assert_allclose(ours, found, atol=1e-4)
    assert np.abs(found - theirs(folder_of(name))[0]).max() > 1e-2


@pytest.mark.slow
def test_a_table_of_more_rows_and_its_copies(tmp_path):
    """As published: tables of 61 rows for fewer tokens, under several names, and an unread bias."""
    models.transformers()
    from safetensors.torch import load_file, save_file

    folder = save("t5", tmp_path / "model", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"] for stack in t5.STACKS}
    copies["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = tensors[
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    ]
    whole = {name: x.clone() for name, x in (tensors | copies).items()}
    save_file(whole, folder / "model.safetensors")
    params = hf.load(hf.open_weights(folder))
    assert params["embed"]["tokens"].dtype == jnp.bfloat16
    assert all(found.equal for found in hf.check(folder))
    # The table may have the name of a copy alone.
    table = whole.pop("shared.weight")
    save_file(whole, folder / "model.safetensors")
    np.testing.assert_array_equal(
        hf.load(hf.open_weights(folder))["embed"]["tokens"], params["embed"]["tokens"]
    )
    save_file(whole | {"shared.weight": table + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"ties encoder.embed_tokens.weight to shared.weight"):
        hf.open_weights(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj='gated-silu' is not known here"),
        ({"dense_act_fn": "silu"}, r"dense_act_fn, is_gated_act are \('silu', False\)"),
        ({"decoder_start_token_id": 3}, "only decoder_start_token_id=0 is known here"),
    ],
)
def test_another_t5_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES["t5"].config(T5 | {"model_type": "t5"} | fields)


def test_what_no_t5_has_is_refused():
    config = FAMILIES["t5"].config(T5)
    for changes in ({"tied": False}, {"bias": True}, {"kv_heads": 2}):
        with pytest.raises(ValueError, match="t5 has"):
            FAMILIES["t5"].config_json(dataclasses.replace(config, **changes))
    json.dumps(FAMILIES["t5"].config_json(config))


def test_distances_fall_into_the_buckets_of_transformers():
    models.transformers()
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    for both_ways, buckets, far in ((True, 32, 128), (False, 32, 128), (True, 8, 20)):
        distance = np.arange(-3000, 3000)
        form = {"max_distance": far}
        expected = T5Attention._relative_position_bucket(
            torch.tensor(distance), both_ways, buckets, far
        )
        found = t5.bucket(distance, both_ways=both_ways, buckets=buckets, **form)
        np.testing.assert_array_equal(found, expected)


# Of transformers, and of ours: the choices of generation that draw nothing.
CHOICES = {
    "greedy": (dict(num_beams=1), None),
    "penalty": (dict(num_beams=1, repetition_penalty=1.8), None),
    "beams": (dict(num_beams=3, length_penalty=0.6), 3),
    "long beams": (dict(num_beams=4, length_penalty=2.0, repetition_penalty=1.3), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["t5", "flan"])
def test_what_is_generated_is_what_transformers_generates(name, choice, folder_of):
    import torch

    (given, beams), folder = CHOICES[choice], folder_of(name)
    r = np.random.default_rng(3)
    lengths = np.array([14, 3, 9, 14, 6, 11])
    source = r.integers(2, 61, (6, 14))
    seen = np.arange(14) < lengths[:, None]
    form = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    expected = opened(folder).generate(
        torch.tensor(np.where(seen, source, 0)),
        attention_mask=torch.tensor(seen.astype(int)),
        **form | given,
    )
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    common = {"prompt_lengths": lengths, "max_new_tokens": 10}
    common["repetition_penalty"] = given.get("repetition_penalty", 1.0)
    if beams is None:
        found = generate(config, params, source, **common, temperature=0.0)
    else:
        penalty = given["length_penalty"]
        found, _ = beam_search(
            config, params, source, **common, beams=beams, length_penalty=penalty
        )
    # Theirs has the start, and fills rows that have ended with padding.
    expected = np.where(expected[:, 1:] == 0, 1, expected[:, 1:])
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert (np.asarray(found[:, expected.shape[1] :]) == 1).all()
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize("as_given", [str, lambda path: path])
def test_a_folder_with_a_shared_head_may_be_a_string(as_given, tmp_path):
    sizes = dict(vocab_size=61, layers=1, width=16, heads=2, kv_heads=2, mlp_width=24)
    model = dataclasses.replace(t5.tiny(), **sizes, scaled_head=False, tied=True)
    hf.save(tmp_path, model, t5.init(model, jax.random.key(0)))
    assert hf.read_config(as_given(tmp_path)).width == model.width
