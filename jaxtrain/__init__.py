"""jaxtrain: pure, sharded JAX train steps for data, tensor and pipeline parallelism.

The public names; everything else is importable from its module. ``import jaxtrain as jt``.
"""

# isort: off
import jaxtrain.host.quiet  # noqa: F401  before JAX is imported

# isort: on
import importlib
from typing import Any

from jaxtrain import optim
from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.engines.pipeline import pipeline, pipeline_eval_step
from jaxtrain.jaxprs import float32_products
from jaxtrain.loss import Last, Max, Sum, WeightedLoss, row_wise
from jaxtrain.optim import averaged, make_optimizer, schedules
from jaxtrain.precision import Policy
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.sharding.placement import constrain, gather
from jaxtrain.sharding.rules import LOGICAL_AXES, Rules, from_local_rows
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages
from jaxtrain.state import (
    TrainState,
    abstract_state,
    describe_sharding,
    gradient_shardings,
    init_state,
)
from jaxtrain.step import build_eval_step, build_train_step, build_update, scan_steps

__version__ = "0.1.0"

# What a step does not need is imported when it is first asked for.
_LAZY = {
    "Checkpointer": "run.checkpoints.checkpointer",
    "Config": "run.main",
    "Data": "experiment",
    "Diverged": "run.survive.diagnosis",
    "Engine": "engines.plain",
    "Experiment": "experiment",
    "FitResult": "run.loop",
    "Hook": "run.hook",
    "Layout": "layout",
    "Metadata": "experiment",
    "Method": "methods.method",
    "Plan": "planning.report",
    "Preempted": "run.survive.preemption",
    "RunOptions": "run.options",
    "Task": "experiment",
    "explain": "planning.ahead_of_time",
    "first_difference": "compare.difference",
    "fit": "run.loop",
    "from_linen": "models.adapters",
    "from_nnx": "models.adapters",
    "main": "run.main",
    "parity": "compare.parity",
    "plan": "planning.ahead_of_time",
    "train_loop": "run.loop",
}

__all__ = [
    "LOGICAL_AXES",
    "CompiledStep",
    "Last",
    "Max",
    "Policy",
    "Rules",
    "Stack",
    "Stages",
    "Sum",
    "TrainState",
    "WeightedLoss",
    "abstract_state",
    "averaged",
    "build_eval_step",
    "build_train_step",
    "build_update",
    "compile_step",
    "constrain",
    "describe_sharding",
    "float32_products",
    "from_local_rows",
    "gather",
    "gradient_shardings",
    "init_state",
    "loss_from_stages",
    "make_mesh",
    "make_optimizer",
    "optim",
    "pipeline",
    "pipeline_eval_step",
    "row_wise",
    "scan_steps",
    "schedules",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxtrain.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
