"""The tables of a pipeline, played."""

import pytest

from tfring.errors import ConfigurationError
from tfring.reduction.pipeline_schedule import BACKWARD, FORWARD, SCHEDULES, Schedule, Task, plan_schedule

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 7) for microbatches in (1, 2, 3, 8)]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_pass_once_and_in_order(kind, stages, microbatches):
    schedule = plan_schedule(kind, stages, microbatches)
    begun = schedule.played()
    for stage, tasks in enumerate(schedule.tasks):
        for each in (FORWARD, BACKWARD):  # both in the order of microbatches: so are messages
            assert [task.microbatch for task in tasks if task.kind == each] == list(range(microbatches))
        for microbatch in range(microbatches):
            forward, backward = Task(FORWARD, microbatch), Task(BACKWARD, microbatch)
            assert begun[stage][forward] + 1 <= begun[stage][backward]
            if stage:
                assert begun[stage - 1][forward] + 1 <= begun[stage][forward]
                assert begun[stage][backward] + 2 <= begun[stage - 1][backward]
    assert schedule.bubble() == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_1f1b_holds_less(stages, microbatches):
    held = plan_schedule("1f1b", stages, microbatches).most_held()
    assert held == tuple(min(stages - stage, microbatches) for stage in range(stages))
    assert plan_schedule("gpipe", stages, microbatches).most_held() == (microbatches,) * stages


def test_drawing():
    lines = plan_schedule("gpipe", 3, 12).draw().splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[2].startswith("stage 3  ... ... F0  F1 ")
    assert "B11----" in lines[0] and lines[0].count("...") == 2 * 3


def test_a_table_that_stands_still():
    late = (Task(BACKWARD, 0), Task(FORWARD, 0))
    with pytest.raises(ValueError, match="comes to a standstill"):
        Schedule(1, (late,)).played()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2), "`schedule` is 'zigzag'"),
        (("1f1b", 2, 0), "`num_microbatches` is 0"),
        (("1f1b", 2, 2.0), "`num_microbatches` is 2.0"),
        (("1f1b", 2, True), "`num_microbatches` is True"),
        (("gpipe", 0, 2), "`num_stages` is 0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        plan_schedule(*arguments)
