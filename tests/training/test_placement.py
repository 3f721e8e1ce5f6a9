"""Operations of a step that no device is said of: TensorFlow places them on a GPU, where there is one."""

import collections

import harness
from common import skewed_rows
from harness import workers

from tfring._keras import agreement


def unplaced(kind):
    """In a worker: operations without a device around the step of a `fit`, how many of each type."""
    import keras
    import tensorflow as tf

    strategy = harness.strategy()
    graphs = []
    check_model = agreement.check_model

    def noting(ring, model, name, graph):
        graphs.append(graph)
        return check_model(ring, model, name, graph)

    agreement.check_model = noting
    try:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x, y = skewed_rows()
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
        if kind == "rows of its own":
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
            rows = rows.with_options(options)
        model.fit(*((x, y) if kind == "arrays" else (rows,)), verbose=0)
    finally:
        agreement.check_model = check_model
    [graph] = graphs
    return collections.Counter(op.type for op in graph.get_operations() if not op.device)


def test_what_is_drawn_and_told_before_a_step_stays_on_the_host():
    """There it waits for no step before, and the arrays of a `fit` are not copied to a GPU."""
    for kind in ("arrays", "dataset", "rows of its own"):
        for found in workers(2).run(unplaced, kind):
            beside_the_iterator = {"IteratorGetNextAsOptional", "OptionalHasValue"}
            if kind == "rows of its own":  # which TensorFlow prefetches to the device
                beside_the_iterator.add("StatelessIf")
            captured_or_returned = {"Placeholder", "Identity", "NoOp", "Const"}
            assert set(found) <= {*beside_the_iterator, *captured_or_returned, "If"}, (kind, found)
            assert found["If"] == 1, "the step itself"
