"""A failure of a collective as the user reads it: tfring's error and its one sentence, then TensorFlow's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tfring.errors import CollectiveTimeoutError, MismatchError, PeerLostError

if TYPE_CHECKING:
    from tfring.cluster.mesh import Mesh
    from tfring.ring.collectives import Collectives


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
        failures = [failure for channel in channels if (failure := channel.failure()) is not None]
        if not failures:
            raise
        told = [failure for failure in failures if str(failure) in error.message]
        # Where several channels broke, a disagreement is the cause and a lost rank may be its consequence.
        cause = min(told or failures, key=lambda f: (not isinstance(f, MismatchError), isinstance(f, PeerLostError)))
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
    ranks = sorted({int(rank) for rank in re.findall(r"\brank (\d+)", str(failure))} & set(range(mesh.size)))
    places = "; ".join(f"rank {rank} has {mesh.place(rank)}" for rank in ranks)
    return type(failure)(f"{failure} ({places})") if places and places not in str(failure) else failure


def raise_interrupt(error: RuntimeError) -> None:
    """Raises KeyboardInterrupt where Ctrl-C came while TensorFlow made this error of a collective that it ended."""
    if "REPLACED BY KeyboardInterrupt" in str(error):  # pybind11's words
        raise KeyboardInterrupt from None
