"""Records of the core, the file a rank writes, the rest after a crash; from NumPy alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from harness import workers

from tfring import Cluster, Communicator
from tfring.cluster import detect
from tfring.errors import ConfigurationError
from tfring.report import files
from tfring.ring import clocks, library, trace

LATE_SECONDS = 0.5


def late_rank(folder):
    """Rank 2 comes late to a large all_reduce, which goes round, and to a small one."""
    cluster = detect()
    with Communicator.connect(cluster) as communicator:
        recorder = trace.start(folder, cluster.rank, cluster.world_size, trace.ring_source(communicator))
        for name, count in (("large", 1 << 18), ("small", 4)):
            communicator.barrier(name="together")
            if cluster.rank == 2:
                time.sleep(LATE_SECONDS)
            communicator.all_reduce(np.ones(count, np.float32), name=name)
        for way in ("gather", "owner"):
            communicator.all_reduce_rows(np.ones((500, 16), np.float32), np.arange(500), reduction=way, name=way)
        pair = communicator.group([0, 1], "pair")
        if cluster.rank < 2:
            pair.all_reduce(np.ones(4, np.float32), name="of two")
        communicator.barrier(name="together")
        recorder.close()


def named_at_length(folder):
    cluster, name = detect(), "step, exchange 1: rows for " + "SparseSoftmaxCrossEntropyWithLogits, " * 4
    with Communicator.connect(cluster) as communicator:
        recorder = trace.start(folder, cluster.rank, cluster.world_size, trace.ring_source(communicator))
        recorder.lines(name, "train.py:12")
        communicator.all_reduce(np.ones(4, np.float32), name=name)
        recorder.close()


def test_lines_are_found_by_a_name_that_the_core_cuts(tmp_path):
    workers(2, tensorflow=False).run(named_at_length, str(tmp_path))
    for rank in files.read(tmp_path).ranks:
        [call] = [call for call in rank.calls if call.kind == "all_reduce"]
        assert rank.lines == {call.name: "train.py:12"}


def test_who_waits_for_whom_among_three(tmp_path):
    workers(3, tensorflow=False).run(late_rank, str(tmp_path))
    run = files.read(tmp_path)
    assert run.missing == [] and all(rank.ended for rank in run.ranks)
    for rank in run.ranks:
        calls = {call.name: call for call in rank.calls}
        assert clocks.NAME not in calls
        for name, algorithm, num_bytes in (("large", "ring", 1 << 20), ("small", "flat", 16)):
            call = calls[name]
            assert (call.kind, call.algorithm, call.bytes, call.code) == ("all_reduce", algorithm, num_bytes, 0)
            assert call.added > 0 and call.moved >= 0 and call.waited >= 0
            assert call.sent >= num_bytes and call.received >= num_bytes
            if rank.rank == 2:
                assert call.waited < LATE_SECONDS / 2 * 1e9
            else:
                assert call.last == 2 and LATE_SECONDS / 2 * 1e9 < call.waited < call.end - call.begin
        for way in ("gather", "owner"):
            call = calls[way]
            assert (call.kind, call.algorithm, call.bytes) == ("all_reduce_rows", way, 500 * (16 * 4 + 8))
            assert call.added > 0 and call.moved >= 0 and call.sent > call.bytes
        assert ("of two" in calls) == (rank.rank < 2)
        if rank.rank < 2:
            assert calls["of two"].group == "pair" and calls["of two"].last == 1 - rank.rank
    # One clock on one host: a collective begins on every rank before it ends on any.
    for spans in zip(*(([c for c in rank.calls if not c.group]) for rank in run.ranks), strict=True):
        assert len({call.name for call in spans}) == 1
        assert max(call.begin for call in spans) <= min(call.end for call in spans)


def measured(_):
    cluster = detect()
    with Communicator.connect(cluster) as communicator:
        return clocks.distance(communicator)


def test_the_clocks_of_one_host_are_one():
    for found in workers(2, tensorflow=False).run(measured, None):
        assert found.offset == 0 and found.lowest <= 0 <= found.highest
        assert found.highest - found.lowest < 50e6


def shifted(seconds, rank_to_shift):
    """As on two hosts: one rank's clock is ahead."""
    cluster = detect()
    ahead = int(seconds * 1e9) if cluster.rank == rank_to_shift else 0
    with Communicator.connect(cluster) as communicator:
        return clocks.distance(communicator, clock=lambda: clocks.now() + ahead)


@pytest.mark.parametrize("seconds", [1000.0, -1000.0])
def test_a_clock_that_is_ahead(seconds):
    first, second = workers(2, tensorflow=False).run(shifted, seconds, 1)
    assert first.offset == 0
    assert abs(second.offset - seconds * 1e9) <= second.uncertainty < 25e6


def test_what_has_no_room_is_counted():
    core, lost = library.core(), ctypes.c_int64()
    with Communicator.connect(Cluster.alone(), "for room") as communicator:
        core.tfring_trace(4)
        try:
            for number in range(6):
                communicator.all_reduce(np.ones(3, np.float32), name=f"call {number}")
            taken = (library.Record * 8)()
            assert core.tfring_take_records(taken, 8, lost) == 4 and lost.value == 2
            assert [record.name for record in taken[:4]] == [f"call {n}".encode() for n in range(4)]
            assert all(record.ring == b"for room" and record.begin <= record.end for record in taken[:4])
            communicator.all_reduce(np.ones(3, np.float32), name="later")
            core.tfring_mark(b"here")
            assert core.tfring_take_records(taken, 1, lost) == 1 and taken[0].name == b"later"
            assert core.tfring_take_records(taken, 8, lost) == 1 and taken[0].kind == library.MARK
        finally:
            core.tfring_trace(0)
        communicator.all_reduce(np.ones(3, np.float32))
        core.tfring_mark(b"unheard")
        assert core.tfring_take_records(taken, 8, lost) == 0


KILLED = """
import os, sys, time
import numpy as np
from tfring import Cluster, Communicator
from tfring.ring import trace
communicator = Communicator.connect(Cluster.alone())
trace.start(sys.argv[1], 0, 1, trace.ring_source(communicator))
end = time.monotonic() + 2.5
while time.monotonic() < end:
    communicator.all_reduce(np.ones(3, np.float32), name="again")
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_a_crash_leaves_a_file_that_can_be_read(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    [rank] = files.read(tmp_path).ranks
    assert not rank.ended and len(rank.calls) > 50
    [totals] = rank.totals["collectives"]
    assert totals["count"] == len(rank.calls)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    [rank] = files.read(tmp_path).ranks
    assert len(rank.calls) > 50 and rank.totals == {}


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match=r"`trace` is .*file, a folder that cannot be written to"):
        trace.start(file, 0, 1, trace.ring_source(None))
    first = trace.start(tmp_path / "a", 0, 1, trace.ring_source(None))
    try:
        with pytest.raises(ConfigurationError, match="This process already writes a trace to"):
            trace.start(tmp_path / "b", 0, 1, trace.ring_source(None))
        assert trace.start(tmp_path / "a", 0, 1, trace.ring_source(None)) is first
        first.close()
        assert not first.closed
    finally:
        first.close()
    lines = [json.loads(line) for line in (tmp_path / "a" / "rank-0.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", "clock", "end"]
    assert lines[0]["pid"] == os.getpid()
