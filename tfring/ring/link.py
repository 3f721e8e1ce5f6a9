"""Links: connections and mailboxes between two ranks, from the rendezvous until the native code adopts them."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import struct

from tfring.errors import RendezvousError
from tfring.ring import library
from tfring.transport import mailbox, wire

# A ControlFrame of native/frame.h: magic, version, type, code, rank, other, reason, padding, sequence, message.
_CONTROL_FRAME = struct.Struct("<IHBBiiiiQ992s")
_ABORT = 0
_CONNECT_SECONDS = 5.0
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


@dataclasses.dataclass
class Link:
    """A link to rank `rank`. It owns its descriptors; -1 means none."""

    rank: int
    control: socket.socket
    data: socket.socket | None = None
    own: mailbox.Mailbox | None = None  # the peer writes into it
    mailbox_fd: int = -1
    doorbell_fd: int = -1
    tls: int = 0  # handle of encryption.encrypt

    @property
    def transport(self) -> str:
        """Returns the transport of the data: "shm" or "tcp"."""
        return "shm" if self.mailbox_fd >= 0 else "tcp"

    def adopt_mailbox(self, fds: list[int]) -> str | None:
        """Adopts the peer's mailbox and empties the list, or returns why the mailbox is unusable."""
        try:
            mailbox.check(fds)
        except (OSError, ValueError) as error:
            return f"the shared memory of rank {self.rank} cannot be used: {error}"
        self.mailbox_fd, self.doorbell_fd = fds
        fds.clear()
        return None

    def drop_mailboxes(self) -> None:
        wire.close_all([fd for fd in (self.mailbox_fd, self.doorbell_fd) if fd >= 0])
        self.mailbox_fd = self.doorbell_fd = -1
        if self.own is not None:
            self.own.close()
            self.own = None

    def detach(self, host: bytes) -> library.Link:
        """Hands the descriptors over to the native code."""
        data_fd = -1 if self.data is None else self.data.detach()
        own = (-1, -1) if self.own is None else self.own.detach()
        return library.Link(
            self.rank, self.control.detach(), data_fd, *own, self.mailbox_fd, self.doorbell_fd, host, self.tls
        )

    def send_failure(self, why: library.Error) -> None:
        """Tells the peer why this rank gives up. The peer tells the others, so that no rank waits in vain."""
        library.core().tfring_send_abort(self.control.fileno(), why)
        self.close()

    def close(self) -> None:
        self.control.close()
        library.core().tfring_tls_close(self.tls)
        self.tls = 0
        if self.data is not None:
            self.data.close()
        self.drop_mailboxes()

    def check_still_there(self, ring: str) -> None:
        """Raises if the peer has given up.

        Raises:
          RendezvousError: If the peer has given up, with its reason.
        """
        try:
            frame = self.control.recv(_CONTROL_FRAME.size, _PEEK)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        if len(frame) == _CONTROL_FRAME.size:
            _, _, kind, *_, message = _CONTROL_FRAME.unpack(frame)
            if kind == _ABORT:
                raise RendezvousError(message.partition(b"\0")[0].decode(errors="replace"))
        elif not frame:
            raise RendezvousError(f'Rank {self.rank} went away while ring "{ring}" was forming.')


def data_connection() -> tuple[socket.socket, socket.socket]:
    """Returns two ends of a TCP connection within this host; one of them is handed over to a peer.

    Raises:
      OSError: If the system provides none.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        one = socket.create_connection(listener.getsockname(), _CONNECT_SECONDS)
        try:
            listener.settimeout(_CONNECT_SECONDS)
            while True:  # any process may connect here in the meantime
                other, peer = listener.accept()
                if peer == one.getsockname():
                    break
                other.close()
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return one, other
        except BaseException:
            one.close()
            raise


def adopt_data_connection(fds: list[int]) -> socket.socket:
    """Returns the connection that was handed over and removes it from the list.

    Raises:
      WireError: If the list holds anything other than one TCP connection.
    """
    if len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
        raise wire.WireError("no data connection")
    connection = socket.socket(fileno=fds.pop())
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        connection.close()
        raise wire.WireError("no data connection")
    return connection
