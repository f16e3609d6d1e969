"""The recipes for SkyPilot and xpk, read by their own parsers, and what keeps a run's versions."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

from experiments.gpt import Config
from jaxtrain import cli
from jaxtrain.host import exit_codes
from jaxtrain.run.launch import LaunchOptions
from jaxtrain.run.main import parse

ROOT = pathlib.Path(__file__).parents[2]
SETUP = ROOT / "tpu_setup"
RECIPES = ["tpu.yaml", "gpu.yaml"]
GIVEN = {"RUN_DIR": "gs://b/run", "DATA": "gs://b/text", "TOKENIZER": "gs://b/tokenizer.json"}
# What SkyPilot sets.
SKY = {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
SKY |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
WORKLOAD = ["--project", "p", "--zone", "us-west4-a", "--cluster", "c", "--name", "llama"]
WORKLOAD += ["--type", "v5litepod-16", "--image", "registry/image@sha256:1"]
TRAIN = ["experiments.gpt", "--mesh.fsdp", "16", "--mesh.data", "1", "--run-dir", "gs://b/run"]


def recipe(name):
    return yaml.safe_load((SETUP / "skypilot" / name).read_text())


def words_of(name, folder):
    """What a recipe's run ends in, as its shell hands it on."""
    task = recipe(name)
    home = folder / "home" / "jaxtrain-venv" / "bin"
    home.mkdir(parents=True)
    for program in ("python", "jaxtrain"):
        (home / program).write_text('#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@"\n')
        (home / program).chmod(0o755)
    variables = task["envs"] | GIVEN | SKY
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home")} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_its_paths_and_recovers_from_what_can_be_restarted(name):
    task = recipe(name)
    assert {n for n, value in task["envs"].items() if value is None} == GIVEN.keys()
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert all(map(exit_codes.restartable, codes))
    # By these a process says that another one ended: what that one ended with decides.
    assert exit_codes.RESTARTABLE - {exit_codes.PEER_LOST, exit_codes.ABORTED} <= set(codes)
    assert {exit_codes.PEER_LOST, exit_codes.ABORTED}.isdisjoint(codes)


def test_the_tpu_recipe_trains_on_its_slice(tmp_path):
    program, *words = words_of("tpu.yaml", tmp_path)
    assert [program, *words[:3]] == ["python", "-u", "-m", "experiments.gpt"]
    config = parse(Config, words[3:])
    chips = int(recipe("tpu.yaml")["resources"]["accelerators"].rpartition("-")[2])
    assert config.layout.mesh.fsdp * config.layout.mesh.data == chips
    assert (config.run.run_dir, config.run.auto_resume) == ("gs://b/run", True)
    assert (config.data, config.tokenizer) == (GIVEN["DATA"], GIVEN["TOKENIZER"])


def test_the_gpu_recipe_launches_a_process_per_gpu(tmp_path):
    program, *words = words_of("gpu.yaml", tmp_path)
    assert program == "jaxtrain"
    options, command = cli.parse(words)
    assert options == LaunchOptions(
        processes=8, hosts=2, host_index=1, coordinator="10.0.0.1:1234", max_restarts=10
    )
    assert [pathlib.Path(command[0]).name, *command[1:4]] == ["python", "-u", "-m", command[3]]
    config = parse(Config, command[4:])
    task = recipe("gpu.yaml")
    assert config.layout.mesh.dcn_data == task["num_nodes"]
    assert config.layout.mesh.data * config.layout.mesh.fsdp == 8 * task["num_nodes"]
    assert (config.run.run_dir, config.run.auto_resume) == ("gs://b/run", True)


class Host:
    """Runs pinned.sh where uv writes down how it is called and a bucket is a folder."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bucket").mkdir()
        self.program(
            "uv", f'echo "$@" >> {folder}/calls; [[ $2 != freeze ]] || cat {folder}/newest'
        )
        place = f"file={folder}/bucket/${{@: -1}}; file=${{file/gs:\\/\\//}}"
        self.program(
            "gcloud",
            f"""{place}
case $2 in
  ls) [[ ! -e {folder}/down ]] || {{ echo no route >&2; exit 1; }}
      [[ -e $file ]] || {{ echo "One or more URLs matched no objects." >&2; exit 1; }} ;;
  cat) cat "$file" ;;
  cp) [[ $3 == --no-clobber ]]; mkdir -p "$(dirname "$file")"; cp -n "$4" "$file" ;;
esac""",
        )
        # As AWS's own (1.46) answers; s3 cp URL -, s3api put-object --bucket B --key K --body FILE.
        self.program(
            "aws",
            f"""if [[ -e {folder}/down ]]; then echo no route >&2; exit 1; fi
if [[ $1 == s3 ]]; then file={folder}/bucket/${{3#s3://}}
  [[ -e $file ]] || {{ echo "(404) when calling the HeadObject operation" >&2; exit 1; }}
  cat "$file"
else file={folder}/bucket/$4/$6; mkdir -p "$(dirname "$file")"
  [[ $9 == --if-none-match ]]
  [[ ! -e $file ]] || {{ echo "(PreconditionFailed) when calling" >&2; exit 254; }}
  cp "$8" "$file"
fi""",
        )

    def program(self, name, body):
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def install(self, versions, newest):
        """Returns the status, what was installed with, and each call."""
        (self.folder / "newest").write_text(newest)
        (self.folder / "calls").write_text("")
        environment = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder)}
        line = [str(SETUP / "pinned.sh"), "tpu,text", versions]
        self.done = subprocess.run(line, env=environment, capture_output=True, text=True)
        calls = (self.folder / "calls").read_text().splitlines()
        return [call for call in calls if call.startswith("pip install")]


@pytest.mark.parametrize(
    "versions", ["gs://b/run.versions", "s3://b/run.versions", "{folder}/shared/run.versions"]
)
def test_what_a_run_began_with_is_what_every_attempt_installs(versions, tmp_path):
    host, versions = Host(tmp_path), versions.format(folder=tmp_path)
    path = tmp_path / "bucket" / "b" / "run.versions"
    path = path if "://" in versions else pathlib.Path(versions)
    (first,) = host.install(versions, "jax==1\nnumpy @ file:///x\n")
    assert host.done.returncode == 0, host.done.stderr
    assert first.endswith("[tpu,text]")
    assert path.read_text() == "jax==1\n"
    (again,) = host.install(versions, "jax==2\n")
    assert " -c " in again
    assert path.read_text() == "jax==1\n"


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_whoever_comes_first_decides_the_versions_of_all_hosts(scheme, tmp_path):
    host = Host(tmp_path)
    path = tmp_path / "bucket" / "b" / "run.versions"
    path.parent.mkdir()
    # Another host writes while this one installs.
    host.program(
        "uv",
        f'echo "$@" >> {tmp_path}/calls; [[ $2 != freeze ]] || {{ echo jax==2; '
        f"echo jax==1 > {path}; }}",
    )
    newest, theirs = host.install(f"{scheme}://b/run.versions", "")
    assert host.done.returncode == 0, host.done.stderr
    assert " -c " not in newest
    assert " -c " in theirs
    assert path.read_text() == "jax==1\n"


def test_an_empty_file_of_versions_on_a_shared_disk_is_replaced(tmp_path):
    host, path = Host(tmp_path), tmp_path / "run.versions"
    path.touch()
    host.install(str(path), "jax==1\n")
    assert host.done.returncode == 0, host.done.stderr
    assert path.read_text() == "jax==1\n"
    assert path.stat().st_mode == (tmp_path / "calls").stat().st_mode
    assert list(tmp_path.glob("run.versions?*")) == []


def test_half_of_the_versions_is_never_found_on_a_shared_disk(tmp_path):
    host, path = Host(tmp_path), tmp_path / "run.versions"
    # Of disks without hard links; the host is taken away in the midst of writing.
    host.program("ln", "exit 1")
    for writer in ("cat", "cp"):
        host.program(
            writer,
            f'[[ $1 == */new ]] || exec /bin/{writer} "$@"\n'
            'head -c 5 "$1" > "${2:-/dev/stdout}"; kill -9 $PPID; exit 1',
        )
    host.install(str(path), "jax==1\nnumpy==2\n")
    assert host.done.returncode
    assert not path.exists() or path.stat().st_size == 0


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_nothing_is_installed_where_nobody_can_say_which_versions(scheme, tmp_path):
    host = Host(tmp_path)
    (tmp_path / "down").touch()
    assert host.install(f"{scheme}://b/run.versions", "jax==2\n") == []
    assert host.done.returncode == 1
    assert f"{scheme}://b/run.versions cannot be read: no route" in host.done.stderr


def xpk_line(*words):
    line = [str(SETUP / "xpk.sh"), *words]
    return subprocess.run(line, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    ("left_out", "words"), [("--cluster", "which cluster"), ("--image", "which image")]
)
def test_xpk_says_what_is_missing(left_out, words):
    at = WORKLOAD.index(left_out)
    done = xpk_line(*WORKLOAD[:at], *WORKLOAD[at + 2 :], "--", *TRAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("flag", "given"),
    [("--slices", "0"), ("--slices", "two"), ("--restarts", "-1"), ("--restarts", "1.5")],
)
def test_xpk_takes_whole_numbers(flag, given):
    done = xpk_line(*WORKLOAD, flag, given, "--dry-run", "--", *TRAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{flag} is {given}: give a whole number of at least" in done.stderr


def test_xpk_is_told_what_to_restart_and_what_to_run():
    done = xpk_line(*WORKLOAD, "--slices", "2", "--dry-run", "--", *TRAIN)
    words = shlex.split(done.stdout)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags["--restart-on-exit-codes"] == ",".join(map(str, sorted(exit_codes.RESTARTABLE)))
    assert flags["--num-slices"] == "2"
    assert shlex.split(flags["--command"]) == [
        *["exec", "python", "-u", "-m"],
        *[*TRAIN, "--auto-resume"],
    ]


READ_TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.use_spot, resources.accelerators, resources.job_recovery)
"""


def installed(package, folder):
    """The programs of an environment that has this package; skips where it cannot be had."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    line = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", package]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr.splitlines()[-1]}")
    return folder / "bin"


@pytest.mark.slow
def test_skypilot_reads_its_recipes(tmp_path):
    programs = installed("skypilot", tmp_path / "venv")
    for name, nodes, accelerators in (("tpu", 1, "tpu-v5litepod-16"), ("gpu", 2, "H100")):
        text = (SETUP / "skypilot" / f"{name}.yaml").read_text()
        for variable, value in GIVEN.items():
            assert f"{variable}: null" in text
            text = text.replace(f"{variable}: null", f"{variable}: {value}")
        for broken in (False, True):
            path = tmp_path / f"{name}.yaml"
            path.write_text(text.replace("use_spot:", "use_spots:") if broken else text)
            done = subprocess.run(
                [programs / "python", "-c", READ_TASK, path],
                cwd=ROOT,
                env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
            )
            assert bool(done.returncode) == broken, done.stderr
            if not broken:
                assert done.stdout.startswith(f"{nodes} True {{'{accelerators}'")
                assert "EAGER_NEXT_REGION" in done.stdout


@pytest.mark.slow
def test_xpk_makes_a_job_that_starts_again_where_that_helps(tmp_path):
    programs = installed("xpk", tmp_path / "venv")
    manifest = tmp_path / "manifest.yaml"
    words = shlex.split(xpk_line(*WORKLOAD, "--dry-run", "--", *TRAIN).stdout)
    words += ["--dry-run", "--skip-validation", "--project-number", "1"]
    done = subprocess.run(
        [programs / words[0], *words[1:], "--output-manifest-file", manifest],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = yaml.safe_load(manifest.read_text())
    assert job["spec"]["failurePolicy"]["maxRestarts"] == 1000
    (replicated,) = job["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    assert pods["completions"] == 4
    ends = pods["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert ends["operator"] == "NotIn"
    kept = set(ends["values"])
    assert kept >= exit_codes.RESTARTABLE | {137, 139}
    final = {1, exit_codes.REFUSED, exit_codes.DIVERGED, exit_codes.SUPERSEDED}
    assert final.isdisjoint(kept)
    pod = pods["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "exec python -u -m experiments.gpt" in pod["containers"][0]["command"][2]
    assert pod["containers"][0]["image"] == "registry/image@sha256:1"
