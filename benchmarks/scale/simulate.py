"""Plays the engine's schedules on a model of hosts and links.

The tables are those that the engine executes (`native/schedule.cc`). A message waits for the bytes that it passes on,
for the ones before it on its rank's way to the network, and for the other ranks of its host, which share an interface;
it passes bytes on as they come.

>>> network = Network(rate=1e9, delay=50e-6)
>>> round(all_reduce(1e6, ranks=8, network=network) / bound(1e6, 8, network), 2)  # 8 hosts, one rank each
1.01
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import numpy as np

from tfring.ring import library, schedule


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between hosts, and within a host.

    Attributes:
      rate: bits a second through a host's interface, in each direction.
      delay: seconds that a message takes from one host to another.
      overhead: seconds that a message takes each end, before its bytes.
      local_rate: bits a second between two ranks of a host, added up on their way.
      local_delay: seconds that a message takes within a host.
    """

    rate: float
    delay: float
    overhead: float = 5e-6
    local_rate: float = 40e9
    local_delay: float = 2e-6


def all_reduce(size: float, ranks: int, network: Network, *, local: int = 1, algorithm: str = "auto") -> float:
    """Returns the seconds of an all_reduce.

    Args:
      size: bytes.
      ranks: how many, up to some 1,024: a table has 2 (ranks - 1) rows a rank.
      network: of their hosts.
      local: ranks a host.
      algorithm: as `TFRING_ALGORITHM`.
    """
    chosen = schedule.choose_all_reduce(int(size), ranks, local, algorithm)
    which = {"flat": "flat_all_gather", "bruck": "bruck_all_gather"}.get(chosen, f"{chosen}_all_reduce")
    host = np.arange(ranks) // local  # the engine, too, has the ranks of a host side by side
    gathers = which.endswith("gather")
    chunks = 1 << ranks.bit_length() - 1 if chosen == "halving" else ranks
    return play(tables(which, ranks, local), size if gathers else size / chunks, chunks, host, network)


def bound(size: float, ranks: int, network: Network, local: int = 1) -> float:
    """Returns the least seconds of an all_reduce: 2X (H - 1) / (H B) over H hosts."""
    hosts = ranks // local
    return 2 * size * (hosts - 1) / hosts * 8 / network.rate


def tables(which: str, ranks: int, more: int) -> list[np.ndarray]:
    """Returns `[step, (to, send, from, recv, reduce)]` of each position, as the engine has it; -1: none."""
    most = 4 * ranks + 8
    found = []
    for position in range(ranks):
        table = (ctypes.c_int32 * 5 * most)()
        count = library.core().tfring_schedule(which.encode(), position, ranks, more, table, most)
        found.append(np.ctypeslib.as_array(table)[:count].copy())
    return found


def rounds(table: np.ndarray) -> list[np.ndarray]:
    """Returns the steps that are under way at a time: with one peer, and none sends what another of them brings."""
    if not len(table):
        return []
    cuts: list[int] = []
    brought: set[int] = set()
    before = table[0, [0, 2, 4]].tolist()
    for step, (to, send, source, recv, reduce) in enumerate(table.tolist()):
        if [to, source, reduce] != before or send in brought:
            cuts.append(step)
            brought = set()
        before = [to, source, reduce]
        brought.add(recv)
    return np.split(table, cuts)


def play(steps: list[np.ndarray], chunk: float, chunks: int, host: np.ndarray, network: Network) -> float:
    """Returns when the last rank has all, in seconds; `chunk`: bytes of each chunk."""
    ranks = len(steps)
    begin, end = np.zeros([ranks, chunks]), np.zeros([ranks, chunks])  # when what a rank has of a chunk came
    out, into = np.zeros(ranks), np.zeros(ranks)  # until when a rank's link is taken, in each direction
    left = [rounds(table)[::-1] for table in steps]
    sent: dict[tuple[int, int], list] = {}  # messages on their way, by their ends
    has_sent: set[int] = set()  # positions that have sent what their present step sends
    while any(left):
        heads = [table[-1] if table else None for table in left]
        crossing = np.zeros(host.max() + 1)
        for position, head in enumerate(heads):
            if head is not None and head[0, 0] >= 0 and position not in has_sent:
                crossing[host[position]] += host[position] != host[head[0, 0]]
        for position, head in enumerate(heads):
            if head is None or position in has_sent:
                continue
            has_sent.add(position)
            to = head[0, 0]
            if to < 0:
                continue
            near = host[position] == host[to]
            rate = network.local_rate if near else network.rate / max(crossing[host[position]], 1)
            delay = network.local_delay if near else network.delay
            moves, took = head[:, 1], chunk * 8 / rate
            out[position] += network.overhead
            # Chunk i leaves once chunk i - 1 has left and its first bytes are there, and not before its last are.
            first = np.maximum(begin[position, moves], out[position])
            first = np.maximum.accumulate(first - took * np.arange(len(moves))) + took * np.arange(len(moves))
            last = np.maximum(first + took, end[position, moves])
            out[position] = last[-1]
            sent.setdefault((position, to), []).append((first + delay, last + delay, took))
        moved = False
        for position, head in enumerate(heads):
            if head is None:
                continue
            source, gets = head[0, 2], head[:, 3]
            if source >= 0:
                if not sent.get((source, position)):
                    continue
                first, last, took = sent[source, position].pop(0)
                into[position] = max(into[position], first[0]) + network.overhead
                first = np.maximum.accumulate(np.maximum(first, into[position]) - took * np.arange(len(gets)))
                first += took * np.arange(len(gets))
                last = np.maximum(last, first + took)
                into[position] = last[-1]
                if head[0, 4]:
                    first, last = np.maximum(first, begin[position, gets]), np.maximum(last, end[position, gets])
                begin[position, gets], end[position, gets] = first, last
            left[position].pop()
            has_sent.discard(position)
            moved = True
        assert moved, "all wait for each other"
    return float(max(end.max(), out.max()))


def hops_of_a_failure(ranks: int, local: int = 1) -> int:
    """Returns the most hops from the links of a rank that died to another rank: each tells its own links.

    >>> [hops_of_a_failure(ranks) for ranks in (16, 64, 1024)]
    [1, 3, 5]
    """
    reached, now, hops = {0}, {0}, 0
    while len(reached) < ranks:
        now = {peer for position in now for peer in schedule.partners(position, ranks, local)} - reached
        reached, hops = reached | now, hops + 1
    return hops


def links(ranks: int, local: int = 1) -> int:
    """Returns the links of a rank."""
    return len(schedule.partners(0, ranks, local))


def by_formula(size: float, ranks: int, network: Network, algorithm: str = "auto") -> float:
    """Returns about what `all_reduce` does on hosts of one rank each, for any number of them.

    >>> network = Network(rate=1e9, delay=50e-6)
    >>> exact = [all_reduce(1e6, 32, network, algorithm=a) for a in ("ring", "halving", "bruck")]
    >>> [round(by_formula(1e6, 32, network, a) / t, 1) for a, t in zip(("ring", "halving", "bruck"), exact)]
    [1.2, 1.0, 1.0]
    """
    chosen = schedule.choose_all_reduce(int(size), ranks, 1, algorithm)
    log = math.ceil(math.log2(ranks))
    delays = {"flat": 1, "bruck": log, "halving": 2 * log}.get(chosen, 2 * (ranks - 1))
    num_bytes = (ranks - 1) * size if chosen in ("flat", "bruck") else 2 * (ranks - 1) / ranks * size
    return delays * (network.delay + 2 * network.overhead) + num_bytes * 8 / network.rate


def trees(size: float, ranks: int, network: Network) -> float:
    """Returns the seconds of NCCL's double binary trees, by their formula, pipelined without cost.

    Source: Sanders, Speck and Träff (2009), https://doi.org/10.1016/j.parco.2009.09.001.
    """
    delays = 2 * math.ceil(math.log2(ranks))
    return delays * (network.delay + 2 * network.overhead) + 2 * size * 8 / network.rate


def server(size: float, ranks: int, network: Network) -> float:
    """Returns the seconds of a central server that takes and gives all: 2XN/B."""
    return 2 * (network.delay + 2 * network.overhead) + 2 * size * ranks * 8 / network.rate
