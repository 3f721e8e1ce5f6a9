"""Models that have batch normalization: converted with their weights, frozen, and what is refused."""

import math

import keras
import numpy as np
import pytest

import tfring
from tfring.layers import (
    freeze_batch_normalization,
    to_group_normalization,
    to_sync_batch_normalization,
    unfreeze_batch_normalization,
)


class Hiding(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.normalization = keras.layers.BatchNormalization(name="hidden")

    def call(self, x):
        return self.normalization(x)


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.normalization = keras.layers.BatchNormalization()

    def call(self, x):
        return self.normalization(x)


def nested_model():
    """Batch normalization in a nested model that is used twice, in wrappers, shared, and along axis 1."""
    part = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            keras.layers.Conv2D(8, 3),
            keras.layers.BatchNormalization(momentum=0.7, trainable=False, name="frozen"),
            keras.layers.ReLU(),
        ],
        name="part",
    )
    films, images = keras.Input((2, 6, 6, 4)), keras.Input((6, 6, 4))
    x = keras.layers.TimeDistributed(part)(films)
    x = keras.layers.TimeDistributed(keras.layers.BatchNormalization(epsilon=0.1, name="wrapped"))(x)
    x = keras.layers.GlobalAveragePooling3D()(x)
    shared = keras.layers.BatchNormalization(axis=1, scale=False, name="shared")
    y = shared(shared(part(images)), training=True)
    y = keras.layers.GlobalAveragePooling2D()(y)
    return scrambled(keras.Model([films, images], keras.layers.Add()([x, y])))


def scrambled(model, seed=0):
    generator = np.random.default_rng(seed)
    for variable in model.weights:
        if variable.dtype.startswith("float"):
            variable.assign(generator.uniform(0.5, 1.5, variable.shape))
    return model


def inputs_of(model, rows=3):
    generator = np.random.default_rng(1)
    return [generator.normal(size=(rows, *x.shape[1:])).astype("float32") for x in model.inputs]


def of_kind(model, kind):
    from tfring._keras.layers import all_layers

    return {layer.name: layer for layer in all_layers(model) if type(layer) is kind}


@pytest.mark.parametrize("training", [False, True])
def test_nested_models_compute_the_same(training):
    model = nested_model()
    converted = to_sync_batch_normalization(model, synchronization="central", sync_every=2)
    x = inputs_of(model)
    np.testing.assert_allclose(converted(x, training=training), model(x, training=training), atol=1e-5)
    assert [w.path for w in converted.weights] == [w.path for w in model.weights]
    assert [w.trainable for w in converted.weights] == [w.trainable for w in model.weights]
    layers = of_kind(converted, tfring.SyncBatchNormalization)
    assert set(layers) == {"frozen", "wrapped", "shared"}
    assert not of_kind(converted, keras.layers.BatchNormalization)
    assert all(layer.synchronization == "central" and layer.sync_every == 2 for layer in layers.values())
    assert set(of_kind(model, keras.layers.BatchNormalization)) == {"frozen", "wrapped", "shared"}  # untouched


@pytest.mark.parametrize("name", ["ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121"])
def test_applications(name):
    model = scrambled(getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=5))
    converted = to_sync_batch_normalization(model)
    x = inputs_of(model)
    np.testing.assert_array_equal(converted(x), model(x))
    count = len(of_kind(model, keras.layers.BatchNormalization))
    assert count > 40 and len(of_kind(converted, tfring.SyncBatchNormalization)) == count


def test_twice_takes_the_new_settings():
    once = to_sync_batch_normalization(nested_model())
    twice = to_sync_batch_normalization(once, sync_every=4)
    assert {layer.sync_every for layer in of_kind(twice, tfring.SyncBatchNormalization).values()} == {4}
    np.testing.assert_array_equal(twice(inputs_of(once)), once(inputs_of(once)))


def test_compiled_models_are_converted_uncompiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    model.compile("sgd", lambda y, p: (y - p) ** 2)
    assert not to_sync_batch_normalization(model).compiled
    assert model.compiled


def test_group_normalization():
    model = nested_model()
    converted = to_group_normalization(model, groups=lambda channels: math.gcd(channels, 2))
    assert not of_kind(converted, keras.layers.BatchNormalization)
    old, new = of_kind(model, keras.layers.BatchNormalization), of_kind(converted, keras.layers.GroupNormalization)
    assert set(old) == set(new)
    for name, layer in new.items():
        assert (layer.axis, layer.epsilon, layer.trainable) == (old[name].axis, old[name].epsilon, old[name].trainable)
        assert layer.groups == 2
        np.testing.assert_array_equal(layer.beta, old[name].beta)
        assert (layer.gamma is None) == (name == "shared")
        if layer.gamma is not None:
            np.testing.assert_array_equal(layer.gamma, old[name].gamma)
    kernels = [[w.numpy() for w in m.weights if "kernel" in w.path] for m in (model, converted)]
    np.testing.assert_array_equal(*kernels)
    assert np.isfinite(converted(inputs_of(model))).all()


def test_group_normalization_of_a_synchronized_model_with_a_mask():
    x = keras.Input((5,))
    y = keras.layers.Embedding(7, 4, mask_zero=True)(x)
    model = keras.Model(x, tfring.SyncBatchNormalization()(y))
    assert to_group_normalization(model, groups=2)(np.ones((2, 5))).shape == (2, 5, 4)


@pytest.mark.parametrize("groups", [3, 0, 16])
def test_groups_are_checked_against_channels(groups):
    with pytest.raises(ValueError) as error:
        to_group_normalization(nested_model(), groups=groups)
    for problem in (f"frozen has 8 channels, groups={groups}", "shared has 4 channels", "wrapped has 8 channels"):
        assert problem in str(error.value)


def test_one_group_a_channel():
    assert to_group_normalization(nested_model(), groups=-1).get_layer("shared").groups == 4


@pytest.mark.parametrize("convert", [to_sync_batch_normalization, to_group_normalization])
def test_what_cannot_be_rebuilt_is_told(convert):
    x = keras.Input((32,))
    with pytest.raises(ValueError, match=r"hiding.*/hidden"):
        convert(keras.Model(x, Hiding(name="hiding")(x)))
    model = Subclassed(name="mine")
    with pytest.raises(ValueError, match="built"):
        convert(model)
    model(np.zeros((2, 32), "float32"))
    with pytest.raises(ValueError, match="mine is a Subclassed"):
        convert(model)
    with pytest.raises(ValueError, match="mine is a Subclassed"):
        convert(keras.Model(x, model(x)))


def test_freeze_and_unfreeze():
    x = keras.Input((32,))
    for model in (nested_model(), to_sync_batch_normalization(nested_model())):
        frozen = freeze_batch_normalization(model)
        assert {layer.name for layer in frozen} == {"wrapped", "shared"}  # the third was frozen before
        assert freeze_batch_normalization(model) == []
        assert {layer.name for layer in unfreeze_batch_normalization(model, frozen)} == {"wrapped", "shared"}
        assert [layer.name for layer in unfreeze_batch_normalization(model)] == ["frozen"]
    hiding = keras.Model(x, Hiding()(x))
    assert [layer.name for layer in freeze_batch_normalization(hiding)] == ["hidden"]
    assert not [v for v in hiding.trainable_variables if "hidden" in v.path]
