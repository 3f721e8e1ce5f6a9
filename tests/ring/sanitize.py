"""Builds the ring's core under the sanitizers and drives it, with threads as ranks, and with frames no rank would send.

    python tests/ring/sanitize.py                       # as ./test.sh does
    python tests/ring/sanitize.py --frames 10000000     # the long run
"""

import argparse
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
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)


def build(driver: str, flags: tuple[str, ...], program: pathlib.Path) -> None:
    sources = [str(_build.NATIVE / source) for source in _build.CORE_SOURCES]
    command = [*_build.compiler(), "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-I", str(_build.NATIVE), "-o", str(program), str(HERE / driver), *sources, "-lpthread", "-ldl"]
    subprocess.run(command, check=True, timeout=600)


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
        ("address and undefined", "ring_driver.cc", MEMORY, with_tls),
        ("thread", "ring_driver.cc", THREADS, with_tls),
        ("address and undefined", "border_driver.cc", MEMORY, ()),
        ("address and undefined", "frames_driver.cc", MEMORY, (str(arguments.frames or 200_000), str(arguments.seed))),
    ]
    with tempfile.TemporaryDirectory() as directory:
        for name, driver, flags, words in runs[3:] if arguments.frames else runs:
            program = pathlib.Path(directory) / "driver"
            build(driver, flags, program)
            print(f"sanitizer {name}: ", end="", flush=True)
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
