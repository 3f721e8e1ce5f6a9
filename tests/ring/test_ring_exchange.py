"""Groups, all_to_all, gather, scatter, reduce, send and receive: on arrays, on tensors, with gradients, and refused."""

import ctypes
import gc
import itertools
import os

import numpy as np
import pytest
import ranks
import schedule_tables
from arithmetic import is_reducible
from harness import workers
from test_ring_collectives import DTYPES
from test_ring_ops import join, run

from tfring.ring import library
from tfring.ring.schedule import chunk_bounds

TRANSPORTS = ("tcp", "shm")
# [rank][to]: rows each rank sends to each: none, one, few and, from rank 1 on, more than are small.
COUNTS = [[(3 * source + 5 * to) % 7 + (20_000 * source * (to == 0)) for to in range(8)] for source in range(8)]


def rows_of(source, to, width, dtype):
    """Returns the rows that `source` sends to `to`."""
    generator = np.random.default_rng([source, to, width])
    return generator.integers(0, 100, (COUNTS[source][to], width)).astype(dtype)


def exchange(cluster, transport, algorithm):
    if algorithm:
        os.environ["TFRING_ALGORITHM"] = algorithm
    with ranks.join(cluster, transport=transport) as ring:
        os.environ.pop("TFRING_ALGORITHM", None)
        rank, size = ring.rank, ring.world_size
        everyone = range(size)
        counts = COUNTS[rank][:size]
        wide = np.concatenate([rows_of(rank, to, 3, np.float64) for to in everyone])
        narrow = np.concatenate([rows_of(rank, to, 1, np.int8) for to in everyone])
        got, received = ring.all_to_all(wide, counts)
        np.testing.assert_array_equal(got, np.concatenate([rows_of(r, rank, 3, np.float64) for r in everyone]))
        assert received.tolist() == [COUNTS[r][rank] for r in everyone]
        both, numbers = ring.all_to_all([wide, narrow], [counts, counts])
        np.testing.assert_array_equal(both[0], got)
        np.testing.assert_array_equal(both[1], np.concatenate([rows_of(r, rank, 1, np.int8) for r in everyone]))
        assert all(each.tolist() == received.tolist() for each in numbers)
        shares, _ = ring.all_to_all(np.arange(10.0))
        begin, end = chunk_bounds(10, size)[rank]
        np.testing.assert_array_equal(shares, np.tile(np.arange(10.0)[begin:end], size))
        for root in everyone:
            gathered = ring.gather(wide, root)
            expected = ring.all_gather(wide)
            np.testing.assert_array_equal(gathered, expected if rank == root else expected[:0])
            scattered = ring.scatter(wide, counts if rank == root else None, root)
            np.testing.assert_array_equal(scattered, rows_of(root, rank, 3, np.float64))
            for elements in (5, 70_000):
                mine = np.full(elements, rank + 1.0)
                total = ring.reduce(mine, root)
                assert (total == (size * (size + 1) / 2 if rank == root else 0)).all()
        # Two lists at once.
        one, two = ring.reduce_scatter([np.arange(12.0).reshape(6, 2), np.arange(9.0)])
        begin, end = chunk_bounds(6, size)[rank]
        np.testing.assert_array_equal(one, size * np.arange(12.0).reshape(6, 2)[begin:end])
        begin, end = chunk_bounds(9, size)[rank]
        np.testing.assert_array_equal(two, size * np.arange(9.0)[begin:end])
        # From each to the next but one, of any shape; the first send may be over before it is received.
        to, source = (rank + 2) % size, (rank - 2) % size
        if to != rank:
            for shape in ((), (0, 4), (2, 3, 1)):
                ring.send(np.full(shape, rank, np.uint16), to, name="few")
                came = ring.receive(source, np.uint16, name="few")
                assert came.shape == shape and (came == source).all()


@pytest.mark.parametrize(
    ("world_size", "transport", "algorithm"),
    [(2, "shm", ""), (3, "tcp", ""), (4, "shm", "ring"), (5, "shm", ""), (5, "tcp", "bruck")],
)
def test_rows_arrive_where_they_should(world_size, transport, algorithm):
    ranks.run(world_size, exchange, transport, algorithm)


def sums_of_every_kind(cluster, transport):
    """Every algorithm and dtype, on hosts dealt round-robin, against NumPy."""
    hosts = ("127.0.0.1", "localhost")
    cluster.addresses = tuple(
        f"{hosts[r % 2]}:{address.rpartition(':')[2]}" for r, address in enumerate(cluster.addresses)
    )
    bits = {}
    for algorithm in ("auto", "flat", "bruck", "halving", "ring", "two_level"):
        os.environ["TFRING_ALGORITHM"] = algorithm
        with ranks.join(cluster, name=f"{cluster.ring} {algorithm}", transport=transport) as ring:
            for dtype in DTYPES:
                op = "sum" if is_reducible(dtype, "sum") else "max"
                for count in (0, 1, 7, 5_001, 30_011):
                    # Sums that every dtype holds exactly, in whatever order.
                    values = [np.random.default_rng([count, r]).integers(0, 2, count) for r in range(ring.world_size)]
                    result = ring.all_reduce(values[ring.rank].astype(dtype), op)
                    expected = np.sum(values, axis=0) if op == "sum" else np.max(values, axis=0)
                    np.testing.assert_array_equal(result, expected.astype(dtype))
                    bits[algorithm, np.dtype(dtype).name, count] = result.tobytes()
    del os.environ["TFRING_ALGORITHM"]
    return bits


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_algorithm_gives_the_sum(world_size, transport):
    results = ranks.run(world_size, sums_of_every_kind, transport, seconds=90)
    assert all(result == results[0] for result in results), "all ranks hold the same bits"


def different_algorithms(cluster):
    os.environ["TFRING_ALGORITHM"] = "ring" if cluster.rank == 1 else "auto"
    try:
        ranks.join(cluster, connect_timeout_seconds=5)
    finally:
        del os.environ["TFRING_ALGORITHM"]


def test_ranks_with_different_algorithms_are_told_so():
    for failed in ranks.try_run(3, different_algorithms):
        assert "Set the same TFRING_ALGORITHM" in failed.message, failed


def in_groups(cluster, transport):
    with ranks.join(cluster, transport=transport) as ring:
        rank, size = ring.rank, ring.world_size
        row = ring.group([r for r in range(size) if r // 2 == rank // 2], "row")
        column = ring.group([r for r in range(size) if r % 2 == rank % 2], "column")
        backwards = ring.group(list(reversed(range(size))), "backwards")
        assert (row.rank, row.world_size, row.ranks[row.rank]) == (rank % 2, 2, rank)
        for elements in (3, 100_000):
            value = np.full(elements, 10.0**rank)
            assert (row.all_reduce(value) == sum(10.0**r for r in row.ranks)).all()
            assert (column.all_reduce(value) == sum(10.0**r for r in column.ranks)).all()
            assert (ring.all_reduce(value) == sum(10.0**r for r in range(size))).all()
        np.testing.assert_array_equal(backwards.all_gather([rank]), list(reversed(range(size))))
        assert backwards.rank == size - 1 - rank
        np.testing.assert_array_equal(backwards.broadcast(np.array([rank]), root=0), [size - 1])
        halves = ring.split(rank % 2, key=-rank)
        np.testing.assert_array_equal(halves.all_gather([rank]), sorted(column.ranks, reverse=True))
        again = ring.split(None if rank == 0 else 7)
        assert (again is None) == (rank == 0)
        if again is not None:
            np.testing.assert_array_equal(again.all_gather([rank]), range(1, size))
        within = row.group([1, 0], "within")
        np.testing.assert_array_equal(within.all_gather([rank]), [row.ranks[1], row.ranks[0]])
        alone = ring.group([rank], "alone")
        assert alone.all_reduce(5) == 5 and alone.all_to_all(np.arange(3))[0].tolist() == [0, 1, 2]
        if rank == 0:
            others = ring.group([1, 2], "others")
            with pytest.raises(ValueError, match='rank 0 is not in group "others"'):
                others.barrier()
        for wrong in ([], [0, 0], [size], [-1]):
            with pytest.raises(ValueError, match=r"one or more different ranks from 0 to"):
                ring.group(wrong, "wrong")
        row.close()
        ring.barrier()
        with pytest.raises(ValueError, match="closed"):
            row.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups(transport):
    ranks.run(4, in_groups, transport)


def only_the_group_is_kept(cluster):
    group = ranks.join(cluster).group([1, 0], "both").split(0)
    gc.collect()
    total = group.all_reduce(group.rank)
    group.close()
    return int(total)


def test_a_group_keeps_what_it_comes_from():
    assert ranks.run(2, only_the_group_is_kept) == [1, 1]


def many_ranks(cluster):
    """More than are linked each to each, round-robin on three hosts: some links are made when they are first needed."""
    hosts = ("127.0.0.1", "127.0.0.2", "localhost")
    ports = [address.rpartition(":")[2] for address in cluster.addresses]
    cluster.addresses = tuple(f"{hosts[rank % 3]}:{port}" for rank, port in enumerate(ports))
    with ranks.join(cluster, connect_timeout_seconds=60) as ring:
        rank, size = ring.rank, ring.world_size
        linked = len(ring._world.links.transports)
        assert linked < size - 1
        assert len(ring.transport) == 2
        assert ring.algorithms == [(65536 // size, "bruck"), (None, "two_level")]
        for elements in (2, 5_000):
            assert (ring.all_reduce(np.full(elements, rank)) == size * (size - 1) // 2).all()
        np.testing.assert_array_equal(
            ring.all_gather(np.arange(rank % 3)), np.concatenate([np.arange(r % 3) for r in range(size)])
        )
        # Beside the numbers of rows; by doubling distances; round the ring; of some ranks the one, of some the other.
        cases = [([4] * size, "bruck"), ([200] * size, "bruck"), ([5000] * size, "ring")]
        cases += [(range(0, 20 * size, 20), "bruck"), (range(0, 999 * size, 999), "ring")]
        for elements, algorithm in cases:
            ring._core.tfring_trace(8)
            gathered = ring.all_gather([np.full((elements[rank], 3), rank, np.uint8), np.full(elements[rank], rank)])
            for tensor in gathered:
                expected = np.repeat(np.arange(size), elements)
                np.testing.assert_array_equal(tensor.reshape(len(tensor), -1)[:, 0], expected)
            record, lost = library.Record(), ctypes.c_int64()
            assert ring._core.tfring_take_records(record, 1, lost) == 1
            assert record.algorithm == library.ALGORITHMS[algorithm]
            ring._core.tfring_trace(0)
        most = (schedule_tables.TREE_BYTES + 1) * size - 1
        for num_bytes, root in itertools.product((0, 1, 1000, most, most + 1, 1 << 20), (0, 7, size - 1)):
            some = np.arange(num_bytes).astype(np.uint8)
            mine, total = some + np.uint8(rank), some * np.uint8(size) + np.uint8(size * (size - 1) // 2)
            ring._core.tfring_trace(8)
            np.testing.assert_array_equal(ring.broadcast(mine, root), some + np.uint8(root))
            np.testing.assert_array_equal(ring.reduce(mine, root), total if rank == root else 0 * mine)
            records, lost = (library.Record * 2)(), ctypes.c_int64()
            assert ring._core.tfring_take_records(records, 2, lost) == 2
            expected = library.ROOTED[schedule_tables.choose_rooted(num_bytes, size)]
            assert [record.algorithm for record in records] == [expected] * 2
            ring._core.tfring_trace(0)
        few = np.full((3, 50), rank + 1.0), np.array([rank, 5, 5])
        rows = [few, (np.ones((200, 8)), np.arange(rank, rank + 200))]
        gathered = [ring.all_reduce_rows(*each, reduction="gather") for each in rows]
        assert len(ring._world.links.transports) == linked
        ring.barrier()  # from here on others may link themselves to this rank
        far = ring.group([0, 7, 10], "far") if rank in (0, 7, 10) else None
        if far is not None:
            assert far.all_reduce(1) == 3
        if rank == 4:  # which waits for no link to those who are in it
            with pytest.raises(ValueError, match="rank 4 is not in group"):
                ring.group([0, 10], "others").all_to_all(np.ones(2))
        np.testing.assert_array_equal(ring.all_to_all(np.full(size, rank))[0], range(size))
        assert len(ring._world.links.transports) == size - 1
        for each, (values, ids) in zip(rows, gathered, strict=True):
            owned = ring.all_reduce_rows(*each, reduction="owner")
            assert values.tobytes() == owned[0].tobytes() and ids.tobytes() == owned[1].tobytes()
        assert sorted(gathered[0][1].tolist()) == list(range(size))
        assert gathered[0][0][gathered[0][1] == 5].tolist() == [[size * (size + 1) + 6.0] * 50]
        return linked


def test_more_ranks_than_are_linked_each_to_each():
    with ranks.Group(18) as group:
        group.start(18, many_ranks)
        outcomes = group.outcomes(90)
    failures = [f"===== rank {rank}\n{one.trace}" for rank, one in enumerate(outcomes) if isinstance(one, ranks.Failed)]
    assert not failures, "\n".join(failures)


# Of two ranks: what rank 0 and what rank 1 call, and what both are told.
CROSSED = {
    "another name": (
        lambda ring: ring.send(np.ones(3), 1, name="a"),
        lambda ring: ring.receive(0, np.float64, name="b"),
        ['send "a" to rank 1 float64[3]', 'receive "b" to rank 1 float64'],
    ),
    "another dtype": (
        lambda ring: ring.send(np.ones(3), 1),
        lambda ring: ring.receive(0, np.float32),
        ['send "send" to rank 1 float64[3]', 'receive "send" to rank 1 float32'],
    ),
    "both receive": (
        lambda ring: ring.receive(1, np.float32),
        lambda ring: ring.all_reduce(np.ones(3)),
        ['receive "send" to rank 0 float32', 'all_reduce "all_reduce" sum float64[3]'],
    ),
    "a group": (
        lambda ring: ring.group([0, 1], "pair").all_reduce(np.ones(3)),
        lambda ring: ring.all_reduce(np.ones(3)),
        ['as collective 1 of group "pair"', 'all_reduce "all_reduce" sum float64[3] as collective 1'],
    ),
    "another group": (
        lambda ring: ring.group([0, 1], "pair").barrier(),
        lambda ring: ring.group([0, 1], "couple").barrier(),
        ['as collective 1 of group "pair"', 'as collective 1 of group "couple"'],
    ),
    "another root": (
        lambda ring: ring.gather(np.ones((2, 2)), 0),
        lambda ring: ring.gather(np.ones((2, 2)), 1),
        ['gather "gather" to rank 0', 'gather "gather" to rank 1'],
    ),
    "another root of a scatter": (
        lambda ring: ring.scatter(np.ones((2, 2)), root=0),
        lambda ring: ring.scatter(np.ones((2, 2)), root=1),
        ['scatter "scatter" from rank 0', 'scatter "scatter" from rank 1'],
    ),
    "another root of a sum": (
        lambda ring: ring.reduce(np.ones(2), 0),
        lambda ring: ring.reduce(np.ones(2), 1),
        ['reduce "reduce" sum to rank 0', 'reduce "reduce" sum to rank 1'],
    ),
    "another root of a large sum": (
        lambda ring: ring.reduce(np.ones(100_000), 0),
        lambda ring: ring.reduce(np.ones(100_000), 1),
        ['reduce "reduce" sum to rank 0', 'reduce "reduce" sum to rank 1'],
    ),
    "rows of another width": (
        lambda ring: ring.all_to_all(np.ones((2, 3))),
        lambda ring: ring.all_to_all(np.ones((2, 4))),
        ["float64[2, 3]", "float64[2, 4]"],
    ),
}


def cross(cluster, which):
    ring = ranks.join(cluster)
    try:
        CROSSED[which][cluster.rank](ring)
        ring.barrier()  # who only sends may be through
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("which", list(CROSSED))
def test_ranks_that_disagree_are_told(which):
    first, second = ranks.run(2, cross, which)
    for words in CROSSED[which][2]:
        assert words in first and words in second, (first, second)
    assert first.startswith("MismatchError: ranks disagree")


def send_first(cluster, elements):
    with ranks.join(cluster) as ring:
        try:
            ring.send(np.full(elements, ring.rank), 1 - ring.rank)
            return ring.receive(1 - ring.rank, np.int64).max()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_two_that_send_much_first_are_told_so():
    assert ranks.run(2, send_first, 1000) == [1, 0]
    for said in ranks.run(2, send_first, 1_000_000):
        assert said.startswith("MismatchError: ranks disagree") and said.count('called send "send" to rank') == 2, said


def in_a_circle(cluster):
    with ranks.join(cluster) as ring:
        pairs = [ring.group([rank, (rank + 1) % 3], f"pair {rank}") for rank in range(3)]
        try:
            pairs[ring.rank].barrier()  # each with the next, who is with the one after
            pairs[ring.rank - 1].barrier()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_groups_called_in_a_circle_are_told_so():
    for said in ranks.run(3, in_a_circle):
        assert said.startswith("MismatchError") and 'of group "pair' in said and "in a circle" in said, said


def wrong_shape(cluster):
    ring = ranks.join(cluster)
    if cluster.rank == 0:
        ring.send(np.ones((2, 3)), 1)
        ring.send(np.ones((2, 3)), 1)
        ring.barrier()
    else:
        assert ring.receive(0, np.float64, (2, None)).shape == (2, 3)
        ring.receive(0, np.float64, (3, 2))


def test_a_shape_that_was_not_asked_for():
    sender, receiver = ranks.try_run(2, wrong_shape)
    assert receiver.kind == "MismatchError", receiver
    assert "expects shape [3, 2], but rank 0 sends [2, 3]" in receiver.message
    assert sender.kind == "MismatchError" and "expects another shape" in sender.message, sender


def refusals(cluster):
    found = []
    with ranks.join(cluster) as ring:
        for call in (
            lambda: ring.all_to_all(np.ones(3), [1, 1]),
            lambda: ring.all_to_all(np.ones(3), [1, 1, 1]),
            lambda: ring.all_to_all(np.ones(3), [-1, 4]),
            lambda: ring.all_to_all([np.ones(3), np.ones(3)], [[1, 2]]),
            lambda: ring.all_to_all(np.float32(1)),
            lambda: ring.send(np.ones(3), cluster.rank),
            lambda: ring.send(np.ones(3), 2),
            lambda: ring.receive(-1, np.float32),
            lambda: ring.scatter(np.ones(3), [2, 2], cluster.rank),
            lambda: ring.gather(np.ones(3), 5),
            lambda: ring.reduce(np.ones(3), 2),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            found.append(str(caught.value))
        assert ring.all_reduce(1) == 2, "what is refused does no harm"
    return found


def test_what_cannot_be_is_refused_on_the_spot():
    words = [
        "`counts` is [1, 1], but does not add up to the rows of shape (3,)",
        "`counts` is [1, 1, 1], not a number of rows for each of 2 ranks",
        "`counts` is [-1, 4]",
        "`counts` has 1 entries for 2 tensors",
        "a scalar has no rows",
        "the peer is this rank",
        "to=2 is not from 0 to 1",
        "source=-1 is not from 0 to 1",
        "add up to the rows of",
        "root=5 is not from 0 to 1",
        "root=2 is not from 0 to 1",
    ]
    for found in ranks.run(2, refusals):
        for message, expected in zip(found, words, strict=True):
            assert expected in message


def lost_in(cluster, what):
    """Rank 1 leaves; the others find out in a call that needs it, or not at all."""
    with ranks.join(cluster) as ring:
        pair = ring.group([0, 2], "pair") if cluster.rank != 1 else None
        ring.barrier()
        if cluster.rank == 1:
            return "left"
        if what == "a group without it":
            return int(pair.all_reduce(1))
        try:
            if what == "all_to_all":
                ring.all_to_all(np.ones((6, 1 << 18)))
            elif what == "receive" and cluster.rank == 0:
                ring.receive(1, np.float32)
            else:
                ring.gather(np.ones(3), 1)
                ring.barrier()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("what", ["all_to_all", "receive", "gather"])
def test_a_rank_that_left_is_named(what):
    outcomes = ranks.run(3, lost_in, what)
    for rank in (0, 2):
        assert "PeerLostError: rank 1 left the ring" in outcomes[rank], outcomes


def test_a_rank_that_left_harms_no_group_without_it():
    assert ranks.run(3, lost_in, "a group without it") == [2, "left", 2]


def as_ops(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        rank, size = ring.rank, ring.world_size
        group = ring.group([r for r in range(size) if r % 2 == rank % 2], "parity")
        counts = COUNTS[rank][:size]
        wide = np.concatenate([rows_of(rank, to, 3, np.float32) for to in range(size)])

        def compute(x):
            rows, received = ops.all_to_all(ring, x, counts)
            everything = ops.gather(ring, x, root=1)
            mine = ops.scatter(ring, x, counts, root=1)
            total = ops.reduce(ring, x[:1], root=0)
            in_group = ops.all_reduce(group, tf.constant([10.0**rank]))
            receipt = ops.send(ring, x[:2], (rank + 1) % size)
            came = ops.receive(ring, (rank - 1) % size, tf.float32, [None, 3])
            halves = ops.reduce_scatter(ring, [x[:4], tf.ones([5])])
            return rows, received, everything, mine, total, in_group, receipt, came, *halves

        for function in (compute, tf.function(compute)):
            results = function(tf.constant(wide))
            rows, received, everything, mine, _, in_group, receipt, came, _, ones = (r.numpy() for r in results)
            np.testing.assert_array_equal(rows, np.concatenate([rows_of(r, rank, 3, np.float32) for r in range(size)]))
            assert received.tolist() == [COUNTS[r][rank] for r in range(size)]
            assert everything.shape == ((sum(sum(c[:size]) for c in COUNTS[:size]) if rank == 1 else 0), 3)
            np.testing.assert_array_equal(mine, rows_of(1, rank, 3, np.float32))
            assert in_group[0] == sum(10.0**r for r in group.ranks) and receipt == 0
            sender = (rank - 1) % size
            sent = np.concatenate([rows_of(sender, to, 3, np.float32) for to in range(size)])[:2]
            np.testing.assert_array_equal(came, sent)
            assert (ones == size).all()
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="add up"):
            ops.all_to_all(ring, tf.ones([3]), [5] * size)
        assert ops.all_reduce(ring, tf.constant(1)).numpy() == size


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_ops(world_size):
    run(world_size, as_ops)


def gradients(name, in_function):
    """Each rank's gradient of the sum over ranks of a loss, against the same computed where all is at hand.

    Where a rank is not the root it has no rows, or zeros, of which the loss is 0.
    """
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        rank, size = ring.rank, ring.world_size
        rows = [2 + r for r in range(size)]
        inputs = [np.random.default_rng(r).normal(size=(sum(range(1, size + 1)) + r, 2)) for r in range(size)]
        counts = [[1 + to + (source if to == 0 else 0) for to in range(size)] for source in range(size)]
        weights = [tf.constant(np.random.default_rng(100 + r).normal(size=(200, 2))) for r in range(size)]

        def weighted(y, r):
            return tf.reduce_sum(y * y * weights[r][: tf.shape(y)[0]])

        def measure(x, anchor):
            swapped, _ = ops.all_to_all(ring, x, counts[rank])
            gathered = ops.gather(ring, x, root=size - 1)
            scattered = ops.scatter(ring, x, counts[rank], root=0)
            total = ops.reduce(ring, x[: rows[0]], root=1)
            # Alike on all ranks, for then their gradients come in one order.
            loss = weighted(swapped, rank) + weighted(scattered, rank)
            loss += weighted(gathered, rank) + weighted(total, rank)
            if rank == 0:
                return loss + tf.cast(ops.send(ring, x, 1, name="half"), tf.float64)
            if rank == 1:
                loss += weighted(ops.receive(ring, 0, tf.float64, anchor=anchor, name="half"), 1)
            return loss

        def differentiate(x):
            anchor = tf.constant(0.0)
            with tf.GradientTape() as tape:
                tape.watch([x, anchor])
                loss = measure(x, anchor)
            return tape.gradient(loss, [x, anchor])[0]

        mine = (tf.function(differentiate) if in_function else differentiate)(tf.constant(inputs[rank]))

        # The same, where all is at hand.
        xs = [tf.constant(x) for x in inputs]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            pieces = [tf.split(x, c) for x, c in zip(xs, counts, strict=True)]
            loss = weighted(tf.concat(xs, 0), size - 1) + weighted(sum(x[: rows[0]] for x in xs), 1)
            loss += weighted(xs[0], 1)
            for r in range(size):
                loss += weighted(tf.concat([p[r] for p in pieces], 0), r) + weighted(pieces[0][r], r)
        np.testing.assert_allclose(mine, tape.gradient(loss, xs)[rank], rtol=1e-12)


@pytest.mark.parametrize("in_function", [False, True])
def test_gradients(in_function):
    run(3, gradients, in_function)


def without_gradient(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        x = tf.ones([2, 2])
        for call in (
            lambda: ops.reduce(ring, x, op="max"),
            lambda: ops.reduce_scatter(ring, x, "max"),
        ):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call()
            with pytest.raises(LookupError, match="only sums"):
                tape.gradient(y, x)


def test_only_sums_have_gradients():
    workers(2).run(without_gradient, "only sums")


def compressed(cluster, transport):
    """Sums within the error that is promised, the same bits on all ranks, in half the bytes."""
    bits = []
    with ranks.join(cluster, transport=transport) as ring:
        size = ring.world_size
        for compression, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
            for count in (10, 70_001):
                inputs = [np.random.default_rng([r, count]).normal(size=count).astype(np.float32) for r in range(size)]
                before = ring.statistics()["bytes_sent"]
                one, two = ring.all_reduce(
                    [inputs[ring.rank], 2 * inputs[ring.rank][:9]], compression=compression, name="compressed"
                )
                sent = ring.statistics()["bytes_sent"] - before
                exact = np.sum(inputs, axis=0, dtype=np.float64)
                most = unit * (np.abs(exact) + np.sum(np.abs(inputs), axis=0)) + size * 1e-7
                assert (np.abs(one - exact) <= most).all() and (np.abs(two - 2 * exact[:9]) <= 2 * most[:9]).all()
                exactly = (np.abs(one - exact) <= 1e-5).all()
                assert exactly == (count == 10), "what is small travels as it is"
                if count > 10:
                    assert sent <= 2 * (size - 1) / size * 2 * (count + 9) + 300 * size
                bits.append((one.tobytes(), two.tobytes()))
        for wrong in (np.ones(3), np.ones(3, np.int32)):
            with pytest.raises(ValueError, match="cannot be compressed to bfloat16"):
                ring.all_reduce(wrong, compression="bfloat16")
        with pytest.raises(ValueError, match="a max of float32 cannot be compressed"):
            ring.all_reduce(np.ones(3, np.float32), "max", compression="float16")
        with pytest.raises(ValueError, match="`compression` is 'int8'"):
            ring.all_reduce(np.ones(3, np.float32), compression="int8")
        ring.barrier()
        with pytest.raises(Exception, match="compressed to float16") as caught:
            ring.all_reduce(np.ones(3, np.float32), compression="float16" if ring.rank == 1 else None)
        assert type(caught.value).__name__ == "MismatchError"
    return bits


@pytest.mark.parametrize(("world_size", "transport"), [(2, "tcp"), (3, "shm"), (4, "shm")])
def test_compressed_sums(world_size, transport):
    results = ranks.run(world_size, compressed, transport)
    assert all(result == results[0] for result in results)


def compressed_gradient(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        inputs = [np.random.default_rng(r).normal(size=40_000).astype(np.float32) for r in range(2)]

        @tf.function
        def differentiate(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = ops.all_reduce(ring, x, compression="bfloat16")
                loss = tf.reduce_sum(y * y)
            return y, tape.gradient(loss, x)

        y, gradient = differentiate(tf.constant(inputs[ring.rank]))
        np.testing.assert_allclose(y, inputs[0] + inputs[1], atol=0.05)
        np.testing.assert_allclose(gradient, 4 * y.numpy(), rtol=0.02)
        return gradient.numpy().tobytes()


def test_a_compressed_sum_has_a_gradient():
    first, second = run(2, compressed_gradient)
    assert first == second
