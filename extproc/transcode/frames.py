"""gRPC messages out of a reply's bytes, cut anywhere.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from extproc.engines.frames import PREFIX
from extproc.errors import GatewayError

# A non-streamed answer with log probabilities of a long prompt is the largest there is: some 200 bytes per token.
MAX_MESSAGE: Final = 64 << 20  # bytes
_SIZE: Final = PREFIX.size


def bad_reply(what: str) -> GatewayError:
    """The error for a reply that is no answer; ``what`` says what is wrong with it."""
    return GatewayError("decode_bad_reply", f"a worker's gRPC reply cannot be used: {what}")


class Frames:
    """Cuts a reply into messages.

    Args:
        limit: how long a message may be, in bytes.
    """

    __slots__ = ("_limit", "_missing", "_parts", "_size")

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._limit = limit
        self._parts: list[bytes] = []  # all there is of the unfinished message, its prefix too
        self._size = 0  # of _parts
        self._missing = _SIZE  # bytes without which nothing more can be said

    @property
    def unfinished(self) -> bool:
        """Whether part of a message is here, and the rest is not."""
        return self._size > 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes, up to the first that is none.

        Raises:
            GatewayError: ``decode_bad_reply`` for a message that is compressed (none was offered) or too long.
        """
        if len(data) < self._missing:
            self._keep(data, self._missing - len(data))
            return
        if self._size:
            data = b"".join((*self._parts, data))
            self._parts.clear()
            self._size = 0
        at, end = 0, len(data)
        while end - at >= _SIZE:
            flag, size = PREFIX.unpack_from(data, at)
            if flag:
                raise bad_reply("a message is compressed, although none was asked for")
            if size > self._limit:
                raise bad_reply(f"a message of {size} bytes is longer than {self._limit}")
            stop = at + _SIZE + size
            if stop > end:
                self._keep(data[at:], stop - end)
                return
            yield data[at + _SIZE : stop]
            at = stop
        self._missing = _SIZE
        if at < end:
            self._keep(data[at:], _SIZE - (end - at))

    def _keep(self, data: bytes, missing: int) -> None:
        if data:
            self._parts.append(data)
            self._size += len(data)
        self._missing = missing
