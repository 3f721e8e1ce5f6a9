"""Values are looked up in a step's graph in a time that grows with the graph."""

from harness import workers


def lookups(num_layers):
    """Returns how values depend on a state, and how often it was asked whether a tensor is that state.

    As the metrics of many layers: each follows from the rows through all layers before it.
    """
    import tensorflow as tf

    from tfring.step import graphs

    state = tf.Variable(0.0)
    asked, kinds = [], []

    class Reads(graphs.StateReads):
        def _source(self, tensor):
            asked.append(tensor)
            return super()._source(tensor)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        reads = Reads(lambda handle: handle is state.handle)
        for _ in range(num_layers):
            x = tf.tanh(x)
            mean = tf.reduce_mean(x)
            values = mean, state + mean, mean + state - mean, mean - state, 0.9 * state + mean, state + state
            kinds.append([reads.kind(state, value) for value in values])
        return x

    step.get_concrete_function()
    return kinds, len(asked)


def test_kinds_of_values_in_a_deep_graph():
    [(few, asked)] = workers(1).run(lookups, 10)
    [(many, asked_of_many)] = workers(1).run(lookups, 80)
    assert few + 7 * few == many
    assert few == [["none", "added", "added", "", "", ""]] * 10
    assert asked_of_many < 9 * asked
