"""Adds the place in the user's program to errors: the call that a rank was in, its line and its dataset."""

from __future__ import annotations

import contextlib
import pathlib
import re
import traceback
from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfring import _tf, program
from tfring.errors import CollectiveTimeoutError, MismatchError, PeerLostError, Reason
from tfring.runtime import Ring

CALL = "the call"  # its name among the items that ranks compare
_RULE = (
    "All ranks must make the same calls in the same order, none of them under `if rank == 0:`, and end together. To "
    "print or write something once, see docs/scripts.md."
)
_OF_DATA = (Reason.OTHER_BATCHES, Reason.ENDED_EARLY)
_OF_CALLS = (Reason.CALLS_DIFFER, Reason.OTHER_LENGTHS, *_OF_DATA)  # their errors do not name the call
_TOLD = "_tfring_told"


def described(caller: str) -> str:
    """Returns a call as the user finds it in the program: "`model.fit` at train.py:12".

    Args:
      caller: Name of the call, such as "model.fit".
    """
    return f"`{caller}` at {_users_line()}"


def disagreement(call_of_0: str, rank: int, other_call: str) -> MismatchError:
    """Returns the error of ranks that make different calls."""
    return MismatchError(
        f"The ranks make different calls: {call_of_0} on rank 0, {other_call} on rank {rank}. {_RULE}"
    )


@contextlib.contextmanager
def annotated_errors(ring: Ring, caller: str, arguments: dict) -> Iterator[None]:
    """Adds this rank's call to errors of the ring and of ranks that differ. The innermost such context adds it.

    Args:
      ring: The workers.
      caller: Name of the call, such as "model.fit".
      arguments: Arguments of the call by name.
    """
    try:
        yield
    except (MismatchError, PeerLostError, CollectiveTimeoutError) as error:
        of_arguments = isinstance(error, MismatchError) and error.reason not in _OF_CALLS  # the same on all ranks
        if not of_arguments and not hasattr(error, _TOLD):
            _add(error, _sentences(ring, caller, arguments, error.reason))
        setattr(error, _TOLD, True)
        raise


def _sentences(ring: Ring, caller: str, arguments: dict, reason: Reason | None) -> Iterator[str]:
    who = "The call was" if reason in _OF_DATA else f"Rank {ring.cluster.rank} was in"  # the former on every rank
    yield f"{who} {described(caller)}"
    if reason in _OF_DATA:
        for name, value in arguments.items():
            if isinstance(value, tf.data.Dataset):
                yield f", whose `{name}` is {_steps(value)}"
    yield "."
    if reason is Reason.LEFT:
        yield f" {_RULE}"


def _add(error: Exception, sentences: Iterable[str]) -> None:
    text = f"{str(error).rstrip('.')}. {''.join(sentences)}"
    error.args = (text,)
    if isinstance(error, tf.errors.OpError):
        error._message = text  # its initializer sets this, and `message` reads it


def _steps(dataset: tf.data.Dataset) -> str:
    """Returns the transformations of a pipeline, as far as it is linear: "from_tensor_slices.shuffle.batch"."""
    names: list[str] = []
    while True:
        kind = _tf.dataset_step(dataset).kind
        other = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(dataset).__name__.strip("_").removesuffix("Dataset")).lower()
        names.insert(0, {"slices": "from_tensor_slices", "other": other}.get(kind, kind))
        before = _tf.datasets_before(dataset)
        if len(before) != 1:
            return ".".join(name for name in names if name != "nothing")
        [dataset] = before


def _users_line() -> str:
    """Returns the running line of the program itself, not of a library: "train.py:12"."""
    packages = program.folders_of("tfring", "keras", "tensorflow", "os")
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith(("<", *packages)):
            return f"{pathlib.Path(file).name}:{line}"
    return "an unknown line"
