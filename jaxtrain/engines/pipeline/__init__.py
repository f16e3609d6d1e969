"""Pipeline parallelism in one SPMD program: tick tables and the executor that runs them."""

from jaxtrain.engines.pipeline.executor import pipeline, pipeline_eval_step
from jaxtrain.engines.pipeline.tables import SCHEDULES, Table, make_table

__all__ = [
    "SCHEDULES",
    "Table",
    "make_table",
    "pipeline",
    "pipeline_eval_step",
]
