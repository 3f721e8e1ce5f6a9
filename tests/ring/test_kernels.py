"""The arithmetic of the core against NumPy, bit by bit, with each set of instructions this machine has."""

import ctypes
import platform

import numpy as np
import pytest
from arithmetic import CASES, SIXTEEN_BITS, combine, dtype_of, parts_of, total
from native import core

from tfring.ring import library

INSTRUCTIONS = [name for name in ("plain", "avx2", "avx512") if core.tfring_use_instructions(name.encode())]
GUARD = 64


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request):
    assert core.tfring_use_instructions(request.param.encode())
    yield request.param
    assert core.tfring_use_instructions(INSTRUCTIONS[-1].encode())


def numbers(name, count, seed):
    """All bit patterns are as likely, special ones and ordinary numbers likelier."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    values = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    parts = parts_of(values)
    if parts.dtype.kind in "iu":
        limits = np.iinfo(parts.dtype)
        special = np.array([0, 1, limits.min, limits.max], parts.dtype)
    else:
        bits = parts.view(f"u{parts.dtype.itemsize}")
        ordinary = rng.integers(0, 3, parts.size) == 0
        parts[ordinary] = rng.normal(size=parts.size).astype(parts.dtype)[ordinary]
        infinity, one = (int(np.array(value, parts.dtype).view(bits.dtype)) for value in (np.inf, 1))
        positive = [0, 1, 2, infinity - 1, infinity, infinity + 1, one, one + 1]
        sign = 1 << (8 * parts.dtype.itemsize - 1)
        special = np.array([*positive, *(pattern | sign for pattern in positive)], bits.dtype).view(parts.dtype)
    chosen = rng.integers(0, 3, parts.size) == 0
    parts[chosen] = rng.choice(special, parts.size)[chosen]
    return values


def place(memory, offset, data):
    memory[GUARD + offset : GUARD + offset + len(data)] = np.frombuffer(data, np.uint8)
    return memory.ctypes.data + GUARD + offset


def reduce(name, op, out, a, b, count):
    core.tfring_reduce_two(library.DTYPES[name], library.OPERATIONS[op], out, a, b, count)


def whole(name, op, a, b):
    """`a op b` of whole arrays, by the kernels."""
    result = np.empty_like(a)
    reduce(name, op, result.ctypes.data, a.ctypes.data, b.ctypes.data, a.size)
    return result


def assert_same_bits(got, want, *inputs):
    got_bits, want_bits = (array.view(f"V{array.dtype.itemsize}") for array in (got, want))
    wrong = np.flatnonzero(got_bits != want_bits)
    shown = [(int(i), *(array[i].tobytes()[::-1].hex() for array in (*inputs, got, want))) for i in wrong[:5]]
    assert not wrong.size, shown


@pytest.mark.parametrize("name, op", CASES)
def test_every_length_at_every_alignment(name, op, instructions):
    most = 300
    a, b = numbers(name, most, 1), numbers(name, most, 2)
    want = combine(op, a, b)
    assert_same_bits(whole(name, op, a, b), want, a, b)
    item = want.itemsize
    a_bytes, b_bytes, want_bytes = a.tobytes(), b.tobytes(), want.tobytes()
    memory = [np.zeros(2 * GUARD + 8 + most * item, np.uint8) for _ in range(3)]
    for offset in range(8):
        left = place(memory[0], offset, a_bytes)
        right = place(memory[1], (offset * 3 + 1) % 8, b_bytes)
        for count in range(most + 1):
            memory[2][:] = 0xA5
            out = place(memory[2], (offset * 5 + 2) % 8, b"")
            reduce(name, op, out, left, right, count)
            begin = out - memory[2].ctypes.data
            got = memory[2].tobytes()
            assert got[begin : begin + count * item] == want_bytes[: count * item], (offset, count)
            assert set(got[:begin] + got[begin + count * item :]) == {0xA5}, (offset, count, "outside")
        for count in range(most + 1):  # in place
            left = place(memory[0], offset, a_bytes)
            reduce(name, op, left, left, right, count)
            got = memory[0].tobytes()[GUARD + offset :]
            assert got[: count * item] == want_bytes[: count * item], (offset, count)
            assert got[count * item : most * item] == a_bytes[count * item :], (offset, count, "outside")


@pytest.mark.parametrize("name", SIXTEEN_BITS)
@pytest.mark.parametrize("op", library.OPERATIONS)
def test_every_pattern_of_sixteen_bits(name, op, instructions):
    everything = np.arange(65536, dtype=np.uint16).view(dtype_of(name))
    for partner in numbers(name, 100, 3):
        a, b = everything, np.full_like(everything, partner)
        assert_same_bits(whole(name, op, a, b), combine(op, a, b), a, b)
        assert_same_bits(whole(name, op, b, a), combine(op, b, a), b, a)
    shuffled = np.random.default_rng(4).permutation(everything)
    assert_same_bits(whole(name, op, everything, shuffled), combine(op, everything, shuffled), everything, shuffled)


@pytest.mark.parametrize("name, op", CASES)
def test_many_at_once(name, op, instructions):
    for num_parts in (1, 2, 3, 8):
        for count in (0, 1, 15, 300, 2047, 2048, 2049, 6001):
            contributions = [numbers(name, count, 10 + p) for p in range(num_parts)]
            want = total(op, contributions)
            memory = [np.zeros(2 * GUARD + 8 + want.nbytes, np.uint8) for _ in contributions]
            data = [contribution.tobytes() for contribution in contributions]
            pointers = [place(m, p % 8, d) for p, (m, d) in enumerate(zip(memory, data, strict=True))]
            out = np.full(GUARD + want.nbytes, 0xA5, np.uint8)
            for target in (out.ctypes.data, pointers[0]):
                core.tfring_reduce_many(
                    library.DTYPES[name],
                    library.OPERATIONS[op],
                    target,
                    (ctypes.c_void_p * num_parts)(*pointers),
                    num_parts,
                    count,
                )
                got = np.frombuffer(ctypes.string_at(target, want.nbytes), want.dtype)
                assert_same_bits(got, want, *contributions)
            assert (out[want.nbytes :] == 0xA5).all()


def test_many_halves_are_rounded_once(instructions):
    contributions = [np.full(20, value, np.float16) for value in (2048, 1, 1, 60000, 60000, -60000)]
    pointers = (ctypes.c_void_p * 6)(*(c.ctypes.data for c in contributions))
    result = np.empty(20, np.float16)
    arguments = (library.DTYPES["float16"], library.OPERATIONS["sum"], result.ctypes.data, pointers)
    core.tfring_reduce_many(*arguments, 3, 20)
    assert (result == 2050).all()  # one after the other: 2048, as 2049 rounds to even
    core.tfring_reduce_many(*arguments, 6, 20)
    assert (result == np.float16(62050)).all()  # one after the other: infinity


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "complex64"])
def test_the_arithmetic_of_the_calling_thread_is_left_alone_and_not_used(name, instructions):
    """TensorFlow's threads take subnormal numbers for zero."""
    place_in_fenv, flush_and_truncate = {"x86_64": (28, 0x8040 | 0x6000), "aarch64": (0, 7 << 22)}[platform.machine()]
    a, b = numbers(name, 300, 5), numbers(name, 300, 6)
    tiny = np.full(300, np.finfo(np.float64).tiny / 4)
    libm = ctypes.CDLL("libm.so.6")
    standard, other, after = (ctypes.create_string_buffer(64) for _ in range(3))
    for op in ("sum", "product"):
        want = combine(op, a, b)
        got = np.empty_like(a)
        libm.fegetenv(standard)
        other.raw = standard.raw
        control = ctypes.c_uint32.from_buffer(other, place_in_fenv)
        control.value |= flush_and_truncate
        libm.fesetenv(other)
        try:
            flushed = tiny + tiny
            reduce(name, op, got.ctypes.data, a.ctypes.data, b.ctypes.data, 300)
            libm.fegetenv(after)
        finally:
            libm.fesetenv(standard)
        assert not flushed.any(), "the test sets nothing"
        assert ctypes.c_uint32.from_buffer(after, place_in_fenv).value & flush_and_truncate == flush_and_truncate
        assert_same_bits(got, want, a, b)


def test_instructions_unknown_or_not_there_are_refused():
    assert not core.tfring_use_instructions(b"mmx")
    assert "plain" in INSTRUCTIONS


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam(dtype, instructions):
    rng = np.random.default_rng(5)
    alpha, rest_1, rest_2, epsilon = scalars = np.array([0.01, 0.1, 0.001, 1e-7], dtype)
    item = scalars.itemsize
    for count in (0, 1, 7, 8, 9, 31, 300):
        exponents = 10.0 ** rng.integers(-18, 4, size=(4, count))
        gradient, momentum, velocity, weight = (rng.normal(size=(4, count)) * exponents).astype(dtype)
        velocity = np.abs(velocity)
        want_momentum = momentum + (gradient - momentum) * rest_1
        want_velocity = velocity + (gradient * gradient - velocity) * rest_2
        want = [want_momentum, want_velocity, weight - want_momentum * alpha / (np.sqrt(want_velocity) + epsilon)]
        memory = [np.full(2 * GUARD + 8 + count * item, 0xA5, np.uint8) for _ in range(7)]
        arrays = [gradient, momentum, velocity, weight]
        inputs = [place(m, i, a.tobytes()) for i, (m, a) in enumerate(zip(memory, arrays, strict=False))]
        apart = [place(m, 7 - i, b"") for i, m in enumerate(memory[4:])]
        slots = (ctypes.c_void_p * 3)(*inputs[1:])
        for outputs in (apart, inputs[1:]):  # elsewhere, and in place
            to = (ctypes.c_void_p * 3)(*outputs)
            core.tfring_adam(library.DTYPES[scalars.dtype.name], scalars.ctypes.data, inputs[0], slots, to, count)
            for output, expected in zip(outputs, want, strict=True):
                assert_same_bits(np.frombuffer(ctypes.string_at(output, count * item), dtype), expected)
        for outside, output in zip(memory[4:], apart, strict=True):
            begin = output - outside.ctypes.data
            assert set(outside[:begin]) | set(outside[begin + count * item :]) == {0xA5}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_of_rows_is_that_of_a_gradient_with_zeros(dtype, instructions):
    rng = np.random.default_rng(6)
    scalars = np.array([0.01, 0.1, 0.001, 1e-7], dtype)
    number = library.DTYPES[scalars.dtype.name]
    for rows, width in ((0, 3), (1, 1), (7, 5), (700, 1), (700, 33), (40, 3000), (5, 0)):
        for count in sorted({0, min(rows, 3), rows}):
            id_type = (np.int32, np.int64)[count % 2]
            ids = rng.permutation(rows)[:count].astype(id_type)
            gradient = np.zeros((rows, width), dtype)
            gradient[ids] = rng.normal(size=(count, width))
            before = np.abs(rng.normal(size=(3, rows, width))).astype(dtype)
            want, got = np.empty_like(before), np.empty_like(before)
            slots, wanted, gotten = ((ctypes.c_void_p * 3)(*(a.ctypes.data for a in of)) for of in (before, want, got))
            core.tfring_adam(number, scalars.ctypes.data, gradient.ctypes.data, slots, wanted, rows * width)
            values = gradient[ids]
            arguments = number, scalars.ctypes.data, values.ctypes.data, library.DTYPES[ids.dtype.name]
            assert core.tfring_adam_rows(*arguments, ids.ctypes.data, count, rows, width, slots, gotten)
            assert want.tobytes() == got.tobytes(), (rows, width, count)
            assert core.tfring_adam_rows(*arguments, ids.ctypes.data, count, rows, width, slots, slots)  # in place
            assert want.tobytes() == before.tobytes(), (rows, width, count)
            for wrong in ([0, 0], [rows], [-1]):
                there = np.array(wrong, ids.dtype)
                got[:] = 7
                assert not core.tfring_adam_rows(
                    *arguments, there.ctypes.data, len(there), rows, width, slots, gotten
                ), (rows, wrong)
                assert (got == 7).all()
