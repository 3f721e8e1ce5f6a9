"""Models with dense layers, sharded under a strategy, and meshes, for the tests of ShardedDense."""

import tfring

MODEL = tfring.Mesh(data=1, model=2)
BOTH = tfring.Mesh(data=2, model=2)


def dense(units, split, **options):
    """Under a strategy sharded; alone a layer of Keras."""
    import keras
    import tensorflow as tf

    if tf.distribute.has_strategy():
        return tfring.layers.ShardedDense(units, split, **options)
    for name in ("axis", "gather_output", "input_is_parallel"):
        options.pop(name, None)
    return keras.layers.Dense(units, **options)


def model_of(optimizer, layers, **compiled):
    def make():
        import keras

        inputs = hidden = keras.Input((4,))
        for units, split, options in layers:
            hidden = dense(units, split, **options)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"], **compiled)
        return model

    return make


# Pieces of 7, 5 and 6 are of different sizes; features of the first are 4.
PAIR = [(7, "columns", {"activation": "tanh"}), (5, "rows", {})]
ALONE = {
    "columns": [(7, "columns", {"activation": "softmax"})],
    "rows": [(7, "rows", {"activation": "tanh"})],
    "pair": PAIR,
    "rows first": [(6, "rows", {"activation": "relu"}), (5, "columns", {"use_bias": False})],
}
ONE_SUM = [
    (6, "columns", {"activation": "tanh", "gather_output": False}),
    (5, "rows", {"input_is_parallel": True, "use_bias": True}),
]
