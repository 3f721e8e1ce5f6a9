"""Every example in a docstring of the package runs and prints what it says."""

import ast
import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import tfring

ROOT = pathlib.Path(__file__).parents[1]
# Importing these runs something, or needs what only an installation has.
SKIPPED = ("tfring.launch.__main__",)
MODULES = [
    module.name for module in pkgutil.walk_packages(tfring.__path__, "tfring.") if module.name not in SKIPPED
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_examples_are_there():
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = [len([t for t in finder.find(importlib.import_module(name)) if t.examples]) for name in MODULES]
    assert sum(counts) >= 15


def of_sections(path):
    """Yields of each line of a docstring's sections its number, the section, the indentation and the text."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not ast.get_docstring(node):
            continue
        text = node.body[0].value
        indent, section = " " * text.col_offset, None
        for number in range(text.lineno, text.end_lineno):
            line = lines[number].removeprefix(indent)
            if line and not line.startswith(" "):
                section = line if line in ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:") else None
            elif line and section:
                yield number + 1, section, len(line) - len(line.lstrip()), line.strip()


def test_sections_have_one_style():
    """Names are indented by two, as in TensorFlow's docstrings, and what is said of them begins with a capital."""
    others, number_of_names = [], 0
    for path in (ROOT / "tfring").rglob("*.py"):
        of_one = list(of_sections(path))
        others += [f"{path.relative_to(ROOT)}:{line}: indented by {n}" for line, _, n, _ in of_one if n not in (2, 4)]
        for line, section, indent, text in of_one:
            has_name = indent == 2 and section not in ("Returns:", "Yields:")
            if has_name and (found := re.match(r"[\w*`., ]+: (\S+)", text)):
                number_of_names += 1
                if found[1][0].islower() and not re.match(r"(u?int|float)\d+,?$|bool$|string$|dtype$", found[1]):
                    others.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert number_of_names > 1000
    assert not others
