"""The moment between fork and exec of Envoy: ``child.py PARENT_PID PROGRAM ARGUMENT...``.

It makes the kernel kill this process when its parent is gone, lifts the limit of open files, and becomes the program.
A script of its own, started with ``python -I -S``, because code between fork and exec in a process with threads (grpcio
has some) can deadlock. Where there is no prctl (not Linux) that part is left out.
"""

from __future__ import annotations

import os
import resource
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main() -> None:
    """Prepare, make sure that the parent is still there, exec."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  # not needed elsewhere, and slow

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != int(sys.argv[1]):
            sys.exit("parent is gone")
    # A shell's usual 1024 would end at five hundred requests: each has a client's and a worker's connection.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the caller gave the program


if __name__ == "__main__":
    main()
