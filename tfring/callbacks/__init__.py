"""Callbacks for training that is interrupted, that goes wrong, or whose speed is asked for."""

from tfring.callbacks.backup import Backup
from tfring.callbacks.check_finite import CheckFinite
from tfring.callbacks.chief_only import chief_only
from tfring.callbacks.throughput import Throughput
from tfring.callbacks.warm_up import WarmUp

__all__ = ["Backup", "CheckFinite", "Throughput", "WarmUp", "chief_only"]
