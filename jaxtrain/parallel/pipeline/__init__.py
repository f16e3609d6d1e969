"""Pipeline parallelism in one SPMD program: tick tables and the executor that runs them."""

from jaxtrain.parallel.pipeline.executor import pipeline, pipeline_eval_step
from jaxtrain.parallel.pipeline.stages import Stages, loss_from_stages
from jaxtrain.parallel.pipeline.tables import SCHEDULES, Table, make_table

__all__ = [
    "SCHEDULES",
    "Stages",
    "Table",
    "loss_from_stages",
    "make_table",
    "pipeline",
    "pipeline_eval_step",
]
