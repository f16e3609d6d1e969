"""Whatever is given on the command line or found in a file, a refusal is one sentence and status 2.

Everything up to the compiler is run in this process on inputs that hypothesis makes; a run that
would be accepted stops there.
"""

import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import gpt
from jaxtrain import build, cli
from jaxtrain.run.checkpoints import manifest
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import find_run_dir
from jaxtrain.run.main import main, parse

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "32", "--steps", "4"]
SMALL += ["--global-batch", "8", "--held-out-bytes", "2000", "--sample-tokens", "0"]
fuzz = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Accepted(Exception):
    """The input is good: a run would begin."""


def stop_before_compiling(experiment, run, **plugs):
    """All that ``fit`` does until it compiles."""
    mesh = build.make_experiment_mesh(experiment)
    state = build.make_abstract_state(experiment, mesh)
    find_run_dir(experiment.name, run.run_dir, resume=run.resume, overwrite=run.overwrite)
    step = build.build_step(experiment, state, mesh)
    jax.eval_shape(step, state, experiment.data.batch)
    raise Accepted


@pytest.fixture
def dry(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxtrain.run.main.fit", stop_before_compiling)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(4):
        (folder / f"{i}.txt").write_text("some words on a page " * 40)
    return str(folder)


def outcome(main, *arguments) -> str | None:
    """Runs a main; returns its sentence where it refuses, None where it accepts."""
    errors, printed = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
            main(*arguments)
    except Accepted:
        return None
    except SystemExit as stop:
        text = errors.getvalue() + printed.getvalue()
        assert stop.code == 2, text  # noqa: PT017
        assert "Traceback" not in text
        if "error: " in text:  # ours; what does not parse is tyro's own box
            assert len(text.strip().splitlines()) == 1, text
        return text
    return None


def train(*flags: str) -> str | None:
    return outcome(main, gpt.Config, gpt.build, list(flags))


NUMBERS = ["-1", "0", "1", "2", "3", "7", "8", "64", "1000", "nan", "inf", "-inf", "1e-3", "-0.5"]
NUMBERS += ["99999999999999999999", "x", "", "0x10", "1_0", "None", "1e400"]
NUMERIC = ["--layers", "--width", "--heads", "--dropout", "--scan-unroll", "--held-out-bytes"]
NUMERIC += ["--steps", "--global-batch", "--seq-len", "--accumulate", "--zero", "--seed"]
NUMERIC += ["--sample-tokens", "--log-every", "--eval-every", "--save-every", "--save-minutes"]
NUMERIC += ["--keep", "--mesh.data", "--mesh.fsdp", "--mesh.tensor", "--mesh.pipe"]
NUMERIC += ["--pipeline.microbatches", "--pipeline.virtual", "--optimizer.learning-rate"]
NUMERIC += ["--optimizer.warmup-steps", "--optimizer.weight-decay", "--optimizer.clip-norm"]
NUMERIC += ["--optimizer.b1", "--optimizer.b2", "--optimizer.eps", "--optimizer.momentum"]
NUMERIC += ["--optimizer.accumulate", "--steps-per-call"]
WORDS = ["--model", "--remat", "--attention", "--field", "--tokenizer", "--precision", "--data"]
WORDS += ["--optimizer.name", "--optimizer.schedule", "--pipeline.schedule", "--run-dir", "--nope"]
TEXTS = ["", "bytes", "260", "full", "cudnn", "adamw", "lion", "adafactor", "lars", "1f1b", "a\0b"]
TEXTS += ["interleaved", "bf16", "f16", "/", "/dev/null", "/proc/1/mem", "x" * 5000, "\udc80", ".."]
TEXTS += ["linear", "tiny", "../..", "-", "--", "é", "http://x/y", "gs:/"]
FLAGS = st.one_of(
    st.tuples(st.sampled_from(NUMERIC), st.sampled_from(NUMBERS)),
    st.tuples(st.sampled_from(WORDS), st.sampled_from(TEXTS)),
)


def test_devices_are_chosen_among_gpus():
    try:
        assert "--devices chooses among GPUs, and JAX has found none" in train(
            "--devices", "0", "2"
        )
        assert jax.config.values["jax_cuda_visible_devices"] == "0,2"
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")
    with pytest.raises(ValueError, match=r"`devices` is \(1, 1\): give different numbers from 0"):
        gpt.Config(devices=(1, 1))


@settings(fuzz, max_examples=12)
@given(st.lists(FLAGS, min_size=1, max_size=3))
def test_flags(dry, texts, flags):
    train_with(texts, flags)


@pytest.mark.slow
@settings(fuzz, max_examples=150)
@given(st.lists(FLAGS, min_size=1, max_size=4))
def test_flags_at_length(dry, texts, flags):
    train_with(texts, flags)


@pytest.mark.slow
@pytest.mark.parametrize("flag", NUMERIC)
def test_every_number_alone(dry, texts, flag):
    for value in NUMBERS:
        train_with(texts, [(flag, value)])


def train_with(texts, flags):
    if "--run-dir" not in dict(flags):
        flags = [*flags, ("--run-dir", "run")]
    try:
        train(*SMALL, "--data", texts, *(word for flag in flags for word in flag))
    finally:
        for there in pathlib.Path().iterdir():
            shutil.rmtree(there) if there.is_dir() else there.unlink()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--steps", "99999999999999999999", "--steps is 99999999999999999999"),
        ("--steps", "0", "--steps is 0"),
        ("--seed", "99999999999999999999", "--seed is"),
        ("--optimizer.accumulate", "0", "--optimizer.accumulate is 0"),
        ("--accumulate", "0", "error: --accumulate is 0: give at least 1"),
        ("--steps-per-call", "0", "--steps-per-call is 0: give at least 1"),
        ("--global-batch", "99999999999999999999", "--global-batch is 99999999999999999999"),
        ("--mesh.tensor", "0", "tensor"),
        ("--layers", "99999999999999999999", "layers=99999999999999999999"),
        ("--run-dir", "http://x/y", "is in no storage known here (http://)"),
        ("--run-dir", "/dev/null/run", "Not a directory"),
        ("--resume", "--overwrite", "--resume continues a run and --overwrite deletes it"),
        ("--save-every", "-1", "--save-every is -1"),
        ("--log-every", "0", "--log-every is 0"),
        ("--save-minutes", "nan", "--save-minutes is nan"),
    ],
)
def test_what_the_fuzzing_found_in_flags(dry, texts, flag, value, words):
    assert words in train(*SMALL, "--data", texts, "--run-dir", "run", flag, value)


HOSTILE_LINES = [b"", b"{}", b"[]", b"null", b'{"text": 1}', b'{"text": null}', b'{"text": "a"}']
HOSTILE_LINES += [
    b'{"text": "\\ud800"}',
    b"\xff\xfe",
    b"{" * 100_000,
    b"[" * 100_000,
    b'{"text": "',
]
HOSTILE_LINES += [b'{"text": "' + b"x" * 3_000_000 + b'"}', b"\0" * 100, b"1e999", b"1" * 5000]
SUFFIXES = [".txt", ".jsonl", ".parquet", ".JSONL", ".py", ".bin", ""]


@settings(fuzz, max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SUFFIXES),
            st.one_of(
                st.binary(max_size=200),
                st.lists(st.sampled_from(HOSTILE_LINES), max_size=4).map(b"\n".join),
            ),
        ),
        max_size=3,
    )
)
def test_data_files(dry, tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("data")
    for number, (suffix, content) in enumerate(files):
        (folder / f"{number}{suffix}").write_bytes(content)
    train(*SMALL, "--data", str(folder), "--run-dir", str(folder / ".run"))


def parquet(path: pathlib.Path, **columns) -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path.read_bytes()


@settings(fuzz, max_examples=12)
@given(st.floats(0, 1), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3))
def test_parquet_cut_short_and_changed(dry, tmp_path_factory, part, changes):
    folder = tmp_path_factory.mktemp("parquet")
    path = folder / "x.parquet"
    whole = bytearray(parquet(path, text=["some words on a page " * 20] * 50, n=range(50)))
    for where, byte in changes:
        whole[int(where * (len(whole) - 1))] = byte
    path.write_bytes(whole[: int(part * len(whole))] if part < 0.9 else whole)
    train(*SMALL, "--data", str(folder), "--run-dir", str(folder / ".run"))


def test_files_and_folders_that_cannot_be_read(dry, texts, tmp_path):
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    for path in ("loop.txt", "gone.txt", "nowhere", "."):
        assert "error: " in train(*SMALL, "--data", path, "--run-dir", "run")
    (tmp_path / "t.json").mkdir()
    assert "error: " in train(*SMALL, "--data", texts, "--tokenizer", "t.json")
    assert not (tmp_path / "run").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def a_tokenizer() -> dict:
    from jaxtrain.data import SubwordTokenizer

    return json.loads(SubwordTokenizer.train([b"some words on a page " * 9], 270).to_json())


def paths_of(tree, prefix=()):
    """Every place in nested JSON."""
    yield prefix
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in list(pairs)[:12]:
            yield from paths_of(value, (*prefix, key))


def with_value(tree, path, value):
    """A copy of nested JSON with another value at a place."""
    if not path:
        return value
    tree = json.loads(json.dumps(tree))
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return tree


@pytest.mark.slow
@settings(fuzz, max_examples=40)
@given(st.data())
def test_tokenizer_files(dry, texts, data):
    pytest.importorskip("tokenizers")
    good = a_tokenizer()
    where = data.draw(st.sampled_from(list(paths_of(good))))
    text = json.dumps(with_value(good, where, data.draw(JSON)))
    pathlib.Path("t.json").write_text(data.draw(st.sampled_from([text, text[: len(text) // 2]])))
    flags = ["--data", texts, "--tokenizer", "t.json", "--overwrite", "--run-dir", "run"]
    train(*SMALL, *flags)


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    """A run of two checkpoints, made without training."""
    run = tmp_path_factory.mktemp("runs") / "gpt"
    config = parse(gpt.Config, [*SMALL, "--data", texts, "--run-dir", str(run)])
    experiment = gpt.build(config)
    state = build.make_state(experiment, build.make_experiment_mesh(experiment))
    with Checkpointer(run / "checkpoints") as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step, state, config=experiment.metadata.config, metrics={"eval/loss": 1.0}
            )
    (run / "config.json").write_text(json.dumps(experiment.metadata.config))
    return run


def generate_from(run: pathlib.Path, *flags: str) -> str | None:
    asked = ["generate", "--run", str(run), "--prompt", "", "--max-tokens", "1", *flags]
    return outcome(cli.main, asked)


@settings(fuzz, max_examples=30)
@given(st.data())
def test_configs_of_checkpoints(run, tmp_path_factory, data):
    """What ``generate`` reads: the model's sizes and the tokenizer, whatever stands there."""
    copy = tmp_path_factory.mktemp("copy") / "gpt"
    shutil.copytree(run, copy)
    with Checkpointer(run / "checkpoints") as checkpoints:
        good = checkpoints.config()
    good = {"model": good["model"], "tokenizer": good["tokenizer"]}
    where = data.draw(st.sampled_from(list(paths_of(good))))
    value = data.draw(JSON | st.integers(0, 10**6) | st.sampled_from(["../../x", "/etc/passwd"]))
    config = with_value(good, where, value)
    sealed = manifest.seal({"config": config})
    for step in ("1", "2"):
        (copy / "checkpoints" / step / "config" / "metadata").write_text(json.dumps(sealed))
    generate_from(copy, "--temperature", "0")


@settings(fuzz, max_examples=30)
@given(st.data())
def test_manifests_of_checkpoints(run, tmp_path_factory, data):
    """Sealed anew after each change, so that the seal does not catch it."""
    copy = tmp_path_factory.mktemp("copy") / "gpt"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "2" / "manifest" / "metadata"
    good = manifest.unseal(json.loads(path.read_text()))
    where = data.draw(st.sampled_from(list(paths_of(good))))
    changed = with_value(good, where, data.draw(JSON))
    changed = manifest.seal(changed) if isinstance(changed, dict) else changed
    path.write_text(json.dumps(changed))
    generate_from(copy, "--step", "2", "--temperature", "0")


def test_a_refusal_never_touches_an_existing_run(texts, run, tmp_path):
    """By the whole of ``fit``, which refuses these before it compiles."""
    copy = tmp_path / "gpt"
    shutil.copytree(run, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for flags in (
        [],
        ["--resume", "--overwrite"],
        ["--overwrite", "--width", "17"],
        ["--overwrite", "--data", "nowhere"],
        ["--overwrite", "--mesh.data", "3"],
        ["--overwrite", "--global-batch", "7"],
        ["--overwrite", "--accumulate", "3"],
        ["--overwrite", "--mesh.pipe", "2"],
    ):
        assert train(*SMALL, "--data", texts, "--run-dir", str(copy), *flags) is not None, flags
        after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        assert after == before, flags


@pytest.mark.parametrize(
    "command",
    [
        ["experiments.gpt", "--data", "/nowhere"],
        pytest.param(["jaxtrain", "generate", "--run", "/nowhere"], marks=pytest.mark.slow),
        pytest.param(
            ["jaxtrain", "schedule", "--stages", "0", "--microbatches", "1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_real_process_refuses_in_one_line(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")


def test_a_bug_keeps_its_traceback():
    def buggy(config):
        return {}["a bug"]

    with pytest.raises(KeyError, match="a bug"):
        main(gpt.Config, buggy, [])
