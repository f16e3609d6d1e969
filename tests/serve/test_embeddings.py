"""Embeddings against the logits that hidden states give, against transformers, and over HTTP."""

import json

import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.serve.engine import Engine
from tests.hf import models
from tests.serve.conftest import engine as served
from tests.serve.test_engine import engine_of, logits_of, model_of, prompts


def test_an_embedding_is_what_the_head_multiplies():
    _, params = model_of("untied")
    rows = prompts(0, 5, 8, 6, 1, 7)
    engine = engine_of("untied")
    groups = engine.groups(rows)
    assert groups == [[0, 1], [2, 4], [3]]  # two readers; all but the fourth are padded to 8
    padded = np.array([row + [0] * (8 - len(row)) for row in rows])
    logits_BTV = np.float64(logits_of("untied")(padded))
    for pooling in ("mean", "last"):
        found = np.zeros((5, 16), np.float32)
        for group in groups:
            found[group] = engine.embed([rows[i] for i in group], pooling=pooling)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        for row, vector, logits_TV in zip(rows, found, logits_BTV, strict=True):
            assert (engine.embed([row], pooling=pooling)[0] == vector).all()  # to the bit
            logits_TV = logits_TV[: len(row)]
            expected = logits_TV.mean(0) if pooling == "mean" else logits_TV[-1]
            ours = np.float64(vector) @ np.float64(params["head"]["kernel"])[:, :31]
            scale = (expected @ ours) / (ours @ ours)
            assert scale > 0
            np.testing.assert_allclose(scale * ours, expected, atol=1e-4 * abs(expected).max())


@pytest.mark.slow
def test_an_embedding_is_transformers_pooled_hidden_state(tmp_path):
    torch = pytest.importorskip("torch")
    models.save("llama", tmp_path)
    config, params = hf.read_config(tmp_path), hf.load(hf.open_weights(tmp_path))
    (row,) = np.random.default_rng(0).integers(0, 61, (1, 11)).tolist()
    theirs = models.transformers().AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = theirs(torch.tensor([row])).last_hidden_state[0].double().numpy()
    engine = Engine(config, params, slots=4, readers=2, chunk=8, page=4)
    for pooling, expected in (("mean", states.mean(0)), ("last", states[-1])):
        (found,) = engine.embed([row], pooling=pooling)
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)


@pytest.mark.slow
def test_openai_s_client_reads_embeddings_in_the_order_of_its_texts(server):
    openai = pytest.importorskip("openai")
    texts = ["hello", "a much longer text than that", "hi", "you"]
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        given = {"model": "small", "input": texts, "extra_body": {"pooling": "last"}}
        packed = client.embeddings.create(**given)  # base64, unless it is told differently
        plain = client.embeddings.create(**given, encoding_format="float")
    rows = [[256, *text.encode()] for text in texts]
    for index, (row, a, b) in enumerate(zip(rows, packed.data, plain.data, strict=True)):
        (expected,) = served().embed([row], pooling="last")
        np.testing.assert_array_equal(np.float32(a.embedding), expected)
        np.testing.assert_array_equal(np.float32(b.embedding), expected)
        assert a.index == b.index == index
    assert packed.usage.prompt_tokens == sum(map(len, rows))
    assert served().programs == 2


def test_embeddings_that_cannot_be_made_are_refused(server):
    for body, status, said in (
        ([], 400, "JSON object"),
        ({}, 400, "input must be a text"),
        ({"input": []}, 400, "input must be a text"),
        ({"input": "a" * 128}, 400, "129 tokens, which exceeds the 128"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions is not known here"),
        ({"input": "a", "pooling": ["mean"]}, 400, "pooling is ['mean']: give mean or last"),
        ({"input": "a", "model": "large"}, 404, "ask for small"),
    ):
        found, text = server.ask("/v1/embeddings", body)
        assert found == status
        assert said in json.loads(text)["error"]["message"]
