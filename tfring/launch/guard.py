"""Runs a job in its own process, so that it ends with all it started, whichever of the two processes is killed.

    tfring launch (1) ──fork──► the job (2) ──► worker, rank 0 ──► what the script starts
         │    ▲                   │        └──► worker, rank 1 ──► ...
         │    └── ends ───────────┤
         └── pipe, never written ►┘

(1) passes signals on and waits. If it is killed, even by SIGKILL, the pipe closes and (2) ends the workers.
If (2) is killed, the kernel kills the workers (their death signal). (1) adopts the processes that they started,
and ends them.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from tfring.launch import exit_codes, processes

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_guarded(job: Callable[[int], int]) -> int:
    """Runs `job(parent_gone)` in a child. `parent_gone` is a descriptor at end-of-file once this process is dead.

    The job starts with STOP_SIGNALS blocked and unblocks them when it can handle them.

    Returns:
      The result of `job`, or 128 + signal if it was killed.
    """
    processes.adopt_orphans()
    parent_gone, never_written = os.pipe()
    # Ctrl-C and the like wait until it is settled which process passes them on to which.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child == 0:
        os.close(never_written)
        _exit_with(job, parent_gone)
    os.close(parent_gone)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, lambda signum, _: processes.send_signal(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    code = os.waitstatus_to_exitcode(status)
    processes.end_descendants()
    if code < 0:
        print(f"tfring launch: killed by {signal.Signals(-code).name}; so were its workers.", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _exit_with(job: Callable[[int], int], parent_gone: int) -> None:
    code = exit_codes.INTERNAL_FAULT
    try:
        os.setsid()  # away from the terminal: its Ctrl-C goes to the parent, which passes it on once
        processes.adopt_orphans()
        code = job(parent_gone)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
