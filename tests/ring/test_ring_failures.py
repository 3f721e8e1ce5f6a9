"""Failures as a user of TensorFlow sees them: Ctrl-C, a lost rank in `fit`, rings that wait for each other."""

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import ranks
from harness import workers

_names = itertools.count()


def strategy_of(cluster, name):
    """A RingStrategy of a task's cluster; several in a row, for a failure ends one."""
    import tfring
    from tfring.cluster import Cluster

    rank, world_size = cluster.rank, cluster.world_size
    return tfring.RingStrategy(
        Cluster(rank, world_size, rank, world_size, 1, cluster.addresses, name, cluster.listen_fd)
    )


def fit_until(strategy, at_step, run_eagerly=False):
    """Trains; `at_step(step)` is called before each step, on the Python side."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    rows = tf.data.Dataset.from_tensor_slices((np.ones((64, 4), "f4"), np.ones((64, 2), "f4"))).batch(8).repeat()
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda step, logs: at_step(step))
    model.fit(rows, steps_per_epoch=10**6, verbose=0, callbacks=[callback])


def interrupted_everywhere(cluster):
    """Rank 0 waits for rank 1, which is busy for three seconds, and is interrupted after one."""
    import tensorflow as tf

    from tfring.ring import ops

    def interrupt_soon():
        if cluster.rank == 0:
            threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(3)

    def in_a_function(ring):
        step = tf.function(lambda x: ops.all_reduce(ring, x, name="function"))
        step(tf.ones(3))
        interrupt_soon()
        step(tf.ones(3))
        step(tf.ones(3))

    def eagerly(ring):
        ops.all_gather(ring, tf.ones(3))
        interrupt_soon()
        ops.all_gather(ring, tf.ones([3]))
        ops.all_gather(ring, tf.ones([3]))

    def in_fit(ring):
        fit_until(strategy_of(cluster, "fit"), lambda step: step == 3 and interrupt_soon())

    def in_eager_fit(ring):
        fit_until(strategy_of(cluster, "eager"), lambda step: step == 3 and interrupt_soon(), run_eagerly=True)

    seen = []
    for scenario in (in_a_function, eagerly, in_fit, in_eager_fit):
        with ranks.join(cluster, name=f"{cluster.ring} {scenario.__name__}", timeout_seconds=60) as ring:
            start = time.monotonic()
            try:
                scenario(ring)
            except (KeyboardInterrupt, RuntimeError, tf.errors.OpError) as error:
                seen.append((scenario.__name__, type(error).__name__, str(error), time.monotonic() - start))
    return seen


def test_control_c_inside_tensorflow():
    with ranks.Group(2) as group:
        group.start(2, interrupted_everywhere)
        interrupted, other = group.outcomes(120)
        # In a function of the user's own, TensorFlow may have made an error of it before Python raises it.
        assert [kind for _, kind, _, _ in interrupted[1:]] == ["KeyboardInterrupt"] * 3, interrupted
        assert "KeyboardInterrupt" in str(interrupted[0]), interrupted
        for scenario, kind, message, _ in other:
            expected = "AbortedError" if scenario == "in_a_function" else "PeerLostError"
            assert kind == expected and "rank 0 was interrupted during" in message, (scenario, kind, message)


def keep_own_handler(cluster):
    """A handler of the user's that only takes a note does not end the collective."""
    import tensorflow as tf

    from tfring.ring import ops

    notes = []
    signal.signal(signal.SIGINT, lambda number, frame: notes.append(number))
    with ranks.join(cluster) as ring:
        step = tf.function(lambda x: ops.all_reduce(ring, x))
        step(tf.ones(3))
        if cluster.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.5)
        return step(tf.ones(3)).numpy().tolist(), len(notes)


def fail_in_fit(name):
    """Returns the errors of each rank of a job when rank 1 raises an exception, and when ranks differ."""
    import harness
    import tensorflow as tf

    from tfring.errors import MismatchError, PeerLostError

    strategy = harness.strategy()

    def leave(step):
        if step == 2 and strategy.cluster.rank == 1:
            raise LookupError("in a callback")

    seen = []
    try:
        fit_until(strategy, leave)
    except LookupError:
        strategy.close()
    except PeerLostError as error:
        seen += [str(error), type(error.__context__).__name__]
    strategy = harness.strategy()

    def differ(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.ones([3 + strategy.cluster.rank]) * x)

    for run in (differ, tf.function(differ)):
        strategy = harness.strategy()
        try:
            strategy.run(run, (tf.constant(1.0),))
        except MismatchError as error:
            seen += [str(error), type(error.__context__).__name__]
    return seen


@pytest.mark.oldest
def test_a_failure_is_raised_by_its_own_name():
    survivor, failed = workers(2).run(fail_in_fit, "fail")
    assert survivor[0].startswith("rank 1 failed while rank 0 waited for it in "), survivor
    assert survivor[1] in ("AbortedError", "CancelledError"), survivor
    for seen in (survivor[2:], failed):
        assert len(seen) == 4
        for message, cause in (seen[:2], seen[2:]):
            assert message.startswith("ranks disagree: ") and cause == "InvalidArgumentError", seen


def fail_beside_collectives(cluster):
    """Rank 1 waits in a collective for rank 0, which is late, while another operation of its step fails."""
    import tensorflow as tf

    from tfring.ring import ops

    def sleep(limit):
        time.sleep(0.5)
        return limit

    def check(x, limit):
        """Fails once the collective beside it has begun."""
        limit = tf.numpy_function(sleep, [limit], tf.float32)
        tf.debugging.assert_less(tf.reduce_sum(x), limit, "too much")

    def plain(ring, x, limit):
        y = ops.all_reduce(ring, x)
        check(x, limit)
        return y

    def in_a_branch(ring, x, limit):
        y = tf.cond(limit > 0.0, lambda: ops.all_reduce(ring, x), lambda: x)
        check(x, limit)
        return y

    def in_a_loop(ring, x, limit):
        _, y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, ops.all_gather(ring, x)[:3] + 0 * y), (0, x))
        check(x, limit)
        return y

    def in_a_function(ring, x, limit):
        y = tf.function(lambda: ops.all_to_all(ring, x)[0], autograph=False)()
        check(x, limit)
        return y

    def in_a_receive(ring, x, limit):
        y = ops.receive(ring, 1 - ring.rank, tf.float32, [3])
        check(x, limit)
        return y

    seen = []
    outer = ranks.join(cluster, name=f"{cluster.ring} outer")
    for program in (plain, in_a_branch, in_a_loop, in_a_function, in_a_receive):
        with ranks.join(cluster, name=f"{cluster.ring} {program.__name__}", timeout_seconds=600) as ring:
            function = tf.function(program, autograph=False)
            if program is not in_a_receive:
                function(ring, tf.ones(3), tf.constant(9.0))
            ring.barrier()
            start = time.monotonic()
            try:
                if cluster.rank == 0:
                    outer.barrier(name="rank 1 has failed")
                    ring.barrier(name="late")
                else:
                    function(ring, tf.ones(3), tf.constant(2.0))
                seen.append((program.__name__, "nothing", "", 0.0))
            except Exception as error:
                seen.append((program.__name__, type(error).__name__, str(error), time.monotonic() - start))
            if cluster.rank == 1:
                outer.barrier(name="rank 1 has failed")
            outer.barrier(name="rank 0 was told")  # which it is not by a ring that is left
    outer.close()
    return seen


@pytest.mark.oldest
def test_a_step_that_fails_ends_its_collectives():
    with ranks.Group(2) as group:
        group.start(2, fail_beside_collectives)
        late, failed = group.outcomes(400)
    for program, kind, message, seconds in failed:
        assert kind == "InvalidArgumentError" and "too much" in message and seconds < 5, (program, kind, message)
    for program, kind, message, seconds in late:
        assert kind == "PeerLostError" and seconds < 9, (program, kind, message, seconds)
        assert message.startswith("rank 1 gave up in ") and "another operation of its step failed" in message, message


def fail_alike(cluster):
    """The same operation fails on all ranks, each of which waits in a collective of the step, or has been in it."""
    import tensorflow as tf

    from tfring.ring import ops

    with ranks.join(cluster, timeout_seconds=600) as ring:

        @tf.function
        def step(x):
            y = ops.all_reduce(ring, x)
            tf.debugging.assert_less(tf.reduce_sum(x), 2.0, "too much")
            return y

        for turn in range(5):
            time.sleep(cluster.rank * (turn == 2))  # a stall of one second
            with pytest.raises(tf.errors.InvalidArgumentError, match="too much"):
                step(tf.ones(3))
            ring.barrier()
        return step(tf.zeros(3)).numpy().tolist()


def test_cancellation_is_known_for_the_versions_of_the_table():
    import tensorflow as tf

    from tfring.ring import ops

    ops._ops()
    of_table = any(tf.__version__.startswith(f"2.{minor}.") for minor in (18, 19, 20, 21))
    moved = "2.20.0" if tf.__version__.startswith(("2.18.", "2.19.")) else "2.18.0"  # whose place is another
    try:
        assert ops.find_cancellation(tf.__version__) == of_table
        assert not ops.find_cancellation("2.17.1") and not ops.find_cancellation("3.0.0")
        assert not ops.find_cancellation(moved)
    finally:
        ops.find_cancellation(tf.__version__)


def test_ranks_that_fail_alike_may_go_on():
    with ranks.Group(2) as group:
        group.start(2, fail_alike)
        assert group.outcomes(300) == [[0.0] * 3] * 2


def wait_crosswise(cluster):
    """Two functions on two Python threads, in opposite order, and one inter-op thread: nobody can go on."""
    import tensorflow as tf

    from tfring.ring import ops

    tf.config.threading.set_inter_op_parallelism_threads(1)
    rings = [ranks.join(cluster, name=f"{cluster.ring} {i}", timeout_seconds=600) for i in range(2)]
    functions = [tf.function(lambda x, ring=ring: ops.all_reduce(ring, 2 * x) + 1) for ring in rings]
    for function in functions:
        function(tf.ones(3))
    seen = []

    def call(i):
        try:
            functions[i](tf.ones(3))
        except tf.errors.OpError:
            seen.append(str(rings[i].failure()))

    for _ in range(20):  # where the threads of a rank overtake each other, all is well
        threads = [threading.Thread(target=call, args=(i,)) for i in ((0, 1) if cluster.rank == 0 else (1, 0))]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()
        if seen:
            for ring in rings:  # the other may have finished the call that failed here, and begun one more
                ring.close()
            return seen


def test_rings_that_wait_for_each_other_are_told_so():
    with ranks.Group(2) as group:
        group.start(2, wait_crosswise)
        for seen in group.outcomes(150):  # the timeout is 600
            assert any("wait for each other in different rings" in message for message in seen), seen
            assert any("set_inter_op_parallelism_threads" in message for message in seen), seen


def call_what_is_left_of_a_communicator(name):
    """A function keeps the communicator it was traced with; orders do not depend on when garbage is collected."""
    import gc

    import tensorflow as tf

    from tfring import cluster
    from tfring.ring import ops
    from tfring.ring.communicator import Communicator

    def make():
        ring = Communicator.connect(cluster.detect(), name)
        return tf.function(lambda x: ops.all_reduce(ring, x)).get_concrete_function(tf.TensorSpec([2]))

    function = make()
    gc.collect()
    return function(tf.ones(2)).numpy().tolist()


def test_a_function_keeps_its_communicator():
    assert workers(2).run(call_what_is_left_of_a_communicator, f"kept-{next(_names)}") == [[2.0, 2.0]] * 2


def test_an_own_handler_of_control_c_is_left_alone():
    with ranks.Group(2) as group:
        group.start(2, keep_own_handler)
        for total, notes in group.outcomes(60):
            assert total == [2.0] * 3 and notes in (0, 1)
