"""Batches of arrays that all ranks hold: each worker reads its own rows of them, in place.

```
seed ─► indices of a pass ─► indices of a batch ─► this worker's ─► its rows of each array      in the step
                                     └─► fingerprint
```
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfring import _tf
from tfring.data.rows import spec_of_any_rows
from tfring.ring import library, ops

_LEAST_BYTES = 1 << 20  # size of the smallest array that is read in place; TensorFlow copies smaller ones
_ALIGNMENT = 64  # bytes, for memory that TensorFlow shares


class InPlace(NamedTuple):
    """A NumPy array as tensors that share its memory, for `ops.gather_rows`.

    Attributes:
      head: A copy of the elements before the first aligned address, less than 64 bytes.
      body: All elements after them, in the array's own memory.
      like: A tensor of the array's shape, except that the first dimension is 0.
    """

    head: tf.Tensor
    body: tf.Tensor
    like: tf.Tensor

    def rows(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns the rows at int64 indices `[n]`."""
        return ops.gather_rows(self.head, self.body, self.like, indices)


def in_place(array: np.ndarray) -> InPlace | np.ndarray:
    """Returns tensors that share the memory of an array; the array itself if it is small or cannot be shared.

    TensorFlow would copy it twice at each call of `fit`. An array that is not in C order is copied once.
    """
    plain = array.dtype.kind in "biuf" and array.dtype.isnative and array.dtype.itemsize <= 8
    if not plain or array.nbytes < _LEAST_BYTES or not array.ndim or not library.OPS.exists():
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    head = -flat.ctypes.data % _ALIGNMENT // flat.itemsize
    return InPlace(tf.constant(flat[:head]), _tf.shared_tensor(flat[head:]), tf.constant(array[:0]))


class ArrayBatches:
    """The batches of arrays, in the same order on all ranks.

    Args:
      of_pass: `of_pass(number)` returns int64 `[batches, batch_size]`: the row indices of each batch of a pass, padded
        with -1 if a batch has fewer.
      drawn: Returns the dataset of the row indices of each batch, for any number of passes.
      arrays: The arrays, in any structure.
      take: `take(arrays, indices)` returns the rows of a batch. Hashable: a function traced with one is reused for an
        equal one.
      options: `tf.data.Options` of the batches.
      cardinality: Number of batches.
    """

    def __init__(
        self,
        of_pass: Callable[[int], np.ndarray],
        drawn: Callable[[], tf.data.Dataset],
        arrays: Any,
        take: Callable[[Any, tf.Tensor], Any],
        options: tf.data.Options,
        cardinality: int,
    ) -> None:
        self.take, self._arrays = take, arrays
        self._of_pass, self._drawn, self._num_passes = of_pass, drawn, itertools.count()
        self._dataset_options, self._cardinality = options, cardinality

    def cardinality(self) -> int:
        """Returns the number of batches."""
        return self._cardinality

    def options(self) -> tf.data.Options:
        """Returns the options of the batches."""
        return self._dataset_options

    def full(self) -> tf.data.Dataset:
        """Returns the dataset of batches of all rows."""
        dataset = mapped(beside(self._arrays, self._drawn()), _All(self.take), num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._cardinality))
        return dataset.with_options(self._dataset_options).prefetch(tf.data.AUTOTUNE)

    def next_pass(self) -> tf.data.Dataset:
        """Returns the dataset of `(indices, arrays)` of the next pass, the input of `shares.GatherRows`."""
        indices = tf.data.Dataset.from_tensor_slices(self._of_pass(next(self._num_passes)))
        return tf.data.Dataset.zip((indices, self._repeated)).with_options(self._dataset_options)

    def spec(self) -> Any:
        """Returns the spec of the batches, with any number of rows."""
        spec = tf.data.Dataset.from_tensors(self.take(self._arrays, tf.zeros([0], tf.int64))).element_spec
        return spec_of_any_rows(spec, [False] * len(tf.nest.flatten(spec)))

    @functools.cached_property
    def _repeated(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(self._arrays).repeat()


def beside(arrays: Any, indices: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of `(indices, arrays)`. Each element holds the arrays, which are not copied.

    Rows are thus gathered where an element is drawn. A separate function in the pipeline would cost milliseconds at the
    beginning of each pass.
    """
    return tf.data.Dataset.zip((indices, tf.data.Dataset.from_tensors(arrays).repeat()))


@dataclasses.dataclass(frozen=True)
class _All:
    """Takes all rows of a batch."""

    take: Callable[[Any, tf.Tensor], Any]

    def __call__(self, indices: tf.Tensor, arrays: Any) -> Any:
        return self.take(arrays, indices[: tf.reduce_sum(tf.cast(indices >= 0, tf.int64))])


def rows_of_tensors(tensors: Any, indices: tf.Tensor) -> Any:
    """Returns rows of the tensors in a structure."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), tensors)


_functions: dict = {}  # traced functions, by the function and the specs of its arguments


def mapped(
    dataset: tf.data.Dataset, function: Callable[..., Any], num_parallel_calls: int | None = None
) -> tf.data.Dataset:
    """Returns `dataset.map(function)`, traced once for all datasets whose elements differ only in their number of rows.

    Args:
      dataset: A dataset of tuples.
      function: A hashable function that captures no tensor.
      num_parallel_calls: See `tf.data.Dataset.map`.
    """
    spec = dataset.element_spec
    flat = tf.nest.flatten(spec)

    def untraced(*element: Any) -> Any:  # no parameter has a name that TensorFlow refuses, such as `_`
        return function(*element)

    if not all(isinstance(component, tf.TensorSpec) for component in flat):
        return dataset.map(untraced, num_parallel_calls=num_parallel_calls)
    of_any_rows = [tf.TensorSpec([None, *s.shape[1:]] if s.shape.rank else s.shape, s.dtype) for s in flat]
    key = function, tuple(of_any_rows), repr(tf.nest.pack_sequence_as(spec, range(len(flat))))
    if key not in _functions:
        traced = tf.function(untraced, autograph=False)
        _functions[key] = traced.get_concrete_function(*tf.nest.pack_sequence_as(spec, of_any_rows))
    return _tf.mapped(dataset, _functions[key], num_parallel_calls)
