"""Encrypts data connections by TLS 1.3, with the OpenSSL that Python's `ssl` uses, or the system's otherwise.

Both ranks prove that they know a key, derived from the job's secret and the name of this one connection: no
certificates are needed, and a connection that is diverted to another rank is rejected. The keys of the data come from
an ephemeral Diffie-Hellman exchange, so recorded data stays secret if the job's secret becomes known later (RFC 8446,
psk_dhe_ke).
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import hmac
import socket

from tfring import config
from tfring.errors import ConfigurationError
from tfring.ring import library


def is_wanted(key: bytes) -> bool:
    """Returns True if connections must be encrypted.

    Args:
      key: The secret of the job, or empty bytes.

    Raises:
      ConfigurationError: If they must be encrypted and cannot be.
    """
    if not config.read("TFRING_ENCRYPT"):
        return False
    if not key:
        raise ConfigurationError(
            "The job has no secret, but TFRING_ENCRYPT=1 needs one: keys are derived from it. Start ranks with "
            "`tfring launch`, or set the same TFRING_SECRET_FILE on all ranks (docs/security.md)."
        )
    if not _openssl():
        raise ConfigurationError(
            "No OpenSSL was found, but TFRING_ENCRYPT=1 needs it as a shared library: the ssl module of this "
            "Python has its own linked in. Install OpenSSL (Debian: apt install libssl3), or use an encrypted network "
            "(docs/security.md)."
        )
    return True


def encrypt(connection: socket.socket, key: bytes, session: str, *, accepts: bool, seconds: float) -> int:
    """Encrypts a connection over which nothing has been sent yet, once the other side calls this as well.

    Args:
      connection: The data connection. It becomes non-blocking.
      key: The secret of the job.
      session: The name of the link, which both ranks know and no other link has.
      accepts: Whether this is the accepting side, True on exactly one of the two sides.
      seconds: Time that the other side may take.

    Returns:
      A handle for `tfring_link` of native/core.h, which `tfring_tls_close` releases.

    Raises:
      ConnectionError: If the other side has another key, or is another program.
    """
    of_link = hmac.digest(key, b"tfring tls " + session.encode(), "sha256")
    error = library.Error()
    opened = library.core().tfring_tls_open(
        _openssl().encode(), connection.fileno(), accepts, of_link, seconds, ctypes.byref(error)
    )
    if not opened:
        raise ConnectionError(f"its connection cannot be encrypted: {error.message.decode(errors='replace')}")
    return int(opened)


@functools.cache
def _openssl() -> str:
    """Returns a file that has OpenSSL's functions or is linked to one that has them; "" if there is none."""
    import _ssl

    for file in (getattr(_ssl, "__file__", None), ctypes.util.find_library("ssl")):
        with contextlib.suppress(OSError):
            if file is not None and hasattr(ctypes.CDLL(file), "SSL_CTX_set_psk_client_callback"):
                return file
    return ""
