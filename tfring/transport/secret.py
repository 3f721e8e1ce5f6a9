"""The secret of a job. A process that knows it may act as any rank."""

from __future__ import annotations

import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from tfring import config
from tfring.errors import ConfigurationError

VARIABLE = "TFRING_SECRET"
FILE_VARIABLE = "TFRING_SECRET_FILE"
_HOW_TO = f"""\
`tfring launch` makes one for each run. By hand, set the same on all ranks, and never on a command line:
  export {FILE_VARIABLE}=/run/secrets/tfring    # a file that you alone may read, made by: openssl rand -hex 32
  export {VARIABLE}=..."""


def fresh() -> str:
    """Returns a new secret."""
    return secrets.token_hex(32)


def configured(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the value of `TFRING_SECRET`, or the content of the file `TFRING_SECRET_FILE`; None if neither is set.

    Args:
      environ: The environment to read. Defaults to `os.environ`.

    Raises:
      ConfigurationError: If the secret is too short, or the file cannot be read.

    >>> configured({"TFRING_SECRET": "no secret in a test"}), configured({})
    ('no secret in a test', None)
    """
    secret = config.read(VARIABLE, environ)
    file = config.read(FILE_VARIABLE, environ)
    if secret is not None or file is None:
        return secret
    try:
        return config.read(VARIABLE, {VARIABLE: pathlib.Path(file).read_text()})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{FILE_VARIABLE}={file!r}, which names a file with the secret of the job, cannot be read ({error}). "
            f"{_HOW_TO}"
        ) from None


def of(cluster: Any) -> bytes:
    """Returns the key to a cluster's listeners; empty if there is no secret.

    Raises:
      ConfigurationError: If there is no secret and `TFRING_REQUIRE_SECRET` requires one; see also `configured`.
    """
    secret = getattr(cluster, "secret", None) or configured()
    if secret is None and config.read("TFRING_REQUIRE_SECRET"):
        raise ConfigurationError(
            f"No secret is set, but TFRING_REQUIRE_SECRET=1 needs {VARIABLE} or {FILE_VARIABLE}. {_HOW_TO}"
        )
    return (secret or "").encode()


def warning(where: str) -> str:
    """Returns the warning for ranks on several hosts without a secret."""
    return (
        f"These ranks have no secret: a process that reaches {where} over the network can act as a rank or listen to "
        f"it, as with TensorFlow's own server. On a network that others share, set the same {FILE_VARIABLE} or "
        f"{VARIABLE} on all ranks, or start them with `tfring launch`, which sets one (docs/security.md)."
    )
