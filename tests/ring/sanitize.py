"""Builds the ring's core under the sanitizers and drives it, with threads as ranks, and with frames no rank would send.

    python tests/ring/sanitize.py                       # as ./test.sh does
    python tests/ring/sanitize.py --frames 10000000     # the long run
"""

import argparse
import concurrent.futures
import ctypes.util
import os
import pathlib
import ssl  # noqa: F401  which loads OpenSSL
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tfring import _build  # noqa: E402

# A lie about sizes is memory that is not there, not one that this machine has to find.
OPTIONS = {"ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=256"}
FLAGS = {
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def compile_each(sources: list[pathlib.Path], flags: tuple[str, ...], directory: pathlib.Path) -> list[str]:
    """Returns the object files of the sources, of which as many as there are CPUs are compiled at a time."""

    def compile_one(source: pathlib.Path) -> str:
        compiled = directory / f"{source.stem}.o"
        command = [*_build.compiler(), "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", *flags]
        command += ["-I", str(_build.NATIVE), "-c", "-o", str(compiled), str(source)]
        subprocess.run(command, check=True, timeout=600)
        return str(compiled)

    directory.mkdir()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor:
        return list(executor.map(compile_one, sources))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, help="only feed the core this many wrong frames")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    loaded = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    shared = [file for file in loaded if pathlib.Path(file).name.startswith("libssl")]
    [*with_tls] = shared or filter(None, [ctypes.util.find_library("ssl")])
    if not with_tls:
        sys.exit("no OpenSSL is found, over which the driver is to run, too (Debian: apt install libssl3)")
    runs = [
        ("thread", "ring_driver", with_tls),
        ("memory", "ring_driver", with_tls),
        ("memory", "border_driver", ()),
        ("memory", "frames_driver", (str(arguments.frames or 200_000), str(arguments.seed))),
    ]
    core = [_build.NATIVE / source for source in _build.CORE_SOURCES]
    with tempfile.TemporaryDirectory() as directory:
        folder, objects = pathlib.Path(directory), {}
        for name, driver, words in runs[3:] if arguments.frames else runs:
            if name not in objects:
                objects[name] = compile_each(core, FLAGS[name], folder / name)
            [own] = compile_each([HERE / f"{driver}.cc"], FLAGS[name], folder / f"{name}-{driver}")
            program = folder / "driver"
            command = [*_build.compiler(), *FLAGS[name], "-o", str(program), own, *objects[name], "-lpthread", "-ldl"]
            subprocess.run(command, check=True, timeout=600)
            print(f"{driver} under the sanitizers of {name}: ", end="", flush=True)
            began = time.monotonic()
            finished = subprocess.run(
                [str(program), *words], timeout=None if arguments.frames else 300, env={**os.environ, **OPTIONS}
            )
            if finished.returncode != 0:
                return 1
            if arguments.frames:
                print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
