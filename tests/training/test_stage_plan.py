"""plan_stages: with which layers stages begin, against all there are."""

import itertools
import random

import pytest

from tfring.errors import ConfigurationError
from tfring.parallel import LayerCost, plan_schedule, plan_stages


def some_layers(generator, count):
    return [
        LayerCost(
            f"layer {number}",
            generator.choice((0.0, 1.0, 2.0, 3.0, 5.0)),
            *(generator.randrange(10) for _ in range(3)),
            may_begin=generator.random() < 0.8,
        )
        for number in range(count)
    ]


def every_plan(layers, num_stages, held, recompute):
    """Yields the begins of each division, seconds of the slowest stage, most bytes of a stage, bytes that cross."""
    allowed = [place for place in range(1, len(layers)) if layers[place].may_begin]
    for cuts in itertools.combinations(allowed, num_stages - 1):
        seconds, held_bytes, crossing = [], [], 0
        for number, (begin, end) in enumerate(itertools.pairwise([0, *cuts, len(layers)])):
            part = layers[begin:end]
            into = layers[begin].crossing_bytes if number else 0
            crossing += into
            twice = recompute and number < num_stages - 1
            seconds.append(sum(layer.seconds for layer in part) * (4 / 3 if twice else 1))
            kept = sum(layer.activation_bytes for layer in part) * (1 if recompute else held[number])
            held_bytes.append(sum(layer.weight_bytes for layer in part) + held[number] * into + kept)
        yield cuts, max(seconds), max(held_bytes), crossing


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_better(seed):
    generator = random.Random(seed)
    layers = some_layers(generator, generator.randrange(4, 10))
    options = {"schedule": generator.choice(("1f1b", "gpipe")), "num_microbatches": generator.choice((1, 2, 5))}
    num_stages, recompute = generator.randrange(1, 5), generator.random() < 0.4
    held = plan_schedule(options["schedule"], num_stages, options["num_microbatches"]).most_held()
    slack, memory = generator.choice((0.0, 0.3)), generator.choice((None, 40, 100))
    options |= {"recompute": recompute, "slack": slack, "memory_bytes": memory}
    every = list(every_plan(layers, num_stages, held, recompute))
    fitting = [each for each in every if memory is None or each[2] <= memory]
    if not fitting:
        with pytest.raises(ConfigurationError, match="memory_bytes" if every else "may begin a stage"):
            plan_stages(layers, num_stages, **options)
        return
    plan = plan_stages(layers, num_stages, **options)
    names = [layer.name for layer in layers]
    assert [name for stage in plan.stages for name in stage.layers] == names
    [(_, slowest, largest, crossing)] = [
        each for each in every if [names[place] for place in each[0]] == plan.begins
    ]  # it is among those that are allowed
    assert max(stage.seconds for stage in plan.stages) == pytest.approx(slowest)
    assert max(stage.bytes_a_worker for stage in plan.stages) == largest
    assert sum(stage.crossing_bytes for stage in plan.stages) == crossing
    least = min(each[1] for each in fitting)
    near = [each for each in fitting if each[1] <= least * (1 + slack) + 1e-9]
    assert (crossing, slowest) == pytest.approx(min((each[3], each[1]) for each in near))


def test_idle_time_of_unequal_stages():
    layers = [LayerCost("a", 3.0), LayerCost("b", 6.0)]
    plan = plan_stages(layers, 2, num_microbatches=4)
    # Stage 2 waits for one forward pass of 1 and computes 4 x 6; then stage 1 computes a backward pass of 2.
    assert plan.begins == ["b"] and plan.seconds == pytest.approx(27)
    assert plan.bubble == pytest.approx(1 - (4 * 3 + 4 * 6) / (2 * 27))
    equal = plan_stages([LayerCost("a", 3.0), LayerCost("b", 3.0)], 2, num_microbatches=4)
    assert equal.bubble == pytest.approx(plan_schedule("1f1b", 2, 4).bubble()) == pytest.approx(1 / 5)
    assert plan_stages(layers, 1).bubble == pytest.approx(0)
    # The last stage computes once, in its backward pass; the first twice.
    again = plan_stages([LayerCost("a", 3.0), LayerCost("b", 4.0)], 2, num_microbatches=2, recompute=True)
    assert [(s.forward_seconds, s.backward_seconds) for s in again.stages] == [(1, 3), (0, 4)]
    assert again.seconds == pytest.approx(1 + 4 + 4 + 3)


def test_memory_moves_a_cut():
    layers = [LayerCost(name, 1.0, 10, 5, 2) for name in "abcdef"]
    assert plan_stages(layers, 2).begins == ["d"]
    # Stage 1 holds the activations of two microbatches, stage 2 those of one and what comes in.
    assert [stage.bytes_a_worker for stage in plan_stages(layers, 2).stages] == [3 * 20, 3 * 15 + 2]
    assert plan_stages(layers, 2, memory_bytes=60).begins == ["d"]
    with pytest.raises(ConfigurationError, match=r"memory_bytes=59; the plan that needs least is\nstage") as raised:
        plan_stages(layers, 2, memory_bytes=59)
    assert "a to c" in str(raised.value) and "recompute=True" in str(raised.value)
    heavy = [LayerCost("table", 0.1, 100), *layers]
    assert plan_stages(heavy, 2, slack=0.0).begins == ["d"]
    assert plan_stages(heavy, 2, memory_bytes=130).begins == ["b"]


def test_what_is_refused():
    layers = [LayerCost("a", 1.0), LayerCost("b", 1.0, may_begin=False), LayerCost("c", 1.0)]
    with pytest.raises(ConfigurationError, match=r"`num_stages` is 3, but only 1 layers may begin .*: 'c'"):
        plan_stages(layers, 3)
    with pytest.raises(ConfigurationError, match=r"`num_stages` is 1, but only 0 layers .*: none"):
        plan_stages([], 1)
    with pytest.raises(ConfigurationError, match="`num_stages` is 0"):
        plan_stages(layers, 0)
    with pytest.raises(ConfigurationError, match=r"`slack` is -0\.1, not a number of at least 0"):
        plan_stages(layers, 2, slack=-0.1)
