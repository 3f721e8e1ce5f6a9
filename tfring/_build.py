"""Compiles the ring's two libraries: `python -m tfring._build` in place, `setup.py` to install."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

NATIVE = pathlib.Path(__file__).parent / "ring" / "native"
_OPS_ALONE = ("ops.cc", "adam_ops.cc", "exchange_ops.cc", "record_ops.cc", "cancellation.cc", "tf_api.cc")
CORE_SOURCES = tuple(sorted({path.name for path in NATIVE.glob("*.cc")} - {*_OPS_ALONE}))
OPS_SOURCES = (*_OPS_ALONE, "dtype.cc")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",  # which would keep square roots from being vectorized
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
# libstdc++ goes into the library, so that an old one on the user's machine does not matter.
LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined")

NO_COMPILER = """\
tfring compiles its ring with g++ (C++17), but no C++ compiler was found. Either install one:
    Debian, Ubuntu:   apt install g++
    Fedora, RHEL:     dnf install gcc-c++
or set CXX to the compiler to use, or install without the ring:
    TFRING_BUILD_NATIVE=0 pip install .
and train with RingStrategy(communication="tensorflow")."""


class BuildError(RuntimeError):
    """The ring cannot be compiled here."""


def compiler() -> list[str]:
    """The command of the C++ compiler: CXX, else g++.

    Raises:
      BuildError: There is none; says what to install.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise BuildError(NO_COMPILER)
    return command


def build(
    directory: pathlib.Path = NATIVE, extra_flags: tuple[str, ...] = ()
) -> tuple[pathlib.Path, pathlib.Path]:
    """Compiles the two libraries into `directory`, unless those there are newer than the sources.

    Args:
      directory: Where the libraries go.
      extra_flags: For the compiler, e.g. `("-fsanitize=thread",)`.

    Returns:
      The paths of the two libraries.

    Raises:
      BuildError: No compiler, or it failed; with its output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    core = directory / "libtfring_core.so"
    ops = directory / "libtfring_ops.so"
    newest = max(
        path.stat().st_mtime for path in [*NATIVE.glob("*.cc"), *NATIVE.glob("*.h"), pathlib.Path(__file__)]
    )
    if not extra_flags and all(path.exists() and path.stat().st_mtime > newest for path in (core, ops)):
        return core, ops
    _compile(core, CORE_SOURCES, (*extra_flags, "-lpthread", "-ldl"))
    _compile(
        ops, OPS_SOURCES, (*extra_flags, f"-L{directory}", "-ltfring_core", "-Wl,-rpath,$ORIGIN", "-ldl")
    )
    return core, ops


def _compile(library: pathlib.Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> None:
    unfinished = library.with_suffix(
        f".{os.getpid()}.tmp"
    )  # a running process keeps the library it has mapped
    command = [
        *compiler(),
        *FLAGS,
        *LINK_FLAGS,
        f"-Wl,-soname,{library.name}",
        "-o",
        str(unfinished),
        *(str(NATIVE / source) for source in sources),
        *flags,
    ]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise BuildError(
            f"{shlex.join(command)}\n{finished.stdout}\nThe ring could not be compiled (see above). "
            "TFRING_BUILD_NATIVE=0 pip install . installs tfring without it."
        )
    unfinished.replace(library)


if __name__ == "__main__":
    try:
        for path in build():
            print(path)
    except BuildError as error:
        sys.exit(str(error))
