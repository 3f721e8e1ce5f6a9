"""Addresses, the value object's checks, and who wins where several sources speak."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfring.cluster import Cluster, detect, launch_variables, parse_address
from tfring.errors import ConfigurationError

ADDRESSES = ("a:1", "a:2", "b:1")


def launched(**changes):
    """The variables of rank 1 of 3; None removes one."""
    variables = launch_variables.write(Cluster.from_hosts(ADDRESSES, rank=1))
    changed = {f"TFRING_{name.upper()}": value for name, value in changes.items()}
    return {name: value for name, value in {**variables, **changed}.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "host", "port", "canonical"),
    [
        ("host-1.example_net:12345", "host-1.example_net", 12345, "host-1.example_net:12345"),
        ("HOST:1", "host", 1, "host:1"),
        ("10.1.2.3:65535", "10.1.2.3", 65535, "10.1.2.3:65535"),
        ("[2001:DB8:0:0::1]:80", "2001:db8::1", 80, "[2001:db8::1]:80"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
    ],
)
def test_address(text, host, port, canonical):
    address = parse_address(text)
    assert (address.host, address.port, str(address)) == (host, port, canonical)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "what_to_do"),
    [
        ("host", 'write "host:12345"'),
        ("12345", 'write "localhost:12345"'),
        (":12345", 'write "localhost:12345"'),
        ("host:", "The port is a whole number"),
        ("host:http", "The port is a whole number from 1 to 65535, not 'http'"),
        ("host:0", "The port is a whole number"),
        ("host:65536", "The port is a whole number"),
        ("host:-1", "The port is a whole number"),
        ("host: 1", "The port is a whole number"),
        ("host:\u0661", "The port is a whole number"),
        ("grpc://host:1", 'write "host:1"'),
        ("2001:db8::1:80", r'write "\[2001:db8::1\]:80"'),
        ("[2001:db8::1]", "The port is missing|needs brackets"),
        ("[2001:zz::1]:80", "Not an IPv6 address"),
        ("1.2.3.400:80", "Not an IPv4 address"),
        ("ho st:80", "not a host name"),
        ("-host:80", "not a host name"),
        ("", "is not an address"),
        (None, "a NoneType"),
    ],
)
def test_wrong_address(text, what_to_do):
    with pytest.raises(ConfigurationError, match=what_to_do) as error:
        parse_address(text)
    assert str(error.value).startswith(repr(text))


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"[\[a-f0-9:.\]%-]{0,20}:[0-9]{0,6}", fullmatch=True))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse_address(text)
    except ConfigurationError:
        return
    assert parse_address(str(address)) == address


RIGHT: dict[str, Any] = {
    "rank": 1,
    "world_size": 3,
    "local_rank": 1,
    "local_world_size": 2,
    "num_nodes": 2,
    "addresses": ADDRESSES,
    "source": "test",
}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rank": 3}, "`rank` must be from 0"),
        ({"rank": -1}, "`rank` must be from 0"),
        ({"rank": "1"}, "`rank` must be an integer"),
        ({"rank": True}, "`rank` must be an integer"),
        ({"world_size": 0}, "at least 1"),
        ({"world_size": 4}, "one entry per rank"),
        ({"local_rank": 2}, "`local_rank` must be"),
        ({"local_world_size": 4}, "`local_world_size` must be"),
        ({"num_nodes": 1}, "`num_nodes` must be 1 if"),
        ({"num_nodes": 4}, "`num_nodes` must be 1 if"),
        ({"local_world_size": 3}, "`num_nodes` must be 1 if"),
        ({"addresses": ("a:1", "a:2")}, "one entry per rank"),
        ({"addresses": ()}, "one entry per rank"),
        ({"addresses": list(ADDRESSES)}, "tuple"),
        ({"addresses": ("a:1", "b:1", "A:1")}, "ranks 0 and 2 share an address"),
        ({"addresses": ("a:1", "b:1", "c")}, "An address is"),
        ({"listen_fd": -1}, "`listen_fd`"),
    ],
)
def test_cluster_is_checked_when_made(change, rule):
    Cluster(**RIGHT)
    with pytest.raises(ConfigurationError, match=rule):
        Cluster(**{**RIGHT, **change})


def test_chief_is_rank_0():
    assert [Cluster.from_hosts(ADDRESSES, rank=rank).is_chief for rank in range(3)] == [True, False, False]


def test_nothing_is_alone():
    assert detect(environ={}) == Cluster.alone()


def test_launch_variables_round_trip():
    cluster = Cluster.from_hosts(ADDRESSES, rank=1, source="tfring launch")
    assert (cluster.local_rank, cluster.local_world_size, cluster.num_nodes) == (1, 2, 2)
    assert detect(environ=launch_variables.write(cluster)) == cluster


def test_argument_comes_first():
    cluster = Cluster.from_hosts(ADDRESSES, rank=2)
    assert detect(cluster, environ={"TF_CONFIG": "broken"}) is cluster
    with pytest.raises(ConfigurationError, match=r"not a tfring\.cluster\.Cluster"):
        detect({"worker": []})  # type: ignore[arg-type]


def test_two_sources_that_agree():
    same = Cluster.from_hosts(ADDRESSES, rank=1).to_tf_config()
    assert detect(environ={**launched(), "TF_CONFIG": same}).source == "tfring launch"


@pytest.mark.parametrize(("addresses", "rank"), [(ADDRESSES, 2), (("a:1", "a:2"), 1), (("a:1", "a:2", "b:2"), 1)])
def test_two_sources_that_contradict(addresses, rank):
    other = Cluster.from_hosts(addresses, rank=rank).to_tf_config()
    with pytest.raises(ConfigurationError, match="contradict") as error:
        detect(environ={**launched(), "TF_CONFIG": other})
    assert "tfring launch says rank 1 of 3 at a:2" in str(error.value)
    assert f"TF_CONFIG says rank {rank} of {len(addresses)}" in str(error.value)
    assert "unset TF_CONFIG" in str(error.value)


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        (launched(world_size=None), "are missing: .*without TFRING_WORLD_SIZE"),
        ({"TFRING_LISTEN_FD": "5"}, "are missing"),
        (launched(rank="one"), "TFRING_RANK='one' is not a whole number"),
        (launched(rank="-1"), "TFRING_RANK='-1' is not a whole number"),
        (launched(rank="3"), "`rank` must be from 0"),
        (launched(world_size="2", rank="0"), "one entry per rank"),
        (launched(addresses="a:1,a:2"), "one entry per rank"),
        (launched(addresses="a:1,a:2,a:1"), "ranks 0 and 2 share an address"),
        (launched(addresses="a:1,a:2,"), "An address is"),
        (launched(local_rank="2"), "`local_rank` must be"),
        (launched(listen_fd="987654"), "is not a socket that listens.*not a worker"),
        (launched(listen_fd="0"), "is not a socket that listens"),
    ],
)
def test_wrong_launch_variables(variables, rule):
    with pytest.raises(ConfigurationError, match=rule) as error:
        detect(environ=variables)
    assert "unset TFRING_RANK" in str(error.value) or "is not a whole number" in str(error.value)


def test_inherited_socket_is_checked_and_kept_from_children():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        listener.set_inheritable(True)
        addresses = ["127.0.0.1:1", f"127.0.0.1:{listener.getsockname()[1]}"]
        cluster = Cluster.from_hosts(addresses, rank=1)
        variables = launch_variables.write(cluster)
        found = detect(environ={**variables, "TFRING_LISTEN_FD": str(listener.fileno())})
        assert found.listen_fd == listener.fileno()
        assert not listener.get_inheritable()
        listener.getsockname()  # still open
        with pytest.raises(ConfigurationError, match="is not a socket that listens"):
            detect(environ={**variables, "TFRING_LISTEN_FD": str(other.fileno())})
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        variables = launch_variables.write(Cluster.from_hosts([f"127.0.0.1:{deaf.getsockname()[1]}"], rank=0))
        with pytest.raises(ConfigurationError, match="is not a socket that listens"):
            detect(environ={**variables, "TFRING_LISTEN_FD": str(deaf.fileno())})


def test_released_port_can_be_bound_by_others(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = os.dup(listener.fileno()), listener.getsockname()[1]
    for name, value in launch_variables.write(Cluster.from_hosts([f"127.0.0.1:{port}"], rank=0)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TFRING_LISTEN_FD", str(fd))
    cluster = detect()
    with pytest.raises(OSError), socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
    released = launch_variables.release_listener(cluster)
    assert released.listen_fd is None and released == detect()
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))
    assert launch_variables.release_listener(released) is released


def test_no_tensorflow_is_imported():
    program = "import sys, tfring.cluster as c; c.detect(); print({'tensorflow', 'numpy'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
