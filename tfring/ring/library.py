"""Python bindings of the compiled core: structures, functions, errors."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import signal
import weakref
from typing import Any

from tfring import errors
from tfring._version import __version__

ABI_VERSION = 17


def _directory() -> pathlib.Path:
    """Returns the folder of the compiled libraries.

    A checkout that is not built hides the installed package of the same version; then the folder is that package's.
    """
    own = pathlib.Path(__file__).parent / "native"
    if not (own / "libtfring_core.so").exists():
        import importlib.metadata  # 15 ms

        for installed in importlib.metadata.distributions(name="tfring"):
            directory = pathlib.Path(str(installed.locate_file("tfring/ring/native")))
            if installed.version == __version__ and (directory / "libtfring_core.so").exists():
                return directory
    return own


DIRECTORY = _directory()
CORE = DIRECTORY / "libtfring_core.so"
OPS = DIRECTORY / "libtfring_ops.so"

MOST_KINDS = 32
MARK = 255  # the kind of a record that does not belong to a collective
UNWANTED = 2  # the answer of a receive to a shape that it does not expect
ANY_THREAD, PYTHON_MAIN_THREAD, TENSORFLOW_OP = range(3)  # the caller that waits in a collective
OK, MISMATCH, PEER_LOST, TIMEOUT, INVALID, INTERRUPTED, INTERNAL = range(7)

ALGORITHMS = {"auto": 0, "flat": 1, "bruck": 2, "ring": 3, "two_level": 4, "halving": 7}
ROW_SUMS = {"auto": 0, "gather": 5, "owner": 6}
ROOTED = {"flat": 1, "ring": 3, "tree": 8}  # of a broadcast or a reduce, not selectable
ALGORITHM_NAMES = {number: name for name, number in {**ALGORITHMS, **ROW_SUMS, **ROOTED}.items()}
OPERATIONS = {"sum": 0, "max": 1, "min": 2, "product": 3}
OPERATION_NAMES = "sum, max, min or product"  # in errors
# The numbers of TensorFlow's TF_DataType.
DTYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
}


COMPRESSIONS = ("bfloat16", "float16")


def compression_number(compression: str | None) -> int:
    """Returns the core's number of a compression; 0 for None.

    >>> compression_number("bfloat16")
    14
    """
    if compression is None:
        return 0
    if compression not in COMPRESSIONS:
        raise ValueError(f"`compression` is {compression!r}, not bfloat16, float16 or None.")
    return DTYPES[compression]


def row_sums_number(reduction: str) -> int:
    """Returns the core's number of an algorithm for a sum of rows.

    >>> row_sums_number("owner")
    6
    """
    if reduction not in ROW_SUMS:
        raise ValueError(f"`reduction` is {reduction!r}, not auto, gather or owner.")
    return ROW_SUMS[reduction]


class Error(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("reason", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("other", ctypes.c_int32),
        ("ring", ctypes.c_uint64),
        ("call", ctypes.c_char * 104),
        ("message", ctypes.c_char * 1920),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("dims", ctypes.c_void_p),  # of int64
        ("num_dims", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("inactive", ctypes.c_int32),
        ("caller", ctypes.c_int32),
        ("compression", ctypes.c_int32),
        ("of", ctypes.c_int64),
        ("sequence", ctypes.c_void_p),
    ]


class Link(ctypes.Structure):
    _fields_ = [
        ("rank", ctypes.c_int32),
        ("control_fd", ctypes.c_int32),
        ("data_fd", ctypes.c_int32),
        ("own_mailbox_fd", ctypes.c_int32),
        ("own_doorbell_fd", ctypes.c_int32),
        ("mailbox_fd", ctypes.c_int32),
        ("doorbell_fd", ctypes.c_int32),
        ("host", ctypes.c_char_p),
        ("tls", ctypes.c_void_p),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_char_p),
        ("identity", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("links", ctypes.POINTER(Link)),
        ("num_links", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("hosts", ctypes.POINTER(ctypes.c_int32)),
        ("num_spins", ctypes.c_int32),
        ("timeout_seconds", ctypes.c_double),
        ("stall_seconds", ctypes.c_double),
        ("lost_seconds", ctypes.c_double),
        ("opening_timeout_seconds", ctypes.c_double),
    ]


class Statistics(ctypes.Structure):
    _fields_ = [
        ("bytes_sent", ctypes.c_int64),
        ("bytes_received", ctypes.c_int64),
        ("seconds_waited", ctypes.c_double),
        ("collectives", ctypes.c_int64 * MOST_KINDS),
        ("scratch_bytes", ctypes.c_int64),
    ]


class Record(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("waited", ctypes.c_int64),
        ("added", ctypes.c_int64),
        ("beside", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("sent", ctypes.c_int64),
        ("received", ctypes.c_int64),
        ("sequence", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("ring", ctypes.c_char * 24),
        ("group", ctypes.c_char * 24),
        ("name", ctypes.c_char * 104),
    ]


class _Python(ctypes.Structure):
    """The functions of CPython that `tfring_python` in core.h has, by their names."""

    _FUNCTIONS = (
        "PyGILState_Ensure",
        "PyGILState_Release",
        "PyGILState_GetThisThreadState",
        "PyErr_CheckSignals",
        "PyErr_Fetch",
        "PyErr_Restore",
        "Py_AddPendingCall",
    )
    _fields_ = [*((name, ctypes.c_void_p) for name in _FUNCTIONS), ("interrupt_raises", ctypes.CFUNCTYPE(ctypes.c_int))]


# Arguments: context, numbers (rows [world_size][tensors], or dimensions) and their count, outputs [tensors], placed.
Place = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int32),
)


@functools.cache
def core() -> ctypes.CDLL:
    """Returns the loaded core.

    Raises:
      NativeLibraryError: If it is missing, cannot be loaded, or belongs to another version of tfring.
    """
    if not CORE.exists():
        raise errors.NativeLibraryError(
            f"The compiled ring is missing ({CORE}). Install a C++ compiler (Debian: apt install g++, "
            "Fedora: dnf install gcc-c++) and install tfring again, or pass "
            'communication="tensorflow" to RingStrategy.'
        )
    try:
        library = ctypes.CDLL(str(CORE))
    except OSError as error:
        raise errors.NativeLibraryError(
            f"The compiled ring cannot be loaded: {error}. Install tfring again on this machine, or pass "
            'communication="tensorflow" to RingStrategy.'
        ) from error
    if library.tfring_abi_version() != ABI_VERSION:
        raise errors.NativeLibraryError(
            f"{CORE} was built from another version of tfring (interface {library.tfring_abi_version()}, "
            f"expected {ABI_VERSION}). Install tfring again, or in a checkout run: python -m tfring._build"
        )
    _declare(library)
    _lend_python(library)
    # Runs when Python ends, after all communicators are closed: a daemon thread may be about to join a ring, and
    # the core would then call functions of a Python that no longer exists.
    weakref.finalize(library, library.tfring_end)
    return library


@functools.cache
def kinds() -> tuple[str, ...]:
    """Returns the names of the collectives, indexed by their numbers in the core.

    >>> kinds()[0]
    'all_reduce'
    """
    names = map(core().tfring_kind_name, range(MOST_KINDS))
    return tuple(name.decode() for name in names if name is not None)


def _declare(library: ctypes.CDLL) -> None:
    handle, size, error = ctypes.c_int64, ctypes.c_int, ctypes.POINTER(Error)
    call, tensors, rows = ctypes.POINTER(Call), ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.c_int64)
    address = ctypes.c_void_p
    signatures = {
        "tfring_open": (ctypes.c_int64, ctypes.POINTER(Options), error),
        "tfring_close": (None, handle),
        "tfring_end": (None,),
        "tfring_abort": (None, handle, error),
        "tfring_tell_raised": (None, handle, ctypes.c_char_p),
        "tfring_failure": (ctypes.c_int, handle, error),
        "tfring_next_warning": (ctypes.c_int, ctypes.c_char_p, size),
        "tfring_set_pool_size": (None, size),
        "tfring_trace": (None, ctypes.c_int64),
        "tfring_take_records": (ctypes.c_int64, ctypes.POINTER(Record), ctypes.c_int64, rows),
        "tfring_mark": (None, ctypes.c_char_p),
        "tfring_get_statistics": (ctypes.c_int, handle, ctypes.POINTER(Statistics)),
        "tfring_rank": (ctypes.c_int, handle),
        "tfring_world_size": (ctypes.c_int, handle),
        "tfring_group": (ctypes.c_int64, handle, ctypes.POINTER(ctypes.c_int32), size, ctypes.c_char_p, error),
        "tfring_add_link": (ctypes.c_int, handle, ctypes.POINTER(Link), error),
        "tfring_run": (ctypes.c_int, handle, call, tensors, size, rows, Place, ctypes.c_void_p, error),
        "tfring_kind_name": (ctypes.c_char_p, size),
        "tfring_tls_open": (address, ctypes.c_char_p, size, size, ctypes.c_char_p, ctypes.c_double, error),
        "tfring_tls_close": (None, address),
        "tfring_send_abort": (None, size, error),
        "tfring_choose": (ctypes.c_int, size, ctypes.c_int64, size, size),
        "tfring_choose_rooted": (ctypes.c_int, ctypes.c_int64, size),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


@ctypes.CFUNCTYPE(ctypes.c_int)
def _interrupt_raises() -> int:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _lend_python(library: ctypes.CDLL) -> None:
    """Gives the core the functions that it needs to notice Ctrl-C while a collective waits."""
    python = _Python(interrupt_raises=_interrupt_raises)
    for name in _Python._FUNCTIONS:
        setattr(python, name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p))
    library.tfring_use_python.argtypes = [ctypes.POINTER(_Python)]
    library.tfring_use_python.restype = None
    library.tfring_use_python(python)


@functools.cache
def _raise_again() -> ctypes._FuncPointer:
    # PyDLL: called with the GIL held, and an exception set inside is raised here.
    function = ctypes.PyDLL(str(CORE)).tfring_raise_again
    function.restype = None
    return function


def raise_error(error: Error) -> None:
    """Raises the error that a failed call left in `error`."""
    if error.code == INTERRUPTED:
        _raise_again()()
    raise error_of(error)


_MOST_TEXT = Error.message.size - 1  # bytes

_KINDS: dict[int, type[BaseException]] = {
    MISMATCH: errors.MismatchError,
    PEER_LOST: errors.PeerLostError,
    TIMEOUT: errors.CollectiveTimeoutError,
    INVALID: ValueError,
    INTERRUPTED: KeyboardInterrupt,
}


def error_of(error: Error) -> BaseException:
    """Returns the exception of the error that a failed call, or a broken ring, left in `error`."""
    message = error.message.decode(errors="replace")
    kind = _KINDS.get(error.code, errors.TfringError)
    if not issubclass(kind, errors.TfringError):
        return kind(message)
    return kind(message, **about(error))


def about(error: Error) -> dict[str, Any]:
    """Returns the reason, the ranks and the call of an error as arguments of a TfringError."""
    reason = errors.Reason(error.reason) if error.reason else None
    rank, other = (None if number < 0 else number for number in (error.rank, error.other))
    return {"reason": reason, "rank": rank, "other": other, "call": error.call.decode(errors="replace")}


def describe(failure: BaseException, message: str | None = None) -> Error:
    """Returns an exception in the form of the core, in which other ranks see it; the inverse of `error_of`."""
    code = next((code for code, kind in _KINDS.items() if type(failure) is kind), INTERNAL)
    reason, rank, other = (getattr(failure, name, None) for name in ("reason", "rank", "other"))
    if isinstance(failure, KeyboardInterrupt):
        code, reason = PEER_LOST, errors.Reason.INTERRUPTED
    text = (str(failure) if message is None else message).encode(errors="replace")
    rank, other = (-1 if number is None else number for number in (rank, other))
    return Error(code=code, reason=reason or 0, rank=rank, other=other, message=text[:_MOST_TEXT])
