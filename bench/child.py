"""Processes that the benchmark starts: their logs kept, their end certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPOSITORY = Path(__file__).parent.parent
_STOP_SECONDS = 10


def free_ports(number: int) -> list[int]:
    """Loopback TCP ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@dataclass(slots=True)
class Child:
    """A process of ours; everything it prints goes to ``log``, standard output to us if it was piped."""

    process: asyncio.subprocess.Process
    log: Path

    @classmethod
    async def start(
        cls,
        command: Sequence[str | Path],
        log: Path,
        *,
        pipe: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path = REPOSITORY,
    ) -> Child:
        """Start ``command`` in a checkout's folder. Raises OSError when it cannot be executed."""
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if pipe else file,
                stderr=file,
                cwd=folder,
                env={**os.environ, **(environment or {})},
            )
        return cls(process, log)

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def tail(self, lines: int = 8) -> str:
        """The end of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL when that is not heeded."""
        if self.ended:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
