"""The value object that describes the ranks of a ring."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfring.cluster import tf_config
from tfring.errors import ConfigurationError
from tfring.transport.address import Address, host_key, parse_address


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Holds the rank of this process and the addresses of all ranks. Its fields are validated when it is created.

    Attributes:
      rank: Rank of this process, from 0 to `world_size - 1`.
      world_size: Number of processes in the ring.
      local_rank: Rank of this process among those of its host, from 0 to `local_world_size - 1`.
      local_world_size: Number of processes on this host.
      num_nodes: Number of hosts.
      addresses: Addresses at which the ranks listen, by rank; may be empty for a process that is alone.
      source: Name of the source of these facts, for messages: `"TF_CONFIG"`, `"tfring launch"`.
      listen_fd: An inherited socket that already listens at `addresses[rank]`, so that no other program can
        take the port in between. It stays open: duplicate it to use it, close it to bind the port again.
      secret: The secret that the ranks prove to each other. Defaults to `TFRING_SECRET` or `TFRING_SECRET_FILE`.

    Raises:
      ConfigurationError: If the fields contradict each other.

    >>> cluster = Cluster.from_hosts(["host1:12345", "host2:12345"], rank=1)
    >>> cluster.world_size, cluster.num_nodes, cluster.is_chief
    (2, 2, False)
    >>> Cluster.from_tf_config(cluster.to_tf_config()).addresses
    ('host1:12345', 'host2:12345')
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_nodes: int
    addresses: tuple[str, ...]
    source: str
    listen_fd: int | None = None
    secret: str | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "local_rank", "local_world_size", "num_nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise self._error(f"`{name}` must be an integer", **{name: value})
        if self.world_size < 1:
            raise self._error("`world_size` must be at least 1", world_size=self.world_size)
        if not 0 <= self.rank < self.world_size:
            raise self._error(
                "`rank` must be from 0 to `world_size - 1`", rank=self.rank, world_size=self.world_size
            )
        if not 1 <= self.local_world_size <= self.world_size:
            raise self._error(
                "`local_world_size` must be from 1 to `world_size`",
                local_world_size=self.local_world_size,
                world_size=self.world_size,
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise self._error(
                "`local_rank` must be from 0 to `local_world_size - 1`",
                local_rank=self.local_rank,
                local_world_size=self.local_world_size,
            )
        if not isinstance(self.addresses, tuple):
            raise self._error("`addresses` must be a tuple of strings", addresses=self.addresses)
        if len(self.addresses) != self.world_size and (self.addresses or self.world_size > 1):
            raise self._error(
                "`addresses` must have one entry per rank", addresses=self.addresses, world_size=self.world_size
            )
        parsed = [parse_address(address) for address in self.addresses]
        first: dict[Address, int] = {}
        for rank, address in enumerate(parsed):
            if first.setdefault(address, rank) != rank:
                raise self._error(
                    f"ranks {first[address]} and {rank} share an address",
                    addresses=self.addresses,
                )
        one_node = self.local_world_size == self.world_size
        if not (self.num_nodes == 1 if one_node else 2 <= self.num_nodes <= self.world_size):
            raise self._error(
                "`num_nodes` must be 1 if all ranks share a host, otherwise from 2 to `world_size`",
                num_nodes=self.num_nodes,
                local_world_size=self.local_world_size,
                world_size=self.world_size,
            )
        if self.listen_fd is not None and (not isinstance(self.listen_fd, int) or self.listen_fd < 0):
            raise self._error("`listen_fd` must be an open file descriptor or None", listen_fd=self.listen_fd)

    @property
    def is_chief(self) -> bool:
        """True on rank 0, which Keras and TF_CONFIG call the chief."""
        return self.rank == 0

    @classmethod
    def alone(cls, source: str = "no cluster configured") -> Cluster:
        """Returns a ring of one process.

        >>> Cluster.alone().world_size
        1
        """
        return cls(0, 1, 0, 1, 1, (), source)

    @classmethod
    def from_hosts(
        cls,
        addresses: list[str] | tuple[str, ...],
        rank: int,
        source: str = "a list of addresses",
        listen_fd: int | None = None,
        secret: str | None = None,
    ) -> Cluster:
        """Returns the cluster of a list of addresses; ranks with the same host name share that host.

        Raises:
          ValueError: If an address is malformed or given twice, or if `rank` is out of range.

        >>> Cluster.from_hosts(["a:1000", "a:1001", "b:1000"], rank=1)
        ... # doctest: +NORMALIZE_WHITESPACE
        Cluster(rank=1, world_size=3, local_rank=1, local_world_size=2, num_nodes=2,
                addresses=('a:1000', 'a:1001', 'b:1000'), source='a list of addresses', listen_fd=None)
        """
        if isinstance(addresses, str) or not addresses:
            raise ConfigurationError(f"addresses={addresses!r} is not a list of at least one address.")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(addresses):
            raise ConfigurationError(
                f"`rank` is {rank!r}, not from 0 to {len(addresses) - 1}, one for each of addresses={list(addresses)}."
            )
        parsed = [parse_address(address) for address in addresses]
        hosts = [host_key(address) for address in parsed]
        return cls(
            rank=rank,
            world_size=len(parsed),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_world_size=hosts.count(hosts[rank]),
            num_nodes=len(set(hosts)),
            addresses=tuple(map(str, parsed)),
            source=source,
            listen_fd=listen_fd,
            secret=secret,
        )

    @classmethod
    def from_tf_config(cls, value: str | Mapping[str, Any] | None = None) -> Cluster:
        """Reads TF_CONFIG: the chief is rank 0, then the workers follow; an evaluator is alone.

        Args:
          value: TF_CONFIG as a string or as a mapping. Defaults to the environment variable.

        Raises:
          ValueError: If it is not valid. The message has the rule, the value received and a corrected text to paste.

        >>> config = {"cluster": {"chief": ["host1:12345"], "worker": ["host2:12345"]},
        ...           "task": {"type": "worker", "index": 0}}
        >>> Cluster.from_tf_config(config).rank
        1
        """
        parsed = tf_config.parse(os.environ.get(tf_config.VARIABLE, "") if value is None else value)
        if parsed is None:
            return cls.alone()
        if parsed.job == "evaluator":
            return cls.alone(source=f"{tf_config.VARIABLE} (evaluator)")
        return cls.from_hosts(parsed.addresses, parsed.rank, source=tf_config.VARIABLE)

    def to_tf_config(self) -> str:
        """Returns the text of TF_CONFIG for this process; `{}` for a process that is alone without an address.

        >>> Cluster.from_hosts(["host1:12345"], rank=0).to_tf_config()
        '{"cluster": {"worker": ["host1:12345"]}, "task": {"type": "worker", "index": 0}}'
        """
        return tf_config.render(self.rank, self.addresses)

    def _error(self, rule: str, **received: Any) -> ConfigurationError:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        return ConfigurationError(f"{self.source} gives {values}: {rule}.")
