"""gRPC over HTTP/2 as far as a server needs it: length-prefixed messages, status trailers.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.transport.interface import Header

PREFIX = Struct(">BI")  # compressed flag, length
PREFIX_SIZE = PREFIX.size
DEFAULT_MAX_MESSAGE = 64 << 20  # bytes


class Status(IntEnum):
    """The gRPC status codes that this transport sends."""

    OK = 0
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class FramingError(Exception):
    """The peer's byte stream is not what gRPC allows; ``code`` is the status that tells it so."""

    def __init__(self, code: Status, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def frame(message: bytes) -> bytes:
    """``message`` with its uncompressed prefix."""
    return PREFIX.pack(0, len(message)) + message


def status_trailers(code: int, detail: str) -> tuple[Header, ...]:
    """The trailers that end a call. ``detail`` is percent-encoded as ``grpc-message``; left out when empty."""
    status = (b"grpc-status", b"%d" % code)
    if not detail:
        return (status,)
    # quote() leaves what the gRPC specification allows: printable ASCII except the percent sign itself.
    return (status, (b"grpc-message", quote(detail, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()))


def check_prefix(flag: int, size: int, max_message: int, encoding: bytes | None) -> None:
    """Raise FramingError unless a message with this prefix may be read.

    ``encoding`` is the call's ``grpc-encoding`` header.
    """
    if flag == 1:
        if encoding in (None, b"identity"):
            raise FramingError(Status.INTERNAL, "a message is flagged as compressed but the call names no encoding")
        raise FramingError(Status.UNIMPLEMENTED, "compressed messages are not supported")
    if flag:
        raise FramingError(Status.INTERNAL, f"invalid gRPC frame: flag {flag}")
    if size > max_message:
        raise FramingError(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is larger than {max_message}")


class Reassembly:
    """Cuts one direction of a call into messages when they do not come one per DATA frame."""

    __slots__ = ("_chunks", "_encoding", "_max_message", "_missing", "_size")

    def __init__(self, max_message: int, encoding: bytes | None) -> None:
        self._max_message = max_message
        self._encoding = encoding
        self._chunks: list[bytes] = []  # everything of the unfinished message, its prefix included
        self._size = 0  # of _chunks
        self._missing = PREFIX_SIZE  # bytes without which nothing can be said

    @property
    def empty(self) -> bool:
        """No unfinished message is held."""
        return not self._size

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that ``data`` completes; raises FramingError at the first malformed prefix."""
        if len(data) < self._missing:
            self._chunks.append(data)
            self._size += len(data)
            self._missing -= len(data)
            return
        if self._size:
            data = b"".join((*self._chunks, data))
            self._chunks.clear()
            self._size = 0
        position, end = 0, len(data)
        self._missing = PREFIX_SIZE
        while end - position >= PREFIX_SIZE:
            flag, size = PREFIX.unpack_from(data, position)
            check_prefix(flag, size, self._max_message, self._encoding)
            stop = position + PREFIX_SIZE + size
            if stop > end:
                self._missing = stop - end
                break
            yield data[position + PREFIX_SIZE : stop]
            position = stop
        else:
            self._missing = PREFIX_SIZE - (end - position)
        if position < end:
            self._chunks.append(data[position:] if position else data)
            self._size = end - position
