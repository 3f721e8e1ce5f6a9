"""`tfring launch --hosts` over ssh: to two hosts, which are network namespaces with an sshd each."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from engines import namespaces, sshd

ENGINES = pathlib.Path(__file__).parent / "engines"
SECONDS = 60


@pytest.fixture(scope="module")
def cluster():
    problem = sshd.why_not()
    if problem:
        pytest.skip(f"no ssh to two hosts: {problem}")
    with namespaces.hosts(2) as hosts, sshd.running(hosts) as config:
        yield hosts, config


@pytest.fixture
def launch(cluster, tmp_path):
    """The command that launches a script from host1; its name is the test's alone, to find its processes by."""
    hosts, config = cluster

    def command(script, *options, on="host1:2,host2:1"):
        if not pathlib.Path(script).exists():
            path = tmp_path / "script.py"
            path.write_text("import os, pathlib, sys, time\nrank = int(os.environ['TFRING_RANK'])\n")
            with path.open("a") as file:
                file.write(textwrap.dedent(script))
            script = path
        launcher = [sys.executable, "-m", "tfring.launch", "--hosts", on, "--ssh-config", str(config), *options]
        return hosts[0].command(*launcher, str(script))

    return command


def run(command, code=0, **kwargs):
    kwargs = {"stdin": subprocess.DEVNULL, "timeout": SECONDS, **kwargs}
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def processes_of(folder):
    """Ids of the processes that run the script in `folder`, the launcher's own among them."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if str(folder) in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def eventually(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_ring_over_two_hosts(launch):
    done = run(launch(ENGINES / "report.py", on="host1:2,host2:2"))
    facts = json.loads(done.stdout)
    assert (facts["source"], facts["num_nodes"], facts["local_rank"]) == ("tfring launch", 2, [0, 1, 0, 1])
    assert [address.rpartition(":")[0] for address in facts["addresses"]] == ["192.0.2.1"] * 2 + ["192.0.2.2"] * 2


def test_ports_and_interface(launch):
    environ = {**os.environ, "TFRING_PORT_RANGE": "20500-20503", "TFRING_INTERFACE": "fd00:74::/64"}
    facts = json.loads(run(launch(ENGINES / "report.py"), env=environ).stdout)
    assert [address.rpartition(":")[0] for address in facts["addresses"]] == ["[fd00:74::1]"] * 2 + ["[fd00:74::2]"]
    assert all(20500 <= int(address.rpartition(":")[2]) <= 20503 for address in facts["addresses"])


def test_output_input_logs_and_variables(launch, tmp_path):
    script = """
        words = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words.append((entry / "cmdline").read_bytes())
                except OSError:
                    pass
        secret = os.environ["MY_TOKEN"]
        print("secret", len(secret), "on a command line:", any(secret.encode() in word for word in words))
        print("in", os.getcwd(), "not passed:", "NOT_PASSED" in os.environ, file=sys.stderr)
        print("read", sys.stdin.read().split())
        """
    environ = {**os.environ, "MY_TOKEN": "s3cr3t-0123456789", "NOT_PASSED": "1"}
    command = launch(script, "--env", "MY_TOKEN", "--log-dir", str(tmp_path / "logs"), "--workdir", str(tmp_path))
    done = run(command, stdin=None, input="one two\n", env=environ)
    secret = "secret 17 on a command line: False"
    assert sorted(done.stdout.splitlines()) == sorted(
        [secret, f"[1] {secret}", f"[2] {secret}", "read ['one', 'two']", "[1] read []", "[2] read []"]
    )
    where = f"in {tmp_path} not passed: False"
    assert sorted(done.stderr.splitlines()) == sorted([where, f"[1] {where}", f"[2] {where}"])
    for rank in range(3):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert secret in text and where in text and "[" not in text.replace("[]", "").replace("['one', 'two']", "")


def test_a_rank_elsewhere_fails(launch, tmp_path):
    done = run(launch("if rank == 2: raise ValueError('broken')\ntime.sleep(60)"), code=1)
    assert "[2] ValueError: broken" in done.stderr
    assert "rank 2 failed first: exit code 1. Ended by the launcher: ranks 0 and 1." in done.stderr
    assert not processes_of(tmp_path)


STAY = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])
    (pathlib.Path(__file__).parent / f"up-{rank}").touch()
    time.sleep(600)
    """


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_launcher(launch, tmp_path, signum):
    """Also what the workers have started, on both hosts, and however the launcher is ended."""
    process = subprocess.Popen(
        launch(STAY),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        eventually(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(3)), "the workers are not up")
        process.send_signal(signum)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == (130 if signum == signal.SIGINT else -9), output
        eventually(lambda: not processes_of(tmp_path), f"processes were left\n{output}")
    finally:
        process.kill()
        process.communicate()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


def test_a_host_is_lost(launch, tmp_path):
    process = subprocess.Popen(
        launch(STAY), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        eventually(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(3)), "the workers are not up")
        (ssh,) = [pid for pid in descendants(process.pid) if is_ssh_to("host2", pid)]
        os.kill(ssh, signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 255, output
        assert "lost host2: ssh ended with exit code -9." in output
        assert "rank 2 failed first: exit code 255. Ended by the launcher: ranks 0 and 1." in output
        eventually(lambda: not processes_of(tmp_path), f"processes were left\n{output}")
    finally:
        process.kill()
        process.communicate()


def test_a_lost_host_is_left_out_of_the_restart(launch, tmp_path):
    stay_at_first = f"""
        world, attempt = os.environ["TFRING_WORLD_SIZE"], os.environ["TFRING_RESTART"]
        print("attempt", attempt, "of", world, "workers", flush=True)
        (pathlib.Path({str(tmp_path)!r}) / f"up-{{rank}}").touch()
        time.sleep(600 if attempt == "0" else 0)
    """
    command = launch(stay_at_first, "--max-restarts", "3", "--min-workers", "2")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        eventually(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(3)), "the workers are not up")
        (ssh,) = [pid for pid in descendants(process.pid) if is_ssh_to("host2", pid)]
        os.kill(ssh, signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        assert "Restart 1 of 3: all workers start again, 2 of them, without host2, and training continues" in output
        assert output.count("attempt 1 of 2 workers") == 2
        eventually(lambda: not processes_of(tmp_path), f"processes were left\n{output}")
    finally:
        process.kill()
        process.communicate()


def descendants(pid):
    from tfring.launch.processes import descendants

    return descendants(pid)


def is_ssh_to(host, pid):
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[0] == b"ssh" and host.encode() in words


def test_hosts_that_cannot_be_had(launch):
    done = run(launch("pass", on="host1:1,host9:1"), code=71)
    assert "no workers on host9: ssh ended with exit code 255; its reason is above." in done.stderr
    assert "Could not resolve hostname host9" in done.stderr
    done = run(launch("pass", "--python", "/nowhere/python"), code=71)
    assert "no workers on host" in done.stderr and "/nowhere/python" in done.stderr
    done = run(launch("pass", "--workdir", "/nowhere"), code=71)
    assert "/nowhere: No such file or directory" in done.stderr
