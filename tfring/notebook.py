"""Trains on several workers from a notebook: `tfring.notebook.run(fn, n=2)` is `tfring launch` for one function."""

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
from tfring.functions import describe_non_json_part

__all__ = ["run"]

_FAILED = re.compile(r"tfring launch: (.*)")
_RULE = "A function that `run` starts on workers must be defined with `def`, at the top level of a notebook or a module"
_LAST_LINES = """\

if __name__ == "__main__":
    import json, pathlib, tfring
    from tfring.notebook import encoded
    result = encoded({name}(*json.loads({args!r})))
    if tfring.is_chief():
        pathlib.Path({result!r}).write_text(result)
"""


def run(fn: Callable[..., Any], n: int = 2, args: Sequence[Any] = ()) -> Any:
    """Starts `n` worker processes on this machine, calls `fn(*args)` in each, and returns the result of rank 0.

    The workers are those of `tfring launch` and form their own ring. Their output is shown as they print it; lines of
    ranks other than 0 begin with "[rank] ". The notebook's own TensorFlow is not touched, so cells may have used it.

    Args:
      fn: A function that creates the strategy, the model and the data, and trains. A function of the notebook is sent
        to the workers as source code, together with everything of the notebook that it uses: modules, functions,
        numbers, strings, and lists and dicts of these.
      n: Number of workers, at least 1. Defaults to 2.
      args: Arguments for `fn`, of the same plain values. Read larger data in `fn`.

    Returns:
      The result of `fn` on rank 0, sent as JSON: None, numbers, strings, and lists and dicts of these. Tuples become
      lists.

    Raises:
      ConfigurationError: If `fn`, `n` or `args` is something else, or if this process is a worker itself.
      TfringError: If a worker failed. The message names the first one, and its traceback is printed above.

    >>> def train(epochs):
    ...     import tfring
    ...     return {"workers": tfring.world_size(), "epochs": epochs}
    >>> run(train, n=0)
    Traceback (most recent call last):
    tfring.errors.ConfigurationError: `n` is 0, not a number of workers (an integer of at least 1).
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"`n` is {n!r}, not a number of workers (an integer of at least 1).")
    wrong = describe_non_json_part(list(args))
    if wrong is not None:
        raise ConfigurationError(
            f"`args` has {wrong}, which JSON cannot represent. Arguments of a function on workers must be plain "
            "values. Read arrays and datasets in the function."
        )
    if detection.find(os.environ) is not None:
        raise ConfigurationError(
            "`tfring.notebook.run`, which starts workers, was called on a worker. Call the function itself, or run it "
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
    """Returns the result of a function on a worker as JSON.

    Raises:
      ConfigurationError: If JSON cannot represent it.

    >>> encoded({"loss": [0.5]})
    '{"loss": [0.5]}'
    """
    wrong = describe_non_json_part(value)
    if wrong is not None:
        raise ConfigurationError(
            f"The function returned {wrong}, which JSON cannot represent. Write arrays and models to files "
            "(`tfring.save`)."
        )
    return json.dumps(value, default=lambda number: number.item())


def source_of(fn: Any) -> str:
    """Returns the text of a script that defines `fn` and everything of the notebook that it uses.

    Raises:
      ConfigurationError: If `fn`, or something that it uses, cannot be defined again from its source.
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
    """Returns the line that defines, on a worker, a name that a function uses."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, own_name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in (None, "__main__") and own_name.isidentifier():
        return f"from {module} import {own_name} as {name}"
    if describe_non_json_part(value) is None:
        return f"{name} = __import__('json').loads({encoded(value)!r})"
    raise ConfigurationError(
        f"`{user}` uses {name!r} of its notebook, a {type(value).__name__}, but only modules, functions and plain "
        "values can be sent to workers. Make it in the function."
    )


def _run(command: Sequence[str]) -> str | None:
    """Runs the launcher and prints its output; returns None, or its line about the worker that failed."""
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
        start_new_session=True,  # Ctrl-C reaches it only from here
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
