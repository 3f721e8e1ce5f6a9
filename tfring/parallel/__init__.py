"""Models built from other models, for clusters in which a worker does not hold all of a model."""

from tfring.parallel.costs import measure_layers
from tfring.parallel.embeddings import shard_embeddings
from tfring.parallel.pipeline import Pipeline
from tfring.reduction.pipeline_schedule import Schedule, plan_schedule
from tfring.reduction.stage_plan import LayerCost, PlannedStage, StagePlan, plan_stages
from tfring.reduction.table_plan import PlannedTable, TablePlan, plan_tables

__all__ = [
    "LayerCost",
    "Pipeline",
    "PlannedStage",
    "PlannedTable",
    "Schedule",
    "StagePlan",
    "TablePlan",
    "measure_layers",
    "plan_schedule",
    "plan_stages",
    "plan_tables",
    "shard_embeddings",
]
