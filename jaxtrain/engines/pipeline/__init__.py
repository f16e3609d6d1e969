"""Pipeline parallelism in one SPMD program: tick tables and the executor that runs them."""

from jaxtrain.engines.pipeline.executor import pipeline as pipeline
from jaxtrain.engines.pipeline.executor import pipeline_eval_step as pipeline_eval_step
from jaxtrain.engines.pipeline.tables import SCHEDULES as SCHEDULES
from jaxtrain.engines.pipeline.tables import Table as Table
from jaxtrain.engines.pipeline.tables import make_table as make_table
