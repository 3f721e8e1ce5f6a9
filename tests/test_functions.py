"""`tfring.rank()`, `broadcast` and their like: beside a strategy, without one, without TensorFlow, and their types."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import textwrap

import harness
import numpy as np
import pytest
from harness import COMMUNICATIONS, workers

import tfring

PLAIN = {"run": "ä", "folds": [1, 2.5, None, True], "nested": {"nan": float("inf")}}


def exchange(with_strategy):
    """All functions once; the same whatever carries them."""
    strategy = harness.strategy() if with_strategy else None
    me, size = tfring.rank(), tfring.world_size()
    if strategy is not None:
        assert (strategy.rank, strategy.world_size, strategy.is_chief) == (me, size, me == 0)
    assert (tfring.local_rank(), tfring.local_world_size(), tfring.is_chief()) == (me, size, me == 0)
    tfring.print_once("printed by rank", me)
    tfring.barrier()
    last = size - 1
    assert tfring.all_reduce(me + 1) == 6 and isinstance(tfring.all_reduce(me), int)
    assert tfring.all_reduce(me + 0.5, "mean") == 1.5
    assert tfring.all_reduce(me == 1, "max") is True
    rows = np.full((me + 1, 2), me, np.int32)
    gathered = tfring.all_gather(rows)
    assert gathered.dtype == np.int32 and gathered.tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    assert tfring.all_gather({"rank": me, "tuple": (np.float32(0.5), np.int64(3))}) == [
        {"rank": r, "tuple": [0.5, 3]} for r in range(size)
    ]
    assert tfring.broadcast(PLAIN if me == 0 else None) == PLAIN
    assert tfring.broadcast("of the last" if me == last else b"of no matter", root=last) == "of the last"
    array = tfring.broadcast(np.arange(6.0).reshape(2, 3) if me == 1 else "of no matter", root=1)
    assert isinstance(array, np.ndarray) and array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tfring.broadcast(np.array(7, np.int64) if me == 0 else None).shape == ()
    for function in (tfring.all_gather, tfring.broadcast):  # all ranks hear of it, and go on
        with pytest.raises(TypeError, match=r"a set|value of rank 0 cannot be"):
            function({1} if me == 0 else "text")
    with pytest.raises(TypeError, match="a dict with the non-string key 1"):
        tfring.all_gather({1: 2})
    with pytest.raises(ValueError, match="`root` is 3, not a rank from 0 to 2"):
        tfring.broadcast(1, root=3)
    with pytest.raises(ValueError, match="`op` is 'average', not sum, mean, max, min or product"):
        tfring.all_reduce(1, "average")
    return tfring.all_reduce([np.array([me]), np.array([1, 1])])[0].tolist()


def exchange_tensors():
    import tensorflow as tf

    strategy = harness.strategy()
    me = strategy.rank
    assert tfring.all_reduce(tf.constant([me, 1.0])).numpy().tolist() == [1.0, 2.0]
    assert tfring.all_reduce(tf.constant(me), "mean").numpy() == 0.5
    sent = tfring.broadcast(tf.constant([3, 4]) if me == 0 else None)
    assert tf.is_tensor(sent) and sent.numpy().tolist() == [3, 4]

    @tf.function
    def in_graph(x):
        return tfring.all_reduce(x, "max"), tfring.broadcast(x, 1), tfring.all_gather(x)

    return [t.numpy().tolist() for t in in_graph(tf.constant([me, -me]))]


def other_calls():
    if tfring.rank() == 0:
        tfring.barrier()
    else:
        tfring.broadcast("text")


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_beside_a_strategy(communication):
    results = workers(3, communication).run(exchange, True)
    assert results == [[3]] * 3


def test_without_a_strategy_and_without_tensorflow():
    assert workers(3, tensorflow=False).run(exchange, False) == [[3]] * 3


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_tensors(communication):
    assert workers(2, communication).run(exchange_tensors) == [[[1, 0], [1, -1], [0, 0, 1, -1]]] * 2


def test_other_calls_are_named():
    with pytest.raises(harness.WorkersFailedError) as e:
        workers(2, tensorflow=False).run(other_calls)
    assert "tfring.errors.MismatchError" in str(e.value)
    assert 'barrier "tfring.barrier"' in str(e.value) and 'broadcast "tfring.broadcast"' in str(e.value)


def test_a_process_that_is_alone():
    assert (tfring.rank(), tfring.world_size(), tfring.local_rank(), tfring.is_chief()) == (0, 1, 0, True)
    assert tfring.local_world_size() == 1
    array = np.array([1.0, 2.0])
    result = tfring.all_reduce(array, "mean")
    assert result.tolist() == [1, 2] and not np.shares_memory(result, array)
    assert tfring.all_gather(None) == [None] and tfring.broadcast((1, 2)) == [1, 2]
    with pytest.raises(TypeError, match="The value has a set"):
        tfring.broadcast({1})
    with pytest.raises(ValueError, match="from 0 to 0"):
        tfring.broadcast(1, root=1)


def test_dir_has_all_names_and_imports_nothing():
    code = """
        import sys, tfring
        names = dir(tfring)
        assert {"callbacks", "layers", "data", "parallel", "errors", "rank", "broadcast", "RingStrategy"} <= set(names)
        assert "tensorflow" not in sys.modules
        assert tfring.world_size() == 1 and "tensorflow" not in sys.modules
        for name in names:
            getattr(tfring, name)
        assert tfring.callbacks.Backup and tfring.errors.MismatchError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize("name", tfring._OF_HOROVOD)
def test_a_name_of_horovod_leads_to_the_page_on_migration(name):
    """Which has a row that names it."""
    with pytest.raises(AttributeError, match=rf"no attribute '{name}', which is Horovod's: docs/migration\.md says"):
        getattr(tfring, name)
    page = pathlib.Path(__file__).parents[1] / "docs" / "migration.md"
    of_horovod = page.read_text().split("## From Horovod")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in of_horovod.splitlines() if line.startswith("| ")]
    assert any(re.search(rf"\b{name}\b", cell) for cell in cells)


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match=r"^module 'tfring' has no attribute 'RingStrategyy'$"):
        tfring.RingStrategyy  # noqa: B018  reading it is the test


def test_a_type_checker_knows_the_names(tmp_path):
    """As a program elsewhere sees the package, by its py.typed."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import tfring
            strategy = tfring.RingStrategy()
            number: int = tfring.rank() + strategy.world_size
            backup = tfring.callbacks.Backup("folder")
            wrong = tfring.RingStrategyy()
            text: str = tfring.rank()
            """
        )
    )
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--ignore-missing-imports"]
    done = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("train.py")]
    assert [line.split(":")[1] for line in lines if "error" in line] == ["6", "7"], done.stdout + done.stderr
    assert 'has no attribute "RingStrategyy"' in lines[0]
