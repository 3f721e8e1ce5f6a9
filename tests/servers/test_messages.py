"""Messages of workers and servers: what is packed is unpacked, and what is malformed is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tfring.servers import messages

ARRAYS = arrays_of.arrays(st.sampled_from(messages.DTYPES), arrays_of.array_shapes(min_dims=0, max_side=5, min_side=0))


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.integers() | st.text()), st.lists(ARRAYS, max_size=4))
def test_round_trip(head, arrays):
    got, received = messages.unpack(messages.pack(head, arrays))
    assert got == head
    for array, want in zip(received, arrays, strict=True):
        assert array.dtype == want.dtype and array.shape == want.shape and array.tobytes() == want.tobytes()


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="malformed"):
        messages.unpack(np.frombuffer(data, np.uint8))


def test_an_array_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="an array of 80 bytes"):
        messages.unpack(messages.pack({}, [np.zeros(10)])[:100])
