"""The layer in one process: as keras.layers.BatchNormalization, in its arguments, weights and files."""

import doctest
import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest
import shards
import tensorflow as tf

import tfring
from tfring.layers import batch_normalization, sync_batch_normalization

HAS_RENORM = "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(axis=1),
        dict(momentum=0.5, epsilon=1e-2, center=False),
        dict(scale=False),
        dict(beta_initializer="ones", gamma_initializer=keras.initializers.Constant(2)),
        dict(moving_mean_initializer="ones", moving_variance_initializer=keras.initializers.Constant(3)),
        dict(gamma_constraint=keras.constraints.NonNeg(), beta_regularizer="l2", name="bn"),
        dict(synchronized=True),
        pytest.param(
            dict(renorm=True, renorm_clipping=dict(rmin=0.7, rmax=1.5, dmax=0.5), renorm_momentum=0.9),
            marks=pytest.mark.skipif(not HAS_RENORM, reason="this Keras has no renorm"),
        ),
        pytest.param(
            dict(renorm=True, scale=False),
            marks=pytest.mark.skipif(not HAS_RENORM, reason="this Keras has no renorm"),
        ),
    ],
    ids=str,
)
def test_arguments(options):
    layers = [tfring.SyncBatchNormalization(**options), keras.layers.BatchNormalization(**options)]
    data = dict(shape=(11, 4, 5), axis=options.get("axis", -1))
    for layer in layers:
        layer.build(data["shape"])
    got, want = (shards.train(layer, shards.batches(**data)) for layer in layers)
    shards.assert_close(got, want)
    x = next(iter(shards.batches(**data)))[0]
    np.testing.assert_allclose(layers[0](x), layers[1](x), rtol=1e-5, atol=1e-5)  # inference
    assert [w.name for w in layers[0].weights] == [w.name for w in layers[1].weights]


def test_every_argument_of_keras_has_its_default():
    ours = inspect.signature(tfring.SyncBatchNormalization).parameters
    theirs = inspect.signature(keras.layers.BatchNormalization).parameters
    for name, parameter in theirs.items():
        if name not in ("kwargs", "synchronized", "renorm", "renorm_clipping", "renorm_momentum"):
            assert ours[name].default == parameter.default, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(synchronization="ring"), "`synchronization` is 'ring'"),
        (dict(sync_every=0), "`sync_every` is 0"),
        (dict(sync_every=1.5), "`sync_every` is 1.5"),
        (dict(sync_every=True), "`sync_every` is True"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        tfring.SyncBatchNormalization(**options)


def test_wrong_mask():
    with pytest.raises(ValueError, match="one dimension less"):
        tfring.SyncBatchNormalization()(np.zeros((4, 3, 2), "float32"), training=True, mask=np.ones((4, 3, 2), bool))


def test_the_outputs_of_a_large_mean():
    x = (np.random.default_rng(0).normal(size=(1000, 4)) + 1e5).astype("float32")
    got = tfring.SyncBatchNormalization(epsilon=0.0)(x, training=True)
    wide = x.astype("float64")
    np.testing.assert_allclose(got, (wide - wide.mean(0)) / wide.std(0), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_of_half_precision_are_float32(dtype):
    """600 squared is beyond float16's range, 5000 elements beyond the whole numbers it and bfloat16 can hold."""
    x = tf.cast(np.random.default_rng(0).normal(size=(5000, 4)) * 20 + 600, dtype)
    layer = tfring.SyncBatchNormalization(momentum=0.0, dtype=f"mixed_{dtype}")
    outputs = layer(x, training=True)
    assert outputs.dtype == dtype
    wide = tf.cast(x, tf.float64).numpy()
    np.testing.assert_allclose(layer.moving_mean, wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, wide.var(0), rtol=1e-5)


def test_the_gradient_about_a_large_mean():
    x = (np.random.default_rng(0).normal(size=(1000, 4)) + 1e5).astype("float32")
    slope = np.random.default_rng(1).normal(size=x.shape).astype("float32") + x - 1e5
    gradients = []
    for kind, dtype in ((tfring.SyncBatchNormalization, "float32"), (keras.layers.BatchNormalization, "float64")):
        layer = kind(dtype=dtype)
        layer.build(x.shape)
        value = tf.constant(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(layer(value, training=True) * tf.constant(slope, dtype))
        gradients.append(tape.gradient(loss, [value, layer.gamma.value, layer.beta.value]))
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_frozen():
    x = shards.batches((11, 4))
    x = next(iter(x))[0]
    layer = tfring.SyncBatchNormalization()
    layer.trainable = False
    np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1.001), rtol=1e-5)
    assert not layer.moving_mean.numpy().any()


def test_everything_masked():
    layer = tfring.SyncBatchNormalization()
    x = np.full((3, 2, 4), np.nan, "float32")
    layer(x, training=True, mask=np.zeros((3, 2), bool))
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.ones(4))


def test_no_rows():
    layer = tfring.SyncBatchNormalization()
    layer.build((None, 4))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.zeros([0, 4]), training=True))
    for gradient in tape.gradient(loss, [v.value for v in layer.trainable_variables]):
        np.testing.assert_array_equal(gradient, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.ones(4))


@pytest.mark.parametrize("variable", ["x", "gamma"])
def test_second_derivatives_are_refused(variable):
    layer = tfring.SyncBatchNormalization()
    layer.build((None, 4))
    x = tf.constant(next(iter(shards.batches((11, 4))))[0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    with pytest.raises(LookupError, match="no second derivative"):
        outer.gradient(penalty, {"x": x, "gamma": layer.gamma.value}[variable])


def small_model(normalization):
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3),
            normalization(name="normalization"),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def scrambled(model):
    generator = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(generator.uniform(0.5, 2, variable.shape))
    return model


@pytest.mark.parametrize("ending", [".weights.h5", ".keras"])
@pytest.mark.parametrize("to_keras", [False, True])
def test_weights_move_between_the_two(tmp_path, ending, to_keras):
    kinds = [tfring.SyncBatchNormalization, keras.layers.BatchNormalization]
    source, target = (small_model(kind) for kind in (kinds if to_keras else reversed(kinds)))
    scrambled(source)
    path = tmp_path / f"model{ending}"
    source.save_weights(path) if ending == ".weights.h5" else source.save(path)
    target.load_weights(path)
    x = np.random.default_rng(0).normal(size=(3, 6, 6, 2)).astype("float32")
    np.testing.assert_array_equal(source(x), target(x))


def test_a_saved_model_loads_where_there_is_no_cluster(tmp_path):
    model = scrambled(
        small_model(lambda **o: tfring.SyncBatchNormalization(synchronization="central", sync_every=3, **o))
    )
    x = np.random.default_rng(0).normal(size=(3, 6, 6, 2)).astype("float32")
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    program = (
        "import keras, tfring.layers, numpy as np\n"
        "model = keras.saving.load_model('model.keras')\n"
        "layer = model.get_layer('normalization')\n"
        "assert type(layer).__name__ == 'SyncBatchNormalization', layer\n"
        "assert (layer.synchronization, layer.sync_every) == ('central', 3)\n"
        "np.save('y.npy', model.predict(np.load('x.npy'), verbose=0))\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model(x), rtol=1e-6)


def test_registered_name():
    assert keras.saving.get_registered_name(tfring.SyncBatchNormalization) == "tfring>SyncBatchNormalization"


@pytest.mark.parametrize("module", [batch_normalization, sync_batch_normalization])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
