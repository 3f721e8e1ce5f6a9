"""Runs `predict`: outputs of all rows, in order, on every rank, gathered after the loop if no callback sees a batch.

```
rank 0   batch 0: rows 0 1 ─► batch 1: rows 4 5 ─► ...   ┐ same batches? ─► sizes ─► one collective an output
rank 1   batch 0: rows 2 3 ─► batch 1: rows 6 7 ─► ...   ┘                           ─► 0 1 2 3 4 5 6 7 on every rank
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import convert_to_np_if_not_ragged, potentially_ragged_concat

from tfring import _tf, partition
from tfring._keras import batch_shapes, configuration, exactness, whole
from tfring._keras.seam import entry_under_way
from tfring.cross_device_ops import values_of
from tfring.data.rows import forget_rows, has_static_rows, num_rows, pad_empty_batch, relax_static_rows, static_rows
from tfring.data.shares import Shares
from tfring.errors import Reason
from tfring.runtime import Ring
from tfring.setting import setting
from tfring.step import Way, status, trace
from tfring.step.functions import between_collectives, graph_function, to_tensor, without_optionals

_under_way: list[PredictFunction] = []  # running loops of `predict`, innermost last


def wrap_predict_iterator(iterator: Any, dataset: Any) -> Any:
    """Returns the iterator of a step; in `predict`, one that draws as waiting outputs require.

    Args:
      iterator: The iterator of a distributed dataset.
      dataset: The distributed dataset.
    """
    has_shares = isinstance(_tf.element_spec(dataset), Shares)
    is_drawn_here = _under_way and entry_under_way("predict") and (has_shares or _under_way[-1].is_alone)
    return _PredictIterator(iterator, _under_way[-1]) if is_drawn_here else iterator


class _Uncut(NamedTuple):
    """A batch as this worker drew it, and the tf.function that cuts it and computes the outputs of its rows."""

    function: Any
    tensors: list


class _PredictIterator:
    """The iterator of a `predict`. Ranks ask each other before a batch, except before one with outputs that wait."""

    def __init__(self, iterator: Any, function: PredictFunction):
        self._iterator = iterator
        self._function = function
        self._of_uncut = function.of_uncut(iterator)

    def __next__(self) -> Any:
        function = self._function
        try:
            if self._of_uncut is not None and function.waits:
                return _Uncut(self._of_uncut, _tf.tensors_of_next(self._iterator))
            if function.has_begun or function.is_alone:
                return _tf.next_of_worker(self._iterator)
            return next(self._iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if not function.has_begun:
                function.end_with_others()
            raise


class PredictFunction:
    """Implements `model.predict_function`: elements of the distributed dataset in, outputs of all rows out.

    `predict` returns all rows in order on every rank; `predict_on_batch` returns the rows it was given.

    Args:
      model: The Keras model.
      ring: The workers.
    """

    def __init__(self, model: Any, ring: Ring):
        self._model = model
        self._ring = ring
        self._replicas = len(ring.devices)
        self._way: Way | None = None  # not known before the first batch
        self._rows_forgotten = False  # while a graph is made: static dimensions of outputs are not those of rows
        self.is_alone = ring.is_alone
        self._can_wait = ring.control.world_size > 1
        self._kept = _Kept(waits=False)  # of the running loop
        self._make()

    def _make(self) -> None:
        """Makes functions that have not been traced."""
        made = (lambda body: body) if self._model.run_eagerly else graph_function
        self._of_all = made(self._of_all_body)
        self._of_worker = made(self._of_worker_body)
        self._of_known_shares = made(self._of_shares)  # a graph for each batch, which is edited
        self._of_batch = made(self._of_batch_body)
        self._of_uncut: dict = {}  # functions, by how they cut and what they cut
        self._concrete: dict = {}  # the concrete functions of these, which are called

    def __call__(self, batches: Sequence[Any]) -> Any:
        if not entry_under_way("predict"):
            [batch] = batches
            if self._ring.updater is not None:
                self._ring.updater.before_evaluation(self._model)
            return self._of_batch(tf.nest.map_structure(to_tensor, batch))
        with trace.step(self._ring, "predict"), status.named():
            if self.waits:
                return self._keep(batches)
            self._check_shapes(batches[0])
            return self._call_or_retrace(lambda: self._of_all(batches, self._constants(batches[0])))

    def _call_or_retrace(self, compute: Callable[[], Any]) -> Any:
        """Returns the result of a function that may be traced. It is traced again if rows cannot be divided."""
        try:
            return compute()
        except exactness.WholeBatchRequired as refused:
            exactness.log_whole_batch_step(self._ring, self._model, "predict_step", refused.reason)
            self._way = Way.WHOLE
            self._make()
        return compute()

    @property
    def _eager(self) -> bool:
        """Returns True if no graph is made. In a graph, static dimensions would tell rows from other dimensions."""
        return self._model.run_eagerly or tf.config.functions_run_eagerly()

    @property
    def waits(self) -> bool:
        """Returns True if outputs of the next batch may wait for the end of the loop."""
        return self._can_wait and self._kept.waits

    @property
    def has_begun(self) -> bool:
        """Returns True if there are outputs that wait."""
        return self.waits and bool(self._kept.outputs)

    def end_with_others(self) -> None:
        """Tells the other ranks, which report before each batch what they drew, that this rank has no batch.

        Raises:
          MismatchError: If another rank has one. Every rank raises it.
        """
        if self.is_alone:
            return
        nothing = [tf.constant(0, tf.int64)] * self._replicas
        with status.named():
            batch_status = status.before_step(self._ring, nothing, False)
            if batch_status.has_batch:
                status.why_not(batch_status)

    @contextlib.contextmanager
    def loop(self, *, waits: bool) -> Iterator[Callable[[Any], Any]]:
        """Takes part in a loop over batches.

        Args:
          waits: Whether to keep the outputs of this worker's rows until the end of the loop.

        Yields:
          A function that turns what the loop returns into the outputs of all rows. All ranks call it after the loop.
        """
        before, self._kept = self._kept, _Kept(waits=waits)
        kept = self._kept
        _under_way.append(self)

        def of_all_rows(results: Any) -> Any:
            with status.named():
                return kept.exchanged(self._ring) if kept.outputs else results

        try:
            yield of_all_rows
        finally:
            _under_way.pop()
            self._kept = before

    def of_uncut(self, iterator: Any) -> Any:
        """Returns a function of what an iterator draws, which also cuts it; None if rows are cut beforehand.

        The function returns the outputs of this worker's rows, what is known of them, and the batch's fingerprint.
        """
        if not _tf.computes_after_draw(iterator) or self._eager or batch_shapes.fixed(self._model):
            return None

        def of_shares(batch: Shares) -> tuple:
            self._rows_forgotten = True
            outputs = self._of_shares(batch, None)
            return outputs, self._known(outputs), batch.fingerprint

        def traced() -> Any:
            function = _tf.function_of_next(iterator, of_shares, self._of_uncut)
            if function not in self._concrete:
                self._concrete[function] = _tf.concrete(function)
            return self._concrete[function]

        kept: list = []  # the functions at that time, and the one of this iterator

        def compute(*tensors: Any) -> Any:
            if not kept or kept[0] is not self._of_uncut:
                kept[:] = self._of_uncut, traced()
            return kept[1](*tensors)

        return lambda *tensors: self._call_or_retrace(lambda: compute(*tensors))  # it is traced by its first call

    def _of_worker_rows(self, batch: Any) -> tuple:
        """Returns the outputs of this worker's rows of a batch, what is known of them, and the batch's fingerprint."""
        if isinstance(batch, _Uncut):
            return batch.function(*batch.tensors)
        self._check_shapes(batch)
        constants = self._constants(batch)
        outputs, known = self._call_or_retrace(lambda: self._of_worker(batch, constants))
        return outputs, known, values_of(batch.fingerprint)[0]

    def _keep(self, batches: Sequence[Any]) -> Any:
        """Computes and keeps the outputs of this worker; returns nothing for Keras' loop to concatenate."""
        kept = self._kept
        steps, known, prints = zip(*map(self._of_worker_rows, batches), strict=True)
        axes, are_kept = [], True
        if not kept.outputs:  # only for the first batch, so that all ranks decide alike
            numbers = [int(digest) for digest in prints]
            status.compare_passes(self._ring, len(numbers), configuration.number(numbers))
            axes, are_dense_rows = known[0].numpy().T.tolist()
            self._can_wait = all(are_dense_rows)
            are_kept = self._can_wait and all(numbers)
        if are_kept:
            kept.outputs += steps
            kept.prints += prints
            return ()
        # Outputs other than dense rows are gathered as they come; so are each rank's own rows, as one may have more.
        kept.waits = False
        places = iter([None if axis < 0 else axis for axis in axes] * len(steps))
        gathered = [_map(lambda value: self._gather(value, next(places)), outputs) for outputs in steps]
        return _map(lambda *values: _concatenated(values), *gathered)

    def _check_shapes(self, batch: Any) -> None:
        if isinstance(batch, Shares) and self._ring.cluster.world_size > 1:
            rows = num_rows(_parts(batch)[0])
            if rows is not None and not tf.is_tensor(rows):
                batch_shapes.check(self._model, rows * self._ring.num_replicas)

    def _constants(self, batch: Any) -> tuple | None:
        """Returns for each component whether it is a constant; None if numbers of rows stay static."""
        if self._eager or batch_shapes.fixed(self._model) or not isinstance(batch, Shares):
            return None
        rows = max(int(values_of(batch.rows[0])[0]), 1)
        return tuple(static_rows(component) not in (None, rows) for component in tf.nest.flatten(_parts(batch)[0]))

    # -- one replica -----------------------------------------------------------------------------------------------

    def _run(self, inputs: Any, rows: Any, rows_of_all: tf.Tensor | None = None) -> Any:
        numbers = _tf.distribute_utils.regroup(tuple(range(self._replicas)))

        def on_replica(number: int, element: Any, rows: Any) -> Any:
            with contextlib.nullcontext() if self.is_alone else partition.replica(number):
                return self._on_replica(element, rows)

        with exactness.declared_layers(self._model, self._way):
            outputs = self._ring.strategy.run(on_replica, args=(numbers, inputs, rows))
        if self._way is Way.EDITED:
            self._edit(values_of(rows), rows_of_all)
        return outputs

    def _edit(self, rows: Sequence[tf.Tensor], rows_of_all: tf.Tensor | None) -> None:
        """Edits the graph of a step; refuses to count rows after an exchange of the model."""
        control: Any = self._ring.control

        def counted() -> tf.Tensor:
            if rows_of_all is not None:
                return rows_of_all
            if control.ordered_ops():
                raise RuntimeError("rows are counted after what the model exchanges")
            return control.gather_equal(tf.stack(rows), name="rows of the batch")

        exactness.edit_step(self._ring, self._model, "predict_step", counted)

    def _on_replica(self, element: Any, rows: Any) -> Any:
        element, has_rows = pad_empty_batch(without_optionals(element))
        if rows is not None:
            has_rows = rows > 0
        is_edited = self._way is Way.EDITED
        if is_edited:
            if has_static_rows(element):
                element = relax_static_rows(element)
            element = partition.declare_batch(element)
        outputs = between_collectives(self._model, "predict", self._ring)(element)
        if is_edited:
            outputs = exactness.expect_outputs(outputs)
        if has_rows is None:
            return outputs
        return _map(lambda value: _drop_padding_row(has_rows, value, self._axis(value)), outputs)

    def _axis(self, value: Any) -> int | None:
        """Returns the dimension of an output's rows: the first that is not static, if those of rows are not.

        A scalar has none: it is one number per batch, the same on all replicas.
        """
        if isinstance(value, tf.Tensor) and value.shape.rank == 0:
            return None
        if not self._rows_forgotten or not isinstance(value, tf.Tensor) or value.shape.rank is None:
            return 0
        return next((i for i, size in enumerate(value.shape) if size is None), None)

    # -- one worker ------------------------------------------------------------------------------------------------

    def _on_worker(self, outputs: Any) -> Any:
        """Returns the rows of this worker: those of its replicas, one after another."""

        def joined(value: Any) -> Any:
            values = self._ring.strategy.experimental_local_results(value)
            return _concatenated(values, self._axis(values[0]))

        return _map(joined, outputs)

    def _of_shares(self, batch: Shares, constants: tuple | None, rows_of_all: tf.Tensor | None = None) -> Any:
        trace.graph_of_step(self._ring)
        rows = tuple(values_of(n)[0] for n in batch.rows)
        parts = _parts(batch)
        if self._way is None:
            self._way, _ = exactness.decide_way(self._ring, self._model)
        if self._way is Way.WHOLE:
            parts = tuple(whole.batch(self._ring, parts, rows))
            rows = tuple(tf.unstack(tf.cast(whole.shares(self._ring), tf.int64)))
        if constants is not None:  # static numbers of rows are forgotten: no static dimension of an output is rows
            parts = tuple(forget_rows(part, constants) for part in parts)
        regroup = _tf.distribute_utils.regroup
        return self._on_worker(self._run(regroup(parts), regroup(rows), rows_of_all))

    def _of_worker_body(self, batch: Shares, constants: tuple | None) -> tuple[Any, tf.Tensor]:
        """Returns the outputs of this worker's rows of a batch, and what is known of them."""
        self._rows_forgotten = constants is not None
        outputs = self._of_shares(batch, constants)
        return outputs, self._known(outputs)

    def _known(self, outputs: Any) -> tf.Tensor:
        """Returns what is known of each output while it is traced.

        The result is `[outputs, 2]`: the axis of rows, -1 if there is none, and whether the output is one dense row for
        each row.
        """
        known = []
        for value in _flat(outputs):
            axis = self._axis(value)
            is_dense = isinstance(value, tf.Tensor) and value.dtype != tf.string and bool(value.shape.rank)
            known.append([-1 if axis is None else axis, int(is_dense and axis == 0)])
        return tf.constant(known, tf.int32, [len(known), 2])

    def _of_batch_body(self, batch: Any) -> Any:
        """Returns the outputs of rows that this process was given: the first replica computes all of them."""
        self._rows_forgotten = False
        rows = [tf.constant(int(replica == 0)) for replica in range(self._replicas)]
        regroup = _tf.distribute_utils.regroup
        with setting(self, "_way", Way.WHOLE):
            return self._on_worker(self._run(regroup((batch,) * self._replicas), regroup(tuple(rows))))

    # -- all workers -----------------------------------------------------------------------------------------------

    def _of_all_body(self, batches: Sequence[Any], constants: tuple | None) -> Any:
        trace.graph_of_step(self._ring)
        self._rows_forgotten = constants is not None
        steps = []
        for batch in batches:
            if not isinstance(batch, Shares):
                batch = self._as_shares(batch)
            rows = [values_of(n)[0] for n in batch.rows]
            batch_status = status.before_step(self._ring, rows, True, values_of(batch.fingerprint)[0])
            with tf.control_dependencies(status.why_not(batch_status)):
                outputs = self._of_known_shares(batch, constants, batch_status.rows)
                if self._ring.control.world_size > 1:  # nothing is sent if there is no step
                    outputs = _map(lambda value: self._gather(value, self._axis(value)), outputs)
            steps.append(outputs)
        return _map(lambda *values: _concatenated(values), *steps)

    def _as_shares(self, batch: Any) -> Shares:
        """Returns what a dataset distributed by the user gives to each replica of this worker."""
        parts = tuple(
            tf.nest.map_structure(lambda leaf, i=i: values_of(leaf)[i], batch) for i in range(self._replicas)
        )
        rows = [num_rows(part) for part in parts]
        counted = tuple(tf.cast(1 if n is None else n, tf.int64) for n in rows)
        return Shares(parts, counted, tf.constant(0, tf.int64))

    def _gather(self, value: Any, axis: int | None) -> Any:
        """Returns the rows of all workers, in order, of a dense, ragged or sparse tensor."""
        def gather(tensor: tf.Tensor) -> tf.Tensor:
            return self._ring.control_ops.gather_over_workers(tensor, axis or 0, name="predictions")

        if isinstance(value, tf.Tensor) and axis is None:
            return _common_value(gather(value[None]))
        return whole.of_workers(value, gather, self._ring.control.rank)


class _Kept:
    """The outputs of this worker's rows, one structure of dense tensors per batch, and the batches' fingerprints."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.outputs: list = []
        self.prints: list[tf.Tensor] = []

    def exchanged(self, ring: Ring) -> Any:
        """Returns the outputs of all rows, ordered by batch and within a batch by rank, as Keras returns them.

        Raises:
          MismatchError: If ranks drew different batches, or different numbers of them. Every rank raises it.
        """
        prints = [int(digest) for digest in self.prints]
        status.compare_passes(ring, len(self.outputs), configuration.number(prints))
        leaves = [_flat(outputs) for outputs in self.outputs]
        sizes = tf.constant([[leaf.shape[0] for leaf in batch] for batch in leaves], tf.int64)
        everyone = ring.control.gather_equal(sizes, name="sizes of predictions").numpy()
        sizes_of_ranks = everyone.reshape(-1, *sizes.shape)  # [ranks, batches, outputs]
        results = [
            _gather_output(ring, [batch[i] for batch in leaves], sizes_of_ranks[:, :, i])
            for i in range(len(leaves[0]))
        ]
        return tf.nest.pack_sequence_as(self.outputs[0], results)


def _gather_output(ring: Ring, values: list[tf.Tensor], sizes: np.ndarray) -> Any:
    """Returns one output of all batches.

    Args:
      ring: The workers.
      values: This worker's rows, one tensor per batch.
      sizes: `[ranks, batches]`, the numbers of rows.
    """
    by_shape: dict = {}  # batches with rows of different shapes are sent separately
    for number, value in enumerate(values):
        by_shape.setdefault(tuple(value.shape[1:]), []).append(number)
    batches: dict[int, list] = {}  # each as the rows of rank 0, of rank 1, ...
    for numbers in by_shape.values():
        mine = values[numbers[0]] if len(numbers) == 1 else tf.concat([values[n] for n in numbers], 0)
        gathered = ring.control_ops.gather_over_workers(mine, 0, name="predictions").numpy()
        ends = np.cumsum(sizes[:, numbers]).reshape(len(sizes), -1)
        for place, number in enumerate(numbers):
            pairs = zip(ends[:, place], sizes[:, number], strict=True)
            batches[number] = [gathered[end - size : end] for end, size in pairs]
    if len(by_shape) == 1:
        return np.concatenate([rows for number in range(len(values)) for rows in batches[number]])
    joined = [tf.constant(np.concatenate(batches[number])) for number in range(len(values))]
    return convert_to_np_if_not_ragged(potentially_ragged_concat(joined))


def _parts(shares: Shares) -> tuple:
    """Returns one element per replica. TensorFlow treats what its iterator yields as one value per replica."""
    return tf.nest.map_structure(lambda leaf: values_of(leaf)[0], shares.parts)


def _map(function: Callable, *structures: Any) -> Any:
    """Maps over tensors, ragged and sparse ones included."""
    return tf.nest.map_structure(function, *structures, expand_composites=False)


def _flat(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=False)


def _concatenated(values: Sequence[Any], axis: int | None = 0) -> Any:
    if axis is None and len(values) > 1:
        return _common_value(tf.stack(values))
    return whole.concatenated(values, axis or 0)


def _common_value(values: tf.Tensor) -> tf.Tensor:
    """Returns the first of several values that must be the same, except for their last bits."""
    if values.dtype.is_floating:
        is_same = (values == values[:1]) | (tf.math.is_nan(values) & tf.math.is_nan(values[:1]))
        size = tf.reduce_max(tf.abs(values))
        is_same |= tf.abs(values - values[:1]) <= tf.cast(1e-5, values.dtype) * size
    else:
        is_same = values == values[:1]
    same = tf.reduce_all(is_same)
    with tf.control_dependencies(status.refuse({Reason.OTHER_OUTPUTS: ~same})):
        return tf.identity(values[0])


def _drop_padding_row(has_rows: tf.Tensor, value: Any, axis: int | None) -> Any:
    """Returns `value`, or none of its rows if they are those of a padding row."""
    if isinstance(value, tf.SparseTensor):
        rows = tf.where(has_rows, value.dense_shape[:1], 0)
        return tf.sparse.slice(value, tf.zeros_like(value.dense_shape), tf.concat([rows, value.dense_shape[1:]], 0))
    if isinstance(value, tf.RaggedTensor):
        return value[: tf.where(has_rows, value.nrows(), 0)]
    if value.shape.rank == 0 or axis is None:
        return value
    begin = (slice(None),) * axis
    return value[(*begin, slice(tf.where(has_rows, tf.shape(value, tf.int64)[axis], 0)))]
