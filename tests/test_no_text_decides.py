"""Nothing decides by the wording of an error: errors carry a `reason`, and what it concerns."""

import ast
import pathlib

import pytest

import tfring

ROOT = pathlib.Path(tfring.__file__).parent
# Errors of other libraries, which give nothing but words for what tfring answers to.
OF_OTHERS = {
    ("ring/ops.py", "raise_interrupt"),  # pybind11: Ctrl-C came while it made an exception
}
READERS = {"startswith", "endswith", "find", "index", "count", "split", "partition", "search", "match", "fullmatch"}


def found_in(source: str) -> list[tuple[str, int]]:
    """Returns functions, and lines, in which the text of an error is compared or searched."""
    found = []

    def look(node: ast.AST, function: str, errors: frozenset[str]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
            arguments = [*node.args.args, *node.args.kwonlyargs]
            errors |= {a.arg for a in arguments if a.arg in ("error", "failure")}
        if isinstance(node, ast.ExceptHandler) and node.name:
            errors |= {node.name}
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            sides = [node.func.value, *node.args]
        if any(is_text(part, errors) for side in sides for part in ast.walk(side)):
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            look(child, function, errors)

    def is_text(node: ast.AST, errors: frozenset[str]) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("message", "args", "strerror"):
            return isinstance(node.value, ast.Name) and node.value.id in errors
        is_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
        return is_str and any(isinstance(name, ast.Name) and name.id in errors for name in ast.walk(node))

    look(ast.parse(source), "", frozenset())
    return found


def test_no_module_reads_the_text_of_an_error():
    found = {
        (str(file.relative_to(ROOT)), function): line
        for file in sorted(ROOT.rglob("*.py"))
        for function, line in found_in(file.read_text())
    }
    assert {place: line for place, line in found.items() if place not in OF_OTHERS} == {}
    assert found.keys() >= OF_OTHERS  # no exception stays longer than its reason


@pytest.mark.parametrize(
    "condition",
    [
        '" died " in str(error)',
        'error.message.startswith("The ranks")',
        "_LOST.search(str(error))",
        '"left" not in error.args[0]',
    ],
)
def test_the_test_finds_it(condition):
    source = f"try:\n    f()\nexcept ValueError as error:\n    if {condition}:\n        raise\n"
    assert found_in(source)
    assert found_in(f"def is_gone(error):\n    return bool({condition})\n") == [("is_gone", 2)]


def test_what_only_shows_an_error_passes():
    shown = "try:\n    f()\nexcept OSError as error:\n    print(str(error))\n    raise ValueError(f'{error}')\n"
    assert found_in(shown) == []
