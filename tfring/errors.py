"""The exceptions that tfring raises."""

import enum
from typing import Any


class Reason(enum.IntEnum):
    """Reasons why ranks cannot continue together; programs read these, not messages. Up to SLOW as in native/core.h."""

    DIED = 1  # `rank`: its process is gone
    LEFT = 2  # its program ended, and left the ring
    CLOSED = 3  # it closed the ring during a call
    INTERRUPTED = 4  # Ctrl-C
    STOPPED = 5  # its host answers, its process does not
    CUT_OFF = 6  # `rank` and `other` cannot reach each other
    RAISED = 7  # its program raised an error
    STEP_FAILED = 8  # another operation of its step failed
    CALLS_DIFFER = 9
    THREADS = 10  # two threads in one call, or all threads in calls of other rings
    SLOW = 11  # it did not take part in time
    OTHER_BATCHES = 32
    ENDED_EARLY = 33  # the data of one rank ended
    OTHER_LENGTHS = 34  # ranks take different numbers of steps
    OTHER_OUTPUTS = 35  # outputs of `predict` differ


class TfringError(RuntimeError):
    """Base class of every error that tfring raises on purpose.

    Attributes:
      reason: A `Reason` if ranks cannot continue together, otherwise None.
      rank: The rank that the reason concerns; None if it concerns no rank, or all ranks.
      other: The second of two ranks that cannot reach each other, or disagree; otherwise None.
      call: The name of the collective in which this rank was; empty outside of a collective.

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
    """Raised for a setting, an argument or a cluster description that cannot be honoured.

    The message names the problem, then the rule and, if there is one, the text to write instead.
    """


class UnsupportedTensorFlowError(TfringError, ImportError):
    """Raised if TensorFlow is missing, or if tfring cannot run on its version. The message has the line to type."""


class NativeLibraryError(TfringError):
    """Raised if the compiled ring is missing, cannot be loaded, or does not fit this TensorFlow.

    `RingStrategy(communication="tensorflow")` works without it.
    """


class RendezvousError(TfringError):
    """Raised if the ranks did not find each other.

    Raised when the time limit has passed, with the ranks and addresses that never answered, or at once if the ranks
    cannot form one ring (two processes claim one rank, settings exclude each other).
    """


class MismatchError(TfringError, ValueError):
    """Raised if ranks made different collective calls at the same place, or were given different arrays to train on.

    Raised on every rank. The message names two neighbours that disagree and the calls of both: kind, name,
    operation, dtype, shape and position. If several disagree, ranks may name different pairs. The ring is
    unusable afterwards; no result was produced.
    In your own `tf.function` the same failure is `tf.errors.InvalidArgumentError`. If arrays differ, which `fit`,
    `evaluate` and `predict` check before they begin, the message names the argument; if batches differ, or data ends
    early on one rank, it names the remedy. The ring remains usable in these cases.
    """


class NotFiniteError(TfringError, ArithmeticError):
    """Raised if `tfring.callbacks.CheckFinite` finds NaN or infinity in a gradient or a variable.

    Raised on every rank. The message names the first variable, and the replica and rank of the value.
    """


class PeerLostError(TfringError):
    """Raised if a rank died, left the ring, was interrupted, is stopped or cut off while others still need it.

    Raised on every surviving rank: at once if the rank is gone, within `TFRING_LOST_SECONDS` if it is silent.
    The message names the rank; for a cut link it names both ends. The ring is unusable afterwards.
    In your own `tf.function` the same failure is `tf.errors.AbortedError`.
    """


class CollectiveTimeoutError(TfringError, TimeoutError):
    """Raised if a rank is alive but did not take part in a collective in time.

    The limit is `TFRING_TIMEOUT_SECONDS`, or `timeout_seconds` if that is given to `Communicator.connect`.
    Raised on every rank that can still run; it names the rank that cannot. The ring is unusable afterwards.
    In your own `tf.function` the same failure is `tf.errors.DeadlineExceededError`.
    """
