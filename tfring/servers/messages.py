"""Messages between a worker and a server: a JSON object and arrays, as one array of bytes.

    8 bytes: length of the JSON text │ {"head": {...}, "arrays": [[dtype, shape], ...]} │ pad │ array │ pad │ array ...

Nothing is pickled. Arrays begin at multiples of 64 bytes. Arrays that are read from a message are views of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 64
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def pack(head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Returns a message as a uint8 array of shape `[bytes]`.

    Args:
      head: A mapping that JSON can encode.
      arrays: Arrays of the dtypes in `DTYPES`.

    >>> head, [array] = unpack(pack({"op": "push"}, [np.array([1.0, 2.0])]))
    >>> head, array
    ({'op': 'push'}, array([1., 2.]))
    """
    arrays = [np.asarray(array) for array in arrays]
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({"head": head, "arrays": described}).encode()
    begins, end = [], _aligned(8 + len(text))
    for array in arrays:
        begins.append(end)
        end = _aligned(end + array.nbytes)
    message = np.empty(end, np.uint8)
    message[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    message[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    for begin, array in zip(begins, arrays, strict=True):
        place = message[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(place, array)
    return message


def unpack(message: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the head and the arrays of a message. The arrays are views of it.

    Raises:
      ValueError: If it is not a message of `pack`.
    """
    try:
        length = int.from_bytes(message[:8].tobytes(), "little")
        if not 0 < length <= message.size - 8:
            raise ValueError(f"{length} bytes of text")
        content = json.loads(message[8 : 8 + length].tobytes())
        begin = _aligned(8 + length)
        arrays = []
        for dtype, shape in content["arrays"]:
            if dtype not in DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"an array of dtype {dtype!r} and shape {shape!r}")
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if begin + size > message.size:
                raise ValueError(f"an array of {size} bytes from byte {begin} on")
            arrays.append(message[begin : begin + size].view(dtype).reshape(shape))
            begin = _aligned(begin + size)
        head = content["head"]
        if not isinstance(head, dict):
            raise ValueError("a head that is not an object")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"A message of a parameter server is malformed: {error}. {message.size} bytes.") from None
    return head, arrays


def _aligned(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
