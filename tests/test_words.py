"""Docstrings open with what a function does, names that ask only read, and CONTRIBUTING.md's banned words are gone.

They are gone from names, too: of modules, classes, functions, arguments, attributes and variables.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tfring"

ROOMS = sorted(
    path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
)

OPENINGS = ("What", "Which", "Whose", "Whether", "How", "Of", "Where", "By", "Who", "Whom", "When", "That")
READERS = re.compile(r"_*(is|has|was)_")
# Calls that change a container, unless it is the function's own; and calls that change state, or communicate.
CHANGES = ["append", "extend", "insert", "pop", "popitem", "clear", "update", "remove", "discard", "setdefault"]
ACTS = [
    "setattr",
    "delattr",
    "assign",
    "assign_add",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "send",
    "receive",
    "gather_equal",
]
# (file, word): why it stays.
ALLOWED: dict[tuple[str, str], str] = {
    ("callbacks/backup.py", "pieces"): "a key of the state in files of Backup",
    ("callbacks/files.py", "pieces"): "the same",
    ("callbacks/variables.py", "pieces"): "the same",
    ("docs/restarts.md", "pieces"): "the same",
    ("docs/security.md", "nobody"): "the name of a user",
    ("docs/security.md", "strangers"): "the name of a folder and of a test",
}


def rows_of_table(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the rows of the first table under a heading of a page."""
    text = (ROOT / page).read_text().split(f"# {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def banned_words() -> list[str]:
    table = rows_of_table("CONTRIBUTING.md", "Words that do not appear")
    return [word for banned, _ in table for word in re.findall(r"`([^`]+)`", banned)]


def files(room: str, *suffixes: str) -> list[pathlib.Path]:
    """Returns the sources of a folder or file of the package."""
    path = PACKAGE / room
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in suffixes)


def docstrings(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields the name, line and docstring of the module and of each class and function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "name", "module"), node.body[0].lineno, docstring


def comment_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields the first line of each block of whole-line comments of C++."""
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("//") and not before.startswith("//"):
            yield number, line.lstrip("/ ")
        before = line


def in_words(name: str) -> str:
    """Returns the words of a name: "begin anew" of `begin_anew` and of `BeginAnew`."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)).lower()


def words_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yields comments, string constants (among them docstrings and the texts of f-strings), and names in words."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        for name in (getattr(node, field, None) for field in ("name", "arg", "attr", "id")):
            if isinstance(name, str):
                yield node.lineno, in_words(name)


def words_of_native_code(text: str) -> Iterator[tuple[int, str]]:
    """Yields comments and string literals of C++, and names in words."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in re.findall(r'//.*$|"(?:[^"\\]|\\.)*"|\w+', line):
            yield number, in_words(found) if re.match(r"\w", found) else found


def wrong_openings(room: str) -> list[str]:
    found = []
    for file in files(room, ".py"):
        for name, line, docstring in docstrings(file.read_text()):
            if docstring.split()[0].strip(",.:;'\"`") in OPENINGS:
                found.append(f"{file.relative_to(ROOT)}:{line}: {name}: {docstring.splitlines()[0]}")
    for file in files(room, ".cc", ".h"):
        for line, comment in comment_blocks(file.read_text()):
            if comment.split(" ")[0].strip(",.:;") in OPENINGS:
                found.append(f"{file.relative_to(ROOT)}:{line}: {comment}")
    return found


def banned(file: pathlib.Path, root: pathlib.Path = PACKAGE) -> list[str]:
    """Returns the places in a file where a banned word stands that is not allowed there."""
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, banned_words()))})(?![\w-])", re.IGNORECASE)
    place = file.relative_to(root).as_posix()
    readers = {".py": words_of_python, ".md": lambda text: enumerate(text.splitlines(), 1)}
    return [
        f"{place}:{line}: {word!r} in {text.strip()[:100]!r}"
        for line, text in [(0, in_words(file.stem)), *readers.get(file.suffix, words_of_native_code)(file.read_text())]
        for word in pattern.findall(text)
        if (place, word.lower()) not in ALLOWED
    ]


def acting_readers(text: str) -> list[str]:
    """Returns the functions named is_, has_ or was_ that write to an object, delete, or call what acts."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or not READERS.match(function.name):
            continue
        for node in ast.walk(function):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            writes = isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and any(
                isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets
            )
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", ""))
            is_local = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)  # such as todo.pop()
            acts = name in ACTS or (name in CHANGES and not is_local)
            if writes or acts or isinstance(node, (ast.Delete, ast.Global, ast.Nonlocal)):
                found.append(f"{function.name}: {ast.unparse(node)}")
                break
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_open_with_what_is_done(room):
    assert files(room, ".py"), "no such room"
    wrong = wrong_openings(room)
    assert not wrong, f"{len(wrong)} openings:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_banned_words_are_gone(room):
    found = [place for file in files(room, ".py", ".cc", ".h") for place in banned(file)]
    assert not found, f"{len(found)} words that CONTRIBUTING.md replaces:\n" + "\n".join(found)


def test_banned_words_are_gone_from_pages():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = [place for page in pages for place in banned(page, ROOT)]
    assert len(pages) > 15 and not found, f"{len(found)} words that CONTRIBUTING.md replaces:\n" + "\n".join(found)


def test_members_of_native_code_that_ask_are_const():
    found = [
        f"{file.name}: {line.strip()}"
        for file in files("ring", ".h")
        for line in file.read_text().splitlines()
        if re.match(r"  bool (is|has|was)_\w+\(", line) and ") const" not in line
    ]
    assert not found, "is_, has_ and was_ only read:\n" + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_names_that_ask_only_read(room):
    found = [
        f"{file.relative_to(ROOT)}: {act}" for file in files(room, ".py") for act in acting_readers(file.read_text())
    ]
    assert not found, "is_, has_ and was_ only read; what acts has an imperative name:\n" + "\n".join(found)


def test_each_term_is_defined_once():
    terms = [
        term
        for heading in ("Processes", "Connections", "Collectives", "Values")
        for cell, meaning in rows_of_table("docs/glossary.md", heading)
        for term in re.findall(r"\*\*([^*]+)\*\*", cell)
        if meaning
    ]
    assert len(terms) > 50 and len(terms) == len(set(terms))


def test_allowed_words_are_banned_and_there():
    for (place, word), reason in ALLOWED.items():
        assert word in banned_words() and reason
        file = (ROOT if place.startswith("docs/") else PACKAGE) / place
        assert re.search(rf"\b{re.escape(word)}\b", file.read_text(), re.IGNORECASE), place


def test_the_test_sees_what_it_looks_for():
    text = (
        '"""What a module is."""\n'
        "def is_there(self):\n    self.count += 1\n    return True\n"
        "def has_peers(ring):\n    return ring.all_reduce(1) > 1\n"
        "def was_read(self):\n    # nobody acts\n    return self.read\n"
        'def f(x):\n    """Returns x."""\n    raise ValueError(f"{x} is taken in")\n'
    )
    assert [(name, opening.split()[0]) for name, _, opening in docstrings(text)] == [
        ("module", "What"),
        ("f", "Returns"),
    ]
    assert [act.split(":")[0] for act in acting_readers(text)] == ["is_there", "has_peers"]
    words = " ".join(word for _, word in words_of_python(text))
    assert "nobody" in words and "is taken in" in words and "is there" in words and "raise" not in words
    native = '// Whose it is.\n// nobody\nint nobody = 0;  // What it is\nf("a guest", "b");\n'
    assert list(comment_blocks(native)) == [(1, "Whose it is.")]
    assert [word for _, word in words_of_native_code(native)] == [
        *("// Whose it is.", "// nobody", "int", "nobody", "0", "// What it is", "f", '"a guest"', '"b"'),
    ]
    assert in_words("BeginAnew") == in_words("_begin_anew") == "begin anew"
    assert {"nobody", "taken in", "guest"} <= set(banned_words())
