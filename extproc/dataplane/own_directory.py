"""A directory for files of this process alone, which a later process removes when this one was killed.

Whose it is says a lock that ends with its process, whatever its end and wherever its ids are counted: containers may
share the directory for temporary files. What is not locked yet has no file ``owner``, and is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "pd-extproc-"
_NAME: Final = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp makes it
_OWNER: Final = "owner"
_logger = logging.getLogger(__name__)


class OwnDirectory:
    """Made, with mode 0700, where the system keeps temporary files; those of killed processes there are removed."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: int | None = _locked(self.path, fcntl.LOCK_EX)  # another process may be having a look at it
        (self.path / _OWNER).write_text(f"{os.getpid()}\n")
        for other in self.path.parent.glob(f"{_PREFIX}*"):
            if other != self.path:
                _remove_stale(other)

    def remove(self) -> None:
        """Remove it with what is in it. Repeating it changes nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_stale(path: Path) -> None:
    """Remove a directory of this user's, made by a process that is gone."""
    with suppress(OSError):  # somebody else's, or somebody else was faster
        if not _NAME.fullmatch(path.name) or path.lstat().st_uid != os.geteuid():
            return
        lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if (path / _OWNER).is_file():
                shutil.rmtree(path)
                _logger.info("removed what a killed process has left", extra={"path": str(path)})
        finally:
            os.close(lock)


def _locked(path: Path, how: int) -> int:
    """A descriptor that holds the lock of a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
