"""`tfring launch --max-restarts` with real processes, without TensorFlow."""

from __future__ import annotations

import signal
import subprocess

import pytest
from test_launch import (
    LAUNCH,
    TIMEOUT,
    eventually,
    launch,
    plain_environment,
    stand_in_for_ssh,
    take_signals,
    write,
)

__all__ = ["launch", "plain_environment"]  # fixtures

TRY = "attempt = int(os.environ['TFRING_RESTART'])\n"


def options(restarts, *more):
    return {"options": ("--max-restarts", str(restarts), *more)}


def test_all_workers_start_again_until_they_succeed(launch, tmp_path):
    """Killed, then failed, then well: with the same seed, other ports, and one line for each failure."""
    done = launch(
        2,
        """
        attempt = int(os.environ["TFRING_RESTART"])
        print(attempt, os.environ["TFRING_DATA_SEED"], os.environ["TFRING_ADDRESSES"], flush=True)
        note(f"{attempt}-{rank}")
        wait_for(f"{attempt}-0", f"{attempt}-1")
        if rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and attempt == 1:
            raise ValueError("no")
        if attempt < 2:
            time.sleep(600)
        """,
        **options(5, "--log-dir", str(tmp_path / "logs")),
    )
    tries = [line.removeprefix("[1] ").split() for line in done.stdout.splitlines()]
    assert sorted(number for number, *_ in tries) == ["0", "0", "1", "1", "2", "2"]
    assert len({seed for _, seed, _ in tries}) == 1
    assert len({addresses for *_, addresses in tries}) == 3
    said = [line for line in done.stderr.splitlines() if line.startswith("tfring launch: ")]
    assert len(said) == 3 and "no ring was formed" in said.pop()
    sequel = "Restart {} of 5: all workers start again, and training continues from its last backup, or from the "
    sequel += "start without one."
    assert said[0].startswith("tfring launch: rank 1 failed first: killed by SIGKILL")
    assert said[1].startswith("tfring launch: rank 0 failed first: exit code 1.")
    assert [sequel.format(n) in line for n, line in enumerate(said, 1)] == [True, True]
    assert "ValueError: no" in done.stderr
    for rank in range(2):  # a log holds all tries
        assert len((tmp_path / "logs" / f"rank-{rank}.log").read_text().split("127.0.0.1:")) >= 2 * 3 + 1


def test_no_more_than_so_many(launch):
    done = launch(2, "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)", code=137, **options(2))
    assert done.stderr.count("failed first") == 3
    assert "Not restarted: all 2 restarts are used up." in done.stderr


def test_the_same_failure_at_once_is_not_tried_again_and_again(launch):
    done = launch(2, "sys.exit('no such file')", code=1, **options(9))
    assert done.stderr.count("Restart 1 of 9") == 1
    assert "Restart 2" not in done.stderr
    assert "Not restarted: it failed early in the same way before." in done.stderr


def test_another_failure_is(launch):
    done = launch(1, TRY + "sys.exit(0 if attempt == 3 else f'failure {attempt}')", **options(9))
    assert done.stderr.count("Restart") == 3


def test_preemption_is_no_failure(launch):
    done = launch(2, TRY + "sys.exit(75 if attempt < 2 else 0)", **options(2))
    assert done.stderr.count("was preempted, and has saved") == 2
    assert "failed" not in done.stderr


def test_without_the_option_nothing_is_restarted(launch):
    done = launch(1, TRY + "print(attempt); sys.exit(3)", code=3)
    assert done.stdout == "0\n"
    assert done.stderr == "tfring launch: rank 0 failed: exit code 3.\n"


def test_standard_input_goes_to_the_first_try(launch):
    script = TRY + "print(repr(sys.stdin.readline()), flush=True)\nif not attempt: os.kill(os.getpid(), signal.SIGKILL)"
    done = launch(1, script, stdin=None, input="a\nb\n", **options(1))
    assert done.stdout.splitlines() == ["'a\\n'", "''"]


@pytest.mark.parametrize("moment", ["in a try", "between two"])
def test_ctrl_c_ends_it(tmp_path, moment):
    script = "if attempt < 3: os.kill(os.getpid(), 9)\nnote('here')\ntime.sleep(600)"
    if moment == "between two":
        script = "sys.exit(f'failure {attempt}')"  # each is followed by a pause twice as long
    command = [*LAUNCH, "-n", "1", "--max-restarts", "99", write(tmp_path, TRY + script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=take_signals)
    before = "".join(process.stderr.readline() for _ in range({"in a try": 3, "between two": 2 * 4}[moment]))
    if moment == "in a try":
        eventually((tmp_path / "here").exists, TIMEOUT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, before + err
    assert err.splitlines()[-1].endswith("stopped by SIGINT, with all workers.")
    assert "Restart" not in err


def test_options_that_do_not_fit(tmp_path):
    def refused(*options):
        done = subprocess.run([*LAUNCH, *options, write(tmp_path, "")], capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 2
        return done.stderr

    assert "add --max-restarts" in refused("-n", "2", "--min-workers", "1")
    assert "--max-workers limits the hosts of --hosts-from" in refused("-n", "2", "--max-workers", "1")
    assert "more than the number of workers, 2" in refused("-n", "2", "--max-restarts", "1", "--min-workers", "3")


@pytest.fixture
def on_hosts(tmp_path):
    """The command of a job whose hosts are those in the file `hosts`, and what a process of it needs."""
    (tmp_path / "ask").write_text(f"#!/bin/sh\nexec cat {tmp_path}/hosts\n")
    (tmp_path / "ask").chmod(0o755)

    def command(hosts, script, *options):
        (tmp_path / "hosts").write_text(hosts)
        program = write(tmp_path, TRY + "say = lambda: print('try', attempt, 'of', world, flush=True)\n" + script)
        return [*LAUNCH, "--hosts-from", tmp_path / "ask", *options, program]

    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return command, {"env": stand_in_for_ssh(tmp_path), **pipes}


def test_hosts_that_are_new_and_hosts_that_are_gone(on_hosts, tmp_path):
    """Asked before each restart; a try waits until there are enough."""
    command, options = on_hosts
    script = """
if rank == 0:
    say()
    (here / "hosts").write_text(["node1:1\\nnode3:2\\nnode4:9", "node1:1", "", ""][attempt])
if attempt < 3:
    time.sleep(600 if rank else 0)
    sys.exit(attempt + 3)
"""
    limits = ("--max-restarts", "3", "--min-workers", "2", "--max-workers", "4", "--start-timeout", "40")
    job = subprocess.Popen(command("node1:1\nnode2 slots=1  # the first\n", script, *limits), **options)
    try:
        lines = [job.stdout.readline() for _ in range(2)]
        assert lines == ["try 0 of 2\n", "try 1 of 4\n"]  # of node4 one worker
        said = ""
        while "as soon as" not in said:  # node1 alone is not enough
            said = job.stderr.readline()
            assert said
        assert "Restart 2 of 3: all workers start again as soon as --hosts-from names enough hosts, and" in said
        (tmp_path / "hosts").write_text("node2:3\n")
        assert job.stdout.readline() == "try 2 of 3\n"
        eventually(lambda: (tmp_path / "hosts").read_text() == "")
        (tmp_path / "hosts").write_text("node1:2\n")
        out, err = job.communicate(timeout=TIMEOUT)
        assert (job.returncode, out) == (0, "try 3 of 2\n"), err
    finally:
        job.kill()
        job.communicate()
    shown = (tmp_path / "ssh").read_text()
    assert [f"-- node{n} cd" in shown for n in (1, 2, 3, 4)] == [True] * 4


def test_a_host_that_is_lost_is_left_out_once(on_hosts):
    """Though it is still named; it comes back at the next restart."""
    command, options = on_hosts
    script = """
if rank == 0:
    say()
    note("said")
if attempt == 0 and rank == 1:
    wait_for("said")
    os.kill(os.getppid(), signal.SIGKILL)  # the agent, with which the way there ends
if attempt == 1:
    sys.exit(3)
if attempt == 0:
    time.sleep(600)
"""
    done = subprocess.run(command("node1:1\nnode2:1\n", script, "--max-restarts", "5"), **options, timeout=TIMEOUT)
    assert done.returncode == 0 and done.stdout.splitlines() == ["try 0 of 2", "try 1 of 1", "try 2 of 2"], done.stderr
    assert "Restart 1 of 5: all workers start again, 1 of them, without node2, and" in done.stderr
    assert "Restart 2 of 5: all workers start again, 2 of them, and" in done.stderr


@pytest.mark.parametrize("end", ["time", "Ctrl-C"])
def test_hosts_that_never_come(on_hosts, end):
    command, options = on_hosts
    script = "(here / 'hosts').write_text('')\nsys.exit(3)"
    seconds = "2" if end == "time" else "600"
    job = subprocess.Popen(
        command("node1:1", script, "--max-restarts", "5", "--start-timeout", seconds),
        preexec_fn=take_signals,
        **options,
    )
    try:
        while "as soon as" not in (line := job.stderr.readline()):
            assert line
        if end == "Ctrl-C":
            job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=TIMEOUT)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == (71 if end == "time" else 130)
    assert end == "Ctrl-C" or "named hosts for fewer than 1 workers for 2 s" in err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("exit 3", "returned non-zero exit status 3"),
        ("echo a:0", "has no workers"),
        ("true", "names hosts for 0 workers, fewer than the job needs"),
        (None, "chmod +x"),
    ],
)
def test_programs_that_name_no_hosts(on_hosts, tmp_path, asked, message):
    command, options = on_hosts
    job = command("node1:1", "say()")
    (tmp_path / "ask").write_text(f"#!/bin/sh\n{asked}\n")
    if asked is None:
        (tmp_path / "ask").chmod(0o600)
    done = subprocess.run(job, **options, timeout=TIMEOUT)
    assert done.returncode == 2 and message in done.stderr and not done.stdout, done
