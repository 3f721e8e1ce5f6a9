"""`tfring launch --servers` with real processes: roles, ends, a killed worker, a killed server."""

import re
import subprocess
import sys

import pytest

TRAIN = """\
import os, pathlib, signal, sys, time
import numpy as np
import keras
import tfring

strategy = tfring.ParameterServerStrategy(**eval(sys.argv[1]))
print("trains", flush=True)
rank, here = strategy.cluster.rank, pathlib.Path(__file__).parent


class Die(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        (here / f"last-{rank}").write_text(repr(time.time()))
        if rank == 1 and self.batches == 3 and sys.argv[2] == "worker":
            (here / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "worker" and (here / "killed").exists() and not (here / f"after-{rank}").exists():
            (here / f"after-{rank}").write_text(repr(time.time()))
        if rank == 0 and self.batches == 3 and sys.argv[2] == "server":
            [pid] = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_server(p)]
            os.kill(pid, signal.SIGKILL)


def is_server(pid):
    try:
        environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0")
        return os.getppid() == int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) and (
            b"TFRING_SERVER=0" in environ
        )
    except OSError:
        return False


x = np.random.RandomState(0).randn(400, 4).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x.sum(1), batch_size=10, epochs=2, verbose=0, callbacks=[Die()])
print("done", flush=True)
"""


@pytest.fixture
def launch(tmp_path):
    def run(n, servers, options, dies="nobody"):
        script = tmp_path / "train.py"
        script.write_text(TRAIN)
        command = [sys.executable, "-m", "tfring.launch", "-n", str(n), "--servers", str(servers), str(script)]
        command += [repr(options), dies]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)

    return run


def test_servers_end_with_the_workers(launch):
    done = launch(2, 1, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] done", "[1] trains", "done", "trains"]


def test_the_others_go_on_without_a_worker_that_is_killed(launch, tmp_path):
    done = launch(3, 1, {"update": "async", "max_staleness": 2}, "worker")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 is lost: killed by SIGKILL" in done.stderr
    assert {"done", "[2] done"} <= set(done.stdout.splitlines())
    killed, after = (float((tmp_path / name).read_text()) for name in ("killed", "after-0"))
    assert after - killed < 10, "a bound on staleness has them wait for it"


@pytest.mark.parametrize(("options", "dies", "says"), [
    ({}, "worker", "rank 1 failed first: killed by SIGKILL"),
    ({"update": "async"}, "server", "server 0 failed first: killed by SIGKILL"),
])
def test_who_is_needed_ends_the_job(launch, options, dies, says):
    done = launch(2, 1, options, dies)
    assert done.returncode == 137, done.stdout + done.stderr
    assert re.search(says, done.stderr), done.stderr
