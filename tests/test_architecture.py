"""Imports point down the rows of docs/architecture.md, in no circle; TensorFlow and Keras have a door each.

And the C++ stays readable: no file is long, and world.h names those of the classes that make up the engine.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A file imports from its own row and the rows below. A room is a file or a folder of tfring/.
ROWS = {
    7: ("__init__", "__main__"),
    6: ("launch", "doctor", "bench", "test", "report", "notebook"),
    5: ("layers", "callbacks", "parallel", "functions", "schedules"),
    4: ("strategy", "cluster_resolver", "data", "equality", "losses", "_keras"),
    3: ("cross_device_ops", "runtime", "partition", "step"),
    2: ("reduction",),
    1: ("ring", "servers", "sharding"),
    0: (
        *("blocks", "cluster", "transport", "config", "cpus", "gpus", "seeding", "imports", "errors", "program"),
        *("setting", "_requirements", "_tf", "_build", "_version"),
    ),
}
ROW_OF = {room: row for row, rooms in ROWS.items() for room in rooms}

# What starts, or is used from NumPy, without TensorFlow: importing them imports none of it.
WITHOUT_TENSORFLOW = (
    "",
    "cluster",
    "launch",
    "doctor.entry",
    "bench.entry",
    "report.run",
    "config",
    "cpus",
    "gpus",
    "errors",
    "functions",
    "notebook",
    "ring.arrays",
    "ring.communicator",
    "ring.rendezvous",
    "ring.schedule",
    "ring.trace",
)
TENSORFLOW = ("tensorflow", "keras")

MOST_LINES = 400  # of a file of C++


class Import(NamedTuple):
    """One imported name: `module` as far as it is one, whether it is imported with the file, and where."""

    module: str
    at_once: bool
    place: str


def module_name(file: pathlib.Path, root: pathlib.Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: pathlib.Path, root: pathlib.Path = ROOT) -> Iterator[Import]:
    """Every import of a file."""

    def walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: relative import; write it in full"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            for name in names:
                yield Import(name, at_once, f"{file.relative_to(root)}:{child.lineno}")
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, at_once and not inside and not typing)

    yield from walk(ast.parse(file.read_text()), True)


def files(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    return sorted((root / "tfring").rglob("*.py"))


def run_by(name: str, modules: Container[str]) -> list[str]:
    """Importing `tfring.a.b.symbol` runs `tfring`, `tfring.a` and `tfring.a.b`."""
    parts = name.split(".")
    return [module for n in range(1, len(parts) + 1) if (module := ".".join(parts[:n])) in modules]


def room_of(module: str) -> str:
    """`tfring.ring.ops` -> `ring`; `tfring` itself and names it exports -> `__init__`."""
    room = [*module.split("."), ""][1]
    return room if room in ROW_OF else "__init__"


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def upward_imports(root: pathlib.Path = ROOT) -> list[str]:
    found = []
    for file in files(root):
        room = room_of(module_name(file, root))
        for name, _, place in imports(file, root):
            if is_in(name, ("tfring",)) and ROW_OF[room_of(name)] > ROW_OF[room]:
                found.append(f"{place}: row {ROW_OF[room]} imports {name} of row {ROW_OF[room_of(name)]}")
    return found


def circles(root: pathlib.Path = ROOT) -> list[list[str]]:
    """Files that import each other, also in functions, for types, through `__init__`, in a row: each circle sorted."""
    by_name = {module_name(file, root): file for file in files(root)}
    graph: dict[str, set[str]] = {name: set() for name in by_name}
    for name, file in by_name.items():
        for found in imports(file, root):
            *packages, target = run_by(found.module, by_name) or [name]
            # The packages that a file is in run before it.
            graph[name] |= {target, *(it for it in packages if not name.startswith(f"{it}."))} - {name}

    def reachable(start: str) -> set[str]:
        todo, seen = list(graph[start]), set()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(graph[name])
        return seen

    reach = {name: reachable(name) for name in graph}
    found = {tuple(sorted(m for m in reach[name] if name in reach[m])) for name in graph if name in reach[name]}
    return [list(circle) for circle in sorted(found)]


def imports_outside(package: str, door: str, root: pathlib.Path = ROOT) -> list[str]:
    return [
        f"{place}: {name} is imported in tfring/{door} alone"
        for file in files(root)
        if room_of(module_name(file, root)) != door
        for name, *_, place in imports(file, root)
        if is_in(name, (package,))
    ]


def names_kept_private(package: str, *folders: str) -> set[str]:
    """Names with an underscore that the files of an installed package define, as functions, classes or attributes."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    home = pathlib.Path(spec.origin).parent
    names: set[str] = set()
    for folder in folders:
        for file in (home / folder).rglob("*.py"):
            defined = r"(?:def |class |self\.|^\s*)(_[a-zA-Z]\w*)\s*(?:[=(:])"
            names.update(re.findall(defined, file.read_text(), re.MULTILINE))
    return names


def private_uses(names: set[str], but: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
    """Returns where attributes of these names are used by files that do not define them, outside of the files `but`."""
    found = []
    for file in files(root):
        if file.relative_to(root / "tfring").as_posix() in but:
            continue
        text = file.read_text()
        own = set(re.findall(r"(?:def |class |self\.)(_\w+)\b(?=\s*[=(:])", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in names - own:
                found.append(f"{file.relative_to(root)}:{node.lineno}: {node.attr}")
    return found


def imported_at_once(module: str, root: pathlib.Path = ROOT) -> Iterator[Import]:
    """Yields the imports of importing a module of tfring, from file to file."""
    by_name = {module_name(file, root): file for file in files(root)}
    todo, seen = [module], set()
    while todo:
        for name in set(run_by(todo.pop(), by_name)) - seen:
            seen.add(name)
            for found in imports(by_name[name], root):
                if found.at_once:
                    yield found
                    todo.append(found.module)


def tensorflow_at_once(module: str, root: pathlib.Path = ROOT) -> list[str]:
    return [
        f"{found.place}: importing {module} imports {found.module}"
        for found in imported_at_once(module, root)
        if is_in(found.module, TENSORFLOW)
    ]


def files_of_native_code(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    return sorted(file for file in (root / "tfring").rglob("*") if file.suffix in (".cc", ".h"))


def long_files(root: pathlib.Path = ROOT) -> list[str]:
    lengths = {file: len(file.read_text().splitlines()) for file in files_of_native_code(root)}
    return [
        f"{file.relative_to(root)}: {length} lines" for file, length in lengths.items() if length > MOST_LINES
    ]


def classes_of_engine(native: pathlib.Path) -> set[str]:
    """Returns the classes of world.h and of all headers that it includes, directly or not."""
    texts: dict[str, str] = {}
    names = ["world.h"]
    for name in names:
        texts[name] = (native / name).read_text()
        included = re.findall(r'^#include "(\w+\.h)"', texts[name], re.MULTILINE)
        names += [header for header in included if header not in names]
    return {found for text in texts.values() for found in re.findall(r"^(?:class|struct) (\w+)", text, re.MULTILINE)}


def classes_with_methods(text: str) -> set[str]:
    return set(re.findall(r"^(?:\S.* )?(\w+)::~?\w+\(", text, re.MULTILINE))


def unnamed_files(root: pathlib.Path = ROOT) -> list[str]:
    """Files of the ring that their rows of docs/architecture.md, or world.h, do not name, or that are not there."""
    ring = root / "tfring" / "ring"
    document = (root / "docs" / "architecture.md").read_text()
    cells = re.findall(r"^\| \d \| `ring/` \| (.*) \|$", document, re.MULTILINE)
    modules = {file.name for file in ring.glob("*.py")} - {"__init__.py"}
    head = (ring / "native" / "world.h").read_text().split("#pragma once")[0]
    named = set(re.findall(r"\b\w+\.cc\b", head))
    there = {file.name: file.read_text() for file in (ring / "native").glob("*.cc")}
    engine = {name for name, text in there.items() if classes_with_methods(text) & classes_of_engine(ring / "native")}
    return sorted(set(re.findall(r"`(\w+\.py)`", " ".join(cells))) ^ modules | engine - named | named - set(there))


def test_every_file_has_a_row():
    rooms = {path.stem for path in (ROOT / "tfring").iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert rooms <= set(ROW_OF), "give it a row here and in docs/architecture.md"


def test_rows_are_those_of_the_document():
    table = re.findall(r"^\| (\d) \| ([^|]+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    for row, rooms in table:
        named = {re.sub(r"\.py$|/$", "", room) for room in re.findall(r"`([^`]+)`", rooms)}
        assert named <= set(ROWS[int(row)]), f"row {row} of docs/architecture.md"


def test_files_of_the_ring_are_those_the_documents_name():
    assert unnamed_files() == []


def test_no_file_of_native_code_is_long():
    assert len(files_of_native_code()) > 20
    assert long_files() == [], f"more than {MOST_LINES} lines: find the parts it has"


def test_imports_point_down():
    assert upward_imports() == []


def test_no_files_import_each_other():
    assert circles() == []


def test_insides_of_tensorflow_come_through_one_file():
    assert imports_outside("tensorflow.python", "_tf") == []


def test_what_tensorflow_keeps_private_is_used_behind_two_doors():
    """_tf.py, and strategy/extended.py for the hooks that TensorFlow calls. Keras' private names are _keras' affair."""
    names = names_kept_private("tensorflow", "python/distribute", "python/data")
    uses = private_uses(names - names_kept_private("keras", "src"), but=("_tf.py", "strategy/extended.py"))
    assert uses == [], f"{len(uses)} private names of TensorFlow:\n" + "\n".join(uses)


def test_insides_of_keras_come_through_one_room():
    assert imports_outside("keras.src", "_keras") == []


@pytest.mark.parametrize("module", WITHOUT_TENSORFLOW)
def test_starts_without_tensorflow(module):
    assert tensorflow_at_once(f"tfring.{module}".rstrip(".")) == []


def test_launch_never_imports_tensorflow_or_numpy():
    found = [
        found.place
        for file in (ROOT / "tfring" / "launch").rglob("*.py")
        for found in imports(file)
        if is_in(found.module, (*TENSORFLOW, "numpy"))
    ]
    assert found == []


def test_the_test_sees_what_it_looks_for(tmp_path):
    """A package with one of each mistake."""
    for name, text in {
        "tfring/__init__.py": "",
        "tfring/config.py": "def f():\n    from tfring.ring import ops\n",
        "tfring/errors.py": "from tfring import RingStrategy\n",
        "tfring/ring/__init__.py": "",
        "tfring/ring/ops.py": "import tensorflow as tf\nfrom tensorflow.python import ops\n",
        "tfring/ring/schedule.py": "if TYPE_CHECKING:\n    import keras.src\n",
        "tfring/ring/rendezvous.py": "try:\n    from tfring.ring.ops import x\nfinally:\n    pass\n",
        "tfring/launch/__init__.py": "def f():\n    from keras.src import tree\n",
        "tfring/_tf.py": "def f(x):\n    return x._worker_device\n",
        "tfring/data/__init__.py": "def f(self, x):\n    self._own = x._own\n    x._worker_device\n",
        "tfring/layers/__init__.py": "",
        "tfring/layers/a.py": "from tfring.layers import b\n",
        "tfring/layers/b.py": "def f():\n    from tfring.layers.c import x\n",
        "tfring/layers/c.py": "from tfring.layers.a import y\n",
        "tfring/cluster/__init__.py": "from tfring.cluster.a import x\n",
        "tfring/cluster/a.py": "if TYPE_CHECKING:\n    from tfring.transport.a import x\n",
        "tfring/cluster/b.py": "from tfring.strategy.ring import RingStrategy\n",
        "tfring/transport/a.py": "from tfring.cluster.c import x\n",
        "tfring/cluster/c.py": "if TYPE_CHECKING:\n    from tfring.strategy.ring import RingStrategy\n",
        "tfring/ring/native/world.h": "//   world.cc   opening\n//   gone.cc   what is no more\n#pragma once\n"
        '#include "links.h"\n#include <new>\nclass World final {};\n',
        "tfring/ring/native/links.h": "class Links {};\n",
        "tfring/ring/native/links.cc": "Links::Links() {}\n",
        "tfring/ring/native/world.cc": "Status World::open() {\n" + "  f();\n" * 399 + "}\n",
        "tfring/ring/native/new.cc": "bool World::is_new() { return true; }\n",
        "tfring/ring/native/other.cc": "// Of no World::\n" * 400,
        "docs/architecture.md": "| 1 | `ring/` | `ops.py` (ops), `schedule.py`, `neighbour.py` |\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line.split(":")[0] for line in upward_imports(tmp_path)] == [
        "tfring/cluster/b.py",
        "tfring/cluster/c.py",
        "tfring/config.py",
        "tfring/errors.py",
    ]
    uses = private_uses({"_worker_device", "_own"}, ("_tf.py",), tmp_path)
    assert uses == ["tfring/data/__init__.py:3: _worker_device"]
    assert circles(tmp_path) == [
        ["tfring.cluster", "tfring.cluster.a", "tfring.transport.a"],
        ["tfring.layers.a", "tfring.layers.b", "tfring.layers.c"],
    ]
    assert len(imports_outside("tensorflow.python", "_tf", tmp_path)) == 1
    assert len(imports_outside("keras.src", "_keras", tmp_path)) == 2
    assert len(tensorflow_at_once("tfring.ring.rendezvous", tmp_path)) == 2
    assert long_files(tmp_path) == ["tfring/ring/native/world.cc: 401 lines"]
    assert unnamed_files(tmp_path) == ["gone.cc", "links.cc", "neighbour.py", "new.cc", "rendezvous.py"]
    for module in ("config", "launch", "ring.schedule"):
        assert tensorflow_at_once(f"tfring.{module}", tmp_path) == []
