"""Request heads: what Envoy shows us of them, what the legs are given of them, and request ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from extproc.transport.interface import Header

# A client's connection to us, never passed on: RFC 9110 §7.6.1.
_CONNECTION: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "expect",
    }
)
# The former, and what each leg that we send sets itself.
_NOT_FORWARDED: Final = _CONNECTION | {"host", "content-length", "content-type", "accept-encoding", "x-request-id"}
# Ours, Envoy's, and SGLang's per-header overrides of control fields (srt/entrypoints/request_headers.py).
_STEERING_PREFIXES: Final = ("x-pd-", "x-gateway-destination-", "x-envoy-", "x-override-", "x-data-parallel-rank")
_RESPONSE_NOT_FORWARDED: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length"}
)
_PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class HeaderValue(Protocol):
    """envoy.config.core.v3.HeaderValue."""

    key: str
    raw_value: bytes


class RequestHead(NamedTuple):
    """A request's head. Read in one pass: this is done for every request.

    Attributes:
        method, path: the pseudo headers; ``path`` with its query.
        first: the first value of every other header, by lower-case name.
        forwarded: the end-to-end headers that a leg passes on, in HTTP/2 form, in order.
        withheld: names of headers that no worker may get: they are the connection's, or would steer the gateway or a
            worker.
    """

    method: str
    path: str
    first: dict[str, bytes]
    forwarded: list[Header]
    withheld: list[bytes]

    @classmethod
    def of(cls, headers: Iterable[HeaderValue]) -> RequestHead:
        """From the headers of an ext_proc message, pseudo headers among them."""
        method = path = ""
        first: dict[str, bytes] = {}
        forwarded: list[Header] = []
        withheld: list[bytes] = []
        for header in headers:
            name, value = header.key, header.raw_value
            if name[0] == ":":
                if name == ":path":
                    path = value.decode("latin-1")
                elif name == ":method":
                    method = value.decode("latin-1")
                continue
            first.setdefault(name, value)
            if name in _NOT_FORWARDED:
                if name in _CONNECTION:
                    withheld.append(name.encode("latin-1"))
            elif name[0] == "x" and name.startswith(_STEERING_PREFIXES):
                withheld.append(name.encode("latin-1"))
            else:
                forwarded.append((name.encode("latin-1"), value))
        return cls(method, path, first, forwarded, withheld)


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """A worker's response headers without those that are the connection's or ours to set."""
    return [
        (name, value)
        for name, value in headers
        if name not in _RESPONSE_NOT_FORWARDED and not name.startswith((b"x-pd-", b"x-envoy-"))
    ]


def client_request_id(head: RequestHead, names: Sequence[str]) -> bytes | None:
    """The id that the client gave: the first of ``names`` that is there with 1 to 128 visible ASCII characters."""
    first = head.first
    for name in names:
        value = first.get(name)
        if value is not None and _PLAIN_ID.fullmatch(value.decode("latin-1")):
            return value
    return None


def new_request_id(prefix: str) -> bytes:
    """A new request id: ``prefix`` and 24 hexadecimal digits. Of one length, so that none is another's prefix."""
    return b"%b%024x" % (prefix.encode(), random.getrandbits(96))
