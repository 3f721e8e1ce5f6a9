"""The sum of rows under ids: against NumPy, either way, bit for bit; what is chosen; what is refused; who dies."""

import itertools
import os
import pathlib
import signal
import time

import ml_dtypes
import numpy as np
import pytest
import ranks
import schedule_tables
from native import core
from test_ring_ops import join, run

from tfring.ring import library

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.complex64)
# [case][rank]: the ids each rank has, for up to four.
IDS = {
    "few": [[7, 3, 7], [9, 7], [3], [-5, 3, 2**31 - 1]],
    "ranks without rows": [[], [4, 4], [], [1]],
    "no rows": [[], [], [], []],
    "all the same": [[11] * 40] * 4,
    "disjoint": [list(range(100 * r, 100 * r + 50)) for r in range(4)],
    "multiples": [[1024 * i for i in range(r, 300)] for r in range(4)],
    "skewed": [np.random.default_rng(r).zipf(1.2, 600).clip(max=10**6).tolist() for r in range(4)],
}


def rows_of(rank, ids, shape, dtype):
    """Numbers whose sums depend on the order of addition, where the dtype has such."""
    numbers = np.random.default_rng([rank, len(ids)]).normal(size=(len(ids), *shape)) * 50
    return (np.abs(numbers) if dtype is np.uint8 else numbers).astype(dtype)


def add_up(values, ids):
    """Each id once, its rows added one after the other, 16-bit floats in float32."""
    wide = np.float32 if values.dtype.itemsize == 2 else values.dtype
    sums = {}
    for row, i in zip(values.astype(wide), ids.tolist(), strict=True):
        sums[i] = sums[i] + row if i in sums else row
    kept = np.stack(list(sums.values())) if sums else values[:0]
    return kept.astype(values.dtype), np.array(list(sums), ids.dtype)


def expected(case, size, shape, dtype, id_type):
    """Added up on each rank, and then in the order of the ranks."""
    own = [np.array(ids, id_type) for ids in IDS[case][:size]]
    sums = [add_up(rows_of(rank, ids, shape, dtype), ids) for rank, ids in enumerate(own)]
    values, ids = add_up(*(np.concatenate(each) for each in zip(*sums, strict=True)))
    return dict(zip(ids.tolist(), values, strict=True))


def check(got, want, what):
    values, ids = got
    assert sorted(ids.tolist()) == sorted(want), what
    np.testing.assert_array_equal(values, np.reshape([want[i] for i in ids.tolist()], values.shape), err_msg=str(what))


def every_case(cluster, transport):
    bits = []
    with ranks.join(cluster, transport=transport) as ring:
        rank, size = ring.rank, ring.world_size
        for case, id_type, dtype in itertools.product(IDS, (np.int32, np.int64), DTYPES):
            shape = (2, 3) if case != "skewed" else (16,)
            if case in ("disjoint", "multiples", "skewed") and dtype not in (np.float32, np.float16):
                continue
            ids = np.array(IDS[case][rank], id_type)
            values = rows_of(rank, ids, shape, dtype)
            want = expected(case, size, shape, dtype, id_type) if rank == 0 else None  # all have the same bits
            before = values.tobytes()
            both = [ring.all_reduce_rows(values, ids, reduction=way, name=case) for way in ("gather", "owner")]
            for got in both:
                assert got[0].dtype == dtype and got[0].shape[1:] == shape and got[1].dtype == id_type
                if want is not None:
                    check(got, want, (case, id_type, dtype))
            assert values.tobytes() == before
            assert [each.tobytes() for each in both[0]] == [each.tobytes() for each in both[1]]
            bits.append([each.tobytes() for each in both[0]])
        # Several tables as one, of any width, none, and more than a mailbox holds.
        tables = [
            (rows_of(rank, [0] * n, (width,), dtype), (np.arange(n) * (rank + 1)).astype(id_type))
            for n, width, dtype, id_type in (
                (30_000, 32, np.float32, np.int32),
                (5, 1, np.float16, np.int64),
                (0, 3, np.float64, np.int64),
                (7, 0, np.float32, np.int32),
                (3, 5000, ml_dtypes.bfloat16, np.int32),
            )
        ]
        for way in ("gather", "owner"):
            pairs = ring.all_reduce_rows(*map(list, zip(*tables, strict=True)), reduction=way)
            for pair, table in zip(pairs, tables, strict=True):
                alone = ring.all_reduce_rows(*table, reduction="gather")
                assert [each.tobytes() for each in pair] == [each.tobytes() for each in alone]
            assert sorted(pairs[1][1].tolist()) == sorted({i * (r + 1) for i in range(5) for r in range(size)})
            assert pairs[3][0].shape[1:] == (0,) and len(pairs[3][1]) > 0
            bits.append([each.tobytes() for pair in pairs for each in pair])
    return bits


@pytest.mark.parametrize(("world_size", "transport"), [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm")])
def test_rows_of_equal_ids_are_added_in_rank_order_either_way(world_size, transport):
    results = ranks.run(world_size, every_case, transport, seconds=60)
    assert all(result == results[0] for result in results), "all ranks hold the same bits in the same order"


def choices(cluster):
    """[call]: how many bytes left this rank, by what each call saw of the one before under its name."""
    with ranks.join(cluster) as ring:
        group = ring.group(list(reversed(range(ring.world_size))), "backwards")
        sent = []

        def call(on, ids, name, way="auto"):
            before = ring.statistics()["bytes_sent"]
            on.all_reduce_rows(np.ones((len(ids), 16), np.float32), ids, reduction=way, name=name)
            sent.append(ring.statistics()["bytes_sent"] - before)

        same = np.arange(10_000)
        for on in (ring, group):
            for _ in range(3):
                call(on, same, "same")
            call(on, same + 20_000 * ring.rank, "same")  # chosen by what was seen before
            for _ in range(2):
                call(on, same + 20_000 * ring.rank, "same")
            call(on, same, "same", "gather")
            call(on, same, "same", "owner")
            for _ in range(2):
                call(on, same[:100], "few")
        for number in range(200):  # more names than are kept
            call(ring, same[:10], f"name {number}")
        call(ring, same, "same")
        ring.all_reduce_rows([np.ones((3, 2)), np.ones((1, 2))], [np.arange(3), np.arange(1)], name="same")
        return sent


def test_the_way_is_chosen_by_what_was_seen():
    rows = 10_000 * (16 * 4 + 8)
    gathered, owned = 3 * rows, (3 / 4 + 3 / 4) * rows
    for sent in ranks.run(4, choices):
        for calls in (sent[:10], sent[10:20]):
            wanted = [gathered, owned, owned, (3 / 4 + 3) * rows, gathered, gathered, gathered, owned]
            np.testing.assert_allclose(calls[:8], wanted, rtol=0.05)
            assert calls[8] == calls[9]  # a second delay does not pay
    sizes = [10**5, 10**6, 10**7]
    for (wanted, number), size, sent, summed in itertools.product(
        library.ROW_SUMS.items(), (2, 3, 4, 64), sizes, sizes
    ):
        native = core.tfring_choose_row_sums(number, sent, summed, size)
        assert native == library.ROW_SUMS[schedule_tables.choose_row_sums(sent, summed, size, wanted)]


def two_ranks_never_gain(cluster):
    with ranks.join(cluster) as ring:
        sent = []
        for _ in range(2):
            before = ring.statistics()["bytes_sent"]
            ring.all_reduce_rows(np.ones((10_000, 16)), np.arange(10_000))
            sent.append(ring.statistics()["bytes_sent"] - before)
        return sent


def test_two_ranks_gather():
    for sent in ranks.run(2, two_ranks_never_gain):
        assert sent[0] == sent[1] < 1.01 * 10_000 * 17 * 8


REFUSED = {
    "ids of another dtype": ((np.ones((2, 3)), np.ones(2)), "ids of table 0 are float64 with 1 dim"),
    "ids of two dimensions": ((np.ones((2, 3)), np.ones((2, 1), int)), "ids of table 0 are int64 with 2 dim"),
    "too few ids": ((np.ones((2, 3)), np.arange(1)), "table 0 are 2 rows, with 1 ids"),
    "a scalar": ((np.float32(1), np.arange(1)), "a scalar has no rows"),
    "flags": ((np.ones((2, 3), bool), np.arange(2)), "bool has no sum"),
    "lists of other lengths": (([np.ones((2, 3))], [np.arange(2), np.arange(2)]), "has 1 arrays, but `indices` 2"),
}


def refused(cluster):
    with ranks.join(cluster) as ring:
        for what, (arguments, message) in REFUSED.items():
            if ring.rank == 1:
                with pytest.raises(ValueError, match=message):
                    ring.all_reduce_rows(*arguments)
                    raise AssertionError(what)
        with pytest.raises(ValueError, match="`reduction` is 'ring', not auto"):
            ring.all_reduce_rows(np.ones((1, 2)), np.arange(1), reduction="ring")
        values, _ = ring.all_reduce_rows(np.ones((1, 2)), np.arange(1))  # which nobody's refusal has harmed
        assert values.tolist() == [[2.0, 2.0]]


def test_what_cannot_be_is_refused_and_nothing_sent():
    ranks.run(2, refused)


PAIRS = {
    "another way": (
        lambda ring, odd: ring.all_reduce_rows(
            np.ones((2, 3)), np.arange(2), name="t", reduction="owner" if odd else "gather"
        ),
        'all_reduce_rows "t" by owner of 2 tensors',
        'all_reduce_rows "t" by gathering of 2 tensors',
    ),
    "another number of tables": (
        lambda ring, odd: ring.all_reduce_rows([np.ones((2, 3))] * (1 + odd), [np.arange(2)] * (1 + odd)),
        'all_reduce_rows "all_reduce_rows" by gathering of 4 tensors',
        'all_reduce_rows "all_reduce_rows" by gathering of 2 tensors',
    ),
    "rows of another width": (
        lambda ring, odd: ring.all_reduce_rows(np.ones((2, 3 + odd)), np.arange(2)),
        "the first float64[2, 4]",
        "the first float64[2, 3]",
    ),
}


def disagree(cluster, which):
    with ranks.join(cluster) as ring:
        PAIRS[which][0](ring, cluster.rank == 1)


@pytest.mark.parametrize("which", PAIRS)
def test_ranks_that_disagree_are_told(which):
    for failed in ranks.try_run(3, disagree, which):
        assert failed.kind == "MismatchError"
        assert all(text in failed.message for text in PAIRS[which][1:]), failed.message


def until_one_dies(cluster, transport, way):
    with ranks.join(cluster, transport=transport) as ring:
        ids = np.arange(200_000)
        for step in itertools.count():
            if step == 3 and ring.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ring.all_reduce_rows(np.ones((len(ids), 8), np.float32), ids, reduction=way, name="rows")


def without_memory(cluster, rows, room):
    """Rank 1 may not have as much more memory as numbering the ids takes."""
    import ctypes
    import gc
    import resource

    values, ids = np.ones((rows, 1), np.float32), np.arange(rows)
    with ranks.join(cluster) as ring:
        ring.all_reduce_rows(values[:10], ids[:10])
        if cluster.rank == 1:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed
            used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        try:
            ring.all_reduce_rows(values, ids)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("room", [1 << 20, 96 << 20])  # for nothing, and for what travels
def test_a_rank_without_memory_says_so(room):
    for failed in ranks.try_run(2, without_memory, 2_000_000, room):
        assert failed.kind == "TfringError" and "rank 1 has no memory for all_reduce_rows" in failed.message, failed


@pytest.mark.parametrize(("transport", "way"), [("shm", "owner"), ("tcp", "gather")])
def test_a_rank_that_dies_is_named(transport, way):
    with ranks.Group(3) as group:
        group.start(3, until_one_dies, transport, way)
        began = time.monotonic()
        outcomes = group.outcomes()
        assert time.monotonic() - began < 20
    for rank in (0, 2):
        assert outcomes[rank].kind == "PeerLostError" and "rank 1" in outcomes[rank].message


def on_tensors(name):
    import tensorflow as tf

    from tfring.ring import ops

    with join(name) as ring:
        rank, size = ring.rank, ring.world_size
        values, ids = tf.constant([[1.0], [2.0], [4.0]]) * 10**rank, tf.constant([7, 3, 7 + rank])

        @tf.function
        def summed(values, ids, active):
            assert not values.shape[0] or values.shape[0] == 3
            one, kept = ops.all_reduce_rows(ring, values, ids, active=active)
            many = ops.all_reduce_rows(ring, [values, values[:1]], [ids, tf.cast(ids[:1], tf.int64)], name="many")
            assert one.shape.as_list() == [None, 1] and kept.shape.as_list() == [None]
            return one, kept, many

        one, kept, many = summed(values, ids, tf.constant(rank != 1))
        want = {7: 5.0, 3: 2.0}
        if size > 2:
            want = {7: 5.0 + 100, 3: 2.0 + 200, 9: 400.0}
        assert dict(zip(kept.numpy().tolist(), one[:, 0].numpy().tolist(), strict=True)) == want
        (all_values, all_ids), (first, first_ids) = many
        assert sorted(all_ids.numpy()) == [3, *range(7, 7 + size)] and all_values.shape == (1 + size, 1)
        assert first.numpy().tolist() == [[sum(10.0**r for r in range(size))]]
        assert (first_ids.dtype, first_ids.numpy().tolist()) == (tf.int64, [7])
        # Tensors in, tensors out; of this process alone, in the order in which ids occur.
        assert tf.is_tensor(ring.all_reduce_rows(values, ids)[0])
        [(alone, alone_ids)], numbers = ops.sum_rows(None, [values[:2]], [tf.constant([5, 5])], name="alone")
        assert (alone / 10.0**rank).numpy().tolist() == [[3.0]] and alone_ids.numpy().tolist() == [5]
        assert numbers.numpy().tolist() == [1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="Each row needs one id"):
            ops.sum_rows(None, [values], [tf.constant([5, 5])], name="alone")
        with pytest.raises(LookupError, match="TfringAllReduceRows"), tf.GradientTape() as tape:
            tape.watch(values)
            tape.gradient(ops.all_reduce_rows(ring, values, ids)[0], values)


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_tensors(world_size):
    run(world_size, on_tensors)
