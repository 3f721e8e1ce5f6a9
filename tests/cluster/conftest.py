from __future__ import annotations

import contextlib
import subprocess

import pytest
from commands import environment


@pytest.fixture
def start():
    """Starts a process; whatever is left of it is killed after the test."""
    with contextlib.ExitStack() as stack:

        def run(command, **variables):
            process = subprocess.Popen(
                command,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield run
