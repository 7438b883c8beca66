"""The workers that all systems share, and what they say about the legs they saw."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bench.child import Child

if TYPE_CHECKING:
    from pathlib import Path

    from bench.engine import Kind


@dataclass(frozen=True, slots=True)
class Seen:
    """What the workers of one role received since they started."""

    legs: int
    handoffs: int  # legs that carry what the engine's handoff wants
    body_bytes: int

    def __sub__(self, earlier: Seen) -> Seen:
        return Seen(self.legs - earlier.legs, self.handoffs - earlier.handoffs, self.body_bytes - earlier.body_bytes)


@dataclass(slots=True)
class Fleet:
    """Two prefill and two decode workers in one process."""

    kind: Kind
    child: Child
    prefill_ports: list[int]
    decode_ports: list[int]
    counts_ports: list[int]  # in the same order, where they tell what they received

    @classmethod
    async def start(cls, folder: Path, kind: Kind) -> Self:
        """Start the workers' process."""
        command: list[str | Path] = [sys.executable, "-m", "bench.worker", "--engine", kind.value]
        child = await Child.start(command, folder / "workers.log", pipe=True)
        assert child.process.stdout is not None
        line = await child.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the workers did not start\n{child.tail()}")
        ports = json.loads(line)
        counts = ports.get("counts", ports["prefill"] + ports["decode"])
        return cls(kind, child, ports["prefill"], ports["decode"], counts)

    async def stop(self) -> None:
        await self.child.stop()

    async def seen(self) -> tuple[Seen, Seen]:
        """What the prefill and the decode workers received until now."""
        prefills = len(self.prefill_ports)
        return await _sum(self.counts_ports[:prefills]), await _sum(self.counts_ports[prefills:])

    async def legs(self) -> list[int]:
        """Legs that each worker received until now, prefill workers first."""
        return [(await _counts(port)).legs for port in self.counts_ports]


async def _sum(ports: list[int]) -> Seen:
    counts = [await _counts(port) for port in ports]
    return Seen(sum(c.legs for c in counts), sum(c.handoffs for c in counts), sum(c.body_bytes for c in counts))


async def _counts(port: int) -> Seen:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /bench/counts HTTP/1.1\r\nhost: worker\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        return Seen(**json.loads(await reader.readexactly(length)))
    finally:
        writer.close()
