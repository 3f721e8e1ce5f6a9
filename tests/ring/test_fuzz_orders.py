"""Graphs that differ from rank to rank, and threads: a short run of fuzz_orders.py."""

import fuzz_orders
import pytest
import ranks


@pytest.mark.parametrize(("world_size", "seed"), [(2, 3), (3, 1)])
def test_unequal_graphs_have_the_gradients_of_one_process(world_size, seed):
    assert ranks.run(world_size, fuzz_orders.play_graphs, seed, 4, seconds=200) == [[]] * world_size


@pytest.mark.parametrize(("world_size", "seed"), [(2, 5), (4, 1)])
def test_threads_get_right_numbers_or_an_error(world_size, seed):
    assert ranks.run(world_size, fuzz_orders.play_threads, seed, 4, seconds=200) == [[]] * world_size
