"""Several real processes train what one does; each reads its own rows, and one writes the logs."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments.gpt import Config, build
from jaxtrain import data
from jaxtrain.build import make_abstract_state, make_experiment_mesh
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import main, parse
from tests import problems

ROOT = pathlib.Path(__file__).parents[2]
STEPS, ROWS = 4, 8
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "32"]
SMALL += ["--global-batch", str(ROWS), "--held-out-bytes", "2000", "--log-every", "1"]
SPLIT = ["--mesh.data", "1", "--mesh.fsdp", "8"]
# Several processes compile on few cores.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@pytest.fixture(scope="module")
def alone(texts, tmp_path_factory):
    """The run of one process with eight devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    flags = [*SMALL, "--data", texts, "--steps", str(STEPS), "--sample-tokens", "0"]
    main(Config, build, [*flags, "--run-dir", str(run)])
    return run


def flags_of(texts, run, *more):
    return [*SMALL, "--data", texts, "--steps", str(STEPS), "--run-dir", str(run), *more]


def launch(processes, devices, *command, timeout=300):
    line = [sys.executable, "-m", "jaxtrain", "launch", "--processes", str(processes)]
    line += ["--simulate-devices-per-process", str(devices), "--", sys.executable, *command]
    environment = {**QUICK, **os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def logged(run, name):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def saved_params(run, texts, *more):
    """The parameters of the last checkpoint, on the host."""
    experiment = build(parse(Config, flags_of(texts, run, *more)))
    abstract = make_abstract_state(experiment, make_experiment_mesh(experiment))
    with Checkpointer(run / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [STEPS]
        return jax.device_get(checkpoints.restore(abstract).params)


@pytest.mark.parametrize(
    ("processes", "devices", "mesh"),
    [
        # Parameters lie across the processes, and the sample at the end is theirs together.
        pytest.param(2, 4, [*SPLIT, "--sample-tokens", "4"], marks=pytest.mark.slow),
        (2, 4, [*SPLIT, "--sample-tokens", "0"]),
        pytest.param(4, 2, ["--sample-tokens", "0"], marks=pytest.mark.slow),
    ],
    ids=["2x4, a sample", "2x4", "4x2"],
)
def test_processes_train_what_one_does(processes, devices, mesh, texts, alone, tmp_path):
    run = tmp_path / "run"
    script = str(pathlib.Path(__file__).with_name("counting_run.py"))
    done = launch(processes, devices, script, str(tmp_path), *flags_of(texts, run, *mesh))
    assert done.returncode == 0, done.stderr
    assert f"{processes}, found from JAXTRAIN_PROCESSES" in done.stdout
    printed = [line for line in done.stdout.splitlines() if "step 1/4" in line]
    assert len(printed) == 1
    assert printed[0].startswith("[0] ")

    check_same(run, alone, texts)

    assert len((run / "log.jsonl").read_text().splitlines()) == STEPS + 1
    assert len(list((run / "tensorboard").glob("events*"))) == 1
    assert json.loads((run / "config.json").read_text())["experiment"] == "gpt"
    check_shares(texts, tmp_path, processes)


def check_same(run, alone, texts, *more):
    """Two runs have the same losses, and parameters at the end."""
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        ours, wanted = logged(run, name), logged(alone, name)
        assert ours.keys() == wanted.keys()
        for step, value in wanted.items():
            assert ours[step] == pytest.approx(value, rel=2e-5), (name, step)
    ours, wanted = saved_params(run, texts, *more), saved_params(alone, texts, *more)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Measured: 8e-7 at most.
        assert np.linalg.norm(a - b) < 5e-6 * np.linalg.norm(b)


def check_shares(texts, folder, processes):
    """Each process has read the rows of its own devices, and no other's."""
    config = parse(Config, flags_of(texts, folder))
    split = data.text_folder(texts)
    train = data.PackedTokens(data.tokenize(split.train, data.ByteTokenizer()), 32)
    batches = data.Batches(train, global_batch=ROWS, seed=config.seed)
    share = ROWS // processes
    evaluated = []
    for process in range(processes):
        reads = json.loads((folder / f"reads-{process}.json").read_text())
        of_train = reads.pop(str(len(train)))
        mine = range(process * share, (process + 1) * share)
        # Row 0 tells the shapes; the stream runs up to three batches ahead.
        wanted = [
            [batches.source_index(step * ROWS + r) for r in mine] for step in range(STEPS + 3)
        ]
        assert of_train[0] == 0
        read = of_train[1:]
        assert read == list(itertools.chain(*wanted))[: len(read)]
        assert len(read) >= STEPS * share
        ((length, of_eval),) = reads.items()
        evaluated += of_eval[of_eval.count(0) - (process == 0) :]
        assert len(of_eval) < int(length) / processes + share + 4
    assert sorted(set(evaluated) | {0}) == list(range(int(length)))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (4, 2)])
def test_processes_have_the_bits_of_one(processes, devices, texts, tmp_path):
    """Of an exact run, on 8 devices of one process and on others, split otherwise."""
    more = ["--exact", "8", "--optimizer.name", "adamw", "--dropout", "0.1", "--sample-tokens", "0"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    main(Config, build, flags_of(texts, alone, *more))
    mesh = ["--mesh.data", "1", "--mesh.fsdp", "-1"]
    done = launch(processes, devices, "-m", "experiments.gpt", *flags_of(texts, run, *more, *mesh))
    assert done.returncode == 0, done.stderr
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert logged(run, name) == logged(alone, name)
    ours, wanted = saved_params(run, texts, *more), saved_params(alone, texts, *more)
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "expert"])
def test_processes_that_split_rows_or_experts_train_what_one_does(axis, texts, alone, tmp_path):
    """Of rows that they split, held-out ones too, each process reads its own places."""
    more = ["--model", "tiny-moe"] if axis == "expert" else []
    if more:
        alone, flags = tmp_path / "alone", flags_of(texts, tmp_path / "alone", *more)
        main(Config, build, [*flags, "--sample-tokens", "0"])
    run, script = tmp_path / "run", str(pathlib.Path(__file__).with_name("counting_run.py"))
    mesh = ["--mesh.data", "1", f"--mesh.{axis}", "2", "--sample-tokens", "0"]
    done = launch(2, 1, script, str(tmp_path), *flags_of(texts, run, *more, *mesh))
    assert done.returncode == 0, done.stderr
    check_same(run, alone, texts, *more)
    for process in range(2):
        of_train = json.loads((tmp_path / f"places-{process}.json").read_text())
        half = [16 * process, 16 * process + 16] if axis == "context" else [0, 32]
        for first, *places in of_train.values():  # the held-out rows are read in two passes or less
            assert first == [0, 32]  # which tells the shapes
            assert set(map(tuple, places)) >= {tuple(half)}
            assert axis != "context" or places.count(first) < 3
        assert max(map(len, of_train.values())) > STEPS * (ROWS if axis == "context" else ROWS // 2)


@pytest.mark.slow
def test_what_cannot_be_is_said_by_all_processes_and_waits_for_none(texts, alone):
    """The folder is taken: process 0 finds it, and the others do not wait for it for ever."""
    done = launch(2, 1, "-m", "experiments.gpt", *flags_of(texts, alone))
    assert done.returncode == 2
    for process in range(2):
        assert f"[{process}] error: {alone} holds a run already" in done.stderr


ONE_FOLDER = """
import jax
from jaxtrain.host import distributed
from jaxtrain.run.folder import lock_run_dir, find_run_dir

distributed.initialize()
distributed.initialize()  # More calls do nothing.
owner = lock_run_dir(find_run_dir("gpt", None)[0], name="gpt")
owner.check()
print(owner.path, jax.process_count())
"""


@pytest.mark.slow
def test_processes_agree_on_the_next_free_number(tmp_path):
    (tmp_path / "runs" / "gpt-3").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{ONE_FOLDER}")
    done = launch(2, 1, str(script))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "runs/" in line]
    assert sorted(lines) == ["[0] runs/gpt-4 2", "[1] runs/gpt-4 2"]


@pytest.mark.slow
def test_rows_that_each_process_reads_for_itself_make_one_batch():
    done = launch(2, 2, str(ROOT / "tests" / "workers" / "rows.py"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Half of the rows would have been lost without a word.
    refused = "process 1 was given other rows than process 0: a compiled step takes host arrays"
    assert sum(refused in line for line in lines) == 2, done.stdout
    assert sum("'mask' has 3 rows in this process" in line for line in lines) == 2
    found = [line.split("trained: ")[1].split() for line in lines if "trained: " in line]
    assert len(found) == 2
    assert found[0] == found[1]
    params = jax.device_get(jt.init_state(problems.init, optax.sgd(0.5), jax.random.key(0)).params)
    loss, grads, weight = problems.reference(params, problems.make_batch())
    after = jax.tree.map(lambda p, g: np.abs(p - 0.5 * g).sum(), params, grads)
    expected = [weight, loss, sum(jax.tree.leaves(after))]
    np.testing.assert_allclose(np.array(found[0], float), expected, rtol=1e-5)
