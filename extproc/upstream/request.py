"""A leg's request, as the exchange gives it to any egress, in the form of either protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from extproc.names import CLUSTER, DESTINATION
from extproc.transport.interface import Header
from extproc.upstream.host import Http1Host, Http2Host

_CLUSTER: Final = CLUSTER.encode()
_DESTINATION: Final = DESTINATION.encode()
_ROUTING: Final = (_CLUSTER, _DESTINATION)


class Target(NamedTuple):
    """Where a leg may go.

    Attributes:
        host: whose connections.
        name: "ip:port" of the worker.
        authority: what the request is told in ``Host``; empty: what it has.
        proxied: the host is a proxy, which is told of the worker.
        tls: the worker's connection, if it is ours.
    """

    host: Http1Host | Http2Host
    name: bytes
    authority: bytes = b""
    proxied: bool = False
    tls: bool = False


class Request:
    """One leg's request; see ``Egress.send``.

    Attributes:
        cluster: of the worker; see extproc.names.CLUSTER.
        destinations: "ip:port" of those that may be sent it, in order.
        body: may be empty.
        repeated: it was sent a second time.
    """

    __slots__ = ("_headers", "_plain", "body", "cluster", "destinations", "repeated")

    def __init__(self, headers: Sequence[Header], body: bytes) -> None:
        self._headers = headers
        self.body = body
        self.repeated = False
        self.cluster = self.destinations = b""
        plain = []
        for name, value in headers:
            if name == _CLUSTER:
                self.cluster = value
            elif name == _DESTINATION:
                self.destinations = value
            elif name[0] != 58:  # a colon
                plain.append(b"%b: %b\r\n" % (name, value))
        self._plain = b"".join(plain)

    def head(self, target: Target) -> bytes:
        """For HTTP/1.1: request line and headers.

        A proxy gets the whole URI in the request line, as RFC 9112 §3.2.2 has it; one that goes by headers finds those
        that Envoy's egress listener goes by.
        """
        pseudo = dict(self._headers[:4])
        authority = target.authority or pseudo[b":authority"]
        path = pseudo[b":path"]
        if not target.proxied:
            return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (pseudo[b":method"], path, authority, self._plain)
        return b"%b http://%b%b HTTP/1.1\r\nhost: %b\r\n%b: %b\r\n%b: %b\r\n%b\r\n" % (
            *(pseudo[b":method"], authority, path, authority),
            *(_CLUSTER, self.cluster, _DESTINATION, self.destinations, self._plain),
        )

    def fields(self, target: Target) -> list[Header]:
        """For HTTP/2."""
        fields = []
        for name, value in self._headers:
            if name == b":authority" and target.authority:
                fields.append((name, target.authority))
            elif name == b":scheme" and target.tls:
                fields.append((name, b"https"))
            elif target.proxied or name not in _ROUTING:
                fields.append((name, value))
        return fields
