"""Request heads: what Envoy shows us of them, what the legs are given of them, and request ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from extproc.transport.interface import Header

# Never passed on: RFC 9110 §7.6.1 (connection-specific), what we set ourselves, and what would steer Envoy or a worker.
_NOT_FORWARDED: Final = frozenset(
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
        "host",
        "expect",
        "content-length",
        "content-type",
        "accept-encoding",
    }
)
# Ours, Envoy's, and SGLang's per-header overrides of control fields (srt/entrypoints/request_headers.py).
STEERING_PREFIXES: Final = ("x-pd-", "x-gateway-destination-", "x-envoy-", "x-override-")
STEERING_HEADERS: Final = frozenset({"x-data-parallel-rank"})
_RESPONSE_NOT_FORWARDED: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length"}
)
_PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's head.

    Attributes:
        method, path: the pseudo headers; ``path`` with its query.
        fields: the other headers with their values as bytes, in order; names in lower case.
    """

    method: str
    path: str
    fields: Sequence[tuple[str, bytes]]

    @classmethod
    def of(cls, headers: Iterable[tuple[str, bytes]]) -> RequestHead:
        """From the headers of an ext_proc message, pseudo headers among them."""
        method = path = ""
        fields = []
        for name, value in headers:
            if name[0] != ":":
                fields.append((name, value))
            elif name == ":path":
                path = value.decode("latin-1")
            elif name == ":method":
                method = value.decode("latin-1")
        return cls(method, path, fields)

    def first(self, name: str) -> bytes | None:
        """The first value of a header."""
        for key, value in self.fields:
            if key == name:
                return value
        return None

    def steering(self) -> Iterator[str]:
        """The names of headers that a client must not have: they would steer the gateway or a worker."""
        for name, _ in self.fields:
            if name[0] == "x" and (name.startswith(STEERING_PREFIXES) or name in STEERING_HEADERS):
                yield name

    def forwarded(self) -> list[Header]:
        """The end-to-end headers that a leg of ours passes on, in HTTP/2 form."""
        return [
            (name.encode("latin-1"), value)
            for name, value in self.fields
            if name not in _NOT_FORWARDED
            and not (name[0] == "x" and (name.startswith(STEERING_PREFIXES) or name in STEERING_HEADERS))
        ]


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """A worker's response headers without those that are the connection's or ours to set."""
    return [
        (name, value)
        for name, value in headers
        if name not in _RESPONSE_NOT_FORWARDED and not name.startswith((b"x-pd-", b"x-envoy-"))
    ]


def client_request_id(head: RequestHead, names: Sequence[str]) -> str | None:
    """The id that the client gave: the first of ``names`` that is there with 1 to 128 visible ASCII characters."""
    for name in names:
        value = head.first(name)
        if value is not None:
            text = value.decode("latin-1")
            if _PLAIN_ID.fullmatch(text):
                return text
    return None


def new_request_id(prefix: str) -> str:
    """A new request id: ``prefix`` and 24 hexadecimal digits. Of one length, so that none is another's prefix."""
    return f"{prefix}{random.getrandbits(96):024x}"
