"""Plans of shards: every row once, as equal in bytes as can be, the same on every process."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tfring.servers.shard_plan import plan

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=12)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 2000), st.data())
def test_every_row_is_on_one_server(shapes, num_servers, split_bytes, data):
    can_split = [data.draw(st.booleans()) for _ in shapes]
    spans = plan(shapes, [4] * len(shapes), can_split, num_servers, split_bytes)
    for variable, shape in enumerate(shapes):
        of_variable = [p for p in spans if p.variable == variable]
        rows = shape[0] if shape else 1
        assert [row for p in of_variable for row in range(p.begin, p.end)] == list(range(rows))
        assert len({p.server for p in of_variable}) == len(of_variable)
        is_split = len(of_variable) > 1
        assert all(p.is_full != is_split for p in of_variable)
        assert not is_split or (can_split[variable] and math.prod(shape) * 4 >= split_bytes)


@settings(deadline=None)
@given(SHAPES, st.integers(2, 4))
def test_the_fullest_server_has_one_variable_more_than_the_emptiest_at_most(shapes, num_servers):
    spans = plan(shapes, [4] * len(shapes), [False] * len(shapes), num_servers)
    loads = [sum(4 * math.prod(shapes[p.variable]) for p in spans if p.server == s) for s in range(num_servers)]
    assert max(loads) - min(loads) <= max((4 * math.prod(shape) for shape in shapes), default=0)


def test_a_large_table_is_cut_into_rows_and_small_variables_fill_up():
    spans = plan([(10, 100), (3, 5), (400,)], [4, 4, 4], [True] * 3, 3, split_bytes=4000)
    assert [tuple(p) for p in spans] == [
        (0, 0, 0, 3, False),
        (0, 1, 3, 6, False),
        (0, 2, 6, 10, False),
        (1, 1, 0, 3, True),
        (2, 0, 0, 400, True),
    ]
