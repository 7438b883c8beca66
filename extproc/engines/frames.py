"""Messages as a gRPC call's body has them: each behind five bytes, a flag and its length.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from extproc.errors import GatewayError

PREFIX: Final = Struct(">BI")  # compressed flag, length
_SIZE: Final = PREFIX.size


def frame(message: bytes) -> bytes:
    """``message`` with its uncompressed prefix."""
    return PREFIX.pack(0, len(message)) + message


def messages(body: bytes) -> list[bytes]:
    """The messages of a whole body. Raises GatewayError (``decode_bad_reply``) where it is not made of such."""
    found, position = [], 0
    while position < len(body):
        if len(body) - position < _SIZE:
            raise GatewayError("decode_bad_reply", "an answer ends within the prefix of a gRPC message")
        flag, size = PREFIX.unpack_from(body, position)
        if flag:
            raise GatewayError("decode_bad_reply", "an answer has a compressed message although none was asked for")
        position += _SIZE
        if len(body) - position < size:
            raise GatewayError("decode_bad_reply", "an answer ends within a gRPC message")
        found.append(body[position : position + size])
        position += size
    return found
