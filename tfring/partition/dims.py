"""Sizes in terms of numbers that are known when a step runs: integers, or one monomial such as `2*n*t`.

A size is an `int`, a `Dim`, or None if it is neither. Every function returns None if the result is not a monomial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

ROWS = "n"  # the symbol of the rows of a batch


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """A monomial: a coefficient times powers of symbols.

    Attributes:
      coefficient: An integer.
      powers: Pairs of a symbol and its exponent, sorted, without zeros.
    """

    coefficient: int
    powers: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        factors = [name if power == 1 else f"{name}^{power}" for name, power in self.powers]
        return "*".join(([] if self.coefficient == 1 else [str(self.coefficient)]) + factors)


Size = int | Dim | None


def symbol(name: str) -> Dim:
    """Returns the size with the name `name`."""
    return Dim(1, ((name, 1),))


def _parts(size: int | Dim) -> tuple[int, dict[str, int]]:
    return (size.coefficient, dict(size.powers)) if isinstance(size, Dim) else (size, {})


def _made(coefficient: int, powers: dict[str, int]) -> int | Dim:
    if coefficient == 0:
        return 0
    kept = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Dim(coefficient, kept) if kept else coefficient


def multiply(a: Size, b: Size) -> Size:
    """Returns `a * b`; 0 if one is 0, even if the other is not known."""
    if a is None or b is None:
        return 0 if 0 in (a, b) else None
    (c, powers), (d, others) = _parts(a), _parts(b)
    for name, power in others.items():
        powers[name] = powers.get(name, 0) + power
    return _made(c * d, powers)


def divide(a: Size, b: Size) -> Size:
    """Returns `a / b` if there is no remainder; otherwise None."""
    if a is None or b is None:
        return None
    (c, powers), (d, others) = _parts(a), _parts(b)
    if d == 0 or c % d:
        return None
    for name, power in others.items():
        powers[name] = powers.get(name, 0) - power
    return None if any(power < 0 for power in powers.values()) else _made(c // d, powers)


def add(a: Size, b: Size) -> Size:
    """Returns `a + b`."""
    if a is None or b is None:
        return None
    if a == 0 or b == 0:
        return b if a == 0 else a
    (c, powers), (d, others) = _parts(a), _parts(b)
    return _made(c + d, powers) if powers == others else None


def subtract(a: Size, b: Size) -> Size:
    """Returns `a - b`."""
    return add(a, multiply(-1, b))


def floor_divide(a: Size, b: Size) -> Size:
    """Returns `a // b`."""
    if isinstance(a, Dim) or isinstance(b, Dim):
        return divide(a, b)
    return None if a is None or not b else a // b


def modulo(a: Size, b: Size) -> Size:
    """Returns `a % b`."""
    if isinstance(a, Dim) or isinstance(b, Dim):
        return None if divide(a, b) is None else 0
    return None if a is None or not b else a % b


def maximum(a: Size, b: Size) -> Size:
    """Returns the larger size. A batch has at least one row; other symbols are at least 0."""
    return _chosen(a, b, largest=True)


def minimum(a: Size, b: Size) -> Size:
    """Returns the smaller size. Symbols have the bounds of `maximum`."""
    return _chosen(a, b, largest=False)


def _chosen(a: Size, b: Size, largest: bool) -> Size:
    if a is None or b is None:
        return None
    if a == b:
        return a
    if isinstance(a, Dim) and isinstance(b, Dim):
        return None
    if not isinstance(a, Dim) and not isinstance(b, Dim):
        return max(a, b) if largest else min(a, b)
    dim, number = (a, b) if isinstance(a, Dim) else (b, a)
    assert isinstance(dim, Dim) and isinstance(number, int)
    least = 0 if may_be_zero(dim) else 1
    if dim.coefficient < 1 or number > least:
        return None
    return dim if largest else number


def product(sizes: Iterable[Size]) -> Size:
    """Returns the product of all sizes."""
    result: Size = 1
    for size in sizes:
        result = multiply(result, size)
    return result


def total(sizes: Iterable[Size]) -> Size:
    """Returns the sum of all sizes."""
    result: Size = 0
    for size in sizes:
        result = add(result, size)
    return result


def symbols(size: Size) -> dict[str, int]:
    """Returns the exponent of each symbol in a size."""
    return dict(size.powers) if isinstance(size, Dim) else {}


def is_of_rows(size: Size) -> bool:
    """Returns True if a size depends on the rows of a batch, or on the rows that a mask keeps."""
    return any(name == ROWS or name.startswith("rows:") for name in symbols(size))


def may_be_zero(size: Size) -> bool:
    """Returns True if a size depends on a symbol other than the rows of a batch, such as rows that a mask keeps."""
    return any(name != ROWS for name in symbols(size))
