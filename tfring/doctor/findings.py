"""Interprets the results: problems, which keep a cluster from training, and warnings, which do not."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfring import _requirements
from tfring.cluster import parse_address
from tfring.doctor import links
from tfring.errors import UnsupportedTensorFlowError

_MAX_CLOCK_SECONDS = 1.0
_FASTER = 2.0  # an interface this many times as fast as the one in use is worth a warning
_OPEN_PORTS = "export TFRING_PORT_RANGE=20000-20100"
_OTHER_NETWORK = "export TFRING_INTERFACE=eth0"
_GIVEN_ADDRESSES = ("TF_CONFIG", "Vertex AI's CLUSTER_SPEC")  # sources that name the ports


class Finding(NamedTuple):
    """A problem, and its remedy."""

    what: str
    do: str


def without_cluster(facts: dict[str, Any] | None, problem: str) -> dict[str, Any]:
    """Returns the results if no cluster could be found, with the `facts` of this process, if they matter.

    If a problem has several lines, those after an empty line say what to do, or otherwise those after the first line.
    """
    return {
        "source": None,
        "world_size": None,
        "num_servers": 0,
        "addresses": [],
        "facts": {} if facts is None else {0: facts},
        "problem": problem,
    }


def may_form(found: dict[str, Any]) -> bool:
    """Returns True if it makes sense to try the ring: no known problem keeps it from forming."""
    return found["world_size"] > 1 and not list(problems(found))


def problems(found: dict[str, Any]) -> Iterator[Finding]:
    """Yields the problems that keep this cluster from training."""
    if found["problem"]:
        what, _, do = found["problem"].partition("\n\n" if "\n\n" in found["problem"] else "\n")
        yield Finding(what, do or "Fix this and run the command again.")
    yield from _host_findings(found["facts"])
    yield from _name_findings(found["facts"])
    yield from _missing_rank_findings(found)
    yield from _connection_findings(found)
    for rank, problem in found.get("lost", {}).items():
        who = _capital(named([rank], found))
        yield Finding(f"{who} was connected, but is gone: {problem}.", "Read its output, then run the command again.")
    ring = found.get("ring", {})
    if "problem" in ring:
        yield Finding(f"The ring does not form: {ring['problem']}", "Fix this and run the command again.")
    for pair in found.get("neighbours", []):
        if "problem" in pair:
            between = ranks_in_words(pair["ranks"])
            what = f"The ring of {between} alone failed: {pair['problem']}"
            yield Finding(what, "Fix this and run the command again.")


def warnings(found: dict[str, Any]) -> Iterator[Finding]:
    """Yields findings about what is odd, slow or likely to cause trouble later."""
    facts = found["facts"]
    yield from _python_findings(facts)
    yield from _shared_memory_findings(found)
    yield from _cpu_findings(found)
    yield from _clock_findings(found)
    yield from _interface_findings(found)


def ranks_by_host(facts: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
    """Returns the ranks of each host, in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in sorted(facts.items()):
        hosts.setdefault(fact["host"], []).append(rank)
    return hosts


def cpus_of(facts: Sequence[dict[str, Any]]) -> int:
    """Returns the number of CPUs that ranks of one host have together, each its own or all the same.

    >>> cpus_of([{"cpus": 1, "cpu_ids": [0]}, {"cpus": 1, "cpu_ids": [1]}])
    2
    >>> cpus_of([{"cpus": 2, "cpu_ids": [0, 1, 2, 3]}] * 2)
    2
    """
    together = {cpu for fact in facts for cpu in fact["cpu_ids"]}
    return max(fact["cpus"] for fact in facts) if len(together) == len(facts[0]["cpu_ids"]) else len(together)


def used_interface(found: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Returns the interface through which a rank reaches the next, or None if it is not known."""
    following = (rank + 1) % found["world_size"] if found["world_size"] else rank
    local = found.get("connections", {}).get(rank, {}).get(following, {}).get("local", "").removeprefix("::ffff:")
    every = found["facts"][rank]["interfaces"]
    if local.startswith("127."):
        return next((each for each in every if each["name"] == "lo"), None)
    return next((each for each in every if each["address"].partition("%")[0] == local.partition("%")[0]), None)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Returns ranks in words.

    >>> ranks_in_words([3]), ranks_in_words([0, 1]), ranks_in_words([0, 1, 2, 5, 7])
    ('rank 3', 'ranks 0 and 1', 'ranks 0-2, 5 and 7')
    """
    runs: list[list[int]] = []
    every = sorted(set(ranks))
    for rank in every:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    *most, last = parts
    return f"rank{'s' if len(every) > 1 else ''} {', '.join(most)}{' and ' if most else ''}{last}"


def counted(ranks: Sequence[int], num_workers: int) -> str:
    """Returns the number of ranks with each role.

    >>> counted([0, 1], 2), counted([1, 2, 3], 2)
    ('2 workers', '1 worker and 2 parameter servers')
    """
    num_servers = sum(rank >= num_workers for rank in ranks)
    numbers = {"worker": len(ranks) - num_servers, "parameter server": num_servers}
    return " and ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in numbers.items() if n)


def named(ranks: Sequence[int], found: dict[str, Any]) -> str:
    """Returns ranks in words, with the numbers of those that are parameter servers.

    >>> named([1, 2], {"world_size": 4, "num_servers": 2})
    'ranks 1 and 2 (rank 2 is parameter server 0)'
    >>> named([2, 3], {"world_size": 4, "num_servers": 2})
    'ranks 2 and 3 (parameter servers 0 and 1)'
    """
    num_workers = (found["world_size"] or 0) - found.get("num_servers", 0)
    servers = [rank for rank in ranks if rank >= num_workers]
    words = ranks_in_words(ranks)
    if not servers:
        return words
    roles = ranks_in_words(rank - num_workers for rank in servers).replace("rank", "parameter server")
    if len(servers) < len(ranks):
        roles = f"{ranks_in_words(servers)} {'are' if len(servers) > 1 else 'is'} {roles}"
    return f"{words} ({roles})"


def _host_findings(facts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    for problem, ranks in _by(facts, lambda fact: fact["library"]["problem"]).items():
        if problem:
            what, do = _first_sentence(problem)
            yield Finding(f"{_on(ranks, facts)}: {what}", do)
    for version, ranks in _by(facts, lambda fact: fact["tensorflow"]).items():
        problem = _of_tensorflow(version)
        if problem:
            what, do = _first_sentence(problem)
            yield Finding(f"{_on(ranks, facts)}: {what}", do)
    oldest = ".".join(map(str, _requirements.OLDEST_KERAS))
    for version, ranks in _by(facts, lambda fact: fact["keras"]).items():
        if version is None or _numbers(version) < _requirements.OLDEST_KERAS:
            what = f"{_on(ranks, facts)}: tfring needs Keras {oldest} or later, but {version or 'none'} is installed."
            yield Finding(what, f'Type: pip install "keras>={oldest}"')
    for backend, ranks in _by(facts, lambda fact: fact["keras_backend"]).items():
        if backend not in (None, "tensorflow"):
            what = f"{_on(ranks, facts)}: Keras is set to run on {backend}, but tfring runs on TensorFlow."
            yield Finding(what, "export KERAS_BACKEND=tensorflow")
    for name, label in (("tfring", "tfring"), ("tensorflow", "TensorFlow"), ("keras", "Keras")):
        versions = _by(facts, operator.itemgetter(name))
        if len(versions) > 1:
            yield Finding(f"{label} differs: {_versions(versions)}.", f"Install the same {label} for all ranks.")


def _of_tensorflow(version: str | None) -> str | None:
    if version is None:
        return _requirements.NO_TENSORFLOW
    if version == "unknown":
        return None
    try:
        _requirements.check_version(version, warn=False)
    except UnsupportedTensorFlowError as error:
        return str(error)
    return None


def _name_findings(facts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    ranks_of: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for rank, fact in facts.items():
        for name, why in fact["unresolved"].items():
            ranks_of[name, why].append(rank)
    for (name, why), ranks in ranks_of.items():
        yield Finding(
            f"The host name {name!r} does not resolve on {_on(ranks, facts, capital=False)}: {why}.",
            f"Correct it, write the host's address in its place, or add it to /etc/hosts or DNS. Check with:\n"
            f"  getent hosts {name}",
        )


def _missing_rank_findings(found: dict[str, Any]) -> Iterator[Finding]:
    addresses = found["addresses"]
    by_kind: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for rank, attempt in found.get("missing", {}).items():
        by_kind[attempt["kind"], parse_address(addresses[rank]).host].append(rank)
    for (kind, name), ranks in by_kind.items():
        where = f"{addresses[ranks[0]]}{' and others' if len(ranks) > 1 else ''}"
        detail = found["missing"][ranks[0]].get("detail")
        if kind == links.CONNECTED:
            why = "a program of this cluster listens there, but not the doctor"
            do = "Start `tfring doctor` there, instead of training."
        else:
            why, do = _explain(kind, detail, found["source"])
        if kind == links.REFUSED:
            do = f"Start the doctor for {named(ranks, found)} too, at the same time, or see why it ended."
        elif kind == links.UNRESOLVED:
            do = f"Correct the name {name!r}, then start the doctor on that host too."
        rows = found.get("connections", {}).items()
        reach = [rank for rank, row in rows if row.get(ranks[0], {}).get("kind") == links.CONNECTED]
        if reach and kind != links.CONNECTED:
            why += f". It is there: {ranks_in_words(reach)} can reach it, but rank 0 cannot"
        yield Finding(f"{_capital(named(ranks, found))} never connected. {where}: {why}.", do)


def _connection_findings(found: dict[str, Any]) -> Iterator[Finding]:
    """Yields one finding for each pair of hosts and each kind of failure between them, for any number of ranks."""
    facts, addresses = found["facts"], found["addresses"]
    pairs: dict[tuple[str, str, str], list[tuple[int, int]]] = collections.defaultdict(list)
    for rank, row in found.get("connections", {}).items():
        for other, attempt in row.items():
            # Names, and ranks that never came, are reported by the other findings.
            if other in facts and attempt["kind"] not in (links.CONNECTED, links.UNRESOLVED):
                pairs[attempt["kind"], facts[rank]["host"], facts[other]["host"]].append((rank, other))
    for (kind, here, there), failed in pairs.items():
        senders, receivers = sorted({pair[0] for pair in failed}), sorted({pair[1] for pair in failed})
        first, second = failed[0]
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        detail = found["connections"][first][second].get("detail")
        why, do = _explain(kind, detail, found["source"])
        if here == there:
            between = f"{named(senders, found)} to {named(receivers, found)} on {_name(facts, found, second)}"
        else:
            between = (
                f"{named(senders, found)} on {_name(facts, found, first)} to {named(receivers, found)} on "
                f"{_name(facts, found, second)}"
            )
        yield Finding(f"No connection from {between} ({addresses[second]}{more}): {why}.", do)


def _explain(kind: str, detail: str | None, source: str) -> tuple[str, str]:
    """Returns why a connection failed, and what to do."""
    words = f" ({detail})" if detail else ""
    named = source in _GIVEN_ADDRESSES
    ports = f"write ports that are open in {source}." if named else f"name ports that are open:\n  {_OPEN_PORTS}"
    network = (
        f"write addresses of a network that both hosts are in, in {source}."
        if named
        else f"name a network that both hosts are in:\n  {_OTHER_NETWORK}"
    )
    return {
        links.REFUSED: (
            "refused: the host answers, but no process listens at that port",
            "Check that others reach that rank at this address, and that no firewall refuses the port.",
        ),
        links.TIMED_OUT: (
            "timed out: nothing comes back, as behind a firewall that drops packets",
            f"Open the port in the firewall between the two hosts, or {ports}",
        ),
        links.UNREACHABLE: (
            f"unreachable: there is no route to it{words}",
            f"Fix the route between the two hosts, or {network}",
        ),
        links.UNRESOLVED: (f"the name does not resolve{words}", "Correct the name."),
        links.NO_ANSWER: (
            "no answer: the port accepts connections, but its program does not answer",
            "Is the program there suspended, or someone else's? End it, or use another port.",
        ),
        links.ANOTHER_JOB: (
            "another job of tfring listens there",
            "Stop it, or use other ports; and check that all ranks have the same list of addresses.",
        ),
        links.ANOTHER_RANK: (
            f"{detail or 'another rank'} answers there",
            "Is the port forwarded, or do two ranks share an address? Give each rank the address it listens at.",
        ),
        links.ANOTHER_PROGRAM: (
            f"a program other than tfring answers there{words}",
            f"Stop it, or {ports}",
        ),
    }.get(kind, (f"failed{words}", "Fix this and run the command again."))


def _python_findings(facts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    versions = _by(facts, lambda fact: fact["python"])
    if len(versions) > 1:
        yield Finding(f"Python differs: {_versions(versions)}.", "Install the same Python for all ranks.")
    newest = ".".join(map(str, _requirements.NEWEST))
    for version, ranks in _by(facts, lambda fact: fact["tensorflow"]).items():
        if version and version != "unknown" and _numbers(version) > _requirements.NEWEST:
            what = f"{_on(ranks, facts)}: TensorFlow {version} is newer than the last that tfring was tested with."
            yield Finding(what, f'If problems occur: pip install "tensorflow-cpu<={newest}.*"')


def _shared_memory_findings(found: dict[str, Any]) -> Iterator[Finding]:
    facts = found["facts"]
    for problem, ranks in _by(facts, lambda fact: fact["shared_memory"]["problem"]).items():
        if problem:
            yield Finding(
                f"{_on(ranks, facts)}: no shared memory ({problem}), so TCP is used within the host, which is slower.",
                "Allow the process to make memory files (memfd_create); a sandbox or a memory limit may forbid it.",
            )
    for pair in found.get("neighbours", []):
        first, second = pair["ranks"]
        if pair.get("transport") == "tcp" and facts[first]["host"] == facts[second]["host"]:
            yield Finding(
                f"Ranks {first} and {second} share a host, but use TCP, which is slower than shared memory.",
                "Unset TFRING_TRANSPORT; run both as one user and in one PID namespace.",
            )


def _cpu_findings(found: dict[str, Any]) -> Iterator[Finding]:
    facts, num_workers = found["facts"], (found["world_size"] or 0) - found.get("num_servers", 0)
    for ranks in ranks_by_host(facts).values():
        cpus = cpus_of([facts[rank] for rank in ranks])
        if cpus < len(ranks):
            yield Finding(
                f"{_on(ranks, facts)}: {counted(ranks, num_workers)} share {cpus} CPU{'s' if cpus > 1 else ''}.",
                "They wait for each other in every step: start fewer there, or allow them more CPUs.",
            )


def _clock_findings(found: dict[str, Any]) -> Iterator[Finding]:
    for rank, clock in found.get("clocks", {}).items():
        if abs(clock["offset_seconds"]) - clock["uncertainty_seconds"] > _MAX_CLOCK_SECONDS:
            way = "ahead of" if clock["offset_seconds"] > 0 else "behind"
            yield Finding(
                f"The clock of rank {rank} is {abs(clock['offset_seconds']):.1f} s {way} rank 0's. Training is not "
                "affected, but times in logs and of files are misleading.",
                "Run a time service on the hosts (chrony, systemd-timesyncd).",
            )


def _interface_findings(found: dict[str, Any]) -> Iterator[Finding]:
    if len(ranks_by_host(found["facts"])) < 2:
        return
    seen = set()
    for rank, fact in found["facts"].items():
        used = used_interface(found, rank)
        speed = used["speed_megabits"] if used else None
        if used is None or speed is None or fact["host"] in seen:
            continue
        faster = [each for each in fact["interfaces"] if (each["speed_megabits"] or 0) >= _FASTER * speed]
        if faster:
            seen.add(fact["host"])
            best = max(faster, key=lambda each: each["speed_megabits"])
            yield Finding(
                f"{_on([rank], found['facts'])} uses {used['name']} ({speed / 1000:g} Gb/s), but also has "
                f"{best['name']} ({best['speed_megabits'] / 1000:g} Gb/s).",
                f"If all hosts are on that network:\n  export TFRING_INTERFACE={best['name']}",
            )


def _by(facts: dict[int, dict[str, Any]], key: Any) -> dict[Any, list[int]]:
    ranks_of: dict[Any, list[int]] = {}
    for rank, fact in facts.items():
        ranks_of.setdefault(key(fact), []).append(rank)
    return ranks_of


def _on(ranks: Sequence[int], facts: dict[int, dict[str, Any]], *, capital: bool = True) -> str:
    names = list(dict.fromkeys(facts[rank]["hostname"] for rank in ranks))
    words = ranks_in_words(ranks)
    return f"{_capital(words) if capital else words} ({', '.join(names)})"


def _name(facts: dict[int, dict[str, Any]], found: dict[str, Any], rank: int) -> str:
    """Returns the host of a rank, by its own name and the name that others use."""
    own, others = facts[rank]["hostname"], parse_address(found["addresses"][rank]).host
    return own if own == others else f"{own} ({others})"


def _versions(versions: dict[Any, list[int]]) -> str:
    return ", ".join(f"{version or 'none'} on {ranks_in_words(ranks)}" for version, ranks in versions.items())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _first_sentence(text: str) -> tuple[str, str]:
    what, stop, do = text.partition(". ")
    return f"{what}{stop.strip()}", do


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
