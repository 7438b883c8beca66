"""CPU time of other processes, all their threads included, ended threads too."""

from __future__ import annotations

import time
from pathlib import Path

_CPUCLOCK_SCHED = 2  # linux/posix-timers.h: the scheduler's count of nanoseconds


def seconds(pid: int) -> float:
    """CPU time of the process since its start, user and system.

    The sum of ``utime`` and ``stime`` in ``/proc/PID/stat``, read from the process's CPU clock instead: nanoseconds
    where ``stat`` counts in ticks of 10 ms. Raises OSError when there is no such process.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def descendants(pid: int) -> dict[int, str]:
    """The process and all below it, with their names."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                before, _, after = (entry / "stat").read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended in the meantime
            parents[int(entry.name)] = int(after.split()[1])
            names[int(entry.name)] = before.partition("(")[2]
    found = {pid: names[pid]} if pid in names else {}
    grew = True
    while grew:
        new = {child: names[child] for child, parent in parents.items() if parent in found and child not in found}
        found |= new
        grew = bool(new)
    return found
