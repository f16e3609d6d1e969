"""BERT, RoBERTa, ModernBERT against transformers: outputs, losses, gradients, bits of tensors."""

import functools
import json

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.hf.weights import not_read
from jaxtrain.models import encoder
from tests.commands import run
from tests.hf import encoders, models

# Values are compared, and how fast they are computed does not matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
every_model = pytest.mark.parametrize(
    "name",
    [
        n if n in encoders.EVERYDAY else pytest.param(n, marks=pytest.mark.slow)
        for n in encoders.MODELS
    ],
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    encoders.transformers()
    return functools.cache(lambda name: encoders.save(name, tmp_path_factory.mktemp("model")))


@every_model
def test_outputs_loss_and_gradients_are_those_of_transformers(name, folder_of, tmp_path):
    folder, rows = folder_of(name), encoders.batch(name)
    config = encoders.without_dropout(hf.read_config(folder))
    params = hf.load(hf.open_weights(folder))
    expected, loss, grads = encoders.theirs(name, folder, rows)

    @quick_jit
    def ours(params):
        if config.head == "none":
            return encoder.encode(config, params, rows), None
        mean = lambda params: encoder.loss_fn(config)(params, rows, None).means()["loss"]  # noqa: E731
        return encoder.logits(config, params, rows), jax.value_and_grad(mean)(params)

    got, more = ours(params)
    seen = rows["segments"][..., None] > 0 if expected.ndim == 3 else True
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.where(seen, got, 0), np.where(seen, expected, 0), atol=1e-4)
    if more is not None:
        np.testing.assert_allclose(more[0], loss, rtol=1e-5)
        # By their names and in their layout, as a file has them.
        hf.save(tmp_path / "gradients", config, more[1], family=hf.family_name(folder))
        found = safetensors.tensors_in(tmp_path / "gradients")
        assert found.keys() == grads.keys()
        for path, grad in grads.items():
            np.testing.assert_allclose(found[path][...], grad, atol=2e-5, rtol=1e-3, err_msg=path)


@pytest.mark.parametrize("name", encoders.MODELS)
def test_what_is_loaded_and_saved_has_the_same_bits(name, folder_of, tmp_path):
    folder, family = folder_of(name), hf.family_name(folder_of(name))
    config = hf.read_config(folder)
    hf.save(tmp_path / "out", config, hf.open_weights(folder), family=family)
    got, expected = models.tensors(tmp_path / "out"), models.tensors(folder)
    unread = not_read(folder)  # a pooler, where nothing here is pooled
    assert len(unread) == (2 if name in ("bert, none", "roberta, none") else 0)
    assert got == {path: x for path, x in expected.items() if path.split(".")[0] != "pooler"}
    assert hf.read_config(tmp_path / "out") == config
    differs = models.differing(folder, tmp_path / "out")
    assert all(key.endswith("_token_id") for key in differs)  # which save is given as fields


@pytest.mark.parametrize(
    "name",
    [
        n if n == "roberta, tokens" else pytest.param(n, marks=pytest.mark.slow)
        for n in encoders.MODELS
        if not n.endswith("none")
    ],
)
def test_a_trained_step_comes_back(name, folder_of, tmp_path):
    config, rows = encoders.without_dropout(hf.read_config(folder_of(name))), encoders.batch(name)
    weights = hf.open_weights(folder_of(name), config)
    state = models.step(encoder, config, weights, rows, quick_jit)
    hf.save(tmp_path / "out", config, state.params, family=hf.family_name(folder_of(name)))
    ours = quick_jit(functools.partial(encoder.logits, config))(state.params, rows)
    (theirs, *_), (before, *_) = (
        encoders.theirs(name, path, rows) for path in (tmp_path / "out", folder_of(name))
    )
    seen = rows["segments"][..., None] > 0 if theirs.ndim == 3 else True
    np.testing.assert_allclose(np.where(seen, ours, 0), np.where(seen, theirs, 0), atol=1e-4)
    assert np.abs(theirs - before).max() > 1e-2


def test_old_names_and_what_pretraining_leaves_are_read(folder_of, tmp_path):
    """As bert-base-uncased is on the hub: TensorFlow's names, copies, the next sentence."""
    from safetensors.numpy import load_file, save_file

    folder = folder_of("bert, tokens")
    expected = load_file(folder / "model.safetensors")
    old = {
        n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x
        for n, x in expected.items()
    }
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].copy()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    more = {"bert.pooler.dense.weight": (32, 32), "cls.seq_relationship.bias": (2,)}
    more = {name: np.ones(shape, np.float32) for name, shape in more.items()}
    more["bert.embeddings.position_ids"] = np.arange(64)[None]
    save_file(old | more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    hf.save(tmp_path / "out", hf.read_config(tmp_path), hf.open_weights(tmp_path))
    got = load_file(tmp_path / "out" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    old["cls.predictions.decoder.weight"][0, 0] += 1
    save_file(old, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"ties cls\.predictions\.decoder\.weight to bert"):
        hf.open_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "own"),
    [("bert, tokens", []), ("bert, none", ["pool"]), ("roberta, tokens", [])],
)
def test_another_head_is_made_and_the_rest_is_read(name, own, folder_of):
    config = hf.read_config(folder_of(name))
    config = encoders.with_classes(config, 7)
    given = hf.open_weights(folder_of(name), config)
    state = jt.init_state(
        functools.partial(encoder.init, config), optax.sgd(1.0), jax.random.key(0), params=given
    )
    assert state.params["head"]["out"]["kernel"].shape == (32, 7)
    assert [part for part, x in given["head"].items() if x["kernel"] is not None] == own
    expected = hf.load(hf.open_weights(folder_of(name)))
    for part in ("embed", "blocks"):
        jax.tree.map(np.testing.assert_array_equal, state.params[part], expected[part])


def test_check_says_what_is_not_read(folder_of, capsys):
    from safetensors.numpy import load_file

    status, out, _ = run(capsys, "hf", "check", str(folder_of("bert, none")))
    assert status == 0
    assert "not read, for the model has no such part, or has it twice: bert.pooler.dense" in out
    count = sum(
        x.size
        for n, x in load_file(folder_of("bert, none") / "model.safetensors").items()
        if "pooler" not in n
    )
    assert f"bert, {count:,} parameters" in out.splitlines()[0]


ONE = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}


def test_one_label_without_a_type_of_problem_is_a_score(folder_of, tmp_path):
    theirs = json.loads((folder_of("bert, tokens") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(theirs | ONE))
    config = hf.read_config(tmp_path)
    assert (config.head, config.classes) == ("score", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertForMultipleChoice"]}, "of bert there is only BertForMaskedLM"),
        ({"is_decoder": True}, "only is_decoder=False is known here of BertForMaskedLM"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is"),
        (
            ONE | {"problem_type": "single_label_classification"},
            "problem_type='single_label_classification' with num_labels=1 is not known of Bert",
        ),
        (
            ONE | {"problem_type": "regression", "id2label": {"0": "x", "1": "y"}},
            "problem_type='regression' with num_labels=2",
        ),
        (ONE | {"problem_type": "ranking"}, "problem_type='ranking' with num_labels=1"),
        (
            ONE | {"architectures": ["BertForTokenClassification"]},
            "problem_type=None with num_labels=1",
        ),
    ],
)
def test_what_no_model_here_has_is_refused(fields, message, folder_of, tmp_path):
    theirs = json.loads((folder_of("bert, tokens") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(theirs | fields))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path)
