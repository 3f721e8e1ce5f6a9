"""The harness itself: results by rank, failures told, timeouts ended, nothing left running."""

import collections
import os
import pathlib
import random
import subprocess
import sys
import time

import harness
import pytest
from harness import WorkersFailedError

from tfring import cluster


def workers(n, communication="ring"):
    return harness.workers(n, communication, tensorflow=False)


def who(greeting, mine):
    found = cluster.detect()
    return (
        f"{greeting} {mine}",
        found.rank,
        found.world_size,
        found.addresses,
        os.getpid(),
        harness.communication(),
    )


def fail_on_rank_1(value):
    print("before the failure")
    if cluster.detect().rank == 1:
        assert value == 4
    return value


def sleep_on_rank_0():
    if cluster.detect().rank == 0:
        time.sleep(600)


def die_on_rank_1():
    if cluster.detect().rank == 1:
        os._exit(7)


def raise_on_rank_1_while_0_waits():
    if cluster.detect().rank == 1:
        raise ValueError("the cause")
    time.sleep(600)


def logical_cpus():
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("CPU")]


def draws():
    import numpy as np
    import tensorflow as tf

    return random.random(), np.random.random(), float(tf.random.uniform(())), hash("a string"), os.environ["TMPDIR"]


def leave_a_mess():
    import keras
    import tensorflow as tf

    found = keras.config.floatx(), tf.config.functions_run_eagerly(), keras.layers.Dense(1).name
    keras.config.set_floatx("float64")
    tf.config.run_functions_eagerly(True)
    os.environ["TFRING_RANK"] = "left over"
    return found


def pid():
    return os.getpid()


def unpicklable():
    return lambda: None


def is_alive(process):
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_by_rank():
    results = workers(3).run(who, "hello", per_rank=["a", "b", "c"])
    assert [result[0] for result in results] == ["hello a", "hello b", "hello c"]
    assert [result[1:3] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({result[3] for result in results}) == 1
    assert len(set(results[0][3])) == 3
    assert {result[5] for result in results} == {"ring"}


def test_processes_are_shared_over_world_sizes():
    assert workers(3).run(pid)[:2] == workers(2).run(pid)


def test_processes_that_have_grown_large_are_replaced(monkeypatch):
    before = workers(2).run(who, "", per_rank=[1, 2])
    monkeypatch.setattr(harness, "_FULL_BYTES", 1 << 20)
    after = workers(2).run(who, "", per_rank=[1, 2])
    assert not {reply[4] for reply in before} & {reply[4] for reply in after}


def test_tensorflow_has_no_listening_socket():
    results = workers(2, "tensorflow").run(who, "hello", per_rank=["a", "b"])
    assert [result[5] for result in results] == ["tensorflow"] * 2
    assert len(set(results[0][3])) == 2


def test_failure_shows_every_rank():
    before = workers(2).run(pid)
    with pytest.raises(WorkersFailedError) as failure:
        workers(2).run(fail_on_rank_1, 3)
    text = str(failure.value)
    assert "1 of 2 ranks failed" in text
    assert "rank 1 raised" in text and "assert 3 == 4" in text and "in fail_on_rank_1" in text
    assert text.count("before the failure") == 2
    assert not set(before) & set(workers(2).run(pid))


def test_the_cause_stands_before_those_that_waited_for_it(monkeypatch):
    monkeypatch.setattr(harness, "_GRACE_SECONDS", 0.5)
    with pytest.raises(WorkersFailedError, match=r"(?s)rank 1 raised.*the cause.*rank 0 timed out"):
        workers(2).run(raise_on_rank_1_while_0_waits)


def test_timeout_shows_stacks_and_kills():
    old = workers(2).run(pid)
    started = time.monotonic()
    with pytest.raises(WorkersFailedError, match="rank 0 timed out") as failure:
        workers(2).run(sleep_on_rank_0, timeout=1)
    assert time.monotonic() - started < 10
    assert "in sleep_on_rank_0" in str(failure.value)
    assert not any(map(is_alive, old))


def test_death_is_told():
    with pytest.raises(WorkersFailedError, match=r"rank 1 died\n.*exit code 7"):
        workers(2).run(die_on_rank_1)


def test_two_logical_cpus():
    assert [len(names) for names in harness.workers(2, logical_cpus=2).run(logical_cpus)] == [2, 2]


def seed_all():
    import keras

    keras.utils.set_random_seed(1)


def test_forked_processes_draw_differently():
    group = harness.workers(2, logical_cpus=2)
    group.run(seed_all)  # an earlier test's
    one, other = group.run(draws)
    assert all(mine != theirs for mine, theirs in zip(one[:-1], other[:-1], strict=True))
    assert one[-1] == other[-1] and one[-1].rpartition("/")[2].startswith("tfring-test-")


def test_keras_is_cleaned_up_between_tasks():
    group = harness.workers(2, logical_cpus=2)
    assert group.run(leave_a_mess) == group.run(leave_a_mess) == [("float32", False, "dense")] * 2


def test_processes_die_with_the_tests(tmp_path):
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import harness, test_harness, time\n"
        "print(*harness.workers(2, tensorflow=False).run(test_harness.pid), flush=True)\n"
        "time.sleep(600)"
    )
    command, env = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as tests:
        processes = tests.stdout.readline().split()
        tests.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)):
        assert len(processes) == 2 and time.monotonic() < deadline
        time.sleep(0.02)


def test_wrong_use():
    with pytest.raises(ValueError, match="top level"):
        workers(2).run(lambda: None)
    with pytest.raises(ValueError, match="per_rank"):
        workers(2).run(pid, per_rank=[1])
    with pytest.raises(ValueError, match="communication"):
        workers(2, "smoke")
    with pytest.raises(WorkersFailedError, match="pickle"):
        workers(1).run(unpicklable)


def test_no_two_folders_have_a_module_of_one_name():
    """pytest puts the folders of tests on the path, so that the second to be collected would import the first's.

    Tests of benchmarks put theirs there too.
    """
    tests = pathlib.Path(__file__).parent
    names = collections.Counter(path.name for path in tests.rglob("*.py"))
    benchmarks = tests.parent / "benchmarks"
    own = [path for path in benchmarks.rglob("*.py") if "/." not in str(path.relative_to(benchmarks.parent))]
    names.update({path.name for path in own})  # not of the environment that make_horovod.sh makes
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []
