"""A failure of a collective as the user reads it: tfring's error and its one sentence, then TensorFlow's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfring.cluster import Mesh
from tfring.errors import CollectiveTimeoutError, MismatchError, PeerLostError, TfringError
from tfring.ring.collectives import Collectives
from tfring.ring.ops import raise_interrupt, rings_of

_PLACED = "_tfring_placed"  # of an error that tells the places of its ranks


@contextlib.contextmanager
def reraise_as_tfring_error(channels: Sequence[Collectives], mesh: Mesh) -> Iterator[None]:
    """Raises what broke one of these channels, caused by the error in which TensorFlow reports it.

    The other channels break with it: a rank may wait there for one that has left its step. Where none is broken, an
    error of the program passes, which the other ranks learn of.

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
