"""Reads a job's options from a TOML file: that of `--config`, or the table of pyproject.toml."""

from __future__ import annotations

import argparse
import difflib
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from tfring.errors import ConfigurationError

PYPROJECT = "pyproject.toml"
_TABLE = ("tool", "tfring", "launch")  # in pyproject.toml; in another file the keys are at the top level
_NOT_IN_A_FILE = ("help", "config", "dry_run", "module")


def arguments_of(path: pathlib.Path, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options in a file as command line arguments.

    Args:
      path: The file. In a `pyproject.toml`, its table `[tool.tfring.launch]` is read.
      parser: Parser of the command. The file may have its options, named as on the command line without leading dashes.

    Raises:
      ConfigurationError: If the file cannot be read, or has a key that is not an option, or a value of another type.
    """
    try:
        table: Any = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}). It must be a TOML file.") from None
    where = str(path)
    if path.name == PYPROJECT:
        where += f", [{'.'.join(_TABLE)}]"
        for key in _TABLE:
            table = table.get(key, {}) if isinstance(table, dict) else table
        if not isinstance(table, dict):
            raise ConfigurationError(f"{where} is not a table. Write a line such as max-restarts = 3 below its name.")
    options = {
        action.option_strings[0].lstrip("-"): action
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest not in _NOT_IN_A_FILE
    }
    return [arguments for key, value in table.items() for arguments in _arguments(key, value, options, where)]


def _arguments(key: str, value: Any, options: Mapping[str, argparse.Action], where: str) -> list[str]:
    """Returns the arguments that correspond to one line."""
    if key not in options:
        near = difflib.get_close_matches(key, options, 3)
        meant = f"Did you mean {' or '.join(near)}?" if near else f"The options are {', '.join(sorted(options))}."
        raise ConfigurationError(f"{where}: {key!r} is not an option of tfring launch. {meant}")
    action = options[key]
    option = action.option_strings[0]
    is_flag, is_list = action.nargs == 0, isinstance(action, argparse._AppendAction)
    values = value if is_list and isinstance(value, list) else [value]
    wanted = bool if is_flag else str if is_list else (str, int, float)
    if not all(isinstance(each, wanted) and isinstance(each, bool) == is_flag for each in values):
        rule = "true or false" if is_flag else "a list of strings" if is_list else "a string or a number"
        raise ConfigurationError(f"{where}: {key} = {value!r} is not {rule}.")
    if is_flag:
        return [option] if value else []
    return [word for each in values for word in (option, str(each))]
