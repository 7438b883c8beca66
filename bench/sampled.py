"""``python -m bench.sampled ARGUMENT...``: ``pd-extproc ARGUMENT...`` with a sampling profiler inside.

Each SIGUSR2 switches sampling on or off; off writes the stacks, collapsed (``f;g;h COUNT`` per line), to the file that
``PD_BENCH_STACKS`` names. Samples are taken by CPU time, not by the clock: a process that waits, be it for a core,
is not sampled. Time in C counts for the Python function that called it; time in the event loop itself and in reading
sockets is counted for the function that the loop calls next.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.cli import main

if TYPE_CHECKING:
    from types import FrameType

_INTERVAL = 0.001  # seconds of CPU time; the kernel's tick may make it longer


class Sampler:
    """Counts the stacks that SIGPROF interrupts."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._stacks: Counter[str] = Counter()
        self._on = False

    def toggle(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGUSR2."""
        self._on = not self._on
        interval = _INTERVAL if self._on else 0
        signal.setitimer(signal.ITIMER_PROF, interval, interval)
        if not self._on:
            partial = self._output.with_suffix(".partial")
            partial.write_text("".join(f"{stack} {count}\n" for stack, count in self._stacks.items()))
            partial.rename(self._output)

    def sample(self, _number: int, frame: FrameType | None) -> None:
        """Handle SIGPROF."""
        names = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{code.co_qualname} ({'/'.join(code.co_filename.split('/')[-2:])})")
            frame = frame.f_back
        self._stacks[";".join(reversed(names))] += 1


if __name__ == "__main__":
    sampler = Sampler(Path(os.environ["PD_BENCH_STACKS"]))
    signal.signal(signal.SIGPROF, sampler.sample)
    signal.signal(signal.SIGUSR2, sampler.toggle)
    sys.exit(main())
