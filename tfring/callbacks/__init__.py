"""Callbacks that back up training, detect values that are not finite, warm up the learning rate, and log speed."""

from tfring.callbacks.backup import Backup
from tfring.callbacks.check_finite import CheckFinite
from tfring.callbacks.chief_only import chief_only
from tfring.callbacks.throughput import Throughput
from tfring.callbacks.warm_up import WarmUp

__all__ = ["Backup", "CheckFinite", "Throughput", "WarmUp", "chief_only"]
