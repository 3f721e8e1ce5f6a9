"""The TensorFlow ops: values, shapes, gradients, order inside functions, errors."""

import itertools
import os
import pathlib

import numpy as np
import pytest
from harness import workers

_names = itertools.count()


def join(ring_name, **kwargs):
    """This worker's communicator. For use in a task."""
    from tfring import cluster
    from tfring.ring.communicator import Communicator

    kwargs = {"connect_timeout_seconds": 60, "timeout_seconds": 30, **kwargs}
    return Communicator.connect(cluster.detect(), ring_name, **kwargs)


def run(world_size, task, *args, env=None, **kwargs):
    return workers(world_size, env=env).run(task, f"ops-{os.getpid()}-{next(_names)}", *args, **kwargs)


def mapping_flags(array):
    """Returns the kernel's flags of the memory in the middle of an array; "hg" where huge pages are wanted."""
    middle = array.ctypes.data + array.nbytes // 2
    found, inside = None, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        begin, dash, end = line.partition(" ")[0].partition("-")
        if dash and len(line.split()) >= 5:
            inside = int(begin, 16) <= middle < int(end, 16)
        elif inside and line.startswith("VmFlags:"):
            found = line.split()[1:]
    return found


def large_results_ask_for_huge_pages(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        value = tf.ones([4 << 20])
        results = [ops.all_reduce(ring, value), ops.all_gather(ring, value), ops.all_reduce(ring, value[: 1 << 19])]
        large, gathered, small = (mapping_flags(np.asarray(memoryview(r))) for r in results)
        with pytest.raises(ValueError, match="`out` was given for a tensor"):
            ring.all_reduce(value, out=np.zeros(4 << 20, np.float32))
        wanted = "hg" in (mapping_flags(np.ones(4 << 20, np.float32)) or [])  # NumPy asks, where there is an answer
        assert ("hg" in (large or []), "hg" in (gathered or [])) == (wanted, wanted)
        assert "hg" not in (small or [])


def test_large_results_ask_for_huge_pages():
    """As NumPy's arrays: in pages of 4 kB the kernel takes longer to zero an output than the ring to compute it."""
    run(2, large_results_ask_for_huge_pages)


def all_kinds(name):
    import tensorflow as tf

    from tfring.ring import ops
    from tfring.ring.schedule import chunk_bounds

    with join(name) as ring:
        rank, world_size = ring.rank, ring.world_size

        def compute(x, active):
            one = ops.all_reduce(ring, x, name="one")
            first, second = ops.all_reduce(ring, [x * 2, x[:1]], "max", name="many")
            gathered = ops.all_gather(ring, x[: rank + 1], name="gathered")
            scattered = ops.reduce_scatter(ring, x, name="scattered")
            sent, counted = ops.broadcast(ring, [x, tf.constant([rank])], root=1, name="sent")
            ops.barrier(ring, name="barrier")
            masked = ops.all_reduce(ring, x, name="masked", active=active)
            return one, first, second, gathered, scattered, sent, counted, masked

        base = np.arange(10, dtype=np.float32).reshape(5, 2)
        x = tf.constant(base + 100 * rank)
        bad = tf.where(rank == 0, np.nan, x)  # rank 0 is inactive, and its NaN must not show
        results = [[t.numpy() for t in fn(x, rank != 0)] for fn in (compute, tf.function(compute))]
        masked = ops.all_reduce(ring, bad, name="masked", active=tf.constant(rank != 0)).numpy()
        large = tf.ones([200_000]) * (np.nan if rank == 0 else rank)
        masked_large = ops.all_reduce(ring, large, name="masked", active=tf.constant(rank != 0)).numpy()
        total = world_size * base + 100 * sum(range(world_size))
        begin, end = chunk_bounds(5, world_size)[rank]
        for one, first, second, gathered, scattered, sent, counted, active in results:
            np.testing.assert_array_equal(one, total)
            np.testing.assert_array_equal(first, 2 * (base + 100 * (world_size - 1)))
            np.testing.assert_array_equal(second, (base + 100 * (world_size - 1))[:1])
            want = np.concatenate([base[: r + 1] + 100 * r for r in range(world_size)])
            np.testing.assert_array_equal(gathered, want)
            np.testing.assert_array_equal(scattered, total[begin:end])
            np.testing.assert_array_equal(sent, base + 100)
            np.testing.assert_array_equal(counted, [1])
            np.testing.assert_array_equal(active, total - base)
        np.testing.assert_array_equal(masked, total - base)
        np.testing.assert_array_equal(masked_large, np.full(200_000, sum(range(world_size)), np.float32))
        np.testing.assert_array_equal(x, base + 100 * rank)
        # Through the communicator's own methods: tensors give tensors.
        for value in (x, tf.Variable(x), [x, x]):
            result = ring.all_reduce(value)
            for tensor in result if isinstance(value, list) else [result]:
                assert tf.is_tensor(tensor)
                np.testing.assert_array_equal(tensor, total)
        assert isinstance(ring.all_reduce(np.ones(2)), np.ndarray)


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size):
    run(world_size, all_kinds)


def every_dtype(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        for dtype in ("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16",
                      "uint32", "uint64", "complex64", "complex128"):
            x = tf.cast(tf.constant([1, 2, 3 + ring.rank]), dtype)
            got = ops.all_reduce(ring, x)
            assert got.dtype == dtype and tf.cast(got, "int64").numpy().tolist() == [2, 4, 7]
            assert ops.all_gather(ring, x).dtype == dtype
            assert tf.cast(ops.all_reduce(ring, x, "product"), "int64").numpy().tolist() == [1, 4, 12]
        # TensorFlow's threads take subnormal numbers for zero; the ring's sums are the same from anywhere.
        for dtype, tiny in (("float32", 1e-40), ("float64", 1e-310), ("float16", 1e-7)):
            x = np.full(100, tiny, dtype)
            in_function = tf.function(lambda x: ops.all_reduce(ring, x))(tf.constant(x)).numpy()
            assert in_function.tolist() == ring.all_reduce(x).tolist() == (x + x).tolist()
        flags = tf.constant([ring.rank == 0, True, False])
        assert ops.all_reduce(ring, flags, "max").numpy().tolist() == [True, True, False]
        assert ops.all_reduce(ring, flags, "min").numpy().tolist() == [False, True, False]
        with pytest.raises(tf.errors.InvalidArgumentError, match='op="max"'):
            ops.all_reduce(ring, flags)
        with pytest.raises(ValueError, match="`op` is 'mean'"):
            ops.all_reduce(ring, x, "mean")
        for empty in (tf.zeros([0]), tf.zeros([0, 4])):
            assert ops.all_reduce(ring, empty).shape == empty.shape
            assert ops.all_gather(ring, empty).shape == empty.shape
        assert ops.all_reduce(ring, []) == []
        assert ops.all_reduce(ring, tf.constant(1.5)).numpy() == 3.0


def test_dtypes_and_empty_tensors():
    run(2, every_dtype)


def static_shapes(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:

        @tf.function(input_signature=[tf.TensorSpec([5, 2]), tf.TensorSpec([5], tf.int64)])
        def known(x, rows):
            shapes.append(
                [
                    t.shape.as_list()
                    for t in (
                        ops.all_reduce(ring, x),
                        ops.all_gather(ring, x),
                        ops.reduce_scatter(ring, x),
                        ops.broadcast(ring, x),
                        ops.all_gather(ring, rows),
                    )
                ]
            )
            return x

        shapes = []
        known.get_concrete_function()
        scattered = 3 if ring.rank == 0 else 2
        return shapes == [[[5, 2], [None, 2], [scattered, 2], [5, 2], [None]]]


def test_static_shapes():
    assert run(2, static_shapes) == [True, True]


def gather_rows(name):
    """Two tables in one collective; some ranks have no row."""
    import tensorflow as tf
    from schedule_tables import is_small

    from tfring.ring import ops

    with join(name) as ring:
        rank, world_size = ring.rank, ring.world_size
        generator = np.random.default_rng(rank)
        for few, many in ((3, 5), (0, 1), (50, 9000)):
            counts = [[few * r, many] for r in range(world_size)]
            tables = []
            for width, count in zip((4, 1), counts[rank], strict=True):
                tables.append(generator.normal(size=(count, width)).astype(np.float32))
                tables.append(generator.integers(0, 1000, count).astype(np.int64 if width == 4 else np.int32))

            @tf.function
            def together(tables):
                return ops.all_gather(ring, tables, name="tables")

            for fn in (together, together.python_function):
                sent = ring.statistics()["bytes_sent"]
                got = fn([tf.constant(table) for table in tables])
                sent = ring.statistics()["bytes_sent"] - sent
                for i, (all_rows, own) in enumerate(zip(got, tables, strict=True)):
                    assert all_rows.shape == (sum(c[i // 2] for c in counts), *own.shape[1:])
                    assert all_rows.dtype == own.dtype
                    begin = sum(c[i // 2] for c in counts[:rank])
                    np.testing.assert_array_equal(all_rows[begin : begin + len(own)], own)
                rows = [(16 + 8) * c[0] + (4 + 4) * c[1] for c in counts]
                # Few rows travel to each other rank, many to the next, and on to all but where they began.
                goes_round = [0 if is_small(block, world_size) else block for block in rows]
                most = sum(goes_round) - goes_round[(rank + 1) % world_size]
                most += (world_size - 1) * (256 + 32 + rows[rank] - goes_round[rank])
                assert sent <= most, (sent, most)
                for tensor in got:  # all ranks hold the same
                    root = ops.broadcast(ring, tensor)
                    np.testing.assert_array_equal(tensor, root)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathering_rows(world_size):
    run(world_size, gather_rows)


def gradients(name, in_function):
    """Each collective's gradient against the numeric derivative of the sum of all ranks' losses."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        rank, world_size = ring.rank, ring.world_size
        generator = np.random.default_rng(7)
        weights = generator.normal(size=(world_size, 40))  # rank r's loss weighs its results by weights[r]

        def loss(collective, x):
            out = tf.reshape(collective(x), [-1])
            return tf.reduce_sum(tf.constant(weights[rank])[: tf.shape(out)[0]] * out * out)

        cases = {
            "all_reduce": lambda x: ops.all_reduce(ring, x),
            "all_reduce a list": lambda x: tf.concat(ops.all_reduce(ring, [x, x[:2] * 3]), 0),
            "all_reduce inactive": lambda x: ops.all_reduce(ring, x, active=tf.constant(rank != 1)),
            "all_gather": lambda x: ops.all_gather(ring, x[: 3 + rank]),
            "reduce_scatter": lambda x: ops.reduce_scatter(ring, x),
            "broadcast": lambda x: ops.broadcast(ring, x, root=1),
        }
        point = generator.normal(size=(world_size, 5, 2))
        for what, collective in cases.items():

            def take(x, collective=collective):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    value = loss(collective, x)
                return tape.gradient(value, x)

            gradient = (tf.function(take) if in_function else take)(tf.constant(point[rank])).numpy()
            for probed, (i, j) in itertools.product(range(world_size), [(0, 0), (2, 1), (4, 1)]):
                values = []
                for sign in (1, -1):
                    x = point[rank].copy()
                    x[i, j] += sign * 1e-5 * (rank == probed)
                    values.append(float(ring.all_reduce(loss(collective, tf.constant(x)).numpy())))
                if rank == probed:
                    want = (values[0] - values[1]) / 2e-5
                    np.testing.assert_allclose(gradient[i, j], want, rtol=1e-5, atol=1e-8, err_msg=what)
        for op in ("max", "min", "product"):
            with pytest.raises(LookupError, match='"other than a sum" has no gradient'), tf.GradientTape() as tape:
                x = tf.Variable([1.0])
                y = ops.all_reduce(ring, x, op, name="other than a sum")
                tape.gradient(y, x)


@pytest.mark.parametrize("in_function", [False, True])
def test_gradients(in_function):
    run(3, gradients, in_function)


def many_in_a_function(name):
    """Collectives of uneven cost, in loops and branches. Another order on one rank is a mismatch."""
    import tensorflow as tf

    from tfring.ring import ops

    tf.random.set_seed(1)
    with join(name) as ring, join(name + "-second") as second:

        def busy(i):
            """Takes another time on every rank, at every place."""
            size = tf.constant([5, 150, 20])[(i + ring.rank) % 3]
            m = tf.random.normal([size, size])
            return tf.reduce_sum(tf.linalg.matmul(m, m)) * 0.0

        @tf.function
        def step(x, flag):
            parts = [ops.all_reduce(ring, x + busy(tf.constant(i)), name=f"independent {i}") for i in range(6)]
            other = [ops.all_reduce(second, x + busy(tf.constant(i)), name=f"second {i}") for i in range(4)]

            def body(i, total):
                a = ops.all_reduce(ring, x + busy(i), name="loop a")
                ops.barrier(ring, name="loop barrier")
                b = ops.all_gather(ring, x[:1] + busy(i + 1), name="loop b")
                c = tf.cond(
                    i % 2 == 0,
                    lambda: ops.all_reduce(ring, x, name="even"),
                    lambda: ops.broadcast(ring, x, name="odd") + ops.all_reduce(ring, x, name="odd too"),
                )
                return i + 1, total + a + tf.reduce_sum(b) + c

            _, looped = tf.while_loop(lambda i, _: i < 5, body, [0, tf.zeros_like(x)])
            chosen = tf.cond(
                flag,
                lambda: ops.all_reduce(ring, x, name="yes"),
                lambda: ops.all_reduce(ring, 2 * x, name="no"),
            )
            for i in tf.range(3):  # AutoGraph
                chosen += ops.all_reduce(ring, x, name="autograph") + busy(i)
            return tf.add_n(parts), tf.add_n(other), looped, chosen

        results = []
        for i in range(8):
            results.append([t.numpy().tolist() for t in step(tf.constant([1.0, 2.0]), tf.constant(i % 2 == 0))])
        n = float(ring.world_size)
        for i, (parts, other, looped, chosen) in enumerate(results):
            assert parts == [6 * n, 12 * n] and other == [4 * n, 8 * n]
            x = np.array([1.0, 2.0])
            want = sum(x * n + n + (x * n if k % 2 == 0 else x + x * n) for k in range(5))
            np.testing.assert_allclose(looped, want)
            np.testing.assert_allclose(chosen, (1 if i % 2 == 0 else 2) * n * x + 3 * n * x)


@pytest.mark.parametrize("env", [None, {"TF_NUM_INTEROP_THREADS": "1"}], ids=["2 threads", "1 thread"])
def test_order_inside_a_function(env):
    run(3, many_in_a_function, env=env)


def nested_functions(name):
    """Functions called from functions, traced at another time on each rank, keep the order of the program."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        inner = tf.function(lambda x, key: ops.all_reduce(ring, x, name=f"inner {key}"))
        if ring.rank == 0:
            inner.get_concrete_function(tf.TensorSpec([2]), 1)  # traced early here only

        @tf.function
        def outer(x):
            a = inner(x, 0)
            b = ops.all_reduce(ring, x, name="outer")
            c = inner(x, 1)
            return a + b + c

        return [outer(tf.constant([1.0, 2.0])).numpy().tolist() for _ in range(5)]


def test_order_across_nested_functions():
    assert run(2, nested_functions) == [[[6.0, 12.0]] * 5] * 2


def inputs_stay(name):
    """An op may take over the memory of an input nobody else needs, and of no other."""
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        variable = tf.Variable(tf.ones([100_000]))
        constant = tf.ones([100_000])

        @tf.function
        def step():
            a = ops.all_reduce(ring, variable, name="variable")
            b = ops.all_reduce(ring, constant, name="constant")
            temporary = constant + 1.0
            c = ops.all_reduce(ring, temporary, name="temporary")
            d, e = ops.all_reduce(ring, [temporary, temporary], name="twice")
            return a[0], b[0], c[0], d[0], e[0], temporary[0]

        results = [[t.numpy() for t in step()] for _ in range(3)]
        assert results == [[2.0, 2.0, 4.0, 4.0, 4.0, 2.0]] * 3, results
        assert (variable.numpy() == 1).all() and (constant.numpy() == 1).all()


def test_inputs_are_left_alone():
    run(2, inputs_stay)


def disagree(name, what):
    import tensorflow as tf

    from tfring.ring import ops

    ring = join(name, timeout_seconds=2.0 if what == "late" else 30)
    call = tf.function(lambda x: ops.all_reduce(ring, x, name="gradients"))
    if ring.rank == 1 and what == "gone":
        ring.close()
        return "left"
    if ring.rank == 1 and what == "late":
        import time

        time.sleep(6)
    try:
        call(tf.ones([3 if ring.rank == 1 else 4]))
    except tf.errors.OpError as error:
        return type(error).__name__, error.message
    finally:
        if what != "late":
            ring.close()


@pytest.mark.parametrize(
    "what, kind, words",
    [
        ("shape", "InvalidArgumentError", 'rank 1 called all_reduce "gradients" sum float32[3]'),
        ("gone", "AbortedError", "rank 1 left the ring"),
        ("late", "DeadlineExceededError", "rank 1 takes no part"),
    ],
)
def test_errors(what, kind, words):
    results = run(3, disagree, what)
    for rank in (0, 2):
        assert results[rank][0] == kind and words in results[rank][1], results


def jit(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        with pytest.raises(tf.errors.OpError) as caught:
            tf.function(lambda x: ops.all_reduce(ring, x), jit_compile=True)(tf.ones([3]))
        return str(caught.value)


def test_xla_refuses_by_name():
    for message in run(2, jit):
        assert "TfringAllReduce" in message
