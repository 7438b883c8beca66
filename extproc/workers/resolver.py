"""From the host in a worker's URL to the one address Envoy is given."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class ResolveError(Exception):
    """The name has no usable address now; the message says why."""


def literal(host: str) -> str | None:
    """``host`` as a normalised IP address if it is one; with a zone ("fe80::1%eth0") it means nothing to Envoy."""
    if "%" in host:
        return None
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def choose(addresses: Sequence[str], current: str | None, *, avoid: bool = False) -> str:
    """One address of several, always the same for the same set: IPv4 before IPv6, then the lowest.

    ``current`` is kept while it is among them, unless ``avoid`` says that it refuses connections: then the next one.
    """
    ordered = sorted(set(addresses), key=lambda text: (":" in text, ipaddress.ip_address(text).packed))
    if current not in ordered:
        return ordered[0]
    step = 1 if avoid else 0
    return ordered[(ordered.index(current) + step) % len(ordered)]


class Resolver:
    """Looks names up, at most ``concurrency`` at once, each for at most ``timeout`` seconds.

    ``lookup`` answers with the textual IP addresses of (host, port); the default asks the system.
    """

    def __init__(self, lookup: Lookup | None = None, *, concurrency: int = 8, timeout: float = 5.0) -> None:
        self._lookup = lookup or _system_lookup
        self._gate = asyncio.Semaphore(concurrency)
        self._timeout = timeout

    async def resolve(self, host: str, port: int, current: str | None = None, *, avoid: bool = False) -> str:
        """The address for ``host``; see :func:`choose`. An IP literal is its own address. Raises ResolveError."""
        fixed = literal(host)
        if fixed is not None:
            return fixed
        async with self._gate:
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._lookup(host, port)
            except TimeoutError:
                raise ResolveError(f"cannot resolve {host}: no answer within {self._timeout:g} s") from None
            except (OSError, UnicodeError) as error:
                raise ResolveError(f"cannot resolve {host}: {getattr(error, 'strerror', None) or error}") from None
        addresses = [address for text in answer if (address := literal(text))]
        if not addresses:
            raise ResolveError(f"cannot resolve {host}: it has no address")
        return choose(addresses, current, avoid=avoid)


async def _system_lookup(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]
