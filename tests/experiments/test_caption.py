"""The captioning experiment: canvases that captions tell, pairs that training lacks, and a run."""

import copy
import itertools
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from experiments import caption, vision
from experiments.caption import Canvases, Config, build, drawn, model_config
from jaxtrain import data, hf
from jaxtrain.hf.export_command import ExportOptions, run_export
from jaxtrain.run import trained
from jaxtrain.run.main import main

pytest.importorskip("sklearn")

TINY = ["--steps", "2", "--global-batch", "16", "--layers", "1", "--width", "16", "--heads", "2"]


class Only:
    """Digits of which those of other classes are black."""

    def __init__(self, rows, label):
        self.rows, self.label = rows, label

    def __getitem__(self, index):
        row = self.rows[index]
        return row | {"image": row["image"] * (row["label"] == self.label)}


def test_captions_say_what_the_canvas_has_and_unseen_pairs_are_held_out():
    digits, model = vision.load(vision.Config()), model_config(Config())
    how = {"model": model, "seed": 3, "count": 64}
    train, held_out = (
        Canvases(rows, unseen=unseen, **how)
        for rows, unseen in ((digits.train, False), (digits.held_out, True))
    )
    assert (len(train.pairs), len(held_out.pairs)) == (84, 16)
    assert not {*train.pairs} & {*held_out.pairs}
    assert {(b, a) for a, b in held_out.pairs} <= {*train.pairs}
    opposites = {"left of": "right of", "above": "below"}
    form = r"a (\d) (left of|right of|above|below) a (\d)"
    for rows, index in itertools.product((train, held_out), range(40)):
        canvas, said = rows.drawn(index)
        (a, word, b), (c, other, d) = (re.fullmatch(form, each).groups() for each in said)
        assert (a, b) == (d, c)
        assert opposites.get(word) == other or opposites[other] == word
        first = (a, b) if word in opposites else (c, d)
        assert tuple(map(int, first)) in rows.pairs
        if a == b:
            continue
        # Where digit a is, by the same canvas with all pictures of others left black.
        alone = copy.copy(rows)
        alone.digits = Only(rows.digits, int(a))
        one = alone.drawn(index)[0]
        y, x, v, u = (
            np.average(np.arange(caption.SIDE), weights=part.sum(axes))
            for part in (one, np.where(one < canvas, canvas, 0))
            for axes in ((1, 2), (0, 2))
        )
        right = {"left of": x < u - 4, "right of": x > u + 4}
        right |= {"above": y < v - 4, "below": y > v + 4}
        assert right[word]
    row, tokenizer, N = train[5], data.ByteTokenizer(), model.positions_of_image
    assert (row["tokens"] == model.image_token).sum() == N
    text = tokenizer.decode(row["targets"][row["mask"] > 0][:-1])
    assert text == train.drawn(5)[1][0]
    assert row["targets"][row["mask"] > 0][-1] == tokenizer.eod
    assert text == tokenizer.decode(row["tokens"][N : N + len(text)])
    assert row["mask"][: N - 1].sum() == 0
    later = train[5 + len(train)]
    assert not np.array_equal(later["image"], row["image"])


def test_an_image_token_that_is_written_is_no_letter(monkeypatch):
    digits, model = vision.load(vision.Config()).held_out, model_config(Config())
    rows = Canvases(digits, model=model, seed=0, count=2, unseen=False)
    new = np.array([[*b"a 7", model.image_token, data.ByteTokenizer().eod]] * 2)
    monkeypatch.setattr(caption.language, "write", lambda *args, **how: new)
    params = types.SimpleNamespace(params=None)
    assert caption.written(Config(), model, rows, 2, params)[1] == ["a 7?", "a 7?"]


def test_wrong_captions_are_red():
    pytest.importorskip("PIL")
    canvases, right = 4 * [np.ones((20, 20, 1), np.float32)], 4 * [["a 1 above a 2"]]
    pixels = drawn(canvases, ["a 1 above a 2", "a 2 above a 1", *2 * right[0]], right)
    assert (pixels.shape, pixels.dtype) == ((160, 560, 3), np.uint8)
    red = (pixels[..., 0] > 200) & (pixels[..., 1] < 60)
    assert [bool(red[:, x : x + 140].any()) for x in range(0, 560, 140)] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.slow
def test_a_run_is_exported_and_begun_from_again(tmp_path, capsys):
    run, out = str(tmp_path / "run"), tmp_path / "out"
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2", "--accumulate", "2"]
    main(Config, build, [*TINY, "--run-dir", run, *mesh])
    printed = capsys.readouterr().out
    assert "exact captions of unseen pairs" in printed
    assert (tmp_path / "run" / "captions.png").read_bytes()[:4] == b"\x89PNG"
    run_export(ExportOptions(run=run, out=out), [])
    assert hf.family_name(out) == "llava"
    begun = [*TINY[:4], "--run-dir", str(tmp_path / "second"), "--init-from", str(out)]
    main(Config, build, [*begun, "--optimizer.freeze", "^image"])
    again = trained.load(str(tmp_path / "second"))[1]
    before = hf.load(hf.open_weights(out))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, again)
    assert all(jax.tree.leaves([same["image"], same["image_blocks"], same["unread"]]))
    assert not any(jax.tree.leaves(same["project"]))


@pytest.mark.slow
def test_captions_of_unseen_pairs_are_exact(tmp_path):
    """Below the 93.75 and 96.68 % of the lesser of two seeds."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.caption", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    found = [float(x) for x in re.findall(r"pairs: ([\d.]+)%", done.stdout)]
    assert len(found) == 2, done.stderr
    assert found[0] >= 92, found
    assert found[1] >= 95, found
