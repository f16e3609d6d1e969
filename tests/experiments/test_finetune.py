"""One command that tunes: which experiment, with which defaults, and what it refuses."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import finetune, gpt
from jaxtrain import cli, data, hf
from jaxtrain.build import rows_of
from jaxtrain.data.chat import load_template
from jaxtrain.data.store import source_of
from jaxtrain.finetune.preferences import Preference
from jaxtrain.models import decoder, encoder, encoder_decoder, vit
from jaxtrain.run import trained
from jaxtrain.run.main import load_config, run_to_resume
from jaxtrain.run.observe.summary import since_start

SIZES = {"layers": 2, "width": 16, "heads": 2}
MODELS = {
    "decoder": decoder.DecoderConfig(
        vocab_size=300,
        seq_len=64,
        mlp="swiglu",
        norm="rmsnorm",
        bias=False,
        positions="rope",
        **SIZES,
    ),
    "encoder": encoder.EncoderConfig(vocab_size=300, seq_len=32, **SIZES),
    "encoder-decoder": encoder_decoder.T5Config(
        vocab_size=400, source_len=40, target_len=24, **SIZES
    ),
    "vit": vit.ViTConfig(image=(8, 8, 3), patch=4, classes=3, **SIZES),
}
ASKED = [{"role": "user", "content": "1 + 1?"}]
SAID, WRONG = ({"role": "assistant", "content": each} for each in ("2", "3"))
ROWS = {
    "chat.jsonl": [{"messages": [*ASKED, SAID]}],
    "asked.jsonl": [{"prompt": "1 + 1?", "completion": "2"}],
    "pairs.jsonl": [{"chosen": [*ASKED, SAID], "rejected": [*ASKED, WRONG]}],
    "judged.jsonl": [{"prompt": "1 + 1?", "completion": "2", "label": True}],
    "labelled.csv": [{"text": "one", "label": "few"}],
    "named.jsonl": [{"sentence": "one", "label": "few"}],
    "sources.jsonl": [{"source": "one", "target": "eins"}],
    "texts.jsonl": [{"text": "one"}],
    "other.jsonl": [{"a": "one", "b": "two"}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of models of every form, and of rows of every kind."""
    path = tmp_path_factory.mktemp("made")
    for form, model in MODELS.items():
        module = trained.FORMS[form][1]
        hf.save(path / form, model, module.init(model, jax.random.key(0)))
    for name, (row,) in ROWS.items():
        lines = (
            [json.dumps(row)] * 40
            if name.endswith("jsonl")
            else [",".join(x) for x in (row, row.values())]
        )
        (path / name).write_text("\n".join(lines))
    return path


def chosen(made, form, name, *flags):
    return finetune.choose(["--init-from", str(made / form), "--data", str(made / name), *flags])


@pytest.mark.parametrize(
    ("form", "name", "flags", "module", "own", "optimizer"),
    [
        ("decoder", "chat.jsonl", [], "gpt", {"packing": "fit", "seq_len": 64}, ("adamw", 2e-5)),
        ("decoder", "asked.jsonl", ["--lora.rank", "2"], "gpt", {}, ("adamw", 2e-4)),
        ("decoder", "pairs.jsonl", [], "gpt", {"packing": "fit"}, ("adamw", 1e-6)),
        (
            "decoder",
            "judged.jsonl",
            [],
            "gpt",
            {"preference": Preference("kto_unpaired")},
            ("adamw", 1e-6),
        ),
        ("decoder", "pairs.jsonl", ["--adapter=A"], "gpt", {}, ("adamw", 1e-5)),
        ("decoder", "texts.jsonl", ["--optimizer.name", "lion"], "gpt", {}, ("adamw", None)),
        (
            "encoder",
            "labelled.csv",
            [],
            "bert",
            {"task": "classify", "seq_len": 32},
            ("adamw", 5e-5),
        ),
        ("encoder", "named.jsonl", ["--field", "sentence"], "bert", {"task": "classify"}, None),
        ("encoder", "texts.jsonl", [], "bert", {"task": "mask"}, None),
        ("encoder-decoder", "sources.jsonl", [], "t5", {"task": "rows"}, ("adafactor", 1e-3)),
        ("encoder-decoder", "texts.jsonl", ["--lora.rank=2"], "t5", {}, ("adamw", 1e-3)),
        ("vit", ".", [], "vision", {"model": "vit"}, ("adamw", 5e-5)),
    ],
)
def test_the_model_and_the_rows_say_which_experiment(
    made, form, name, flags, module, own, optimizer
):
    name = "no_rows" if name == "." else name
    found, config = chosen(made, form, name, *flags)
    assert found.__name__ == f"experiments.{module}"
    assert {field: getattr(config, field) for field in own} == own
    if optimizer is not None:
        assert (config.optimizer.name, config.optimizer.learning_rate) == optimizer
    assert (config.epochs, config.run.eval_epochs, config.run.save_best) == (3.0, 1.0, True)


@pytest.mark.parametrize(
    ("form", "name", "sentence"),
    [
        (
            "decoder",
            "labelled.csv",
            "holds text and label, and the model in '{form}' is of the form decoder, which learns "
            "conversations or texts: give it such data, or give a model of the form encoder",
        ),
        ("encoder", "chat.jsonl", "give a model of the form decoder"),
        ("encoder-decoder", "pairs.jsonl", "is of the form encoder-decoder, which learns source"),
        ("vit", "texts.jsonl", "which learns images: give it such data, or give a model of the"),
        (
            "decoder",
            "other.jsonl",
            "has rows of a, b: rename fields so that rows have those of one",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(made, form, name, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence.format(form=made / form))):
        chosen(made, form, name)


def test_a_form_that_is_not_tuned_is_refused(made, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"form": "convnet", "model": {"channels": [4]}}')
    config = finetune.Config(str(tmp_path), f"{made}/texts.jsonl")
    with pytest.raises(ValueError, match="is of the form convnet, which is not tuned here: give"):
        finetune.defaults(config, set())


def test_what_is_typed_comes_before_the_defaults(made):
    flags = ["--init-from", str(made / "decoder"), "--data", str(made / "chat.jsonl")]
    more = ["--steps", "7", "--optimizer.learning-rate", "0.1", "--no-save-best"]
    module, config = load_config("experiments.finetune", [*flags, *more], command="plan")
    assert (module, config.steps, config.epochs) == (gpt, 7, None)
    assert (config.optimizer.learning_rate, config.run.save_best) == (0.1, False)
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("adamw", 0.01)


def test_early_stopping_takes_one_flag_and_typed_steps_replace_default_epochs(made, capsys):
    flags = ["--init-from", str(made / "decoder"), "--data", str(made / "chat.jsonl")]
    flags += ["--early-stop-patience", "3"]

    def run_of(*flags_more):
        assert run_to_resume(gpt.Config, [*flags, *flags_more]) is None
        config = load_config("experiments.finetune", [*flags, *flags_more], command="plan")[1]
        return config.run.early_stop_patience, config.run.eval_every, config.run.eval_epochs

    assert run_of() == (3, 0, 1.0)
    assert run_of("--eval-every", "5") == (3, 5, 0.0)
    assert run_of("--eval_epochs=0.5") == (3, 0, 0.5)
    for arguments in ([*flags, "--eval-every", "5", "--eval-epochs", "2"], flags[4:]):
        main = finetune.main if len(arguments) > 2 else lambda x: jt.main(gpt.Config, gpt.build, x)
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        errors = capsys.readouterr().err
        assert re.fullmatch(
            r"error: (--eval-every is 5|--early-stop-patience is 3) and .*\n", errors
        )
        assert "`" not in errors


def test_the_help_is_that_of_the_experiment_once_model_and_data_are_named(made):
    for flags, wanted in (
        ([], ["give --init-from and --data with --help"]),
        (
            ["--init-from", str(made / "decoder"), "--data", str(made / "chat.jsonl")],
            ["--preference.beta", "--lora.rank", "(default: adamw)"],
        ),
    ):
        with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
            finetune.main([*flags, "--help"])
        assert ended.value.code == 0
        for text in wanted:
            assert text in " ".join(printed.getvalue().replace("│", " ").split())
    with redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        finetune.main(["--init-from", str(made / "decoder"), "--data", str(made / "labelled.csv")])
    assert (ended.value.code, printed.getvalue()[:7]) == (2, "error: ")


@pytest.mark.parametrize("name", ["chat.jsonl", "pairs.jsonl"])
def test_conversations_are_read_as_those_of_a_store(made, name, tmp_path):
    """Of the very tokens, and counted targets, that `jaxtrain tokenize` makes."""
    pytest.importorskip("jinja2")
    out, path = str(tmp_path / "store"), str(made / name)
    flags = [
        "tokenize",
        "--data",
        path,
        "--out",
        out,
        "--chat-template",
        "chatml",
        "--workers",
        "1",
    ]
    assert cli.main(flags) == 0
    stored, read = data.open_data(out), data.open_data(path, chat="chatml")
    assert read.chat_template == load_template("chatml").text == stored.chat_template
    for side in ("train", "held_out"):
        ours, theirs = (each.stores[""].corpus(side) for each in (read, stored))
        assert ours.pairs == theirs.pairs == (name == "pairs.jsonl")
        for field in ("tokens", "counts", "starts"):
            a, b = (getattr(each, field)[:] for each in (ours, theirs))
            np.testing.assert_array_equal(a, b)
            assert len(a)
    assert read.stores[""].manifest["source"] == source_of(
        path, "text", chat=load_template("chatml")
    ) | {"stamps": read.stores[""].manifest["source"]["stamps"]}
    config = gpt.Config(init_from=str(made / "decoder"), data=path, tokenizer="bytes", seq_len=64)
    with pytest.raises(FileNotFoundError, match=r"decoder' has no chat template for conversations"):
        gpt.build(config)
    (made / "decoder" / "chat_template.jinja").write_text(load_template("plain").text)
    try:
        built = gpt.build(config)
    finally:
        (made / "decoder" / "chat_template.jinja").unlink()
    assert built.metadata.files["chat_template.jinja"] == load_template("plain").text
    sides = (2,) if name == "pairs.jsonl" else ()
    assert built.data.batch["tokens"].shape == (16, *sides, 64)
    assert built.data.batch == gpt.outline(config).data.batch


@pytest.mark.parametrize("kind", ["texts.jsonl", "store"])
def test_a_template_that_nothing_would_use_is_refused(made, kind, tmp_path):
    path = made / kind
    if kind == "store":  # of conversations, which were rendered when it was made
        pytest.importorskip("jinja2")
        path = tmp_path / kind
        flags = ("--data", str(made / "chat.jsonl"), "--out", str(path), "--workers", "1")
        assert cli.main(["tokenize", *flags, "--chat-template", "chatml"]) == 0
    with pytest.raises(ValueError, match=r"is .gone.jinja., and --data .* has no rows"):
        gpt.build(gpt.Config(data=str(path), chat_template="gone.jinja"))


def test_the_loss_of_old_text_is_measured_beside_the_new_and_before_and_after(made, tmp_path):
    flags = {"init_from": str(made / "decoder"), "tokenizer": "bytes", "seq_len": 32}
    one = gpt.build(gpt.Config(data=str(made / "texts.jsonl"), **flags))
    (tmp_path / "old.txt").write_text("other words\n" * 99)
    old = {"also_held_out": str(tmp_path / "old.txt")}
    both = gpt.build(gpt.Config(data=str(made / "texts.jsonl"), **flags, **old))
    alone = gpt.build(gpt.Config(data=old["also_held_out"], **flags))
    for name, expected in (("", one), ("old", alone)):
        for ours, theirs in zip(
            both.data.eval_batches[name](None), expected.data.eval_batches[""](None), strict=True
        ):
            jax.tree.map(np.testing.assert_array_equal, rows_of(ours), rows_of(theirs))
    assert both.metadata.fingerprints["text"] == one.metadata.fingerprints["text"]
    with pytest.raises(
        ValueError, match=r"it must have preferences where --data has, and text whe"
    ):
        gpt.build(gpt.Config(data=str(made / "pairs.jsonl"), chat_template="plain", **flags, **old))
    assert since_start(str(tmp_path), {"loss": 1.0}) == []  # it is no run
    log = [{"step": 0, "eval/loss": 2.0, "eval/old/loss": 1.0}, {"step": 4, "eval/old/loss": 1.5}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)) + "\n")
    lines = since_start(str(tmp_path), {"loss": 0.5, "old/loss": 1.5, "accuracy": 1.0})
    assert [line.split() for line in lines[1:3]] == [
        ["loss", "2.0000", "0.5000", "-1.5000"],
        ["old/loss", "1.0000", "1.5000", "+0.5000"],
    ]


@pytest.mark.slow
def test_a_tuned_model_is_evaluated_by_epochs_and_its_best_weights_are_exported_and_resumed(
    made, tmp_path, capsys
):
    pytest.importorskip("jinja2")
    run = str(tmp_path / "run")
    flags = ["--init-from", str(made / "decoder"), "--data", str(made / "chat.jsonl")]
    flags += ["--tokenizer", "bytes", "--chat-template", "chatml", "--global-batch", "8"]
    flags += ["--sample-tokens", "4", "--lora.rank", "2", "--log-every", "1", "--run-dir", run]
    finetune.main([*flags, "--epochs", "2"])
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    epochs = {x["step"]: int(x["data/epoch"]) for x in log if "data/epoch" in x}
    assert [epochs.get(x["step"]) for x in log if "eval/loss" in x] == [None, 1, 2]
    said = capsys.readouterr().out
    assert "best saved" in said
    with pytest.raises(SystemExit):
        finetune.main(["--resume", "--run-dir", run, "--epochs", "3"])
    assert "had steps" in capsys.readouterr().err  # and so it has found the experiment
    for command in (
        ["plan", "experiments.finetune", "--target", "cpu:8", *flags[:-2], "--mesh.data", "8"],
        ["parity", "experiments.finetune", *flags[:-2], "--layout", "data=2,fsdp=2"],
    ):
        assert cli.main(command) == 0
