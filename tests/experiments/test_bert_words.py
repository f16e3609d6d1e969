"""Tags of words and answers in contexts: rows, measures, exports, meshes."""

import collections
import functools
import io
import json
import pathlib
import re
import sysconfig
import tokenize

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import finetune
from experiments.bert import Config, answers, build, outline, tags
from jaxtrain import hf
from jaxtrain.build import rows_of
from jaxtrain.compare import parity
from jaxtrain.data import SubwordTokenizer
from jaxtrain.models import encoder
from jaxtrain.models.generate import generate_step
from jaxtrain.run import trained
from jaxtrain.run.main import main, parse
from tests.commands import run as command
from tests.hf import models

pytest.importorskip("tokenizers")

SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--seq-len", "24", "--tokenizer", "300"]
SMALL += ["--steps", "2", "--global-batch", "8", "--examples", "2", "--stride", "4"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Lines of a file of Python as words, what `def` and `class` name as spans, and questions for
    the first of them."""
    path = tmp_path_factory.mktemp("rows")
    text = (pathlib.Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text()
    lines, line = [], []
    for each in tokenize.generate_tokens(io.StringIO(text).readline):
        if each.type in (tokenize.NEWLINE, tokenize.NL):
            lines, line = [*lines, line], []
        elif each.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            line = [*line, each.string]
    rows = []
    for words in filter(None, lines):
        told = ["O"] * len(words)
        for i, word in enumerate(words):
            if word.isidentifier() and words[i - 1 : i] in (["def"], ["."], ["class"]):
                told[i] = "B-METHOD" if words[i - 1] != "class" else "B-CLASS"
                if words[i - 2 : i - 1] == ["self"]:
                    told[i - 2 : i + 1] = ["B-FIELD", "I-FIELD", "I-FIELD"]
        rows.append({"tokens": words, "tags": told})
    asked = []
    for row in rows:
        context, named = " ".join(row["tokens"]), [t[:2] == "B-" for t in row["tags"]]
        at = named.index(True) if True in named else None
        start = len(" ".join([*row["tokens"][:at], ""])) if at else 0
        found = {"text": [], "answer_start": []}
        if at is not None:
            found = {"text": [row["tokens"][at]], "answer_start": [start]}
        asked.append({"question": "which name?", "context": context, "answers": found})
    for name, found in (("names", rows), ("questions", asked)):
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    return path


def built(files, task, *flags):
    name = {"tags": "names", "answers": "questions"}[task]
    config = parse(Config, ["--task", task, "--data", str(files / f"{name}.jsonl"), *SMALL, *flags])
    return config, build(config)


def held_out(experiment):
    return [rows_of(batch) for batch in experiment.data.eval_batches[""](None)]


@pytest.mark.parametrize("task", ["tags", "answers"])
def test_the_outline_is_of_the_experiment_that_trains(files, task):
    _, step = built(files, task)
    classes = step.metadata.config["model"]["classes"] or 10
    own = {"vocab_size": step.metadata.config["model"]["vocab_size"]}
    planned = outline(parse(Config, ["--task", task, *SMALL, "--classes", str(classes)]), **own)
    assert planned.data.batch == step.data.batch
    assert planned.metadata.config["model"] == step.metadata.config["model"]


def test_the_first_token_of_a_word_has_its_tag_and_numbers_are_as_good_as_names(files, tmp_path):
    _, experiment = built(files, "tags")
    names = experiment.metadata.config["special_tokens"]["id2label"].values()
    assert list(names) == ["O", "B-CLASS", "B-FIELD", "B-METHOD", "I-FIELD"]
    (tmp_path / "tokenizer.json").write_text(experiment.metadata.files["tokenizer.json"])
    tokenizer = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    rows = [json.loads(line) for line in (files / "names.jsonl").read_text().splitlines()]
    spelled = {tuple(row["tokens"]): row["tags"] for row in rows}
    count = 0
    for batch in held_out(experiment):
        for tokens, targets, mask, segments in zip(
            *(batch[x] for x in ("tokens", "targets", "mask", "segments")), strict=True
        ):
            places = np.flatnonzero(mask)
            pieces = np.split(tokens[: segments.sum() - 1], places)[1:]
            words = tuple(tokenizer.decode(piece).strip() for piece in pieces)
            # Of a longer row, the words that are whole.
            told = next(t for w, t in spelled.items() if w[: len(words) - 1] == words[:-1])
            assert [list(names)[n] for n in targets[places]] == told[: len(words)]
            count += len(words)
    assert count > 100
    for row in rows:
        row["tags"] = [list(names).index(tag) for tag in row["tags"]]
    (tmp_path / "names.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, same = built(tmp_path, "tags", "--tag-names", *names)
    for ours, theirs in zip(held_out(same), held_out(experiment), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    _, unnamed = built(tmp_path, "tags")
    assert unnamed.metadata.best_metric == "accuracy"
    with pytest.raises(
        ValueError, match="has the tag 2, which is none of O, B-A: name all by --tag"
    ):
        built(tmp_path, "tags", "--tag-names", "O", "B-A")
    (tmp_path / "names.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n' * 20)
    with pytest.raises(ValueError, match="has one tag in all of its rows, 'O': a classifier needs"):
        built(tmp_path, "tags")


def test_a_token_of_the_space_before_a_word_is_not_the_word():
    class Spaced:
        """Tokens are letters; what a row begins and ends with are 8 and 9."""

        around = (8,), (9,), (9,)

        def encode_placed(self, texts):
            letters = [np.stack([np.arange(len(t)), 1 + np.arange(len(t))], -1) for t in texts]
            return [
                (np.full(len(t), 5, np.int32), each) for t, each in zip(texts, letters, strict=True)
            ]

    model = encoder.EncoderConfig(vocab_size=10, seq_len=9, layers=1, width=8, heads=2)
    given = [{"tokens": ["ab", "", "c", "def", "g"], "tags": [1, 2, 3, 4, 5]}]
    rows = tags.TagRows(Config(seq_len=9), model, Spaced(), given)
    assert rows[0]["targets"].tolist() == [0, 1, 0, 0, 0, 3, 0, 4, 0]
    assert (rows[0]["mask"].sum(), rows.cut) == (3, 1)


def spans(tags):
    """Kind, first and last word of every span, by the definition, one word after the other."""
    found, begun = [], None
    for i, tag in enumerate([*tags, "O"]):
        prefix, kind = (tag[:1], tag[2:]) if tag != "O" else ("O", "")
        if begun and (prefix in "OB" or kind != begun[0]):
            found, begun = [*found, (*begun, i - 1)], None
        if prefix != "O" and begun is None:
            begun = (kind, i)
    return set(found)


def two_taggings(seed):
    """What `span_counts` says of random tags, and the same tags by name, of words alone."""
    names = ["O", "B-A", "I-A", "B-B", "I-B"]
    rng = np.random.default_rng(seed)
    told, said = rng.integers(0, 5, (2, 30, 12))
    said = np.where(rng.random(said.shape) < 0.7, told, said)
    is_word = rng.random(told.shape) < 0.7
    kinds, begins = jnp.array([0, 1, 1, 2, 2]), jnp.array([0, 1, 0, 1, 0], bool)
    found = tags.span_counts(*((kinds[x], begins[x]) for x in (told, said)), jnp.asarray(is_word))
    named = [
        [[names[n] for n in row[keep]] for row, keep in zip(x, is_word, strict=True)]
        for x in (told, said)
    ]
    return {name: int(x) for name, x in found.items()}, named


@pytest.mark.parametrize("seed", range(3))
def test_spans_are_counted_as_by_the_definition(seed):
    found, named = two_taggings(seed)
    told, said = ([spans(row) for row in side] for side in named)
    right = sum(len(a & b) for a, b in zip(told, said, strict=True))
    sizes = [sum(map(len, each)) for each in (told, said)]
    assert found == {"spans_told": sizes[0], "spans_said": sizes[1], "spans_right": right}
    scores = tags.span_scores({name: x / 7 for name, x in found.items()})
    assert scores["f1"] == pytest.approx(2 * right / sum(sizes))


def test_scores_of_spans_are_those_of_seqeval():
    seqeval = pytest.importorskip("seqeval.metrics")
    found, named = two_taggings(0)
    for name, score in tags.span_scores(found).items():
        assert score == pytest.approx(getattr(seqeval, f"{name}_score")(*named)), name


def test_an_answer_is_found_again_in_the_parts_of_a_long_context(files):
    _, experiment = built(files, "answers")
    rows = experiment.metadata.conclude.args[2].train
    text, parts = experiment.metadata.conclude.args[2], collections.Counter()
    for index, (number, _) in enumerate(rows.windows):
        parts[number] += 1
        row, question = rows[index], rows.questions[number]
        if row["span"].any():
            a, b = row["span"]
            assert row["types"][a] == 0  # of the tiny model, which has one type
            said = text.tokenizer.decode(row["tokens"][a : b + 1]).strip()
            assert said == question["answers"][0][0]
    assert max(parts.values()) > 1
    for number, letters in enumerate(rows.letters):
        room = 24 - rows.before(number) - 1
        firsts = [first for of, first in rows.windows if of == number]
        assert firsts == [i * (room - 4) for i in range(len(firsts))]  # four are shared
        assert firsts[-1] + room >= len(letters) > (firsts[-1] + 4 if len(firsts) > 1 else 0)
    # A model that is sure of the right places gives the right answers.
    logits = np.zeros((len(rows), 24, 2))
    for index in range(len(rows)):
        logits[index, rows[index]["span"], [0, 1]] = 9
    found = answers.best_answers(rows, logits)
    inside = {
        number
        for number, row in ((n, rows[i]) for i, (n, _) in enumerate(rows.windows))
        if row["span"].any()
    }
    for number, (best, question) in enumerate(zip(found, rows.questions, strict=True)):
        golds = [gold for gold, _ in question["answers"]]
        assert best.is_none == (number not in inside)
        assert best.is_none or best.text == golds[0] == question["context"][best.start : best.stop]
    assert len(inside) > 30


def test_what_is_no_row_of_words_or_questions_is_refused(files, tmp_path):
    for task, row, sentence in (
        (
            "tags",
            {"tokens": ["a", "b"], "tags": ["O"]},
            "tokens and tags must be lists of one leng",
        ),
        ("tags", {"tokens": "a b", "tags": "O O"}, "tokens and tags must be lists of one length"),
        (
            "answers",
            {"question": "a?", "context": "b", "answers": "b"},
            "answers that are no lists",
        ),
        (
            "answers",
            {"question": "a?", "context": "b c", "answers": {"text": ["c"], "answer_start": [0]}},
            "the question 'a?' has the answer 'c' at 0, where its context has something else",
        ),
        ("tags", {"tokens": ["a", 1], "tags": ["O", "B"]}, "tokens are words; put numbers in quot"),
        ("tags", {"tokens": [], "tags": []}, "has no word in any of its rows"),
        (
            "answers",
            {"question": "a?", "context": "b c", "answers": {"text": ["c"], "answer_start": ["2"]}},
            "the question 'a?' has the answer 'c' at '2': answer_start is a whole number",
        ),
        (
            "answers",
            {"question": 5, "context": "b", "answers": {"text": [], "answer_start": []}},
            "has a question or context that is no text",
        ),
    ):
        name = {"tags": "names", "answers": "questions"}[task]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 40))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            built(tmp_path, task)
    with pytest.raises(ValueError, match="--stride is 20, and a row of 24 tokens has"):
        built(files, "answers", "--stride", "20")
    with pytest.raises(
        ValueError, match="--tag-names is for labelled rows: give --task and --data"
    ):
        built(files, "answers", "--tag-names", "O")


def test_an_encoder_cannot_generate():
    model = encoder.EncoderConfig(vocab_size=9, seq_len=4, layers=1, width=8, heads=2)
    with pytest.raises(ValueError, match="a model of the form encoder cannot generate: it writes"):
        generate_step(model, max_new_tokens=2)


def test_answers_may_be_flat_or_listed():
    row = {"question": "?", "context": "a b"}
    listed = row | {"answers": [{"text": "b", "answer_start": 2}]}
    flat = row | {"answers.text": ["b"], "answers.answer_start": [2]}
    assert answers.answers_of(listed) == answers.answers_of(flat) == [("b", 2)]
    assert answers.word_f1("The cat sat", "a cat") == pytest.approx(2 / 3)
    assert (answers.exact_match("The cat!", "cat"), answers.word_f1("", "cat")) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tags", "answers"])
def test_a_run_is_exported_and_its_logits_are_those_of_transformers(files, task, tmp_path, capsys):
    library = models.transformers()
    torch = pytest.importorskip("torch")
    config, experiment = built(files, task, "--run-dir", str(tmp_path / "run"))
    jt.fit(experiment, config.run)
    printed = capsys.readouterr().out
    assert {"tags": "of spans precision", "answers": "exact, F1"}[task] in printed
    status, *_ = command(
        capsys, "hf", "export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")
    )
    assert status == 0
    head = {"tags": "TokenClassification", "answers": "QuestionAnswering"}[task]
    model = getattr(library, f"BertFor{head}").from_pretrained(tmp_path / "out").eval()
    if task == "tags":
        assert model.config.id2label[1] == "B-CLASS"
    own, params, _ = trained.load(str(tmp_path / "run"))
    assert hf.read_config(tmp_path / "out") == own
    (batch, *_) = held_out(experiment)
    given = {"input_ids": batch["tokens"], "attention_mask": batch["segments"]}
    given |= {"token_type_ids": batch["types"]}
    with torch.no_grad():
        found = model(**{name: torch.tensor(x, dtype=torch.int64) for name, x in given.items()})
    theirs = (
        found.logits if task == "tags" else torch.stack([found.start_logits, found.end_logits], -1)
    )
    ours = jax.jit(functools.partial(encoder.logits, own))(params, batch)
    seen = batch["segments"][..., None] > 0
    np.testing.assert_allclose(np.where(seen, ours, 0), np.where(seen, theirs, 0), atol=1e-5)
    # And tuned further, from the folder and from the run.
    name = {"tags": "names", "answers": "questions"}[task]
    for source in ("out", "run"):
        flags = ["--init-from", str(tmp_path / source), "--data", str(files / f"{name}.jsonl")]
        module, default = finetune.choose(flags)
        assert (module.__name__, default.task) == ("experiments.bert", task)
        again = build(parse(Config, [*flags, "--stride", "4"], default=default))
        weights = hf.load(again.task.params()) if source == "out" else again.task.params()
        jax.tree.map(np.testing.assert_array_equal, weights, params)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tags", "answers"])
@pytest.mark.parametrize("lora", [[], ["--lora.rank", "2"]], ids=["whole", "lora"])
def test_every_mesh_and_pipeline_agrees_with_one_device(files, task, lora, tmp_path):
    flags = ["--layers", "4", "--dropout", "0.1"]
    if lora:
        run = str(tmp_path / "run")
        texts = str(pathlib.Path(sysconfig.get_path("stdlib")) / "json")
        main(Config, build, ["--data", texts, *SMALL, "--run-dir", run])
        flags = ["--init-from", run, *lora]
    name = {"tags": "names", "answers": "questions"}[task]
    sizes = SMALL if not lora else [*SMALL[6:8], *SMALL[10:]]
    config = parse(Config, ["--task", task, "--data", str(files / f"{name}.jsonl"), *sizes, *flags])
    pipe = "pipe=2,fsdp=2,tensor=2,pipeline.microbatches=2"
    layouts = ["data=2,fsdp=2,tensor=2", pipe, "data=8,zero=2"]
    for comparison in parity.compare(build(config), layouts=layouts, steps=2):
        # The last norm's bias has no gradient from a softmax over places, but rounding.
        assert comparison.agrees(1e-5 if task == "tags" else 1e-4), comparison
