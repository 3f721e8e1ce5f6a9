"""What an operation on a replica's values gives, for each type of operation: a table by family."""

from tfring.partition.rules import (  # noqa: F401  each adds its rules to the table
    calls,
    contractions,
    elementwise,
    indexing,
    layouts,
    lists,
    reductions,
    rows,
    sources,
)
from tfring.partition.rules.table import RULES, Inexact, NoRule

__all__ = ["RULES", "Inexact", "NoRule"]
