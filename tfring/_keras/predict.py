"""`predict`: the outputs of all rows, in order, on every rank."""

from __future__ import annotations

import tensorflow as tf

from tfring import _tf, data
from tfring._keras import batch_shapes, status, trace
from tfring._keras.functions import graph_function, to_tensor, without_optionals
from tfring._keras.seam import entry_under_way
from tfring.cross_device_ops import values_of


class PredictFunction:
    """What `model.predict_function` is: elements of the distributed dataset in, outputs of all rows out.

    `predict` returns all rows in order on every rank; `predict_on_batch` the rows it was given.
    """

    def __init__(self, model, strategy):
        self._model = model
        self._strategy = strategy
        self._replicas = len(strategy.extended.worker_devices)
        eager = model.run_eagerly
        self._eager = eager
        self._rows_forgotten = False  # while a graph is made: static dimensions of outputs are not those of rows
        self._gathered = self._gathered_body if eager else graph_function(self._gathered_body)
        self._local = self._local_body if eager else graph_function(self._local_body)

    def __call__(self, batches):
        if entry_under_way("predict"):
            self._check_shapes(batches[0])
            with trace.step(self._strategy, "predict"), status.named():
                return self._gathered(batches, self._constants(batches[0]))
        [batch] = batches
        return self._local(tf.nest.map_structure(to_tensor, batch))

    def _check_shapes(self, batch):
        if isinstance(batch, data.Shares) and self._strategy.cluster.world_size > 1:
            rows = data.num_rows(_parts(batch)[0])
            if rows is not None:
                batch_shapes.check(self._model, self._strategy, int(rows) * self._strategy.num_replicas_in_sync)

    def _constants(self, batch):
        """Returns for each component whether it is a constant; None where numbers of rows stay static."""
        if self._eager or batch_shapes.fixed(self._model) or not isinstance(batch, data.Shares):
            return None
        rows = max(int(values_of(batch.rows[0])[0]), 1)
        return tuple(data.static_rows(component) not in (None, rows) for component in tf.nest.flatten(_parts(batch)[0]))

    def _run(self, inputs, rows=None):
        return self._strategy.run(self._on_replica, args=(inputs, rows))

    def _on_replica(self, element, rows):
        element, has_rows = data.one_row_at_least(without_optionals(element))
        if rows is not None:
            has_rows = rows > 0
        outputs = self._model.predict_step(element)
        if has_rows is None:
            return outputs
        return _map(lambda value: _no_rows_unless(has_rows, value, self._axis(value)), outputs)

    def _axis(self, value) -> int | None:
        """Returns the dimension of an output's rows: the first that is not static, where those of rows are not."""
        if not self._rows_forgotten or not isinstance(value, tf.Tensor) or not value.shape.rank:
            return 0
        return next((i for i, size in enumerate(value.shape) if size is None), None)

    def _on_worker(self, outputs):
        """This worker's rows, of its replicas in turn."""

        def joined(value):
            values = self._strategy.experimental_local_results(value)
            return _concatenated(values, self._axis(values[0]))

        return _map(joined, outputs)

    def _gathered_body(self, batches, constants):
        self._rows_forgotten = constants is not None
        steps = []
        for batch in batches:
            rows, told = None, None
            if isinstance(batch, data.Shares):
                rows = [values_of(n)[0] for n in batch.rows]
                told = status.before_step(self._strategy, rows, True, values_of(batch.fingerprint)[0])
                batch = _tf.distribute_utils.regroup(self._of_any_rows(_parts(batch), constants))
                rows = _tf.distribute_utils.regroup(tuple(rows))
            with tf.control_dependencies([] if told is None else status.why_not(told)):
                outputs = self._on_worker(self._run(batch, rows))
            if self._strategy.extended.control.world_size > 1:
                outputs = _map(lambda value: self._gather(value), outputs)
            steps.append(outputs)
        return _map(lambda *values: _concatenated(values), *steps)

    def _of_any_rows(self, parts, constants):
        """Forgets static numbers of rows, so that dimensions of outputs that are static are not of rows."""
        return parts if constants is None else tuple(data.forget_rows(part, constants) for part in parts)

    def _gather(self, value):
        """The rows of all workers, in order, of a dense, ragged or sparse tensor."""
        axis = self._axis(value)

        def gather(tensor):
            return self._strategy.extended.control_ops.gather_over_workers(tensor, axis or 0, name="predictions")

        if isinstance(value, tf.RaggedTensor):
            lengths = [gather(lengths) for lengths in value.nested_row_lengths()]
            return tf.RaggedTensor.from_nested_row_lengths(gather(value.flat_values), lengths, validate=False)
        if isinstance(value, tf.SparseTensor):
            shapes = gather(value.dense_shape[None])  # [workers, rank]
            before = tf.reduce_sum(shapes[: self._strategy.extended.control.rank, 0])
            indices = value.indices + tf.concat([[before], tf.zeros_like(value.dense_shape[1:])], 0)
            shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
            return tf.SparseTensor(gather(indices), gather(value.values), shape)
        return gather(value) if axis is not None else _one_for_all(gather(value[None]))

    def _local_body(self, batch):
        self._rows_forgotten = False
        parts = data.split_rows(batch, self._replicas)
        regrouped = _tf.distribute_utils.regroup(tuple(parts))
        return self._on_worker(self._run(regrouped))


def _parts(shares):
    """One element a replica. TensorFlow takes what its iterator yields for a value a replica."""
    return tf.nest.map_structure(lambda leaf: values_of(leaf)[0], shares.parts)


def _map(function, *structures):
    """Over tensors, ragged and sparse ones included."""
    return tf.nest.map_structure(function, *structures, expand_composites=False)


def _concatenated(values, axis=0):
    if len(values) == 1:
        return values[0]
    if axis is None:
        return _one_for_all(tf.stack(values))
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(axis, list(values), expand_nonconcat_dims=True)
    return tf.concat(values, axis)


def _one_for_all(values):
    """Returns the first of some values that have to be the same, but for their last bits."""
    same = tf.reduce_all(values == values[:1])
    if values.dtype.is_floating:
        size = tf.reduce_max(tf.abs(values))
        same |= tf.reduce_max(tf.abs(values - values[:1])) <= tf.cast(1e-5, values.dtype) * size
    check = tf.debugging.Assert(same, [status.OTHER_OUTPUTS])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(values[0])


def _no_rows_unless(has_rows, value, axis):
    """`value`, or its first 0 rows: what came of a row that was put in place of none."""
    if isinstance(value, tf.SparseTensor):
        rows = tf.where(has_rows, value.dense_shape[:1], 0)
        return tf.sparse.slice(value, tf.zeros_like(value.dense_shape), tf.concat([rows, value.dense_shape[1:]], 0))
    if isinstance(value, tf.RaggedTensor):
        return value[: tf.where(has_rows, value.nrows(), 0)]
    if value.shape.rank == 0 or axis is None:
        return value
    begin = (slice(None),) * axis
    return value[(*begin, slice(tf.where(has_rows, tf.shape(value, tf.int64)[axis], 0)))]
