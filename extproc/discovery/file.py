"""Workers that others list in a file: read again whenever it changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from extproc.discovery.file_format import FileError, read_workers
from extproc.discovery.state import DiscoveryState
from extproc.discovery.wanted import Key, Wanted

POLL_SECONDS: Final = 0.5
_LARGEST: Final = 64 << 20  # bytes

_log: Final = logging.getLogger(__name__)

_Stamp = tuple[int, int, int, int]


class FileWatcher:
    """Follows the file at ``path``, and tells ``found`` after every change who should be registered.

    It is looked at every ``poll`` seconds, through symbolic links, and read when it is another file (renamed over, or
    behind another link, as a ConfigMap is) or has been written to, once it has stayed the same between two looks: while
    somebody writes it in place, the first half of it may well be a list, too. Every ``reread`` seconds it is read
    anyhow: not every file system tells the time of a change. What cannot be used changes nothing.
    """

    def __init__(
        self,
        path: Path,
        api_key: str | None,
        state: DiscoveryState,
        found: Callable[[Mapping[Key, Wanted]], None],
        *,
        reread: float,
        poll: float = POLL_SECONDS,
    ) -> None:
        self._path = path
        self._api_key = api_key
        self._state = state
        self._found = found
        self._reread = reread
        self._poll = poll
        self._digest = b""  # of what is in force
        self._told = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        seen: _Stamp | None = None
        read: _Stamp | None = None
        due = 0.0
        while True:
            stamp = await asyncio.to_thread(self._stamp)
            settled = stamp == seen or not due  # at start nobody is waited for
            seen = stamp
            if settled and (stamp != read or time.monotonic() >= due):
                read, due = stamp, time.monotonic() + self._reread
                await self._look()
            await asyncio.sleep(self._poll)

    def _stamp(self) -> _Stamp | None:
        """What changes with the file; None when there is none."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - of what links lead to, and nothing more
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    async def _look(self) -> None:
        self._state.events["read"] += 1
        try:
            content, workers = await asyncio.to_thread(self._read)
        except FileError as error:
            self._failed("invalid", "its file is not valid", str(error))
            return
        except OSError as error:
            self._failed("unreadable", "its file cannot be read", error.strerror or str(error))
            return
        except RecursionError:
            self._failed("invalid", "its file is not valid", "nested too deeply")
            return
        if self._told:
            _log.info("the list of workers is good again", extra={"file": str(self._path)})
        self._told = ""
        self._state.good(time.time())
        if content != self._digest:
            self._digest = content
            counts = Counter((key.role.value, "listed") for key in workers)
            self._state.count = lambda: counts
            _log.info("read the list of workers", extra={"file": str(self._path), "workers": len(workers)})
            try:
                self._found(workers)
            except Exception:  # noqa: BLE001 - what comes later must still be heard of
                _log.exception("registering what was found failed")

    def _read(self) -> tuple[bytes, dict[Key, Wanted]]:
        """A digest of the content, and the workers; none where it is the one in force."""
        with self._path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise FileError(f"larger than {_LARGEST} bytes")
        digest = hashlib.blake2b(content).digest()
        return digest, {} if digest == self._digest else read_workers(content, self._api_key)

    def _failed(self, reason: str, public: str, why: str) -> None:
        self._state.failed(reason, public)
        if why != self._told:
            self._told = why
            holds = "the last good one holds" if self._digest else "no workers are known yet"
            _log.warning(
                "the list of workers cannot be used; %s", holds, extra={"file": str(self._path), "reason": why}
            )
