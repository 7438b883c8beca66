"""Ending a gRPC server's connections below its back: there is no other way to have one break off as a process does."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def peer_port(peer: str) -> int:
    """The port in what gRPC calls a peer: ``ipv4:127.0.0.1:40000``."""
    return int(peer.rpartition(":")[2])


def cut(port: int, peer: int | None = None) -> None:
    """Break off the connections accepted on ``port``: that from the peer's port ``peer``, or all."""
    for connection in _copies():
        with connection, contextlib.suppress(OSError):
            if connection.getsockname()[1] == port and peer in (None, connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)


def _copies() -> Iterator[socket.socket]:
    """Every TCP socket of this process, by another descriptor."""
    for entry in list(_DESCRIPTORS.iterdir()):
        try:
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # gone meanwhile
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6):
            yield copy
        else:
            copy.close()
