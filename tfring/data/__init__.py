"""Gives each replica its share of every global batch."""

from tfring.data.pipeline import share

__all__ = ["share"]
