"""Random functions of rows and their gradients; `fuzz.py` runs more of them."""

import pytest
from fuzz import run


@pytest.mark.parametrize("seed", [
    *range(10), 5034,  # of the last: lists in loops, of two replicas
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 30)),
])  # fmt: skip
def test_replicas_of_one_process_have_what_one_has(seed):
    run(seed)
