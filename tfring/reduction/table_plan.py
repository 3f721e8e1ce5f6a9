"""Plans the placement of each table of a layer with many: pure, from sizes.

```
            rows                    columns                whole                   replicated
a worker    its rows                some columns of        the tables it owns      all tables
holds                               all rows
a step      u different ids of a    u ids go to all, who   u ids go to the owner,  a table of bytes B is
            worker fetch u rows     each send a part of    who sends u rows and    summed: 2 B (N - 1) / N
            and send u gradients    u rows                 takes u gradients
```

A divided table never sends more than a replicated one, for a worker has no more different ids than there are rows. But
a worker waits for the rows in the forward pass. So tables are replicated that are small, and those of which each worker
looks up as many ids a step as they have rows, while there is room.

Rows are the way to divide others. By columns each worker serves as much as the others whichever ids come, at the price
of N times the ids: few beside a wide row. A whole table moves as many bytes as one by rows, from one owner: tables are
dealt so that owners hold and serve alike, which takes more tables than workers and none that is large beside the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

from tfring.errors import ConfigurationError

KINDS = ("replicated", "rows", "whole", "columns")
SMALL_BYTES = 64 << 10  # of a table's values: up to here SparseOptions sums gradients as dense ones
WIDE_COLUMNS = 32  # of a worker's part of a wide row: its 128 bytes make little of the 4 of an id


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """One table of a plan.

    Attributes:
      name: Of the table.
      rows: How many it has.
      width: How many columns.
      kind: "replicated", whole at each worker; "rows" or "columns", divided by those; or "whole", at one worker.
      bytes_a_worker: Of its values and their slots, at the worker that has most.
      owner: The rank that has a whole table; else None.
    """

    name: str
    rows: int
    width: int
    kind: str
    bytes_a_worker: int
    owner: int | None = None


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The placement of each table; `str(plan)` is a table of it.

    Attributes:
      world_size: How many workers it is computed for.
      tables: In the order they were given.

    Raises:
      ConfigurationError: For a whole table without an owner, and an owner of another.
    """

    world_size: int
    tables: tuple[PlannedTable, ...]

    def __post_init__(self) -> None:
        for table in self.tables:
            if table.owner not in (range(self.world_size) if table.kind == "whole" else (None,)):
                raise ConfigurationError(
                    f"{table} has the wrong owner: a full table has one, from 0 to {self.world_size - 1}, and no other "
                    "table has one. Make plans by tfring.parallel.plan_tables."
                )

    @property
    def kinds(self) -> dict[str, str]:
        """Returns "replicated", "rows", "whole" or "columns" by the name of a table."""
        return {table.name: table.kind for table in self.tables}

    @property
    def owners(self) -> dict[str, int]:
        """Returns the rank that has a whole table, by the table's name."""
        return {table.name: table.owner for table in self.tables if table.owner is not None}

    @property
    def bytes_a_worker(self) -> int:
        """Returns the bytes of all tables at the worker that has most."""
        owned = [0] * self.world_size
        for table in self.tables:
            if table.owner is not None:
                owned[table.owner] += table.bytes_a_worker
        return sum(table.bytes_a_worker for table in self.tables if table.owner is None) + max(owned)

    def __str__(self) -> str:
        lines = [
            ("table", "rows", "width", "kind", "bytes a worker"),
            *((t.name, f"{t.rows:,}", str(t.width), _shown_kind(t), f"{t.bytes_a_worker:,}") for t in self.tables),
            (f"all, of {self.world_size} workers", "", "", "", f"{self.bytes_a_worker:,}"),
        ]
        w = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            f"{name:<{w[0]}}  {rows:>{w[1]}}  {width:>{w[2]}}  {kind:<{w[3]}}  {held:>{w[4]}}"
            for name, rows, width, kind, held in lines
        )


def _shown_kind(table: PlannedTable) -> str:
    return table.kind if table.owner is None else f"{table.kind} at {table.owner}"


def plan_tables(
    tables: Mapping[str, tuple[int, int]],
    world_size: int,
    *,
    kinds: Sequence[str] = ("replicated", "rows"),
    slots: int = 1,
    lookups: Mapping[str, int] | None = None,
    small_bytes: int = SMALL_BYTES,
    memory_bytes: int | None = None,
    itemsize: int = 4,
) -> TablePlan:
    """Places tables: small ones are replicated, the rows of others sharded over the workers.

    A pure function without communication: every rank finds the same plan. Of the `kinds` that are allowed a table is,
    the first that holds,

    1. "replicated" if its values take at most `small_bytes`, or each worker looks up at least as many ids of it a step
       as it has rows;
    2. "columns" if it is so wide that each worker has 32 columns or more;
    3. "whole" if it takes no more than one worker's share of the bytes of all tables that are not replicated, and of
       the values that are looked up in them; owners are dealt by both, the largest first;
    4. "rows".

    Where that takes more than `memory_bytes` at the worker that has most, tables are divided by rows after all, the
    largest first: whole ones, then replicated ones, then those by columns.

    Args:
      tables: By name `(rows, width)`.
      world_size: How many workers.
      kinds: Which are allowed, of "replicated", "rows", "whole" and "columns", and always "rows". Default: "replicated"
        and "rows".
      slots: How many values the optimizer keeps for each of a table's: 0 for SGD, 1 for Adagrad, 2 for Adam.
      lookups: By name, how many ids of a table each worker looks up in a step. Default: unknown, and small tables alone
        are replicated; the plan of default `kinds` then is the same for any number of workers that have the memory.
      small_bytes: Default 65,536.
      memory_bytes: What a worker has for tables and slots. Default: enough.
      itemsize: Bytes of a value. Default 4.

    Returns:
      A `TablePlan`, for `tfring.layers.DistributedEmbedding(..., plan=plan)`.

    Raises:
      ConfigurationError: For other kinds; for no workers; for lookups of an unknown table; where all rows divided do
        not fit into `memory_bytes`.

    >>> print(plan_tables({"items": (1_000_000, 32), "colours": (12, 32)}, 4))
    table                   rows  width  kind        bytes a worker
    items              1,000,000     32  rows            64,000,000
    colours                   12     32  replicated           3,072
    all, of 4 workers                                    64,003,072

    >>> sizes = {"items": (9_000, 32), "users": (6_000, 32), "tags": (5_000, 32), "texts": (5_000, 256)}
    >>> print(plan_tables(sizes, 2, kinds=("replicated", "rows", "whole", "columns")))
    table               rows  width  kind        bytes a worker
    items              9,000     32  whole at 0       2,304,000
    users              6,000     32  whole at 1       1,536,000
    tags               5,000     32  whole at 1       1,280,000
    texts              5,000    256  columns          5,120,000
    all, of 2 workers                                 7,936,000
    """
    if not {"rows"} <= set(kinds) <= set(KINDS):
        raise ConfigurationError(
            f'`kinds` are {tuple(kinds)}, not of {KINDS}, with "rows" for what is none of the others.'
        )
    if world_size < 1:
        raise ConfigurationError(f"`world_size` is {world_size!r}, not 1 or more.")
    lookups = lookups or {}
    if unknown := sorted(lookups.keys() - tables.keys()):
        raise ConfigurationError(f"`lookups` has {', '.join(unknown)}, not among the tables {', '.join(tables)}.")

    def is_replicated(name: str) -> bool:
        rows, width = tables[name]
        return rows * width * itemsize <= small_bytes or lookups.get(name, 0) >= rows

    chosen = {name: "replicated" if "replicated" in kinds and is_replicated(name) else "rows" for name in tables}
    costs = {
        name: (rows * width, lookups.get(name, 0) * width)
        for name, (rows, width) in tables.items()
        if chosen[name] == "rows"
    }
    totals = [sum(column) for column in zip(*costs.values(), strict=True)]
    for name, cost in costs.items():
        if "columns" in kinds and tables[name][1] // world_size >= WIDE_COLUMNS:
            chosen[name] = "columns"
        elif "whole" in kinds and all(own * world_size <= total for own, total in zip(cost, totals, strict=True)):
            chosen[name] = "whole"

    def planned() -> TablePlan:
        owners = deal({name: costs[name] for name, kind in chosen.items() if kind == "whole"}, world_size)
        held = {
            name: {"rows": -(-rows // world_size) * width, "columns": rows * -(-width // world_size)}
            for name, (rows, width) in tables.items()
        }
        return TablePlan(
            world_size,
            tuple(
                PlannedTable(
                    name,
                    rows,
                    width,
                    chosen[name],
                    held[name].get(chosen[name], rows * width) * itemsize * (1 + slots),
                    owners.get(name),
                )
                for name, (rows, width) in tables.items()
            ),
        )

    plan = planned()
    if memory_bytes is None:
        return plan
    for kind in ("whole", "replicated", "columns"):
        for table in sorted(plan.tables, key=lambda table: -table.bytes_a_worker):
            if table.kind == kind and plan.bytes_a_worker > memory_bytes:
                chosen[table.name] = "rows"
                plan = planned()
    if plan.bytes_a_worker > memory_bytes:
        raise ConfigurationError(
            f"No plan fits memory_bytes={memory_bytes:,}; the plan that takes least is\n{plan}\nTake more workers, "
            "fewer columns, or an optimizer with fewer slots."
        )
    return plan


def deal(costs: Mapping[str, tuple[int, ...]], world_size: int) -> dict[str, int]:
    """Deals things to workers: the largest first, each to the worker with the least of what it costs.

    Args:
      costs: By name, one or several costs of each thing, such as bytes and lookups, which are compared as shares of
        their totals. The largest thing is that with the largest share of any.
      world_size: How many workers.

    >>> deal({"a": (5, 0), "b": (3, 0), "c": (2, 0), "d": (1, 5)}, 2)
    {'d': 0, 'a': 1, 'b': 0, 'c': 0}
    """
    totals = [max(1, sum(column)) for column in zip(*costs.values(), strict=True)]
    shares = {  # exact, so that among equal workers the first is taken
        name: [Fraction(own, total) for own, total in zip(cost, totals, strict=True)] for name, cost in costs.items()
    }
    loads = [[Fraction(0)] * len(totals) for _ in range(world_size)]
    owners = {}
    for name in sorted(shares, key=lambda name: -max(shares[name])):
        share = shares[name]
        owner = min(range(world_size), key=lambda rank: sum(a * b for a, b in zip(loads[rank], share, strict=True)))
        loads[owner] = [a + b for a, b in zip(loads[owner], share, strict=True)]
        owners[name] = owner
    return owners
