"""What tests see of a mock worker, whatever it speaks: what it was asked, and which faults it has been told to have."""

from __future__ import annotations

from abc import ABC, abstractmethod

from extproc.mock.faults import Fault, Faults, Rule
from extproc.mock.recorder import Record, Recorder

PATIENCE = 60.0  # seconds that the waiting methods wait by default: machines that run tests may be busy


class Observed(ABC):
    """One mock worker's requests and faults."""

    def __init__(self, role: str, record_limit: int, faults: tuple[Fault | Rule, ...] = ()) -> None:
        self.recorder = Recorder(record_limit)
        self.faults = Faults(role)
        for entry in faults:
            self.fail(entry)

    # --- what was received ---

    @property
    def requests(self) -> list[Record]:
        """Every request received, oldest first, probes included."""
        return list(self.recorder)

    @property
    def legs(self) -> list[Record]:
        """The requests that the engine runs on its model: what a gateway sends a leg by."""
        return [record for record in self.recorder if record.inference]

    @property
    def live(self) -> list[Record]:
        """The legs that are not over."""
        return [record for record in self.recorder if record.inference and record.ended is None]

    def clear(self) -> None:
        """Forget what is over."""
        self.recorder.clear()

    async def arrived(self, count: int = 1, patience: float = PATIENCE) -> list[Record]:
        """Wait until the heads of ``count`` legs have come, and return the legs."""
        await self.recorder.until(lambda: len(self.legs) >= count, patience)
        return self.legs

    async def received(self, count: int = 1, path: str | None = None, patience: float = PATIENCE) -> list[Record]:
        """Wait until ``count`` legs, or requests for ``path``, have come completely, and return them."""

        def complete() -> list[Record]:
            return [
                record
                for record in self.recorder
                if record.received is not None and (record.inference if path is None else record.path == path)
            ]

        await self.recorder.until(lambda: len(complete()) >= count, patience)
        return complete()

    async def idle(self, patience: float = PATIENCE) -> None:
        """Wait until no leg is under way, and the engine has let go of the last one."""
        await self.recorder.until(lambda: not self._answering and not self.live, patience)

    @property
    @abstractmethod
    def _answering(self) -> int:
        """How many handlers of legs run, also for a moment after the peer has left."""

    # --- faults ---

    def fail(self, fault: Fault | Rule, *, times: int | None = None, path: str | None = None) -> None:
        """Misbehave: for all legs, or the next ``times``, or those for ``path``."""
        self.faults.rules.append(fault if isinstance(fault, Rule) else Rule(fault, path=path, times=times))

    def behave(self) -> None:
        """Forget all faults."""
        self.faults.rules.clear()
