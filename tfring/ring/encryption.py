"""Encrypts connections for data by TLS 1.3, with the OpenSSL that Python's `ssl` uses, else the system's.

Both ranks prove that they know a key, which is the job's secret with the name of this one connection: no certificates
are needed, and a connection that is diverted to another rank is not taken. The keys of the data come from an ephemeral
Diffie-Hellman exchange, so what was recorded stays secret if the job's secret becomes known (RFC 8446, psk_dhe_ke).
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
    """Returns whether connections are to be encrypted.

    Args:
      key: The secret of the job, or nothing.

    Raises:
      ConfigurationError: They are, and cannot be.
    """
    if not config.read("TFRING_ENCRYPT"):
        return False
    if not key:
        raise ConfigurationError(
            "The job has no secret, and TFRING_ENCRYPT=1 needs one: keys are made from it. Start ranks by "
            "`tfring launch`, or set TFRING_SECRET_FILE alike on all of them (docs/security.md)."
        )
    if not _openssl():
        raise ConfigurationError(
            "No OpenSSL is found, and TFRING_ENCRYPT=1 needs one that is a shared library: the module ssl of this "
            "Python has its own linked in. Install it (Debian: apt install libssl3), or use an encrypted network "
            "(docs/security.md)."
        )
    return True


def encrypt(connection: socket.socket, key: bytes, session: str, *, accepts: bool, seconds: float) -> int:
    """Encrypts a connection, over which nothing was sent yet, once the other side calls this, too.

    Args:
      connection: For data; it does not block from here on.
      key: The secret of the job.
      session: The name of the link, which both ranks know and no other link has.
      accepts: True on one of both sides.
      seconds: How long the other side may take.

    Returns:
      A handle for `tfring_link` of native/core.h; `tfring_tls_close` releases it.

    Raises:
      ConnectionError: The other side has another key, or another program is there.
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
    """Returns a file that has OpenSSL's functions or links to one that has; empty if there is none."""
    import _ssl

    for file in (getattr(_ssl, "__file__", None), ctypes.util.find_library("ssl")):
        with contextlib.suppress(OSError):
            if file is not None and hasattr(ctypes.CDLL(file), "SSL_CTX_set_psk_client_callback"):
                return file
    return ""
