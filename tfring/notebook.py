"""Trains on several workers from a notebook: `tfring.notebook.run(fn, n=2)` is `tfring launch` of one function."""

from __future__ import annotations

import ast
import dis
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfring.cluster import detection
from tfring.errors import ConfigurationError, TfringError
from tfring.functions import not_plain

__all__ = ["run"]

_FAILED = re.compile(r"tfring launch: (.*)")
_RULE = "A function that `run` starts on workers is made by `def`, at the top level of a notebook or a module"
_LAST_LINES = """\

if __name__ == "__main__":
    import json, pathlib, tfring
    from tfring.notebook import encoded
    result = encoded({name}(*json.loads({args!r})))
    if tfring.is_chief():
        pathlib.Path({result!r}).write_text(result)
"""


def run(fn: Callable[..., Any], n: int = 2, args: Sequence[Any] = ()) -> Any:
    """Starts `n` worker processes on this machine, which all call `fn(*args)`, and returns rank 0's result.

    The workers are those of `tfring launch`, in a ring of their own; what they print is shown as they print it, that of
    other ranks than 0 with "[rank] " in front. The notebook's own TensorFlow is not touched, so cells may have used it.

    Args:
      fn: A function that makes the strategy, the model and the data, and trains. A function of the notebook goes to
        the workers as its source, with what it uses of the notebook: modules, functions, and numbers, texts, lists
        and dicts of such.
      n: The number of workers, 1 or more.
      args: Arguments for `fn`, of the same plain values; what is larger is read in `fn`.

    Returns:
      What `fn` returns on rank 0: None, numbers, texts, lists and dicts of such, which come as JSON; tuples come back
      as lists.

    Raises:
      ConfigurationError: `fn`, `n` or `args` is something else, or this process is a worker itself.
      TfringError: A worker failed; the message names the first, and its traceback is printed above.

    >>> def train(epochs):
    ...     import tfring
    ...     return {"workers": tfring.world_size(), "epochs": epochs}
    >>> run(train, n=0)
    Traceback (most recent call last):
    tfring.errors.ConfigurationError: `n` is 0, not a number of workers, 1 or more.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"`n` is {n!r}, not a number of workers, 1 or more.")
    wrong = not_plain(list(args))
    if wrong is not None:
        raise ConfigurationError(
            f"`args` has {wrong}, which JSON cannot write. Arguments of a function on workers are plain values. Read "
            "arrays and datasets in the function."
        )
    if detection.find(os.environ) is not None:
        raise ConfigurationError(
            "`tfring.notebook.run` was called on a worker, and it starts workers. Call the function itself, or run it "
            "where no launcher has started the program."
        )
    source = source_of(fn)
    with tempfile.TemporaryDirectory(prefix="tfring-notebook-") as folder:
        script, result = pathlib.Path(folder, "notebook.py"), pathlib.Path(folder, "result.json")
        last = _LAST_LINES.format(name=fn.__name__, args=json.dumps(list(args)), result=str(result))
        script.write_text(source + last)
        said = _run([sys.executable, "-m", "tfring.launch", "-n", str(n), str(script)])
        if said is not None:
            raise TfringError(f"`{fn.__name__}` failed on {n} workers: {said} Its traceback is printed above.")
        return json.loads(result.read_text())


def encoded(value: Any) -> str:
    """Returns the JSON of what a function returns on a worker.

    Raises:
      ConfigurationError: JSON does not have it.

    >>> encoded({"loss": [0.5]})
    '{"loss": [0.5]}'
    """
    wrong = not_plain(value)
    if wrong is not None:
        raise ConfigurationError(
            f"The function returned {wrong}, which JSON cannot write. Write arrays and models to files (`tfring.save`)."
        )
    return json.dumps(value, default=lambda number: number.item())


def source_of(fn: Any) -> str:
    """Returns the text of a script that defines `fn` and what it uses of its notebook.

    Raises:
      ConfigurationError: It cannot be made again from its source, or uses what cannot.
    """
    _check(fn)
    if fn.__module__ != "__main__":
        return f"from {fn.__module__} import {fn.__name__}\n"
    lines = ["from __future__ import annotations"]
    functions: dict[str, str] = {}  # their sources, by name
    pending, met = [fn], {fn.__name__}
    while pending:
        function = pending.pop()
        functions[function.__name__] = text = textwrap.dedent(inspect.getsource(function))
        for name in _names(function.__code__, text):
            if name in met or name not in function.__globals__:
                continue
            met.add(name)
            value = function.__globals__[name]
            if getattr(value, "__module__", None) == "__main__" and getattr(value, "__name__", None) == name:
                _check(value)
                pending.append(value)
            else:
                lines.append(_definition(name, value, function.__name__))
    return "\n".join([*lines, "", *reversed(functions.values())])


def _check(fn: Any) -> None:
    if isinstance(fn, types.FunctionType) and fn.__name__.isidentifier() and fn.__qualname__ == fn.__name__:
        try:
            inspect.getsource(fn)
            return
        except OSError:
            pass
    raise ConfigurationError(
        f"`run` cannot start {fn!r} on workers. {_RULE}. Write it in a cell, without a class or function around it."
    )


def _names(code: types.CodeType, text: str) -> Iterator[str]:
    """Yields the global names that a function uses: in its body, and in its decorators and defaults."""
    codes = [code]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    [definition] = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    defaults = [default for default in definition.args.kw_defaults if default is not None]
    for expression in [*definition.decorator_list, *definition.args.defaults, *defaults]:
        yield from (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))


def _definition(name: str, value: Any, user: str) -> str:
    """Returns the line that gives a worker what a function uses under a name."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, own_name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in (None, "__main__") and own_name.isidentifier():
        return f"from {module} import {own_name} as {name}"
    if not_plain(value) is None:
        return f"{name} = __import__('json').loads({encoded(value)!r})"
    raise ConfigurationError(
        f"`{user}` uses {name!r} of its notebook, a {type(value).__name__}, and only modules, functions and plain "
        "values go to workers. Make it in the function."
    )


def _run(command: Sequence[str]) -> str | None:
    """Runs the launcher and prints what it prints; returns None, or what it says of the worker that failed."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    said = "the launcher ended."
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes from here alone
    ) as launcher:
        assert launcher.stdout is not None
        try:
            for line in launcher.stdout:
                print(line, end="", flush=True)
                if found := _FAILED.match(line):
                    said = found.group(1)
        except BaseException:
            launcher.send_signal(signal.SIGINT)
            raise
    return said if launcher.returncode else None
