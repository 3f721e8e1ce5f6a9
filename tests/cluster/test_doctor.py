"""`tfring doctor` with real processes: what it finds, that it ends, and what it says to do."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from commands import SECONDS, ended, tf_config
from engines import namespaces, sshd
from harness import free_ports

import tfring
from tfring.cluster import parse_address
from tfring.doctor import findings, links, report

DOCTOR = [sys.executable, "-m", "tfring.launch.cli", "doctor"]


def document(process, code=0):
    """The report of `--json`, which is all there is on standard output."""
    return json.loads(ended(process, code)[0])


def words(found):
    return "\n".join(f"{each['what']}\n{each['do']}" for each in found["problems"])


def addresses_of(n):
    return [f"127.0.0.1:{port}" for port in free_ports(n)]


# ------------------------------------------------------------------------------------------------- what is well


def test_alone(start):
    out, err = ended(start(DOCTOR))
    assert err == ""
    assert "Ready: 1 worker can train, alone (no cluster configured)." in out
    assert f"tfring {tfring.__version__}, TensorFlow 2." in out and "libtfring_core.so" in out


def test_three_on_this_machine(start):
    out, err = ended(start([*DOCTOR, "-n", "3"]))
    assert err == ""
    assert "6 of 6 connections" in out and "never connected" not in out
    assert out.endswith("Ready: 3 workers on 1 host can train.\n")
    assert out.count("one host, shared memory, latency") == 3
    assert "\n              algorithm of all_reduce: flat up to 21.8 kB, ring above\n" in out


def test_the_document(start):
    process = start([*DOCTOR, "-n", "3", "--json"])
    found = document(process)
    assert found["ready"] and found["problems"] == [] and found["schema"] == report.SCHEMA
    assert (found["cluster"]["source"], found["cluster"]["world_size"]) == ("tfring launch", 3)
    assert found["hosts"] == [[0, 1, 2]] and found["missing"] == []
    assert [(each["from"], each["to"]) for each in found["connections"]] == [
        (rank, other) for rank in range(3) for other in range(3) if rank != other
    ]
    assert {each["kind"] for each in found["connections"]} == {links.CONNECTED}
    assert [each["ranks"] for each in found["neighbours"]] == [[0, 1], [1, 2], [2, 0]]
    for each in [found["ring"], *found["neighbours"]]:
        assert each["gigabytes_per_second"] > 0 and each["all_reduce_bytes"] >= 1 << 16
    assert found["ring"]["algorithms"] == [
        {"up_to_bytes": 65536 // 3, "algorithm": "flat"},
        {"up_to_bytes": None, "algorithm": "ring"},
    ]
    for each in found["neighbours"]:
        assert each["same_host"] and each["transport"] == "shm" and 0 < each["latency_seconds"] < 0.5
    for rank, each in enumerate(found["ranks"]):
        assert each["rank"] == rank and each["used_interface"] == "lo" and each["cpus"] >= 1
        assert each["shared_memory"]["problem"] is None and each["library"]["problem"] is None
        assert each["shared_memory"]["needed_bytes"] == 2 * 2 * (4096 + 1024 * 1024)  # two rings, two others
        clock = each["clock"] or {"offset_seconds": 0.0, "uncertainty_seconds": 0.0}
        assert abs(clock["offset_seconds"]) <= clock["uncertainty_seconds"] + 1e-4
    assert len({each["pid"] for each in found["ranks"]}) == 3


def test_two_over_tcp(start):
    found = document(start([*DOCTOR, "-n", "2", "--json"], TFRING_TRANSPORT="tcp", TFRING_ALGORITHM="ring"))
    assert found["ready"] and [each["ranks"] for each in found["neighbours"]] == [[0, 1]]
    assert found["ring"]["algorithms"] == [{"up_to_bytes": None, "algorithm": "ring"}]
    assert "use TCP, which is slower" in "\n".join(each["what"] for each in found["warnings"])


def test_an_engine_that_gives_no_addresses(start):
    (port,) = free_ports(1)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables["SLURM_JOB_ID"] = "17"  # in a batch script: what was started last counts
    second = start(DOCTOR, RANK="1", **variables)
    found = document(start([*DOCTOR, "--json"], RANK="0", **variables))
    assert found["ready"] and found["cluster"]["source"] == "torchrun-style variables"
    assert ended(second) == ("", "")


# ------------------------------------------------------------------------------------------------- what is not


def test_a_name_that_does_not_resolve(start):
    config = tf_config([*addresses_of(1), "nowhere.invalid:20600"], 0)
    found = document(start([*DOCTOR, "--json", "--start-timeout", "1"], TF_CONFIG=config), 1)
    assert "host name 'nowhere.invalid' does not resolve" in words(found)
    assert [(each["rank"], each["kind"]) for each in found["missing"]] == [(1, links.UNRESOLVED)]
    assert found["ring"] is None


def test_a_rank_that_never_comes(start):
    addresses = addresses_of(3)
    second = start([*DOCTOR, "--start-timeout", "12"], TF_CONFIG=tf_config(addresses, 1))
    began = time.monotonic()
    out, err = ended(start([*DOCTOR, "--start-timeout", "6"], TF_CONFIG=tf_config(addresses, 0)), 1)
    assert time.monotonic() - began < 30
    assert ended(second) == ("", "") and err == ""
    assert f"Rank 2 never connected. {addresses[2]}: refused: the host answers, but no process listens" in out
    assert "Start the doctor for rank 2 too" in out and "Not ready: 1 problem" in out
    assert f"{addresses[2]} (never connected)" in out
    assert "2 of 6 connections" in out and "R refused" in out


def test_rank_0_never_comes(start):
    addresses = addresses_of(2)
    out, err = ended(start([*DOCTOR, "--json", "--start-timeout", "1"], TF_CONFIG=tf_config(addresses, 1)), 1)
    assert out == ""
    assert err.startswith(f"tfring doctor: rank 1: looked for rank 0 at {addresses[0]} for ") and "refused" in err


def test_a_rank_that_never_comes_to_the_meeting(start):
    (port,) = free_ports(1)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = document(start([*DOCTOR, "--json", "--start-timeout", "1"], **variables), 1)
    assert "for 1 s, but rank 1 never connected" in words(found) and found["ranks"][0]["library"]["problem"] is None


@pytest.mark.parametrize(
    ("answer", "kind"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", links.ANOTHER_PROGRAM), (b"", links.NO_ANSWER)]
)
def test_another_program_at_the_address(start, answer, kind):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while answer:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(answer)
                        connection.recv(1 << 12)

        threading.Thread(target=serve, daemon=True).start()
        addresses = [*addresses_of(1), f"127.0.0.1:{listener.getsockname()[1]}"]
        config = tf_config(addresses, 0)
        found = document(start([*DOCTOR, "--json", "--start-timeout", "1"], TF_CONFIG=config), 1)
        assert [(each["rank"], each["kind"]) for each in found["missing"]] == [(1, kind)]


def test_another_list_of_addresses(start):
    addresses, others = addresses_of(2), addresses_of(2)
    start([*DOCTOR, "--start-timeout", "60"], TF_CONFIG=tf_config([others[0], addresses[1]], 1))
    config = tf_config(addresses, 0)
    found = document(start([*DOCTOR, "--json", "--start-timeout", "3"], TF_CONFIG=config), 1)
    assert [(each["rank"], each["kind"]) for each in found["missing"]] == [(1, links.ANOTHER_JOB)]
    assert "check that all ranks have the same list of addresses" in words(found)


def test_a_port_that_leads_to_another_rank(start):
    with socket.create_server(("127.0.0.1", 0)) as forwarded:
        first, third = addresses_of(2)
        addresses = [first, f"127.0.0.1:{forwarded.getsockname()[1]}", third]

        def pump(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 12):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def forward():
            with contextlib.suppress(OSError):
                while True:
                    near, _ = forwarded.accept()
                    far = socket.create_connection(parse_address(third))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        # With a secret, or nobody would come in but through the Unix socket.
        secret = {"TFRING_SECRET": "known to all of this test"}
        last = start([*DOCTOR, "--start-timeout", "30"], TF_CONFIG=tf_config(addresses, 2), **secret)
        with socket.socket() as probe:
            deadline = time.monotonic() + SECONDS
            while probe.connect_ex(parse_address(third)) and time.monotonic() < deadline:
                time.sleep(0.05)
        threading.Thread(target=forward, daemon=True).start()
        config = tf_config(addresses, 0)
        found = document(start([*DOCTOR, "--json", "--start-timeout", "3"], TF_CONFIG=config, **secret), 1)
        assert [(each["rank"], each["kind"]) for each in found["missing"]] == [(1, links.ANOTHER_RANK)]
        assert "rank 2 answers there" in words(found)
        assert ended(last) == ("", "")


@pytest.mark.parametrize("by", ["variable", "file"])
def test_keras_on_another_backend(start, tmp_path, by):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    variables = {"KERAS_BACKEND": "torch"} if by == "variable" else {"KERAS_HOME": str(tmp_path)}
    found = document(start([*DOCTOR, "--json"], **variables), 1)
    assert "Keras is set to run on torch" in words(found)


def test_not_ready_through_the_launcher(start):
    """The report is all there is to say; the launcher does not add that rank 0 failed."""
    out, err = ended(start([*DOCTOR, "-n", "2"], KERAS_BACKEND="jax"), 1)
    assert "Keras is set to run on jax" in out and "Not ready: 1 problem" in out and err == ""


def test_own_port_is_taken(start):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        config = tf_config([f"127.0.0.1:{listener.getsockname()[1]}", *addresses_of(1)], 0)
        found = document(start([*DOCTOR, "--json", "--start-timeout", "1"], TF_CONFIG=config), 1)
    assert "Rank 0 cannot listen at" in words(found) and "Address already in use" in words(found)


def test_configuration_that_is_none(start):
    out, _ = ended(start(DOCTOR, TF_CONFIG="{'cluster'"), 1)
    assert '"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}\'\n' in out
    assert "TF_CONFIG is not JSON" in out and "Not ready: 1 problem" in out and "tfring 0." in out


def test_another_tensorflow_on_one_rank(start, tmp_path):
    info = tmp_path / "tensorflow-2.17.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.17.9\n")
    addresses = addresses_of(2)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    second = start(DOCTOR, TF_CONFIG=tf_config(addresses, 1), PYTHONPATH=path)
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0)), 1)
    ended(second)
    assert "TensorFlow differs: 2." in words(found) and "2.17.9 on rank 1" in words(found)
    assert "Rank 1 (" in words(found) and "tfring needs TensorFlow 2.18" in words(found)


def test_a_package_without_the_library(start, tmp_path):
    package = pathlib.Path(tfring.__file__).parent
    shutil.copytree(package, tmp_path / "tfring", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "tfring" / "_version.py").write_text('__version__ = "0.0.1"\n')  # else it uses the installed one's
    addresses = addresses_of(2)
    second = start(DOCTOR, TF_CONFIG=tf_config(addresses, 1), PYTHONPATH=str(tmp_path))
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0)), 1)
    ended(second)
    library, version = found["problems"]
    assert library["what"].startswith("Rank 1 (") and version["what"].startswith("tfring differs: ")
    assert "The compiled ring is missing" in words(found) and "apt install g++" in words(found)
    assert len(found["connections"]) == 2 and found["ring"] is None


def another(patch):
    """A doctor that is not quite right, as rank 1."""
    return [sys.executable, "-c", f"import os, time\nfrom tfring.doctor import examination, links\n{patch}"]


RUN = "raise SystemExit(examination.examine(10))"


def test_a_clock_that_is_wrong(start):
    addresses = addresses_of(2)
    late = f"before = time.time\ntime.time = lambda: before() - 100\n{RUN}"
    second = start(another(late), TF_CONFIG=tf_config(addresses, 1))
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0)))
    ended(second)
    clock = found["ranks"][1]["clock"]
    assert abs(clock["offset_seconds"] + 100) <= clock["uncertainty_seconds"] + 1e-3
    assert "clock of rank 1 is 100.0 s behind rank 0's" in found["warnings"][-1]["what"]


def test_a_rank_that_dies_on_the_way(start):
    addresses = addresses_of(2)
    second = start(another(f"links.probe_all = lambda *_: os._exit(3)\n{RUN}"), TF_CONFIG=tf_config(addresses, 1))
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0)), 1)
    assert "Rank 1 was connected, but is gone" in words(found)
    ended(second, 3)


def test_a_rank_that_stands_still(start):
    addresses = addresses_of(2)
    start(another(f"links.probe_all = lambda *_: time.sleep(600)\n{RUN}"), TF_CONFIG=tf_config(addresses, 1))
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0)), 1)
    assert "Rank 1 was connected, but is gone: no answer within" in words(found)


def test_a_ring_that_does_not_form(start):
    addresses = addresses_of(2)
    second = start(DOCTOR, TF_CONFIG=tf_config(addresses, 1), TFRING_TRANSPORT="shm")
    found = document(start([*DOCTOR, "--json"], TF_CONFIG=tf_config(addresses, 0), TFRING_TRANSPORT="tcp"), 1)
    ended(second)
    assert "The ring does not form" in words(found) and "Set the same TFRING_TRANSPORT on all ranks" in words(found)


def test_hosts_that_cannot_be_had(start):
    process = start([*DOCTOR, "--json", "--hosts", "nowhere.invalid:1,other.invalid:1"])
    out, err = ended(process, 1)
    found = json.loads(out)
    assert not found["ready"] and "tfring launch: " in err
    assert "did not start for every rank, or ended before the report (exit code 71):\n  " in words(found)
    assert re.search(r"^  tfring launch: .*(nowhere|other)\.invalid", words(found), re.M), "the reason"
    assert "Check that `ssh HOST true` works for each host." in words(found)


def test_the_reason_of_a_doctor_that_does_not_start_stands_with_the_problem(start):
    out, err = ended(start([*DOCTOR, "-n", str((os.cpu_count() or 1) + 1)], TFRING_BIND="cores"), 1)
    reason = "tfring launch: could not start rank 0: "
    assert f"before the report (exit code 71):\n       {reason}" in out and reason in err
    assert "\n     Fix this and run the command again.\n" in out and "standard error" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "2", "--hosts", "a,b"], "leave -n out"),
        (["--start-timeout", "0"], "is not a number above 0"),
        (["train.py"], "unknown option train.py"),
    ],
)
def test_misuse(start, options, message):
    out, err = ended(start([*DOCTOR, *options]), 2)
    assert message in err and out == ""


# ------------------------------------------------------------------------------------------- several hosts


@pytest.fixture
def hosts():
    problem = namespaces.why_not()
    if problem:
        pytest.skip(f"no network namespaces: {problem}")
    with namespaces.hosts(3) as made:
        yield made


def on_all(start, hosts, *options):
    """A doctor on each host, as TF_CONFIG has it."""
    addresses = [f"{host.name}:20600" for host in hosts]
    command = [*DOCTOR, "--json", *options]
    return [start(host.command(*command), TF_CONFIG=tf_config(addresses, rank)) for rank, host in enumerate(hosts)]


def drop(here, there):
    """Packets from one host to another get lost: to an Ethernet address that nobody has."""
    nobody = ["lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
    subprocess.run(["ip", "-n", here.namespace, "neigh", "replace", there.ipv4, *nobody], check=True)


def kinds(found):
    return {(each["from"], each["to"]): each["kind"] for each in found["connections"]}


def test_three_hosts(start, hosts):
    first, *others = on_all(start, hosts)
    found = document(first)
    assert found["verdict"] == "Ready: 3 workers on 3 hosts can train." and found["hosts"] == [[0], [1], [2]]
    assert [each["used_interface"] for each in found["ranks"]] == ["eth0"] * 3
    # By name: which address comes last is the kernel's affair.
    assert {each["name"]: each["mtu"] for each in found["ranks"][0]["interfaces"]} == {"lo": 65536, "eth0": 1500}
    assert [ended(each) for each in others] == [("", "")] * 2


def test_a_firewall_between_two_hosts(start, hosts):
    drop(hosts[1], hosts[2])
    drop(hosts[2], hosts[1])
    first, *_ = on_all(start, hosts)
    found = document(first, 1)
    assert [pair for pair, kind in kinds(found).items() if kind == links.TIMED_OUT] == [(1, 2), (2, 1)]
    assert list(kinds(found).values()).count(links.CONNECTED) == 4
    text = words(found)
    assert "(host2) to rank 2 on" in text and "(host3:20600): timed out" in text and "firewall" in text
    assert "ports that are open in TF_CONFIG" in text and found["ring"] is None and found["missing"] == []


def test_no_route_to_a_host(start, hosts):
    way = ["route", "add", "unreachable", f"{hosts[2].ipv4}/32"]
    subprocess.run(["ip", "-n", hosts[1].namespace, *way], check=True)
    first, *_ = on_all(start, hosts)
    found = document(first, 1)
    assert kinds(found)[1, 2] == links.UNREACHABLE
    assert "unreachable: there is no route to it (No route to host)" in words(found)


def test_a_firewall_before_rank_0(start, hosts):
    drop(hosts[1], hosts[0])
    drop(hosts[0], hosts[1])
    first, second, third = on_all(start, hosts, "--start-timeout", "4")
    found = document(first, 1)
    assert [(each["rank"], each["kind"]) for each in found["missing"]] == [(1, links.TIMED_OUT)]
    assert "It is there: rank 2 can reach it, but rank 0 cannot" in words(found)
    out, err = ended(second, 1)
    assert out == "" and "looked for rank 0 at host1:20600" in err and "timed out" in err
    ended(third)


def test_over_ssh(start, hosts):
    problem = sshd.why_not()
    if problem:
        pytest.skip(f"no ssh: {problem}")
    with sshd.running(hosts[:2]) as config:
        command = [*DOCTOR, "--hosts", "host1:2,host2:1", "--ssh-config", str(config), "--json"]
        found = document(start(hosts[0].command(*command)))
        assert found["verdict"] == "Ready: 3 workers on 2 hosts can train." and found["hosts"] == [[0, 1], [2]]


# ------------------------------------------------------------------------------------------------ findings


def fact(rank, host, **changes):
    ok = {"problem": None}
    about = {"python": "3.11.1", "tfring": "1", "tensorflow": "2.20.0", "keras": "3.14.0", "keras_backend": None}
    place = {"rank": rank, "host": host, "hostname": host, "unresolved": {}, "library": ok, "shared_memory": ok}
    return {**about, **place, "cpus": 8, "cpu_ids": list(range(8)), "interfaces": [], **changes}


def test_one_finding_for_two_hosts_of_many_ranks():
    facts = {rank: fact(rank, f"node{rank // 4}") for rank in range(8)}
    rows = {
        rank: {
            other: {"kind": links.CONNECTED if rank // 4 == other // 4 or rank > other else links.TIMED_OUT}
            for other in range(8)
            if other != rank
        }
        for rank in range(8)
    }
    found = {
        "source": "SLURM",
        "world_size": 8,
        "addresses": [f"node{rank // 4}:{20000 + rank}" for rank in range(8)],
        "problem": None,
        "facts": facts,
        "connections": rows,
    }
    (finding,) = findings.problems(found)
    assert finding.what.startswith(
        "No connection from ranks 0-3 on node0 to ranks 4-7 on node1 (node1:20004 and 15 more)"
    )
    assert finding.do.endswith("\n  export TFRING_PORT_RANGE=20000-20100")


def test_what_is_slow():
    slow = {"name": "eth0", "address": "192.0.2.1", "speed_megabits": 1000, "mtu": 1500}
    fast = {"name": "ib0", "address": "198.51.100.1", "speed_megabits": 100_000, "mtu": 4092}
    few = {"cpus": 1, "cpu_ids": [0]}
    facts = {0: fact(0, "a", interfaces=[slow, fast]), 1: fact(1, "b", **few), 2: fact(2, "b", **few)}
    rows = {0: {1: {"kind": links.CONNECTED, "local": "192.0.2.1"}}}
    found = {"world_size": 3, "facts": facts, "connections": rows}
    first, second = findings.warnings(found)
    assert "2 workers share 1 CPU." in first.what
    assert "eth0 (1 Gb/s), but also has ib0 (100 Gb/s)" in second.what and "TFRING_INTERFACE=ib0" in second.do


# ----------------------------------------------------------------------------------------------- parameter servers


def test_servers_of_the_launcher_are_examined_too(start):
    out, err = ended(start([*DOCTOR, "-n", "2", "--servers", "1"]))
    assert err == ""
    assert "tfring doctor: 3 processes (ranks 0-2), from tfring launch; rank 2 is the parameter server\n" in out
    assert "6 of 6 connections" in out
    assert re.search(r"ranks 0-2, \d+ CPUs? for 2 workers and 1 parameter server \(", out), out
    assert out.endswith("Ready: 2 workers and 1 parameter server on 1 host can train.\n")


def test_a_server_of_tf_config_that_never_came_is_named(start):
    worker, *servers = addresses_of(3)
    cluster = {"worker": [worker], "ps": servers}
    tasks = [{"type": "worker", "index": 0}, {"type": "ps", "index": 1}]
    first, _ = (
        start([*DOCTOR, "--json", "--start-timeout", "5"], TF_CONFIG=json.dumps({"cluster": cluster, "task": task}))
        for task in tasks
    )
    found = document(first, 1)
    assert found["cluster"]["num_servers"] == 2 and found["cluster"]["addresses"] == [worker, *servers]
    assert [each["rank"] for each in found["missing"]] == [1] and servers[0] in words(found)
    assert "Rank 1 (parameter server 0) never connected." in words(found)
    assert [each["role"] for each in found["ranks"]] == ["worker", "parameter server"]
