"""Where a server listens or a client connects: ``unix:/path`` or ``host:port``; and who may take a socket file."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROBE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix domain socket, by file name."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP endpoint. ``host`` has no brackets; port 0 asks the kernel for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Parse ``unix:/path`` (also ``unix:///path``) or ``host:port``, an IPv6 host in brackets; raises ValueError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path:
            raise ValueError(f"{text!r}: the socket path is empty")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{text!r}: expected unix:/path or host:port, an IPv6 host in brackets")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text!r}: the port must be between 0 and 65535")
    return TcpAddress(host, int(port))


async def claim_socket_file(path: str) -> None:
    """Make ``path`` free for binding: a socket file that nobody serves any more is removed.

    Raises OSError (EADDRINUSE) when a live server answers there, and (EEXIST) when the file is not a socket.
    """
    file = Path(path)
    if not file.exists():  # noqa: ASYNC240 -- once at start, on a local file system
        return
    if not file.is_socket():  # noqa: ASYNC240
        raise OSError(errno.EEXIST, "exists and is not a socket", path)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_unix_connection(path)
    except (ConnectionRefusedError, FileNotFoundError):
        file.unlink(missing_ok=True)  # noqa: ASYNC240
        return
    except TimeoutError:  # its backlog is full: somebody is alive, if not well
        raise OSError(errno.EADDRINUSE, "another server listens on the socket", path) from None
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    raise OSError(errno.EADDRINUSE, "another server listens on the socket", path)


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A socket file that we bound. It is removed only while it is still ours, never a successor's."""

    path: str
    identity: tuple[int, int]

    @classmethod
    def bound(cls, path: str) -> SocketFile:
        """Remember the file that was just bound."""
        return cls(path, _identity(path))

    def remove(self) -> None:
        """Remove the file unless somebody replaced it."""
        with suppress(FileNotFoundError):
            if _identity(self.path) == self.identity:
                Path(self.path).unlink()


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice within half a minute that the other machine has vanished; a unix socket needs no such."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)  # seconds of silence before the first probe
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)  # ms that sent bytes may go unanswered


def _identity(path: str) -> tuple[int, int]:
    """Inode and modification time: inode numbers alone are used again at once."""
    status = Path(path).stat()
    return status.st_ino, status.st_mtime_ns
