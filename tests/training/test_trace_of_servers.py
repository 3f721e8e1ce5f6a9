"""Traces of jobs with parameter servers, and what `tfring report` makes of them: who waits for whom, what is slow."""

from __future__ import annotations

import json
import time

import pytest
from harness import workers
from test_servers import run, with_servers

from tfring.launch import cli
from tfring.report import files

KERNEL_BYTES = 4 * 4 * 64
SECONDS = 0.2  # what is slow takes longer for a step


def trains(strategy, slow_rank=None, rows=100):
    import keras
    import numpy as np

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(SECONDS if strategy.rank == slow_rank else 0.01)

    x = np.random.RandomState(0).randn(rows, 4).astype("float32")
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(64), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    model.fit(x, x.sum(1), epochs=2, batch_size=4, shuffle=False, verbose=0, callbacks=[Slow()])


def reported(folder, capsys):
    """The document and the text of a folder."""
    assert cli.main(["report", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert cli.main(["report", str(folder)]) == 0
    return document, capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    run(2, 2, trains, 1, trace=str(folder))
    return folder


def test_workers_and_servers_tell_of_the_same_requests(folder, capsys):
    document, text = reported(folder, capsys)
    assert document["missing"] == document["missing_servers"] == []
    assert document["ended"] == document["ended_servers"] == [0, 1]
    found = files.read(folder)
    for server in found.servers:
        mine = sorted(r for r in server.requests if r.kind == "push")
        theirs = [(rank.rank, r) for rank in found.ranks for r in rank.requests]
        theirs = sorted((r, rank) for rank, r in theirs if r.kind == "push" and r.other == server.rank)
        assert len(mine) == len(theirs) == 2 * sum(s.kind == "train" for s in found.ranks[0].steps)
        matched = set()
        for request, rank in theirs:
            # On one clock a request is on the server while it is under way; the two have the same bytes and times.
            [(n, same)] = [
                (n, r) for n, r in enumerate(mine)
                if r.other == rank and r.begin <= request.end and request.begin <= r.end and n not in matched
            ]
            matched.add(n)
            assert request.begin <= same.begin and (same.sent, same.received) == (request.received, request.sent)
            assert same[6:] == request[6:] and request.staleness == 0
            assert request.waited + request.served <= request.end - request.begin
    for rows in (document["requests"], {s: row["requests"] for s, row in document["servers"].items()}):
        assert set(rows) == {"0", "1"}
        for kinds in rows.values():
            push = kinds["push"]
            assert push["sent"] + push["received"] > 2 * KERNEL_BYTES and push["staleness"] == 0
            parts = sum(push[name] for name in ("waiting", "queued", "working", "moving"))
            assert parts == pytest.approx(push["milliseconds"], rel=0.01)
    for row in document["steps"]["train"]["ranks"].values():
        parts = sum(row[name] for name in ("input", "Python", "dispatch", "compute", "waiting", "server", "moving"))
        assert parts + row["adding"] == pytest.approx(row["milliseconds"]) and row["server"] > 0
        assert sum(row["waits_for"].values()) == pytest.approx(row["waiting"])
    assert "tfring report: 2 ranks and 2 servers on 1 host" in text
    assert "Requests as workers see them" in text and "Requests as servers see them" in text
    sent = [row["bytes_sent"] for row in document["whole_run"].values()]
    assert all(row["requests"] > 0 for row in document["whole_run"].values())
    assert min(sent) > len(found.ranks[0].steps) * 2 * KERNEL_BYTES


def test_a_straggler_of_synchronous_updates_is_named(folder, capsys):
    document, _ = reported(folder, capsys)
    assert document["findings"][0].startswith("train: the others wait for rank 1, "), document["findings"]
    assert "Python between its steps takes" in document["findings"][0]


def test_the_trace_of_servers_opens_in_perfetto(folder, capsys, tmp_path):
    file = tmp_path / "trace.json"
    assert cli.main(["report", str(folder), "--trace", str(file)]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    processes = {e["args"]["name"].split(" (")[0]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"rank 0", "rank 1", "server 0", "server 1"} and len(set(processes.values())) == 4
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    pushes = [e for e in events if e["name"] == "push"]
    assert {threads[e["pid"], e["tid"]] for e in pushes} == {
        *("requests: server 0", "requests: server 1", "requests: rank 0", "requests: rank 1")
    }
    assert all(e["dur"] >= 0 and e["args"]["staleness"] == 0 for e in pushes)


def test_a_file_of_a_server_that_is_not_there_is_missed(folder, capsys, tmp_path):
    for file in folder.glob("*.jsonl"):
        if file.name != "server-1.jsonl":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    _, text = reported(tmp_path, capsys)
    assert "Missing: the files of server 1. Each server writes on its own host" in text


@pytest.mark.parametrize("options", [{}, {"max_staleness": 2}])
def test_a_straggler_of_asynchronous_updates_is_named(tmp_path, capsys, options):
    run(2, 1, trains, 1, 400, update="async", trace=str(tmp_path), **options)
    document, text = reported(tmp_path, capsys)
    says = "the others wait for rank 1" if options else "rank 1 is slower than the others, "
    [said] = [line for line in document["findings"] if says in line] or [document]
    assert "Python between its steps takes" in said, document["findings"]
    [server] = document["servers"].values()
    push = server["requests"]["push"]
    assert push["max_staleness"] > 0 and (push["max_staleness"] <= 2 or not options)
    if options:
        assert push["waits_for"]["1"] > 1
        assert "ms a push for rank 1" in text


def train_with_a_slow_server(options, slow):
    """As `with_servers`; server 1's updates take longer."""
    from tfring._keras.sharding.server_shards import ServerShards

    update = ServerShards.update

    def slow_update(self, *arguments):
        time.sleep(SECONDS if self._server == slow else 0.0)
        update(self, *arguments)

    make = ServerShards.__init__

    def remember(self, store, description, server):
        make(self, store, description, server)
        self._server = server

    ServerShards.update, ServerShards.__init__ = slow_update, remember
    try:
        return with_servers(trains, 2, options)
    finally:
        ServerShards.update, ServerShards.__init__ = update, make


@pytest.mark.parametrize("update", ["sync", "async"])
def test_a_slow_server_is_named(tmp_path, capsys, update):
    workers(4).run(train_with_a_slow_server, {"update": update, "trace": str(tmp_path)}, 1)
    document, _ = reported(tmp_path, capsys)
    [said] = [line for line in document["findings"] if "workers wait for server 1" in line] or [document]
    assert "its processing takes" in said, document["findings"]
    rows = {server: kinds["push"] for server, kinds in document["requests"].items()}
    assert rows["1"]["working"] > rows["0"]["working"] + 100
