"""Collectives over processes against NumPy: kinds, dtypes, sizes, world sizes, transports."""

import functools
import hashlib
import os
import pathlib
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import ranks
from arithmetic import combine, is_reducible, total
from schedule_tables import is_small

from tfring.errors import MismatchError
from tfring.ring import library
from tfring.ring.schedule import chunk_bounds

DTYPES = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.int8,
    np.int32,
    np.int64,
    np.uint8,
    np.int16,
    np.uint16,
    np.uint32,
    np.uint64,
    np.complex64,
    np.complex128,
    np.bool_,
]
# Around the chunks of 8 ranks, small and large algorithm, several segments.
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (8191,), (16385,), (331, 401), (300_011,)]
TRANSPORTS = ("tcp", "shm")


@functools.cache
def normal(shape, rank):
    return np.random.default_rng(rank).normal(size=shape) * 3.0 ** (rank % 4) + rank


def contribution(shape, dtype, rank):
    """Returns a rank's contribution: skewed, every rank another scale, so that no two orders of adding round alike."""
    values = normal(shape, rank)
    if np.dtype(dtype) == np.bool_:
        return values > rank
    if np.issubdtype(np.dtype(dtype), np.integer):
        return (values * 40).astype(np.int64).astype(dtype)
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        values = values + 1j * normal(shape, rank + 100)
    return values.astype(dtype)


def add_like_the_ring(inputs, op):
    """The reduction in the very order of the schedule, rounded where the ring rounds."""
    world_size = len(inputs)
    flat = [value.ravel() for value in inputs]
    if is_small(flat[0].nbytes, world_size):
        return total(op, flat).reshape(inputs[0].shape)
    result = np.empty_like(flat[0])
    for chunk, (begin, end) in enumerate(chunk_bounds(result.size, world_size)):
        partial = flat[chunk][begin:end]
        for distance in range(1, world_size):
            partial = combine(op, flat[(chunk + distance) % world_size][begin:end], partial)
        result[begin:end] = partial
    return result.reshape(inputs[0].shape)


def check(got, want, what):
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, got.shape, want.shape)
    same = got.view(np.uint8) == want.view(np.uint8) if got.ndim else np.array(got.tobytes() == want.tobytes())
    assert same.all(), (what, got, want)
    return got


def sweep(cluster, transport, shapes):
    rank, world_size = cluster.rank, cluster.world_size
    digest = hashlib.sha256()
    with ranks.join(cluster, transport=transport) as ring:
        if world_size > 1:
            assert ring.transport == (transport, transport)
        for dtype in DTYPES:
            for shape in shapes:
                inputs = [contribution(shape, dtype, r) for r in range(world_size)]
                mine = inputs[rank].copy()
                what = (np.dtype(dtype).name, shape)
                for op in library.OPERATIONS:
                    if not is_reducible(dtype, op):
                        continue
                    want = add_like_the_ring(inputs, op)
                    digest.update(check(ring.all_reduce(mine, op), want, ("all_reduce", op, *what)).tobytes())
                root = sum(shape) % world_size
                digest.update(check(ring.broadcast(mine, root), inputs[root], ("broadcast", *what)).tobytes())
                if shape:
                    # Rows differ from rank to rank, none at all included.
                    rows = [shape[0] * r // max(1, world_size - 1) for r in range(world_size)]
                    want = np.concatenate([value[:n] for value, n in zip(inputs, rows, strict=True)])
                    got = ring.all_gather(mine[: rows[rank]])
                    digest.update(check(got, want, ("all_gather", *what)).tobytes())
                    if np.dtype(dtype) != np.bool_:
                        begin, end = chunk_bounds(shape[0], world_size)[rank]
                        got = ring.reduce_scatter(mine)
                        if np.issubdtype(np.dtype(dtype), np.integer):
                            check(got, add_like_the_ring(inputs, "sum")[begin:end], ("reduce_scatter", *what))
                        else:
                            wide = np.result_type(np.float64, dtype)
                            exact = sum(value.astype(wide) for value in inputs)[begin:end]
                            scale = sum(np.abs(value.astype(wide)) for value in inputs)[begin:end]
                            wrong = np.abs(got.astype(wide) - exact)
                            epsilon = float(ml_dtypes.finfo(dtype).eps)
                            assert got.dtype == dtype and (wrong <= world_size * epsilon * scale).all(), what
                check(mine, inputs[rank], ("the input stays as it is", *what))
                ring.barrier()
    return digest.hexdigest()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_everything_equals_numpy_and_all_ranks_hold_the_same_bits(world_size, transport):
    shapes = SHAPES if world_size < 4 else SHAPES[:-2] if world_size == 4 else SHAPES[:-3]
    digests = ranks.run(world_size, sweep, transport, shapes, seconds=60)
    assert len(set(digests)) == 1


def reduce_twice(cluster, transport):
    mine = contribution((300_001,), np.float32, cluster.rank)
    with ranks.join(cluster, transport=transport) as ring:
        return [ring.all_reduce(mine).tobytes(), ring.reduce_scatter(mine).tobytes()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_from_run_to_run_and_over_either_transport(world_size):
    runs = [ranks.run(world_size, reduce_twice, transport) for transport in ("tcp", "shm", "tcp")]
    assert runs[0] == runs[1] == runs[2]


def odd_arguments(cluster):
    rank = cluster.rank
    with ranks.join(cluster) as ring:
        matrix = np.arange(12, dtype=np.float32).reshape(3, 4) + rank
        transposed = ring.all_reduce(matrix.T)
        swapped = ring.all_reduce(matrix.astype(">f4"))
        every_other = ring.all_gather(matrix[:, ::2])
        number = ring.all_reduce(rank + 0.5)
        zero_rows = ring.all_gather(np.zeros((0, 3), np.float32))
        infinite = ring.all_reduce(np.array([np.nan, np.inf, -np.inf, 1.0], np.float32) * (1 if rank else 0.5))
        biggest = ring.all_reduce(np.array([np.nan if rank == 0 else 1.0, -0.0, 5.0 - rank]), "max")
    assert (transposed == (np.arange(12).reshape(3, 4).T * 2 + 1)).all()
    assert (swapped == np.arange(12).reshape(3, 4) * 2 + 1).all() and swapped.dtype.isnative
    assert every_other.shape == (6, 2) and (every_other[3:] == np.arange(12).reshape(3, 4)[:, ::2] + 1).all()
    assert number.shape == () and number == 2.0
    assert zero_rows.shape == (0, 3)
    assert np.isnan(infinite[0]) and infinite[1] == np.inf and infinite[2] == -np.inf and infinite[3] == 1.5
    assert np.isnan(biggest[0]) and biggest[2] == 5.0


def test_views_byte_orders_scalars_and_not_a_number():
    ranks.run(2, odd_arguments)


def refused_arguments(cluster):
    messages = []
    with ranks.join(cluster) as ring:
        for call in (
            lambda: ring.all_reduce(np.array([True, False])),
            lambda: ring.all_reduce(np.zeros(3, "S4")),
            lambda: ring.all_reduce(np.array([True, False]), "product"),
            lambda: ring.all_reduce(np.zeros(3, np.complex64), "max"),
            lambda: ring.all_reduce(np.zeros(3), "mean"),
            lambda: ring.broadcast(np.zeros(3), root=2),
            lambda: ring.broadcast(np.zeros(3), root=-1),
            lambda: ring.all_gather(np.float32(1)),
            lambda: ring.reduce_scatter(np.float32(1)),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            messages.append(str(caught.value))
        assert ring.all_reduce(np.ones(2)).tolist() == [2.0, 2.0], "a refused call does no harm"
    return messages


def test_what_cannot_be_is_refused_on_the_spot():
    messages, _ = ranks.run(2, refused_arguments)
    for message, words in zip(
        messages,
        [
            'op="max"',
            "does not support dtype |S4",
            'no product. Use op="max"',
            "complex64 have no order",
            "`op` is 'mean', not ",
            "root=2",
            "root=-1",
            "scalar",
            "scalar",
        ],
        strict=True,
    ):
        assert words in message, message


def count_bytes(cluster, transport):
    with ranks.join(cluster, transport=transport) as ring:
        assert ring.statistics()["bytes_sent"] == 0, "forming the ring does not count"
        ring.all_reduce(np.zeros(300_000, np.float32))
        ring.barrier()
        ring.broadcast(np.zeros(10))
        return ring.statistics()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_statistics_count_what_the_schedule_says(transport):
    world_size = 3
    for statistics in ranks.run(world_size, count_bytes, transport):
        called = {kind: number for kind, number in statistics["collectives"].items() if number}
        assert called == {"all_reduce": 1, "broadcast": 1, "barrier": 1}
        least = 2 * (world_size - 1) * 1_200_000 // world_size
        assert least < statistics["bytes_sent"] < least + 2000
        assert least < statistics["bytes_received"] < least + 2000
        assert statistics["seconds_waited"] >= 0


def into_arrays(cluster, transport):
    with ranks.join(cluster, transport=transport) as ring:
        total = ring.world_size * (ring.world_size + 1) / 2
        for size in (3, 300_000):
            value = np.full(size, ring.rank + 1.0)
            other = np.zeros(size)
            assert ring.all_reduce(value, out=other) is other
            assert (other == total).all() and (value == ring.rank + 1).all()
            assert ring.all_reduce(value, out=value) is value
            np.testing.assert_array_equal(value, other)
            half = np.full(size, ring.rank + 1.0, np.float32)
            ring.all_reduce(half, compression="float16", out=half)
            np.testing.assert_array_equal(half, total)
            many = [np.full(size, ring.rank + 1.0), np.full([2, 2], 2.0)]
            outputs = [many[0], np.zeros([2, 2])]
            first, second = ring.all_reduce(many, out=outputs)
            assert first is many[0] and second is outputs[1]
            assert (first == total).all() and (second == 2 * ring.world_size).all()
        value = np.zeros(8)
        fixed = np.zeros(8)
        fixed.flags.writeable = False
        for out, words in (
            (np.zeros(7), r"`out` is \[7\] of float64, but the value is \[8\] of float64"),
            (np.zeros(8, np.float32), r"`out` is .* of float32"),
            ([0.0] * 8, r"`out` is .*0.0"),
            (np.zeros(16)[::2], "contiguous"),
            (fixed, "writeable"),
        ):
            with pytest.raises(ValueError, match=words):
                ring.all_reduce(value, out=out)
        whole = np.zeros(12)
        with pytest.raises(ValueError, match="`out` overlaps another array"):
            ring.all_reduce(whole[:8], out=whole[4:])
        with pytest.raises(ValueError, match="`out` overlaps another array"):
            ring.all_reduce([whole[:4], whole[4:8]], out=[whole[4:8], whole[:4]])
        with pytest.raises(ValueError, match="`out` has 1 arrays for 2 values"):
            ring.all_reduce([whole[:4], whole[4:8]], out=[whole[:4]])
        ring.barrier()  # nothing was sent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_into_arrays_that_are_there(transport):
    ranks.run(3, into_arrays, transport)


def planned(cluster):
    """A planned all_reduce in loops, in a thread, beside one that is not planned, and after the ring is closed."""
    with ranks.join(cluster) as ring:
        total = ring.world_size * (ring.world_size + 1) / 2
        for size in (1, 300_000):
            value, other = np.full(size, ring.rank + 1.0), np.zeros(2, np.int32)
            reduce = ring.plan_all_reduce([value, value[:1].copy()], name="planned")
            for factor in (1, 2, 3):
                value[:] = (ring.rank + 1.0) * factor
                first, second = reduce()
                assert (first == total * factor).all() and second == total
            assert reduce()[0] is first  # the same arrays each time
            in_place = ring.plan_all_reduce(value, "max", out=value)
            assert in_place() is value and (value == ring.world_size * 3).all()
            ring.all_reduce(value, "max", out=value) if ring.rank else in_place()
            thread = threading.Thread(target=ring.plan_all_reduce(other, out=other))
            thread.start()
            thread.join()
        for wrong, words in (
            (value[::2], "contiguous"),
            ([1.0], "contiguous"),
            (value.astype(">f8"), "byte order"),
        ):
            with pytest.raises(ValueError, match=words):
                ring.plan_all_reduce(wrong)
        with pytest.raises(ValueError, match="`op` is"):
            ring.plan_all_reduce(value, "mean")
        reduce = ring.plan_all_reduce(np.full(3, ring.rank, np.int32))
        ring.barrier()
        if ring.rank == 0:  # of another size than the others'
            reduce = ring.plan_all_reduce(np.zeros(4, np.int32))
        with pytest.raises(MismatchError):
            reduce()
    with pytest.raises(ValueError, match="closed"):
        reduce()


def test_a_planned_all_reduce_equals_all_reduce():
    ranks.run(3, planned)


def wait_for_the_last(cluster, what):
    """Returns when this rank has come, and when it has passed, by the clock that all have."""
    times = []
    with ranks.join(cluster) as ring:
        for last in range(cluster.world_size):
            ring.barrier()
            if cluster.rank == last:
                time.sleep(0.3)
            came = time.monotonic()
            if what == "barrier":
                ring.barrier()
            else:
                ring.all_reduce(np.zeros(0))
            times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("what", ["barrier", "all_reduce of nothing"])
def test_nobody_passes_before_the_last_has_come(what):
    for times in zip(*ranks.run(3, wait_for_the_last, what), strict=True):
        assert max(came for came, _ in times) <= min(passed for _, passed in times), times


def several_rings(cluster):
    """Three rings of the same processes at once, one used from a thread of its own."""
    rings = [ranks.join(cluster, name=f"{cluster.ring}-{i}") for i in range(3)]
    results = {}

    def other():
        results["other"] = [float(rings[2].all_reduce(np.float64(i))) for i in range(50)]

    thread = threading.Thread(target=other)
    thread.start()
    mine = [float(rings[i % 2].all_reduce(np.full(5000, i), name=str(i))[0]) for i in range(50)]
    thread.join()
    for ring in rings:
        ring.close()
    # The same name again, once the ring before is closed.
    for _ in range(3):
        with ranks.join(cluster, name=f"{cluster.ring}-0") as ring:
            ring.barrier()
    assert mine == results["other"] == [cluster.world_size * i for i in range(50)]


def test_rings_are_independent_and_names_can_be_used_again():
    ranks.run(3, several_rings)


def rings_of_one_name(cluster):
    """Two rings of one name at once, of which either is closed first, while a rank is waited for and asked why."""
    sums = []
    for left in (0, 1):
        rings = [ranks.join(cluster, name=cluster.ring) for _ in range(2)]
        for ring in (*rings, *rings):
            sums.append(float(ring.all_reduce(np.ones(3))[-1]))
        rings[left].close()
        if cluster.rank == 0:
            time.sleep(1.5)
        sums.append(float(rings[1 - left].all_reduce(np.ones(3))[-1]))
        with pytest.raises(ValueError, match="is closed"):
            rings[left].barrier()
        rings[1 - left].close()
    return sums


@pytest.mark.parametrize("world_size", [2, 3])
def test_rings_of_one_name_are_two(world_size):
    assert ranks.run(world_size, rings_of_one_name) == [[float(world_size)] * 10] * world_size


def open_descriptors(cluster, transport):
    for _ in range(2):  # the first leaves the listening socket and what Python opens once
        with ranks.join(cluster, transport=transport) as ring:
            ring.all_reduce(np.ones(100_000))
        before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with ranks.join(cluster, transport=transport) as ring:
            ring.all_reduce(np.ones(100_000))
    after = set(os.listdir("/proc/self/fd"))
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "tfring-mailbox" in line]
    return len(after) - len(before), mapped


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_ring_leaves_nothing_open(transport):
    for more, mapped in ranks.run(2, open_descriptors, transport):
        assert more <= 1 and not mapped  # one: the descriptor listdir itself holds


def pass_beyond_two_gigabytes(cluster, transport):
    size = 2**31 + 5
    mine = np.full(size, cluster.rank + 1, np.int8)
    with ranks.join(cluster, transport=transport, timeout_seconds=120) as ring:
        result = ring.all_reduce(mine)
    for part in (result[:100], result[size // 2 - 50 : size // 2 + 50], result[-100:]):
        assert (part == 3).all()
    return int(result.sum(dtype=np.int64)) == 3 * size


@pytest.mark.skipif(
    not os.environ.get("TFRING_TEST_LARGE"), reason="needs 10 GB of memory; TFRING_TEST_LARGE=1 runs it"
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_above_two_gigabytes(transport):
    assert all(ranks.run(2, pass_beyond_two_gigabytes, transport, seconds=300))
