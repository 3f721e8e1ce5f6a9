"""Random functions of rows and their gradients; `fuzz.py` runs more of them."""

import pytest
from fuzz import run


@pytest.mark.parametrize("seed", range(24))
def test_what_is_said_of_a_random_function_is_true(seed):
    run(seed)


def test_most_is_placed():
    """An analysis that places nothing would never be wrong."""
    reasons = [reason for seed in range(100, 104) for reason in run(seed).reasons]
    assert reasons.count(None) > len(reasons) / 2
