"""Worker JSON taken apart one level deep: values stay raw bytes, so numbers, floats and unknown fields survive."""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.errors import GatewayError

RawObject = dict[str, msgspec.Raw]
RawList = list[msgspec.Raw]

_NULL: Final = b"null"
NULL: Final = msgspec.Raw(_NULL)
_OBJECT: Final = msgspec.json.Decoder(RawObject)
_LIST: Final = msgspec.json.Decoder(RawList)
_INTEGER: Final = msgspec.json.Decoder(int)
_INTEGERS: Final = msgspec.json.Decoder(list[int])
_STRINGS: Final = msgspec.json.Decoder(list[str])
encode: Final = msgspec.json.Encoder().encode


def bad_reply(what: str) -> GatewayError:
    """The error for an answer that cannot be merged; ``what`` says what is wrong with it."""
    return GatewayError("decode_bad_reply", f"a worker's answer cannot be merged: {what}")


def raw_object(raw: bytes | msgspec.Raw, what: str) -> RawObject:
    """The members of a JSON object.

    Raises:
        GatewayError: ``decode_bad_reply`` when ``raw`` is something else; ``what`` names it.
    """
    try:
        return _OBJECT.decode(memoryview(raw))
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_reply(f"{what} is not a JSON object ({error})") from None


def raw_list(raw: bytes | msgspec.Raw | None, what: str) -> RawList:
    """The elements of a JSON list; raises as :func:`raw_object` does, also for None."""
    try:
        return _LIST.decode(memoryview(NULL if raw is None else raw))
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_reply(f"{what} is not a JSON list ({error})") from None


def integer(raw: msgspec.Raw | None, what: str) -> int:
    """A JSON integer; raises as :func:`raw_object` does, also for None."""
    try:
        return _INTEGER.decode(memoryview(NULL if raw is None else raw))
    except msgspec.DecodeError:
        raise bad_reply(f"{what} is not an integer") from None


def integers(raw: msgspec.Raw | None, what: str) -> list[int]:
    """A JSON list of integers; raises as :func:`raw_object` does, also for None."""
    try:
        return _INTEGERS.decode(memoryview(NULL if raw is None else raw))
    except msgspec.DecodeError:
        raise bad_reply(f"{what} is not a list of integers") from None


def strings(raw: msgspec.Raw | None, what: str) -> list[str]:
    """A JSON list of strings; raises as :func:`raw_object` does, also for None."""
    try:
        return _STRINGS.decode(memoryview(NULL if raw is None else raw))
    except msgspec.DecodeError:
        raise bad_reply(f"{what} is not a list of strings") from None


def is_null(raw: msgspec.Raw | None) -> bool:
    """Whether a member is absent or null."""
    if raw is None:
        return True
    view = memoryview(raw)
    return view.nbytes == len(_NULL) and view.tobytes() == _NULL


def raw(value: object) -> msgspec.Raw:
    """``value``, which may contain raw parts, as raw JSON."""
    return msgspec.Raw(encode(value))
