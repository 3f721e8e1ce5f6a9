"""plan_tables: which tables are replicated, of which workers have rows or columns, and who owns whole ones."""

import pytest

from tfring.errors import ConfigurationError
from tfring.parallel import PlannedTable, TablePlan, plan_tables
from tfring.reduction.table_plan import KINDS, deal


def test_plans():
    tables = {"large": (1_000_000, 32), "middle": (5_000, 32), "small": (512, 32)}
    plan = plan_tables(tables, 4, slots=2)
    assert plan.kinds == {"large": "rows", "middle": "rows", "small": "replicated"}  # of 640,000 and 65,536 bytes
    assert [t.bytes_a_worker for t in plan.tables] == [250_000 * 32 * 12, 1250 * 32 * 12, 512 * 32 * 12]
    assert plan.bytes_a_worker == sum(t.bytes_a_worker for t in plan.tables)
    assert str(plan).splitlines()[2].split() == ["middle", "5,000", "32", "rows", "480,000"]
    assert plan_tables(tables, 4, small_bytes=65_535).kinds["small"] == "rows"
    assert plan_tables(tables, 3, itemsize=8).kinds["small"] == "rows"

    by_lookups = plan_tables(tables, 4, lookups={"middle": 5_000, "large": 5_000})
    assert by_lookups.kinds == {**plan.kinds, "middle": "replicated"}
    assert plan_tables(tables, 4, lookups={"middle": 4_999}).kinds == plan.kinds
    # Room for all but what is replicated of the middle one.
    room = by_lookups.bytes_a_worker - 1
    assert plan_tables(tables, 4, lookups={"middle": 5_000}, memory_bytes=room).kinds == plan.kinds
    assert plan_tables(tables, 4, lookups={"middle": 5_000}, memory_bytes=room + 1).kinds == by_lookups.kinds

    uneven = plan_tables({"t": (10, 1)}, 4, slots=0, small_bytes=0)
    assert uneven.bytes_a_worker == 3 * 4
    with pytest.raises(ConfigurationError, match=r"memory_bytes=1,000; .* is\ntable"):
        plan_tables(tables, 4, memory_bytes=1000)
    with pytest.raises(ConfigurationError, match="`lookups` has other, not among the tables large, middle, small"):
        plan_tables(tables, 4, lookups={"other": 1})
    with pytest.raises(ConfigurationError, match="`world_size` is 0, not 1 or more"):
        plan_tables(tables, 0)


def test_wide_and_whole_tables():
    tables = {"wide": (4_000, 128), "small": (10, 128), **{f"t{i}": (1000 * (9 - i), 16) for i in range(9)}}
    plan = plan_tables(tables, 3, kinds=KINDS, slots=0, small_bytes=10_000)
    assert plan.kinds == {"wide": "columns", "small": "replicated", **{f"t{i}": "whole" for i in range(9)}}
    assert plan.tables[0].bytes_a_worker == 4_000 * 43 * 4 and plan.tables[0].owner is None
    assert plan.owners == dict(zip((f"t{i}" for i in range(9)), (0, 1, 2, 2, 1, 0, 0, 1, 2), strict=True))
    assert plan.bytes_a_worker == 4_000 * 43 * 4 + 10 * 128 * 4 + 16_000 * 16 * 4
    assert str(plan).splitlines()[3].split() == ["t0", "9,000", "16", "whole", "at", "0", "576,000"]

    # Where each worker would have less than 32 columns, and where a table is more than a worker's share.
    assert plan_tables(tables, 5, kinds=KINDS).kinds["wide"] == "rows"
    assert plan_tables({"a": (20_000, 8), "b": (10_000, 8)}, 2, kinds=KINDS).kinds == {"a": "rows", "b": "whole"}
    often = plan_tables({"a": (10_000, 8), "b": (10_000, 8)}, 2, kinds=KINDS, lookups={"a": 9, "b": 8})
    assert often.kinds == {"a": "rows", "b": "whole"}
    without = plan_tables(tables, 3, kinds=("rows", "whole"))
    assert without.kinds == {**dict.fromkeys(tables, "whole"), "wide": "rows"}
    for kinds in (("replicated", "whole"), ("rows", "hash")):
        with pytest.raises(ConfigurationError, match=r"`kinds` are \('r.* that include \"rows\", the kind"):
            plan_tables(tables, 3, kinds=kinds)


def test_owners_of_a_plan():
    assert TablePlan(2, (PlannedTable("a", 3, 2, "whole", 24, 1),)).owners == {"a": 1}
    for kind, owner in (("whole", None), ("whole", 2), ("rows", 0)):
        with pytest.raises(ConfigurationError, match=f"owner={owner}.*from 0 to 1, and no other table has one"):
            TablePlan(2, (PlannedTable("a", 3, 2, kind, 24, owner),))


def test_memory_of_whole_tables():
    tables = {"a": (10_000, 8), "b": (9_000, 8), "c": (8_000, 8), "d": (100, 8)}
    options = {"kinds": KINDS, "slots": 0, "small_bytes": 4_000}
    plan = plan_tables(tables, 2, **options)
    assert plan.kinds == {"a": "whole", "b": "whole", "c": "whole", "d": "replicated"}
    assert plan.bytes_a_worker == 32 * (17_000 + 100)  # at rank 1, which has b and c
    assert plan_tables(tables, 2, memory_bytes=32 * 17_100, **options) == plan
    tight = plan_tables(tables, 2, memory_bytes=32 * 17_099, **options)
    assert tight.kinds == {**plan.kinds, "a": "rows"} and tight.owners == {"b": 0, "c": 1}
    assert tight.bytes_a_worker == 32 * (5_000 + 9_000 + 100)
    least = 32 * (5_000 + 4_500 + 4_000 + 50)
    assert set(plan_tables(tables, 2, memory_bytes=least, **options).kinds.values()) == {"rows"}
    with pytest.raises(ConfigurationError, match="memory_bytes=433,599; "):
        plan_tables(tables, 2, memory_bytes=least - 1, **options)


def test_tables_are_dealt_by_bytes_and_lookups():
    costs = {"often": (1, 90), "large": (90, 1), "also large": (80, 1), "seldom": (9, 8)}
    owners = deal(costs, 2)
    assert owners["large"] != owners["also large"]
    assert deal(dict(reversed(costs.items())), 2).keys() == owners.keys()
    for world_size in (1, 2, 3, 7):
        costs = {str(i): (i % 13 + 1, (7 * i) % 11) for i in range(60)}
        owners = deal(costs, world_size)
        for column in range(2):
            loads = [sum(costs[name][column] for name in costs if owners[name] == rank) for rank in range(world_size)]
            assert max(loads) <= 1.2 * sum(loads) / world_size
    assert deal({}, 3) == {}
