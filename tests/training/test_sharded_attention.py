"""ShardedMultiHeadAttention: workers with some heads each equal one process with all."""

import numpy as np
import pytest
from common import assert_equal, relative_error, train_both
from harness import strategy, workers

import tfring

MODEL = tfring.Mesh(data=1, model=2)
BOTH = tfring.Mesh(data=2, model=2)
LENGTH, WIDTH = 5, 6


def attention(**options):
    """Under a strategy sharded; alone the layer of Keras."""
    import keras
    import tensorflow as tf

    layers = tfring.layers if tf.distribute.has_strategy() else keras.layers
    kind = "ShardedMultiHeadAttention" if tf.distribute.has_strategy() else "MultiHeadAttention"
    return getattr(layers, kind)(num_heads=4, key_dim=3, value_dim=2, **options)


def model_of(optimizer, masked=False, **options):
    """Self-attention, and that of a sequence to another."""

    def make():
        import keras

        inputs = keras.Input((LENGTH, WIDTH))
        given = keras.layers.Masking()(inputs) if masked else inputs
        hidden = keras.layers.Dense(WIDTH, activation="tanh")(given)
        attended = attention(**options)(hidden, hidden, use_causal_mask=True)
        crossed = attention(output_shape=4, use_bias=False)(attended, inputs, key=hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(crossed)))
        model.compile(optimizer(), "mse")
        return model

    return make


def skewed_sequences(num_rows=43, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_rows, LENGTH, WIDTH)) * np.linspace(0.5, 2, num_rows)[:, None, None]
    x[::3, -2:] = 0  # masked
    return x.astype("float32"), x.sum((1, 2), keepdims=True)[:, 0].astype("float32")


def fitted(mesh, dtype, names):
    import keras

    keras.config.set_floatx(dtype)
    ring = strategy(mesh=mesh)
    x, y = skewed_sequences()
    o = keras.optimizers
    regularized = {"kernel_regularizer": keras.regularizers.L2(0.1), "bias_initializer": "ones"}
    cases = {
        # Softmax does not see the bias of keys: its gradient is rounding, which a small epsilon would make steps of.
        "Adam": model_of(lambda: o.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1)),
        "masked": model_of(lambda: o.SGD(0.01), masked=True),
        "regularized": model_of(lambda: o.SGD(0.01, momentum=0.9), **regularized),
    }
    also = {"masked": {"evaluate": (x, y), "predict": x}}
    return {name: train_both(ring, make, x, y, **also.get(name, {})) for name, make in cases.items() if name in names}


@pytest.mark.parametrize(("mesh", "dtype", "names"), [
    pytest.param(MODEL, "float64", ["Adam", "masked", "regularized"], marks=pytest.mark.oldest),
    (BOTH, "float32", ["Adam"]),
    pytest.param(BOTH, "float32", ["masked", "regularized"], marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_equals_one_process(mesh, dtype, names):
    results = workers(mesh.size).run(fitted, mesh, dtype, names)
    assert set(results[0]) == set(names)
    assert_equal(results, tolerance=1e-12 if dtype == "float64" else 1e-5)


def files(folder, mesh, writes):
    """Returns the shards of a worker, and the state of a model written to, or made of, the files."""
    import keras

    keras.utils.set_random_seed(3 + mesh.size)
    x, y = skewed_sequences()
    ring = strategy(mesh=mesh)
    with ring.scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01))()
    start = model.get_weights()
    if writes:
        model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        for name in ("model.keras", "model.weights.h5"):
            tfring.save(model, f"{folder}/{name}")
    else:
        with ring.scope():
            model.optimizer.build(model.trainable_variables)
            model.load_weights(f"{folder}/model.weights.h5")
            again = keras.models.load_model(f"{folder}/model.keras")
        assert relative_error(again.get_weights(), model.get_weights()) == 0
        if mesh.size == 1:
            plain = model_of(lambda: keras.optimizers.Adam(0.01))()
            plain.optimizer.build(plain.trainable_variables)
            plain.load_weights(f"{folder}/model.weights.h5")
            assert relative_error(plain.get_weights(), model.get_weights()) == 0
    store: dict = {}
    model.optimizer.save_own_variables(store)
    slots = [np.asarray(store[key]) for key in sorted(store, key=int)]
    return start, model.get_weights(), slots, [tuple(v.shape) for v in model.layers[2].weights]


def test_files(tmp_path):
    (_, weights, slots, shapes), *_ = workers(4).run(files, str(tmp_path), BOTH, True)
    kernel, bias = (WIDTH, 2, 3), (2, 3)
    assert shapes == [kernel, bias, kernel, bias, (WIDTH, 2, 2), (2, 2), (2, 2, WIDTH), (WIDTH,)]
    for mesh in (tfring.Mesh(data=1), MODEL, tfring.Mesh(data=2)):
        for _, got, got_slots, _ in workers(mesh.size).run(files, str(tmp_path), mesh, False):
            assert relative_error(got, weights) == 0
            assert relative_error(got_slots, slots) == 0


def drawn(mesh):
    import keras

    keras.utils.set_random_seed(5)
    with strategy(mesh=mesh).scope():
        return model_of(lambda: keras.optimizers.SGD(0.01))().get_weights()


def drawn_by_keras():
    import keras

    keras.utils.set_random_seed(5)
    return model_of(lambda: keras.optimizers.SGD(0.01))().get_weights()


def test_initial_values():
    [want] = workers(1).run(drawn_by_keras)
    for got in workers(2).run(drawn, MODEL):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def refused():
    import keras

    errors = {}
    ring = strategy(mesh=MODEL)
    x, y = skewed_sequences()

    def attempt(name, function):
        with pytest.raises(tfring.errors.ConfigurationError) as raised:
            function()
        errors[name] = str(raised.value)

    with ring.scope():
        attempt("heads", lambda: tfring.layers.ShardedMultiHeadAttention(3, 2).build((None, 4, 5), (None, 4, 5)))
        attempt("scores", lambda: attention()(x, x, return_attention_scores=True))
        attempt("constraint", lambda: attention(kernel_constraint="max_norm"))
        model = model_of(lambda: keras.optimizers.Lamb(0.01))()
        layer = attention()
        layer.build((None, 4, 6), (None, 4, 6))
    attempt("LoRA", lambda: layer.query_dense.enable_lora(2))
    attempt("Lamb", lambda: model.fit(x, y, verbose=0))
    return errors


def test_what_is_refused():
    for errors in workers(2).run(refused):
        assert "num_heads=3" in errors["heads"]
        assert "return_attention_scores=True" in errors["scores"]
        assert "enable_lora() of '" in errors["LoRA"]
        assert "kernel_constraint=MaxNorm" in errors["constraint"]
        assert "Lamb '" in errors["Lamb"]
