"""Admission of gradients: bounds hold in every order of arrivals, and nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfring.servers.admission import Admission

WORKERS = [0, 1, 2, 3]


def simulate(admission, choose, rounds=60):
    """Has workers compute and arrive in an order that `choose(workers)` draws; returns all that was taken."""
    for worker in WORKERS:
        admission.begin(worker)
    computing, taken = set(WORKERS), []
    for _ in range(rounds):
        assert computing, "all wait: nobody will ever go on"
        worker = choose(sorted(computing))
        computing.remove(worker)
        admission.arrive(worker)
        while arrivals := admission.take():
            taken.append(arrivals)
            computing |= {a.worker for a in arrivals}
    return taken


@settings(deadline=None)
@given(st.data(), st.integers(0, 5))
def test_no_gradient_is_staler_than_the_bound_where_workers_wait(data, bound):
    admission = Admission(WORKERS, is_sync=False, max_staleness=bound, late="wait")
    taken = simulate(admission, lambda workers: data.draw(st.sampled_from(workers)))
    assert all(a.staleness <= bound and a.factor == 1.0 for arrivals in taken for a in arrivals)
    assert admission.version == len(taken)


@settings(deadline=None)
@given(st.data())
def test_a_bound_of_0_is_synchronous(data):
    admission = Admission(WORKERS, is_sync=False, max_staleness=0, late="wait")
    taken = simulate(admission, lambda workers: data.draw(st.sampled_from(workers)))
    assert taken and all([a.worker for a in arrivals] == WORKERS for arrivals in taken)


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["scale", "drop"]))
def test_late_gradients_are_scaled_or_dropped(data, bound, late):
    admission = Admission(WORKERS, is_sync=False, max_staleness=bound, late=late)
    taken = simulate(admission, lambda workers: data.draw(st.sampled_from(workers)))
    for [a] in taken:
        late_factor = 1 / a.staleness if late == "scale" and a.staleness else 0.0
        assert a.factor == (1.0 if a.staleness <= bound else late_factor)
    assert admission.version == sum(a.factor > 0 for [a] in taken)


def test_without_a_bound_every_gradient_is_an_update():
    admission = Admission(WORKERS, is_sync=False)
    taken = simulate(admission, lambda workers: workers[0])
    assert [[(a.worker, a.staleness) for a in arrivals] for arrivals in taken[:3]] == [[(0, 0)]] * 3


@pytest.mark.parametrize("backup", [0, 1, 2])
def test_a_synchronous_update_takes_the_first(backup):
    admission = Admission(WORKERS, is_sync=True, backup_workers=backup)
    for worker in WORKERS:
        admission.begin(worker)
    for worker in WORKERS[: 4 - backup - 1]:
        admission.arrive(worker)
        assert admission.take() == []
    admission.arrive(WORKERS[4 - backup - 1])
    assert [a.worker for a in admission.take()] == WORKERS[: 4 - backup]
    for worker in WORKERS[4 - backup :]:  # of the update before
        admission.arrive(worker)
        [late] = admission.take()
        assert (late.worker, late.factor) == (worker, 0.0)
    assert admission.version == 1


@pytest.mark.parametrize("leave", ["end", "lose"])
@pytest.mark.parametrize("options", [{"is_sync": True}, {"is_sync": False, "max_staleness": 1}])
def test_nobody_waits_for_a_worker_that_has_left(options, leave):
    admission = Admission([0, 1], **options)
    for worker in (0, 1):
        admission.begin(worker)
    admission.arrive(0)
    if admission.take():  # as far ahead as the bound allows
        admission.arrive(0)
    assert admission.take() == []
    getattr(admission, leave)(1)
    assert [a.worker for a in admission.take()] == [0]
