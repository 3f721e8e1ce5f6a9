"""The exit codes of docs/launcher.md are those of the code."""

from __future__ import annotations

import ast
import pathlib
import re

from tfring.cluster.launch_variables import PREEMPTED
from tfring.launch import exit_codes

ROOT = pathlib.Path(__file__).parents[2]
ENDS_A_PROCESS = {"exit", "_exit", "SystemExit"}


def of_the_table():
    """Returns the codes in the first column of the table; of a range its words."""
    section = (ROOT / "docs" / "launcher.md").read_text().split("## Exit codes\n")[1].split("\n## ")[0]
    return re.findall(r"^\| ([^|]+) \| [^|]", section, re.MULTILINE)


def test_table_is_that_of_the_code():
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()} | {0, PREEMPTED}
    assert of_the_table()[1:3] == ["1 to 127", "128 + N"]
    numbers = [int(code) for code in of_the_table() if code.isdecimal()]
    assert sorted(numbers) == sorted(codes)


def test_no_process_ends_with_a_number_of_its_own():
    """Each number that ends a process, but 0, is a constant; what a signal makes of it is 128 and the signal."""
    found = []
    for path in (ROOT / "tfring").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ENDS_A_PROCESS and isinstance(node.args[0].value, int) and node.args[0].value:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
