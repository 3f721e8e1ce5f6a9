"""Looks up rows of a sharded table for the ids of each rank; the gradient flows back.

Along the data axis each rank has its own ids:

```
worker 0   ids 4 1 4 ─► unique 4 1 ─┐ (1)                     (3)  ┌─► rows of 4 1 ─► of 4 1 4
                                    ├─► owners ─(2)─► their rows ──┤
worker 1   ids 7 4   ─► unique 7 4 ─┘                              └─► rows of 7 4
```

(1) A worker sends each id once to its owner, (2) the owner gathers the rows of its shard and (3) sends them back: two
`all_to_all`. In the backward pass a worker sums the gradients of each of its ids and weights them by its share of the
batch. One `all_to_all` carries them to the owners, where they are the gradient of the whole batch.

Along the model axis all ranks have the same ids, and each rank gathers the rows that it owns:

```
rank 0     ids 4 1 4 7 ─► unique 4 1 7 ─► own 4 ───┐
                                                   ├─ all_gather ─► rows of 4 1 7 ─► of 4 1 4 7
rank 1     ids 4 1 4 7 ─► unique 4 1 7 ─► own 1 7 ─┘
```

In the backward pass each rank keeps the gradients of the rows that it owns. They are gradients of the examples of its
data coordinate, as for any other weight.

If a table is sharded by columns, all ranks own a part of each row. Ids go to all of them, and the parts are joined:

```
worker 0   unique 4 1 ─► to all ─► rank 0: 4 1 by its columns   4a 1a ─┐
                                   rank 1: 4 1 by its columns   4b 1b ─┴─► 4a 4b, 1a 1b
```
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfring import partition, step
from tfring._keras.sharding import ShardGroup
from tfring.layers.row_numbers import RowNumbers
from tfring.sharding import Sharding


class Exchange:
    """Looks up rows of a sharded table, or of several tables that lie one after another in one.

    Args:
      sharding: The sharding of all tables together, by rows.
      tables: The name (for errors) and the number of rows of each table.
      group: The ranks over which the tables are sharded.
      key: Name of the collectives, the same on all ranks; Keras numbers the names of layers on each rank.
    """

    def __init__(self, sharding: Sharding, tables: Sequence[tuple[str, int]], group: ShardGroup, key: str) -> None:
        self._sharding = sharding
        self._names, self._counts = zip(*tables, strict=True)
        self._first, self._step, self._end = self._number()
        self._collectives = group.collectives
        self._of = self._of_one_process
        if not group.is_alone:
            self._of = self._of_same_ids if group.axis == "model" else self._of_workers
        self._key = key

    def rows(self, variable: tf.Variable, lookups: Sequence[tuple[int, tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the rows of ids, `[*ids.shape, ...]`, in the dtype of the variable, for all lookups at once.

        Args:
          variable: The TensorFlow variable that holds this worker's rows.
          lookups: Pairs of the number of a table and int32 or int64 ids of any shape.
        """
        is_exchanged = self._collectives.world_size > 1
        if partition.is_noted() and not is_exchanged:  # a replicated table, the only one in its weight
            with partition.own():
                checks = self._check(self._ids_of_all(lookups)[1])
            with tf.control_dependencies(checks):
                return [tf.gather(variable, ids) for _, ids in lookups]
        if partition.is_noted():
            name = "the ids of a lookup"
            lookups = [(table, partition.expect(ids, "ids of gradients", name)) for table, ids in lookups]
        with partition.own():
            ids, bad = self._ids_of_all(lookups)
            rows = self._of(variable, ids, bad)
            parts = tf.split(rows, [tf.size(ids) for _, ids in lookups]) if len(lookups) > 1 else [rows]
            shaped = [_shaped(part, ids) for part, (_, ids) in zip(parts, lookups, strict=True)]
        return [_declared(rows, ids) for rows, (_, ids) in zip(shaped, lookups, strict=True)]

    # -- owners of rows; `ColumnExchange` has others ------------------------------------------------------------------

    def _number(self) -> tuple[Sequence[int], Sequence[int], int]:
        """Returns the number of each table's first row, the step to its next row, and the end of the numbers."""
        self._numbers = RowNumbers(self._sharding, self._counts)
        return self._numbers.firsts, self._numbers.steps, self._numbers.end

    def _row_of_owner(self, numbers: tf.Tensor) -> tf.Tensor:
        return self._numbers.row_of_owner(numbers)

    def _by_owner(self, unique: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the positions of ids by owner, and the inverse permutation."""
        owner = tf.cast(self._numbers.owner(unique), tf.int32)
        order = tf.dynamic_partition(tf.range(tf.size(unique)), owner, self._collectives.world_size)
        return order, tf.math.invert_permutation(tf.concat(order, 0))

    def _return_rows(self, mine: tf.Tensor, ids_per_rank: tf.Tensor) -> tf.Tensor:
        """Sends each rank the rows that it asked for, and receives those that this rank asked for."""
        back, _ = self._collectives.all_to_all(mine, ids_per_rank, name=f"{self._key}/rows")
        back.set_shape([None, *mine.shape[1:]])
        return back

    def _of_all(self, mine: tf.Tensor, counts: Sequence[tf.Tensor]) -> tf.Tensor:
        """All-gathers rows, `counts` of them from each rank; the backward pass slices out those of this rank."""
        rank = self._collectives.rank
        begin = tf.add_n(counts[:rank]) if rank else 0
        end = begin + counts[rank]

        @tf.custom_gradient
        def of_all(mine: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return self._collectives.all_gather(mine, name=f"{self._key}/rows"), lambda gradient: gradient[begin:end]

        return of_all(mine)

    # -- a lookup ----------------------------------------------------------------------------------------------------

    def _ids_of_all(self, lookups: Sequence[tuple[int, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the numbers of all ids, flat, and `[-1 - table, id]` of the first id without a row, or `[]`."""
        is_narrow = all(ids.dtype == tf.int32 for _, ids in lookups) and self._end <= tf.int32.max
        dtype = tf.int32 if is_narrow else tf.int64
        ids = tf.concat([tf.cast(tf.reshape(ids, [-1]), dtype) for _, ids in lookups], 0)
        table = tf.repeat([number for number, _ in lookups], tf.stack([tf.size(ids) for _, ids in lookups]))
        is_bad = tf.logical_or(ids < 0, ids >= tf.gather(tf.constant(self._counts, dtype), table))
        first = tf.where(is_bad)[:1, 0]
        bad = tf.concat([-1 - tf.cast(tf.gather(table, first), dtype), tf.gather(ids, first)], 0)
        if set(self._step) != {1}:
            ids *= tf.gather(tf.constant(self._step, dtype), table)
        ids += tf.gather(tf.constant(self._first, dtype), table)
        return tf.where(is_bad, tf.zeros_like(ids), ids), bad

    def _of_one_process(self, variable: tf.Variable, ids: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(self._check(bad)):
            return tf.gather(variable, ids)

    def _of_same_ids(self, variable: tf.Variable, ids: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        """Looks up ids that are the same on all ranks."""
        with tf.control_dependencies(self._check(bad)):
            unique, position = tf.unique(ids)
        order, places = self._by_owner(unique)
        mine = tf.gather(variable, self._row_of_owner(tf.gather(unique, order[self._collectives.rank])))
        return _spread(self._of_all(mine, [tf.size(asked) for asked in order]), tf.gather(places, position))

    def _of_workers(self, variable: tf.Variable, ids: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        running = step.current() or step.Step()
        unique, position = tf.unique(ids)
        # A worker without rows of the batch computes on a padding row, and asks for none of that row's ids.
        unique, bad = running.drop_if_empty(unique), running.drop_if_empty(bad)
        order, places = self._by_owner(unique)
        # An id that no rank owns is sent to all ranks, so that all raise the same error and none waits.
        asked = [tf.concat([tf.gather(unique, numbers), bad], 0) for numbers in order]
        asked, ids_per_rank = self._collectives.all_to_all(  # (1)
            tf.concat(asked, 0), tf.stack([tf.size(a, tf.int64) for a in asked]), name=f"{self._key}/ids"
        )

        with tf.control_dependencies(self._check(asked, ids_per_rank)):
            mine = tf.gather(variable, self._row_of_owner(asked))  # (2)
        back = self._return_rows(mine, ids_per_rank)  # (3)
        if running.active is not None and not running.is_whole:  # ids of a padding row get the row of zeros at the end
            back = tf.concat([back, tf.zeros([1, *back.shape[1:]], back.dtype)], 0)
            places = tf.concat([places, [0]], 0)
            position = tf.where(running.active, position, 0)
        places = tf.gather(places, position)
        return _spread(back, places, lambda gradient: running.zero_if_empty(running.weigh(gradient)))

    def _check(self, told: tf.Tensor, ids_per_rank: tf.Tensor | None = None) -> list:
        """Returns operations that fail if an id without a row was sent; `ids_per_rank` counts the ids of each rank."""
        is_bad = told < 0

        def text() -> tf.Tensor:
            first = tf.where(is_bad)[0, 0]
            texts = [
                f"{name!r} has {count} rows, with ids from 0 to {count - 1}, and no row for id "
                for name, count in zip(self._names, self._counts, strict=True)
            ]
            parts = [tf.gather(tf.constant(texts), -1 - told[first]), tf.strings.as_string(told[first + 1])]
            if ids_per_rank is not None:
                rank = tf.searchsorted(tf.cumsum(ids_per_rank), first[None], side="right")[0]
                parts += [" of rank ", tf.strings.as_string(rank)]
            return tf.strings.join([*parts, ". Map other ids to these, or make the table larger."])

        if tf.executing_eagerly():
            if tf.reduce_any(is_bad):
                raise tf.errors.InvalidArgumentError(None, None, text().numpy().decode())
            return []

        def failing() -> tf.Tensor:
            with tf.control_dependencies([tf.debugging.Assert(False, [text()], summarize=1)]):
                return tf.constant(True)

        return [tf.cond(tf.reduce_any(is_bad), failing, lambda: tf.constant(True))]


class ColumnExchange(Exchange):
    """An `Exchange` of tables sharded by columns: each rank is asked for all ids."""

    def _number(self) -> tuple[Sequence[int], Sequence[int], int]:
        *begins, end = itertools.accumulate(self._counts, initial=0)
        return begins, [1] * len(begins), end

    def _row_of_owner(self, numbers: tf.Tensor) -> tf.Tensor:
        return numbers

    def _by_owner(self, unique: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        all_of_them = tf.range(tf.size(unique))
        return [all_of_them] * self._collectives.world_size, all_of_them

    # Parts of rows, each with the columns of one rank, are sent flattened.

    def _return_rows(self, mine: tf.Tensor, ids_per_rank: tf.Tensor) -> tf.Tensor:
        return self._joined(super()._return_rows(tf.reshape(mine, [-1]), ids_per_rank * mine.shape[1]))

    def _of_all(self, mine: tf.Tensor, counts: Sequence[tf.Tensor]) -> tf.Tensor:
        counts = [count * width for count, width in zip(counts, self._widths, strict=True)]
        return self._joined(super()._of_all(tf.reshape(mine, [-1]), counts))

    @property
    def _widths(self) -> list[int]:
        return [self._sharding.shape_of(rank)[1] for rank in range(self._collectives.world_size)]

    def _joined(self, flat: tf.Tensor) -> tf.Tensor:
        """Joins the parts of rows that came from each rank."""
        count = tf.size(flat, tf.int64) // self._sharding.shape[1]
        parts = tf.split(flat, [count * width for width in self._widths])
        return tf.concat([tf.reshape(p, [count, width]) for p, width in zip(parts, self._widths, strict=True)], 1)


def exchange(sharding: Sharding, tables: Sequence[tuple[str, int]], group: ShardGroup, key: str) -> Exchange:
    """Returns the exchange of tables that are sharded by rows or columns; see `Exchange` for the arguments."""
    return (ColumnExchange if sharding.dimension else Exchange)(sharding, tables, group, key)


def _shaped(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    result = tf.reshape(rows, tf.concat([tf.shape(ids), rows.shape[1:]], 0))
    result.set_shape([*ids.shape, *rows.shape[1:]])
    return result


def _declared(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows marked for the analysis with their kind and the kind that their gradients must have."""
    if not partition.is_noted():
        return rows
    rows = partition.expect_upstream(rows, "rows of gradients", "the gradient of rows that are looked up")
    return partition.declare_looked_up(rows, ids)


def _spread(rows: tf.Tensor, place: tf.Tensor, weigh: Callable[[tf.Tensor], tf.Tensor] = tf.identity) -> tf.Tensor:
    """Returns `tf.gather(rows, place)`. Its gradient is summed in the dtype of the rows, then passed to `weigh`."""

    @tf.custom_gradient
    def spread(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(upstream, [-1, *rows.shape[1:]])
            return weigh(tf.math.unsorted_segment_sum(flat, place, tf.shape(rows)[0]))

        return tf.gather(rows, place), gradient

    return spread(rows)
