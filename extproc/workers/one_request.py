"""One request over a connection of its own, which is closed as soon as what is wanted of the answer is there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, TypeVar

_Wanted = TypeVar("_Wanted")
_Receiver = TypeVar("_Receiver", bound=asyncio.Protocol)


class ConnectionTimeoutError(Exception):
    """There was no connection in time."""


class BadAnswerError(ValueError):
    """What came is not an answer in HTTP/1, or is too large; the message says why."""


class Tls(NamedTuple):
    """With what a server's certificate is verified, and for which name."""

    context: ssl.SSLContext
    name: str


class Where(NamedTuple):
    """An address (without brackets) and how to connect to it; ``connect`` is how many seconds that may take."""

    ip: str
    port: int
    connect: float
    tls: Tls | None


async def ask(
    where: Where,
    request: bytes,
    receiver: Callable[[], _Receiver],
    wanted: Callable[[_Receiver], asyncio.Future[_Wanted]],
) -> _Wanted:
    """Send ``request``, the bytes of a whole HTTP/1 request, and return what ``receiver`` makes of the answer.

    Args:
        where, request: see above.
        receiver: makes what receives the answer.
        wanted: that one's result, once it is there.

    Raises:
        ConnectionTimeoutError: no connection in time.
        OSError: there is no connection, or it broke; ssl.SSLError among them.
        BadAnswerError: see there.
    """
    context, name = where.tls or (None, None)
    try:
        async with asyncio.timeout(where.connect):
            transport, answer = await asyncio.get_running_loop().create_connection(
                receiver, where.ip, where.port, ssl=context, server_hostname=name
            )
    except TimeoutError:
        raise ConnectionTimeoutError from None
    try:
        transport.write(request)
        return await wanted(answer)
    finally:
        transport.abort()
