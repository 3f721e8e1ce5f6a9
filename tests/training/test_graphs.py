"""Values are looked up in a step's graph in a time that grows with the graph."""

from harness import workers


def lookups(num_layers):
    """Returns kinds of values that follow from each other, and how often it was asked whether an operation is a source.

    As the moving statistics of many layers: each follows from the rows through all layers before it.
    """
    import tensorflow as tf

    from tfring.step import graphs

    asked, kinds = [], []
    is_source = graphs._may_differ
    graphs._may_differ = lambda tensor: asked.append(tensor) or is_source(tensor)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        constant = tf.constant(1.0)
        for _ in range(num_layers):
            x = tf.tanh(x)
            constant = tf.tanh(constant)
            mean = tf.reduce_mean(x)
            values = mean, constant, 0.9 * constant + 0.1 * mean, mean * mean
            kinds.append([graphs.kind_of(value) for value in values])
        return x

    try:
        step.get_concrete_function()
    finally:
        graphs._may_differ = is_source
    return kinds, len(asked)


def test_kinds_of_values_in_a_deep_graph():
    [(few, asked)] = workers(1).run(lookups, 10)
    [(many, asked_of_many)] = workers(1).run(lookups, 80)
    assert few + 7 * few == many
    assert few == [["mean", "constant", "mean", "other"]] * 10
    assert asked_of_many < 9 * asked
