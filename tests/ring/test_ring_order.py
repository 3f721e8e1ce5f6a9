"""The order of collectives that ranks' graphs or threads leave open."""

import itertools
import os
import threading

import numpy as np
import pytest
from harness import workers
from test_ring_ops import join

_names = itertools.count()


def run(task, *args, **kwargs):
    return workers(2).run(task, f"order-{os.getpid()}-{next(_names)}", *args, **kwargs)


def _longer(rank, tensor, among=(1,)):
    """The same, by way of more operations on some ranks: the tape comes there later."""
    for _ in range(3 if rank in among else 0):
        tensor = tensor * 1.0
    return tensor


def gradient_orders(name):
    """Programs whose ranks differ in what lies between a collective and the loss; the gradients of one process."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring, join(f"{name} second") as second:
        rank = ring.rank
        x = tf.constant([1.0, 2.0])
        w1, w2 = tf.Variable([1.0, 1.0]), tf.Variable([2.0, 2.0])

        def two(other=ring, unused=False, one="all_reduce", two="all_reduce"):
            with tf.GradientTape() as tape:
                a = ops.all_reduce(ring, w1 * x, name=one)
                b = ops.all_reduce(other, w2 * x, name=two)
                a, b = _longer(rank, a), _longer(rank, b, (0,))
                if unused:
                    loss = tf.reduce_sum(a) + 0 * tf.reduce_sum(b) if rank else 0 * tf.reduce_sum(a) + tf.reduce_sum(b)
                else:
                    loss = tf.reduce_sum(a) + 10 * tf.reduce_sum(b)
            return tape.gradient(loss, [w1, w2])

        def branches():
            with tf.GradientTape() as tape:
                a = ops.all_reduce(ring, w1 * x)
                a = _longer(rank, a)
                b = tf.cond(x[0] > 0, lambda: ops.all_reduce(ring, 3 * w1 * x), lambda: w1 * x)
                b = _longer(rank, b, (0,))
                c = ops.all_reduce(ring, ops.all_reduce(ring, w2 * x))
                d = ops.all_gather(ring, _longer(rank, w2 * x))
                loss = tf.reduce_sum(a) + 10 * tf.reduce_sum(b) + 100 * tf.reduce_sum(c) + 1000 * tf.reduce_sum(d)
            return tape.gradient(loss, [w1, w2])

        def nested():
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    a = _longer(rank, ops.all_reduce(ring, w1 * w1 * x))
                    b = _longer(rank, ops.all_reduce(ring, w1 * w2 * x), (0,))
                    loss = tf.reduce_sum(a * a) + 10 * tf.reduce_sum(b)
                gradient = inner.gradient(loss, w1)
                total = tf.reduce_sum(_longer(rank, gradient) * x)
            return outer.gradient(total, [w1, w2])

        def wanted():
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    a, b = 2 * w1 * w1 * x, 2 * w1 * w2 * x
                    loss = 2 * tf.reduce_sum(a * a) + 20 * tf.reduce_sum(b)
                gradient = inner.gradient(loss, w1)
                # Each rank's gradient is that of the sum of both ranks' losses; so is the sum's of the two gradients.
                total = tf.reduce_sum(gradient * x)
            return outer.gradient(total, [w1, w2])

        exact = {
            "two": ([2.0, 4.0], [20.0, 40.0]),
            "unused": ([1.0, 2.0], [1.0, 2.0]),
            "branches": ([2.0 + 60, 4.0 + 120], [400.0 + 2000, 800.0 + 4000]),
        }
        programs = [
            ("two", two),
            ("two", lambda: two(one="first", two="second")),
            ("two", lambda: two(other=second)),
            ("unused", lambda: two(unused=True)),
            ("branches", branches),
        ]
        for (key, program), in_function in itertools.product(programs, (False, True)):
            gradients = (tf.function(program) if in_function else program)()
            for gradient, right in zip(gradients, exact[key], strict=True):
                np.testing.assert_allclose(gradient, right, err_msg=f"{key}, in_function={in_function}")
        for in_function in (False, True):
            gradients = (tf.function(nested) if in_function else nested)()
            for gradient, right in zip(gradients, wanted(), strict=True):
                np.testing.assert_allclose(gradient, right / 2, err_msg=f"nested, in_function={in_function}")

        # A tape around a function, whose gradient TensorFlow makes from its graph; and what no tape watches.
        @tf.function
        def inside(x):
            a, b = ops.all_reduce(ring, w1 * x), ops.all_reduce(ring, w2 * x)
            return tf.reduce_sum(_longer(rank, a)) + 10 * tf.reduce_sum(_longer(rank, b, (0,)))

        with tf.GradientTape() as tape:
            loss = inside(x)
        for gradient, right in zip(tape.gradient(loss, [w1, w2]), exact["two"], strict=True):
            np.testing.assert_allclose(gradient, right)
        before = sum(ring.statistics()["collectives"].values())
        with tf.GradientTape() as tape:
            a = ops.all_reduce(ring, w1 * x)
            b = ops.all_gather(ring, x)
            loss = tf.reduce_sum(a) + tf.reduce_sum(b)
        assert tape.gradient(loss, [w1, w2])[1] is None
        assert sum(ring.statistics()["collectives"].values()) - before == 3, "only what is watched has a gradient"


def test_gradients_come_in_the_reverse_order_of_calls():
    run(gradient_orders)


def gradients_of_loops(name):
    """Loops and branches among other collectives; the gradients of one process that does as two ranks do."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        w = tf.Variable([1.0, 2.0])

        def program(summed, gathered, rank):
            with tf.GradientTape() as tape:
                a = _longer(rank, summed(w * 1.0))
                b = _longer(rank, tf.cond(tf.reduce_sum(w) > 0, lambda: summed(w * 2.0), lambda: w * 1.0), (0,))
                _, c = tf.while_loop(
                    lambda i, c: i < 3,
                    lambda i, c: (i + 1, gathered(c * 2.0)),
                    (tf.constant(0), b),
                    shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
                )
                _, d = tf.while_loop(
                    lambda i, d: i < 2,
                    lambda i, d: (i + 1, _longer(rank, summed(d * w)) + _longer(rank, summed(d * 3.0), (0,))),
                    (tf.constant(0), w * 1.0),
                )
                _, e = tf.while_loop(
                    lambda i, e: i < 2,
                    lambda i, e: (i + 1, tf.cond(tf.equal(i, 0), lambda: summed(e * w), lambda: e * 2 + summed(e))),
                    (tf.constant(0), w * 1.0),
                )
                f, g = _longer(rank, summed(w * 5)), _longer(rank, gathered(w * w), (0,))
                loss = tf.reduce_sum(a * a) + tf.add_n([tf.reduce_sum(each) for each in (c, d * w, e * w, f * w, g)])
            return tape.gradient(loss, w)

        right = program(lambda x: 2 * x, lambda x: tf.concat([x, x], 0), 0)
        collectives = (lambda x: ops.all_reduce(ring, x)), (lambda x: ops.all_gather(ring, x))
        for each in (program, tf.function(program)):
            for _ in range(3):
                got = each(*collectives, ring.rank)
                np.testing.assert_allclose(got, right, rtol=1e-6)


def test_gradients_of_loops_keep_apart_from_what_comes_after():
    run(gradients_of_loops)


def other_gradients(name):
    """Ranks that differentiate different calls under one name."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        w = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            a, b = ops.all_reduce(ring, w), ops.all_reduce(ring, 2 * w)
            loss = tf.reduce_sum(b if ring.rank else a)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradient of collective \d"):
            tape.gradient(loss, w)
        assert type(ring.failure()).__name__ == "MismatchError"


def test_gradients_of_different_calls_are_a_mismatch():
    run(other_gradients)


def threads_on_one_communicator(name, how):
    """Two threads, in opposite order on two ranks: an error on both."""
    import tensorflow as tf

    from tfring.errors import MismatchError
    from tfring.ring import ops

    results = {}
    together = threading.Barrier(2)
    with join(name, timeout_seconds=20) as ring:

        def call(value):
            if how == "numpy":
                return ring.all_reduce(np.full(2, value))
            if how == "eager":
                return ops.all_reduce(ring, tf.fill([2], value)).numpy()
            return tf.function(lambda x: ops.all_reduce(ring, x))(tf.fill([2], value)).numpy()

        def thread(value):
            try:
                together.wait(timeout=20)
                for _ in range(1000):
                    results[value] = call(value)
            except (MismatchError, tf.errors.OpError) as error:
                results[value] = error

        if how == "dataset":
            numbers = tf.data.Dataset.range(64).map(lambda i: ops.all_reduce(ring, i), num_parallel_calls=4)
            with pytest.raises(tf.errors.OpError):
                list(numbers.as_numpy_iterator())
        else:
            order = (1.0, 10.0) if ring.rank == 0 else (10.0, 1.0)
            threads = [threading.Thread(target=thread, args=(value,)) for value in order]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            assert any(isinstance(result, Exception) for result in results.values()), results
        assert isinstance(ring.failure(), MismatchError), ring.failure()
        assert "two threads of rank" in str(ring.failure())


@pytest.mark.parametrize("how", ["numpy", "eager", "functions", "dataset"])
def test_threads_that_contend_are_refused(how):
    run(threads_on_one_communicator, how)
