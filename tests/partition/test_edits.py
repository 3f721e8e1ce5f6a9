"""Functions whose graphs are edited: every replica has what one process has, and no exchange is made in vain."""

import os
import pathlib
import subprocess
import sys

import pytest

_HERE = pathlib.Path(__file__).parent


# In a process of its own, in which TensorFlow has a thread for each replica that waits.
@pytest.mark.parametrize("script", [
    ["programs_of_rows.py"], ["fuzz.py", "0", "8"],
    pytest.param(["programs_of_rows.py", "whole"], marks=pytest.mark.long),
    pytest.param(["fuzz.py", "8", "30"], marks=pytest.mark.long),
])  # fmt: skip
def test_replicas_have_what_one_process_has(script):
    env = {**os.environ, "TF_NUM_INTEROP_THREADS": "32"}
    command = [sys.executable, str(_HERE / script[0]), *script[1:]]
    ended = subprocess.run(command, env=env, cwd=_HERE.parent, capture_output=True, text=True, timeout=420, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
