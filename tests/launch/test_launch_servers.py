"""`tfring launch --servers` with real processes: roles, ends, a killed worker, a killed server, one that comes back."""

import json
import os
import re
import subprocess
import sys

import pytest

BEGIN = """\
import json, os, pathlib, signal, sys, time
began = time.monotonic()
import numpy as np
import keras
import tfring


def server_process(number):
    def is_it(pid):
        try:
            environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0")
            parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            return os.getppid() == parent and f"TFRING_SERVER={number}".encode() in environ
        except OSError:
            return False

    [pid] = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_it(p)]
    return pid


def kill_server(number):
    os.kill(server_process(number), signal.SIGKILL)

"""

TRAIN = BEGIN + """\

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
            kill_server(0)


x = np.random.RandomState(0).randn(400, 4).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x.sum(1), batch_size=10, epochs=2, verbose=0, callbacks=[Die()])
print("done", flush=True)
"""


# Kills servers, one after the other. `calm` waits before until a snapshot holds all that was pushed; `meeting` kills
# server 0 while worker 1 waits in a meeting for worker 0, and again behind that meeting.
COMES_BACK = BEGIN + """\
strategy = tfring.ParameterServerStrategy(update="async", snapshot_dir=sys.argv[1], snapshot_seconds=0.2)
rank = strategy.cluster.rank
calm = sys.argv[2] == "calm"
in_meetings = rank == 0 and sys.argv[2] == "meeting"
meet, met = strategy.ring.updater.meet, []


def meet_without_server(name, arrays):
    if in_meetings and name == "end" and not met:
        met.append(name)
        time.sleep(1.5)
        kill_server(0)
    return meet(name, arrays)


strategy.ring.updater.meet = meet_without_server


def label(y_true, y_pred):
    return y_true


class Kill(keras.callbacks.Callback):
    batches, longest, last, started = 0, 0.0, None, None

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.started = self.started or time.monotonic() - began
        if self.last is not None:
            self.longest = max(self.longest, time.monotonic() - self.last)
        time.sleep(0.01)
        if rank == 0 and self.batches in (12, 24) and not in_meetings:
            time.sleep(2.0 if calm else 0.0)
            kill_server(self.batches // 12 - 1)
        self.last = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if in_meetings and epoch == 0:
            kill_server(0)
        self.last = None


def model(of_a_process=False):
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=[label])
    return made


x = np.random.RandomState(0).randn(1200, 4).astype("float32")
y = x.sum(1)
with strategy.scope():
    trained = model()
kill = Kill()
history = trained.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, callbacks=[kill]).history
alone = model()
if calm:
    alone.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
differ = max(abs(a - b).max() for a, b in zip(trained.get_weights(), alone.get_weights()))
told = {"batches": kill.batches, "longest": kill.longest, "differ": float(differ), "mean": float(y.mean())}
told["started"] = kill.started
print("TOLD", json.dumps({**told, **history}), flush=True)
"""


@pytest.fixture
def launch(tmp_path):
    def run(n, servers, options, dies="nobody", program=TRAIN, more=(), hosts=None, lost_seconds=15):
        script = tmp_path / "train.py"
        script.write_text(program)
        where = ["-n", str(n)] if hosts is None else ["--hosts", hosts]
        command = [sys.executable, "-m", "tfring.launch", *where, "--servers", str(servers), *more, str(script)]
        command += [options if isinstance(options, str) else repr(options), dies]
        environ = {**os.environ, "TFRING_LOST_SECONDS": str(lost_seconds)}
        kwargs = {"capture_output": True, "text": True, "timeout": 300, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, env=environ, **kwargs)

    return run


def test_the_rank_is_known_before_the_strategy(launch):
    program = """
import tfring
facts = tfring.rank(), tfring.world_size(), tfring.local_rank(), tfring.is_chief()
print("facts", *facts, flush=True)
tfring.print_once("printed once")
strategy = tfring.ParameterServerStrategy()
assert facts == (strategy.rank, 2, strategy.rank, strategy.is_chief), facts
"""
    done = launch(2, 1, {}, program=program)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert all(f"facts {rank} 2 {rank} {rank == 0}" in output for rank in range(3)), output
    assert output.count("printed once") == 1


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


@pytest.mark.long
def test_the_others_go_on_without_a_worker_whose_program_raised(launch, tmp_path):
    program = BEGIN + """
strategy = tfring.ParameterServerStrategy(update="async")
ended = pathlib.Path(sys.argv[1])


class Raises(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        time.sleep(0.02)
        if strategy.rank == 1 and self.batches == 2:
            raise ValueError("no such row")


with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    model.fit(np.ones([80, 2]), np.ones([80, 1]), batch_size=4, verbose=0, callbacks=[Raises()])
    ended.touch()
    print("trained", flush=True)
except ValueError:  # the process lives until the other has trained
    deadline = time.monotonic() + 100
    while not ended.exists():
        assert time.monotonic() < deadline, "worker 0 waits for this one"
        time.sleep(0.1)
    print("the other has trained", flush=True)
"""
    done = launch(2, 1, str(tmp_path / "ended"), program=program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"trained", "[1] the other has trained"} <= set(done.stdout.splitlines()), done.stdout + done.stderr
    assert "ValueError: no such row" in done.stderr, done.stderr


def test_a_server_without_snapshots_ends_the_job(launch):
    done = launch(1, 1, {"update": "async"}, "server")
    assert done.returncode == 137, done.stdout + done.stderr
    assert "server 0 failed first: killed by SIGKILL" in done.stderr, done.stderr


def test_a_killed_server_comes_back_with_weights_and_slots_of_its_snapshot(launch, tmp_path):
    done = launch(1, 2, str(tmp_path / "snapshots"), "calm", COMES_BACK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("continues from its snapshot") == 2, done.stderr
    told = json.loads(done.stdout.split("TOLD")[1])
    assert told["differ"] < 1e-5, told  # nothing was pushed behind the snapshots
    assert told["longest"] < max(20, told["started"]), told  # a busy machine starts no process sooner


@pytest.mark.parametrize("when", [pytest.param("at once", marks=pytest.mark.long), "meeting"])
def test_every_row_is_trained_once_though_servers_are_killed(launch, tmp_path, when):
    # A machine that stands still for 15 s has no lost worker here.
    done = launch(2, 2, str(tmp_path / "snapshots"), when, COMES_BACK, lost_seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("continues from its snapshot") == 2, done.stderr
    told = [json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)]
    assert sum(one["batches"] for one in told) == 240
    for one in told:
        assert one["label"] == pytest.approx([one["mean"]] * 2, abs=1e-5), (told, done.stderr)
        assert one["loss"][1] < one["loss"][0] and one["longest"] < max(20, one["started"]), told


STANDS_STILL = BEGIN + """\
here = pathlib.Path(__file__).parent
strategy = tfring.ParameterServerStrategy(update="async", snapshot_dir=sys.argv[1])
rank = strategy.cluster.rank
(here / f"process-{rank}").write_text(str(os.getpid()))
meet = strategy.ring.updater.meet


def meet_alone(name, arrays):
    other = int((here / "process-1").read_text())
    if rank == 0 and name == "end":
        os.kill(other, signal.SIGSTOP)
        results = meet(name, arrays)
        os.kill(other, signal.SIGCONT)
        return results
    time.sleep(1.0 if name == "end" else 0.0)
    return meet(name, arrays)


strategy.ring.updater.meet = meet_alone
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((40, 4)), np.ones((40, 1)), batch_size=10, verbose=0)
"""


def test_logs_that_lack_rows_of_a_worker_that_stood_still_are_named(launch, tmp_path):
    done = launch(2, 1, str(tmp_path / "snapshots"), program=STANDS_STILL, lost_seconds=3)
    assert "Worker 1 is lost: " in done.stderr, done.stderr
    assert "Worker 1 is back. The others continued without it: the logs of the epoch lack its rows." in done.stderr


def test_a_server_that_is_started_again_is_ended_where_no_worker_is_left(launch, tmp_path):
    program = BEGIN + """
strategy = tfring.ParameterServerStrategy(update="async", snapshot_dir=sys.argv[1])
kill_server(0)
time.sleep(0.5)
print("done", flush=True)
"""
    done = launch(1, 1, str(tmp_path / "snapshots"), program=program)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr
    assert "Its restart 1 of 3" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.long
def test_a_server_that_has_no_memory_for_a_snapshot_goes_on(launch, tmp_path):
    program = BEGIN + """
import resource

strategy = tfring.ParameterServerStrategy(update="async", snapshot_dir=sys.argv[1], snapshot_seconds=1000.0)


def train(ids):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(ids, 100)])
        model.compile("adam", "mse")
    model.fit(np.arange(8)[:, None], np.ones((8, 1, 100)), batch_size=4, verbose=0)


train(150_000)  # 60 MB and twice as much of Adam: to pull takes 120 MB, a snapshot 360
server = server_process(0)
[size] = [line.split()[1] for line in open(f"/proc/{server}/status") if line.startswith("VmSize")]
resource.prlimit(server, resource.RLIMIT_AS, (int(size) * 1024 + 220_000_000,) * 2)
train(10)
print("done", flush=True)
"""
    done = launch(1, 1, str(tmp_path / "snapshots"), program=program)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr
    assert "cannot write its snapshot" in done.stderr and "allocate" in done.stderr, done.stderr


def test_a_server_that_is_not_started_again_ends_the_job(launch, tmp_path):
    more = ["--max-server-restarts", "0"]
    done = launch(1, 1, {"update": "async", "snapshot_dir": str(tmp_path / "snapshots")}, "server", more=more)
    assert done.returncode == 137, done.stdout + done.stderr
    assert "server 0 failed first: killed by SIGKILL" in done.stderr, done.stderr


def test_a_server_whose_program_has_other_settings(launch):
    program = """
import os, tfring
tfring.ParameterServerStrategy(update="async" if "TFRING_SERVER" in os.environ else "sync")
"""
    done = launch(2, 1, {}, program=program)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Pass the same settings in all processes of a job." in done.stderr, done.stderr
    assert "'update': 'sync'" in done.stderr and "'update': 'async'" in done.stderr, done.stderr


TWO_HOSTS = "localhost:2,127.0.0.1:1"  # an agent each, as over ssh


def test_hosts_take_servers_in_turn(launch):
    program = """
import os, tfring
if "TFRING_SERVER" in os.environ:
    print("server", os.environ["TFRING_SERVER"], os.getppid(), flush=True)
strategy = tfring.ParameterServerStrategy(update="async")
print("rank", strategy.cluster.rank, os.getppid(), os.environ["TFRING_LOCAL_WORLD_SIZE"], flush=True)
"""
    done = launch(3, 3, {}, program=program, hosts=TWO_HOSTS)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = {rank: (agent, size) for rank, agent, size in re.findall(r"rank (\d) (\d+) (\d)", done.stdout)}
    first, second = ranks["0"][0], ranks["2"][0]
    # Two agents, but one host: its addresses say so.
    assert first != second and ranks == {"0": (first, "3"), "1": (first, "3"), "2": (second, "3")}
    servers = dict(re.findall(r"^\[server (\d)\] server \1 (\d+)", done.stdout, re.M))
    assert servers == {"0": first, "1": second, "2": first}, done.stdout


@pytest.mark.parametrize(("options", "code"), [
    ({"update": "async"}, 0), pytest.param({}, 137, marks=pytest.mark.long),
])  # fmt: skip
def test_a_worker_that_is_killed_on_another_host(launch, options, code):
    done = launch(3, 1, options, "worker", hosts=TWO_HOSTS)
    assert done.returncode == code, done.stdout + done.stderr
    says = "rank 1 is lost: killed by SIGKILL" if code == 0 else "rank 1 failed first: killed by SIGKILL"
    assert says in done.stderr, done.stderr
    assert ("done" in done.stdout.splitlines()) == (code == 0)


# Kills a worker in its second epoch. The others wait in theirs until its next process has trained a batch of it; they
# stop after four epochs that they have seen, of which it has seen three.
WORKER_COMES_BACK = BEGIN + """\
import tensorflow as tf

strategy = tfring.ParameterServerStrategy(**eval(sys.argv[1]))
rank, here = strategy.cluster.rank, pathlib.Path(__file__).parent
dies = int(sys.argv[2])
told = {"rank": rank, "is_back": (here / "killed").exists(), "batches": {}}


def label(y_true, y_pred):
    return y_true


def wait_for(name):
    deadline = time.monotonic() + 150
    while not (here / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


take = strategy.ring.updater.before_first_step


def before_first_step(is_traced):
    take(is_traced)
    told.setdefault("bias", float(model.get_weights()[-1][0]))  # in the first step


strategy.ring.updater.before_first_step = before_first_step


class Watch(keras.callbacks.Callback):
    epochs_seen = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        told.setdefault("variance", float(self.model.get_layer("norm").moving_variance[0]))

    def on_train_batch_end(self, batch, logs=None):
        told["batches"][self.epoch] = told["batches"].get(self.epoch, 0) + 1
        time.sleep(0.5 if told["is_back"] and self.epoch == 2 else 0.02)  # then it is the last at the epoch's end
        if rank == dies and self.epoch == 1 and not told["is_back"] and told["batches"][1] == 3:
            (here / "told").write_text(json.dumps(told))
            (here / "killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == dies and told["is_back"]:
            (here / f"back in {self.epoch}").write_text("")
        if rank != dies and self.epoch in (1, 2) and told["batches"][self.epoch] == 3:
            wait_for(f"back in {self.epoch}")

    def on_epoch_end(self, epoch, logs=None):
        self.epochs_seen += 1
        if epoch == 0:
            self.model.optimizer.learning_rate = 0.006
        if self.epochs_seen == 4:
            self.model.stop_training = True


x = np.random.RandomState(0).randn(1200, 4).astype("float32") * 3
y = x.sum(1) + 10
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[label])
data = {"x": x, "y": y, "batch_size": 20}
if dies == 0:  # keeps the order of the first epoch
    data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1200).cache().batch(20)}
fit = model.fit(**data, epochs=6, verbose=0, callbacks=[Watch()], validation_data=(x[:100], y[:100]))
told.update(epochs=fit.epoch, history=fit.history, mean=float(y.mean()))
told.update(rate=float(model.optimizer.learning_rate), weights=[w.ravel().tolist() for w in model.get_weights()])
print("TOLD", json.dumps(told), flush=True)
"""


@pytest.mark.parametrize(("dies", "servers", "options"), [
    pytest.param(1, 2, {"update": "async"}, marks=pytest.mark.long),
    (0, 1, {"update": "async", "snapshot_dir": ""}),
    pytest.param(1, 1, {"backup_workers": 1}, marks=pytest.mark.long),
])
def test_a_killed_worker_comes_back_into_the_epoch_under_way(launch, tmp_path, dies, servers, options):
    more = ["--max-worker-restarts", "1"]
    options = {**options, **({"snapshot_dir": str(tmp_path / "snapshots")} if "snapshot_dir" in options else {})}
    done = launch(2, servers, options, str(dies), WORKER_COMES_BACK, more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"rank {dies} is lost: killed by SIGKILL.* Its restart 1 of 1: it comes back", done.stderr)
    assert f"Worker {dies} is back, in epoch 2" in done.stderr, done.stderr
    told = sorted((json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)), key=lambda one: one["rank"])
    before = json.loads((tmp_path / "told").read_text())
    assert [one["is_back"] for one in told] == [rank == dies for rank in range(2)]
    for one in told:
        assert one["epochs"] == ([1, 2, 3] if one["is_back"] else [0, 1, 2, 3]), told
        assert one["weights"] == told[0]["weights"], told
        assert one["history"]["label"][-2:] == pytest.approx([one["mean"]] * 2, abs=1e-4), told
        assert one["history"]["val_loss"][-2:] == told[0]["history"]["val_loss"][-2:], told
        assert one["rate"] == pytest.approx(0.006)
    batches = [sum(one["batches"].get(str(epoch), 0) for one in (*told, before)) for epoch in range(4)]
    assert batches[0] == batches[2] == batches[3] == 60, batches
    assert 60 - 2 <= batches[1] <= 60, batches  # without what the killed process had drawn
    back = told[dies]
    assert back["batches"]["1"] > 0 and back["batches"]["2"] > 0, told
    assert told[1 - dies]["bias"] == 0 and back["bias"] > 0.5, told  # not the initial one
    assert back["variance"] > 1.5, told


# Worker 1 ends itself when it has joined, in each of its lives; with "late" it does once, and then sleeps before it
# joins; with "behind" it then joins, and trains when worker 0 is through. Worker 0 waits for its second life.
TWO_LIVES = BEGIN + """\
rank, here = int(os.environ.get("TFRING_RANK", -1)), pathlib.Path(__file__).parent
is_second = (here / "lives-1").exists()
if rank == 1:
    (here / ("starts-2" if is_second else "lives-1")).write_text("")
    if is_second and sys.argv[2] == "late":
        (here / "lives-2").write_text("")
        time.sleep(100)
strategy = tfring.ParameterServerStrategy(**eval(sys.argv[1]))
if rank == 1 and is_second:
    (here / "lives-2").write_text("")
if rank == 1 and not (is_second and sys.argv[2] == "behind"):
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 150
while not (here / ("weights-0" if rank == 1 else "lives-2")).exists() and time.monotonic() < deadline:
    time.sleep(0.05)
if rank == 1:
    time.sleep(3)  # until worker 0 has left
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((40, 4), "float32")
epochs = model.fit(x, x.sum(1), batch_size=10, epochs=3, verbose=0).epoch
(here / f"weights-{rank}").write_text(repr((epochs[-1], [w.tolist() for w in model.get_weights()])))
strategy.close()
print("done", flush=True)
"""


@pytest.mark.parametrize(("dies", "says"), [
    pytest.param(
        "always", "Its restart 1 of 1.*rank 1 is lost: killed by SIGKILL[^.]*. The other workers continue",
        marks=pytest.mark.long,
    ),
    ("late", "Its restart 1 of 1.*rank 1 comes back too late: the servers have ended"),
])
def test_a_worker_that_does_not_come_back_is_left_out(launch, tmp_path, dies, says):
    done = launch(2, 1, {"update": "async"}, dies, TWO_LIVES, ["--max-worker-restarts", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "lives-2").exists() and done.stdout == "done\n", done.stdout
    assert re.search(says, done.stderr, re.S), done.stderr
    assert done.stderr.count("Its restart") == 1, done.stderr


def test_a_worker_that_comes_back_behind_the_others_has_their_weights(launch, tmp_path):
    done = launch(2, 1, {"update": "async"}, "behind", TWO_LIVES, ["--max-worker-restarts", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] done", "done"], done.stdout + done.stderr
    assert "Worker 1 is back, in epoch 3" in done.stderr, done.stderr
    assert (tmp_path / "weights-1").read_text() == (tmp_path / "weights-0").read_text()


def test_a_worker_of_synchronous_updates_does_not_come_back(launch):
    program = "import tfring\ntfring.ParameterServerStrategy()"
    done = launch(2, 1, {}, more=["--max-worker-restarts", "2"], program=program)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--max-worker-restarts 2` cannot be used with update='sync'" in done.stderr


@pytest.mark.parametrize(("servers", "hosts", "says"), [
    (0, None, "add --servers"),
    (1, "localhost:2", "only workers on this machine"),
])
def test_where_workers_do_not_come_back(launch, servers, hosts, says):
    done = launch(2, servers, {}, more=["--max-worker-restarts", "1"], hosts=hosts)
    assert done.returncode == 2 and says in done.stderr, done.stderr
