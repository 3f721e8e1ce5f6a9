"""Finds what of a step, run by replicas on their own rows, is not what one process computes from the whole batch.

A traced step is a graph. Each tensor in it is Replicate, Shard, Partial or none of these, up to a scale (`types`).
Rules by family of operations (`rules`) say which, from what the inputs are. Knows no Keras, and changes nothing.
"""

from tfring.partition.analysis import Finding, analyze
from tfring.partition.marks import declare, declare_batch, declare_gradient, expect, expect_gradient, update
from tfring.partition.report import is_known, text

__all__ = [
    "Finding",
    "analyze",
    "declare",
    "declare_batch",
    "declare_gradient",
    "expect",
    "expect_gradient",
    "is_known",
    "text",
    "update",
]
