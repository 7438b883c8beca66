"""Who asks: the client's address, and whether it is on this machine.

Envoy says in a header of its own who is at the other end of a client's connection (``names.CLIENT_ADDRESS``); no
client can send that header to it. Whom a client says it speaks for, in ``x-forwarded-for``, is its own word: it can
only make it look farther away than it is. To that list Envoy appends an address, its own for a client on its machine.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from extproc.names import CLIENT_ADDRESS


class Client(NamedTuple):
    """Who asks.

    Attributes:
        address: for people; empty for a process at our unix socket.
        local: it is on this machine, and so is everybody it says it speaks for.
    """

    address: str
    local: bool


def client_of(request: web.Request) -> Client:
    """Who sent a request, to Envoy or straight to the control API's socket."""
    peer, peer_local = _peer(request)
    forwarded = [part.strip() for value in request.headers.getall("x-forwarded-for", []) for part in value.split(",")]
    address = request.headers.get(CLIENT_ADDRESS)
    if address is None:
        address = peer
    else:
        address = _plain(address)
        del forwarded[-1:]  # Envoy's
        if not peer_local:  # an Envoy elsewhere, or somebody who would like to be taken for one
            address = f"{address} by way of {peer}"
    local = peer_local and (not address or _is_loopback(address)) and "forwarded" not in request.headers
    return Client(address, local and all(_is_loopback(part) for part in forwarded if part))


def foreign_origin(request: web.Request) -> str:
    """The web page of another machine that has a browser on this one send the request; empty where none is known."""
    origin = request.headers.get("origin", "")
    host = _host(origin)
    return "" if not origin or host == "localhost" or _is_loopback(host) else _plain(origin)


def _peer(request: web.Request) -> tuple[str, bool]:
    """The other end of the connection: Envoy, or a client that reaches the control API by itself."""
    transport = request.transport
    end = None if transport is None else transport.get_extra_info("socket")
    if end is None:  # closed meanwhile
        return "", False
    if end.family == socket.AF_UNIX:
        return "", True
    host = str(transport.get_extra_info("peername")[0]) if transport else ""
    return host, _is_loopback(host)


def _is_loopback(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _plain(text: str) -> str:
    """A header's text as an answer and the log can have it: bytes that are no text come as surrogates."""
    return text.encode("ascii", "backslashreplace").decode()[:128]


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
