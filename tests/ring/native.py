"""The compiled core with the types of the functions that tests alone call."""

import ctypes

from tfring.ring import library

core = library.core()

_size, _long, _address = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_addresses = ctypes.POINTER(_address)

for _name, (_result, *_arguments) in {
    "tfring_chunk": (None, _long, _size, _size, ctypes.POINTER(_long), ctypes.POINTER(_long)),
    "tfring_is_small": (_size, _long, _size),
    "tfring_choose_row_sums": (_size, _size, _long, _long, _size),
    "tfring_schedule": (_size, ctypes.c_char_p, _size, _size, _size, ctypes.POINTER(ctypes.c_int32 * 5), _size),
    "tfring_partners": (_size, _size, _size, _size, ctypes.POINTER(ctypes.c_int32)),
    "tfring_use_instructions": (_size, ctypes.c_char_p),
    "tfring_reduce_two": (None, _size, _size, _address, _address, _address, _long),
    "tfring_reduce_many": (None, _size, _size, _address, _addresses, _size, _long),
    "tfring_adam": (None, _size, _address, _address, _addresses, _addresses, _long),
    "tfring_adam_rows": (
        *(_size, _size, _address, _address, _size, _address, _long, _long, _long, _addresses, _addresses),
    ),
}.items():
    getattr(core, _name).restype, getattr(core, _name).argtypes = _result, _arguments
