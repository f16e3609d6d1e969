"""The GPT experiment, small: flags, text of one's own, resuming, generating, refusing."""

import json
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from experiments.gpt import (
    Config,
    build,
    conclude,
    outline,
)
from experiments.language import model_config
from jaxtrain import cli, data, hf
from jaxtrain.data.chat import Conversation
from jaxtrain.models import decoder
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import digest
from jaxtrain.run.loop import fit
from jaxtrain.run.main import main, parse, run_to_resume

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "32", "--steps", "4"]
SMALL += ["--global-batch", "8", "--held-out-bytes", "2000", "--sample-tokens", "8"]


def test_a_small_run_ends_with_bits_per_byte_a_baseline_and_a_sample(texts, tmp_path, capsys):
    run = tmp_path / "run"
    main(Config, build, [*SMALL, "--data", texts, "--run-dir", str(run)])
    printed = capsys.readouterr().out
    assert re.search(r"held-out loss \d\.\d+ bits per byte, which .* order-2 byte model's", printed)
    assert "a sample it wrote" in printed
    for name in ("checkpoints", "tensorboard", "log.jsonl"):
        assert f"{run}/{name}" in printed
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for line, kind in [(line, kind) for line in log for kind in ("train", "eval")]:
        assert (f"{kind}/perplexity" in line) == (f"{kind}/loss" in line)
        if f"{kind}/loss" in line:
            assert line[f"{kind}/perplexity"] == math.exp(line[f"{kind}/loss"])
    last = log[-1]
    bits = float(re.search(r"held-out loss (\d\.\d+) bits", printed).group(1))
    # With bytes, nats per counted token over ln 2 are the bits per byte.
    assert bits == pytest.approx(last["eval/loss"] / math.log(2), abs=1e-3)


@pytest.mark.slow
def test_generating_continues_the_prompt_with_the_best_checkpoint(texts, tmp_path, capsys):
    run = tmp_path / "run"
    main(Config, build, [*SMALL, "--data", texts, "--run-dir", str(run), "--sample-tokens", "0"])
    capsys.readouterr()
    flags = ["--run", str(run), "--prompt", "sta", "--max-tokens", "5", "--temperature", "0"]
    flags = ["generate", *flags]
    cli.main(flags)
    first = capsys.readouterr().out
    assert 1 < len(first) <= 6  # of bytes, and the end of the line
    cli.main([*flags, "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"])
    assert capsys.readouterr().out == first
    cli.main([*flags, "--beams", "2"])
    assert capsys.readouterr().err.startswith("5 tokens written")
    for wrong, message in (
        (["--mesh.pipe", "2"], "--mesh.pipe 2 is for training"),
        (["--samples", "0"], "--samples is 0: give at least 1"),
        (["--max-tokens", "0"], "--max-tokens is 0: give at least 1"),
        (["--beams", "2", "--top-k", "3"], "--top-k 3 is for texts that are drawn, and --beams 2 "),
    ):
        with pytest.raises(SystemExit):
            cli.main([*flags, *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_bpe_tokenizer_is_trained_kept_with_the_run_and_used_to_generate(texts, tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*SMALL, "--data", texts, "--run-dir", str(run), "--tokenizer", "300"]
    main(Config, build, flags)
    assert "bits per byte" in capsys.readouterr().out
    model, params, tokenizer = trained.load(str(run))
    assert isinstance(tokenizer, data.SubwordTokenizer)
    assert model.vocab_size == tokenizer.vocab_size <= 300
    assert params["embed"]["tokens"].shape[0] == model.padded_vocab


@pytest.mark.slow
def test_every_layout_and_optimizer_flag_reaches_the_step(texts, tmp_path, capsys):
    flags = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --optimizer.name lamb --accumulate 2"
    flags += " --precision bf16 --zero 1 --dropout 0.1 --optimizer.schedule linear"
    flags += " --optimizer.moment-dtype bfloat16 --remat save_attention --attention-dropout 0.1"
    flags += " --z-loss 1e-4"
    config = parse(Config, [*SMALL, "--data", texts, *flags.split()])
    experiment = build(config)
    assert experiment.layout.accumulate == 2
    assert experiment.layout.zero == 1
    result = fit(experiment, config.run.__class__(run_dir=str(tmp_path / "run")))
    printed = capsys.readouterr().out
    assert "data 2 x fsdp 2 x tensor 2, zero 1" in printed
    assert "bfloat16 compute" in printed
    assert "lamb, linear schedule" in printed
    kernel = result.state.params["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert np.isfinite(result.evaluation["loss"])
    assert 0 < result.evaluation["z_loss"] < 0.1
    nats = result.evaluation["loss"] - result.evaluation["z_loss"]
    assert result.evaluation["perplexity"] == pytest.approx(math.exp(nats), rel=1e-9)
    moments = optax.tree.get(result.state.opt_state, "ScaleByAdamState")
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(moments.mu)}
    assert dtypes == {"bfloat16"}
    assert experiment.metadata.config["model"]["attention_dropout"] == 0.1
    assert experiment.laid.stages.remat.args == ("save_attention",)
    assert experiment.metadata.config["flags"]["remat"] == "save_attention"


@pytest.mark.slow
def test_resuming_continues_with_the_very_next_batch(texts, tmp_path):
    def run(steps, folder, *more):
        flags = [*SMALL, "--data", texts, "--steps", str(steps), "--sample-tokens", "0", *more]
        flags += ["--optimizer.warmup-steps", "1", "--optimizer.schedule", "constant"]
        config = parse(Config, [*flags, "--dropout", "0.1", "--run-dir", str(folder)])
        return fit(build(config), config.run).state

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    assert digest(run(6, tmp_path / "parts", "--resume")) == digest(whole)


@pytest.mark.slow
def test_resuming_takes_the_runs_own_flags_and_tokenizer_and_refuses_others(tmp_path, capsys):
    texts, run = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text(f"stage {i} bubble mesh shard loss step grad " * 40)
    begun = [*SMALL, "--data", str(texts), "--tokenizer", "270", "--seed", "3", "--log-every", "1"]
    begun += ["--optimizer.name", "adamw"]
    main(Config, build, [*begun, "--run-dir", str(run)])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    # A BPE tokenizer trained on this would be another.
    (texts / "0.txt").write_text("zzz yyy xxx " * 100)
    short = ["--resume", "--run-dir", str(run)]
    for flags, words in (
        ([], "had text "),
        (["--seed", "4"], "and seed 3 (now 4)"),
        (["--optimizer.learning-rate", "0.1"], "optimizer.learning-rate left out (now 0.1)"),
        (["--accept-changes", "text", "--steps", "6"], "had steps 4 (now 6): leave it"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            main(Config, build, [*short, *flags])
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert words in printed.err or words.removeprefix("and ") in printed.err
        assert "changed since" not in printed.out
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    accept = ["--accept-changes", "text", "steps"]
    main(Config, build, [*short, "--steps", "6", "--keep", "1", *accept])
    printed = capsys.readouterr().out
    assert re.search(r"keep +3 +1 +same bits\n", printed)
    assert re.search(r"steps +4 +6 +accepted: those of another run\n", printed)
    assert "resumed at step 4" in printed
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in logged if "train/loss" in x] == [1, 2, 3, 4, 5, 6]
    # Nothing of the old run is replaced; what changed stands beside it, and is the run's from now.
    for name in ("config.json", "tokenizer.json"):
        assert (run / name).read_bytes() == before[run / name]
    (change,) = (run / "changes.jsonl").read_text().splitlines()
    assert json.loads(change)["changes"]["steps"] == [4, 6]
    assert run_to_resume(Config, short).steps == 6


def test_text_is_encoded_at_the_first_start_alone(texts, tmp_path, monkeypatch):
    encoded = []

    def noted(of, name):
        function = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args: encoded.append(name) or function(*args))

    noted(data.ByteTokenizer, "encode_batch")
    noted(data.writing, "_write_tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = parse(Config, [*SMALL, "--data", texts])
    assert isinstance(build(config).data.batch, dict)
    assert encoded
    del encoded[:]
    build(config)
    assert encoded == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    build(config)
    assert encoded


def test_the_baseline_is_counted_by_the_first_process_on_so_many_bytes(monkeypatch):
    documents = [data.Document(str(i), b"ab" * 5) for i in range(4)]
    assert list(data.first_texts(documents, 11)) == [b"ab" * 5] * 2
    counted = []
    monkeypatch.setattr(
        data, "ngram_bits_per_byte", lambda train, held: counted.append(list(train)) or 1.0
    )
    model, tokenizer = model_config(Config(), 257), data.ByteTokenizer()
    corpus = data.tokenize(documents, tokenizer)
    texts = {"": (corpus, corpus)}
    given = (Config(sample_tokens=0), model, tokenizer, texts, None, {"loss": 1.0})
    assert len(conclude(*given)) == 1
    assert counted == [[b"ab" * 5] * 4]
    chat = Conversation("x", b"abc", counted=((2, 3),), special=())
    assistant = data.tokenize([chat], tokenizer)
    (line,) = conclude(*given[:3], {"": (assistant, assistant)}, *given[4:])
    assert line == "held-out loss 1.000 nats per token of the assistant's, 2 of 3"
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert conclude(*given) == []
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh.tensor", "4", "--mesh.data", "2"], "--mesh.tensor 4 does not divide 2 heads"),
        (["--mesh.data", "3"], "mesh data 3 needs 3 devices and there are 8"),
        (["--global-batch", "12"], "not divisible by mesh axes data of size 8"),
        (["--width", "17"], "width=17 is not divisible by heads=2"),
        (["--accumulate", "3"], "cannot be cut into accumulate=3 microbatches"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--optimizer.name", "adamw", "--optimizer.momentum", "0.9"], "momentum"),
        (["--resume", "--run-dir", "/nowhere"], "no run to resume in /nowhere"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_status_2(texts, tmp_path, capsys, flags, message):
    run = [] if "--run-dir" in flags else ["--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        main(Config, build, [*SMALL, "--data", texts, *run, *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [("optimizer.name", "adamw"), ("optimizer.schedule", "inverse_sqrt"), ("model", "llama-1b")],
)
def test_unknown_names_list_what_is_allowed(flag, allowed, capsys):
    with pytest.raises(SystemExit) as stop:
        main(Config, build, [f"--{flag}", "adamm"])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert allowed in printed.out + printed.err


@pytest.mark.slow
def test_simulated_devices_and_the_command_line_of_a_fresh_process(texts, tmp_path):
    command = [sys.executable, "-m", "experiments.gpt", *SMALL, "--data", texts]
    command += ["--simulate-devices", "4", "--mesh.tensor", "2", "--run-dir", str(tmp_path / "run")]
    # tensorboardX would import PyTorch, which takes seconds.
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "4 x cpu" in done.stdout
    assert "data 2 x tensor 2" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_pipelined_run_resumes_without_a_pipeline_and_back(texts, tmp_path):
    def run(steps, *more):
        flags = [*SMALL, "--layers", "5", "--data", texts, "--steps", str(steps), "--resume"]
        flags += [
            "--sample-tokens",
            "0",
            "--optimizer.schedule",
            "constant",
            "--optimizer.warmup-steps",
            "1",
        ]
        flags += ["--run-dir", str(tmp_path / "run"), *more]
        config = parse(Config, flags if steps > 2 else [f for f in flags if f != "--resume"])
        experiment = build(config)
        state = fit(experiment, config.run).state
        return state, jax.device_get(experiment.stack.natural(state.params))

    pipe = ["--mesh.pipe", "2", "--pipeline.microbatches", "2", "--mesh.data", "4"]
    # It ends with a sample, from parameters that lie in chunks of unequal numbers of layers.
    interleaved = ["--pipeline.schedule", "interleaved", "--pipeline.virtual", "2"]
    run(2, *pipe, *interleaved, "--sample-tokens", "4")
    run(4)
    state, params = run(6, *pipe)
    assert int(state.step) == 6
    kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec[0] == "pipe"

    alone = [*SMALL, "--layers", "5", "--data", texts, "--steps", "6", "--sample-tokens", "0"]
    alone += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "1"]
    alone += ["--run-dir", str(tmp_path / "alone")]
    config = parse(Config, alone)
    expected = fit(build(config), config.run).state
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_mixture_is_trained_logged_and_evaluated_by_source_and_a_source_can_be_added(
    texts, tmp_path, capsys
):
    tokenizer = data.ByteTokenizer()
    for name in ("code", "docs", "math"):
        documents = [data.Document(str(n), f"{name} {n} ".encode() * 30) for n in range(30)]
        data.write_store(data.Split(documents[3:], documents[:3]), tokenizer, tmp_path / name)
    shares = f"code=0.75:{tmp_path}/code,docs=0.25:{tmp_path}/docs"
    flags = [*SMALL, "--sample-tokens", "0", "--log-every", "1"]
    flags += ["--optimizer.warmup-steps", "1", "--optimizer.schedule", "constant"]
    for name, steps in (("run", "2"), ("whole", "4")):
        more = (
            shares if name == "run" else f"{shares};2:code=0.5,docs=0.25,math=0.25:{tmp_path}/math"
        )
        main(
            Config,
            build,
            [*flags, "--steps", steps, "--data", more, "--run-dir", str(tmp_path / name)],
        )
    printed = capsys.readouterr().out
    assert "; the shares are exact over any 4 rows" in printed
    assert re.search(r"\ncode: held-out loss \d\.\d+ bits per byte, which .* byte model's", printed)
    assert "\ndocs: held-out loss " in printed
    resume = ["--resume", "--steps", "4", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(
            Config,
            build,
            [*resume, "--data", shares.replace("=0.75", "=0.5").replace("=0.25", "=0.5")],
        )
    assert "had shares.0 code 3/4, docs 1/4 (now code 1/2, docs 1/2)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        main(Config, build, [*resume, "--data", more.replace(";2:", ";1:")])  # which is past
    assert "had shares.1 (none) (now code 1/2, docs 1/4, math 1/4)" in capsys.readouterr().err
    main(Config, build, [*resume, "--data", more])
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("run", "whole")
    ]
    losses = [{x["step"]: x["train/loss"] for x in log if "train/loss" in x} for log in logs]
    assert losses[0] == losses[1]
    rows = {
        name: len(data.PackedTokens(data.open_store(tmp_path / name).corpus(), 32))
        for name in ("code", "math")
    }
    (last,) = [x for x in logs[0] if x["step"] == 4 and "train/loss" in x]
    assert last["data/epochs/math"] == pytest.approx(4 / rows["math"])
    assert last["data/epochs/code"] == pytest.approx((12 + 8) / rows["code"])
    (evaluated,) = [x for x in logs[0] if x["step"] == 4 and "eval/math/loss" in x]
    for name in ("code", "docs"):
        assert evaluated[f"eval/{name}/perplexity"] == math.exp(evaluated[f"eval/{name}/loss"])


def test_a_store_gives_the_batches_of_its_text_with_its_own_tokenizer(texts, tmp_path):
    split, path = data.text_folder(texts), str(tmp_path / "store")
    tokenizer = data.SubwordTokenizer.train((d.text for d in split.train), 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    data.write_store(split, tokenizer, path)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def first(*flags):
        experiment = build(parse(Config, [*SMALL, *flags]))
        with experiment.data.train_batches(3, sharding) as stream:
            return experiment, next(stream), next(iter(experiment.data.eval_batches[""](sharding)))

    flags = ("--tokenizer", str(tmp_path / "tokenizer.json"))
    raw, *batches = first("--data", texts, *flags)
    for same_flags in (("--data", path), ("--data", path, *flags)):
        stored, *others = first(*same_flags)
        jax.tree.map(np.testing.assert_array_equal, batches, others)
        assert stored.metadata.fingerprints == raw.metadata.fingerprints
        assert stored.metadata.files == raw.metadata.files
    assert (
        outline(parse(Config, [*SMALL, "--data", path])).metadata.config["model"]
        == raw.metadata.config["model"]
    )
    _, fitted, _ = first("--data", path, "--packing", "fit")
    rows = data.FittedTokens(data.open_store(path).corpus(), 32)
    wanted = data.Batches(rows, global_batch=8, seed=0).batch(3)
    jax.tree.map(np.testing.assert_array_equal, dict(fitted), wanted)
    with pytest.raises(ValueError, match="made with another tokenizer than '300': leave"):
        first("--data", path, "--tokenizer", "300")


@pytest.mark.slow
def test_preferences_refine_what_a_run_begins_with(tmp_path, capsys):
    lines = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no" * (n % 5)} for n in range(1, 90)]
    lines = [json.dumps(line) + "\n" for line in lines if line["rejected"]]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    split = data.text_folder(tmp_path / "pairs.jsonl", chat=data.load_template("plain"))
    data.write_store(split, data.ByteTokenizer(), tmp_path / "store")
    model = decoder.DecoderConfig(vocab_size=257, seq_len=32, layers=1, width=16, heads=2)
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(0)))
    run, flags = tmp_path / "run", ["--tokenizer", "bytes", "--data", str(tmp_path / "store")]
    begin = ["--init-from", str(tmp_path / "model")]
    more = ["--steps", "6", "--global-batch", "8", "--sample-tokens", "4", "--eval-first"]
    more += ["--eval-every", "6", "--optimizer.learning-rate", "0.01", "--no-save-frozen"]
    main(Config, build, [*flags, *begin, *more, "--run-dir", str(run)])
    printed = capsys.readouterr().out
    assert re.search(
        r"held-out loss 0\.\d+ nats per preference, of which .*% are as the text", printed
    )
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["eval/loss"] for line in log if "eval/loss" in line]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)  # the model is its own reference
    assert losses[-1] < losses[0]
    assert not [name for line in log for name in line if "perplexity" in name]
    cli.main(["generate", "--run", str(run), "--prompt", "7?", "--max-tokens", "3"])
    assert "tokens written" in capsys.readouterr().err
    scored = tmp_path / "scored"
    more = [*more[:-1], "--preference.loss", "reward", "--steps", "20", "--eval-every", "20"]
    main(Config, build, [*flags, *begin, *more, "--run-dir", str(scored)])
    log = [json.loads(line) for line in (scored / "log.jsonl").read_text().splitlines()]
    found = [line["eval/accuracy"] for line in log if "eval/accuracy" in line]
    assert found[-1] > 0.9 > found[0]
    cli.main(["hf", "export", "--run", str(scored), "--out", str(tmp_path / "out")])
    assert hf.read_config(tmp_path / "out").head == "score"
    again = [*flags, "--init-from", str(tmp_path / "out")]
    experiment = outline(parse(Config, [*again, "--preference.loss", "reward"]))
    assert "head" in experiment.task.params()  # the head goes on where it was
    with pytest.raises(ValueError, match="it is a reward model, which predicts no tokens"):
        outline(parse(Config, again))
    for given, message in (
        (flags, "preferences refine a trained model: .* --init-from"),
        ([*flags, *begin, "--preference.beta", "0"], "`beta` is 0.0: give a number above 0"),
        ([*flags, *begin, "--preference.gamma", "1"], "`gamma` is 1.0, and dpo has none"),
        ([*flags, *begin, "--z-loss", "0.1"], "--z-loss 0.1 is not for preferences"),
        ([*begin, "--tokenizer", "bytes", "--preference.beta", "1"], "--data has none"),
    ):
        with pytest.raises(ValueError, match=message):
            outline(parse(Config, given))
