"""Server-sent events: bytes cut anywhere in, whole events out, and back (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DONE: Final = b"[DONE]"
# A line end followed by an empty line. A CR at the end of the buffer may be half a CRLF: it is taken as a line end, and
# the LF that then begins the next buffer is an empty line, which means nothing.
_BLANK: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_BLANK_MAX: Final = 4
_PLAIN: Final = b"data: "


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``data`` is None when it has no data line; ``other`` holds its other lines, comments too, as sent."""

    data: bytes | None
    other: bytes = b""

    def framed(self) -> bytes:
        """The event's bytes on the wire."""
        if self.data is None:
            return self.other + b"\n"
        if b"\n" in self.data:
            return b"%bdata: %b\n\n" % (self.other, self.data.replace(b"\n", b"\ndata: "))
        return b"%bdata: %b\n\n" % (self.other, self.data)


class EventSplitter:
    """Cuts a stream of bytes into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._plain = True  # no CR was seen: finding two LFs is several times faster than the pattern

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes."""
        buffer = self._buffer
        search = max(0, len(buffer) - _BLANK_MAX)
        buffer += chunk
        self._plain = self._plain and b"\r" not in chunk
        events = []
        start = 0
        while blank := self._blank(search):
            if event := _parsed(bytes(buffer[start : blank[0]])):
                events.append(event)
            start = search = blank[1]
        del buffer[:start]
        return events

    def _blank(self, start: int) -> tuple[int, int] | None:
        """Where the next end of an event begins and ends."""
        if self._plain:
            at = self._buffer.find(b"\n\n", start)
            return None if at < 0 else (at, at + 2)
        match = _BLANK.search(self._buffer, start)
        return match.span() if match else None

    def finish(self) -> list[Event]:
        """What is left at the end of the stream, as an event: some servers end without the last empty line."""
        event = _parsed(bytes(self._buffer))
        self._buffer.clear()
        return [event] if event else []


def _parsed(text: bytes) -> Event | None:
    if text.startswith(_PLAIN) and b"\n" not in text and b"\r" not in text:
        return Event(text[len(_PLAIN) :])
    data: list[bytes] = []
    other = b""
    for line in text.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif line:
            other += line + b"\n"
    if not data:
        return Event(None, other) if other else None
    return Event(b"\n".join(data), other)
