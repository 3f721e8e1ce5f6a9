"""Callbacks for training that is interrupted, and for training that goes wrong."""

from tfring.callbacks.backup import Backup
from tfring.callbacks.check_finite import CheckFinite
from tfring.callbacks.warm_up import WarmUp

__all__ = ["Backup", "CheckFinite", "WarmUp"]
