"""Plans the placement of each table of a layer with many tables. Pure: from sizes.

```
            rows                    columns                whole                   replicated
a worker    its rows                some columns of        the tables it owns      all tables
holds                               all rows
a step      u different ids of a    u ids go to all, who   u ids go to the owner,  a table of bytes B is
            worker fetch u rows     each send a part of    who sends u rows and    summed: 2 B (N - 1) / N
            and send u gradients    u rows                 takes u gradients
```

A sharded table never sends more than a replicated one, since a worker has no more different ids than there are rows.
But a worker waits for the rows in the forward pass. So small tables are replicated, and also tables with no more rows
than the ids that each worker looks up in a step, while there is memory for them.

Other tables are sharded by rows by default. By columns, all workers serve the same load whichever ids come, at the cost
of N times the ids, which are small compared to a wide row. A whole table moves the same bytes as one by rows, but from
one owner: tables are dealt so that owners hold and serve equally, which needs more tables than workers and no table
that is large compared to the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

from tfring.errors import ConfigurationError

KINDS = ("replicated", "rows", "whole", "columns")
SMALL_BYTES = 64 << 10  # of a table's values: up to this size SparseOptions sums gradients as dense ones
WIDE_COLUMNS = 32  # of a worker's part of a wide row: 128 bytes, which dwarf the 4 of an id


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """One table of a plan.

    Attributes:
      name: Name of the table.
      rows: Number of rows.
      width: Number of columns.
      kind: "replicated" (in full on each worker), "rows" or "columns" (sharded by these), or "whole" (in full on one
        worker).
      bytes_a_worker: Bytes of its values and their slots, on the worker that has most.
      owner: The rank that has a whole table; None for other kinds.
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
      world_size: Number of workers that the plan is for.
      tables: The tables, in the order in which they were given.

    Raises:
      ConfigurationError: If a whole table has no owner, or another table has one.
    """

    world_size: int
    tables: tuple[PlannedTable, ...]

    def __post_init__(self) -> None:
        for table in self.tables:
            if table.owner not in (range(self.world_size) if table.kind == "whole" else (None,)):
                raise ConfigurationError(
                    f"{table} has the wrong owner: a whole table has one, from 0 to {self.world_size - 1}, and no "
                    "other table has one. Make plans with tfring.parallel.plan_tables."
                )

    @property
    def kinds(self) -> dict[str, str]:
        """Returns a dict from the name of a table to "replicated", "rows", "whole" or "columns"."""
        return {table.name: table.kind for table in self.tables}

    @property
    def owners(self) -> dict[str, int]:
        """Returns a dict from the name of a whole table to the rank that has it."""
        return {table.name: table.owner for table in self.tables if table.owner is not None}

    @property
    def bytes_a_worker(self) -> int:
        """Returns the bytes of all tables on the worker that has most."""
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
    """Plans the placement of tables: small ones are replicated, others are sharded over the workers by rows.

    A pure function without communication: every rank computes the same plan. A table gets the first of the allowed
    `kinds` whose condition holds:

    1. "replicated" if its values take at most `small_bytes`, or the number of its ids that each worker looks up in a
       step is at least its number of rows;
    2. "columns" if it is so wide that each worker has 32 columns or more;
    3. "whole" if it takes no more than one worker's share of the bytes of all tables that are not replicated, and of
       the values that are looked up in them; owners are dealt by both, the largest first;
    4. "rows".

    If this plan needs more than `memory_bytes` on the worker that has most, further tables are sharded by rows, the
    largest first: whole tables, then replicated ones, then those by columns.

    Args:
      tables: A dict that maps the name of a table to its `(rows, width)`.
      world_size: Number of workers.
      kinds: The allowed kinds among "replicated", "rows", "whole" and "columns". Must include "rows". Defaults to
        "replicated" and "rows".
      slots: Number of values that the optimizer keeps per value of a table: 0 for SGD, 1 for Adagrad, 2 for Adam.
        Defaults to 1.
      lookups: A dict that maps the name of a table to the number of its ids that each worker looks up in a step.
        Defaults to None, unknown: only small tables are replicated, and with the default `kinds` the plan is the same
        for any number of workers that have the memory.
      small_bytes: Maximum size of the values of a table that counts as small. Defaults to 65,536.
      memory_bytes: Memory of a worker for tables and slots, in bytes. Defaults to None: no limit.
      itemsize: Bytes of a value. Defaults to 4.

    Returns:
      A `TablePlan`, for `tfring.layers.DistributedEmbedding(..., plan=plan)`.

    Raises:
      ConfigurationError: If `kinds` has another kind or lacks "rows", `world_size` is less than 1, `lookups` has an
        unknown table, or the tables do not fit into `memory_bytes` even if all are sharded by rows.

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
            f'`kinds` are {tuple(kinds)}, not some of {KINDS} that include "rows", the kind of all other tables.'
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
            f"No plan fits memory_bytes={memory_bytes:,}; the plan that needs least is\n{plan}\nUse more workers, "
            "fewer columns, or an optimizer with fewer slots."
        )
    return plan


def deal(costs: Mapping[str, tuple[int, ...]], world_size: int) -> dict[str, int]:
    """Deals things to workers, the largest first: each to the worker whose load, weighted by its costs, is least.

    Args:
      costs: A dict that maps the name of a thing to one or several costs, such as bytes and lookups. Costs are compared
        as shares of their totals. The largest thing is the one with the largest share of any cost.
      world_size: Number of workers.

    >>> deal({"a": (5, 0), "b": (3, 0), "c": (2, 0), "d": (1, 5)}, 2)
    {'d': 0, 'a': 1, 'b': 0, 'c': 0}
    """
    totals = [max(1, sum(column)) for column in zip(*costs.values(), strict=True)]
    shares = {  # exact, so that the first of equal workers is chosen
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
