"""Thread-pool map with one deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MAX_THREADS = 32


def in_parallel(
    task: Callable[[_Item], _Result], items: Iterable[_Item], seconds: float, max_threads: int = _MAX_THREADS
) -> dict[_Item, _Result]:
    """Calls `task` on every item.

    Returns:
      The results available after `seconds`. Calls that have not ended by then continue in daemon threads, without a
      result.

    >>> in_parallel(lambda seconds: time.sleep(seconds), [0.0, 60.0], 0.5)
    {0.0: None}
    """
    todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[_Item, _Result]] = queue.SimpleQueue()
    num_items = 0
    for item in items:
        todo.put(item)
        num_items += 1
    deadline = time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            done.put((item, task(item)))

    for _ in range(min(max_threads, num_items)):
        threading.Thread(target=work, daemon=True).start()
    results: dict[_Item, _Result] = {}
    while len(results) < num_items:
        try:
            item, result = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        results[item] = result
    return results
