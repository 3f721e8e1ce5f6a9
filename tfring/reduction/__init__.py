"""Packs gradients into few collectives, and unpacks the results."""
