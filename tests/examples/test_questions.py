"""The programs of docs/questions.md: two workers have the weights of one process."""

from __future__ import annotations

import os
import pathlib
import re

import numpy as np
from harness import workers

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "questions.md"
BEGIN, *PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def weights_of(programs, folder, num_workers):
    """Runs programs, one after another; returns the weights that each has trained."""
    os.makedirs(folder, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        found = []
        for program in programs:
            names = {"__name__": "__main__"}
            exec(BEGIN + program, names)
            assert names["strategy"].num_replicas_in_sync == num_workers
            found.append(names["model"].get_weights())
            names["strategy"].close()
        return found
    finally:
        os.chdir(before)


def test_the_programs_of_the_page(tmp_path):
    assert len(PROGRAMS) == 7
    [alone] = workers(1).run(weights_of, PROGRAMS, str(tmp_path / "one"), 1)
    for ranks in workers(2).run(weights_of, PROGRAMS, str(tmp_path / "two"), 2):
        for program, weights, expected in zip(PROGRAMS, ranks, alone, strict=True):
            for weight, wanted in zip(weights, expected, strict=True):
                np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=1e-5, err_msg=program)
