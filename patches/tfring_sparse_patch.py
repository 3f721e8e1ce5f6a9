"""Makes embeddings train on several workers under old TensorFlow (1.14 to 2.5), by padding the sparse gather.

TensorFlow 1.14 to 2.1 gathers the rows of a sparse gradient (``tf.IndexedSlices``) with a kernel that keeps the
shape of its first step for ever and wants the same shape of every worker. Training ends in one of::

    Inconsistent output shapes, got [20], but expected is [22].
    Shape mismatch in the collective instance 102.
    RecvBufResponse returned 80 bytes where to_tensor expected 88
    Check failed: ... Use OP_REQUIRES_ASYNC                               (an abort, 1.14)

(tensorflow issue 34250.) TensorFlow 2.2 to 2.5 trains, but turns the gradient dense in every step in which the
workers' numbers of rows differ, which momentum, RMSProp, LazyAdam and FTRL take for a gradient of every row. Copy
this one file beside the script, and before the strategy is made::

    import tfring_sparse_patch
    tfring_sparse_patch.apply(batch_size=1024)

Nothing on disk changes. What happens to a gradient of three rows, batch_size=5, on each worker::

    indices [7 4 9]   --(1)-->  [7 4 9 -1 -1]   --(2)-->  [7 4 9 -1 -1  4 2 -1 -1 -1]   --(3)-->  [7 4 9 4 2]
    values  [a b c]             [a b c  0  0]             [a b c  0  0  d e  0  0  0]             [a b c d e]

(1) pad to ``[batch_size * ids_per_example, dim]``, the same shape in every step on every worker; (2) TensorFlow's
own gather; (3) drop the rows whose index is -1. The optimizer sees the real rows and nothing else, so every
optimizer does what it would have done in one process: padding that reached it, even rows of zeros at index 0,
would move row 0 under momentum, LazyAdam or RMSProp, and FTRL with l1 would clear it.
"""

import functools
import logging

__all__ = ["apply", "undo", "use_gather_kernel"]

PATCHED = (
    "1.14.0",
    "1.15.0",
    "1.15.2",
    "1.15.3",
    "1.15.4",
    "1.15.5",
    "2.0.0",
    "2.0.1",
    "2.0.2",
    "2.0.3",
    "2.0.4",
    "2.1.0",
    "2.1.1",
    "2.1.2",
    "2.1.3",
    "2.1.4",
    "2.2.0",
    "2.2.1",
    "2.2.2",
    "2.2.3",
    "2.3.0",
    "2.3.1",
    "2.3.2",
    "2.3.3",
    "2.3.4",
    "2.4.0",
    "2.4.1",
    "2.4.2",
    "2.4.3",
    "2.4.4",
    "2.5.0",
    "2.5.1",
    "2.5.2",
    "2.5.3",
)
HEALTHY_FROM = (2, 6)
KERNEL_LABEL = "tfring"  # as in kernel/gather_kernel.cc
DEFAULT_BATCH_SIZE = 1024
DROPPED = -1  # the index of a padding row

_log = logging.getLogger(__name__)
_originals = {}  # (object, attribute) -> TensorFlow's own function, while another stands in its place
_found = {}  # what the attribute of the published recipe held before
_ids_per_example = 1
_to_the_longest = False  # pad to the longest gradient of the step; needs the kernel


def apply(batch_size=None, ids_per_example=1, gather_kernel=None):
    """Pads every sparse gradient to ``[batch_size * ids_per_example, dim]`` on its way between the workers.

    Call it on every worker, with the same numbers, before the training step is built. Calling it again changes
    the numbers.

    Args:
      batch_size: the most examples one replica sees in a step. A larger number is safe and costs bytes, so the
        global batch size will do. It is kept in ``cross_device_utils.global_batch_size``, where scripts written
        against the published recipe set it; without ``batch_size`` the number found there counts, or 1024.
      ids_per_example: the most rows one example can add to the gradient of one variable, for features
        with several values.
      gather_kernel: the path of the library built by ``kernel/build.py`` (TensorFlow 1.14 to 2.1). The gather may
        then have another shape in each step, so rows are padded to the longest gradient of the step only, and the
        two numbers above do not matter.

    Returns:
      True where the gather is patched now; False, with a note in the log, from TensorFlow 2.6 on, whose own gather
      is healthy: nothing is changed there, so that a script may keep this call when TensorFlow is upgraded.

    Raises:
      ValueError: a number that is not a whole one of at least 1.
      RuntimeError: a TensorFlow this module does not know, named in the message.
    """
    global _ids_per_example, _to_the_longest
    import tensorflow

    if not _is_patched(tensorflow.__version__):
        _log.warning("tfring_sparse_patch: TensorFlow %s needs no patch, nothing was changed.", tensorflow.__version__)
        return False
    from tensorflow.python.distribute import cross_device_ops, cross_device_utils

    if batch_size is None:
        batch_size = getattr(cross_device_utils, "global_batch_size", DEFAULT_BATCH_SIZE)
    for option, number in (("batch_size", batch_size), ("ids_per_example", ids_per_example)):
        if int(number) != number or number < 1:
            raise ValueError("%s must be a whole number of at least 1. Received: %r" % (option, number))
    if gather_kernel is not None:
        use_gather_kernel(gather_kernel)
    reducer = cross_device_ops.CollectiveAllReduce
    if (reducer, "reduce_implementation") not in _originals:
        _found["global_batch_size"] = getattr(cross_device_utils, "global_batch_size", None)
        _replace(reducer, "reduce_implementation", _padded)
        _replace(reducer, "batch_reduce_implementation", _padded_batch)
    cross_device_utils.global_batch_size = int(batch_size)
    _ids_per_example = int(ids_per_example)
    _to_the_longest = gather_kernel is not None
    return True


def use_gather_kernel(path):
    """Makes gathers built from now on run on the kernel of ``kernel/gather_kernel.cc``, and nothing else.

    Alone this is what TensorFlow's own repair did (pull request 34295): enough where all workers have the same
    number of rows in every step, not where they differ. ``apply(gather_kernel=path)`` covers both.
    """
    import tensorflow
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import collective_ops

    if not tensorflow.__version__.startswith(("1.14.", "1.15.", "2.0.", "2.1.")):
        raise RuntimeError("The gather kernel is for TensorFlow 1.14 to 2.1. Found: %s" % tensorflow.__version__)
    tensorflow.load_op_library(path)

    def labelled(all_gather):
        @functools.wraps(all_gather)
        def all_gather_by_our_kernel(*args, **kwargs):
            with ops.get_default_graph()._kernel_label_map({"CollectiveGather": KERNEL_LABEL}):
                return all_gather(*args, **kwargs)

        return all_gather_by_our_kernel

    if (collective_ops, "all_gather") not in _originals:
        _replace(collective_ops, "all_gather", labelled)


def undo():
    """Puts TensorFlow's own functions back. Training steps that are already built stay as they are."""
    for (place, name), function in _originals.items():
        setattr(place, name, function)
    _originals.clear()
    if _found:
        from tensorflow.python.distribute import cross_device_utils

        cross_device_utils.global_batch_size = _found.pop("global_batch_size")
        if cross_device_utils.global_batch_size is None:
            del cross_device_utils.global_batch_size


def _replace(place, name, wrap):
    _originals[place, name] = getattr(place, name)
    setattr(place, name, wrap(_originals[place, name]))


def _is_patched(version):
    """True for the versions to patch, False for healthy ones, RuntimeError for those nobody looked at."""
    if version in PATCHED:
        return True
    numbers = version.split(".")[:2]
    if all(n.isdigit() for n in numbers) and tuple(int(n) for n in numbers) >= HEALTHY_FROM:
        return False
    raise RuntimeError(
        "tfring_sparse_patch does not know TensorFlow %s. It patches %s; from %d.%d on no patch is "
        "needed." % ((version, ", ".join(PATCHED)) + HEALTHY_FROM)
    )


def _padded(reduce_implementation):
    """``CollectiveAllReduce.reduce_implementation`` between padding and dropping: the picture on top."""

    @functools.wraps(reduce_implementation)
    def reduce_padded(self, reduce_op, per_replica_value, destinations, *options):
        if not _gathers(self, per_replica_value):
            return reduce_implementation(self, reduce_op, per_replica_value, destinations, *options)
        padded, unpad = _pad(self, per_replica_value, destinations)  # (1)
        return unpad(reduce_implementation(self, reduce_op, padded, destinations, *options))  # (2), (3)

    return reduce_padded


def _padded_batch(batch_reduce_implementation):
    """The same for many gradients. It may call ``reduce_implementation``: padding twice is padding once."""

    @functools.wraps(batch_reduce_implementation)
    def batch_reduce_padded(self, reduce_op, value_destination_pairs, *options):
        pairs, unpads = [], []
        for value, destinations in value_destination_pairs:
            unpad = None
            if _gathers(self, value):
                value, unpad = _pad(self, value, destinations)  # (1)
            pairs.append((value, destinations))
            unpads.append(unpad)
        reduced = batch_reduce_implementation(self, reduce_op, pairs, *options)  # (2)
        return [unpad(value) if unpad else value for value, unpad in zip(reduced, unpads)]  # (3)

    return batch_reduce_padded


def _pad(reducer, distributed, destinations):
    """The padded gradient and the function that takes the padding off what was gathered."""
    name = getattr(destinations, "name", None) or "a variable without a name"
    if _to_the_longest:
        capacities = _longest(reducer, distributed)
    else:
        from tensorflow.python.distribute import cross_device_utils

        capacities = [int(cross_device_utils.global_batch_size) * _ids_per_example] * len(_replicas(distributed))
    padded = _map_values(lambda rows, capacity: pad_rows(rows, capacity, name), distributed, capacities)
    return padded, lambda gathered: _map_values(
        lambda rows, capacity: unpad_rows(rows, capacity, name), gathered, capacities
    )


def _longest(reducer, distributed):
    """For each replica here the largest number of rows any replica anywhere has in this step, at least 1."""
    import tensorflow as tf
    from tensorflow.python.distribute import cross_device_utils

    lengths = []
    for rows in _replicas(distributed):
        with tf.device(rows.values.device):
            lengths.append(tf.shape(rows.indices)[:1])
    everywhere = cross_device_utils.build_collective_gather(lengths, reducer._num_workers, reducer._collective_keys)
    return [tf.maximum(tf.reduce_max(numbers), 1) for numbers in everywhere]


def _gathers(reducer, distributed):
    """Whether this value is sparse and there is another replica to gather from."""
    from tensorflow.python.distribute import cross_device_utils

    if not cross_device_utils.is_indexed_slices(distributed):
        return False
    group_size = getattr(reducer, "_group_size", None)
    if group_size is None:
        group_size = reducer._num_workers * len(_replicas(distributed))
    return group_size > 1


def _replicas(distributed):
    """The values of a PerReplica or Mirrored; the value of a single replica may come bare."""
    import tensorflow as tf

    return [distributed] if isinstance(distributed, tf.IndexedSlices) else list(distributed.values)


def _map_values(function, distributed, capacities):
    """The same PerReplica, Mirrored or bare value with ``function`` of each replica's value and capacity."""
    import tensorflow as tf

    values = [function(value, capacity) for value, capacity in zip(_replicas(distributed), capacities)]
    if isinstance(distributed, tf.IndexedSlices):
        return values[0]
    mapped = object.__new__(type(distributed))
    mapped.__dict__.update(distributed.__dict__)
    mapped._values = tuple(values)
    return mapped


def pad_rows(slices, capacity, name):
    """Pads IndexedSlices to ``capacity`` rows (an integer or a scalar tensor) with zeros at index -1.

    Too many rows are not an error here but a message to all workers, or those with fewer rows would wait for ever
    for the one that stopped: the rows are cut and every index becomes -1 - (number of rows), which
    ``unpad_rows`` turns into the same error on every worker.
    """
    import tensorflow as tf

    static = capacity if isinstance(capacity, int) else None
    rows = slices.indices.shape.as_list()[0] if slices.indices.shape.ndims else None
    if static is not None and rows is not None and rows > static:
        raise ValueError("%s Rows: %d" % (_too_many_rows(capacity, name), rows))
    with tf.device(slices.indices.device):
        num_rows = tf.shape(slices.indices)[0]
        kept = tf.minimum(num_rows, capacity)
        padding = tf.fill([capacity - kept], tf.constant(DROPPED, slices.indices.dtype))
        indices = tf.concat([slices.indices[:kept], padding], 0)
        message = tf.fill([capacity], tf.cast(DROPPED - num_rows, slices.indices.dtype))
        indices = tf.cond(num_rows > capacity, lambda: message, lambda: indices)
        indices.set_shape([static])
    with tf.device(slices.values.device):
        row_shape = tf.shape(slices.values)[1:]
        padding = tf.zeros(tf.concat([[capacity - kept], row_shape], 0), slices.values.dtype)
        values = tf.concat([slices.values[:kept], padding], 0)
        values.set_shape(tf.TensorShape([static]).concatenate(slices.values.shape[1:]))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def unpad_rows(slices, capacity, name):
    """Drops the rows at index -1, or fails where some replica had more than ``capacity`` rows."""
    import tensorflow as tf

    with tf.device(slices.indices.device):
        lowest = tf.reduce_min(slices.indices)
        with tf.device("/device:CPU:0"):
            fits = tf.Assert(lowest >= DROPPED, [_too_many_rows(capacity, name), "Rows:", DROPPED - lowest])
        with tf.control_dependencies([fits] if fits is not None else []):
            real = tf.reshape(tf.where(slices.indices >= 0), [-1])
        indices = tf.gather(slices.indices, real)
    with tf.device(slices.values.device):
        values = tf.gather(slices.values, real)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _too_many_rows(capacity, name):
    return (
        "tfring_sparse_patch: a replica's gradient of %s has more rows than the %s (batch_size * ids_per_example) "
        "there is room for. In tfring_sparse_patch.apply(...) raise batch_size to the most examples a replica "
        "sees in a step, or ids_per_example to the most values a feature has." % (name, capacity)
    )
