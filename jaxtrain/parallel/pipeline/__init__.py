"""Pipeline parallelism in one SPMD program: tick tables and the executor that runs them."""

from jaxtrain.parallel.pipeline.executor import pipeline, pipeline_eval_step
from jaxtrain.parallel.pipeline.stages import Stages, from_virtual, to_virtual, virtual_rules
from jaxtrain.parallel.pipeline.tables import SCHEDULES, Table, check_table, make_table

__all__ = [
    "SCHEDULES",
    "Stages",
    "Table",
    "check_table",
    "from_virtual",
    "make_table",
    "pipeline",
    "pipeline_eval_step",
    "to_virtual",
    "virtual_rules",
]
