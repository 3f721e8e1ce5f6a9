"""Rank 0 asks, every rank answers, rank 0 reports.

    rank 0                                  rank r
       │ ◄──────────────── connection ────────► │     whichever of the two gets through to the other first
       │ facts ───────────────────────────────► │     what it is, what its host is
       │ clock (several times) ───────────────► │
       │ connect ─────────────────────────────► │     it probes every other rank: a row of the matrix
       │ ring, pair ──────────────────────────► │     if all is well so far: the ring itself, then neighbours alone
       │ end ─────────────────────────────────► │     after the report

All of this uses the sockets on which the ring would listen, and the same listener. Every wait ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from typing import Any

from tfring.cluster import Cluster, detect, detection, launch_variables, parse_address
from tfring.cluster.roles import Roles
from tfring.doctor import findings, host, links, report
from tfring.doctor.parallel import in_parallel
from tfring.errors import TfringError
from tfring.transport import handshake, ports, secret, wire
from tfring.transport.dial import dial
from tfring.transport.listener import Connection, Listener

DEFAULT_SECONDS = 60.0
_PAUSE_SECONDS = 0.2
_ANSWER_SECONDS = 25.0  # for facts, with names that do not resolve
_CLOCK_SECONDS = 20.0
_RING_SECONDS = 20.0  # to form, and for each collective
_MARGIN_SECONDS = 10.0
_MOST_LINES = 20  # of output, in the report
_LINGER_SECONDS = 3.0  # so that a launcher learns of rank 0's end first

_RANKS = wire.list_of(wire.integer(0, handshake.MAX_RANKS), handshake.MAX_RANKS)
_REQUESTS = wire.Format(
    {
        "ask": {"do": wire.one_of("facts", "clock", "connect", "ring", "pair"), "ranks": _RANKS},
        "end": {},
        "refused": handshake.REFUSED,
    },
    max_json_bytes=1 << 20,
)
_ANSWERS = wire.Format({"answer": {"of": wire.anything}, "refused": handshake.REFUSED}, max_json_bytes=1 << 20)

Answer = dict[str, Any]


def examine(seconds: float = DEFAULT_SECONDS, *, as_json: bool = False, not_ready_code: int = 1) -> int:
    """Runs this process's part of the examination of its cluster. Rank 0 prints the report.

    Args:
      seconds: Time that ranks wait for each other, in seconds.
      as_json: Whether to print the report as one JSON document.
      not_ready_code: Exit code of rank 0 if the report says that the cluster cannot train.

    Returns:
      The exit code. On a rank other than 0 it is 0 if the rank could answer to the end.
    """
    os.environ["TFRING_CONNECT_TIMEOUT_SECONDS"] = str(seconds)  # for ranks that exchange addresses
    rank = 0
    try:
        roles = Roles.of()
        said = detection.find(os.environ) if roles is None else roles.cluster_of_all()
        rank = said.rank if said is not None else 0
        cluster = detect() if roles is None else roles.cluster_of_all()
        launch_variables.notify_launcher()
        num_servers = 0 if roles is None else len(roles.servers)
        listener = Listener.of(cluster) if cluster.world_size > 1 else None
    except TfringError as error:
        if rank != 0:
            return _complain(rank, str(error))
        found = findings.without_cluster(host.facts(Cluster.alone()), str(error))
    else:
        if rank != 0:
            assert listener is not None
            return _Responder(cluster, listener, seconds).run()
        if listener is not None:
            asking = _Examiner(cluster, listener, seconds, num_servers)
            with contextlib.closing(asking):
                return _report(asking.examine(), as_json, not_ready_code)
        found = {"facts": {0: host.facts(cluster)}, **_about(cluster, num_servers)}
    return _report(found, as_json, not_ready_code)


def report_failed_start(code: int, printed: str, *, over_ssh: bool, as_json: bool) -> int:
    """Reports, with the output, that the launcher could not start a doctor for every rank, or keep it running."""
    lines = [f"  {line}" for line in printed.splitlines()[-_MOST_LINES:] if line.strip()]
    problem = f"The doctor did not start for every rank, or ended before the report (exit code {code})"
    reason = "\n".join([f"{problem}:", *lines] if lines else [f"{problem}."])
    remedy = "Fix this and run the command again."
    if over_ssh:
        remedy = (
            "Check that `ssh HOST true` works for each host. If ssh needs a user, a port or a key, write them into "
            "~/.ssh/config or use --ssh-port and --ssh-identity. Then run the command again."
        )
    return _report(findings.without_cluster(None, f"{reason}\n\n{remedy}"), as_json, 1)


def _about(cluster: Cluster, num_servers: int) -> dict[str, Any]:
    return {
        "source": cluster.source,
        "world_size": cluster.world_size,
        "num_servers": num_servers,
        "addresses": list(cluster.addresses),
        "problem": None,
    }


def _report(found: dict[str, Any], as_json: bool, not_ready_code: int) -> int:
    document = report.document(found)
    print(json.dumps(document) if as_json else report.text(document), flush=True)
    return 0 if document["ready"] else not_ready_code


def _complain(rank: int, text: str) -> int:
    print(f"tfring doctor: rank {rank}: {text}", file=sys.stderr, flush=True)
    time.sleep(_LINGER_SECONDS)
    return 1


def _perform(cluster: Cluster, request: dict[str, Any]) -> Answer:
    """Answers a request on a rank."""
    try:
        if request["do"] == "facts":
            return host.facts(cluster)
        if request["do"] == "clock":
            return {"time": time.time()}
        if request["do"] == "connect":
            found = links.probe_all(cluster, request["ranks"])
            return {str(rank): answer for rank, answer in found.items()}
        if request["do"] == "ring":
            return links.measure_ring(cluster, _RING_SECONDS)
        return links.measure_pair(cluster, request["ranks"], _RING_SECONDS)
    except Exception as error:  # any error goes into the report
        return {"problem": str(error) or type(error).__name__}


def _dial(cluster: Cluster, rank: int) -> wire.Channel:
    addresses = cluster.addresses
    key = secret.of(cluster)
    return dial(
        parse_address(addresses[rank]),
        key,
        "doctor",
        {"job": handshake.job_id(addresses), "rank": cluster.rank, "to": rank},
        network=bool(key) or ports.spans_hosts(addresses),
        seconds=links.PROBE_SECONDS,
    )


def _take(listener: Listener, cluster: Cluster, rank: int) -> Connection | None:
    """Returns the connection of the doctor of a rank, if one arrives soon."""
    wanted = (handshake.job_id(cluster.addresses), rank)
    return listener.take(
        lambda it: it.kind == "doctor" and (it.hello["job"], it.hello["rank"]) == wanted, _PAUSE_SECONDS
    )


def _object(answer: Any) -> Answer:
    if not isinstance(answer, dict):
        raise wire.WireError("not an answer")
    return answer


class _Examiner:
    """Asks the other ranks, on rank 0."""

    def __init__(self, cluster: Cluster, listener: Listener, seconds: float, num_servers: int) -> None:
        self._cluster = cluster
        self._listener = listener
        self._seconds = seconds
        self._num_servers = num_servers
        self._connections: dict[int, wire.Channel] = {}

    def close(self) -> None:
        """Tells the other ranks to end."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.deadline = time.monotonic() + _PAUSE_SECONDS
                connection.send("end")

    def examine(self) -> dict[str, Any]:
        """Returns all that the ranks report and measure."""
        cluster = self._cluster
        deadline = time.monotonic() + self._seconds
        reached = in_parallel(
            lambda rank: host.facts(cluster) if rank == 0 else self._reach(rank, deadline),
            range(cluster.world_size),
            self._seconds + _ANSWER_SECONDS,
            cluster.world_size,
        )
        facts = {rank: answer for rank, answer in sorted(reached.items()) if answer is not None}
        ranks = list(facts)
        missing = [rank for rank in range(cluster.world_size) if rank not in facts]
        clocks = in_parallel(self._clock, [rank for rank in ranks if rank != 0], _CLOCK_SECONDS, 1)
        connect = {"do": "connect", "ranks": list(range(cluster.world_size))}
        rows = self._ask_all(ranks, connect, links.probe_seconds(cluster.world_size) + _MARGIN_SECONDS)
        found = {
            **_about(cluster, self._num_servers),
            "facts": facts,
            "missing": {rank: rows[0].get(str(rank), {"kind": links.TIMED_OUT}) for rank in missing},
            "clocks": {rank: clock for rank, clock in clocks.items() if clock is not None},
            "connections": {
                rank: {int(other): answer for other, answer in row.items()}
                for rank, row in rows.items()
                if "problem" not in row
            },
            "lost": {rank: row["problem"] for rank, row in rows.items() if "problem" in row},
        }
        if findings.may_form(found):
            found["ring"] = self._first_problem(self._ask_all(ranks, {"do": "ring"}, 2 * _RING_SECONDS))
            if "problem" not in found["ring"]:
                found["neighbours"] = self._neighbours()
        return found

    def _reach(self, rank: int, deadline: float) -> Answer | None:
        """Returns the facts of a rank, if it connects to this rank, or this rank to it, before `deadline`."""
        while time.monotonic() < deadline:
            taken = _take(self._listener, self._cluster, rank)
            try:
                connection = taken.channel if taken else _dial(self._cluster, rank)
            except (OSError, wire.WireError):
                continue
            left = max(_PAUSE_SECONDS, deadline - time.monotonic())
            self._connections[rank] = connection
            answer = self._ask(rank, {"do": "facts"}, min(_ANSWER_SECONDS, left))
            if "problem" not in answer:
                return answer
            connection.close()
            del self._connections[rank]
            time.sleep(_PAUSE_SECONDS)
        return None

    def _clock(self, rank: int) -> dict[str, float] | None:
        try:
            return links.clock_offset(lambda: self._ask(rank, {"do": "clock"}, links.PROBE_SECONDS)["time"])
        except KeyError:  # it is gone; the next request reports it
            return None

    def _neighbours(self) -> list[dict[str, Any]]:
        """Measures pairs without a common rank at once, in at most three rounds. Each pair is alone on its ranks."""
        size = self._cluster.world_size
        pairs = [[rank, (rank + 1) % size] for rank in range(size if size > 2 else 1)]
        odd = pairs[-1:] if size % 2 and size > 1 else []
        whole = pairs[: len(pairs) - len(odd)]
        measured = []
        for together in (whole[::2], whole[1::2], odd):
            of_rank = {rank: pair for pair in together for rank in pair}

            def ask(rank: int, of_rank: dict[int, list[int]] = of_rank) -> Answer:
                return self._ask_any(rank, {"do": "pair", "ranks": of_rank[rank]})

            answers = in_parallel(ask, of_rank, 3 * _RING_SECONDS, size)
            late = {"problem": f"no answer within {3 * _RING_SECONDS:g} s"}
            measured += [{"ranks": pair, **answers.get(pair[0], late)} for pair in together]
        return sorted(measured, key=lambda each: each["ranks"][0])

    def _ask_all(self, ranks: list[int], request: dict[str, Any], seconds: float) -> dict[int, Answer]:
        answers = in_parallel(lambda rank: self._ask_any(rank, request, seconds), ranks, seconds + 1, len(ranks))
        return {rank: answers.get(rank, {"problem": f"no answer within {seconds:g} s"}) for rank in ranks}

    def _ask_any(self, rank: int, request: dict[str, Any], seconds: float = 3 * _RING_SECONDS) -> Answer:
        return _perform(self._cluster, request) if rank == 0 else self._ask(rank, request, seconds)

    def _ask(self, rank: int, request: dict[str, Any], seconds: float) -> Answer:
        connection = self._connections[rank]
        try:
            connection.deadline = time.monotonic() + seconds
            connection.send("ask", do=request["do"], ranks=request.get("ranks", []))
            answer = connection.receive(_ANSWERS)
            # A process of another job, or a process of this job that does not know its job yet.
            return {"problem": answer.fields["why"]} if answer.kind == "refused" else _object(answer.fields["of"])
        except TimeoutError:
            return {"problem": f"no answer within {seconds:g} s"}
        except (OSError, ValueError) as error:
            return {"problem": str(error)}

    def _first_problem(self, answers: dict[int, Answer]) -> Answer:
        return next((answer for answer in answers.values() if "problem" in answer), answers[0])


class _Responder:
    """The part of every other rank: answers on any connection to rank 0, until rank 0 ends the examination."""

    def __init__(self, cluster: Cluster, listener: Listener, seconds: float) -> None:
        self._cluster = cluster
        self._listener = listener
        self._seconds = seconds
        self._ended = threading.Event()
        self._heard_at: float | None = None
        self._why = "rank 0 never asked"
        self._lost = ""

    def run(self) -> int:
        for look in (self._connect_to_rank_0, self._take):
            threading.Thread(target=look, daemon=True).start()
        patience = self._seconds + _LINGER_SECONDS
        started = time.monotonic()
        while not self._ended.wait(_PAUSE_SECONDS):
            heard_at = self._heard_at
            if heard_at is None and time.monotonic() > started + patience:
                where = self._cluster.addresses[0]
                text = f"looked for rank 0 at {where} for {patience:g} s, but the examination never began: {self._why}."
                return _complain(self._cluster.rank, text)
            # While other ranks answer, or rank 0 waits for them.
            if heard_at is not None and time.monotonic() > heard_at + patience + 4 * _RING_SECONDS + _ANSWER_SECONDS:
                return _complain(self._cluster.rank, "rank 0 stopped asking before the end.")
        return _complain(self._cluster.rank, self._lost) if self._lost else 0

    def _connect_to_rank_0(self) -> None:
        """Connects to rank 0 and serves it. Repeats this if a connection fails, until one has served."""
        while not self._ended.is_set():
            try:
                with _dial(self._cluster, 0) as connection:
                    self._serve(connection)
            except (OSError, wire.WireError) as error:
                if self._heard_at is None:
                    kind = links.kind_of(error)
                    self._why = kind if kind != links.FAILED else str(error)
            time.sleep(_PAUSE_SECONDS)

    def _take(self) -> None:
        """Serves the connections that rank 0 dials."""
        while not self._ended.is_set():
            taken = _take(self._listener, self._cluster, 0)
            if taken is not None:
                threading.Thread(target=self._serve_connection, args=(taken.channel,), daemon=True).start()

    def _serve_connection(self, connection: wire.Channel) -> None:
        with connection, contextlib.suppress(OSError, wire.WireError):
            self._serve(connection)

    def _serve(self, connection: wire.Channel) -> None:
        asked = False
        try:
            while True:
                connection.deadline = math.inf
                request = connection.receive(_REQUESTS)
                if request.kind == "refused":
                    self._why = request.fields["why"]
                    return
                asked, self._heard_at = True, time.monotonic()
                if request.kind == "end":
                    self._ended.set()
                    return
                answer = _perform(self._cluster, request.fields)
                connection.deadline = time.monotonic() + _ANSWER_SECONDS
                connection.send("answer", of=answer)
        except OSError:
            if asked and not self._ended.is_set():
                self._lost = "rank 0 went away in the middle of the examination."
                self._ended.set()
            raise
