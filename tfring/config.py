"""Every `TFRING_*` environment variable: its type, its default, what it may hold."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfring.errors import ConfigurationError

_log = logging.getLogger(__name__)
_OF_KUBERNETES = ("_SERVICE_", "_TCP", "_UDP")  # in names that it sets for a service "tfring"


class Setting(NamedTuple):
    """One environment variable."""

    default: Any
    parse: Callable[[str], Any]  # raises ValueError where the text is not legal
    legal: str  # what the variable may hold, as the error says it
    meaning: str
    private: bool = False  # whether its value is never shown


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(text)
    return int(text)


def _seed(text: str) -> int | str:
    if text == "none":
        return text
    seed = int(text) if text.isascii() and text.isdecimal() else -1
    if not 0 <= seed < 2**32:
        raise ValueError(text)
    return seed


def _port(text: str) -> int:
    port = _whole_number(text)
    if not 1 <= port <= 65535:
        raise ValueError(text)
    return port


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    ports = _port(first.strip()), _port(last.strip() or first.strip())
    if ports[0] > ports[1]:
        raise ValueError(text)
    return ports


def _secret(text: str) -> str:
    if len(text) < 16:
        raise ValueError
    return text


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


SETTINGS: dict[str, Setting] = {
    "TFRING_ALGORITHM": Setting(
        "auto",
        _one_of("auto", "flat", "bruck", "halving", "ring", "two_level"),
        "auto, flat, bruck, halving, ring or two_level",
        "the algorithm of all_reduce, the same on all ranks (tfring/ring/schedule.py)",
    ),
    "TFRING_BIND": Setting(
        "none",
        _one_of("none", "cores"),
        "none or cores",
        "whether `tfring launch` binds each worker of a host to its share of the cores (docs/launcher.md)",
    ),
    "TFRING_BUILD_NATIVE": Setting(
        True, _flag, "0 or 1", "compile the ring when the package is installed (setup.py reads it)"
    ),
    "TFRING_CHECK_EQUAL": Setting(
        False, _flag, "0 or 1", "compare all variables of all ranks bit for bit after every step, for debugging"
    ),
    "TFRING_CONNECT_TIMEOUT_SECONDS": Setting(
        300.0, _positive_seconds, "a number above 0", "how long the ranks wait for each other at the start"
    ),
    "TFRING_DATA_SEED": Setting(
        None,
        _whole_number,
        "a whole number",
        "the seed of `tf.data` shuffles that have none, the same after a restart (`tfring launch` draws one)",
    ),
    "TFRING_ENCRYPT": Setting(
        False, _flag, "0 or 1", "encrypt with TLS what ranks send over TCP, the same on all ranks (docs/security.md)"
    ),
    "TFRING_GPUS": Setting(
        "one", _one_of("one", "all"), "one or all", "which GPUs `tfring launch` gives a worker (docs/gpus.md)"
    ),
    "TFRING_LOST_SECONDS": Setting(
        15.0,
        _positive_seconds,
        "a number above 0",
        "how long a rank may give no sign of life (stopped, cut off) before the others fail",
    ),
    "TFRING_PRINT": Setting(
        "rank0", _one_of("rank0", "all"), "rank0 or all", "which ranks print Keras' progress bars and summaries"
    ),
    "TFRING_QUIET": Setting(
        False, _flag, "0 or 1", "suppress what rank 0 prints on standard error at the start and the end of a run"
    ),
    "TFRING_RESTART": Setting(
        0, _whole_number, "a whole number", "number of times that `tfring launch --max-restarts` has restarted this job"
    ),
    "TFRING_SEED": Setting(
        None,
        _seed,
        "a whole number below 2**32, or none",
        "the seed of random numbers that have none, the same on all ranks (docs/data.md; `tfring launch` draws one)",
    ),
    "TFRING_STALL_WARNING_SECONDS": Setting(
        30.0,
        _positive_seconds,
        "a number above 0",
        "how long to wait for a rank that is alive, but busy elsewhere, before a warning",
    ),
    "TFRING_TIMEOUT_SECONDS": Setting(
        600.0,
        _positive_seconds,
        "a number above 0",
        "how long a collective waits for a rank that is alive, but busy elsewhere",
    ),
    "TFRING_TRACE": Setting(
        None,
        str,
        "the name of a folder",
        "where each rank and each parameter server writes its trace (docs/report.md)",
    ),
    "TFRING_TRANSPORT": Setting(
        "auto",
        _one_of("auto", "tcp", "shm"),
        "auto, tcp or shm",
        "auto: shared memory between ranks of a host, TCP otherwise",
    ),
    # Where the source of the cluster's facts gives no addresses, or not enough (docs/clusters.md).
    "TFRING_PORT_RANGE": Setting(
        None, _port_range, "two ports such as 20000-20100", "ports that ranks listen on, for a firewall"
    ),
    "TFRING_PORT": Setting(None, _port, "a port from 1 to 65535", "the port rank 0 listens on, where ranks meet"),
    "TFRING_INTERFACE": Setting(
        None, str, "an interface such as eth0 or a network such as 192.0.2.0/24", "where ranks listen"
    ),
    "TFRING_RENDEZVOUS": Setting(
        None, str, "rank 0's host, or its host:port", "where ranks meet, if the source does not say or is mistaken"
    ),
    "TFRING_NUM_WORKERS": Setting(
        None, _whole_number, "a whole number", "completions of a Kubernetes Indexed Job, which its pods are not told"
    ),
    # docs/security.md
    "TFRING_SECRET": Setting(
        None,
        _secret,
        "at least 16 characters long",
        "what ranks prove to each other; the same on all of them",
        private=True,
    ),
    "TFRING_SECRET_FILE": Setting(None, str, "the name of a file", "file with the secret, instead of TFRING_SECRET"),
    "TFRING_REQUIRE_SECRET": Setting(False, _flag, "0 or 1", "refuse to start several ranks without a secret"),
    # Set by `tfring launch` for each worker; None elsewhere. They come together (tfring/cluster/launch_variables.py).
    "TFRING_MAX_WORKER_RESTARTS": Setting(
        0, _whole_number, "a whole number", "how often `tfring launch` restarts each worker of asynchronous servers"
    ),
    "TFRING_RANK": Setting(None, _whole_number, "a whole number", "the rank of this process in the ring, from 0"),
    "TFRING_WORLD_SIZE": Setting(None, _whole_number, "a whole number", "number of processes in the ring"),
    "TFRING_LOCAL_RANK": Setting(None, _whole_number, "a whole number", "the rank of this process on its host, from 0"),
    "TFRING_LOCAL_WORLD_SIZE": Setting(
        None, _whole_number, "a whole number", "number of processes on this host"
    ),
    "TFRING_ADDRESSES": Setting(
        None, _addresses, "addresses such as host1:12345,host2:12345", "where each rank listens, by rank"
    ),
    "TFRING_SERVERS": Setting(
        None, _addresses, "addresses such as host1:12345,host2:12345", "where each parameter server listens"
    ),
    "TFRING_SERVER": Setting(None, _whole_number, "a whole number", "the number of this parameter server, from 0"),
    "TFRING_TAKEN_FD": Setting(
        None, str, "text", "inherited pipe that tells the launcher that this rank's place is taken"
    ),
    "TFRING_LISTEN_FD": Setting(
        None, _whole_number, "a whole number", "inherited socket that listens at this rank's address"
    ),
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of a setting, from the environment or its default. An empty variable counts as unset.

    Args:
      name: A key of `SETTINGS`.
      environ: Where to look; `os.environ` by default.

    Raises:
      ConfigurationError: The variable holds something it may not hold.

    Example:
        >>> read("TFRING_TRANSPORT", {"TFRING_TRANSPORT": "tcp"})
        'tcp'
        >>> read("TFRING_TRANSPORT", {})
        'auto'
    """
    setting = SETTINGS[name]
    text = (os.environ if environ is None else environ).get(name, "").strip()
    if not text:
        return setting.default
    try:
        return setting.parse(text)
    except (ValueError, KeyError):
        received = f"{name}, which has {len(text)} characters," if setting.private else f"{name}={text!r}"
        raise ConfigurationError(f"{received} is not {setting.legal} ({setting.meaning}).") from None


def warn_of_unknown() -> None:
    """Warns of each variable of the environment whose name is almost that of a setting."""
    for name in sorted(os.environ):
        if not name.startswith("TFRING_") or name in SETTINGS or any(part in name for part in _OF_KUBERNETES):
            continue
        meant = difflib.get_close_matches(name, SETTINGS, 1, 0.75)
        if meant:
            _log.warning("tfring reads no environment variable %s: did you mean %s?", name, meant[0])
