"""Everything imports where no accelerator's package, and no optional one, is installed."""

import ast
import collections
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

CODE = """
import importlib, pkgutil, sys

OPTIONAL = {"libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins", "gcsfs"}
OPTIONAL |= {"kubernetes", "mpi4py", "tokenizers", "pyarrow", "sklearn", "matplotlib"}
OPTIONAL |= {"torch", "huggingface_hub", "wandb", "mlflow", "trackio", "pynvml"}

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


def test_dependencies_of_the_package_point_one_way():
    """No two files import each other as they are loaded, and no two folders need each other."""
    names = {module_name(file): file for file in (ROOT / "jaxtrain").rglob("*.py")}
    imports = {name: imported(file, names) for name, file in names.items()}
    assert sum(map(len, imports.values())) > 200
    needs = collections.defaultdict(set)
    for name, others in imports.items():
        assert not [other for other in others if name in imports[other]], name
        needs[folder_name(name)] |= {folder_name(other) for other in others}
    # What lies at the top is below some folders and above others.
    pairs = itertools.combinations(needs.keys() - {""}, 2)
    assert not [(a, b) for a, b in pairs if b in needs[a] and a in needs[b]]


def module_name(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_name(module):
    name = [*module.split("."), ""][1]
    return name if (ROOT / "jaxtrain" / name).is_dir() else ""


def imported(file, names):
    """The modules of the package whose names a file takes, outside of its functions."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names.keys()) or ({node.module} & names.keys())
    return found
