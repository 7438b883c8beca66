"""A request body on its way into a worker: content-length and chunked framing, of which both ends are kept."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Body:
    """Counted, and not kept but for both of its ends; one that is not longer than ``edge`` is all in ``first``."""

    remaining: int  # bytes until the end, or until the end of the current chunk
    chunked: bool
    edge: int  # bytes kept of each end
    size: int = 0
    first: bytes = b""
    last: bytes = b""
    complete: bool = False
    _line: bytearray = field(default_factory=bytearray)  # a chunk-size line that is not yet whole
    _ended: bool = False  # the chunk of size 0 has been seen

    @classmethod
    def of(cls, lower_head: bytes, edge: int) -> Body:
        """The body that follows a head, given in lower case."""
        if b"\r\ntransfer-encoding: chunked\r\n" in lower_head:
            return cls(remaining=0, chunked=True, edge=edge)
        _, found, rest = lower_head.partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0]) if found else 0
        return cls(remaining=length, chunked=False, edge=edge, complete=length == 0)

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to this body; returns what is behind it."""
        if not self.chunked:
            taken, rest = data[: self.remaining], data[self.remaining :]
            self._take(taken)
            self.complete = self.remaining == 0
            return rest
        while data and not self.complete:
            if self.remaining:
                taken, data = data[: self.remaining], data[self.remaining :]
                self._take(taken)
                continue
            data = self._size_line(data)
        return data

    def _size_line(self, data: bytes) -> bytes:
        """Read a chunk-size line, or a trailer. Empty lines are the ends of chunks, and at last of the body."""
        line, newline, rest = data.partition(b"\n")
        self._line += line
        if newline:
            text = bytes(self._line).strip()
            self._line.clear()
            if self._ended:
                self.complete = not text
            elif text:
                self.remaining = int(text.partition(b";")[0], 16)
                self._ended = self.remaining == 0
        return rest

    def _take(self, data: bytes) -> None:
        self.size += len(data)
        self.remaining -= len(data)
        if len(self.first) < self.edge:
            self.first += data[: self.edge - len(self.first)]
        if self.size > self.edge:
            self.last = data[-self.edge :] if len(data) >= self.edge else (self.last + data)[-self.edge :]
