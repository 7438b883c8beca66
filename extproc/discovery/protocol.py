"""Which protocol a server speaks: Kubernetes names addresses and ports only.

As with the peer, HTTP wins where a server speaks both. What is asked for does not matter, only in what it is answered:
an HTTP/1.1 server answers a request that it does not know, too, and a gRPC server (HTTP/2 with prior knowledge, RFC
9113 section 3.3) begins with a SETTINGS frame.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and an empty SETTINGS frame
_FRAME_HEAD: Final = 9  # bytes
_SETTINGS: Final = 4  # the type of a frame
_GET: Final = "GET / HTTP/1.1\r\nhost: {}\r\nuser-agent: pd-extproc\r\nconnection: close\r\n\r\n"


class NoProtocolError(Exception):
    """The server cannot be reached, or speaks neither; the message says which."""


async def protocol_of(host: str, port: int, within: float) -> str:
    """``http`` or ``grpc``; each of two questions has ``within`` so many seconds. Raises NoProtocolError."""
    literal = f"[{host}]" if ":" in host else host
    answer = await _ask(host, port, _GET.format(f"{literal}:{port}").encode(), len(b"HTTP/1."), within)
    if answer.startswith(b"HTTP/1."):
        return "http"
    answer = await _ask(host, port, _PREFACE, _FRAME_HEAD, within)
    if len(answer) == _FRAME_HEAD and answer[3] == _SETTINGS:
        return "grpc"
    raise NoProtocolError("it answers neither over HTTP nor over gRPC")


async def _ask(host: str, port: int, question: bytes, size: int, within: float) -> bytes:
    """The first ``size`` bytes of the answer, or fewer where it ends or takes too long. Raises NoProtocolError."""
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise NoProtocolError(f"no connection within {within:g} s") from None
    except OSError as error:
        raise NoProtocolError(error.strerror or str(error)) from None
    try:
        writer.write(question)
        async with asyncio.timeout(within):
            return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
