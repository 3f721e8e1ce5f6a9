"""Sums sparse gradients per id over all ranks: an id that several ranks looked up reaches the optimizer once.

```
rank 0   ids 7 3 7      sum     7: a+c                                       7  3  9
         rows a b c   ───────►  3: b           ───────► exchange ───────►   a+c+e  b  d
rank 1   ids 9 7                9: d   7: e                                each id once
```

On the ring, and in a single process, one native collective does this for all tables of a step
(`ring/native/reduce_rows.cc`). On TensorFlow's collectives, TensorFlow's operations do it in four steps:

1. `sum_duplicates`: fewer rows on the wire.
2. `pad_rows`: `[capacity, dim]`, the same in every step and on every rank, so that nothing downstream ever sees a
   changing shape ("Inconsistent output shapes", tensorflow #34250). Padding has index -1, and is sent too.
3. all_gather.
4. `unpad_rows`, then `sum_duplicates` again.

In both cases Adam and related optimizers give the same results as with the dense gradient.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

import tensorflow as tf

from tfring.ring.collectives import Collectives, sum_duplicates
from tfring.ring.library import row_sums_number

PADDING_INDEX = -1
SMALL_TABLE_BYTES = 1 << 16  # on any network cheaper to send than to find and send single rows
_INDEX_BYTES = 8


@dataclasses.dataclass(frozen=True)
class SparseOptions:
    """Options of reducing sparse gradients (`tf.IndexedSlices`, as embeddings produce).

    Attributes:
      batch_size: Maximum number of examples of a worker in a step; the global batch size is always enough. If it is
        given, a gradient with more than `batch_size * ids_per_example` different ids is an error. The ring sends the
        rows of the step, each id once. `communication="tensorflow"` pads them to that number, but never to more rows
        than the table has. Without `batch_size`, it pads them to the longest gradient of any rank, rounded up to a
        power of two. Defaults to None.
      ids_per_example: Maximum number of lookups of one example in one table. Defaults to 1.
      dense: Which gradients to make dense. "auto" (default): that of a table of at most 64 KiB and, if `batch_size` is
        given, that of any table for which all-reducing the table moves no more bytes than gathering this number of
        rows. The rows that a rank has in a step never decide, since they differ from rank to rank. "never": none of
        the gradients that optimizers apply. "always": all of them. IndexedSlices passed to `tf.distribute` always stay
        as they are.
      reduction: How rows are sent on the ring. "gather": those of all ranks to all ranks. "owner": to the rank that
        sums the rows of an id, and the sums to all ranks. "auto" (default): the one that moves fewer bytes by the
        counts of the previous step; see `tfring.Communicator.all_reduce_rows`. The results have the same bits.

    Raises:
      ValueError: If a size is not an integer of at least 1, or `dense` or `reduction` is none of the above.

    >>> SparseOptions(batch_size=1024, ids_per_example=3).capacity(num_table_rows=50_000)
    3072
    >>> SparseOptions(batch_size=1024).capacity(num_table_rows=30)
    30
    """

    batch_size: int | None = None
    ids_per_example: int = 1
    dense: str = "auto"
    reduction: str = "auto"

    def __post_init__(self) -> None:
        for name, size in (("batch_size", self.batch_size), ("ids_per_example", self.ids_per_example)):
            is_open = name == "batch_size" and size is None
            if not is_open and not (isinstance(size, numbers.Integral) and size >= 1):
                raise ValueError(
                    f"`{name}` is {size!r}, not an integer of at least 1{', or None' if name == 'batch_size' else ''}."
                )
        if self.dense not in ("auto", "never", "always"):
            raise ValueError(f'`dense` is {self.dense!r}, not "auto", "never" or "always".')
        row_sums_number(self.reduction)

    def capacity(self, num_table_rows: int | None) -> int | None:
        """Returns the maximum number of different ids of a gradient, or None if `batch_size` is not given."""
        if self.batch_size is None:
            return None
        rows = self.batch_size * self.ids_per_example
        return rows if num_table_rows is None else min(rows, num_table_rows)


def pad_rows(values: tf.Tensor, indices: tf.Tensor, capacity: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Pads rows to `capacity` with zeros at index -1.

    >>> values, indices = pad_rows(tf.constant([[1.0, 2.0]]), tf.constant([7]), 3)
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [7, -1, -1])
    """
    missing = capacity - tf.shape(indices)[0]
    value_paddings = tf.concat([[[0, missing]], tf.zeros([tf.rank(values) - 1, 2], tf.int32)], 0)
    padded = tf.pad(values, value_paddings)
    padded_indices = tf.pad(indices, [[0, missing]], constant_values=PADDING_INDEX)
    if isinstance(capacity, int):
        padded.set_shape([capacity, *values.shape[1:]])
        padded_indices.set_shape([capacity])
    return padded, padded_indices


def unpad_rows(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Drops the rows that `pad_rows` added, at any position.

    >>> values, indices = unpad_rows(tf.constant([[1.0], [0.0], [2.0]]), tf.constant([7, -1, 3]))
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([[1.0], [2.0]], [7, 3])
    """
    real = indices != PADDING_INDEX
    return tf.boolean_mask(values, real), tf.boolean_mask(indices, real)


def cheaper_dense(num_table_rows: int, row_bytes: int, capacity: int, world_size: int) -> bool:
    """Returns True if all-reducing the table moves no more bytes than gathering `capacity` rows of each rank.

    A rank sends `2 (N-1)/N` of the table in an all-reduce, `(N-1) capacity` rows with their ids in an all-gather.

    >>> cheaper_dense(num_table_rows=30, row_bytes=32, capacity=30, world_size=4)
    True
    >>> cheaper_dense(num_table_rows=1_000_000, row_bytes=256, capacity=1024, world_size=4)
    False
    """
    return 2 * num_table_rows * row_bytes <= world_size * capacity * (row_bytes + _INDEX_BYTES)


def goes_dense(gradient: tf.IndexedSlices, options: SparseOptions, world_size: int) -> bool:
    """Returns True if a sparse gradient is summed as a dense one: the same on every rank, whatever rows a rank has.

    Only the table, the options and the number of ranks decide. The number of rows is each rank's own, even if it is
    static: ranks that chose by it would call different collectives.

    >>> rows = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([5, 7]), tf.constant([30, 8]))
    >>> goes_dense(rows, SparseOptions(), world_size=2)
    True
    >>> large = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([5, 7]), tf.constant([100_000, 8]))
    >>> goes_dense(large, SparseOptions(), world_size=2)
    False
    """
    if options.dense != "auto":
        return options.dense == "always"
    num_table_rows, row_bytes = _table_size(_with_tensor_shape(gradient))
    if world_size == 1 or num_table_rows is None or row_bytes is None:
        return False
    if num_table_rows * row_bytes <= SMALL_TABLE_BYTES:
        return True
    capacity = options.capacity(num_table_rows)
    return capacity is not None and cheaper_dense(num_table_rows, row_bytes, capacity, world_size)


def reduce_sparse(
    collectives: Collectives,
    gradients: Sequence[tf.IndexedSlices],
    variable_names: Sequence[str],
    options: SparseOptions,
    *,
    name: str,
    active: tf.Tensor | None = None,
) -> list[tf.IndexedSlices]:
    """Sums sparse gradients over all ranks, in one collective.

    Args:
      collectives: The engine.
      gradients: The IndexedSlices of this worker. Ids may repeat, and their number may differ from rank to rank.
      variable_names: The name of the variable of each gradient, for errors.
      options: See `SparseOptions`.
      name: Name of the gradients, for errors and traces.
      active: A bool scalar. If False, this rank contributes no row. Defaults to None.

    Returns:
      A list of IndexedSlices, one for each gradient, with each id once.

    Raises:
      tf.errors.InvalidArgumentError: If a gradient has more rows than `options` allow.
    """
    if not gradients:
        return []
    gradients = [_with_tensor_shape(gradient) for gradient in gradients]
    reduce = _reduce_padded if collectives.needs_fixed_shapes else _reduce_rows
    reduced = reduce(collectives, gradients, variable_names, options, name=f"{name}/rows", active=active)
    return [
        tf.IndexedSlices(values, indices, gradient.dense_shape)
        for gradient, (values, indices) in zip(gradients, reduced, strict=True)
    ]


def _reduce_rows(
    collectives: Collectives,
    gradients: Sequence[tf.IndexedSlices],
    variable_names: Sequence[str],
    options: SparseOptions,
    *,
    name: str,
    active: tf.Tensor | None,
) -> list[tf.IndexedSlices]:
    reduced, num_rows = collectives.sum_rows(
        [gradient.values for gradient in gradients],
        [gradient.indices for gradient in gradients],
        name=name,
        active=active,
        reduction=options.reduction,
    )
    for i, gradient in enumerate(gradients):
        num_table_rows, _ = _table_size(gradient)
        capacity = options.capacity(num_table_rows)
        if capacity is not None and capacity != num_table_rows:
            checked = _check_capacity(num_rows[i], capacity, variable_names[i], options)
            with tf.control_dependencies([checked]):
                reduced[i] = tuple(tf.identity(each) for each in reduced[i])
    return reduced


def _reduce_padded(
    collectives: Collectives,
    gradients: Sequence[tf.IndexedSlices],
    variable_names: Sequence[str],
    options: SparseOptions,
    *,
    name: str,
    active: tf.Tensor | None,
) -> list[tf.IndexedSlices]:
    rows = [sum_duplicates(gradient.values, gradient.indices, active) for gradient in gradients]
    num_rows = [tf.size(ids, out_type=tf.int64) for _, ids in rows]
    tables = [_table_size(gradient)[0] for gradient in gradients]
    given = [options.capacity(num_table_rows) for num_table_rows in tables]
    padded = []
    for i, capacity in enumerate(_agreed_capacities(collectives, given, num_rows, name)):
        n = num_rows[i]
        if given[i] is not None and given[i] != tables[i]:
            n = _check_capacity(n, capacity, variable_names[i], options)
        with tf.control_dependencies([n]):
            padded.append(pad_rows(*rows[i], capacity))
    gathered = collectives.gather_rows([v for v, _ in padded], [ids for _, ids in padded], name=name)
    return [sum_duplicates(*unpad_rows(values, indices)) for values, indices in gathered]


def _with_tensor_shape(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient with a tensor as `dense_shape`, which users may give as a tuple."""
    if gradient.dense_shape is None or tf.is_tensor(gradient.dense_shape):
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(gradient.dense_shape, tf.int64))


def _table_size(gradient: tf.IndexedSlices) -> tuple[int | None, int | None]:
    """Returns the number of rows of the variable and the bytes of a row, each None if not static."""
    shape = gradient.shape  # from dense_shape, if that is a constant
    row_elements = gradient.values.shape[1:].num_elements()
    row_bytes = None if row_elements is None else row_elements * gradient.values.dtype.size
    return (shape[0] if shape.rank else None), row_bytes


def _agreed_capacities(
    collectives: Collectives, capacities: Sequence[int | None], num_rows: Sequence[tf.Tensor], name: str
) -> Sequence[int | tf.Tensor]:
    """Fills in the capacities that no option determines."""
    if None not in capacities:
        return capacities
    [longest] = collectives.all_reduce([tf.stack(num_rows)], "max", name=f"{name}/capacity")
    powers = 2 ** tf.cast(tf.range(32), tf.int64)
    chosen = []
    for position, capacity in enumerate(capacities):
        if capacity is None:
            capacity = tf.cast(powers[tf.searchsorted(powers, longest[position : position + 1])[0]], tf.int32)
        chosen.append(capacity)
    return chosen


def _check_capacity(num_rows: tf.Tensor, capacity: int, variable_name: str, options: SparseOptions) -> tf.Tensor:
    tf.debugging.assert_less_equal(
        num_rows,
        tf.constant(capacity, tf.int64),
        message=(
            f"The gradient of {variable_name} has more rows than its capacity of {capacity} "
            f"(batch_size={options.batch_size} * ids_per_example={options.ids_per_example}). Raise them: "
            "tfring.RingStrategy(sparse=tfring.SparseOptions(batch_size=<most examples of a worker in a step>, "
            "ids_per_example=<most ids an example looks up in one table>))."
        ),
    )
    return num_rows
