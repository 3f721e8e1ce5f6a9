"""Failures of collectives as the user reads them: tfring's error and its one sentence, then TensorFlow's error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfring.cluster import Mesh
from tfring.errors import CollectiveTimeoutError, MismatchError, PeerLostError, TfringError
from tfring.ring.collectives import Collectives
from tfring.ring.ops import raise_interrupt, rings_of

_PLACED = "_tfring_placed"  # attribute of an error whose message has the places of its ranks


@contextlib.contextmanager
def reraise_as_tfring_error(channels: Sequence[Collectives], mesh: Mesh) -> Iterator[None]:
    """Raises the failure that broke one of these channels, from the error in which TensorFlow reports it.

    The other channels are broken as well: a rank may wait there for one that has left its step. If no channel is
    broken, an error of the program is passed on, and the other ranks learn of it.

    Args:
      channels: The rings of a strategy.
      mesh: The mesh of the strategy. If ranks hold parts of a model, the error tells the parts of the ranks it names.

    Raises:
      MismatchError, PeerLostError, CollectiveTimeoutError: See `tfring.errors`.
    """
    try:
        with _report_to_other_ranks(channels):
            yield
    except tf.errors.OpError as error:
        failures = {c.identity: failure for c in channels if (failure := c.failure()) is not None}
        if not failures:
            raise
        told = [failure for ring, failure in failures.items() if ring in rings_of(error)]
        # If several channels broke, a disagreement is the cause and a lost rank may be its consequence.
        found = told or failures.values()
        cause = min(found, key=lambda f: (not isinstance(f, MismatchError), isinstance(f, PeerLostError)))
        for channel in channels:
            channel.abort(cause)
        if not told:  # another operation failed, and the collectives of its step were cancelled
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
def _report_to_other_ranks(channels: Sequence[Collectives]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if all(channel.failure() is None for channel in channels):
            for channel in channels:
                channel.tell_raised(error)
        raise


def _placed(failure: BaseException, mesh: Mesh) -> BaseException:
    """Returns the failure with the places of the ranks that it names."""
    if mesh.is_data_only:
        return failure
    if not isinstance(failure, TfringError) or failure.rank is None or hasattr(failure, _PLACED):
        return failure
    ranks = sorted({rank for rank in (failure.rank, failure.other) if rank is not None})
    places = "; ".join(f"rank {rank} has {mesh.place(rank)}" for rank in ranks)
    placed = type(failure)(f"{failure} ({places})")
    vars(placed).update(vars(failure), **{_PLACED: True})
    return placed
