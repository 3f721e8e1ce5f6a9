"""The exceptions tfring raises."""

import enum
from typing import Any


class Reason(enum.IntEnum):
    """Why ranks cannot go on together; programs read this and no message. Those up to SLOW are of native/core.h."""

    DIED = 1  # `rank`: its process is gone
    LEFT = 2  # its program ended, and left the ring
    CLOSED = 3  # it closed the ring during a call
    INTERRUPTED = 4  # Ctrl-C
    STOPPED = 5  # its host answers, its process does not
    CUT_OFF = 6  # `rank` and `other` do not reach each other
    RAISED = 7  # its program raised an error
    STEP_FAILED = 8  # another operation of its step failed
    CALLS_DIFFER = 9
    THREADS = 10  # two threads in one call, or all threads in calls of other rings
    SLOW = 11  # it took no part in time
    OTHER_BATCHES = 32
    ENDED_EARLY = 33  # the data of one rank ended
    OTHER_LENGTHS = 34  # ranks take different numbers of steps
    OTHER_OUTPUTS = 35  # of `predict`


class TfringError(RuntimeError):
    """Base of every error tfring raises on purpose.

    Attributes:
      reason: A `Reason`, where ranks cannot go on together; else None.
      rank: The rank that the reason concerns; None where it concerns none, or all.
      other: Of ranks that do not reach each other, or disagree, the other one; else None.
      call: The name of the collective in which this rank was, empty outside of one.

    Example:
        >>> from tfring.errors import PeerLostError, TfringError
        >>> issubclass(PeerLostError, TfringError)
        True
        >>> PeerLostError("rank 1 is gone", reason=Reason.DIED, rank=1).reason.name
        'DIED'
    """

    def __init__(
        self,
        *args: Any,
        reason: Reason | None = None,
        rank: int | None = None,
        other: int | None = None,
        call: str = "",
    ) -> None:
        super().__init__(*args)
        self.reason, self.rank, self.other, self.call = reason, rank, other, call


class ConfigurationError(TfringError, ValueError):
    """A setting, an argument or a cluster description that cannot be honoured.

    The message says what is wrong, then the rule and, where there is one, the text to write instead.
    """


class UnsupportedTensorFlowError(TfringError, ImportError):
    """TensorFlow is missing, or of a version tfring cannot run on. The message has the line to type."""


class NativeLibraryError(TfringError):
    """The compiled ring is missing, cannot be loaded, or does not fit this TensorFlow.

    `RingStrategy(communication="tensorflow")` works without it.
    """


class RendezvousError(TfringError):
    """The ranks did not find each other.

    Raised when the time limit has passed, naming the ranks and addresses that never answered, or at once
    when the ranks cannot form one ring (two claim one rank, settings that exclude each other).
    """


class MismatchError(TfringError, ValueError):
    """Ranks made different collective calls at the same place, or were handed other arrays to train on.

    Raised on every rank. The message names two neighbours that disagree and both their calls: kind, name,
    operation, dtype, shape and position; where several disagree, ranks may name different pairs. The ring is
    unusable afterwards; no result was produced.
    In a `tf.function` of the user's own the same failure is `tf.errors.InvalidArgumentError`. Of arrays that differ,
    which `fit`, `evaluate` and `predict` find at the door, the message names the argument; of batches that differ, or
    data that ends early on one rank, it says the cure. The ring may be used on then.
    """


class NotFiniteError(TfringError, ArithmeticError):
    """A gradient or a variable holds NaN or infinity: `tfring.callbacks.CheckFinite` has found it.

    Raised on every rank. The message names the first variable, and the replica and rank whose value it was.
    """


class PeerLostError(TfringError):
    """A rank died, left the ring, was interrupted, is stopped or cut off while others still need it.

    Raised on every surviving rank: at once where it is gone, within `TFRING_LOST_SECONDS` where it is
    silent.
    The message tells which; of a cut link it names both ends. The ring is unusable afterwards.
    In a `tf.function` of the user's own the same failure is `tf.errors.AbortedError`.
    """


class CollectiveTimeoutError(TfringError, TimeoutError):
    """A rank is alive but took no part in a collective within `timeout_seconds`.

    Raised on every rank that can still run, naming the one that cannot. The ring is unusable afterwards.
    In a `tf.function` of the user's own the same failure is `tf.errors.DeadlineExceededError`.
    """
