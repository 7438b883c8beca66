"""Request heads: what Envoy shows us of them, what the legs are given of them, and request ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from envoy.config.core.v3.base_pb2 import HeaderValue as EnvoyHeaderValue
from envoy.config.core.v3.base_pb2 import Metadata
from google.protobuf.struct_pb2 import Value

from extproc.names import METADATA_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE, UPSTREAM
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
# Ours, Envoy's, SGLang's per-header overrides of control fields (srt/entrypoints/request_headers.py), and what llm-d's
# routing sidecar goes by (pkg/common/routing/common.go).
_STEERING_PREFIXES: Final = (
    "x-pd-",
    "x-gateway-destination-",
    "x-envoy-",
    "x-override-",
    "x-data-parallel-",
    "x-smg-",
    "x-prefiller-",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-",
    "x-llm-d-",
)
# The client's own name for what belongs together, which steers nothing in a worker; the peer passes it on, too.
_HARMLESS: Final = frozenset({"x-smg-routing-key"})
_RESPONSE_NOT_FORWARDED: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length"}
)
_REMEMBERED_NAMES: Final = 4096
_REMEMBERED_LENGTH: Final = 64
_PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class HeaderValue(Protocol):
    """envoy.config.core.v3.HeaderValue."""

    key: str
    raw_value: bytes


class _Names:
    """What is done with a header by its name, remembered: the same few names come with every request."""

    def __init__(self) -> None:
        self.usual: dict[str, bytes | None] = {}  # in HTTP/2 form; None: not passed on
        self.withheld: set[str] = set()

    def of(self, fields: dict[str, bytes]) -> dict[str, bytes | None]:
        """The HTTP/2 form of every name in ``fields``, None for those that are not passed on."""
        known = self.usual
        return known if fields.keys() <= known.keys() else self._learnt(fields)

    def _learnt(self, names: Iterable[str]) -> dict[str, bytes | None]:
        """Classify ``names``. A client that makes some up cannot make the memory grow: few and short ones are kept."""
        if len(self.usual) > _REMEMBERED_NAMES:
            self.usual.clear()
            self.withheld.clear()
        others: dict[str, bytes | None] = {}
        for name in names:
            steers = _steers(name)
            if (steers or name in _CONNECTION) and len(name) <= _REMEMBERED_LENGTH:
                self.withheld.add(name)
            dropped = steers or name[0] == ":" or name in _NOT_FORWARDED
            kept = self.usual if len(name) <= _REMEMBERED_LENGTH else others
            kept[name] = None if dropped else name.encode("latin-1")
        return {**self.usual, **others} if others else self.usual


_names: Final = _Names()


class RequestHead(NamedTuple):
    """A request's head.

    Attributes:
        method, path: the pseudo headers; ``path`` with its query.
        fields: the (last) value of every header, by lower-case name.
        forwarded: the end-to-end headers that a leg passes on, in HTTP/2 form, in order.
        withheld: names of headers that no worker may get: they are the connection's, or would steer the gateway or a
            worker.
        within: the endpoints ("ip:port") among which Envoy wants its workers; None: any.
    """

    method: str
    path: str
    fields: dict[str, bytes]
    forwarded: list[Header]
    withheld: list[bytes]
    within: frozenset[str] | None = None

    @classmethod
    def of(cls, headers: Iterable[HeaderValue]) -> RequestHead:
        """From the headers of an ext_proc message, pseudo headers among them.

        Measured with ten headers: 10 µs, half of it reading protobuf's fields; classifying each name anew took 17.
        """
        pairs = [(header.key, header.raw_value) for header in headers]
        fields = dict(pairs)
        known = _names.of(fields)
        forwarded = [(encoded, value) for name, value in pairs if (encoded := known[name])]
        withheld = _withheld(fields) if known is not _names.usual or not _names.withheld.isdisjoint(fields) else []
        method = fields.get(":method", b"").decode("latin-1")
        return cls(method, fields.get(":path", b"").decode("latin-1"), fields, forwarded, withheld)


def _withheld(names: Iterable[str]) -> list[bytes]:
    return [name.encode("latin-1") for name in names if name in _CONNECTION or _steers(name)]


def _steers(name: str) -> bool:
    return name.startswith(_STEERING_PREFIXES) and name not in _HARMLESS


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """A worker's response headers without those that are the connection's or ours to set."""
    return [
        (name, value)
        for name, value in headers
        if name not in _RESPONSE_NOT_FORWARDED and not name.startswith((b"x-pd-", b"x-envoy-"))
    ]


def with_served(headers: Iterable[HeaderValue], context: Metadata) -> Iterable[HeaderValue]:
    """An answer's headers with who gave it, where Envoy says that in metadata only; a header of ours that says it wins.

    Source: Gateway API Inference Extension, docs/proposals/004-endpoint-picker-protocol; in Envoy ``selected_host_key``
    of the policy ``override_host`` (istio/istio pull request 59538 sets it).
    """
    found = context.filter_metadata
    if METADATA_NAMESPACE not in found:
        return headers
    fields = found[METADATA_NAMESPACE].fields
    if SERVED not in fields:
        return headers
    return [EnvoyHeaderValue(key=UPSTREAM, raw_value=fields[SERVED].string_value.encode()), *headers]


def subset(context: Metadata) -> frozenset[str] | None:
    """The endpoints ("ip:port") that Envoy says are the only ones to choose from; None: it says nothing of that.

    A list, or a text with commas, as filters make it of a header. Of anything else it is empty: nobody may be chosen.

    Source: as of :func:`with_served`.
    """
    found = context.filter_metadata
    if SUBSET_NAMESPACE not in found:
        return None
    fields = found[SUBSET_NAMESPACE].fields
    return _endpoints(fields[SUBSET].SerializeToString()) if SUBSET in fields else None


@lru_cache(maxsize=64)  # a gateway names the same ones again and again, and may name a whole pool
def _endpoints(said: bytes) -> frozenset[str]:
    value = Value.FromString(said)
    items = value.list_value.values if value.HasField("list_value") else [value]
    names = [name.strip() for item in items for name in item.string_value.split(",")]
    return frozenset(filter(None, names))


def client_request_id(head: RequestHead, names: Sequence[str]) -> bytes | None:
    """The id that the client gave: the first of ``names`` that is there with 1 to 128 visible ASCII characters."""
    fields = head.fields
    for name in names:
        value = fields.get(name)
        if value is not None and _PLAIN_ID.fullmatch(value.decode("latin-1")):
            return value
    return None


def new_request_id(prefix: str) -> bytes:
    """A new request id: ``prefix`` and 24 hexadecimal digits. Of one length, so that none is another's prefix."""
    return b"%b%024x" % (prefix.encode(), random.getrandbits(96))
