"""Connections between processes: messages, sockets, the listener, dialing, the handshake, mailboxes."""
