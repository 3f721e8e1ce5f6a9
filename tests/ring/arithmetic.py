"""The kernels' arithmetic in NumPy: 16-bit floats by way of float32, one kind of NaN, complex numbers by parts."""

import functools

import ml_dtypes
import numpy as np

from tfring.ring import library

SIXTEEN_BITS = ("float16", "bfloat16")
ORDERS = {"max": np.greater, "min": np.less}


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_reducible(dtype, op):
    """Booleans have no sum and no product, complex numbers no order."""
    kind = np.dtype(dtype).kind
    return kind != "c" if op in ORDERS else kind != "b"


CASES = [(name, op) for name in library.DTYPES for op in library.OPERATIONS if is_reducible(dtype_of(name), op)]


def is_sixteen_bits(dtype):
    return np.dtype(dtype).name in SIXTEEN_BITS


def parts_of(numbers):
    """The real numbers that complex ones consist of."""
    real = {"c8": "f4", "c16": "f8"}.get(numbers.dtype.str[1:])
    return numbers.view(real) if real else numbers


def canonical(numbers):
    parts = parts_of(numbers)
    if parts.dtype.kind == "f" or is_sixteen_bits(parts.dtype):
        parts[np.isnan(parts)] = parts.dtype.type(np.nan)
    return numbers


def combine(op, a, b):
    """`a op b` of two arrays, as one call of a kernel computes it."""
    if is_sixteen_bits(a.dtype):
        return total(op, [a, b])
    with np.errstate(all="ignore"):
        if op in ORDERS:
            chosen = np.where(ORDERS[op](a, b), a, b)
            return canonical(np.where(a != a, a, chosen))
        if op == "product" and a.dtype.kind == "c":
            result = np.empty_like(a)
            result.real = a.real * b.real - a.imag * b.imag
            result.imag = a.real * b.imag + a.imag * b.real
            return canonical(result)
        return canonical({"sum": np.add, "product": np.multiply}[op](a, b))


def total(op, contributions):
    """All of them in order; 16-bit floats rounded once, at the end."""
    dtype = contributions[0].dtype
    if len(contributions) == 1:
        return contributions[0].copy()
    if not is_sixteen_bits(dtype):
        return functools.reduce(functools.partial(combine, op), contributions)
    with np.errstate(all="ignore"):
        return canonical(total(op, [numbers.astype(np.float32) for numbers in contributions]).astype(dtype))
