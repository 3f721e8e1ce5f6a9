"""Speed of reducing two arrays to one, by dtype, op and instructions; beside NumPy and a copy of memory.

    python benchmarks/kernels/run.py                                   # the tables of README.md
    python benchmarks/kernels/run.py --dtypes float32 --ops sum --bytes 16K

GB/s are bytes of one array, by the median over the rounds. In each round every contestant runs once a cell, so
that what the machine does meanwhile hits all alike.
"""

import argparse
import ctypes
import pathlib
import statistics
import sys
import time

import ml_dtypes
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "ring")]

import contest  # noqa: E402
from native import core  # noqa: E402

from tfring.ring import library  # noqa: E402

NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
UNITS = {"K": 2**10, "M": 2**20}
CELL_SECONDS = 0.01  # of a contestant, size and round, at least


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_reducible(dtype, op):
    if op in ("sum", "product"):
        return dtype != "bool"
    return not dtype.startswith("complex")


def seconds(function, calls):
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def contestants(name, op, sets, num_bytes):
    """`(name, function)` of what is measured against each other for one dtype and op."""
    dtype = dtype_of(name)
    count = num_bytes // dtype.itemsize
    ones = np.ones(num_bytes // dtype.itemsize, dtype)
    a, b, out = ones, ones.copy(), np.empty_like(ones)
    pointers = [array.ctypes.data for array in (out, a, b)]

    yield "copy", lambda: ctypes.memmove(pointers[0], pointers[1], num_bytes)
    yield "NumPy", lambda: NUMPY[op](a, b, out=out)
    for instructions in sets:
        yield (
            instructions,
            lambda: core.tfring_reduce_two(library.DTYPES[name], library.OPERATIONS[op], *pointers, count),
        )


def measure(names, op, sets, num_bytes, rounds):
    """{dtype: {contestant: GB/s}}"""
    results = {}
    for name in names:
        running = dict(contestants(name, op, sets, num_bytes))
        times = {who: [] for who in running}
        for _ in range(rounds):
            for who, function in running.items():
                core.tfring_use_instructions(who.encode())  # outside the measurement: it asks the processor
                calls = int(CELL_SECONDS / seconds(function, 1)) + 1
                times[who].append(seconds(function, calls))
        results[name] = {who: num_bytes / statistics.median(taken) / 1e9 for who, taken in times.items()}
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default=",".join(library.DTYPES))
    parser.add_argument("--ops", default=",".join(library.OPERATIONS))
    parser.add_argument("--bytes", default="256K,64M")
    parser.add_argument("--rounds", type=int, default=9)
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    sets = [name for name in ("plain", "avx2", "avx512") if core.tfring_use_instructions(name.encode())]
    contest.print_conditions(arguments.realtime, [f"NumPy {np.__version__}"])
    with contest.realtime_without_limit(arguments.realtime):
        for size in arguments.bytes.split(","):
            num_bytes = int(size[:-1]) * UNITS[size[-1]] if size[-1] in UNITS else int(size)
            for op in arguments.ops.split(","):
                names = [name for name in arguments.dtypes.split(",") if is_reducible(name, op)]
                table = measure(names, op, sets, num_bytes, arguments.rounds)
                print(f"\n{op} of {size}, GB/s\n\n| | {' | '.join(table[names[0]])} |")
                print(f"|---|{'---|' * len(table[names[0]])}")
                for name, row in table.items():
                    print(f"| {name} | {' | '.join(f'{speed:.1f}' for speed in row.values())} |", flush=True)


if __name__ == "__main__":
    main()
