"""Counts and cuts the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


def num_rows(element: Any) -> tf.Tensor | int | None:
    """Returns the number of rows of a batch, the first dimension of its components; None if it has none.

    If only some components have a static first dimension, these are constants beside the rows. If all do, the first
    dimension that most of them have is the number of rows.
    """
    components = tf.nest.flatten(element)
    counted = next((component for component in components if _is_counted(component)), None)
    if counted is not None:
        return _count(counted)
    counts = [count for count in map(static_rows, components) if count is not None]
    return max(counts, key=counts.count, default=None)


def has_static_rows(element: Any) -> bool:
    """Returns True if the number of rows of a batch is known before it is drawn."""
    components = tf.nest.flatten(element)
    return not any(map(_is_counted, components)) and any(static_rows(c) is not None for c in components)


def static_rows(component: Any) -> int | None:
    """Returns the first dimension of a component of a batch; None if it is not static or there is none."""
    shape = getattr(component, "shape", None)
    if shape is None or isinstance(component, tf.experimental.Optional):
        return None
    if isinstance(component, _TENSORS):
        return shape[0] if shape.rank else None
    return None if shape == () else shape[0]


def _is_counted(component: Any) -> bool:
    """Returns True if a component has rows that are counted once it is drawn."""
    return isinstance(component, _TENSORS) and component.shape.rank != 0 and static_rows(component) is None


def _count(component: Any) -> tf.Tensor:
    """Returns the number of rows of a component that is counted once it is drawn."""
    if isinstance(component, tf.RaggedTensor):
        return component.nrows()
    shape = component.dense_shape if isinstance(component, tf.SparseTensor) else tf.shape(component, tf.int64)
    return shape[0] if shape.shape[0] is None else tf.unstack(shape)[0]  # one operation; indexing takes four


def slice_rows(element: Any, begin: tf.Tensor | int, end: tf.Tensor | int) -> Any:
    """Returns rows `begin` to `end` of every component: tensors, ragged and sparse tensors.

    A component with another first dimension, known before it is drawn, is a constant beside the rows and stays full.
    """
    rows = num_rows(element)
    # Made once for all components; indexing would make them for each one.
    limits = [tf.stack([tf.cast(n, tf.int64)]) for n in (begin, end)] if any(map(tf.is_tensor, (begin, end))) else None
    strides = tf.constant([1], tf.int64) if limits else None

    def cut(component: Any) -> Any:
        count = static_rows(component)
        if count is not None and (tf.is_tensor(rows) or count != rows):
            return component
        if isinstance(component, tf.SparseTensor):
            begins = tf.concat([[begin], tf.zeros_like(component.dense_shape[1:])], 0)
            sizes = tf.concat([[end - begin], component.dense_shape[1:]], 0)
            part = tf.sparse.slice(component, tf.cast(begins, tf.int64), tf.cast(sizes, tf.int64))
            return with_inner_shape(part, component.shape)
        if component is None or isinstance(component, tf.experimental.Optional):
            return component
        if limits is not None and isinstance(component, tf.Tensor):
            return tf.strided_slice(component, *limits, strides)
        return component[begin:end]

    return tf.nest.map_structure(cut, element)


def check_equal_rows(element: Any) -> Any:
    """Returns the element, with a check that its components have equal numbers of rows when it is drawn."""
    counts = [_count(component) for component in tf.nest.flatten(element) if _is_counted(component)]
    checks = [
        # Not `tf.debugging`: it puts each check into a branch, which is a separate function.
        tf.raw_ops.Assert(
            condition=counts[0] == count,
            data=[
                f"The first component of a batch has a different number of rows than component {number}, but each "
                "replica gets its share of the rows of every component. A constant next to the rows, or a smaller "
                "batch, goes to every replica in full if the first dimensions are static (`tensor.set_shape`, "
                "`drop_remainder=True`)."
            ],
        )
        for number, count in enumerate(counts[1:], 1)
    ]
    if not checks:
        return element
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.nest.map_structure(
            lambda c: tf.identity(c) if isinstance(c, tf.Tensor) and c.dtype != tf.variant else c, element
        )


def spec_of_any_rows(spec: Any, constants: Sequence[bool]) -> Any:
    """Returns the spec of an element with any number of rows; `constants` has a bool for each component."""

    def any_rows(component: Any, constant: bool) -> Any:
        shape = getattr(component, "shape", None)
        if constant or shape is None or not shape.rank:
            return component
        shape = [None, *shape[1:]]
        if isinstance(component, tf.TensorSpec):
            return tf.TensorSpec(shape, component.dtype)
        if isinstance(component, tf.SparseTensorSpec):
            return tf.SparseTensorSpec(shape, component.dtype)
        if isinstance(component, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, component.dtype, component.ragged_rank, component.row_splits_dtype)
        return component

    return tf.nest.pack_sequence_as(spec, list(map(any_rows, tf.nest.flatten(spec), constants)))


def forget_rows(element: Any, constants: Sequence[bool]) -> Any:
    """Returns the element with rows that are counted when it is drawn, which distinguishes them from constants.

    Args:
      element: A batch.
      constants: A bool for each component, whether it is a constant beside the rows.
    """

    def forget(component: Any, constant: bool) -> Any:
        if constant or not isinstance(component, tf.Tensor) or not component.shape.rank:
            return component
        return tf.raw_ops.PlaceholderWithDefault(input=component, shape=[None, *component.shape[1:]])

    return tf.nest.pack_sequence_as(element, list(map(forget, tf.nest.flatten(element), constants)))


def with_inner_shape(sparse: tf.SparseTensor, shape: tf.TensorShape) -> tf.SparseTensor:
    """Returns a sparse tensor whose dimensions after the first are as static as those of `shape`."""
    if shape.rank is None:
        return sparse
    inner = [sparse.dense_shape[i] if shape[i] is None else shape[i] for i in range(1, shape.rank)]
    dense_shape = tf.stack([sparse.dense_shape[0], *inner])
    return tf.SparseTensor(sparse.indices, sparse.values, dense_shape)


def bounds(rows: Any, replica: Any, num_replicas: Any) -> tuple[Any, Any]:
    """Returns the first row of a replica's share and the row after its last."""
    return _begins(rows, replica, replica + 1, num_replicas)


def _begins(rows: Any, first: Any, after: Any, num_replicas: Any) -> tuple[Any, Any]:
    """Returns the first row of the share of replica `first`, and that of the share of replica `after`."""
    if isinstance(rows, tf.Tensor) and isinstance(first, int):
        begin, end = tf.unstack(rows * tf.constant([first, after], rows.dtype) // num_replicas)
        return begin, end
    return rows * first // num_replicas, rows * after // num_replicas


class ReplicaRange(NamedTuple):
    """The numbers of this worker's replicas among all replicas."""

    first: int
    replicas: int
    num_replicas: int

    def bounds(self, rows: Any) -> tuple[Any, Any]:
        """Returns the first of this worker's rows and the row after its last."""
        return _begins(rows, self.first, self.first + self.replicas, self.num_replicas)


def cut_rows(element: Any, cuts: Sequence[tuple[Any, Any]]) -> tuple[tuple, tuple[tf.Tensor, ...]]:
    """Returns `(parts, rows)`: the part of a batch in each cut `(begin, end)`, and its number of rows.

    A part has at least one row: if the cut has none, a real row next to it, which `rows` does not count.
    """
    total = num_rows(element)
    assert total is not None, "what is cut has rows"
    last = tf.maximum(total - 1, 0)
    begins = [tf.minimum(begin, last) for begin, _ in cuts]
    ends = [tf.maximum(end, begin + 1) for begin, (_, end) in zip(begins, cuts, strict=True)]
    parts = [slice_rows(element, begin, end) for begin, end in zip(begins, ends, strict=True)]
    return tuple(parts), tuple(tf.cast(end - begin, tf.int64) for begin, end in cuts)


def split_rows(element: Any, num_parts: int) -> list:
    """Cuts a batch into `num_parts` consecutive parts whose sizes differ by at most one row."""
    rows = num_rows(element)
    if rows is None:
        return [element] * num_parts
    return [slice_rows(element, *bounds(rows, part, num_parts)) for part in range(num_parts)]


def pad_empty_batch(element: Any) -> tuple[Any, tf.Tensor | None]:
    """Adds a row of zeros to a batch without rows, for operations that need at least one.

    Convolutions of oneDNN, and shapes with a -1 beside `tf.shape(x)[0]`, fail without rows. The results of this row
    must not count: gradients, state, metrics and logs ensure this by `Step.active`.

    Returns:
      The element, of the same structure, and a bool scalar tensor, whether it had rows; None if that is unknown.
    """
    rows = num_rows(element)
    if rows is None:
        return element, None
    has_rows = tf.convert_to_tensor(rows > 0)
    if isinstance(rows, int) and rows > 0:
        return element, has_rows
    components = tf.nest.flatten(element)
    places = [i for i, component in enumerate(components) if _has_rows_to_give(component)]
    filled = tf.cond(
        has_rows, lambda: [components[i] for i in places], lambda: [_with_a_row(components[i]) for i in places]
    )
    for i, component in zip(places, filled, strict=True):
        is_sparse = isinstance(component, tf.SparseTensor)  # a branch loses its static shape
        components[i] = with_inner_shape(component, components[i].shape) if is_sparse else component
    return tf.nest.pack_sequence_as(element, components), has_rows


def relax_static_rows(element: Any) -> Any:
    """Returns a batch whose static number of rows is unknown in the graph that is built with it."""
    rows = num_rows(element)

    def opened(component: Any) -> Any:
        if not isinstance(component, tf.Tensor) or not component.shape.rank or component.shape[0] != rows:
            return component
        return tf.raw_ops.PlaceholderWithDefault(input=component, shape=[None, *component.shape[1:]])

    return tf.nest.map_structure(opened, element)


def _has_rows_to_give(component: Any) -> bool:
    if static_rows(component):  # a constant beside the rows
        return False
    if isinstance(component, tf.Tensor):
        return component.dtype != tf.variant and component.shape.rank != 0
    return isinstance(component, (tf.RaggedTensor, tf.SparseTensor))


def _with_a_row(component: Any) -> Any:
    """Returns a component with a row of zeros if it is empty; a constant beside the rows is unchanged."""
    if isinstance(component, tf.RaggedTensor):  # a row without values
        splits = tf.zeros([2], component.row_splits.dtype)
        return tf.RaggedTensor.from_row_splits(component.values, splits, validate=False)
    if isinstance(component, tf.SparseTensor):
        shape = tf.concat([[1], component.dense_shape[1:]], 0)
        return tf.SparseTensor(component.indices, component.values, shape)
    # Pads dimensions of size 0 to 1: a branch for each component would be traced as two functions.
    missing = tf.cast(tf.equal(tf.shape(component), 0), tf.int32)
    if component.shape.rank is None:
        paddings = tf.stack([tf.zeros_like(missing), missing], axis=1)
    else:
        may_lack = [1, *(int(n is None) for n in component.shape[1:])]
        paddings = tf.expand_dims(missing, 1) * [[0, behind] for behind in may_lack]
    padded = tf.raw_ops.Pad(input=component, paddings=paddings)
    if component.shape.rank is not None:
        padded.set_shape([None, *component.shape[1:]])
    return padded
