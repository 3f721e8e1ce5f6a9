"""Checks that a stage computes from a microbatch, row for row, what one process computes from all rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring import partition, step
from tfring.errors import ConfigurationError

_log = logging.getLogger("tfring")


def refuse_combined_rows(compute: Callable[[Any], tuple[list, Any]], specs: Any, running: step.Step, name: str) -> None:
    """Traces a stage for any number of rows, in a graph that is not run.

    Args:
      compute: A function of tensors that returns the tensors that leave the stage, and its loss or None.
      specs: The specifications of the tensors that enter the stage, in any structure.
      running: The step of a microbatch.
      name: Name of the stage, for the user.

    Raises:
      ConfigurationError: If rows are combined in any other way than in a mean.
    """
    found: partition.Analysis | None = None

    def traced(given: Any, share: tf.Tensor) -> None:
        nonlocal found
        share = partition.declare(share, "share")
        own = step.Step(share, share > 0, running.parts, share)
        with partition.replica(0), step.running(own):
            outputs, loss = compute(partition.declare_batch(given))
            for number, output in enumerate(outputs):
                partition.expect(output, "rows", f"output {number} of {name}")
            if loss is not None:
                partition.expect(tf.reduce_sum(loss), "mean", "the loss")
        found = partition.analyze(tf.compat.v1.get_default_graph())

    tf.function(traced, autograph=False).get_concrete_function(specs, tf.TensorSpec([], tf.float64))
    assert found is not None
    do, may = partition.combined_rows(found)
    if do:
        raise ConfigurationError(
            f"A Pipeline computes {running.parts} parts of a batch one by one, but {name} combines the rows of all: "
            f"{do}. The result for some rows is not the result for all. Compute each row by itself and take means over "
            "rows, or make the Pipeline with num_microbatches=1 and data=1."
        )
    if may:
        _log.warning(
            "A Pipeline computes %d parts of a batch one by one, but %s may combine the rows of all: %s. If it does, "
            "the result differs from that of one process (docs/pipeline.md).",
            running.parts,
            name,
            may,
        )


def spec_of_any_rows(value: Any) -> Any:
    """Returns the specification of a component of a batch; that of a tensor has an unknown number of rows."""
    if value is None:
        return None
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
