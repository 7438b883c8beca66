"""Where the members of a JSON object stand in its bytes, duplicates too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from extproc.errors import GatewayError

MOST_MEMBERS: Final = 1000  # of one object; no API has a tenth of that, and each costs time that others wait
_WS: Final = rb"[ \t\n\r]*"
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_OPEN: Final = re.compile(_WS + rb"\{")
_KEY: Final = re.compile(rb"[ \t\n\r,]*(" + _STRING + rb")" + _WS + rb":" + _WS)
_CLOSE: Final = re.compile(_WS + rb"\}" + _WS + rb"\Z")

Spans = list[tuple[int, int, int]]  # (key's start, value's start, value's end) of each member


class _Place:
    """A member's own key in a dict that must not lose those whose keys are alike."""

    __slots__ = ()


_BY_PLACE: Final = dict[_Place, msgspec.Raw]


def too_many() -> GatewayError:
    """The error for more than MOST_MEMBERS."""
    return GatewayError("invalid_json", f"an object in the request body has more than {MOST_MEMBERS} members")


def all_members(raw: bytes) -> tuple[list[str], list[msgspec.Raw]]:
    """The keys and values of all members, duplicates too.

    Raises:
        GatewayError: ``invalid_json`` for more than MOST_MEMBERS, of which the rest is not read.
        msgspec.DecodeError: it is not a JSON object.
    """
    keys: list[str] = []

    def place(_: type, key: str) -> _Place:
        if len(keys) == MOST_MEMBERS:
            raise too_many()
        keys.append(key)
        return _Place()

    try:
        values = msgspec.json.decode(raw, type=_BY_PLACE, dec_hook=place)
    except RecursionError:  # also of a body that was read before, when the stack was less deep
        raise GatewayError("invalid_json", "JSON syntax error: nested too deeply") from None
    return keys, list(values.values())


def spans_of(raw: bytes, keys: Iterable[str], values: Iterable[msgspec.Raw]) -> Spans | None:
    """Where every member stands, stepping over values by their known lengths.

    None when ``keys`` and ``values`` are not all members: a dict lacks some where a key is duplicated. Each step checks
    that the value is where it is expected. No JSON value begins with another one, but for numbers, and no comma follows
    then; so the steps cannot go astray into a text that looks like members.
    """
    return _plain_spans(raw, keys, values) or _spaced_spans(raw, values)


def _plain_spans(raw: bytes, keys: Iterable[str], values: Iterable[msgspec.Raw]) -> Spans | None:
    """The spans of a document laid out as writers do: plain keys, one blank or none behind ``:`` and ``,``.

    None when it is not, or when members are missing. This is asked of every request; it takes a third of the time of
    the patterns that follow any layout.
    """
    at = raw.startswith
    if not at(b'{"') or '"' in "".join(keys):  # a quote in a key could pass for its end
        return None
    spans = []
    position = 1
    for key, value in zip(keys, values, strict=True):
        colon = position + len(key) + 1
        if at(b'": ', colon):
            start = colon + 3
        elif at(b'":', colon):
            start = colon + 2
        else:
            return None
        view = memoryview(value)
        if not at(view, start):
            return None
        end = start + len(view)
        spans.append((position, start, end))
        if at(b', "', end):
            position = end + 2
        elif at(b',"', end):
            position = end + 1
        else:
            position = len(raw)  # the last one, or a layout of another kind
    return spans if end == len(raw) - 1 else None


def _spaced_spans(raw: bytes, values: Iterable[msgspec.Raw]) -> Spans | None:
    """The spans of a document of any layout; None when members are missing."""
    opened = _OPEN.match(raw)
    position = opened.end() if opened else 0
    spans = []
    for value in values:
        key = _KEY.match(raw, position)
        if key is None:
            return None
        start = key.end()
        view = memoryview(value)
        if not raw.startswith(view, start):
            return None
        position = start + len(view)
        spans.append((key.start(1), start, position))
    return spans if _CLOSE.match(raw, position) else None
