"""Structured logs on the standard library's ``logging``: what a line looks like, and how it leaves the process.

Fields are given with ``extra=``: ``log.info("request", extra={"request_id": id, "model": model})`` renders
``request_id=... model=...`` in the human format and as members of the object with ``--log-json``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
import time
from enum import Enum

import orjson

# A pipe that polls writable takes at least PIPE_BUF bytes at once without blocking (pipe(7)); 4096 on Linux.
_UNBLOCKED_BYTES = select.PIPE_BUF
_RETRY_SECONDS = 0.02
_PATIENCE_MS = 1000
_MAX_PENDING_BYTES = 4 * 1024 * 1024


class LogLevel(Enum):
    """The values of ``--log-level``."""

    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"

    @property
    def number(self) -> int:
        """The level of the ``logging`` module."""
        return _NUMBERS[self]


_NUMBERS = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARN: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_NAMES = {number: level.value for level, number in _NUMBERS.items()} | {logging.CRITICAL: "error"}

# What every record has; anything else in its dictionary came with `extra=`. Fields that are None are left out.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Clock:
    """Renders RFC 3339 UTC time with milliseconds; the part before them is computed once a second."""

    __slots__ = ("_prefix", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._prefix = ""

    def render(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{int((created - second) * 1000):03d}Z"


def _quoted(value: object) -> str:
    """``value`` as it stands behind ``key=``: quoted as JSON unless it is one plain printable word."""
    text = value if type(value) is str else f"{value:.3f}" if type(value) is float else str(value)
    if text and text.isprintable() and " " not in text and '"' not in text and "=" not in text:
        return text
    return orjson.dumps(_without_surrogates(text)).decode()


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class HumanFormatter(logging.Formatter):
    """``time LEVEL logger message key=value ...``; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock()

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message and the values contain."""
        message = record.getMessage()
        if not message.isprintable():
            message = _quoted(message)
        level = _NAMES.get(record.levelno, record.levelname).upper()
        line = f"{self._clock.render(record.created)} {level:<5} {record.name} {message}"
        for key, value in record.__dict__.items():
            if key not in _STANDARD and value is not None:
                line += f" {key}={_quoted(value)}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the fields; ``exception`` holds a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock()

    def format(self, record: logging.LogRecord) -> str:
        """The object; a field that JSON has no type for is rendered by ``str``."""
        entry: dict[str, object] = {
            "time": self._clock.render(record.created),
            "level": _NAMES.get(record.levelno, record.levelname),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in record.__dict__.items():
            if key not in _STANDARD and key not in entry and value is not None:
                entry[key] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(entry, default=str).decode()
        except orjson.JSONEncodeError:  # lone surrogates, integers beyond 64 bits
            return orjson.dumps({key: _without_surrogates(str(value)) for key, value in entry.items()}).decode()


class TickHandler(logging.Handler):
    """Writes to a file descriptor; on an event loop the lines of one tick leave in one write that never blocks.

    A reader of our standard error that has stopped reading must not stop the gateway: while the descriptor does not
    poll writable, lines wait in memory, and past 4 MiB of them new ones are counted and dropped. Without a running
    loop (start, shutdown, other threads) lines are written at once, waiting at most a second for the reader.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._pending = bytearray()
        self._scheduled: asyncio.AbstractEventLoop | None = None
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; called with the handler's lock held."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - as logging.Handler does: a broken log call must not break its caller
            self.handleError(record)
            return
        if len(self._pending) > _MAX_PENDING_BYTES:
            self._dropped += 1
            return
        self._pending += line
        self._pending += b"\n"
        loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop raises, which costs more than the line
        if loop is None:
            self._write_all()
        elif self._scheduled is not loop:  # also when a loop was closed with its flush still to come
            self._scheduled = loop
            loop.call_soon(self._tick, loop)

    def flush(self) -> None:
        """Write everything that waits; ``logging`` calls it when the process ends."""
        self.acquire()
        try:
            self._write_all()
        finally:
            self.release()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.acquire()
        try:
            self._scheduled = None
            while self._pending:
                if not self._poll.poll(0):
                    self._scheduled = loop
                    loop.call_later(_RETRY_SECONDS, self._tick, loop)
                    return
                self._write_some()
        finally:
            self.release()

    def _write_all(self) -> None:
        while self._pending:
            if not self._poll.poll(_PATIENCE_MS):
                self._pending.clear()
                return
            self._write_some()

    def _write_some(self) -> None:
        # Whole lines where possible, so that Envoy's lines on the same descriptor fall between ours, not into them.
        size = self._pending.rfind(b"\n", 0, _UNBLOCKED_BYTES) + 1 or _UNBLOCKED_BYTES
        try:
            del self._pending[: os.write(self._descriptor, self._pending[:size])]
        except BlockingIOError:  # somebody made the descriptor non-blocking; the caller polls again
            return
        except OSError:  # the reader is gone; there is nobody to tell
            self._pending.clear()
        if self._dropped and len(self._pending) < _MAX_PENDING_BYTES // 2:
            self._pending += self._notice_of_dropped()
            self._dropped = 0

    def _notice_of_dropped(self) -> bytes:
        text = "log lines dropped: standard error is not being read"
        notice = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        notice.lines = self._dropped
        return f"{self.format(notice)}\n".encode()


def configure(level: LogLevel, *, as_json: bool = False, descriptor: int | None = None) -> None:
    """Send this package's logs from ``level`` on, and other libraries' warnings, to ``descriptor`` (standard error)."""
    _collect_only_what_is_rendered()
    handler = TickHandler(sys.stderr.fileno() if descriptor is None else descriptor)
    handler.setFormatter(JsonFormatter() if as_json else HumanFormatter())
    root = logging.getLogger()
    for previous in root.handlers[:]:
        root.removeHandler(previous)
        previous.flush()
        previous.close()
    root.addHandler(handler)
    root.setLevel(max(level.number, logging.WARNING))
    logging.getLogger("extproc").setLevel(level.number)


def _collect_only_what_is_rendered() -> None:
    """The switches of the logging HOWTO's "Optimization"."""
    logging._srcfile = None  # noqa: SLF001 - the documented switch for "no caller"
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
