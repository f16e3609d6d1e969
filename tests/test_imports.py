"""Everything imports where no accelerator's package, and no optional one, is installed."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

CODE = """
import importlib, pkgutil, sys

OPTIONAL = {"libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins", "gcsfs", "s3fs"}
OPTIONAL |= {"kubernetes", "mpi4py", "tokenizers", "pyarrow", "sklearn", "matplotlib"}
OPTIONAL |= {"dp_accounting", "optuna", "cmaes", "Crypto", "flwr"}
OPTIONAL |= {"gguf", "torch", "huggingface_hub", "wandb", "mlflow", "trackio", "pynvml"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import jaxtrain
heavy = {"flax", "orbax", "tensorboardX", "torch", "grain", "tyro", "rich"} & set(sys.modules)
assert not heavy, heavy
assert not [m for m in sys.modules if m.startswith(("jaxtrain.run", "jaxtrain.planning"))]
assert all(hasattr(jaxtrain, name) for name in jaxtrain.__all__)
import experiments
names = [
    module.name
    for package in (jaxtrain, experiments)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    # The second is a PyTorch program, which its row imports when it runs.
    if not module.name.endswith(("__main__", ".torch_gpt"))
]
for name in names:
    importlib.import_module(name)
print(len(names), not (OPTIONAL & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "code",
    [
        "import jaxtrain.cli",
        "import experiments.gpt, jaxtrain.host.quiet; jaxtrain.host.quiet.start()",
    ],
)
def test_compilers_of_absent_chips_say_nothing(code):
    """Where NVIDIA's compiler is installed and no driver is; elsewhere there is nothing to say."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "TF_", "TPU"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_module_imports_without_optional_packages():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, none = done.stdout.split()
    assert int(count) > 50
    assert none == "True"


# Each floor may import what stands before it, at any place of a file. At the top of the package a
# file is a floor of its own.
FLOORS = """
host decisions tree jaxprs data loss sharding ops precision stages state layout compile optim flops
finetune models engines step methods experiment build planning run hf predict serve evaluate compare
landscape study cli __main__
"""
RUN_FLOORS = """
hook folder refusal membership launch checkpoints survive provenance receipts observe options
context trained hooks loop main replay verify parameter_server check_hosts
"""


@pytest.mark.parametrize(("root", "floors"), [("jaxtrain", FLOORS), ("jaxtrain.run", RUN_FLOORS)])
def test_every_import_points_down(root, floors):
    """No circle, no arrow up, and no two folders that need each other."""
    names = {module_name(file): file for file in (ROOT / "jaxtrain").rglob("*.py")}
    order = floors.split()
    count = 0
    for name in (name for name in names if name.startswith(root + ".")):
        for other in imported(names[name], names):
            here, there = floor(name, root), floor(other, root)
            if there is not None and here != there:
                assert order.index(there) < order.index(here), f"{name} imports {other}"
                count += 1
    assert count > 20


def test_no_two_files_import_each_other():
    names = {module_name(file): file for file in (ROOT / "jaxtrain").rglob("*.py")}
    imports = {name: imported(file, names) for name, file in names.items()}
    assert sum(map(len, imports.values())) > 200
    for name, others in imports.items():
        assert not [other for other in others - {name} if name in imports[other]], name


def module_name(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor(module, root):
    """The file or folder below ``root`` that a module is of, or None."""
    return module.removeprefix(root + ".").split(".")[0] if module.startswith(root + ".") else None


def imported(file, names):
    """The modules of the package whose names a file takes, in its functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names.keys()) or ({node.module} & names.keys())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names.keys()
    return found


# Lines of the package and the experiments, which a commit may raise by editing this number alone.
CEILING = 89_123


def test_the_house_does_not_grow_unseen():
    files = [*(ROOT / "jaxtrain").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= CEILING, f"{lines} lines: remove {lines - CEILING}, or raise CEILING on purpose"
