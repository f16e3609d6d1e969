"""A classifier over HTTP against transformers, and what is not served."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.enclosed import row_ends
from jaxtrain.hf.opening import open_model
from jaxtrain.predict.heads import Model, classify
from jaxtrain.serve.classify import Classifier
from jaxtrain.serve.server import make_app
from tests.commands import refused
from tests.predict.test_predict import CLASSES, folder_of, logits, said, shares, tokenizer
from tests.serve.conftest import listening
from tests.serve.test_server import metrics

__all__ = ["folder_of", "tokenizer"]


@pytest.fixture(scope="module")
def classifier(folder_of):
    pytest.importorskip("starlette")
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    opened = open_model(str(folder_of("classes")), "encoder", mesh=mesh)
    made = Classifier(Model(opened, mesh, rows=3))
    made.warm_up()
    with listening(make_app(made, "said")) as server:
        yield server


def test_classes_are_those_of_transformers_and_nothing_is_compiled(
    classifier,
    folder_of,
    tokenizer,
):
    model, texts = classifier.worker.engine.model, said(3, 9, 1, 5, 40)
    compiled = model.run._cache_size()
    status, found = classifier.ask("/v1/classify", {"model": "said", "input": texts})
    found, (first, _, last) = json.loads(found), row_ends(tokenizer)
    assert (status, found["object"], found["labels"]) == (200, "list", CLASSES)
    ids = [[first, *tokenizer.encode(text).tolist()[:22], last] for text in texts]
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    for number, (each, row) in enumerate(zip(found["data"], ids, strict=True)):
        expected = shares(logits("SequenceClassification", folder_of("classes"), row))
        np.testing.assert_allclose(each["probs"], expected, atol=1e-4)
        assert each["label"] == CLASSES[expected.argmax()]
        assert (each["index"], each["num_classes"]) == (number, 3)
    assert len({each["label"] for each in found["data"]}) > 1
    (alone,) = json.loads(classifier.ask("/v1/classify", {"input": texts[0]})[1])["data"]
    np.testing.assert_allclose(alone["probs"], found["data"][0]["probs"], atol=1e-6)
    # Pairs, as transformers reads them; one text alone in their company.
    pair = tokenizer.encode(texts[1]).tolist()
    asked = [{"text": texts[2], "text_pair": texts[1]}, texts[0]]
    first_pair, again = json.loads(classifier.ask("/v1/classify", {"input": asked})[1])["data"]
    expected = shares(logits("SequenceClassification", folder_of("classes"), ids[2], [*pair, last]))
    np.testing.assert_allclose(first_pair["probs"], expected, atol=1e-4)
    np.testing.assert_allclose(again["probs"], found["data"][0]["probs"], atol=1e-6)
    assert model.run._cache_size() == compiled
    assert int(metrics(classifier)["jaxtrain_prompt_tokens_total"]) > sum(map(len, ids))


@pytest.mark.parametrize("kind", ["score", "labels"])
def test_scores_and_labels_are_those_of_predictions(kind, folder_of):
    pytest.importorskip("starlette")
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = Model(open_model(str(folder_of(kind)), "encoder", mesh=mesh), mesh, rows=3)
    texts = said(3, 9, 1, 5)
    expected = list(classify(model, [{"text": text} for text in texts]))
    with listening(make_app(Classifier(model), "said")) as server:
        status, found = server.ask("/v1/classify", {"input": texts})
    found = json.loads(found)
    assert (status, found["labels"]) == (200, CLASSES if kind == "labels" else [])
    for number, (each, row) in enumerate(zip(found["data"], expected, strict=True)):
        assert each.pop("index") == number
        if kind == "labels":
            shares = list(row.pop("probabilities").values())
            row |= {"probs": shares, "num_classes": 3}
        assert each == row


def test_what_cannot_be_classified_is_refused_in_a_sentence(classifier):
    for body, status, sentence in (
        ({}, 400, "input must be a text"),
        ({"input": []}, 400, "input has 0 texts: give from 1 to 1024"),
        ({"input": [[1, 2]]}, 400, "input must be a text, an object"),
        ({"input": {"text_pair": "a"}}, 400, "input must be a text, an object"),
        ({"input": {"text": "a", "text_pair": 1}}, 400, "text and text_pair must be texts"),
        ({"input": {"text": "a", "textpair": "b"}}, 400, "an object with text and text_pair"),
        ({"input": "a", "softmax": False}, 400, "softmax is not known"),
        ({"input": "a", "model": "other"}, 404, "ask for said"),
        ([], 400, "JSON object"),
    ):
        found, text = classifier.ask("/v1/classify", body)
        assert found == status
        assert sentence in json.loads(text)["error"]["message"]
    assert classifier.ask("/v1/completions", {"prompt": "a"})[0] == 404
    assert [x["id"] for x in json.loads(classifier.ask("/v1/models")[1])["data"]] == ["said"]
    assert classifier.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("tags", [], "has the head 'tags', which is not served: use `jaxtrain predict`"),
        ("t5", ["--page", "8"], "--page is 8, and the model in"),
        ("vit", [], "has the form vit, which is not served: use `jaxtrain predict`"),
        ("classes", ["--page", "8"], "--page is 8, and the model in"),
    ],
)
def test_what_is_not_served_is_told_which_command_to_use(
    name,
    flags,
    sentence,
    folder_of,
    capsys,
):
    pytest.importorskip("uvicorn")
    assert sentence in refused(capsys, "serve", "--model", str(folder_of(name)), *flags)
