"""The ext_proc messages of the request path, encoded by hand.

Reading uses protobuf's upb messages (0.9 µs each). Writing composes the few shapes we send from prepared byte strings:
building the same messages through upb objects costs 4 to 10 µs a message, composing them about 1 µs. Field numbers are
those of envoy/service/ext_proc/v3/external_processor.proto and envoy/config/core/v3/base.proto; a test decodes every
message with upb and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import Struct
from typing import Final

from extproc.names import DESTINATION, METADATA_NAMESPACE, PROGRESS_NAMESPACE, UPSTREAM, WATCHED

_OVERWRITE: Final = b"\x18\x02"  # HeaderValueOption.append_action = OVERWRITE_IF_EXISTS_OR_ADD
BODY_CHUNK: Final = 1 << 16  # streamed replies leave in pieces of at most this size, well below gRPC's 4 MB default
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))
_STREAMED: Final = Struct("<BHBHBHBHBH")  # five tags and lengths, one within the other
_LEAST, _MOST = 0x80, 0x4000 - 12  # a body whose lengths, also with the tags around it, are varints of two bytes


def varint(value: int) -> bytes:
    """Protobuf's base-128 encoding of a non-negative integer."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field with a number below 16."""
    return b"%c%b%b" % (number << 3 | 2, varint(len(payload)), payload)


def set_header(name: bytes, value: bytes) -> bytes:
    """A ``HeaderMutation.set_headers`` entry that replaces or adds ``name``."""
    size = len(value)
    if size < 0x60 and len(name) < 0x18:  # every length fits one byte
        key = len(name)
        inner = key + size + 4
        return b"\x0a%c\x0a%c\x0a%c%b\x1a%c%b\x18\x02" % (inner + 4, inner, key, name, size, value)
    return field(1, field(1, field(1, name) + field(3, value)) + _OVERWRITE)


def remove_header(name: bytes) -> bytes:
    """A ``HeaderMutation.remove_headers`` entry."""
    return field(2, name)


# The route adds it to every answer, also to ours, for us to know who answered.
REMOVE_UPSTREAM: Final = remove_header(UPSTREAM.encode())


@lru_cache(4096)  # there are few orders of few workers
def destination_metadata(addresses: str) -> bytes:
    """The ``dynamic_metadata`` field that names the hosts Envoy may use: ``ip:port,...`` in order of preference."""
    return _metadata(METADATA_NAMESPACE, DESTINATION, addresses)


@lru_cache(4096)
def destination_header(addresses: str) -> bytes:
    """The same as a header, for an Envoy that goes by that."""
    return set_header(DESTINATION.encode(), addresses.encode())


def watched_metadata(name: str) -> bytes:
    """The ``dynamic_metadata`` field by which Envoy reports the progress of an answer under ``name``."""
    return _metadata(PROGRESS_NAMESPACE, WATCHED, name)


def _metadata(namespace: str, key: str, value: str) -> bytes:
    inner = field(1, field(1, key.encode()) + field(2, field(3, value.encode())))  # Struct.fields entry: string_value
    outer = field(1, field(1, namespace.encode()) + field(2, field(5, inner)))  # Value.struct_value
    return field(8, outer)


def request_headers_reply(mutation: bytes, metadata: bytes = b"", *, reroute: bool = False) -> bytes:
    """``ProcessingResponse.request_headers``: release the held headers with a header mutation.

    ``reroute`` has Envoy look for the route again, by the headers as they are then.
    """
    if reroute:
        return field(1, field(1, field(2, mutation) + b"\x28\x01")) + metadata  # CommonResponse.clear_route_cache
    return _mutation(1, mutation) + metadata


def request_body_reply(body: bytes, *, end: bool) -> bytes:
    """``ProcessingResponse.request_body`` with a whole streamed body."""
    return _streamed_body(3, body, end=end)


def response_headers_reply(mutation: bytes, metadata: bytes = b"") -> bytes:
    """``ProcessingResponse.response_headers`` with a header mutation."""
    return _mutation(2, mutation) + metadata


def response_headers_replaced(mutation: bytes, body: bytes) -> bytes:
    """``ProcessingResponse.response_headers`` that also puts ``body`` in the place of the answer's, come or not."""
    common = b"\x08\x01" + field(2, mutation) + field(3, field(1, body))  # status CONTINUE_AND_REPLACE
    return field(2, field(1, common))


def response_trailers_reply() -> bytes:
    """``ProcessingResponse.response_trailers`` with nothing changed."""
    return b"\x32\x00"


def response_trailers_without(names: Iterable[bytes]) -> bytes:
    """``ProcessingResponse.response_trailers`` that takes these trailers away."""
    return field(6, field(1, b"".join([remove_header(name) for name in names])))


def immediate_reply(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """``ProcessingResponse.immediate_response``: Envoy answers the client with this, or resets after the head."""
    mutation = b"".join([set_header(name, value) for name, value in headers]) + REMOVE_UPSTREAM
    content = field(1, b"\x08" + varint(status)) + field(2, mutation) + field(3, body)
    return field(7, content + field(5, b"pd_extproc"))


def relayed_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """``ProcessingResponse.streamed_immediate_response`` that opens a reply of our own."""
    pairs = [(b":status", b"%d" % status), *headers]
    header_map = b"".join([field(1, field(1, name) + field(3, value)) for name, value in pairs])
    return field(11, field(1, field(1, header_map)))


def response_body_replies(chunk: bytes, *, end: bool) -> list[bytes]:
    """``ProcessingResponse.response_body`` messages that put pieces of ours in the place of a streamed body."""
    if len(chunk) <= BODY_CHUNK:  # a token's event
        return [_streamed_body(4, chunk, end=end)]
    pieces = _pieces(chunk)
    last = len(pieces) - 1
    return [_streamed_body(4, piece, end=end and at == last) for at, piece in enumerate(pieces)]


def _pieces(chunk: bytes) -> list[bytes]:
    return [chunk[at : at + BODY_CHUNK] for at in range(0, len(chunk), BODY_CHUNK)] or [b""]


def relayed_body(chunk: bytes, *, end: bool) -> list[bytes]:
    """``streamed_immediate_response`` messages that continue a reply of our own."""
    pieces = _pieces(chunk)
    last = len(pieces) - 1
    return [
        field(11, field(2, (field(1, piece) if piece else b"") + (b"\x10\x01" if end and at == last else b"")))
        for at, piece in enumerate(pieces)
    ]


def _mutation(number: int, mutation: bytes) -> bytes:
    """HeadersResponse{response{header_mutation}} in the message's field ``number``."""
    size = len(mutation)
    tag = number << 3 | 2
    if size < 0x78:  # every length fits one byte
        return b"%c%c\x0a%c\x12%c%b" % (tag, size + 4, size + 2, size, mutation)
    inner = varint(size)
    middle = varint(size + len(inner) + 1)
    outer = varint(size + len(inner) + len(middle) + 2)
    return b"%c%b\x0a%b\x12%b%b" % (tag, outer, middle, inner, mutation)


def _streamed_body(number: int, body: bytes, *, end: bool) -> bytes:
    """BodyResponse{response{body_mutation{streamed_response{body, end_of_stream}}}}, the body copied once."""
    size = len(body)
    if _LEAST <= size < _MOST and not end:  # a token's event: all five lengths take two bytes
        lengths = size + 12, size + 9, size + 6, size + 3, size
        five, four, three, two, one = [length * 2 - (length & 0x7F) | 0x80 for length in lengths]
        return _STREAMED.pack(number << 3 | 2, five, 0x0A, four, 0x1A, three, 0x1A, two, 0x0A, one) + body
    tail = b"\x10\x01" if end else b""
    head = b"\x0a" + varint(len(body)) if body else b""
    streamed = len(head) + len(body) + len(tail)
    mutation = varint(streamed)
    common = varint(streamed + len(mutation) + 1)
    response = varint(streamed + len(mutation) + len(common) + 2)
    whole = varint(streamed + len(mutation) + len(common) + len(response) + 3)
    return b"%c%b\x0a%b\x1a%b\x1a%b%b%b%b" % (number << 3 | 2, whole, response, common, mutation, head, body, tail)
