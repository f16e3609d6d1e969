"""The BERT experiment, small: both tasks, one begun from the other, exported, resumed, refused."""

import contextlib
import csv
import io
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.bert import Config, build, outline
from experiments.bert.classify import class_of, largest_classes
from experiments.bert.common import split_of
from jaxtrain import data, hf
from jaxtrain.build import make_experiment_mesh, make_state, rows_of
from jaxtrain.compare.parity import compare
from jaxtrain.models import encoder
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.run import trained
from jaxtrain.run.loop import fit
from jaxtrain.run.main import main, parse
from tests.commands import run as command
from tests.hf import models

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "16"]
SMALL = ["--tokenizer", "300", "--steps", "2", "--global-batch", "8", "--examples", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three folders of texts, of different words, and a text outside of them."""
    path = tmp_path_factory.mktemp("texts")
    words = {"fruit": "apple pear plum", "metal": "iron zinc lead", "tiny": "a b"}
    for kind, names in words.items():
        (path / kind).mkdir()
        for i in range(3 if kind == "tiny" else 15):
            order = np.random.default_rng(i).permuted(names.split() * 12)
            (path / kind / f"{i}.txt").write_text(" ".join(order))
    (path / "readme.txt").write_text("of no folder")
    return str(path)


@pytest.fixture(scope="module")
def masked(folder, tmp_path_factory):
    """A run that has filled in masks; what it printed is beside it."""
    run = tmp_path_factory.mktemp("runs") / "masked"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(Config, build, [*SIZES, *SMALL, "--data", folder, "--run-dir", str(run)])
    run.with_suffix(".txt").write_text(printed.getvalue())
    return str(run)


def test_masks_are_filled_in(masked):
    printed = " ".join(Path(f"{masked}.txt").read_text().split())
    assert re.search(
        r"held-out: \d+\.\d% of \d+ masked tokens right, loss \d\.\d+ nats; alw", printed
    )
    assert "____" in printed


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_its_own_tokenizer(folder, masked, tmp_path):
    flags = [*SIZES, *SMALL, "--data", folder, "--run-dir", str(tmp_path / "run")]
    run = fit(build(config := parse(Config, [*flags, "--save-every", "1"])), config.run)
    assert int(run.state.step) == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    main(Config, build, ["--run-dir", str(tmp_path / "run"), "--resume"])
    got, expected = (trained.load(str(path))[1] for path in (tmp_path / "run", masked))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_classes_are_learned_from_the_masked_run_and_exported(folder, masked, tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    flags = [
        *SMALL,
        "--data",
        folder,
        "--task",
        "classify",
        "--classes",
        "2",
        "--init-from",
        masked,
    ]
    flags[1] = f"{masked}/tokenizer.json"
    state = make_state(built := build(parse(Config, flags)), make_experiment_mesh(built))
    begun, own = state.params, trained.load(masked)[1]
    for part in ("embed", "blocks"):
        jax.tree.map(np.testing.assert_array_equal, begun[part], own[part])
    assert begun["head"]["out"]["kernel"].shape == (16, 2)
    main(Config, build, [*flags, "--run-dir", run])
    printed = capsys.readouterr().out
    assert "which of 2: fruit, metal" in printed
    # What stands in the words, logistic regression finds.
    assert "TF-IDF with logistic regression: 100.0%" in printed
    assert f"right, from {masked}" in " ".join(printed.split())
    status, *_ = command(capsys, "hf", "export", "--run", run, "--out", out)
    assert status == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["label2id"] == {
        "fruit": 0,
        "metal": 1,
    }
    assert hf.read_config(out) == trained.model(run)
    library = models.transformers()
    words = library.AutoTokenizer.from_pretrained(out)
    assert (words.mask_token, words.cls_token) == ("[MASK]", "[CLS]")
    built = build(parse(Config, [*SMALL[2:], "--data", folder, "--init-from", out]))
    head = make_state(built, make_experiment_mesh(built)).params["head"]
    assert set(head) == {"transform", "norm", "bias"}


def test_classes_are_the_largest_folders_with_files_on_both_sides(folder):
    config = parse(Config, ["--data", folder, "--classes", "2"])
    split = split_of(config)
    assert largest_classes(split, config) == ("fruit", "metal")
    names = [{document.name for document in side} for side in split]
    assert not names[0] & names[1]
    assert {class_of(name) for name in names[0] | names[1]} == {"", "fruit", "metal", "tiny"}
    with pytest.raises(
        ValueError, match=r"--classes is 9, and .* folders with texts to train on and"
    ):
        largest_classes(split, parse(Config, ["--data", folder, "--classes", "9"]))


ROWS = [
    {"text": f"{n} apple 'pear', \"plum\"", "text_pair": "iron " * (n % 7), "label": "a/b"[n % 3]}
    for n in range(90)
]


def labelled(path, kind, rows):
    """Writes labelled rows, as others do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(f".{kind}")
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="", encoding="utf-8-sig") as out:
            writer = csv.DictWriter(out, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    return str(file)


def test_labelled_rows_of_every_kind_are_the_same(tmp_path):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data"]
    built, rows = [], {}
    for kind in ("jsonl", "csv", "tsv", "parquet"):
        labelled(tmp_path / kind / "train", kind, ROWS[:60])
        labelled(tmp_path / kind / "validation", kind, ROWS[60:])
        built.append(build(parse(Config, [*flags, str(tmp_path / kind)])))
        rows[kind] = rows_of(next(iter(built[-1].data.eval_batches[""](None))))
        jax.tree.map(np.testing.assert_array_equal, rows[kind], rows["jsonl"])
    assert len({str(each.metadata.fingerprints) for each in built[:3]}) == 1
    assert built[0].metadata.config["special_tokens"]["id2label"] == {"0": "/", "1": "a", "2": "b"}
    assert built[0].metadata.config["model"]["classes"] == 3
    assert "60 rows of 60 texts to train on, 30 rows" in built[0].metadata.facts["text"]
    tokenizer = trained_tokenizer(built[0], tmp_path)
    batch, ids = rows["jsonl"], [tokenizer.special_id(b"[CLS]"), tokenizer.eod]
    for n in range(8):
        row = ROWS[60 + n]
        text, pair = (tokenizer.encode(row[name]).tolist() for name in ("text", "text_pair"))
        while len(text) + len(pair) > 13 + (not pair):
            (text if len(text) >= len(pair) else pair).pop()
        tokens = [ids[0], *text, ids[1], *pair, *([ids[1]] if pair else [])]
        types = [0] * (len(text) + 2) + [1] * (len(tokens) - len(text) - 2)
        for name, wanted in (("tokens", tokens), ("segments", [1] * len(tokens)), ("types", types)):
            expected = wanted + [0] * (16 - len(tokens))
            # The tiny model has one type of tokens.
            expected = [0] * 16 if name == "types" else expected
            assert batch[name][n].tolist() == expected, name
        assert batch["label"][n] == "/ab".index(row["label"])


def trained_tokenizer(experiment, path):
    (path / "tokenizer.json").write_text(experiment.metadata.files["tokenizer.json"])
    return data.SubwordTokenizer.load(path)


def test_classes_may_weigh_the_same_in_training_alone(tmp_path):
    # Labels are numbers, of which the second comes first by its letters.
    rows = [{"text": "apple pear", "label": 10 if n % 5 == 0 else 9, "n": n} for n in range(100)]
    path = labelled(tmp_path / "rows", "csv", rows)
    flags = [*SIZES, *SMALL, "--task", "classify", "--data", path]
    experiment = build(parse(Config, [*flags, "--class-weights", "--global-batch", "100"]))
    with experiment.data.train_batches(0, None) as batches:
        batch = next(batches)
    assert experiment.metadata.config["special_tokens"]["id2label"] == {"0": "9", "1": "10"}
    assert experiment.metadata.facts["not read"] == "the fields n"
    sums = [batch["mask"][batch["label"] == label].mean() for label in (0, 1)]
    shares = [np.mean(batch["label"] == label) for label in (0, 1)]
    # A batch of all of an epoch and a part of the next.
    assert sums[1] / sums[0] == pytest.approx(shares[0] / shares[1], rel=0.2)
    (held_out,) = list(experiment.data.eval_batches[""](None))[:1]
    assert (rows_of(held_out)["mask"] == 1).all()


def grouped(path, count=200):
    """Rows whose first word tells the label, and whose second says the same but in one group."""
    rng, rows = np.random.default_rng(0), []
    for n in range(count):
        label, rare = int(rng.integers(2)), n % 8 == 0
        first, second = ("apple", "iron")[label], ("plum", "zinc")[label ^ rare]
        group = "rare" if rare else "common"
        rows.append({"text": f"{first} {second}", "label": label, "group": group})
    return labelled(path, "csv", rows)


@pytest.mark.parametrize("weights", ["equal", "common=1,rare=3", "dro"])
def test_groups_weigh_what_is_asked_in_training_alone(weights, tmp_path):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data", grouped(tmp_path / "rows")]
    flags += ["--group", "group", "--group-weights", weights, "--global-batch", "100"]
    experiment = build(parse(Config, flags))
    assert "not read" not in experiment.metadata.facts
    assert experiment.metadata.fingerprints["groups"] == "common, rare"
    with experiment.data.train_batches(0, None) as batches:
        batch = next(batches)
    of_rare = batch["group"][:, 1]
    common, rare = (batch["mask"][of_rare == g] for g in (0, 1))
    if weights == "dro":
        assert (batch["mask"] == 1).all()
        assert "dro" in experiment.method.step.__name__
    elif weights == "equal":  # a batch of most of an epoch
        assert common.sum() / rare.sum() == pytest.approx(1, rel=0.3)
    else:
        assert (rare == 3).all()
        assert (common == 1).all()
    (held_out,) = list(experiment.data.eval_batches[""](None))[:1]
    assert (rows_of(held_out)["mask"] == 1).all()


@pytest.mark.slow
def test_groups_are_told_apart_in_the_end(tmp_path, capsys):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data", grouped(tmp_path / "rows")]
    flags += ["--group", "group", "--group-weights", "dro", "--run-dir", str(tmp_path / "run")]
    main(Config, build, [*flags, "--eval-first", "--save-best"])
    printed = capsys.readouterr().out
    assert re.search(r"held-out, by group:\n  group +rows  accuracy .*\n  common +\d+ ", printed)
    assert re.search(r"\n  gap +\d+ +[\d.]+% \(", printed)
    assert re.search(r"\n  group/rare/accuracy( +\d\.\d+){2} +[-+]\d\.\d+\n", printed)
    assert "eval/worst_group_accuracy" in printed


@pytest.mark.slow
def test_a_classifier_is_evaluated_by_groups_of_a_file(tmp_path, capsys):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data", grouped(tmp_path / "rows")]
    main(Config, build, [*flags, "--run-dir", str(tmp_path / "run")])
    capsys.readouterr()
    path, run = grouped(tmp_path / "rows"), str(tmp_path / "run")
    assert command(capsys, "export", "--run", run, "--out", str(tmp_path / "out"))[0] == 0
    tables = []
    for model in (run, str(tmp_path / "out")):
        given = ["evaluate", "--run", model, "--data", path, "--group", "group", "--rows", "64"]
        status, printed, _ = command(capsys, *given, "--out", str(tmp_path / "found.jsonl"))
        assert status == 0
        lines = printed.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("  group "))
        tables.append(lines[start : start + 4])
    assert tables[0] == tables[1]
    assert [line.split()[0] for line in tables[0]] == ["group", "common", "rare", "gap"]
    found = json.loads((tmp_path / "found.jsonl").read_text().splitlines()[0])["rows"][path]
    rows = list(data.rows_in(path, ("text", "label", "group")))
    config, params, tokenizer = trained.load(run)
    ids = [[tokenizer.special_id(b"[CLS]"), *tokenizer.encode(x["text"]), 0] for x in rows]
    right = []
    for length in {len(row) for row in ids}:  # those of one length, without any padding
        of_length = [i for i, row in enumerate(ids) if len(row) == length]
        tokens = np.array([ids[i] for i in of_length], np.int32)
        tokens[:, -1] = tokenizer.eod
        guesses = encoder.logits(config, params, {"tokens": tokens}).argmax(-1)
        right += [(i, int(guesses[k]) == int(rows[i]["label"])) for k, i in enumerate(of_length)]
    right = [x for _, x in sorted(right)]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    of_rare = [x for x, row in zip(right, rows, strict=True) if row["group"] == "rare"]
    assert found["groups"]["rare"]["accuracy"][0] == pytest.approx(np.mean(of_rare))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["dro", "common=1,rare=3"])
def test_groups_weigh_the_same_on_every_mesh(weights, tmp_path):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data", grouped(tmp_path / "rows")]
    flags += ["--layers", "2", "--group", "group", "--group-weights", weights]
    flags += ["--group-rate", "3", "--global-batch", "16", "--accumulate", "2"]
    experiment = build(
        parse(Config, [*flags, "--optimizer.name", "adamw", "--optimizer.eps", "1e-4"])
    )
    layouts = ["data=2,fsdp=2,tensor=2", "fsdp=4", "pipe=2,data=2,pipeline.schedule=1f1b"]
    for found in compare(experiment, layouts=layouts, steps=4):
        assert found.refusal is None, found
        assert found.agrees(1e-5), found


def test_groups_that_cannot_be_are_refused(tmp_path, folder):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data"]
    path = grouped(tmp_path / "rows")
    for given, message in (
        ([folder, "--group", "group"], "--group is for labelled rows"),
        ([path, "--group-weights", "equal"], "--group-weights is given without --group"),
        ([path, "--group", "sex"], "--group is sex: some rows lack that field"),
        ([path, "--group", "group", "--group-weights", "rare=2"], "as in common=1,rare=1"),
        ([path, "--group", "group", "--group-rate", "-1"], "--group-rate is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(parse(Config, [*flags, *given]))


def test_labelled_rows_that_cannot_be_are_refused(tmp_path, folder):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data"]
    unnamed = labelled(tmp_path / "a", "csv", [{"sentence": "x", "label": 1}])
    few = labelled(tmp_path / "b", "jsonl", [{"text": "x", "label": 1}])
    alike = labelled(tmp_path / "alike", "csv", [{"text": f"x {n}", "label": "a"} for n in ROWS])
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    wrong = {"d.csv": "x,", "e.csv": "a, b,1", "f.tsv": '"a" b\t1', "g.tsv": 'x\t0\n"a\t1'}
    for name, lines in wrong.items():
        head = "text,label" if name.endswith("csv") else "text\tlabel"
        (tmp_path / name).write_text(f"{head}\n{lines}\n")
    for given, message in (
        ([unnamed], r"a.csv' row 1 has no 'text'; it has 'sentence', 'label': rename the field"),
        ([few], "b.jsonl' has . rows to train on and . held out: give more rows, or a folder"),
        ([str(tmp_path / "c.parquet")], "c.parquet' is cut short or damaged"),
        ([alike], "alike.csv' has one label in all of its rows, 'a': a classifier needs two"),
        ([folder, "--class-weights"], "--class-weights is for labelled rows"),
        ([str(tmp_path / "d.csv")], "d.csv' row 1 has an empty 'label': fill it in, or drop"),
        ([str(tmp_path / "e.csv")], "e.csv' cannot be read near line 2: it has more fields than"),
        ([str(tmp_path / "f.tsv")], "f.tsv' cannot be read near line 1: .* double those, or write"),
        ([str(tmp_path / "g.tsv")], "g.tsv' cannot be read near line 2: unexpected end of data"),
    ):
        with pytest.raises(ValueError, match=message):
            build(parse(Config, [*flags, *given]))


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ([{"text": f"w{n}", "label": "ab"[n % 2]} for n in range(20)], "no two rows .* share a"),
        ([{"text": "same words", "label": "a"}] * 20, "the rows to train on have one class"),
    ],
)
def test_a_run_ends_well_where_counted_words_cannot_be_fitted(train, why, tmp_path):
    labelled(tmp_path / "train", "jsonl", train)
    others = [{"text": "of b", "label": "b"}, {"text": "of a", "label": "a"}]
    labelled(tmp_path / "validation", "jsonl", others)
    flags = ["--task", "classify", "--data", str(tmp_path), "--examples", "0"]
    conclude = build(parse(Config, [*SIZES, *SMALL, *flags])).metadata.conclude
    printed = "\n".join(conclude(None, {"accuracy": 0.5}))
    assert re.search(f"no TF-IDF baseline, as {why}.*; always the largest: 50.0%", printed)
    assert "50.0% of 2 fragments right" in printed


SCORED = [row | {"label": f"{n % 7 / 2 + 0.25}"} for n, row in enumerate(ROWS)]
NAMED = [
    row | {"label": [x for x in "cab" if x in row["text_pair"] + "ab"[n % 2 :]]}
    for n, row in enumerate(ROWS)
]
TARGETS = {"score": SCORED, "labels": NAMED}


def built_for(target, path, *flags):
    data = labelled(path / "rows", "jsonl", TARGETS[target])
    given = [*SIZES, *SMALL, "--task", "classify", "--target", target, "--data", data, *flags]
    return build(parse(Config, given))


def test_scores_and_labels_are_what_rows_say(tmp_path):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data"]
    in_text = [row | {"label": ", ".join(row["label"])} for row in NAMED]
    for target, forms in (("score", [SCORED]), ("labels", [NAMED, in_text])):
        found = []
        for number, rows in enumerate(forms):
            kind = "csv" if number or target == "score" else "jsonl"
            path = labelled(tmp_path / target / f"{number}/train", kind, rows[:70])
            labelled(tmp_path / target / f"{number}/validation", kind, rows[70:])
            given = [*flags, str(Path(path).parent), "--target", target]
            experiment = build(parse(Config, given))
            found.append(rows_of(next(iter(experiment.data.eval_batches[""](None)))))
        batch, meta = found[0], experiment.metadata
        for each in found[1:]:
            np.testing.assert_array_equal(each["label"], batch["label"])
        assert batch["label"].dtype == np.float32
        assert batch.keys() == experiment.data.batch.keys()
        assert outline(parse(Config, given)).data.batch.keys() | {"types"} == batch.keys()
        if target == "score":
            np.testing.assert_allclose(batch["label"], [float(x["label"]) for x in SCORED[70:78]])
            assert batch["row"].tolist() == list(range(8))
            assert meta.facts["task"] == "a score of a text, by its squared error"
            assert "id2label" not in meta.config["special_tokens"]
        else:
            expected = [[x in row["label"] for x in "ab"] for row in NAMED[70:78]]
            np.testing.assert_array_equal(batch["label"], expected)
            assert meta.facts["task"] == "any of 2: a, b"
            assert meta.config["special_tokens"]["label2id"] == {"a": 0, "b": 1}


def test_targets_that_do_not_fit_their_rows_are_refused(tmp_path, folder):
    flags = [*SIZES, *SMALL, "--task", "classify", "--data"]
    scored, named = (labelled(tmp_path / name, "jsonl", x) for name, x in TARGETS.items())
    words = labelled(tmp_path / "words", "csv", ROWS)
    bare = labelled(tmp_path / "bare", "csv", [{"text": "a", "labels": "b"}] * 20)
    for given, message in (
        (
            [scored],
            "score.jsonl' has decimal numbers as labels, such as 0.25, of which --target cla",
        ),
        ([named], r"labels.jsonl' has lists as labels, such as .*: give --target labels, or"),
        ([words, "--target", "score"], "has no number as its label: a score is one"),
        ([bare, "--target", "labels"], "has no names as its label: give JSON lines with lists"),
        ([folder, "--target", "score"], "--target is for labelled rows: give --task and --data"),
        ([scored, "--target", "score", "--task", "mask"], "--target is for labelled rows"),
        (
            [scored, "--target", "score", "--class-weights"],
            "text and label, and --target classes, or leave",
        ),
        (
            [named, "--target", "labels", "--group", "text"],
            "--group is for labelled rows: give .*, and --target cl",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(parse(Config, [*flags, *given]))
    # Whole numbers are names of classes, however they are written.
    rows = [{"text": "a", "label": n % 2 and "1.0"} for n in range(50)]
    rows = [row | {"label": row["label"] or "0.0"} for row in rows]
    whole = build(parse(Config, [*flags, labelled(tmp_path / "whole", "csv", rows)]))
    assert whole.metadata.config["special_tokens"]["label2id"] == {"0.0": 0, "1.0": 1}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_scores_and_labels_are_the_same_on_every_mesh(target, tmp_path):
    own = ["--layers", "2", "--global-batch", "16", "--accumulate", "2"]
    own += ["--optimizer.name", "adamw", "--optimizer.eps", "1e-4"]
    layouts = ["data=2,fsdp=2,tensor=2", "fsdp=2,context=2", "pipe=2,data=2,pipeline.schedule=1f1b"]
    for found in compare(built_for(target, tmp_path, *own), layouts=layouts, steps=4):
        assert found.refusal is None, found
        assert found.agrees(1e-5), found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_evaluations_of_scores_and_labels_are_those_of_all_rows(target, tmp_path, capsys):
    """On a mesh, of rows that fill no batch, by SciPy and scikit-learn; so says the command."""
    path = labelled(tmp_path / "rows", "jsonl", TARGETS[target])
    flags = [*SIZES, *SMALL, "--task", "classify", "--target", target, "--data", path]
    flags += ["--mesh.data", "4", "--mesh.fsdp", "2", "--exact", "8", "--run-dir"]
    run = str(tmp_path / "run")
    main(Config, build, [*flags, run, "--save-best"])
    printed = " ".join(capsys.readouterr().out.split())
    records = [json.loads(x) for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (record,) = [each for each in records if "eval/loss" in each]
    assert not any(name.rpartition("/")[2].startswith("_") for each in records for name in each)
    *_, held_out = data.read_rows(path, ("text",), held_out=0.2)
    kept = labelled(tmp_path / "held_out", "jsonl", held_out)
    asked = ["--run", run, "--data", kept]
    _, out, _ = command(capsys, "predict", *asked)
    said = [json.loads(line) for line in out.splitlines()]
    if target == "score":
        stats = pytest.importorskip("scipy.stats")
        sides = [float(x["label"]) for x in held_out], [x["score"] for x in said]
        expected = {"pearson": stats.pearsonr(*sides)[0], "spearman": stats.spearmanr(*sides)[0]}
        assert re.search(r"held-out: pearson -?0\.\d+, spearman", printed)
    else:
        metrics = pytest.importorskip("sklearn.metrics")
        sides = [
            [[x in row for x in "ab"] for row in side]
            for side in ([x["label"] for x in held_out], [x["labels"] for x in said])
        ]
        expected = {
            f"{kind}_f1": metrics.f1_score(*map(np.array, sides), average=kind, zero_division=0)
            for kind in ("micro", "macro")
        } | {"accuracy": metrics.accuracy_score(*map(np.array, sides))}
        assert all(
            (p > 0.5) == (x in row["labels"])
            for row in said
            for x, p in row["probabilities"].items()
        )
        assert "F1 of all labels" in printed
    assert {n: record[f"eval/{n}"] for n in expected} == pytest.approx(expected, abs=1e-4)
    status, *_ = command(capsys, "evaluate", *asked, "--out", str(tmp_path / "found.jsonl"))
    assert status == 0
    found = json.loads((tmp_path / "found.jsonl").read_text())["rows"][kept]
    assert {n: found[n] for n in expected} == pytest.approx(expected, abs=1e-6)
    out = str(tmp_path / "out")
    assert command(capsys, "export", "--run", run, "--out", out)[0] == 0
    fields = json.loads(Path(out, "config.json").read_text())
    kinds = {"score": ("regression", 1), "labels": ("multi_label_classification", 2)}
    assert (fields["problem_type"], len(fields["id2label"])) == kinds[target]
    assert hf.read_config(out) == trained.model(run)


@pytest.mark.parametrize("task", ["mask", "classify"])
def test_the_outline_is_of_the_experiment_that_trains(folder, task):
    config = parse(Config, [*SIZES, *SMALL, "--data", folder, "--task", task, "--classes", "2"])
    step = build(config)
    planned = outline(config, vocab_size=EncoderConfig(**step.metadata.config["model"]).vocab_size)
    assert planned.data.batch == step.data.batch
    assert planned.metadata.config["model"] == step.metadata.config["model"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer", "bytes"], "--tokenizer bytes has no token that begins a row"),
        (
            ["--task", "classify", "--data", "{folder}/none", "--tokenizer", "bytes"],
            "--tokenizer bytes has no token that begins a row",  # before rows are read
        ),
        (["--init-from", "{folder}"], "is neither a run nor a Hugging Face folder"),
        (["--init-from", "{masked}", "--layers", "2"], "--layers 2 is not for --init-from"),
        (["--init-from", "{masked}", "--seq-len", "17"], "--seq-len 17 is more than the 16"),
        (["--mesh.tensor", "2", "--heads", "1"], "--mesh.tensor 2 does not divide 1 heads"),
        (["--mask-rate", "1"], "`mask_rate` is 1.0; give a share"),
        (["--classes", "1"], "`classes` is 1: give at least 2"),
    ],
)
def test_what_does_not_fit_is_one_sentence(flags, message, folder, masked):
    flags = [each.format(folder=folder, masked=masked) for each in flags]
    with pytest.raises(ValueError, match=re.escape(message)):
        build(parse(Config, ["--data", folder, *flags]))
