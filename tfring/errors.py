"""The exceptions tfring raises."""


class TfringError(RuntimeError):
    """Base of every error tfring raises on purpose.

    Example:
        >>> from tfring.errors import PeerLostError, TfringError
        >>> issubclass(PeerLostError, TfringError)
        True
    """


class ConfigurationError(TfringError, ValueError):
    """A setting, an argument or a cluster description that cannot be honoured.

    The message gives the rule, the value received and, where there is one, the text to write instead.
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


class InexactError(TfringError, ValueError):
    """A step does not compute on several replicas what one process does, and `check_equal` was asked for.

    Raised on every rank before the first step. The message names each operation and its line.
    """


class InexactWarning(UserWarning):
    """A step may not compute on several replicas what one process does: once, with each operation and its line."""


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
