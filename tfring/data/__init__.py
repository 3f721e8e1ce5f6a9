"""Gives each replica its share of every global batch."""

from tfring.data.plan import share

__all__ = ["share"]
