"""The short run of soak.py; the long one is a script."""

import soak


def test_what_ranks_hold_stays_as_it_is():
    *legs, summary = soak.run(legs=9, leg_seconds=1.0, pause_seconds=0.002)
    assert len(legs) == 9 and "resident memory at most" in summary
