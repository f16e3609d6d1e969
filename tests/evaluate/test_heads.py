"""Reports of classes, tags and answers against scikit-learn and definitions."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.evaluate import command, heads
from jaxtrain.evaluate.several import correlations
from jaxtrain.models import encoder, vit
from tests.commands import refused, run

NAMES = ["no", "perhaps", "yes", "never"]


def test_measures_of_classes_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    right = rng.integers(0, 3, 200)
    said = np.where(rng.random(200) < 0.6, right, rng.integers(0, 3, 200))
    said[right == 1] = 2  # of which none is right
    found, counts = heads._of_classes(NAMES, *([NAMES[i] for i in x] for x in (right, said)))
    expected = metrics.classification_report(
        right, said, labels=[0, 1, 2], target_names=NAMES[:3], output_dict=True, zero_division=0
    )
    for name in NAMES[:3]:
        got, wanted = found["classes"][name], expected[name]
        for ours, theirs in (("f1", "f1-score"), ("count", "support"), ("recall", "recall")):
            assert got[ours] == pytest.approx(wanted[theirs]), (name, ours)
        assert got["precision"] == pytest.approx(wanted["precision"])
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(right, said))
    assert found["macro_f1"] == pytest.approx(expected["macro avg"]["f1-score"])
    np.testing.assert_array_equal(counts[:3, :3], metrics.confusion_matrix(right, said))
    assert found["classes"]["never"]["count"] == 0


def test_measures_of_several_labels_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    right, said = (rng.random((60, 4)) < [0.5, 0.2, 0.9, 0.0] for _ in range(2))
    names = [
        [[x for x, has in zip(NAMES, row, strict=True) if has] for row in side]
        for side in (right, said)
    ]
    found = heads._of_labels(NAMES, *names)
    for kind in ("micro", "macro"):
        expected = metrics.f1_score(right, said, average=kind, zero_division=0)
        assert found[f"{kind}_f1"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(right, said))
    expected = metrics.precision_recall_fscore_support(right, said, zero_division=0)
    for name, wanted in zip(NAMES, zip(*expected, strict=True), strict=True):
        got = (found["classes"][name][x] for x in ("precision", "recall", "f1", "count"))
        assert list(got) == pytest.approx(list(wanted))
    assert "F1 of all labels" in next(heads.lines("rows", found))


def test_correlations_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 80) + 1e6  # with ties, far from 0
    scores = np.float32(0.5 * labels + rng.normal(size=80))
    found = correlations(labels, scores)
    assert found["pearson"] == pytest.approx(stats.pearsonr(labels, scores)[0], abs=1e-9)
    assert found["spearman"] == pytest.approx(stats.spearmanr(labels, scores)[0])
    assert correlations(labels, np.ones(80)) == {"pearson": 0, "spearman": 0}


def test_a_span_is_right_as_a_whole():
    right = ["B-A", "I-A", "O", "B-B", "O", "B-A"]
    said = ["B-A", "I-A", "O", "B-A", "O", "I-A"]  # one of another kind, and one that begins anew
    found = heads._of_spans([(right, said), (["O"], ["B-B"]), (["B-A", "I-A"], ["B-A", "O"])])
    assert found == pytest.approx({"precision": 2 / 5, "recall": 2 / 4, "f1": 4 / 9})


def stub(monkeypatch, opened_model, folder, said):
    """A model that says what a test has it say."""
    from jaxtrain.hf import opening

    opened = opening.Opened(opened_model, None, None, str(folder), ((), ()))
    monkeypatch.setattr(command, "open_model", lambda *forms, **options: opened)
    monkeypatch.setattr(heads, "predictions", lambda model, path: said(model))


def rows_at(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SIZES = {"vocab_size": 9, "seq_len": 8, "layers": 1, "width": 8, "heads": 2}


def test_answers_are_measured_as_by_squad_and_may_lack(monkeypatch, tmp_path, capsys):
    texts = {"text": ["the cat", "a cat sat"], "answer_start": [0, 8]}
    context = "the cat a cat sat"
    rows = [{"question": "who?", "context": context, "answers": texts}] * 2
    rows.append(rows[0] | {"answers": {"text": [], "answer_start": []}})

    def said(model):
        assert model.unanswerable  # since one has no answer
        return [{"text": "The cat!"}, {"text": "red cat"}, {"text": ""}]

    stub(monkeypatch, encoder.EncoderConfig(head="spans", **SIZES), tmp_path, said)
    out = tmp_path / "found.jsonl"
    asked = ["evaluate", "--model", "model", "--data", rows_at(tmp_path / "rows.jsonl", rows)]
    status, printed, _ = run(capsys, *asked, "--out", str(out))
    assert status == 0
    assert "66.7% exact, F1 88.9% of 3 rows" in printed
    (found,) = json.loads(out.read_text())["rows"].values()
    assert found == pytest.approx({"count": 3, "exact": 2 / 3, "f1": (1 + 2 / 3 + 1) / 3})


@pytest.mark.slow
def test_images_are_reported_and_drawn_beside_the_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pillow = pytest.importorskip("PIL.Image")
    config = vit.ViTConfig(image=(8, 8, 1), patch=4, layers=1, width=16, heads=2, classes=3)
    params = jax.tree.map(lambda x: 20 * x, vit.init(config, jax.random.key(0)))
    hf.save(tmp_path / "model", config, params)
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    labels = np.arange(40) % 3
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    out = tmp_path / "found.jsonl"
    data = str(tmp_path / "digits.npz")
    asked = ["evaluate", "--model", str(tmp_path / "model"), "--out", str(out), "--data", data]
    status, printed, err = run(capsys, *asked)
    assert status == 0, err
    found = json.loads(out.read_text())["rows"][data]
    z = vit.logits(config, params, {"image": images[..., None] / np.float32(255)})
    assert found["accuracy"] == pytest.approx(float((z.argmax(-1) == labels).mean()))
    assert f"{found['accuracy']:.1%} right of 40" in printed
    assert [each["count"] for each in found["classes"].values()] == [14, 13, 13]
    with pillow.open(tmp_path / "confusion-digits.png") as picture:
        assert min(picture.size) > 300
    (tmp_path / "other").mkdir()
    other = shutil.copy(data, tmp_path / "other")
    run(capsys, *asked, str(other))
    assert all((tmp_path / f"confusion-digits-{number}.png").is_file() for number in (1, 2))


def test_what_cannot_be_reported_is_refused(monkeypatch, tmp_path, capsys):
    config = encoder.EncoderConfig(head="classes", classes=2, **SIZES)
    (tmp_path / "config.json").write_text('{"id2label": {"0": "no", "1": "yes"}}')
    stub(monkeypatch, config, tmp_path, lambda model: [])
    rows = rows_at(tmp_path / "rows.jsonl", [{"text": "a", "label": "yes"}, {"text": "b"}])
    asked = ["evaluate", "--model", "model", "--data"]
    assert "row 2 has no 'label'" in refused(capsys, *asked, rows)
    rows = rows_at(tmp_path / "rows.jsonl", [{"text": "a", "label": 2}])
    assert "the class 2, which is none of the model's: no, yes" in refused(capsys, *asked, rows)
    monkeypatch.setattr(command.extras, "load", lambda *names: None)
    assert "is no decoder" in refused(capsys, *asked, rows, "--tasks", "hellaswag")
    for flag, value in (("--stride", "64"), ("--limit", "3"), ("--shots", "0")):
        message = refused(capsys, *asked, rows, flag, value)
        assert f"{flag} is {value}, which " in message
    sizes = {"patch": 4, "layers": 1, "width": 8, "heads": 2, "classes": 2}
    images = vit.ViTConfig(image=(8, 8, 1), **sizes)
    stub(monkeypatch, images, tmp_path, lambda model: [])
    for flag, value in (("--stride", "64"), ("--longest", "8"), ("--field", "body")):
        wanted = f"{flag} is {value}, which the head of the model in '{tmp_path}' does not read"
        assert wanted in refused(capsys, *asked, rows, flag, value)
    stub(monkeypatch, config, tmp_path, lambda model: [])
    out = tmp_path / "new" / "results.jsonl"
    refused(capsys, *asked, rows, "--out", str(out))
    assert out.parent.is_dir()  # so that no result is lost for want of a folder
