"""Makes a step that replicas run on their own rows compute the results of one process for the whole batch.

A traced step is a graph. Each tensor in it is Replicate, Shard, Partial or none of these, up to a scale (`types`).
Rules for families of operations (`rules`) derive this from the inputs. If a rule needs other inputs, they are converted
(`conversions`), and the graph is edited (`edit`). This package does not depend on Keras.
"""

from tfring.partition.analysis import Analysis, Finding, analyze
from tfring.partition.edit import Exchange
from tfring.partition.edit import apply as apply_edits
from tfring.partition.marks import (
    declare,
    declare_batch,
    declare_gradient,
    declare_looked_up,
    expect,
    expect_gradient,
    expect_upstream,
)
from tfring.partition.replicas import is_noted, own, replica
from tfring.partition.report import combined_rows, text_of_gathered, text_of_whole

__all__ = [
    "Analysis",
    "Exchange",
    "Finding",
    "analyze",
    "apply_edits",
    "combined_rows",
    "declare",
    "declare_batch",
    "declare_gradient",
    "declare_looked_up",
    "expect",
    "expect_gradient",
    "expect_upstream",
    "is_noted",
    "own",
    "replica",
    "text_of_gathered",
    "text_of_whole",
]
