"""jaxtrain: pure, sharded JAX train steps for data, tensor and pipeline parallelism.

The public names; everything else is importable from its module. ``import jaxtrain as jt``.
"""

# isort: off
import jaxtrain.quiet  # noqa: F401  before JAX is imported

# isort: on
from jaxtrain import optim
from jaxtrain.agreement import parity
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.experiment import Experiment
from jaxtrain.fit import FitResult, Hook, RunOptions, fit, train_loop
from jaxtrain.gradients import WeightedLoss
from jaxtrain.models.adapters import from_linen, from_nnx
from jaxtrain.optim import make_optimizer, schedules
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.parallel.pipeline import Stages, loss_from_stages, pipeline, pipeline_eval_step
from jaxtrain.parallel.placement import constrain, gather
from jaxtrain.parallel.sharding import LOGICAL_AXES, Rules, from_local_rows
from jaxtrain.parallel.stack import Stack
from jaxtrain.plan.planning import Plan, explain, plan
from jaxtrain.precision import Policy, float32_products
from jaxtrain.state import (
    TrainState,
    abstract_state,
    describe_sharding,
    gradient_shardings,
    init_state,
)
from jaxtrain.step import build_eval_step, build_train_step, build_update, scan_steps
from jaxtrain.survive.accidents import Diverged
from jaxtrain.survive.preemption import Preempted

__all__ = [
    "LOGICAL_AXES",
    "Checkpointer",
    "CompiledStep",
    "Diverged",
    "Experiment",
    "FitResult",
    "Hook",
    "Plan",
    "Policy",
    "Preempted",
    "Rules",
    "RunOptions",
    "Stack",
    "Stages",
    "TrainState",
    "WeightedLoss",
    "abstract_state",
    "build_eval_step",
    "build_train_step",
    "build_update",
    "compile_step",
    "constrain",
    "describe_sharding",
    "explain",
    "fit",
    "float32_products",
    "from_linen",
    "from_local_rows",
    "from_nnx",
    "gather",
    "gradient_shardings",
    "init_state",
    "loss_from_stages",
    "make_mesh",
    "make_optimizer",
    "optim",
    "parity",
    "pipeline",
    "pipeline_eval_step",
    "plan",
    "scan_steps",
    "schedules",
    "train_loop",
]
