"""The encoder-decoder experiment, small: rows of both tasks, a run, its way out and in again."""

import ast
import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments.t5 import (
    Config,
    NameRows,
    Pair,
    build,
    conclude_names,
    functions,
    outline,
    token_f1,
)
from jaxtrain import data, hf
from jaxtrain.hf import export_command
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.run.main import main, parse

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--source-len", "40", "--target-len"]
SMALL += ["24", "--steps", "3", "--global-batch", "8", "--tokenizer", "bytes", "--examples", "8"]
MODEL = t5.T5Config(vocab_size=400, source_len=40, target_len=24, layers=1, width=16, heads=2)
CODE = '''
class A:
    def half(self, x: int = 2, *rest) -> float:
        """Halves it.

        More."""
        y = x / 2
        return y or self.half(y)

    def nothing(self):
        """Only this."""

    def plain(self):
        return 1

    def passes(self):
        pass

async def go(path):
    "Goes there."
    await path
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Files of Python, on both sides of the split."""
    folder = tmp_path_factory.mktemp("code")
    for number in range(12):
        text = CODE.replace("half", f"half_{number}").replace("path", f"path_{number}")
        (folder / f"{number}.py").write_text(text)
    return str(folder)


def test_functions_lose_their_names_and_docstrings():
    found = list(functions([data.Document("a", CODE.encode()), data.Document("b", b"def '''(")]))
    # A docstring is asked for where there is one; what has no body, or does nothing, says nothing.
    assert [pair.target for pair in found] == ["go: Goes there.", "half: Halves it.", "plain"]
    assert found[2].source == "(self)\nreturn 1"
    asked, _, source = found[1].source.partition(" ")
    assert (asked, source) == ("doc:", "(self, x: int=2, *rest)\ny = x / 2\nreturn y or self._(y)")
    ast.parse("def f" + source.replace("\n", ":\n  ", 1).replace("\nreturn", "\n  return"))
    rows = NameRows(found, data.ByteTokenizer(), MODEL)
    assert bytes(rows[0]["targets"][:15].tolist()) == b"go: Goes there."
    assert rows[0]["targets"][15] == 256
    # What is too long keeps its end.
    assert data.pair_row([7] * 50 + [256], [1], 40, 24)["source"].tolist() == [7] * 39 + [256]


def test_token_f1_is_that_of_its_definition():
    assert token_f1("getName: Reads it", "get_name: reads") == pytest.approx(2 * 3 / (4 + 3))
    assert token_f1("a", "b") == 0.0
    assert token_f1("same: words", "same: words") == 1.0


@pytest.mark.slow
def test_a_small_run_names_functions_beside_the_most_frequent_name(code, tmp_path, capsys):
    flags = ["--task", "name", "--data", code, "--run-dir", str(tmp_path / "run")]
    main(Config, build, [*SMALL, *flags])
    printed = capsys.readouterr().out
    assert re.search(r"\d+ held-out functions, \d+ with a docstring +exact name +name F1", printed)
    assert re.search(r"always (go|plain): \w+ \w+\. +\d+\.\d%", printed)
    assert "  it is     go: Goes there." in printed


@pytest.mark.slow
def test_a_run_of_spans_goes_out_and_names_begin_from_it(texts, code, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    flags = ["--data", texts, "--tokenizer", "300", "--run-dir", str(run)]
    main(Config, build, [*SMALL, *flags])
    printed = capsys.readouterr().out
    assert re.search(r"held-out tokens of spans: \d+\.\d% right", printed)
    assert "<0>" in printed
    main(Config, build, [*SMALL, *flags, "--resume"])
    assert "resum" in capsys.readouterr().out
    assert export_command.run_export(export_command.ExportOptions(run=str(run), out=out), []) == 0
    assert hf.family_name(out) == "t5"
    model = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
    kept = ["--steps", "--global-batch", "--examples", "--source-len", "--target-len"]
    begin = [flag for name in kept for flag in (name, model[name])]
    more = ["--task", "name", "--data", code, "--init-from", str(out), "--beams", "2"]
    main(Config, build, [*begin, *more, "--run-dir", str(tmp_path / "name")])
    assert "exact name" in capsys.readouterr().out
    of_run, of_folder = (
        outline(Config(init_from=str(folder), target_len=24)).task.params() for folder in (run, out)
    )
    jax.tree.map(np.testing.assert_array_equal, of_run, jax.tree.map(np.asarray, of_folder))


def test_held_out_functions_are_none_that_are_trained_on(code, tmp_path):
    """Without their names two of the three functions of each file are alike, and `go` is not."""
    config = {"task": "name", "tokenizer": "bytes", "source_len": 40, "target_len": 24}
    text = build(Config(**config, data=code)).metadata.facts["text"]
    train, held_out = map(int, re.findall(r"(\d+) (?:functions|held out)", text))
    files = train // 3
    assert (train, held_out) == (3 * files, 12 - files)
    for number in range(12):
        (tmp_path / f"{number}.py").write_text(CODE)
    with pytest.raises(ValueError, match="finds no function of Python in the files held out"):
        build(Config(**config, data=str(tmp_path)))


def test_flags_that_do_not_fit_are_refused(texts):
    small = {"source_len": 40, "data": texts, "tokenizer": "bytes"}
    with pytest.raises(ValueError, match="`target_len` is 6, too short for the spans of"):
        build(Config(**small, target_len=6))
    with pytest.raises(ValueError, match="--task name finds no function of Python in the"):
        build(Config(**small, target_len=24, task="name"))
    # Before anything is trained.
    with pytest.raises(ValueError, match="`beams` is 0: give at least 1"):
        build(Config(**small, target_len=24, beams=0))
    with pytest.raises(ValueError, match="beams=400 must be from 1 to half of the vocabulary"):
        build(Config(**small, target_len=24, beams=400))
    with pytest.raises(ValueError, match=r"--mesh.tensor 3 does not divide 4 heads"):
        outline(Config(layout=jt.Layout.parse("tensor=3")))
    planned = outline(Config(model="flan-t5-small"))
    assert planned.data.batch["source"].shape == (32, 512)
    shapes = jax.eval_shape(planned.task.init_fn, jax.random.key(0))
    assert shapes["encoder"]["mlp"]["gate"]["kernel"].shape == (8, 512, 1024)


@pytest.mark.slow
def test_rows_of_source_and_target_are_learned(tmp_path, capsys):
    rows = [f"{n},{n + 1}\n" for n in range(80)]
    (tmp_path / "rows.csv").write_text("source,target\n" + "".join(rows))
    main(Config, build, [*SMALL, "--task", "rows", "--data", str(tmp_path / "rows.csv")])
    printed = capsys.readouterr().out
    assert re.search(r"held-out targets +exact text    text F1\n  the model  ", printed)
    assert "it wrote" in printed


def test_rows_of_source_and_target_are_pairs(texts, tmp_path):
    for name, numbers in (("train", range(60)), ("validation", range(60, 80))):
        lines = [json.dumps({"source": f"{n}?", "target": f"{n + 1}"}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    flags = [*SMALL, "--task", "rows", "--data"]
    built = build(parse(Config, [*flags, str(tmp_path)]))
    batch = next(iter(built.data.eval_batches[""](None)))
    assert batch["source"][0, :4].tolist() == [*b"60?", 256]
    assert batch["targets"][0, :3].tolist() == [*b"61", 256]
    assert "60 rows to train on, 20 held out" in built.metadata.facts["text"]
    assert "cut" not in built.metadata.facts
    # With the token that ends it a target of two digits has three: 51 in training, 20 held out.
    built = build(parse(Config, [*flags, str(tmp_path), "--target-len", "2"]))
    told = "0 sources and 71 targets, which are longer than their rows"
    assert built.metadata.facts["cut"] == told
    with pytest.raises(ValueError, match="--task rows reads rows of source and target, and '"):
        build(parse(Config, [*flags, texts]))


def test_targets_of_any_alphabet_are_measured_by_their_words(monkeypatch):
    """Of three Russian targets one is exact, and one has half of its words."""
    pairs = [Pair(text, text) for text in ("да", "да нет", "нет")]
    rows, tokenizer = NameRows(pairs, data.ByteTokenizer(), MODEL), data.ByteTokenizer()
    said = [[*tokenizer.encode(text), tokenizer.eod] for text in ("да", "да он", "он")]
    monkeypatch.setattr("experiments.t5.write", lambda *given, **more: list(map(np.array, said)))
    config = Config(task="rows", global_batch=3)
    lines = conclude_names(config, MODEL, tokenizer, rows, rows, None, {})
    assert lines[1].split() == ["the", "model", "33.3%", "50.0%"]
    assert lines[2].split() == ["always", "да", "33.3%", "55.6%"]


def test_a_tokenizer_without_tokens_for_spans_is_named(texts, tmp_path):
    tokenizer = data.SubwordTokenizer.train([b"a b c"], 257)
    model = dataclasses.replace(MODEL, vocab_size=257)
    files = {"tokenizer.json": tokenizer.to_json()}
    hf.save(tmp_path, model, t5.init(model, jax.random.key(0)), files=files)
    with pytest.raises(ValueError, match=r"has no <extra_id_0> .* by adding <extra_id_0> to <ext"):
        build(Config(init_from=str(tmp_path), data=texts))
