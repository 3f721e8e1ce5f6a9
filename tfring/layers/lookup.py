"""Rows of a table whose rows are divided over the workers, for the ids of each worker; the gradient comes back.

```
worker 0   ids 4 1 4 ─► unique 4 1 ─┐ (1)                     (3)  ┌─► rows of 4 1 ─► of 4 1 4
                                    ├─► owners ─(2)─► their rows ──┤
worker 1   ids 7 4   ─► unique 7 4 ─┘                              └─► rows of 7 4
```

(1) each id once to its owner, (2) who gathers the rows of its piece, (3) which go back: two `all_to_all`. In the
backward pass a worker adds up the gradients of each of its ids, weighs them by its share of the batch, and one
`all_to_all` carries them to the owners: there they are the gradient of the whole batch.
"""

from __future__ import annotations

import tensorflow as tf

from tfring import step


class Exchange:
    """How a worker comes by rows of a table.

    Args:
      placement: who owns which row.
      collectives: the engine, see `tfring.ring.collectives`; of one process alone, for which nothing is exchanged.
      name: of the layer, for errors.
      key: what the collectives are called, the same on all ranks; Keras numbers names of layers on each rank.
    """

    def __init__(self, placement, collectives, name: str, key: str):
        self._placement = placement
        self._collectives = collectives
        self._name = name
        self._key = key

    def rows(self, table, ids: tf.Tensor) -> tf.Tensor:
        """The rows of these ids, `[*ids.shape, ...]`, in the dtype of the table.

        Args:
          table: a variable of TensorFlow, this worker's rows.
          ids: int32 or int64, of any shape.
        """
        alone = self._collectives.world_size == 1
        rows = self._of_one_process(table, ids) if alone else self._of_workers(table, ids)
        result = tf.reshape(rows, tf.concat([tf.shape(ids), table.shape[1:]], 0))
        result.set_shape([*ids.shape, *table.shape[1:]])
        return result

    def _of_one_process(self, table, ids):
        ids = tf.reshape(ids, [-1])
        with tf.control_dependencies(self._check(ids)):
            return tf.gather(table, ids)

    def _of_workers(self, table, ids):
        world_size, placement = self._collectives.world_size, self._placement
        running = step.current() or step.Step()
        unique, position = tf.unique(tf.reshape(ids, [-1]))
        # A worker without rows of the batch computes on a row that does not count: it asks for none of it.
        unique = running.counted_rows(unique)
        # An id that nobody owns is told to all, so that all fail alike and none waits.
        is_bad = self._is_bad(unique)
        bad = tf.boolean_mask(unique, is_bad)[:1]
        owner = tf.cast(placement.owner(tf.where(is_bad, tf.zeros_like(unique), unique)), tf.int32)
        order = tf.dynamic_partition(tf.range(tf.size(unique)), owner, world_size)
        asked = [tf.concat([tf.gather(unique, numbers), bad], 0) for numbers in order]
        asked, asked_of_each = self._collectives.all_to_all(  # (1)
            tf.concat(asked, 0), tf.stack([tf.size(a, tf.int64) for a in asked]), name=f"{self._key}/ids"
        )

        with tf.control_dependencies(self._check(asked, asked_of_each)):
            mine = tf.gather(table, placement.row_of_owner(asked))  # (2)
        back, _ = self._collectives.all_to_all(mine, asked_of_each, name=f"{self._key}/rows")  # (3)
        back.set_shape([None, *table.shape[1:]])
        places = tf.math.invert_permutation(tf.concat(order, 0))
        if running.active is not None:  # of a row that does not count, the place is that of zeros behind all others
            back = tf.concat([back, tf.zeros([1, *table.shape[1:]], back.dtype)], 0)
            places = tf.concat([places, [0]], 0)
            position = tf.where(running.active, position, 0)
        return _spread(back, tf.gather(places, position), lambda gradient: running.counted(running.weigh(gradient)))

    def _is_bad(self, ids):
        return tf.logical_or(ids < 0, ids >= tf.cast(self._placement.shape[0], ids.dtype))

    def _check(self, ids, asked_of_each=None):
        """Operations that fail where the table has no row for an id; `asked_of_each` says whose ids they are."""
        is_bad, count = self._is_bad(ids), self._placement.shape[0]

        def text():
            first = tf.where(is_bad)[0]
            received = [tf.gather(ids, first)[0]]
            if asked_of_each is not None:
                received.append(tf.searchsorted(tf.cumsum(asked_of_each), first, side="right")[0])
            return tf.strings.format(
                f"Ids of {self._name!r} run from 0 to {count - 1}, for it has input_dim={count} rows. Received: id {{}}"
                f"{' of rank {}' if len(received) > 1 else ''}. Map other ids to these, or make the table larger.",
                received,
            )

        if tf.executing_eagerly():
            if tf.reduce_any(is_bad):
                raise tf.errors.InvalidArgumentError(None, None, text().numpy().decode())
            return []

        def failing():
            with tf.control_dependencies([tf.debugging.Assert(False, [text()], summarize=1)]):
                return tf.constant(True)

        return [tf.cond(tf.reduce_any(is_bad), failing, lambda: tf.constant(True))]


def _spread(rows, place, weigh):
    """`tf.gather(rows, place)`, whose gradient adds up in the dtype of the rows and then is weighed."""

    @tf.custom_gradient
    def spread(rows):
        def gradient(upstream):
            flat = tf.reshape(upstream, [-1, *rows.shape[1:]])
            return weigh(tf.math.unsorted_segment_sum(flat, place, tf.shape(rows)[0]))

        return tf.gather(rows, place), gradient

    return spread(rows)
