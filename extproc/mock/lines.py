"""Connections on which mock processes speak to each other in lines of text."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from asyncio import Transport


class Lines(asyncio.Protocol):
    """One end of such a connection."""

    def __init__(self) -> None:
        self.transport: Transport = cast("Transport", None)
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The two ends are connected."""
        self.transport = cast("Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Bytes from the other end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.line(line.decode("latin-1"))

    def line(self, line: str) -> None:
        """A line from the other end."""
        raise NotImplementedError

    def send(self, line: str) -> None:
        """A line to the other end, if it is still there."""
        if not self.transport.is_closing():
            self.transport.write(line.encode() + b"\n")
