"""Cuts a folder of wheels into pieces for a machine without a network, and prints what to run there for each.

    python benchmarks/gpu/carry.py WHEELS                 # writes benchmarks/gpu/pieces, which git ignores

The pieces are a tar archive of the folder, cut. Beside them is SHA256SUMS, which assemble.sh checks.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import shutil
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
PIECES = HERE / "pieces"
MOST_MEGABYTES = 55  # of a piece: a copy takes 64 MiB, the checkout included


class Piece(NamedTuple):
    """A piece of a stream.

    Attributes:
      name: of its file; names sort in the order of the stream.
      data: its bytes.
      checksum: SHA-256 of these, in hexadecimal digits.
    """

    name: str
    data: bytes
    checksum: str


def cut(stream: BinaryIO, size: int, most: int) -> Iterator[Piece]:
    """Yields the `size` bytes of a stream as pieces that are as large as each other, and have at most `most` bytes.

    >>> from io import BytesIO
    >>> [(piece.name, piece.data) for piece in cut(BytesIO(b"abcdefg"), 7, 3)]
    [('piece-00', b'abc'), ('piece-01', b'def'), ('piece-02', b'g')]
    >>> [len(piece.data) for piece in cut(BytesIO(b"abcdefg"), 7, 6)]
    [4, 3]
    """
    each = -(-size // -(-size // most))
    for number in range(-(-size // each)):
        data = stream.read(each)
        yield Piece(f"piece-{number:02}", data, hashlib.sha256(data).hexdigest())


def commands(names: list[str], folder: str) -> list[str]:
    """Returns the lines of the day: what to copy to the other machine, and what to run there after it."""
    assemble, sums = "bash benchmarks/gpu/assemble.sh", f"{folder}/SHA256SUMS"
    lines = [f'copy {folder}/{name} {sums}    run: {assemble} take "$HOME/gpu"' for name in names]
    return [*lines, f'copy nothing    run: {assemble} install "$HOME/gpu"']


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=pathlib.Path, help="the folder")
    parser.add_argument("--megabytes", type=int, default=MOST_MEGABYTES, help=f"of a piece, default {MOST_MEGABYTES}")
    parser.add_argument("--out", type=pathlib.Path, default=PIECES, help="where the pieces go; what is there goes")
    arguments = parser.parse_args()
    wheels = sorted(arguments.wheels.glob("*.whl"))
    if not wheels:
        parser.error(f"{arguments.wheels} has no wheels (*.whl).")
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    archive = arguments.out / "wheels.tar"
    with tarfile.open(archive, "w") as tar:
        for wheel in wheels:
            tar.add(wheel, wheel.name)
    sums = []
    with archive.open("rb") as stream:
        for piece in cut(stream, archive.stat().st_size, arguments.megabytes << 20):
            (arguments.out / piece.name).write_bytes(piece.data)
            sums.append(f"{piece.checksum}  {piece.name}\n")
    archive.unlink()
    (arguments.out / "SHA256SUMS").write_text("".join(sums))
    folder = arguments.out.resolve()
    shown = folder.relative_to(HERE.parents[1]) if folder.is_relative_to(HERE.parents[1]) else folder
    print("\n".join(commands([line.split()[1] for line in sums], str(shown))))


if __name__ == "__main__":
    main()
