"""Roles of processes: from the launcher's variables and from TF_CONFIG."""

import json

import pytest

from tfring.cluster import launch_variables
from tfring.cluster.cluster import Cluster
from tfring.cluster.roles import Roles
from tfring.errors import ConfigurationError

WORKERS, SERVERS = ("127.0.0.1:1001", "127.0.0.1:1002"), ("127.0.0.1:2001",)


def tf_config(kind, index, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


def test_of_the_launcher():
    worker = launch_variables.write(Cluster.from_hosts(WORKERS, 1), SERVERS)
    assert Roles.of(worker) == Roles(WORKERS, SERVERS, False, 1, "tfring launch")
    server = launch_variables.write_server(Cluster.from_hosts(SERVERS, 0, listen_fd=9), WORKERS)
    assert Roles.of(server) == Roles(WORKERS, SERVERS, True, 0, "tfring launch", 9)
    with pytest.raises(ConfigurationError, match="not a worker"):
        launch_variables.read(server)


@pytest.mark.parametrize(
    ("environ", "is_server", "index", "workers"),
    [
        (tf_config("worker", 1, worker=["a:1", "b:1"], ps=["c:1"]), False, 1, ("a:1", "b:1")),
        (tf_config("worker", 0, chief=["a:1"], worker=["b:1"], ps=["c:1"]), False, 1, ("a:1", "b:1")),
        (tf_config("chief", 0, chief=["a:1"], worker=["b:1"], ps=["c:1"]), False, 0, ("a:1", "b:1")),
        (tf_config("ps", 0, chief=["a:1"], worker=["b:1"], ps=["c:1"]), True, 0, ("a:1", "b:1")),
    ],
)
def test_of_tf_config(environ, is_server, index, workers):
    assert Roles.of(environ) == Roles(workers, ("c:1",), is_server, index, "TF_CONFIG")


@pytest.mark.parametrize(
    "environ", [{}, tf_config("worker", 0, worker=["a:1"]), tf_config("worker", 0, worker=["a:1"], ps=[])]
)
def test_without_servers_there_are_no_roles(environ):
    assert Roles.of(environ) is None


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (tf_config("ps", 3, worker=["a:1"], ps=["c:1"]), "not from 0 to 0"),
        (tf_config("ps", "x", worker=["a:1"], ps=["c:1"]), "has no index"),
        (tf_config("ps", 0, worker=["a:1"], ps=["a:1"]), "an address for each"),
        ({launch_variables.SERVERS: "a:1"}, "without TFRING_RANK"),
    ],
)
def test_what_is_wrong_is_said(environ, says):
    with pytest.raises(ConfigurationError, match=says):
        Roles.of(environ)


def test_a_pair_is_a_ring_of_the_server_and_the_worker():
    worker, server = Roles(WORKERS, SERVERS, False, 1, "test"), Roles(WORKERS, SERVERS, True, 0, "test")
    assert worker.pair(0).addresses == server.pair(1).addresses == (SERVERS[0], WORKERS[1])
    assert (server.pair(1).rank, worker.pair(0).rank) == (0, 1)
