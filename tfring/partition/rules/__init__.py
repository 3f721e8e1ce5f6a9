"""Rules: the placement of an operation's results from that of its inputs, by type of operation."""

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
from tfring.partition.rules.sources import DRAWS, SHUFFLES
from tfring.partition.rules.table import RULES, NoRule

__all__ = ["DRAWS", "RULES", "SHUFFLES", "NoRule"]
