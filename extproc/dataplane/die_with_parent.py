"""Become another program, one that the kernel kills when the parent is gone: ``PARENT_PID PROGRAM ARGUMENT...``.

A script of its own, started with ``python -I -S``, because code between fork and exec in a process with threads (grpcio
has some) can deadlock. Where there is no prctl (not Linux) the program just starts.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main() -> None:
    """Arrange the death signal, make sure that the parent was still there, exec."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  # not needed elsewhere, and slow

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != int(sys.argv[1]):
            sys.exit("parent is gone")
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the caller gave the program


if __name__ == "__main__":
    main()
