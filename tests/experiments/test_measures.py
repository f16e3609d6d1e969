"""ROUGE and BLEU are those of the libraries, of texts that a model has written."""

import json
import re
import sys

import jax
import pytest

from experiments import bert, gpt, measures, t5
from jaxtrain import data, hf
from jaxtrain.models import decoder
from jaxtrain.run.main import main, parse


def test_measures_of_texts():
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    wanted = ["the cat sat on the mat", "a b c d e"]
    rouge, bleu = measures.lines(("rouge", "bleu"), ["the cat sat on the mat", "a b c x"], wanted)
    # Unigrams 3 of 4 and 3 of 5; bigrams 2 of 3 and 2 of 4; the longest common part is 3.
    one, two = 2 * 0.75 * 0.6 / 1.35, 2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)
    means = [50 * (1 + x) for x in (one, two, one)]
    assert [float(x) for x in re.findall(r"\d+\.\d+", rouge)] == pytest.approx(means, abs=5e-3)
    assert measures.lines(("bleu",), wanted, wanted)[0].split(": ")[1].startswith("100.00")
    assert "tok:13a" in bleu


@pytest.mark.parametrize("experiment", [gpt, t5])
def test_a_missing_library_is_said_before_training(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    task = {"task": "name"} if experiment is t5 else {}
    with pytest.raises(ImportError, match=r"come with rouge-score and sacrebleu: pip install -e"):
        experiment.build(experiment.Config(measures=("bleu",), **task))


@pytest.mark.slow
def test_answers_of_a_decoder_are_measured(tmp_path, capsys):
    pytest.importorskip("rouge_score")
    lines = [json.dumps({"prompt": f"{n}?", "completion": f" {n}!"}) for n in range(100, 200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    model = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=1, width=16, heads=2)
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(0)))
    flags = ["--data", str(tmp_path / "rows.jsonl"), "--chat-template", "plain", "--packing", "fit"]
    flags += ["--tokenizer", "bytes", "--init-from", str(tmp_path / "model"), "--steps", "2"]
    flags += ["--measures", "rouge", "--sample-tokens", "0", "--run-dir", str(tmp_path / "run")]
    main(gpt.Config, gpt.build, flags)
    assert re.search(r"ROUGE of \d+ held-out texts: rouge1 \d", capsys.readouterr().out)
    bare = parse(gpt.Config, ["--measures", "rouge", "--data", "jaxtrain/compare"])
    with pytest.raises(ValueError, match="has no answers to compare with: give conversations"):
        gpt.build(bare)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [bert, t5])
def test_other_text_is_held_out_too(experiment, tmp_path):
    for name, word in (("new", b"one two "), ("old", b"three four ")):
        (tmp_path / name).mkdir()
        for n in range(12):
            (tmp_path / name / f"{n}.txt").write_bytes(word * (400 + n))
    documents = [document.text for document in data.open_text(str(tmp_path), held_out=0.1).train]
    made = data.SubwordTokenizer.train(documents, 280)
    made = made.adding("[CLS]", "[MASK]") if experiment is bert else made
    made.save(tmp_path / "tokenizer.json")
    flags = ["--data", str(tmp_path / "new"), "--also-held-out", str(tmp_path / "old")]
    flags += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--steps", "1", "--examples", "0"]
    flags += ["--layers", "1", "--width", "16", "--heads", "2", "--run-dir", str(tmp_path / "run")]
    main(experiment.Config, experiment.build, flags)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (told,) = (line for line in log if "eval/loss" in line)
    assert told["eval/old/loss"] > 0
    assert told["eval/old/loss"] != told["eval/loss"]
