"""measure_layers: what layers cost, where a Pipeline may be cut, and stages made of that on several workers."""

import numpy as np
import pytest
from common import relative_error
from harness import strategy, workers

import tfring

ROWS, BATCH = 40, 20


def network(stateful=False):
    """A mask, tied weights, a skip connection over them; with `stateful` layers that write while they train."""
    import keras

    layers = keras.layers
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True, name="table")(ids)
    first = x = layers.GlobalAveragePooling1D(name="pooled")(layers.Dense(8, name="masked")(x))
    if stateful:
        x = layers.Dropout(0.5, name="dropout")(layers.BatchNormalization(name="normal")(x))
    tied = layers.Dense(8, activation="tanh", name="tied")
    x = tied(layers.Dense(8, activation="relu", name="between")(tied(x)))
    x = layers.Add(name="sum")([x, first])
    x = layers.Dense(64, activation="relu", name="wide")(x)
    return keras.Model(ids, layers.Dense(1, name="last")(layers.Flatten(name="flat")(x)))


def ids_of(rows):
    return np.random.default_rng(0).integers(0, 30, size=(rows, 6)).astype("int32")


def balanced():
    """Trains in stages as measured; the costs, where they begin, and how far the weights are from one process."""
    import keras

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    keras.utils.set_random_seed(3)
    with ring.scope():
        model = network()
    start = model.get_weights()
    costs = tfring.parallel.measure_layers(model, ids_of(5), repetitions=3)
    plan = tfring.parallel.plan_stages(costs, 2, num_microbatches=4)
    with ring.scope():
        pipeline = tfring.parallel.Pipeline(model, plan.begins, num_microbatches=4)
        pipeline.compile(keras.optimizers.SGD(0.05), "mse")
    alone = network()
    alone.set_weights(start)
    alone.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = ids_of(ROWS), np.linspace(-1, 1, ROWS)[:, None]
    for each in (pipeline, alone):
        each.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    with pytest.raises(tfring.errors.ConfigurationError, match="belongs to one stage"):
        tfring.parallel.measure_layers(model, ids_of(5))
    return costs, plan.begins, relative_error(pipeline.get_weights(), alone.get_weights())


def with_collectives():
    """The costs of layers that exchange something in their passes."""
    import keras

    ring = strategy()
    with ring.scope():
        layers = [tfring.layers.ShardedDense(6, name="sharded"), tfring.SyncBatchNormalization(name="normal")]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dropout(0.5, name="dropout")])
    before = model.get_weights()
    costs = tfring.parallel.measure_layers(model, np.ones((8, 4), "float32"), slots=0, repetitions=2)
    return costs, all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.oldest
def test_balanced_stages():
    first, second = workers(2).run(balanced)
    assert first[:2] == second[:2] and len(first[1]) == 1
    assert max(first[2], second[2]) < 1e-5


@pytest.mark.oldest
def test_layers_that_exchange():
    (costs, unchanged), (others, also) = workers(2).run(with_collectives)
    assert costs == others and unchanged and also
    assert costs[0].weight_bytes == 4 * 2 * 3 * 5  # of half of the columns


def costs_of_a_network():
    """Costs, which cuts a Pipeline takes, and whether measuring left the model and the random numbers as they were."""
    import keras

    from tfring.parallel.stages import cut_model

    keras.utils.set_random_seed(3)
    model = network(stateful=True)
    before = [variable.numpy() for variable in model.variables]
    costs = tfring.parallel.measure_layers(model, ids_of(5), slots=1, repetitions=3)
    unchanged = all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))
    taken = {}
    for cost in costs:
        try:
            cut_model(model, [cost.name])
            taken[cost.name] = True
        except tfring.errors.ConfigurationError:
            taken[cost.name] = False
    return costs, taken, unchanged


def test_costs():
    [(costs, taken, unchanged)] = workers(1).run(costs_of_a_network)
    assert unchanged
    names = [cost.name for cost in costs]
    assert names.count("tied") == 2 and names[0] == "table" and names[-1] == "last"
    calls = {cost.name: cost for cost in reversed(costs)}  # the first of each name
    assert {name: cost.may_begin for name, cost in calls.items()} == taken
    assert not taken["table"] and not taken["masked"] and not taken["between"] and taken["wide"]
    assert [cost.may_begin for cost in costs if cost.name == "tied"] == [True, False]
    # Weights with gradients and one slot, once.
    assert calls["wide"].weight_bytes == 4 * 3 * (8 * 64 + 64)
    assert [cost.weight_bytes for cost in costs if cost.name == "tied"] == [4 * 3 * (8 * 8 + 8), 0]
    assert calls["normal"].weight_bytes == 4 * (3 * 16 + 16)  # moving statistics have neither
    # Of 5 rows: the output of relu is kept once, by the layer that makes it, also where another only reshapes it.
    assert calls["wide"].activation_bytes == 4 * 5 * 64 and calls["wide"].crossing_bytes == 4 * 5 * 8
    assert calls["flat"].activation_bytes == calls["last"].activation_bytes == 0
    # Of rows of 8, what `sum` adds crosses besides, however far the cut is from it.
    assert calls["tied"].crossing_bytes == 2 * 4 * 5 * 8 and calls["flat"].crossing_bytes == 4 * 5 * 64


def of_layers(*layers, rows=64, width=256, **options):
    """The costs of a chain."""
    import keras

    made = [getattr(keras.layers, kind)(*arguments, **more) for kind, arguments, more in layers]
    model = keras.Sequential([keras.Input((width,)), *made])
    return tfring.parallel.measure_layers(model, np.ones((rows, width), "float32"), **options)


def test_more_work_takes_longer():
    frozen = {"trainable": False}
    layers = [("Dense", (16,), {}), ("Dense", (256,), {}), ("Dense", (1024,), {}), ("Dense", (1024,), {})]
    [costs] = workers(1).run(of_layers, *layers, ("Activation", ("linear",), {}))
    assert costs[3].seconds > costs[1].seconds and costs[3].seconds > costs[4].seconds  # each 100 times the work
    # Frozen layers at the start have no backward pass, and keep nothing for it.
    [costs] = workers(1).run(of_layers, ("Dense", (256, "relu"), frozen), ("Dense", (256, "relu"), {}))
    assert [cost.weight_bytes for cost in costs] == [4 * 256 * 257, 4 * 4 * 256 * 257]
    assert [cost.activation_bytes for cost in costs] == [4 * 64 * 256] * 2  # the first, for the second's weights


def refused():
    """The errors of what cannot be measured."""
    import keras

    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    errors = []
    for options in ({"slots": -1}, {"slots": 1.0}, {"repetitions": 0}):
        with pytest.raises(tfring.errors.ConfigurationError) as raised:
            of_layers(("Dense", (1,), {}), **options)
        errors.append(str(raised.value))
    with pytest.raises(tfring.errors.ConfigurationError) as raised:
        tfring.parallel.measure_layers(Own(), np.ones((2, 2)))
    return [*errors, str(raised.value)]


def test_what_is_refused():
    [errors] = workers(1).run(refused)
    for error, received in zip(errors, ("`slots` is -1", "`slots` is 1.0", "`repetitions` is 0", "a Own"), strict=True):
        assert received in error
