"""Checks the versions of TensorFlow and Keras, before an import fails with an obscure error."""

from __future__ import annotations

import importlib.util
import warnings

from tfring.errors import ConfigurationError, UnsupportedTensorFlowError

OLDEST = (2, 18)  # the first version whose C API has everything that the ring calls
NEWEST = (2, 21)  # the last version that the tests ran on
OLDEST_KERAS = (3, 14)
NEWEST_KERAS = (3, 15)  # the last version that the tests ran on

NO_TENSORFLOW = """\
tfring needs TensorFlow, which is not installed in this environment. Type one of:
  pip install "tensorflow-cpu>=2.18,<2.22"
  pip install "tensorflow[and-cuda]>=2.18,<2.22"      (NVIDIA GPUs)"""


def check_tensorflow() -> None:
    """Imports TensorFlow and checks its version.

    Raises:
      UnsupportedTensorFlowError: If TensorFlow is missing or older than `OLDEST`. The message has the line to type.

    Warns once about a version newer than `NEWEST`.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise UnsupportedTensorFlowError(NO_TENSORFLOW)
    import tensorflow as tf

    check_version(tf.__version__)


def check_version(version: str, *, warn: bool = True) -> None:
    """Checks a version string of TensorFlow; see `check_tensorflow`.

    >>> check_version("2.18.0")
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST:
        raise UnsupportedTensorFlowError(
            f"TensorFlow {version} is installed, but tfring needs TensorFlow {_text(OLDEST)} to {_text(NEWEST)}. Type: "
            'pip install "tensorflow-cpu>=2.18,<2.22". For sparse gradients on TensorFlow 1.14 to 2.5, see the folder '
            "patches/ of tfring's repository."
        )
    if warn and found > NEWEST:
        warnings.warn(
            f"TensorFlow {version} is installed, but tfring was tested on {_text(OLDEST)} to {_text(NEWEST)}.",
            stacklevel=3,
        )


def check_keras(version: str) -> None:
    """Checks a version string of Keras; warns about a version newer than `NEWEST_KERAS`.

    Raises:
      ConfigurationError: If it is older than `OLDEST_KERAS`.

    >>> check_keras("3.14.0")
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST_KERAS:
        oldest = _text(OLDEST_KERAS)
        raise ConfigurationError(
            f"Keras {version} is installed, but tfring needs Keras {oldest} or later. Type: pip install "
            f'"keras>={oldest}"'
        )
    if found > NEWEST_KERAS:
        warnings.warn(
            f"Keras {version} is installed. tfring replaces functions of Keras by name, and was tested on "
            f"{_text(OLDEST_KERAS)} to {_text(NEWEST_KERAS)}. Compare a first run with a run of one process, or type: "
            f'pip install "keras<{NEWEST_KERAS[0]}.{NEWEST_KERAS[1] + 1}"',
            stacklevel=3,
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
