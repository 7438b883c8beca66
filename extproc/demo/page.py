"""Plain terminal output; bold and dim where the terminal can."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import orjson

_LABEL: Final = 14  # characters
_QUIET_SECONDS: Final = 30.0  # between two signs of life where no terminal shows a running clock
_LONG: Final = 24  # characters of a text in an object, after which it is cut


class Page:
    """What is printed, as people read it."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        colour = self._terminal and "NO_COLOR" not in os.environ
        self._bold, self._dim, self._plain = ("\033[1m", "\033[2m", "\033[0m") if colour else ("", "", "")
        self._clear = ""  # takes a running clock away
        self._width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))

    def line(self, text: str = "") -> None:
        """One line; a running clock makes room for it."""
        print(self._clear + text, flush=True)

    def heading(self, text: str) -> None:
        """What comes next."""
        self.line(f"\n{self._bold}{text}{self._plain}\n")

    def fleet(self, url: str, prefills: Sequence[str], decodes: Sequence[str]) -> None:
        """A picture of who talks to whom."""
        direct = f"  client ───► Envoy {url} ───► "
        egress = "             pd-extproc ───► Envoy's egress ───► "
        others = iter(decodes[1:])
        self.line(f"{direct}decode   {decodes[0]}")
        for drawn in ("│ ▲", "ext_proc │ │", "▼ │"):
            other = next(others, None)
            self.line(f"{drawn:>18}" if other is None else f"{drawn:>18}{' ' * (len(direct) - 18)}decode   {other}")
        self.line(f"{egress}prefill  {prefills[0]}")
        for prefill in prefills[1:]:
            self.line(f"{' ' * len(egress)}prefill  {prefill}")

    def request(self, url: str, body: dict[str, Any]) -> None:
        """What a client sends."""
        self.line(f"  POST {url}\n  {orjson.dumps(body).decode()}\n")

    def leg(
        self, name: str, url: str, sent: dict[str, Any], asked: dict[str, Any], answered: dict[str, Any] | None = None
    ) -> None:
        """What a worker was sent: ``+`` is what the gateway added to what was asked, ``~`` what it changed.

        ``answered``: what of its answer goes on to the other leg.
        """
        self.line(f"  {self._bold}{name:<13}{self._plain} {url}")
        wide = max(16, *map(len, sent))
        for key, value in sent.items():
            mark = " " if key in asked and asked[key] == value else "~" if key in asked else "+"
            text = f"    {mark} {key:<{wide}} "
            text += self._object(value, len(text)) if isinstance(value, dict) else orjson.dumps(value).decode()
            self.line(text if mark != " " else f"{self._dim}{text}{self._plain}")
        for key, value in (answered or {}).items():
            text = f"    ◄ {key:<{wide}} {{{_fields(value)}}}"
            self.line(text if len(text) <= self._width else text[: self._width - 3] + "…}")
        self.line()

    def steps(self, start: float, steps: Iterable[tuple[float | None, str]]) -> None:
        """What happened when, in its order; times are ``time.time()`` seconds, None: it did not happen."""
        self.line(f"  {self._bold}steps{self._plain}\n         0.0 ms  request sent")
        for when, what in sorted((when, what) for when, what in steps if when):
            self.line(f"    {(when - start) * 1000:>8.1f} ms  {what}")

    def dim(self, text: str) -> None:
        """A line of less weight."""
        self.line(f"{self._dim}{text}{self._plain}")

    def beside(self, label: str, left: str, right: str = "") -> None:
        """A row of two columns; without ``right`` the left one may use the whole width."""
        wide = self._width - _LABEL - 4
        wide = wide // 2 if right else wide
        columns = _cut(left, wide - 2), _cut(right, wide - 2)
        for row in range(max(map(len, columns))):
            parts = [column[row] if row < len(column) else "" for column in columns]
            self.line(f"  {label if row == 0 else '':<{_LABEL}}  {parts[0]:<{wide}}{parts[1]}".rstrip())

    @asynccontextmanager
    async def waiting(self, what: str, detail: Callable[[], str] | None = None) -> AsyncIterator[None]:
        """Show that something takes its time, and how long; ``detail`` says how far it is."""
        self._clear = "\r\033[K" if self._terminal else ""
        ticking = asyncio.create_task(self._tick(what, detail))
        try:
            yield
        finally:
            ticking.cancel()
            print(self._clear, end="", flush=True)
            self._clear = ""

    async def _tick(self, what: str, detail: Callable[[], str] | None) -> None:
        pause = 1.0 if self._terminal else _QUIET_SECONDS
        started = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(pause)
            passed = asyncio.get_running_loop().time() - started
            text = f"  {what}: {passed:.0f} s" + (f", {await asyncio.to_thread(detail)}" if detail else "")
            with suppress(BrokenPipeError):  # whoever waits here finds it
                print(self._clear + text, end="" if self._terminal else "\n", flush=True)

    def _object(self, value: dict[str, Any], indent: int) -> str:
        """An object over as many lines as it takes, with its long texts cut and what is null left out."""
        lines = textwrap.wrap(
            f"{{{_fields(value)}}}", self._width - indent, break_long_words=False, break_on_hyphens=False
        )
        return f"\n{' ' * indent}".join(lines)


def _fields(value: dict[str, Any]) -> str:
    return ", ".join(f"{orjson.dumps(key).decode()}:{_short(part)}" for key, part in value.items() if part is not None)


def _short(value: object) -> str:
    if isinstance(value, str) and len(value) > _LONG:
        value = value[: _LONG - 1] + "…"
    return orjson.dumps(value).decode()


def _cut(text: str, width: int) -> list[str]:
    """Text in pieces of a width: no words are looked for in what a model of random weights writes."""
    return [text[start : start + width] for start in range(0, len(text), width)] or [""]
