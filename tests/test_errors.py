"""docs/errors.md has every error of tfring by its first words, and no other; an error names the problem first."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
ERRORS = {
    "ConfigurationError",
    "MismatchError",
    "PeerLostError",
    "CollectiveTimeoutError",
    "RendezvousError",
    "NativeLibraryError",
    "UnsupportedTensorFlowError",
}
ARGUMENT_ERRORS = {"ValueError", "TypeError"}
RULE_FIRST = re.compile(r"(`[^`]+`|\S+) (must|has to|have to|runs from|is one of)\b|(All|Each|Every) ")
VARIABLE = r"\b[A-Z]+_[A-Z_]+(?=[ ,])(?!=)"  # its name is interpolated
WORDS = 4  # of a message, that the page has together

# Fragments of the native code's errors, in the words of the page.
NATIVE = (
    *("ranks disagree: rank ", "they wait for each other in a circle", "wait for each other in different rings"),
    *("wait for each other in different rings: all inter-op threads", " died: its process on "),
    " failed while rank ",
    *(" left the ring (its script ended?)", " is stopped (by a signal, a debugger, or its machine)"),
    *(" have not been able to reach each other for", " gave up in ", " aborted without a reason"),
    " closed the ring during ",
    *(" was interrupted during ", "nothing moved for ", " takes no part: its process on ", " can no longer be used: "),
)


def literal(node: ast.expr) -> str:
    """Returns the text of a message, with "{}" for what is not constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return "{}"


def raised(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each error of `ERRORS` that is made, and of `ARGUMENT_ERRORS` in sentences."""
    for node in ast.walk(ast.parse(text)):
        is_call = isinstance(node, ast.Call) and bool(node.args)
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if is_call else ""
        text = literal(node.args[0]) if is_call else ""
        if name in ERRORS or (name in ARGUMENT_ERRORS and re.match(r"[`A-Z]|\w+ [\"{]", text)):
            yield node.lineno, text


def first_words(message: str) -> str | None:
    """Returns the first constant words of a message; None where there are fewer than two."""
    parts = [part.strip(" `\"'()=") for part in message.split("{}")]
    part = next((part for part in parts if len(part.split()) > 1), "")
    return " ".join(part.split()[:WORDS]) or None


def entries() -> list[str]:
    """Returns the first column of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "begins with" not in line]
    return [line.strip("|").split(" | ")[0].strip() for line in lines]


def constants(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


@functools.cache
def texts() -> str:
    """Returns all texts of the package, Python's and the native code's."""
    python = [constant for text in sources().values() for constant in constants(text)]
    return "\n".join([*python, " ".join(native_text().split())])


@functools.cache
def sources() -> dict[str, str]:
    package = ROOT / "tfring"
    return {str(file.relative_to(package)): file.read_text() for file in sorted(package.rglob("*.py"))}


def native_text() -> str:
    files = sorted((ROOT / "tfring" / "ring" / "native").glob("*.cc"))
    text = "".join(file.read_text() for file in files)
    return re.sub(r'"\s*\n\s*"', "", text).replace('\\"', '"')


def test_every_error_is_on_the_page():
    page = " ".join(" ".join(entries()).split())
    found = [(file, line, words) for file, text in sources().items() for line, message in raised(text)
             if (words := first_words(message)) is not None]
    missing = [f"{file}:{line}: {words}" for file, line, words in found if words not in page]
    assert len(found) > 150 and not missing, "docs/errors.md lacks:\n" + "\n".join(missing)


def rules_first(text: str) -> list[str]:
    """Returns the errors of Python's source that begin with the rule, and texts that end with what was received."""
    errors = [message for _, message in raised(text) if RULE_FIRST.match(message)]
    return errors + [constant for constant in constants(text) if re.search(r"\bReceived\b.*:", constant)]


def test_an_error_names_the_problem_first():
    found = [f"{file}: {message}" for file, text in sources().items() for message in rules_first(text)]
    assert not found, "an error says what is wrong, then the rule, then what to do:\n" + "\n".join(found)
    assert "Received" not in re.sub(r"k[A-Z]\w+", "", native_text())


def test_every_entry_has_a_cure():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    empty = [row for row in rows if not row.strip("|").partition(" | ")[2].strip()]
    assert not empty, "docs/errors.md says no cure of:\n" + "\n".join(empty)


def test_errors_of_the_engine_are_on_the_page():
    page, code = " ".join(entries()), native_text()
    for fragment in NATIVE:
        assert fragment in code, f"the native code no longer says {fragment!r}"
        assert fragment.strip() in page, f"docs/errors.md lacks {fragment!r}"


@pytest.mark.parametrize("entry", entries())
def test_an_entry_is_an_error_of_the_code(entry):
    said = texts()
    fragments = [f.strip(" `\"'") for f in re.split(rf"\.\.\.|{VARIABLE}", entry)]
    for fragment in (f for f in fragments if len(f.strip(",.:()")) > 1):
        assert fragment in said, f"no error of the code has {fragment!r}"


def test_the_test_sees_what_it_looks_for():
    text = (
        'raise ConfigurationError(f"`x` is {x}, not one of {y}.")\nraise errors.PeerLostError(f"{who} is lost")\n'
        'raise ValueError("no sentence")\nraise ValueError(f"`n` must be {one}")\n'
        'raise TypeError(f"A tensor. Received: 1")'
    )
    assert [first_words(message) for _, message in raised(text)][:2] == ["x` is", "is lost"]
    assert rules_first(text) == ["`n` must be {}", "A tensor. Received: 1"]
