"""`ParameterServerStrategy(replicas=2)` with real processes: servers are killed in mid-training, nothing is lost."""

import json
import re
import subprocess
import sys

import pytest
from test_launch_servers import BEGIN

# Worker 0 kills server 0 in a batch of the first epoch, and server 1 when the one in the place of server 0 holds all
# again. Or servers kill themselves where they pass something on, before they do or before they answer for it: server 0
# at the first moment that is named, server 1 at the second, when the other holds all again, and so on.
PROGRAM = BEGIN + """\
import collections
from tfring.servers.replica import Replica
from tfring.servers.service import Service

here, (case, *moments) = pathlib.Path(__file__).parent, sys.argv[2].split("/")
server = int(os.environ.get("TFRING_SERVER", -1))
pass_on, passed = Replica.pass_on, collections.Counter()


def times(event):
    return len(list(here.glob(event + "-*")))


def die(self, head, *arguments):
    number, what = times("died"), head.get("what")
    is_due = number < len(moments) and number % 2 == server and times("full") >= 2 * number
    passed[number, what] += is_due
    is_it = is_due and moments[number].startswith(what) and passed[number, what] == (1 if what == "create" else 4)
    if is_it and moments[number].endswith("after"):
        pass_on(self, head, *arguments)
    if is_it:
        (here / f"died-{number}").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    pass_on(self, head, *arguments)


Replica.pass_on = die
take = Service._take_full


def note_full(self, head, arrays):
    take(self, head, arrays)
    if head["groups"]:  # written once in each life, and for each of both shards
        (here / f"full-{self._shards}-{os.getpid()}").write_text("")


Service._take_full = note_full
strategy = tfring.ParameterServerStrategy(replicas=2, **eval(sys.argv[1]))
rank = strategy.cluster.rank


def order_free(y_true, y_pred):  # its gradient does not depend on weights
    return -keras.ops.mean(y_true * y_pred)


def label(y_true, y_pred):
    return y_true


class Kill(keras.callbacks.Callback):
    batches, longest, last, started, waited = 0, 0.0, None, None, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.started = self.started or time.monotonic() - began
        waited = times("waited")
        if self.last is not None and self.waited == waited:  # others wait with worker 0
            self.longest = max(self.longest, time.monotonic() - self.last)
        self.waited = waited
        time.sleep(0.01)
        if rank == 0 and self.batches in (5, 12) and not moments:
            kill_server(int(self.batches == 12))
        deadline, number = time.monotonic() + 150, self.batches // 11
        if rank == 0 and self.batches % 11 == 0 and number < max(2, len(moments)):
            while times("full") < 2 * number and time.monotonic() < deadline:
                time.sleep(0.05)
            (here / f"waited-{number}").write_text("")
        number = self.batches // 8
        if rank == 1 and self.batches % 8 == 0 and case == "order" and number < max(2, len(moments)):
            while times("waited") < number and time.monotonic() < deadline:  # or it could take what is left
                time.sleep(0.05)
        self.last = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        self.last = None


def model(is_reference=False):  # Keras alone loses ids that a batch has twice: the reference has a dense table
    keras.utils.set_random_seed(0)
    ids = keras.Input((3,), dtype="int32")
    if is_reference:
        rows = keras.layers.Dense(8, use_bias=False)(keras.ops.one_hot(ids, 9000))
    else:
        rows = keras.layers.Embedding(9000, 8)(ids)  # by rows on all servers, pulled by the batch's
    if case == "order":
        made = keras.Model(ids, keras.layers.Lambda(lambda rows: keras.ops.mean(rows, axis=(1, 2)))(rows))
        made.compile(keras.optimizers.SGD(0.5), order_free, metrics=[label])
        return made
    hidden = keras.layers.Dense(8, "tanh")(keras.ops.mean(rows, axis=1))
    made = keras.Model(ids, keras.layers.Dense(1)(hidden))
    bound = 0.1 if case == "clipped" else None
    made.compile(keras.optimizers.Adam(0.01, global_clipnorm=bound), "mse", metrics=[label])
    return made


random = np.random.RandomState(0)
x = random.randint(0, 9000, (600, 3)).astype("int32")
y = random.randn(600).astype("float32")
with strategy.scope():
    trained = model()
start = trained.get_weights()
kill = Kill()
options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
history = trained.fit(x, y, callbacks=[kill], **options).history
alone = model(is_reference=True)
alone.set_weights(start)
alone.fit(x, y, **options)
differ = max(abs(a - b).max() for a, b in zip(trained.get_weights(), alone.get_weights()))
moved = max(abs(a - b).max() for a, b in zip(trained.get_weights(), start))
told = {"batches": kill.batches, "longest": kill.longest, "differ": float(differ), "moved": float(moved)}
told.update(started=kill.started, mean=float(y.mean()), label=history["label"])
print("TOLD", json.dumps(told), flush=True)
"""


@pytest.fixture
def launch(tmp_path):
    def run(n, servers, options, case="", more=(), program=PROGRAM):
        script = tmp_path / "train.py"
        script.write_text(program)
        command = [sys.executable, "-m", "tfring.launch", "-n", str(n), "--servers", str(servers), *more, str(script)]
        return subprocess.run(
            [*command, repr(options), case], capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
        )

    return run


def assert_equal(told, options, n):
    assert len(told) == n
    for one in told:
        assert one["differ"] < 1e-5 < one["moved"], told
        assert one["label"] == pytest.approx([one["mean"]] * 2, abs=1e-5), told
        assert one["longest"] < 20, told  # from one batch to the next
    batches = [one["batches"] for one in told]
    assert sum(batches) == 120 if options else batches == [120] * n


@pytest.mark.parametrize(("n", "servers", "options", "case"), [
    (2, 2, {}, "clipped"),
    pytest.param(2, 3, {}, "", marks=pytest.mark.long),
    pytest.param(1, 2, {"update": "async"}, "", marks=pytest.mark.long),
    pytest.param(2, 2, {"update": "async"}, "order", marks=pytest.mark.long),
])
def test_nothing_is_lost_though_servers_are_killed(launch, n, servers, options, case):
    done = launch(n, servers, options, case)
    assert done.returncode == 0, done.stdout + done.stderr
    # The shards of server 0, and then all that its neighbour holds, those among them.
    assert done.stderr.count("nothing that was acknowledged is lost") == 3, done.stderr
    assert len(re.findall(r"server [01] is lost: killed by SIGKILL.*copy them to it", done.stderr)) == 2, done.stderr
    told = [json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)]
    assert_equal(told, options, n)


@pytest.mark.parametrize(("options", "case", "moments"), [
    ({}, "clipped", ["update before", "update after", "commit before"]),
    pytest.param(
        {"update": "async"}, "order", ["create after", "update after", "claim after"], marks=pytest.mark.long
    ),
])
def test_what_is_under_way_is_done_once(launch, tmp_path, options, case, moments):
    done = launch(2, 2, options, "/".join([case, *moments]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("died-*"))) == len(moments), done.stderr
    # The shards of server 0, and behind that all that a server holds.
    assert done.stderr.count("nothing that was acknowledged is lost") == 2 * len(moments) - 1, done.stderr
    filled = re.findall(r"Server ([01]) holds the shards of server [01] again", done.stderr)
    assert filled[: 2 * len(moments) - 2] == ["0", "0", "1", "1"][: 2 * len(moments) - 2], done.stderr
    assert_equal([json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)], options, 2)


def test_without_restarts_the_other_servers_go_on(launch):
    program = PROGRAM.replace("in (5, 12)", "in (5,)").replace("self.batches % 11 == 0", "False")
    done = launch(2, 2, {}, more=["--max-server-restarts", "0"], program=program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("server 0 is lost: killed by SIGKILL.* The servers that hold its shards continue", done.stderr)
    for one in (json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)):
        assert one["differ"] < 1e-5 < one["moved"]


def test_both_servers_of_a_shard_at_once_end_the_job(launch):
    program = PROGRAM.replace("kill_server(int(self.batches == 12))", "kill_server(0); kill_server(1)")
    done = launch(2, 2, {"update": "async"}, program=program)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "were both lost" in done.stderr, done.stderr


# Server 1 is killed in the last batches. When it is back the workers leave, and their processes end a while later.
LATE = PROGRAM.replace("strategy = tfring.ParameterServerStrategy(", """\
import atexit
greet, lives = Replica._greet, len(list(here.glob(f"life-{server}-*")))
if server >= 0:
    (here / f"life-{server}-{lives}").write_text("")


def greet_late(self, link):
    if server == 1 and lives == 1:
        (here / f"greets-{self._shards}").write_text("")
        wait_for("server-0-ended")
    return greet(self, link)


def wait_for(name, seconds=60):
    deadline = time.monotonic() + seconds
    while not (here / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


Replica._greet = greet_late
if server == 0:
    atexit.register((here / "server-0-ended").write_text, "")
if server < 0:  # called behind what leaves the servers
    atexit.register(wait_for, "server-1-ended")
if server == 1 and lives == 1:
    atexit.register((here / "server-1-ended").write_text, "")
strategy = tfring.ParameterServerStrategy(""") + """\
wait_for("greets-0")
wait_for("greets-1")
"""
for _before, _after in (("in (5, 12)", "in (118,)"), ("batches == 12", "batches == 118"), ("% 11 == 0", "< 0")):
    LATE = LATE.replace(_before, _after)


@pytest.mark.long
def test_a_server_that_is_back_when_the_others_have_ended_ends_too(launch, tmp_path):
    done = launch(2, 2, {}, "clipped", program=LATE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("*ended")} == {"server-0-ended", "server-1-ended"}, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert_equal([json.loads(part) for part in re.findall(r"TOLD (.*)", done.stdout)], {}, 2)
