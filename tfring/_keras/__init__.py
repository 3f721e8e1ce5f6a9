"""The seams into Keras, for behavior that a strategy alone cannot correct.

Each seam names what Keras does and the upstream issue, acts only on models, optimizers and variables that belong to
a RingStrategy and on sharded tables, and leaves everything else in the process as it was. This package alone imports
`keras.src`.
"""

from __future__ import annotations

import warnings

from tfring._keras.inputs import share_seeds

__all__ = ["install", "share_seeds"]

_installed = False


def install() -> None:
    """Installs the seams, once per process. The first RingStrategy or ShardedEmbedding calls it.

    Warns if Keras is newer than tested, or has changed the parameters of a function that is replaced.
    `seam.restore()` removes the seams again.

    Raises:
      ConfigurationError: If Keras is too old, runs on another backend, or was changed by another library. Keras is
        then left unchanged.
    """
    global _installed
    if _installed:
        return
    import keras

    from tfring._requirements import check_keras
    from tfring.errors import ConfigurationError

    check_keras(keras.__version__)
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on the backend {keras.backend.backend()!r}, but tfring needs TensorFlow. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )
    from tfring._keras import (
        bases,
        downloads,
        empty,
        epochs,
        inlining,
        inputs,
        layers,
        losses,
        metrics,
        printing,
        randomness,
        saving,
        scope,
        seam,
        trainer,
    )
    from tfring._keras.optimizers import adoption, server_updater, tensorflow_1
    from tfring._keras.sharding import slots

    # Each function is replaced once, so the order does not matter.
    for module in (
        metrics,
        losses,
        downloads,
        empty,
        inlining,
        adoption,
        bases,
        slots,
        randomness,
        inputs,
        layers,
        server_updater,
        tensorflow_1,
        scope,
        saving,
        printing,
        trainer,
        epochs,
    ):
        try:
            module.install()
        except BaseException:
            seam.restore()
            raise
    _installed = True
    seam.undo.append(_forget)
    changed = seam.changed()
    if changed:
        warnings.warn(
            f"Keras {keras.__version__} has changed the parameters of functions that tfring replaces: "
            f"{', '.join(changed)}. Compare a first run with a run of one process, and report this.",
            stacklevel=3,
        )


def _forget() -> None:
    global _installed
    _installed = False
