"""A failure of a collective as the user reads it: tfring's error and its one sentence, then TensorFlow's."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfring import program
from tfring.cluster import Mesh
from tfring.errors import CollectiveTimeoutError, MismatchError, PeerLostError, TfringError
from tfring.ring.collectives import Collectives
from tfring.ring.ops import raise_interrupt, rings_of

_PLACED = "_tfring_placed"  # of an error that tells the places of its ranks


@contextlib.contextmanager
def reraise_as_tfring_error(channels: Sequence[Collectives], mesh: Mesh) -> Iterator[None]:
    """Raises what broke one of these channels, caused by the error in which TensorFlow reports it.

    The other channels break with it: a rank may wait there for one that has left its step. Where none is broken, an
    error of the program passes, of which the other ranks are told.

    Args:
        channels: The rings of a strategy.
        mesh: Its mesh: where ranks have parts of a model, the error tells which, of those it names.

    Raises:
        MismatchError, PeerLostError, CollectiveTimeoutError: See there.
    """
    try:
        with _told_to_others(channels):
            yield
    except tf.errors.OpError as error:
        failures = {c.identity: failure for c in channels if (failure := c.failure()) is not None}
        if not failures:
            raise
        told = [failure for ring, failure in failures.items() if ring in rings_of(error)]
        # Where several channels broke, a disagreement is the cause and a lost rank may be its consequence.
        found = told or failures.values()
        cause = min(found, key=lambda f: (not isinstance(f, MismatchError), isinstance(f, PeerLostError)))
        for channel in channels:
            channel.abort(cause)
        if not told:  # another operation failed, and its step's collectives were given up
            raise
        raise _placed(cause, mesh) from error
    except (PeerLostError, CollectiveTimeoutError) as error:  # of an eager collective
        placed = _placed(error, mesh)
        if placed is error:
            raise
        raise placed from error
    except RuntimeError as error:
        raise_interrupt(error)
        raise


class ShortTraceback:
    """In here an error has the frames of the program alone, as by Keras' filter.

    Frames of tfring, Keras and TensorFlow are left out, but for a last one of tfring that runs into an error.
    TensorFlow's error, from which one of `tfring.errors` is made, becomes its `__context__`. A class, for a generator's
    `with` puts the frames back.

    Args:
        filters: False after `keras.config.disable_traceback_filtering()`; TensorFlow has a switch of its own.
    """

    def __init__(self, filters: bool = True) -> None:
        self._filters = filters and tf.debugging.is_traceback_filtering_enabled()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: types.TracebackType | None) -> None:
        if error is None or not self._filters:
            return
        is_tfrings = isinstance(error, TfringError)
        if is_tfrings and isinstance(error.__cause__, tf.errors.OpError):
            error.__context__ = error.__cause__
            error.__cause__ = None  # and with it, `__suppress_context__`
        error.__traceback__ = _users_frames(trace, keeps_last=not is_tfrings)


def _users_frames(trace: types.TracebackType | None, keeps_last: bool) -> types.TracebackType | None:
    kept: types.TracebackType | None = None
    own, others = program.folders_of("tfring"), program.folders_of("keras", "tensorflow")
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):  # no recursion: there may be as many as Python allows
        file = entry.tb_frame.f_code.co_filename
        is_last = keeps_last and entry is entries[-1]
        if (file.startswith(own) and not is_last) or file.startswith(others) or file == contextlib.__file__:
            continue
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


@contextlib.contextmanager
def _told_to_others(channels: Sequence[Collectives]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if all(channel.failure() is None for channel in channels):
            for channel in channels:
                channel.tell_raised(error)
        raise


def _placed(failure: BaseException, mesh: Mesh) -> BaseException:
    """The failure, with the places of the ranks that it names."""
    if mesh.is_data_only:
        return failure
    if not isinstance(failure, TfringError) or failure.rank is None or hasattr(failure, _PLACED):
        return failure
    ranks = sorted({rank for rank in (failure.rank, failure.other) if rank is not None})
    places = "; ".join(f"rank {rank} has {mesh.place(rank)}" for rank in ranks)
    placed = type(failure)(f"{failure} ({places})")
    vars(placed).update(vars(failure), **{_PLACED: True})
    return placed
