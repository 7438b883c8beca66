"""The run directory: where the sockets between Envoy and the sidecar are."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The default's name where the port is any (settings.py): a later start has another one.
_OF_PROCESS: Final = re.compile(r"pd-extproc-pid(\d+)(-\d+)?")
SERVING: Final = "serving"  # a file with the control API's address, there while the gateway serves
_MADE_LONG_AGO: Final = 60.0  # seconds; between making one and locking it lie microseconds


@contextmanager
def held(path: Path, foreign: Path | None = None) -> Iterator[None]:
    """Make ``path`` (mode 0700) if need be and hold it for this process; at the end, nothing of ours is left in it.

    ``foreign`` is a socket of somebody else's, perhaps in ``path``: it is left alone.

    A second process that wants it is refused: it would take the first one's sockets away. So is a directory that
    belongs to another user, who could put sockets of his own there. A directory that was there before (a volume
    shared with Envoy's container) keeps its mode and stays. Raises OSError.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
        made = True
    except FileExistsError:
        made = False
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{path} belongs to another user")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{path} is in use by another pd-extproc") from None
        _remove_sockets(path, foreign)  # those of a process that was killed
        if _OF_PROCESS.fullmatch(path.name):
            _remove_stale(path)
        try:
            yield
        finally:
            _remove_sockets(path, foreign)
            if made:
                with suppress(OSError):  # somebody else's file is in it
                    path.rmdir()
    finally:
        os.close(descriptor)


@contextmanager
def announced(path: Path, control: str) -> Iterator[None]:
    """Say in ``path``, which is held, that all serves and where the control API is, for ``pd-extproc health``."""
    file = path / SERVING
    file.write_text(f"{control}\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove directories like ``path``, this user's and beside it, whose processes were killed."""
    for other in path.parent.glob("pd-extproc-pid*"):
        named = _OF_PROCESS.fullmatch(other.name)
        with suppress(OSError):  # somebody else's file is in it, or somebody else was faster
            if other == path or named is None or _is_alive(int(named[1])) or not _is_old_and_ours(other):
                continue
            descriptor = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process of another container may have it
                _remove_sockets(other, None)
                other.rmdir()
            finally:
                os.close(descriptor)


def _is_old_and_ours(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _MADE_LONG_AGO


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no process at all, so not one of ours either
        return True
    return True


def _remove_sockets(path: Path, foreign: Path | None) -> None:
    for entry in path.iterdir():
        if entry.name == SERVING or (entry != foreign and stat.S_ISSOCK(entry.lstat().st_mode)):
            entry.unlink(missing_ok=True)
