"""Builds the ring's core under the sanitizers and drives it, with threads as ranks."""

import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tfring import _build  # noqa: E402

SANITIZERS = {
    "address and undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        for name, flags in SANITIZERS.items():
            program = pathlib.Path(directory) / "driver"
            sources = [str(_build.NATIVE / source) for source in _build.CORE_SOURCES]
            command = [*_build.compiler(), "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
            command += ["-I", str(_build.NATIVE), "-o", str(program), str(HERE / "ring_driver.cc"), *sources]
            subprocess.run([*command, "-lpthread"], check=True, timeout=300)
            print(f"sanitizer {name}: ", end="", flush=True)
            finished = subprocess.run([str(program)], timeout=120)
            if finished.returncode != 0:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
