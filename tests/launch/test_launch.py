"""`tfring launch` with real processes, without TensorFlow: output, failures, signals, nothing left behind."""

from __future__ import annotations

import functools
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import tfring
from tfring.launch import exit_codes, frames

LAUNCH = [sys.executable, "-m", "tfring.launch"]
TIMEOUT = 60
SOON = 30  # seconds within which a stopped job is gone, on a busy machine
LEFT_ALONE = [
    "tfring launch: no ring was formed: each of the 2 processes ran alone. To train together, make "
    "`strategy = tfring.RingStrategy()`, and the model in `with strategy.scope():` (docs/migration.md)."
]
PREAMBLE = """\
import os, pathlib, signal, subprocess, sys, time
rank, world = int(os.environ["TFRING_RANK"]), int(os.environ["TFRING_WORLD_SIZE"])
here = pathlib.Path(__file__).parent
def note(name, pid=None):
    (here / f".{name}").write_text(str(pid or os.getpid()))
    (here / f".{name}").rename(here / name)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
def wait_for_end(name):
    wait_for(name)
    while pathlib.Path("/proc", (here / name).read_text()).exists():
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "GLIBC_TUNABLES", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launch(tmp_path):
    """Runs a script on N workers to its end: `launch(3, script, ..., arguments=[...])`."""

    def run(n, script, *, options=(), arguments=(), code=0, **kwargs):
        command = [*LAUNCH, "-n", str(n), *options, write(tmp_path, script), *arguments]
        kwargs = {
            "capture_output": True,
            "text": True,
            "timeout": TIMEOUT,
            "stdin": subprocess.DEVNULL,
            **kwargs,
        }
        done = subprocess.run(command, **kwargs)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def start(tmp_path):
    """Starts a script on N workers; what is left of it is killed after the test, or after TIMEOUT."""
    started = []
    deadline = threading.Timer(TIMEOUT, lambda: [process.kill() for process in started])
    deadline.start()

    def run(n, script, **kwargs):
        kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
        kwargs.setdefault("preexec_fn", take_signals)
        started.append(subprocess.Popen([*LAUNCH, "-n", str(n), write(tmp_path, script)], **kwargs))
        return started[-1]

    yield run
    deadline.cancel()
    for process in started:
        process.kill()
        process.communicate()


def write(folder, script):
    path = folder / "script.py"
    path.write_text(PREAMBLE + textwrap.dedent(script))
    return str(path)


def take_signals():
    """Whatever the tests themselves were told to ignore: under nohup, or in the background of a shell script."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def eventually(condition, seconds=SOON):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def pids(folder, *names):
    """What the workers noted, once all have."""
    eventually(lambda: all((folder / name).exists() for name in names), TIMEOUT)
    return [int((folder / name).read_text()) for name in names]


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(all_pids, seconds=SOON):
    try:
        eventually(lambda: not any(map(is_alive, all_pids)), seconds)
    except AssertionError:
        left = [pid for pid in all_pids if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"{len(left)} processes were left") from None


# ----------------------------------------------------------------------------------------- place and command


def test_each_worker_knows_its_place_and_the_others(launch):
    """Each dials the next rank, which answers on the socket it inherited."""
    done = launch(
        3,
        """
        import socket
        from tfring.cluster import detect, parse_address
        me = detect()
        assert (me.rank, me.world_size, me.local_rank, me.local_world_size) == (rank, 3, rank, 3)
        assert (me.num_nodes, me.source) == (1, "tfring launch")
        with socket.create_connection(parse_address(me.addresses[(rank + 1) % 3]), timeout=30) as sender:
            sender.sendall(bytes([rank]))
            with socket.socket(fileno=me.listen_fd) as listener:
                listener.settimeout(30)
                connection, _ = listener.accept()
                print(rank, "heard", connection.recv(1)[0])
        """,
    )
    assert sorted(done.stdout.splitlines()) == ["0 heard 2", "[1] 1 heard 0", "[2] 2 heard 1"]
    assert done.stderr.splitlines() == [LEFT_ALONE[0].replace("2 processes", "3 processes")]


def test_a_ring_forms_without_tensorflow(launch):
    done = launch(
        3,
        """
        import numpy as np
        from tfring import Communicator
        from tfring.cluster import detect
        ring = Communicator.connect(detect(), "test")
        print(*ring.all_reduce(np.full(5, rank + 1.0)))
        assert "tensorflow" not in sys.modules
        """,
    )
    assert sorted(done.stdout.splitlines()) == [
        "6.0 6.0 6.0 6.0 6.0",
        *(f"[{r}] " + " ".join(["6.0"] * 5) for r in (1, 2)),
    ]


def test_a_rank_that_has_ended_is_not_waited_for(launch):
    script = """
        import tfring
        if rank == 0:
            tfring.barrier()
    """
    done = launch(2, script, code=1)
    assert 'RendezvousError: Rank 1 has ended, and ring "functions" cannot form without it' in done.stderr, done.stderr


def test_a_rank_that_ends_later_is_not_waited_for(launch):
    script = """
        import tfring
        if rank == 0:
            began = time.monotonic()
            try:
                tfring.barrier()
            finally:
                print("waited", time.monotonic() - began, flush=True)
        time.sleep(5)
    """
    done = launch(2, script, code=1)
    assert 'RendezvousError: Rank 1 has ended, and ring "functions" cannot form without it' in done.stderr, done.stderr
    [seconds] = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("waited")]
    assert seconds < 20


def test_errors_of_a_strategy_and_of_saving_have_the_frames_of_the_program(launch):
    script = """
        import traceback
        import keras
        import tfring
        try:
            tfring.RingStrategy(compression="float8")
        except tfring.errors.ConfigurationError:
            traceback.print_exc()
        with tfring.RingStrategy().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        if rank == 0:
            tfring.save(model, pathlib.Path(__file__).with_name("model.keras"))
        model.evaluate([[0.0, 0.0]], [[0.0]], verbose=0)
    """
    done = launch(2, script, code=1)
    assert "`compression` is 'float8'" in done.stderr and "Rank 0 was in `tfring.save` at " in done.stderr, done.stderr
    assert os.path.dirname(tfring.__file__) not in done.stderr, done.stderr


def test_a_misspelt_environment_variable_is_named_once(launch):
    """A variable of Kubernetes for a service of the name is not."""
    environ = {**os.environ, "TFRING_TIMEOUT_SECOND": "5", "TFRING_SERVICE_HOST": "10.0.0.1"}
    done = launch(2, "import tfring; tfring.RingStrategy()", env=environ)
    [line] = [line for line in done.stderr.splitlines() if "TFRING_" in line]
    assert line.endswith("no environment variable TFRING_TIMEOUT_SECOND: did you mean TFRING_TIMEOUT_SECONDS?"), line


def test_servers_that_were_not_started_are_told(launch):
    done = launch(2, "import tfring; tfring.ParameterServerStrategy()", code=1)
    assert "The job has 2 workers and no parameter servers" in done.stderr, done.stderr
    assert "tfring launch --servers 1" in done.stderr


def test_a_rank_that_waits_says_for_whom(launch):
    """It is the lowest of those that wait."""
    script = """
        import tfring
        if rank == 2:
            wait_for("said")
        tfring.barrier()
        print("through", rank)
    """
    watched = """
        import io
        class Watched(io.TextIOBase):
            def write(self, text):
                if "rank 2 at 127.0.0.1:" in text:
                    note("said")
                return sys.__stderr__.write(text)
        sys.stderr = Watched()
    """
    done = launch(3, textwrap.dedent(watched) + textwrap.dedent(script))
    [line] = [line for line in done.stderr.splitlines() if "has waited" in line]
    waits = r'tfring: rank 0 has waited \d+ s for ring "functions" to form, and waits up to \d+ s; '
    assert re.search(waits, line), line
    answered = r"never answered: rank 2 at 127\.0\.0\.1:\d+ \(no answer in time\)"
    assert re.search(answered, line) and "rank 1" not in line, line
    assert sorted(re.findall(r"through \d", done.stdout)) == ["through 0", "through 1", "through 2"]


def test_the_launcher_imports_nothing_that_it_does_without():
    large = {"tensorflow", "keras", "numpy", "wrapt", "asyncio"}
    program = f"import sys, tfring.launch.cli; print({large} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_a_worker_imports_nothing_that_a_ring_does_without(launch):
    large = {"tensorflow", "keras", "wrapt", "asyncio", "importlib.metadata"}
    script = f"import tfring.ring.communicator\nprint({large} & {{*sys.modules}})"
    assert sorted(launch(2, script).stdout.splitlines()) == ["[1] set()", "set()"]


def test_large_memory_comes_in_huge_pages_unless_the_user_says_else(launch, monkeypatch):
    tell = "print(os.environ['GLIBC_TUNABLES'])"
    assert launch(1, tell).stdout == "glibc.malloc.hugetlb=1\n"
    for theirs in ("glibc.malloc.hugetlb=0", ""):
        monkeypatch.setenv("GLIBC_TUNABLES", theirs)
        assert launch(1, tell).stdout == f"{theirs}\n"


def test_many_ranks_a_cpu_begin_with_small_pages(launch):
    one_cpu = {min(os.sched_getaffinity(0))}
    script = "print(os.environ.get('GLIBC_TUNABLES'))"
    for n, tunables in ((4, "glibc.malloc.hugetlb=1"), (5, "None")):
        done = launch(n, script, preexec_fn=lambda: os.sched_setaffinity(0, one_cpu))
        assert [line.split()[-1] for line in done.stdout.splitlines()] == [tunables] * n


def test_arguments_are_passed_on_as_they_are(launch):
    arguments = ["-n", "7", "-m", "--log-dir", "x y", "--", "", "ä"]
    done = launch(1, "print(sys.argv[1:])", arguments=arguments)
    assert done.stdout == f"{arguments}\n"


def test_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [*LAUNCH, "-n", "2", "-m", "package.train", "-n", "3"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, env=env, check=True)
    assert sorted(done.stdout.splitlines()) == ["[1] __main__ ['-n', '3']", "__main__ ['-n', '3']"]


def test_standard_input_goes_to_rank_0(launch):
    done = launch(2, "print(repr(sys.stdin.read()))", stdin=None, input="some text")
    assert sorted(done.stdout.splitlines()) == ["'some text'", "[1] ''"]


def test_an_inner_launch_is_a_job_of_its_own(launch, tmp_path):
    (tmp_path / "inner.py").write_text("import tfring.cluster as c; print('inner', c.detect().world_size)")
    script = """
        command = [sys.executable, "-m", "tfring.launch", "-n", "1", here / "inner.py"]
        print(subprocess.check_output(command, text=True))
    """
    assert "[1] inner 1" in launch(2, script).stdout


# ---------------------------------------------------------------------------------------------------- output


def test_lines_of_other_ranks_are_whole_and_prefixed(launch):
    """Each writes its lines in pieces, at the same time."""
    done = launch(
        3,
        """
        for i in range(20):
            for piece in (f"rank {rank} ", "line ", f"{i}", "\\n"):
                sys.stdout.write(piece)
                sys.stdout.flush()
                time.sleep(0.001)
        print("no end", end="")
        """,
    )
    for rank in (1, 2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] rank {rank} line {i}" for i in range(20)] + [f"[{rank}] no end"]
    assert [int(i) for i in re.findall(r"rank 0 line (\d+)", done.stdout)] == list(range(20))


def test_what_is_printed_is_shown_at_once(start, tmp_path):
    job = start(2, "print('from', rank)\nif rank == 1: wait_for('shown')")
    assert {job.stdout.readline(), job.stdout.readline()} == {"from 0\n", "[1] from 1\n"}
    (tmp_path / "shown").touch()
    assert job.wait(TIMEOUT) == 0


def test_progress_bars_are_shown_from_rank_0_alone(launch):
    done = launch(
        3,
        r"""
        print("Epoch 1")
        for i in range(5):
            print("\b" * 8, f"\r{i}/5 ====", end="", flush=True)
        print()
        print("windows line end\r")
        """,
        text=False,
    )
    assert done.stdout.count(b"/5 ====") == 5
    for rank in (b"1", b"2"):
        lines = [line for line in done.stdout.split(b"\n") if line.startswith(b"[%s] " % rank)]
        assert lines == [b"[%s] Epoch 1" % rank, b"[%s] windows line end" % rank]


def test_a_traceback_behind_a_progress_bar_is_shown(launch):
    script = r"""
        if rank == 1:
            print("\r3/5 ====", end="", file=sys.stderr, flush=True)
            raise ValueError("boom")
    """
    done = launch(2, script, code=1)
    assert "[1] Traceback (most recent call last):\n" in done.stderr and "====" not in done.stderr


def test_streams_stay_apart(launch):
    done = launch(2, "print('out'); print('err', file=sys.stderr)")
    assert sorted(done.stdout.splitlines()) == ["[1] out", "out"]
    assert sorted(done.stderr.splitlines()) == ["[1] err", "err", *LEFT_ALONE]


@pytest.mark.parametrize("call", ["", "tfring.rank()", "tfring.world_size()", "tfring.cluster.detect()"])
def test_a_program_that_asks_for_its_rank_alone_is_told_that_no_ring_was_formed(launch, call):
    done = launch(2, f"import tfring.cluster\n{call}")
    assert done.stderr.splitlines() == LEFT_ALONE
    done = launch(2, f"import tfring.cluster\n{call}\ntfring.barrier()")
    assert "no ring" not in done.stderr


def test_a_long_job_without_a_ring_is_told_so_before_its_end(tmp_path):
    program = "import time; time.sleep(4)"
    command = "import sys; from tfring.launch import cli, job; job._ALONE_SECONDS = 1.0; sys.exit(cli.main())"
    run = [sys.executable, "-c", command, "launch", "-n", "2", write(tmp_path, program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT)
    early = "tfring launch: after 1 s no ring was formed. If the program makes no tfring.RingStrategy, each of the 2 "
    assert done.stderr.splitlines() == [f"{early}processes trains alone.", *LEFT_ALONE]
    write(tmp_path, f"import tfring\ntfring.barrier()\n{program}")
    done = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT)
    assert "no ring was formed" not in done.stderr


def test_any_bytes_and_any_length(launch):
    script = r"sys.stdout.buffer.write(b'\xff\xfe\x00' + b'x' * 200_000 + b'\n')"
    out = launch(2, script, text=False).stdout
    assert out.count(b"x") == 400_000 and out.count(b"\xff\xfe\x00") == 2
    assert out.count(b"[1] ") > 1  # in pieces, not kept until the end


def test_on_a_terminal_an_unfinished_line_of_rank_0_is_drawn_again(start, tmp_path):
    script = """
        if rank == 0:
            print("bar 1/2", end="", flush=True)
            wait_for("said")
            print(" done")
        else:
            wait_for("drawn")
            print("hello")
    """
    master, slave = pty.openpty()
    job = start(2, script, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    output = b""
    for shown, name in ((b"bar 1/2", "drawn"), (b"hello\r\nbar 1/2", "said")):
        while shown not in output:
            output += os.read(master, 10_000)
        (tmp_path / name).touch()
    assert job.wait(TIMEOUT) == 0
    output += os.read(master, 10_000)
    os.close(master)
    last = f"{LEFT_ALONE[0]}\r\n".encode()
    assert output == b"bar 1/2\r\x1b[K[1] hello\r\nbar 1/2 done\r\n" + last


def test_log_dir(launch, tmp_path):
    script = "print('out', rank); print('err', rank, file=sys.stderr); print('a\\rb')"
    launch(2, script, options=["--log-dir", str(tmp_path / "deep" / "logs")])
    for rank in (0, 1):
        text = (tmp_path / "deep" / "logs" / f"rank-{rank}.log").read_bytes()
        assert sorted(text.split(b"\n")) == [b"", b"a\rb", b"err %d" % rank, b"out %d" % rank]


def test_a_closed_reader_ends_the_job(tmp_path):
    script = write(tmp_path, "note(f'w{rank}')\nwhile True: print('y')")
    job = subprocess.Popen([*LAUNCH, "-n", "2", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers = pids(tmp_path, "w0", "w1")
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(SOON) == 128 + signal.SIGPIPE
    assert b"Traceback" not in job.stderr.read()
    job.stderr.close()
    assert_gone(workers, 0)


def test_closed_standard_streams(tmp_path):
    script = write(tmp_path, "print('out'); note(f'fd{rank}', os.open(__file__, 0)); note(f'w{rank}')")
    command = " ".join([*LAUNCH, "-n", "2", script, "<&-", ">&-", "2>&-"])
    assert subprocess.run(command, shell=True, timeout=TIMEOUT).returncode == 0
    assert len(pids(tmp_path, "w0", "w1")) == 2
    assert all(int((tmp_path / f"fd{rank}").read_text()) > 2 for rank in (0, 1))


def test_all_workers_order_sets_alike(launch, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    script = "print(*set('abcdefgh'), os.environ['PYTHONHASHSEED'])"
    first, *others = sorted(launch(3, script).stdout.splitlines())[::-1]
    assert others == [f"[2] {first}", f"[1] {first}"] and first.endswith(" 0")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert launch(1, script).stdout.endswith(" 7\n")


@pytest.mark.parametrize("name", ["keras", "sitecustomize"])  # as the program begins, and as Python starts
def test_an_interrupt_during_imports_prints_one_line(start, tmp_path, monkeypatch, name):
    lines = ["import os, pathlib, time", f"here = pathlib.Path({str(tmp_path)!r})", "if 'TFRING_RANK' in os.environ:"]
    lines += ["    (here / ('k' + os.environ['TFRING_RANK'])).touch()", "    time.sleep(60)", ""]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = start(2, "import keras")
    eventually(lambda: all((tmp_path / f"k{rank}").exists() for rank in range(2)), TIMEOUT)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=SOON)
    assert job.returncode == 128 + signal.SIGINT
    assert errors.splitlines() == ["tfring launch: stopped by SIGINT, with all workers."]


BULK = """\
    note(f'w{rank}')
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    while True:
        os.write(1, b'y\\n' * 32768)
"""


def test_a_rank_that_prints_in_bulk_delays_no_signal(start, tmp_path):
    job = start(2, BULK, stdout=subprocess.DEVNULL)
    workers = pids(tmp_path, "w0", "w1")
    time.sleep(1)
    job.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert job.wait(SOON) == 128 + signal.SIGINT
    assert time.monotonic() - began < 10  # which is when SIGINT is followed by SIGTERM
    assert_gone(workers, 0)


@pytest.mark.parametrize("victim", ["launcher", "nobody"])
def test_output_that_nobody_reads_holds_up_no_signal(start, tmp_path, victim):
    job = start(2, BULK, preexec_fn=take_signals)
    workers = pids(tmp_path, "w0", "w1")
    time.sleep(2)  # the pipe is full
    job.send_signal(signal.SIGKILL if victim == "launcher" else signal.SIGINT)
    assert_gone(workers, SOON)
    if victim == "nobody":
        assert job.wait(SOON) == 128 + signal.SIGINT


def test_a_slow_reader_gets_all_lines(start):
    job = start(2, "for i in range(40_000): print(i, 'x' * 60)", stderr=subprocess.DEVNULL)
    time.sleep(2)
    lines = job.communicate(timeout=TIMEOUT)[0].splitlines()
    assert job.returncode == 0
    for front in ("", "[1] "):
        assert [line for line in lines if line.startswith("[1]") == bool(front)] == [
            f"{front}{i} {'x' * 60}" for i in range(40_000)
        ]


def test_a_full_disk_of_the_launcher_ends_no_training(tmp_path):
    script = write(tmp_path, "print('out')\nif not (here / 'again').exists() and rank: note('again'); sys.exit(3)")
    with open("/dev/full", "wb") as full:
        command = [*LAUNCH, "-n", "2", "--max-restarts", "1", script]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert "standard output is gone ([Errno 28]" in done.stderr and "Restart 1 of 1" in done.stderr, done.stderr
    with open("/dev/full", "wb") as full:
        assert subprocess.run([*LAUNCH, "-n", "2", script], stdout=full, stderr=full, timeout=TIMEOUT).returncode == 0


# -------------------------------------------------------------------------------------------------- failures


def test_a_failure_stops_the_others_and_comes_last(launch):
    started = time.monotonic()
    done = launch(
        3,
        """
        signal.signal(signal.SIGTERM, lambda *_: (print("stopped", file=sys.stderr), sys.exit(1)))
        note(f"w{rank}")
        wait_for("w0", "w1", "w2")
        if rank == 1:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise ValueError("boom") from error
        time.sleep(600)
        """,
        code=1,
    )
    assert time.monotonic() - started < SOON
    *_, last = done.stderr.splitlines()
    assert last == "tfring launch: rank 1 failed first: exit code 1. Ended by the launcher: ranks 0 and 2."
    words = done.stderr[done.stderr.rindex("[2] stopped" if "[2] stopped" in done.stderr else "stopped") :]
    assert words.index("KeyError: 'inner'") < words.index("[1] ValueError: boom")
    assert words.count("[1] Traceback (most recent call last): above\n") == 2
    assert done.stderr.count('raise KeyError("inner")') == 1


def test_a_traceback_shown_last_is_not_repeated(launch):
    done = launch(2, "note(f'w{rank}')\nif rank == 1: wait_for_end('w0'); raise ValueError('boom')", code=1)
    assert done.stderr.count("ValueError: boom") == 1
    assert done.stderr.endswith("tfring launch: rank 1 failed first: exit code 1.\n")


@pytest.mark.parametrize("code", [1, 7, 255])
def test_exit_code(launch, code):
    done = launch(2, f"if rank == 0: sys.exit({code})\ntime.sleep(600)", code=code)
    assert f"rank 0 failed first: exit code {code}. Ended by the launcher: rank 1." in done.stderr


@pytest.mark.parametrize(("signum", "text"), [(9, "killed by SIGKILL (out of memory?"), (15, "killed by SIGTERM")])
def test_killed_by_a_signal(launch, signum, text):
    done = launch(2, f"if rank == 1: os.kill(os.getpid(), {signum})\ntime.sleep(600)", code=128 + signum)
    assert f"rank 1 failed first: {text}" in done.stderr


def test_a_crash_shows_where(launch):
    done = launch(2, "import ctypes\nif rank == 1: ctypes.string_at(0)\ntime.sleep(600)", code=139)
    assert "[1] Fatal Python error: Segmentation fault" in done.stderr
    assert "script.py" in done.stderr and "killed by SIGSEGV" in done.stderr


def test_the_cause_is_reported_not_the_peers_that_noticed(launch):
    """Rank 2 takes a while to exit; the others complain, and are gone, before."""
    done = launch(
        3,
        """
        import atexit
        from tfring.cluster import launch_variables
        from tfring.errors import PeerLostError
        launch_variables.read(os.environ)
        note(f"w{rank}")
        wait_for("w0", "w1", "w2")
        if rank == 2:
            atexit.register(time.sleep, 1)
            atexit.register(note, "failed")
            raise ValueError("the cause")
        wait_for("failed")
        raise PeerLostError("rank 2 died")
        """,
        code=1,
    )
    *_, words, last = done.stderr.splitlines()
    assert words == "[2] ValueError: the cause"
    assert last == "tfring launch: rank 2 failed first: exit code 1. Ranks 0 and 1 failed after it."


def test_the_cause_is_told_by_time_where_words_do_not(launch):
    done = launch(
        2,
        """
        import atexit
        note(f"w{rank}")
        wait_for("w0", "w1")
        if rank == 1:
            atexit.register(time.sleep, 1)
            atexit.register(note, "failed")
            raise ValueError("the cause")
        wait_for("failed")
        raise OSError("some connection broke")
        """,
        code=1,
    )
    assert "rank 1 failed first: exit code 1. Rank 0 failed after it." in done.stderr


def test_a_rank_killed_is_reported_not_the_peers_that_noticed(launch):
    done = launch(
        3,
        """
        from tfring.cluster import launch_variables
        from tfring.errors import PeerLostError
        launch_variables.read(os.environ)
        note(f"w{rank}")
        wait_for("w0", "w1", "w2")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while (status := pathlib.Path(f"/proc/{(here / 'w1').read_text()}/stat")).exists():
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                break
        raise PeerLostError("rank 1 died")
        """,
        code=137,
    )
    assert "rank 1 failed first: killed by SIGKILL" in done.stderr


def test_a_rank_that_left_early_is_named_with_the_peer_it_cost(launch):
    script = """
        from tfring.cluster import launch_variables
        from tfring.errors import PeerLostError
        launch_variables.notify_launcher()
        note(f"w{rank}")
        if rank == 1:
            sys.exit(0)
        wait_for_end("w1")
        raise PeerLostError("rank 1 left the ring")
    """
    done = launch(2, script, code=1)
    lost = "rank 0 ended because another rank was lost: tfring.errors.PeerLostError: rank 1 left the ring. "
    assert f"{lost}Before it rank 1 had ended with exit code 0." in done.stderr


def test_a_rank_that_ends_well_waits_for_the_others(launch):
    done = launch(2, "note(f'w{rank}')\nif rank == 1: wait_for_end('w0')\nprint('end of', rank)")
    assert done.stdout == "end of 0\n[1] end of 1\n"


def test_who_does_not_listen_to_sigterm_is_killed(launch, tmp_path):
    started = time.monotonic()
    launch(
        2,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"w{rank}")
        wait_for("w0", "w1")
        if rank == 1:
            sys.exit(3)
        time.sleep(600)
        """,
        code=3,
    )
    assert time.monotonic() - started < SOON
    assert_gone(pids(tmp_path, "w0", "w1"), 0)


# -------------------------------------------------------------------------------------- signals, and orphans

# Each worker starts a child, and a grandchild in a session of its own that listens to no polite signal.
FAMILY = """
    if len(sys.argv) == 1:
        child = subprocess.Popen([sys.executable, __file__, "child"])
        note(f"w{rank}")
        wait_for(f"g{rank}")
    elif sys.argv[1] == "child":
        note(f"c{rank}")
        subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
    else:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        note(f"g{rank}")
    if "FAMILY_ENDS" in os.environ and len(sys.argv) == 1:
        sys.exit(0)
    time.sleep(600)
"""


def family(folder):
    return pids(folder, *(f"{who}{rank}" for who in "wcg" for rank in (0, 1)))


def job_process(launcher):
    """The launcher's child, which the workers are children of."""
    (child,) = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("victims", ["launcher", "job"])
def test_nothing_survives_kill_9(start, tmp_path, victims):
    launcher = start(2, FAMILY)
    everyone = family(tmp_path)
    job = job_process(launcher)
    os.kill(launcher.pid if victims == "launcher" else job, signal.SIGKILL)
    launcher.wait(SOON)
    assert_gone([launcher.pid, job, *everyone])
    if victims == "job":
        assert launcher.returncode == 137
        assert "killed by SIGKILL; so were its workers" in launcher.stderr.read()


def test_workers_do_not_survive_kill_9_of_launcher_and_job(start, tmp_path):
    launcher = start(2, "note(f'w{rank}'); time.sleep(600)")
    workers = pids(tmp_path, "w0", "w1")
    for pid in (launcher.pid, job_process(launcher)):
        os.kill(pid, signal.SIGSTOP)
    for pid in (job_process(launcher), launcher.pid):
        os.kill(pid, signal.SIGKILL)
    assert_gone(workers)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everyone(start, tmp_path, signum):
    launcher = start(2, FAMILY)
    everyone = family(tmp_path)
    launcher.send_signal(signum)
    assert launcher.wait(SOON) == 128 + signum
    assert_gone(everyone, 0)
    assert launcher.stderr.read().endswith(f"tfring launch: stopped by {signum.name}, with all workers.\n")


def test_ctrl_c_reaches_each_worker_once_and_lets_it_finish(tmp_path):
    """On a terminal, where the whole foreground group gets the signal."""
    script = write(
        tmp_path,
        """
        try:
            note(f"w{rank}")
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.5)
            print("checkpoint", rank)
        """,
    )
    master, slave = pty.openpty()
    # A shell stands in for the user's: it makes the terminal its own, and the launcher its foreground job.
    shell = ["setsid", "-c", "-w", *LAUNCH, "-n", "2", script]
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    with subprocess.Popen(shell, **streams, preexec_fn=take_signals) as job:
        os.close(slave)
        pids(tmp_path, "w0", "w1")
        os.write(master, b"\x03")
        assert job.wait(SOON) == 130
    output = os.read(master, 10_000).decode()
    os.close(master)
    assert sorted(re.findall(r"checkpoint \d", output)) == ["checkpoint 0", "checkpoint 1"]
    assert "Traceback" not in output


def test_an_ignored_signal_stays_ignored(start, tmp_path):
    """As under nohup."""
    script = "note(f'w{rank}'); wait_for('sent'); time.sleep(0.5); print('end')"
    launcher = start(1, script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    pids(tmp_path, "w0")
    launcher.send_signal(signal.SIGHUP)
    os.kill(job_process(launcher), signal.SIGHUP)
    (tmp_path / "sent").touch()
    assert launcher.communicate(timeout=SOON) == ("end\n", "")
    assert launcher.returncode == 0


def test_a_second_ctrl_c_kills(start, tmp_path):
    launcher = start(
        2,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: note(f"i{rank}"))
        note(f"w{rank}")
        while True:
            time.sleep(1)
        """,
    )
    workers = pids(tmp_path, "w0", "w1")
    launcher.send_signal(signal.SIGINT)
    pids(tmp_path, "i0", "i1")
    started = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(SOON) == 130
    assert time.monotonic() - started < 10  # after one alone they are killed 13 s later
    assert_gone(workers, 0)


def test_what_a_worker_leaves_behind_ends_with_the_job(launch, tmp_path):
    """And does not keep the launcher waiting for the end of the output it inherited."""
    started = time.monotonic()
    launch(2, FAMILY, env={**os.environ, "FAMILY_ENDS": "1"})
    assert time.monotonic() - started < SOON
    assert_gone(family(tmp_path), 0)


def test_a_port_of_a_dead_worker_takes_no_connections(start, tmp_path):
    script = """
        import socket
        from tfring.cluster import detect, parse_address
        me = detect()
        if rank == 1:
            sys.exit(0)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(parse_address(me.addresses[1])).close()
                time.sleep(0.02)
            except ConnectionRefusedError:
                sys.exit(0)
        sys.exit("still taken")
    """
    assert start(2, script).wait(TIMEOUT) == 0


# ------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a script or a module"),
        ([__file__], "set the number of workers with -n, or their hosts with --hosts"),
        ([__file__, "-n", "2"], "-n comes after the program's name, so it is an option of the program"),
        (["--nprocs", "2", __file__], "unknown option --nprocs. Did you mean '-n'?"),
        (["-n", "many", "x.py"], "argument -n: 'many' is not a whole number from 1 up or auto"),
        (["--hosts", "a:1,a:2", __file__], "Write it once: \"a:3\""),
        (["--hosts", "a:0", __file__], "Leave the host out"),
        (["--hosts", "a", "-n", "2", __file__], "leave -n out"),
        (["--hosts", "a", "--hostfile", "b", __file__], "not allowed with"),
        (["--hostfile", "/nowhere", __file__], "cannot be read"),
        (["--hosts", "a", "--env", "NOT_SET_HERE", __file__], "name of a variable that is set"),
        (["-n", "0", "x.py"], "argument -n: '0' is not a whole number from 1 up"),
        (["-n", "two", "x.py"], "argument -n: 'two' is not a whole number from 1 up"),
        (["-n", "2"], "name a script or a module"),
        (["-n", "2", "nowhere.py"], "no such script: 'nowhere.py'"),
        (["-n", "2", "/"], "a folder without __main__.py is not a program: '/'"),
        (["-n", "2", "-"], "a program cannot come from standard input"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["-n", "2", "-m", "-x"], "-m needs the name of a module"),
        (["-n", "2", "--nowhere", __file__], "unknown option --nowhere"),
        (["-n", "2", "--log", "x", __file__], "unknown option --log. Did you mean '--log-dir'?"),
        (["-n", "2", "--log-dir", "/dev/null/x", __file__], "cannot make the folder of --log-dir"),
        (["-np", "4", __file__], "-np is an option of another launcher. Use -n 4: all workers"),
        (["-H", "a:4", "-np", "4", __file__], "Use --hosts a:4: hosts, with the number of workers on each"),
        (["--nproc-per-node", "4", __file__], "Use -n 4"),
        (["--nproc_per_node=4", "--nnodes=1", __file__], "Use -n 4"),
        (["-n", "2", "train.ipynb"], "a notebook is not a program: 'train.ipynb'"),
        (["-n", "2", "--ssh-port", "22", __file__], "--ssh-port has no effect without --hosts or --hostfile"),
        (["-n", "2", "--ssh-identity", "x", __file__], "Name the hosts, or leave --ssh-identity out"),
        (["-n", "2", "--ssh-config", "x", __file__], "--ssh-config has no effect"),
        (["-n", "2", "--workdir", "/tmp", __file__], "--workdir has no effect"),
        (["-n", "2", "--python", sys.executable, __file__], "all workers start on this machine"),
        (["-n", "2", "--interface", "lo", __file__], "--interface has no effect"),
        (["-n", "2", "--port-range", "20500", __file__], "--port-range has no effect"),
        (["--hosts", "a", "--port-range", "7-5", __file__], "'7-5' is not two ports such as 20000-20100"),
        (["-n", "2", "--start-timeout", "0", __file__], "--start-timeout: '0' is not a number above 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


def test_tf_config_and_n_contradict(tmp_path):
    value = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    env = {**os.environ, "TF_CONFIG": value}
    script = write(tmp_path, "")
    done = subprocess.run([*LAUNCH, "-n", "2", script], capture_output=True, text=True, timeout=TIMEOUT, env=env)
    assert done.returncode == 2 and "TF_CONFIG is set, and so is -n" in done.stderr and "unset TF_CONFIG" in done.stderr


def test_a_worker_that_cannot_start(launch, tmp_path):
    (tmp_path / "logs" / "rank-1.log").mkdir(parents=True)
    script = "note('w0'); time.sleep(600)"
    done = launch(2, script, options=["--log-dir", str(tmp_path / "logs")], code=71)
    assert "tfring launch: could not start rank 1" in done.stderr and "Traceback" not in done.stderr


def test_workers_for_which_there_are_no_descriptors(launch):
    """The number that is named is enough; and of a limit that the launcher may raise by itself nothing is said."""

    def limit(soft, hard):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    for few in (12, 40):
        done = launch(16, "", code=71, preexec_fn=limit(few, few))
        line = re.search(r"the limit is (\d+), and 16 processes take up to (\d+)\. Raise it \(`ulimit -n", done.stderr)
        assert line and int(line[1]) == few and "Traceback" not in done.stderr, done.stderr
    enough = int(line[2])
    for soft in (40, enough):
        assert launch(16, "print('begun')", preexec_fn=limit(soft, enough)).stdout.count("begun") == 16


def test_help_and_version():
    tfring = [sys.executable, "-m", "tfring.launch.cli"]

    def output(*arguments):
        return subprocess.check_output([*tfring, *arguments], text=True, timeout=TIMEOUT)

    assert re.fullmatch(r"tfring \d+\.\d+\S*\n", output("--version"))
    assert "launch" in output("--help") and output("help") == output("--help")
    for word in ("-n N", "--log-dir", "tfring launch -n 4 train.py", "docs/launcher.md"):
        assert word in output("launch", "--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tfring: name a command. The commands are launch, doctor, bench, test, report, completion."),
        (["lanch", "-n", "2"], "no such command: 'lanch'. Did you mean 'launch'? The commands are launch, doctor,"),
        (["train.py"], "no such command: 'train.py'. Did you mean `tfring launch -n 2 train.py`? The commands are"),
        (["-n", "4", "x.py"], "no such command: '-n'. Did you mean `tfring launch -n 4 x.py`? The commands are"),
        (["run", "x.py"], "no such command: 'run'. Did you mean `tfring launch -n 2 x.py`? The commands are"),
        (["version"], "no such command: 'version'. Did you mean '--version'?"),
        (["completion"], "tfring completion: name a shell: bash or zsh"),
        (["--nowhere"], "no such command: '--nowhere'. The commands are launch, doctor,"),
        (["doctor", "--ssh-port", "22"], "tfring doctor: --ssh-port has no effect without --hosts or --hostfile"),
    ],
)
def test_a_wrong_command_lists_the_commands(arguments, message):
    command = [sys.executable, "-m", "tfring", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["launch", "doctor", "bench", "report"])
def test_help_names_the_command(command):
    """Options that have long lists of names break between them."""
    tfring = [sys.executable, "-m", "tfring"]
    asked = [[*tfring, "help", command], [*tfring, command, "--help"]]
    texts = [subprocess.check_output(each, text=True, timeout=TIMEOUT) for each in asked]
    assert texts[0] == texts[1] and texts[0].startswith(f"usage: tfring {command}")
    for name in ("all_to_all", "all_reduce", "reduce_scatter") if command == "bench" else ():
        assert re.search(rf"(?<!\w){name}\b", texts[0].partition("options:")[2]), texts[0]
    assert not re.search(r",\w*_\w*\n", texts[0]), texts[0]


@pytest.mark.parametrize("command", ["launch", "doctor", "bench", "report"])
def test_a_command_as_a_module(command):
    names = [["tfring", command], [f"tfring.{command}"]]
    commands = [[sys.executable, "-m", *name, "--help"] for name in names]
    texts = [subprocess.check_output(each, text=True, timeout=TIMEOUT) for each in commands]
    assert texts[0] == texts[1] and texts[0].startswith(f"usage: tfring {command}")


def test_this_machine_needs_no_ssh(tmp_path):
    """Also with nothing by the name of ssh."""
    tell = "print(rank, os.environ['TFRING_ADDRESSES'].count('127.0.0.1:'), sys.stdin.readline()[:3])"
    script = write(tmp_path, tell)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    env = {**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*LAUNCH, "--hosts", "localhost:2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env, input="abc\n")
    assert sorted(done.stdout.splitlines()) == ["0 2 abc", "[1] 1 2 "], done.stderr
    assert done.returncode == 0


def test_two_names_of_one_host_are_one_host(tmp_path):
    tell = "import tfring\nprint(tfring.local_rank(), tfring.local_world_size(), tfring.all_reduce(rank))"
    script = write(tmp_path, tell)
    command = [*LAUNCH, "--hosts", "localhost:1,127.0.0.1:2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    assert sorted(done.stdout.splitlines()) == ["0 3 3", "[1] 1 3 3", "[2] 2 3 3"], done.stderr


def test_starts_without_tensorflow_and_numpy(tmp_path):
    """Nor does a worker have them that does not import them itself."""
    done = subprocess.run(
        [*LAUNCH, "-n", "1", write(tmp_path, "note(f'w{rank}')")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},  # of all processes
    )
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "tfring.launch.job" in imported
    assert not {name.split(".")[0] for name in imported} & {"tensorflow", "keras", "numpy"}


def test_workers_over_tensorflows_own_collectives(launch):
    """TensorFlow's server binds the port that the launcher holds for each worker."""
    script = """
        import tensorflow as tf, tfring
        strategy = tfring.RingStrategy(communication="tensorflow")
        total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(rank + 1.0)), axis=None)
        print("total", float(total), strategy.num_replicas_in_sync)
    """
    done = launch(2, script, timeout=240)
    assert sorted(re.findall(r"total .*", done.stdout)) == ["total 3.0 2"] * 2


LOG_OF_TENSORFLOW = r'''
def log(text, stream=sys.stderr):
    print(f"I0000 00:00:{time.time():.6f}   {os.getpid()} port.cc:153] {text}", file=stream)
    print(f"2026-11-21 22:27:33.{os.getpid():06}: W tensorflow/core/util/port.cc:153] {text}", file=stream)
    print("\t [[second line]]", file=stream, flush=True)
'''


def test_what_tensorflow_logs_on_every_rank_is_shown_once(launch):
    done = launch(
        3,
        LOG_OF_TENSORFLOW
        + """
log("oneDNN is on")
log("oneDNN is on")
log(f"this is rank {rank}")
if rank:
    log("not on rank 0")
if rank == 2:
    log("oneDNN is on")
print("To enable the following instructions: AVX2", file=sys.stderr)
print("of the user", file=sys.stderr)
""",
    )
    lines = done.stderr.splitlines()
    count = {
        text: sum(text in line for line in lines)
        for text in ("oneDNN is on", "not on rank 0", "To enable", "of the user", "second line")
    }
    # What a rank says more often than the others is shown as often.
    assert count == {"oneDNN is on": 6, "not on rank 0": 2, "To enable": 1, "of the user": 3, "second line": 7}
    for rank in range(3):
        assert sum(f"this is rank {rank}" in line for line in lines) == 2


def test_a_warning_of_all_ranks_is_shown_once_and_counted(launch):
    script = """
        import warnings
        warnings.warn("shapes differ")
        print("  behind it", rank, file=sys.stderr, flush=True)
        if rank == 2:
            warnings.warn("of rank 2 alone")
    """
    lines = launch(3, script).stderr.splitlines()
    [count] = [line for line in lines if "is shown once" in line]
    assert count.endswith("3 ranks printed this warning, which is shown once above: UserWarning: shapes differ")
    lines.remove(count)
    assert sum("UserWarning: shapes differ" in line for line in lines) == 1
    assert sum('warnings.warn("shapes differ")' in line for line in lines) == 1
    assert sum('warnings.warn("of rank 2 alone")' in line for line in lines) == 1
    assert sum("  behind it" in line for line in lines) == 3


GRAPH_ERROR = r'''
def fail(message):
    raise ValueError(message)
def call(message):
    fail(message)
frames = "".join(f'  File "layer.py", line {i}, in call\n\n' for i in range(20))
where = "Detected at node add defined at (most recent call last):\n" + frames
'''


def test_a_traceback_of_all_ranks_is_shown_once(launch):
    done = launch(
        3,
        GRAPH_ERROR
        + """
def show_and_wait(*error):
    sys.__excepthook__(*error)
    sys.stderr.flush()
    note(str(rank))
    wait_for("0", "1", "2")
sys.excepthook = show_and_wait
if rank:
    wait_for("0")
call(f"Graph execution error:\\n\\n{where}\\nof rank {rank}: too large")
""",
        code=1,
    )
    shown = done.stderr
    assert shown.count("line 19, in call") == 1 and shown.count("(most recent call last): as of rank 0, above") == 4
    for rank in (1, 2):
        assert f"[{rank}] of rank {rank}: too large\n" in shown
        assert f"[{rank}] ValueError: Graph execution error:\n" in shown
    # What failed first is told at the end, without frames.
    assert "[0] Detected at node add defined at (most recent call last): above\n" in shown
    assert shown.index("[2] of rank 2") < shown.index("[0] of rank 0: too large\ntfring launch: rank 0 failed first")


def test_an_error_that_all_ranks_raise_is_shown_once_and_no_rank_is_blamed(launch):
    """Whichever is first; the others have the time to raise theirs."""
    done = launch(3, "def build(width):\n    raise ValueError(f'no {width}')\ntime.sleep(0.3 * rank)\nbuild(7)", code=1)
    assert done.stderr.count("raise ValueError") == done.stderr.count("in build") == 1
    assert done.stderr.count("ValueError: no 7") == 2  # the traceback's, and the summary's
    *_, one, two, last = done.stderr.splitlines()
    assert {one, two} == {f"[{rank}] Traceback (most recent call last): as of rank 0, above" for rank in (1, 2)}
    assert last == "tfring launch: ranks 0, 1 and 2 failed with the same error: ValueError: no 7."


def test_an_error_that_all_ranks_raise_is_not_repeated_after_what_others_print(launch):
    script = "time.sleep(0.3 * rank)\nprint('before', rank, file=sys.stderr)\nraise ValueError('no 7')"
    done = launch(2, script, code=1)
    assert "[1] before 1" in done.stderr and done.stderr.count("ValueError: no 7") == 2, done.stderr


def test_an_error_of_several_paragraphs_is_told_by_the_first_two(launch):
    """As Keras' are: the first says little."""
    message = r"Exception encountered when calling call().\n\n\x1b[1mshapes differ\x1b[0m\n\nArguments:\n  • mask=None"
    done = launch(2, f"time.sleep(0.3 * rank)\nraise ValueError('{message}')", code=1)
    assert done.stderr.count("\nArguments:") == 1
    assert done.stderr.splitlines()[-1] == (
        "tfring launch: ranks 0 and 1 failed with the same error: "
        "ValueError: Exception encountered when calling call(). shapes differ."
    )


def test_an_error_in_a_function_of_tensorflow_is_told_by_its_own_line(launch):
    message = r"in user code:\n\n    File \"a.py\", line 3, in f  *\n        loss(x)\n\n    TypeError: no such x\n"
    done = launch(2, f"time.sleep(0.3 * rank)\nraise RuntimeError('{message}')", code=1)
    assert done.stderr.splitlines()[-1] == (
        "tfring launch: ranks 0 and 1 failed with the same error: TypeError: no such x."
    )


@pytest.mark.parametrize("different", [0, 2])
def test_an_error_of_one_rank_is_shown_beside_that_of_the_others(launch, different):
    script = f"time.sleep(0.3 * rank)\nif rank == {different}: raise KeyError('own')\nraise ValueError('alike')"
    done = launch(3, script, code=1)
    last = done.stderr.splitlines()[-1]
    if different == 0:
        assert last == "tfring launch: rank 0 failed first: exit code 1. Ranks 1 and 2 failed after it."
    else:
        alike = "ranks 0 and 1 failed with the same error: ValueError: alike."
        assert last == f"tfring launch: {alike} Rank 2 failed after it."
    assert done.stderr.count("raise ValueError") == 1 and done.stderr.count("raise KeyError") == 1
    assert "[0] ValueError: alike" in done.stderr if different else "[0] KeyError: 'own'" in done.stderr


def test_the_rank_that_failed_by_itself_is_blamed_for_those_that_lost_it(launch):
    """Those raise the same error, too."""
    script = """
        from tfring.cluster import detect
        from tfring.errors import PeerLostError
        detect()
        if rank == 1:
            wait_for("0", "2")
            raise ValueError("boom")
        note(str(rank))
        time.sleep(0.3)
        raise PeerLostError("rank 1 died")
    """
    done = launch(3, script, code=1)
    assert done.stderr.splitlines()[-1].startswith("tfring launch: rank 1 failed first: exit code 1.")
    assert "the same error" not in done.stderr


def test_an_error_after_which_all_ranks_went_on_is_not_that_which_ended_them(launch):
    script = """
        import traceback
        try:
            raise ValueError("handled")
        except ValueError:
            traceback.print_exc()
        note(str(rank))
        wait_for("0", "1")
        time.sleep(600) if rank else sys.exit(3)
    """
    done = launch(2, script, code=3)
    assert "tfring launch: rank 0 failed first: exit code 3. Ended by the launcher: rank 1." in done.stderr


def test_a_place_that_python_marks_without_an_indent_is_folded(launch):
    """As of Python 3.11 under a `with` of several lines: "^^^^" begins its line."""
    frames = ["Traceback (most recent call last):", "  File a.py", "^^^^", "  File b.py", "ValueError: of rank "]
    done = launch(
        2,
        f"""
        if rank:
            wait_for("0")
        sys.stderr.write("\\n".join({frames}) + str(rank) + "\\n")
        sys.stderr.flush()
        note(str(rank))
        """,
    )
    assert done.stderr.count("^^^^") == 1 and done.stderr.count("File b.py") == 1
    assert "[1] Traceback (most recent call last): as of rank 0, above\n[1] ValueError: of rank 1" in done.stderr


def test_the_last_line_ends_with_a_sentence_of_a_long_error(launch):
    done = launch(2, f'raise ValueError("{"shapes differ " * 10}. {"so do names " * 20}. Mend them.")', code=1)
    last = done.stderr.splitlines()[-1]
    assert last == f"tfring launch: ranks 0 and 1 failed with the same error: ValueError: {'shapes differ ' * 10}."
    done = launch(2, f'raise ValueError("{"shapes differ " * 30}")', code=1)
    assert done.stderr.splitlines()[-1].endswith("shapes differ shapes ..."), done.stderr


def test_other_tracebacks_are_all_shown(launch):
    done = launch(
        2,
        GRAPH_ERROR
        + """
import traceback
try:
    fail("here") if rank else call("there")
except ValueError:
    traceback.print_exc()
""",
    )
    assert done.stderr.count("in fail\n") == 2 and "as of rank" not in done.stderr


def test_a_traceback_without_an_end_is_shown_soon(start, tmp_path):
    job = start(2, "print('now (most recent call last):\\n  File x', flush=True)\nwait_for('shown')")
    lines = {job.stdout.readline() for _ in range(4)}
    frames = ("now (most recent call last):\n", "  File x\n")
    assert lines == {*frames, *(f"[1] {line}" for line in frames)}
    (tmp_path / "shown").touch()
    assert job.wait(TIMEOUT) == 0


SAY_SECRET = """
secret = os.environ["TFRING_SECRET"]
words = []
for entry in pathlib.Path("/proc").iterdir():
    try:
        words.append((entry / "cmdline").read_bytes() if entry.name.isdecimal() else b"")
    except OSError:
        pass
print(secret, "on a command line:", any(secret.encode() in word for word in words))
"""


def stand_in_for_ssh(folder):
    """An environment whose ssh runs here what it is to run elsewhere; it notes all it is given in `folder/ssh`."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\n(echo "$@"; env) >> {folder}/ssh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    return {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}


def test_a_host_that_has_no_descriptors_for_its_workers(tmp_path):
    environ = stand_in_for_ssh(tmp_path)
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec", "ulimit -n 30\nexec"))
    done = subprocess.run(
        [*LAUNCH, "--hosts", "node1:16", write(tmp_path, "")],
        env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
    )  # fmt: skip
    assert "node1: no file descriptors left: the limit is 30, and 16 processes take up to" in done.stderr, done.stderr
    assert done.returncode == 71 and "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [("-n", "2"), ("--hosts", "node1:1,node2:1")])
def test_a_run_has_a_secret_of_its_own_that_is_on_no_command_line(tmp_path, monkeypatch, options):
    """Nor in the environment of what leads to other hosts."""
    monkeypatch.delenv("TFRING_SECRET", raising=False)
    environ = stand_in_for_ssh(tmp_path)
    found = []
    for given in ({}, {}, {"TFRING_SECRET": "chosen for this very run"}):
        done = subprocess.run(
            [*LAUNCH, *options, write(tmp_path, SAY_SECRET)],
            env={**environ, **given},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr
        said = [line.removeprefix("[1] ") for line in done.stdout.splitlines()]
        assert len(said) == 2 and said[0] == said[1], said
        secret, _, where = said[0].rpartition(" on a command line: ")
        assert where == "False"
        found.append(secret)
        if options[0] == "--hosts" and not given:
            assert "tfring.launch.agent" in (tmp_path / "ssh").read_text()
            assert secret not in (tmp_path / "ssh").read_text()
    assert len(set(found)) == 3 and [len(secret) for secret in found[:2]] == [64, 64]
    assert found[2] == "chosen for this very run"


def test_options_that_set_a_variable(tmp_path, monkeypatch):
    """Command line wins; workers on other hosts have it, and so has a worker's own environment."""
    names = ("TFRING_CONNECT_TIMEOUT_SECONDS", "TFRING_INTERFACE", "TFRING_PORT_RANGE", "TFRING_ENCRYPT")
    for name in names:
        monkeypatch.setenv(name, "7")
    script = f"print([os.environ[name] for name in {names}], os.environ['TFRING_ADDRESSES'])"
    options = ["--start-timeout", "45", "--interface", "127.0.0.0/8", "--port-range", "20510-20519", "--encrypt"]
    done = subprocess.run(
        [*LAUNCH, "--hosts", "node1:1,node2:1", *options, write(tmp_path, script)],
        env=stand_in_for_ssh(tmp_path), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[1] ") for line in done.stdout.splitlines()]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert lines[0].startswith("['45', '127.0.0.0/8', '20510-20519', '1'] 127.0.0.1:2051"), lines
    local = [*LAUNCH, "-n", "1", "--start-timeout", "45", write(tmp_path, f"print(os.environ['{names[0]}'])")]
    assert subprocess.run(local, capture_output=True, text=True, timeout=TIMEOUT).stdout == "45\n"


def test_a_host_that_never_answers(tmp_path):
    """Its login hangs, say; the other host's agent ends with the job."""
    environ = stand_in_for_ssh(tmp_path)
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec", 'case "$*" in *node2*) exec sleep 600; esac\nexec'))
    done = subprocess.run(
        [*LAUNCH, "--hosts", "node1:1,node2:1", "--start-timeout", "2", write(tmp_path, "print('never')")],
        env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 71 and done.stdout == "", done
    assert done.stderr.startswith("tfring launch: node2: no answer within 2 s. "), done.stderr


def test_much_input_and_output_at_once(tmp_path):
    script = "while rank == 0 and (data := sys.stdin.buffer.read1(1 << 16)):\n    os.write(1, data)"
    command = [*LAUNCH, "--hosts", "node2:2", write(tmp_path, script)]
    lines = b"".join(b"%d some text\n" % i for i in range(400_000))
    done = subprocess.run(command, env=stand_in_for_ssh(tmp_path), input=lines, capture_output=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == lines


def test_ctrl_c_where_input_and_output_are_full(tmp_path):
    """Rank 0 reads nothing, the others print in bulk, nobody reads: input is not read ahead, and Ctrl-C is heard."""
    script = "note(f'w{rank}')\nwhile rank: os.write(1, b'y\\n' * 32768)\ntime.sleep(600)"
    command = [*LAUNCH, "--hosts", "node2:2", write(tmp_path, script)]
    pipe = subprocess.PIPE
    job = subprocess.Popen(
        command, env=stand_in_for_ssh(tmp_path), stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=take_signals
    )
    try:
        workers = pids(tmp_path, "w0", "w1")
        os.set_blocking(job.stdin.fileno(), False)
        taken, full_since = 0, None
        while full_since is None or time.monotonic() < full_since + 2:
            try:
                taken += os.write(job.stdin.fileno(), bytes(1 << 16))
                full_since = None
                assert taken < 8 << 20
            except BlockingIOError:
                full_since = full_since or time.monotonic()
                time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        assert job.wait(TIMEOUT) == 128 + signal.SIGINT
        assert_gone(workers, 0)
    finally:
        job.kill()
        for stream in (job.stdin, job.stdout, job.stderr):
            stream.close()
        job.wait()


def test_an_agent_of_another_tfring(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, time\n"
        "os.write(1, b'Welcome to node2!\\ntfring agent 99 7.8.9\\n'); time.sleep(600)\n"
    )
    python.chmod(0o755)
    options = ["--hosts", "node2:1", "--python", str(python)]
    done = subprocess.run(
        [*LAUNCH, *options, write(tmp_path, "")],
        env=stand_in_for_ssh(tmp_path),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT,
    )
    assert done.returncode == 71, done
    (line,) = done.stderr.splitlines()
    ours = f"tfring {tfring.__version__} (protocol {frames.PROTOCOL})"
    says = f"The agent runs tfring 7.8.9 (protocol 99), but its launcher runs {ours}. Install the same tfring on all"
    assert line.startswith(f"tfring launch: node2: {says} hosts."), line


@pytest.mark.parametrize(
    ("says", "received"),
    [
        (b'{"ranks": [0], "command": ["train.py"]}\n', "an older tfring, or none (it says b'{\"ranks\": "),
        (b"TFRING\x00\x02\x0f\x00", "an older tfring, or none (it says b'TFRING\\x00\\x02\\x0f\\x00')"),
        (b"tfring launcher 99 7.8.9\n", "tfring 7.8.9 (protocol 99)"),
    ],
)
def test_a_launcher_of_another_tfring(says, received):
    """Its agent is not asked to end, and does."""
    command = [sys.executable, "-m", "tfring.launch.agent"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as agent:
        os.write(agent.stdin.fileno(), says)
        try:
            assert agent.wait(TIMEOUT) == exit_codes.REFUSES_LAUNCHER
        finally:
            agent.kill()
        assert agent.stdout.read() == frames.greeting("agent")
        (line,) = agent.stderr.read().decode().splitlines()
    ours = f"tfring {tfring.__version__} (protocol {frames.PROTOCOL})"
    where = f"tfring launch, on {socket.gethostname()}: "
    assert line.startswith(f"{where}The agent runs {ours}, but its launcher runs {received}"), line
    assert line.endswith("Install the same tfring on all hosts.")


def test_workers_that_end_while_others_are_started(launch):
    launch(24, "pass")


def test_timestamps_stand_before_each_line_of_all_ranks(launch):
    script = "import os, sys\nrank = os.environ['TFRING_RANK']\nprint('a\\rb', flush=True)\nprint('rank', rank)"
    done = launch(2, script, options=["--timestamps"])
    lines = [line for line in done.stdout.splitlines() if "rank" in line]
    assert sorted(re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in lines) == ["[0] rank 0", "[1] rank 1"]
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} \[", line) for line in lines) and "b" not in done.stdout


@pytest.mark.parametrize(("visible", "number"), [("3,5,7", 3), ("-1", len(os.sched_getaffinity(0)))])
def test_auto_starts_a_worker_for_each_gpu_or_cpu(tmp_path, visible, number):
    script = write(tmp_path, "import os\nprint(os.environ['TFRING_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [*LAUNCH, "-n", "auto", script], capture_output=True, text=True, timeout=TIMEOUT, env=environ, check=True
    )
    gpus = visible.split(",") if number == 3 else [visible] * number
    found = sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines())
    assert found == [f"{rank} {gpu}" for rank, gpu in enumerate(gpus)]


def test_a_dry_run_shows_who_would_start_where_and_starts_none(tmp_path):
    script = write(tmp_path, "open('started', 'w')")

    def shown(*options):
        command = [*LAUNCH, *options, "--dry-run", script, "--epochs", "3"]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,6", "TF_SECRET_TOKEN": "hidden"}
        run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        return run(command, env=environ, cwd=tmp_path).stdout

    here = shown("-n", "2", "--servers", "1")
    first, where, *_ = here.splitlines()
    assert first == f"2 workers and 1 server, each running: {sys.executable} {script} --epochs 3"
    assert where == "this machine:"
    assert "rank 1, local rank 1 of 2 CUDA_VISIBLE_DEVICES=6 " in here and "  server 0\n" in here
    there = shown("--hosts", "a:1,b:2", "--ssh-port", "2222")
    assert "\nb:\n  through ssh " in there and " 2222 " in there and "rank 2, local rank 1 of 2\n" in there
    assert "TF_SECRET_TOKEN" in there and "hidden" not in there
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("command", [["doctor"], ["--help"]])
def test_what_no_one_reads_ends_the_command_silently(command):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "tfring", *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT
    )
    os.close(writing)
    assert ended.returncode == 128 + signal.SIGPIPE and ended.stderr == "", ended.stderr
