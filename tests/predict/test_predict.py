"""Predictions against transformers on the same folder, a row at a time and without padding."""

import functools
import json
import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.data import SubwordTokenizer
from jaxtrain.data.enclosed import row_ends
from jaxtrain.hf.encoders import label_fields
from jaxtrain.models import encoder, encoder_decoder, vit
from jaxtrain.predict import heads
from jaxtrain.tree import map_named
from tests.commands import refused, run
from tests.hf import models

SIZES = {"layers": 2, "width": 32, "heads": 4}
SHORT = ["--seq-len", "24", "--max-tokens", "9"]
MESH = ["--mesh.fsdp", "2", "--mesh.tensor", "2"]
CLASSES, TAGS = ["no", "perhaps", "yes"], ["O", "B-A", "I-A", "B-B"]
WORDS = re.findall(r"\w+", "the theme of a thesis is what it says and no more or so they say")


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    return SubwordTokenizer.train([" ".join(WORDS).encode()], 290).adding("[CLS]", "[MASK]")


def forms(size):
    known = functools.partial(encoder.EncoderConfig, vocab_size=size, seq_len=24, **SIZES)
    t5 = {"source_len": 24, "target_len": 9, "mlp": "geglu", "tied": False}
    t5 = encoder_decoder.T5Config(vocab_size=size, **t5, **SIZES)
    return {
        "classes": (encoder, known(head="classes", classes=3), label_fields(CLASSES)),
        "score": (encoder, known(head="score"), {}),
        "labels": (encoder, known(head="labels", classes=3), label_fields(CLASSES)),
        "tags": (encoder, known(head="tags", classes=4), label_fields(TAGS)),
        "spans": (encoder, known(head="spans"), {}),
        "tokens": (encoder, known(), {}),
        "t5": (encoder_decoder, t5, {}),
        "vit": (vit, vit.ViTConfig(image=(8, 12, 3), patch=4, classes=3, **SIZES), {}),
    }


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    @functools.cache
    def make(name):
        module, config, fields = forms(tokenizer.vocab_size)[name]
        folder = tmp_path_factory.mktemp(name) / "model"
        rng = np.random.default_rng(0)

        def draw(path, x):  # larger than at the start, so that rows differ
            return np.float32(0.3 * rng.standard_normal(x.shape) + path.endswith("scale"))

        params = map_named(draw, module.init(config, jax.random.key(0)))
        files = {"tokenizer.json": tokenizer.to_json()}
        if name == "vit":
            pixels = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
            files = {hf.weights.PREPROCESSOR: hf.weights.preprocessor(config, pixels)}
        fields = fields | ({"eos_token_id": tokenizer.eod} if name == "t5" else {})
        hf.save(folder, config, params, files=files, fields=fields)
        return folder

    return make


def predicted(capsys, folder, path, *flags):
    asked = ["predict", "--model", str(folder), "--data", str(path), "--rows", "3", *flags]
    status, out, err = run(capsys, *asked)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [" ".join(rng.choice(WORDS, n)) for n in lengths]


def logits(kind, folder, tokens, pair=()):
    """What transformers makes of one row, as float64."""
    torch = pytest.importorskip("torch")

    library = models.transformers()
    model = getattr(library, f"BertFor{kind}").from_pretrained(folder).eval()
    types = [0] * len(tokens) + [1] * len(pair)
    with torch.no_grad():
        found = model(torch.tensor([[*tokens, *pair]]), token_type_ids=torch.tensor([types]))
    if kind == "QuestionAnswering":
        found = torch.stack([found.start_logits, found.end_logits], dim=-1)
        return found[0].double().numpy()
    return found.logits[0].double().numpy()


def shares(z):
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def test_classes_of_texts_and_pairs_are_those_of_transformers(
    folder_of, tokenizer, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(heads, "RECORDS", 5)  # of which there are several parts
    texts, pairs = said(1, 9, 3, 2, 7, 40, 4), ["", "of it", "", "no more", "", "", "a"]
    rows = [{"text": a, "text_pair": b} for a, b in zip(texts, pairs, strict=True)]
    folder, path = folder_of("classes"), write_rows(tmp_path / "rows.jsonl", rows)
    found = predicted(capsys, folder, path, *MESH)
    assert len(found) == len(rows)
    first, _, last = row_ends(tokenizer)
    for text, pair, each in zip(texts, pairs, found, strict=True):
        text = [first, *tokenizer.encode(text).tolist()[:22], last]
        pair = [*tokenizer.encode(pair).tolist(), last] if pair else []
        expected = shares(logits("SequenceClassification", folder, text, pair))
        got = [each["probabilities"][name] for name in CLASSES]
        np.testing.assert_allclose(got, expected, atol=1e-4)
        assert each["label"] == CLASSES[expected.argmax()]
        assert each["probability"] == max(got)
    assert len({each["label"] for each in found}) > 1


@pytest.mark.slow
def test_scores_and_labels_of_texts_are_those_of_transformers(
    folder_of, tokenizer, tmp_path, capsys
):
    rows = [{"text": text} for text in said(1, 9, 3, 2, 7, 20, 4)]
    path, (first, _, last) = write_rows(tmp_path / "rows.jsonl", rows), row_ends(tokenizer)
    scores, labels = (
        predicted(capsys, folder_of(name), path, *MESH) for name in ("score", "labels")
    )
    for row, score, each in zip(rows, scores, labels, strict=True):
        ids = [first, *tokenizer.encode(row["text"]).tolist()[:22], last]
        expected = logits("SequenceClassification", folder_of("score"), ids)
        np.testing.assert_allclose([score.pop("score")], expected, atol=1e-4)
        assert score == {}
        expected = 1 / (1 + np.exp(-logits("SequenceClassification", folder_of("labels"), ids)))
        got = [each["probabilities"][name] for name in CLASSES]
        np.testing.assert_allclose(got, expected, atol=1e-4)
        assert each["labels"] == [x for x, p in zip(CLASSES, expected, strict=True) if p > 0.5]
    assert len({str(each["labels"]) for each in labels}) > 1


def test_tags_of_words_are_those_of_transformers(folder_of, tokenizer, tmp_path, capsys):
    rows = [{"tokens": text.split()} for text in said(3, 11, 30, 1)]
    folder, path = folder_of("tags"), write_rows(tmp_path / "rows.jsonl", rows)
    found = predicted(capsys, folder, path, "--mesh.data", "8")
    first, _, last = row_ends(tokenizer)
    for row, each in zip(rows, found, strict=True):
        tokens, places = [first], []
        for number, word in enumerate(row["tokens"]):
            places.append(len(tokens))
            tokens += tokenizer.encode(" " * bool(number) + word).tolist()
        tokens = [*tokens[:23], last]
        places = [place for place in places if place < 23]
        expected = shares(logits("TokenClassification", folder, tokens))[places]
        told = len(places)
        np.testing.assert_allclose(each["probabilities"][:told], expected.max(-1), atol=1e-4)
        assert each["tags"][:told] == [TAGS[i] for i in expected.argmax(-1)]
        assert set(each["tags"][told:]) <= {None}
        for span in each["spans"]:
            inside = each["tags"][span["first"] : span["last"] + 1]
            assert {tag[2:] for tag in inside} == {span["kind"]}
            assert span["text"].split() == row["tokens"][span["first"] : span["last"] + 1]
        begun = sum(tag is not None and tag.startswith("B-") for tag in each["tags"])
        assert len(each["spans"]) >= begun
    assert None in found[2]["tags"]
    assert len({tag for each in found for tag in each["tags"]}) > 2


def test_answers_are_those_of_all_places_in_all_parts(folder_of, tokenizer, tmp_path, capsys):
    texts = said(4, 9, 40)
    rows = [{"question": "what is it", "context": text} for text in texts]
    folder, path = folder_of("spans"), write_rows(tmp_path / "rows.jsonl", rows)
    found = predicted(capsys, folder, path, "--stride", "4", *MESH)
    lacking = predicted(capsys, folder, path, "--stride", "4", "--unanswerable")
    first, _, last = row_ends(tokenizer)
    asked = [first, *tokenizer.encode("what is it").tolist(), last]
    room, many = 24 - len(asked) - 1, 0
    for text, each, other in zip(texts, found, lacking, strict=True):
        ids, best, lack = tokenizer.encode(text).tolist(), (-np.inf,), (np.inf, np.inf)
        letters = np.cumsum([0, *map(len, tokenizer.token_pieces(ids))])
        start = 0
        while True:
            part = ids[start : start + room]
            z = logits("QuestionAnswering", folder, asked, [*part, last])
            z = np.concatenate([z[:1], z[len(asked) : -1]])  # none, and the context
            p = shares(z.T).T
            lack = min(lack[0], z[0].sum()), min(lack[1], p[0].prod())
            for i in range(1, len(z)):
                for j in range(i, min(len(z), i + 30)):
                    place = letters[start + i - 1], letters[start + j]
                    best = max(best, (z[i, 0] + z[j, 1], *place, p[i, 0] * p[j, 1]))
            many += start > 0
            if start + room >= len(ids):
                break
            start += room - 4
        assert each["text"] == text[best[1] : best[2]].strip() == text[each["start"] : each["stop"]]
        assert each["probability"] == pytest.approx(best[3], abs=1e-4)
        assert each["none"] == pytest.approx(lack[1], abs=1e-4)
        assert other["text"] == ("" if lack[0] > best[0] else each["text"])
    assert many > 1
    assert len({bool(each["text"]) for each in lacking}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_that_transformers_writes(beams, folder_of, tokenizer, tmp_path, capsys):
    torch = pytest.importorskip("torch")

    texts, folder = said(3, 12, 1, 40), folder_of("t5")
    path = write_rows(tmp_path / "rows.jsonl", [{"source": text} for text in texts])
    found = predicted(capsys, folder, path, "--beams", str(beams), *SHORT, *MESH)
    library = models.transformers()
    model = library.T5ForConditionalGeneration.from_pretrained(folder).eval()
    for text, each in zip(texts, found, strict=True):
        ids = [*tokenizer.encode(text).tolist()[:23], tokenizer.eod]
        form = {"pad_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod, "do_sample": False}
        given = {"attention_mask": torch.ones(1, len(ids), dtype=int), "num_beams": beams}
        expected = model.generate(torch.tensor([ids]), max_new_tokens=9, **given, **form)[0, 1:]
        expected = [x for x in expected.tolist() if x < tokenizer.vocab_size]
        assert each["text"] == tokenizer.decode(expected)
    assert len({each["text"] for each in found}) > 1


def test_classes_of_images_are_those_of_transformers(folder_of, tmp_path, capsys):
    torch = pytest.importorskip("torch")

    pillow, folder = pytest.importorskip("PIL.Image"), folder_of("vit")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 8, 12, 3), np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels)
    found = predicted(capsys, folder, tmp_path / "images.npz", *MESH)
    model = models.transformers().AutoModelForImageClassification.from_pretrained(folder).eval()
    given = (pixels / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]
    with torch.no_grad():
        z = model(torch.tensor(given.transpose(0, 3, 1, 2), dtype=torch.float32)).logits.numpy()
    got = [list(each["probabilities"].values()) for each in found]
    np.testing.assert_allclose(got, shares(np.float64(z)), atol=1e-4)
    assert [each["label"] for each in found] == [f"LABEL_{i}" for i in z.argmax(-1)]
    assert len({each["label"] for each in found}) > 1
    (tmp_path / "files").mkdir()
    for number, image in enumerate(pixels):
        pillow.fromarray(image).save(tmp_path / "files" / f"{number}.png")
    rows = [{"image": f"files/{number}.png"} for number in range(7)]
    files = predicted(capsys, folder, write_rows(tmp_path / "rows.jsonl", rows))
    again = [list(each["probabilities"].values()) for each in files]
    np.testing.assert_allclose(again, got, atol=1e-5)


def test_images_below_a_folder_are_rows_of_the_classes_that_folders_name(tmp_path):
    asked = str(tmp_path), ("image", "label")
    with pytest.raises(ValueError, match="holds no images: give a folder of some"):
        list(heads.records_of(*asked))
    wanted = {"a/1.png": "a", "a/more/2.JPG": "a", "b/3.png": "b", "4.png": ""}
    for name in [*wanted, "b/notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = list(heads.records_of(*asked))
    assert {str(row["image"].relative_to(tmp_path)): row["label"] for row in found} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "tags", "answers"])
def test_a_run_and_its_export_predict_the_same(task, tmp_path, capsys):
    from experiments import bert

    texts = said(*range(3, 60))
    rows = [
        {"text": x, "label": "few" if len(x) < 50 else "many", "text_pair": "so" if i % 2 else ""}
        | {"tokens": x.split(), "tags": ["B-IT" if w == "it" else "O" for w in x.split()]}
        | {"question": "what?", "context": x, "answers": {"text": [x[:3]], "answer_start": [0]}}
        for i, x in enumerate(texts)
    ]
    path, folder = write_rows(tmp_path / "rows.jsonl", rows), str(tmp_path / "run")
    flags = ["--task", task, "--data", str(path), "--run-dir", folder, "--steps", "30"]
    flags += ["--layers", "1", "--width", "16", "--tokenizer", "300", "--seq-len", "32"]
    flags += ["--stride", "8", "--global-batch", "8", "--examples", "0"]
    jt.main(bert.Config, bert.build, flags)
    assert run(capsys, "hf", "export", "--run", folder, "--out", str(tmp_path / "out"))[0] == 0
    given = ["--stride", "8"] if task == "answers" else []
    own, exported = (predicted(capsys, each, path, *given) for each in (folder, tmp_path / "out"))
    assert own == exported
    assert len(own) == len(rows)
    if task == "classify":
        assert {name for each in own for name in each["probabilities"]} == {"few", "many"}


def test_what_cannot_be_predicted_is_refused(folder_of, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 8, 8, 3), np.uint8))

    def said_of(name, path, *flags):
        asked = ["predict", "--run", str(folder_of(name)), "--data", str(path), *flags]
        return refused(capsys, *asked)

    assert "has the head 'tokens', which predicts nothing" in said_of("tokens", rows)
    assert "row 1 has no 'tokens'; it has 'text'" in said_of("tags", rows)
    assert "the images are 8x8x3, and the model's are 8x12x3" in said_of(
        "vit", tmp_path / "images.npz"
    )
    assert "is no JSONL, CSV, TSV or Parquet" in said_of("classes", tmp_path / "none.jsonl")
    assert "rows of 25 tokens are asked for, and" in said_of("classes", rows, "--seq-len", "25")
    assert "--rows is 0" in said_of("classes", rows, "--rows", "0")
    assert "--beams is 4, which the head" in said_of("classes", rows, "--beams", "4")
    assert "has no checkpoints" in said_of("classes", rows, "--step", "3")


def test_no_file_is_lost_to_the_one_that_is_written(folder_of, tmp_path, capsys):
    folder, rows = folder_of("classes"), write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    before, told = rows.read_text(), tmp_path / "new" / "told.jsonl"
    asked = ["predict", "--model", str(folder), "--data", str(rows), "--out"]
    same = str(tmp_path / "new" / ".." / "rows.jsonl")
    assert "the file of the rows: give another" in refused(capsys, *asked, same)
    assert rows.read_text() == before
    assert run(capsys, *asked, str(told))[0] == 0
    (line,) = told.read_text().splitlines()
    assert json.loads(line)["label"] in CLASSES
    rows.write_text('{"other": "a"}\n')
    assert "row 1 has no 'text'" in refused(capsys, *asked, str(told))
    assert told.read_text() == line + "\n"
