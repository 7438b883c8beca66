"""How long the machine stood still: what is late by that says nothing of the gateway.

Machines that run tests are shared. Now and then one stops for seconds, or has no time for a process that wants a few
microseconds. A process that only sleeps notices, and is asked where something took too long.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WATCHER = """
import select, sys, time
PAUSE = 0.02
stood, last = [], time.monotonic()
while True:
    asked = select.select([sys.stdin], [], [], PAUSE)[0]
    now = time.monotonic()
    if now - last > 5 * PAUSE:
        stood.append((now, now - last - PAUSE))
    last = now
    if asked:
        line = sys.stdin.readline()
        if not line:
            break
        print(sum(seconds for when, seconds in stood if when > now - float(line)), flush=True)
"""
_BEFORE = 10.0  # seconds between what took too long and the question, at most
_watchers: list[subprocess.Popen[str]] = []


@contextmanager
def watched() -> Iterator[None]:
    """Have the machine watched."""
    command = [sys.executable, "-S", "-E", "-c", _WATCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        _watchers.append(watcher)
        yield
        _watchers.remove(watcher)


def stood_still(seconds: float) -> float:
    """How many of the last ``seconds`` the machine stood still; 0 where nobody watches."""
    if not _watchers:
        return 0.0
    asked, answers = _watchers[-1].stdin, _watchers[-1].stdout
    assert asked is not None
    assert answers is not None
    asked.write(f"{seconds}\n")
    asked.flush()
    return float(answers.readline())


class Within(float):
    """An upper bound in seconds. To compare with it allows for a machine that stood still meanwhile."""

    __slots__ = ()
    __hash__ = float.__hash__

    def __gt__(self, seconds: float) -> bool:
        bound = float(self)
        return seconds < bound or seconds < bound + stood_still(seconds + _BEFORE)

    def __lt__(self, seconds: float) -> bool:
        return not self > seconds
