"""What worker 0 has posted on a server is there as long as a worker may ask for it."""

import numpy as np
import pytest

from tfring.cluster.roles import Roles
from tfring.servers.admission import Admission
from tfring.servers.service import Service


@pytest.fixture
def service():
    def no_update(*_):
        raise AssertionError

    roles = Roles(("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:3",), True, 0, "a test")
    made = Service(roles, {}, no_update, lambda: Admission([0, 1], is_sync=False), needs_all=False)
    made._position = {"fit": 2}  # so that no worker comes back
    return made


def post(service, worker, name, *arrays):
    with service._changed:
        return service._post(worker, {"name": name}, list(arrays))[1]


def test_posts_that_all_workers_have_are_dropped(service):
    for number in range(100):
        for worker in (0, 1):
            [value] = post(service, worker, f"value {number}", *([np.full(3, number)] if worker == 0 else []))
            assert value.tolist() == [number] * 3
            [value] = post(service, worker, f"value {number}", np.zeros(3))  # repeated after a link broke
            assert value.tolist() == [number] * 3
        assert len(service._board) <= 2


def test_posts_that_a_worker_may_ask_for_stay(service):
    post(service, 0, "value 0 in a graph", np.zeros(1))
    for number in range(1, 10):
        post(service, 0, f"value {number}", np.full(1, number))
    assert len(service._board) == 10  # worker 1 has asked for none
    assert post(service, 1, "value 9")[0] == [9]
    post(service, 0, "value 10", np.zeros(1))
    assert set(service._board) == {"value 0 in a graph", "value 9", "value 10"}


def test_posts_stay_where_a_worker_may_come_back(service):
    service._position = {"fit": 1}
    for number in range(10):
        for worker in (0, 1):
            post(service, worker, f"value {number}", *([np.zeros(1)] if worker == 0 else []))
    assert len(service._board) == 10
