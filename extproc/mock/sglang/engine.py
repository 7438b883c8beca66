"""What happens behind the mock's HTTP front: sequences, the hand-off between the two legs, pacing, aborts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from extproc.mock.generation import Limits, Prompt, Text, write
from extproc.mock.sglang.rendezvous import DEFAULT_PORT, Bootstrap, Prefills, TransferError

if TYPE_CHECKING:
    from asyncio import Future

LARGEST_ROOM = 2**63 - 1
FAKE_HOST = "2.2.2.2"  # the engine's own health checks and warm-up use it: no transfer takes place


class Mode(Enum):
    """What the engine calls its disaggregation mode."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "null"


class EngineError(Exception):
    """A request that the engine refuses or gives up on, in its own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class CrashError(Exception):
    """A request that ends the engine's process."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the two legs of a sequence meet; ``port`` None: the engine's default."""

    number: int | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """What a request wants to know besides the text. ``start``: first prompt position of interest, -1: none."""

    start: int = -1
    top: int = 0
    token_ids: tuple[int, ...] | None = None
    with_text: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One text being written."""

    prompt: Prompt
    limits: Limits
    rid: str
    room: Room = Room()
    logprobs: LogprobOptions | None = None
    index: int = 0
    text: Text = field(default_factory=lambda: Text([], []))
    written: int = 0  # tokens so far
    finish: dict[str, object] | None = None  # the engine's finish_reason, once over
    stopper: Future[str] | None = None  # done: aborted, with the engine's message


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast tokens come, in seconds, and how many there are when nothing limits them."""

    first_token: float = 0.0
    token: float = 0.0
    tokens: int = 16


@dataclass(slots=True)
class Batch:
    """The sequences of one HTTP request."""

    sequences: list[Sequence]
    samples: int = 1
    single: bool = True


class Engine:
    """One engine process."""

    def __init__(self, mode: Mode, *, death_delay: float, connect_timeout: float, wait_timeout: float) -> None:
        self.mode = mode
        self.live: dict[str, Sequence] = {}
        self.bootstrap = Bootstrap()
        self.prefills = Prefills(death_delay)
        self._connect_timeout = connect_timeout
        self._wait_timeout = wait_timeout

    def admit(self, batch: Batch) -> None:
        """Take a batch in; raises EngineError where the engine refuses, CrashError where it dies."""
        for sequence in batch.sequences:
            if sequence.rid in self.live:
                raise EngineError(400, f"Duplicate request ID detected: {sequence.rid}")
        if self.mode is not Mode.REGULAR:
            for sequence in batch.sequences:
                if sequence.room.number is not None and not -(2**63) <= sequence.room.number <= LARGEST_ROOM:
                    raise CrashError
        loop = asyncio.get_running_loop()
        for sequence in batch.sequences:
            self.live[sequence.rid] = sequence
            sequence.stopper = loop.create_future()

    def release(self, batch: Batch) -> None:
        """Forget a batch, finished or not."""
        for sequence in batch.sequences:
            if self.live.get(sequence.rid) is sequence:
                del self.live[sequence.rid]

    def abort(self, rid: str, *, everything: bool) -> None:
        """End live requests as ``/abort_request`` does: ``rid`` must be live itself, then prefixes match too."""
        if not everything and rid not in self.live:
            return
        for sequence in list(self.live.values()):
            stopper = sequence.stopper
            if (everything or sequence.rid.startswith(rid)) and stopper is not None and not stopper.done():
                stopper.set_result("Abort in waiting queue" if sequence.written == 0 else "Unknown error")

    # --- one sequence ----------------------------------------------------------------------------------------------

    async def run(self, sequence: Sequence, pace: Pace) -> AsyncIterator[Sequence]:
        """Write a sequence; yields it after every token."""
        if self.mode is not Mode.REGULAR:
            await self._hand_off(sequence, pace)
        elif pace.first_token:
            await self._sleep(sequence, pace.first_token)
        sequence.text = write(sequence.prompt, sequence.limits, pace.tokens)
        total = 1 if self.mode is Mode.PREFILL else len(sequence.text.ids)
        for count in range(1, total + 1):
            if count > 1 and pace.token:
                await self._sleep(sequence, pace.token)
            elif count > 1:
                await asyncio.sleep(0)
            if self._stopped(sequence):
                break
            sequence.written = count
            if count < total:
                yield sequence
        self._finish(sequence)
        yield sequence

    async def complete(self, sequence: Sequence, pace: Pace) -> None:
        """Write a sequence without stopping on the way."""
        if self.mode is not Mode.REGULAR:
            await self._hand_off(sequence, pace)
        elif pace.first_token:
            await self._sleep(sequence, pace.first_token)
        sequence.text = write(sequence.prompt, sequence.limits, pace.tokens)
        total = 1 if self.mode is Mode.PREFILL else len(sequence.text.ids)
        if pace.token and total > 1:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await self._sleep(sequence, pace.token * (total - 1))
            total = min(total, 1 + int((loop.time() - begun) / pace.token))
        sequence.written = total
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if self._stopped(sequence):
            sequence.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif self.mode is Mode.PREFILL:
            sequence.finish = {"type": "length", "length": 0}
        else:
            sequence.finish = sequence.text.finish

    @staticmethod
    def _stopped(sequence: Sequence) -> bool:
        return sequence.stopper is not None and sequence.stopper.done()

    @staticmethod
    async def _sleep(sequence: Sequence, seconds: float) -> None:
        """Sleep, but no longer than the sequence lives."""
        assert sequence.stopper is not None
        await asyncio.wait([sequence.stopper], timeout=seconds)

    # --- the hand-off ----------------------------------------------------------------------------------------------

    async def _hand_off(self, sequence: Sequence, pace: Pace) -> None:
        room = sequence.room
        if room.number is None:
            raise EngineError(
                400,
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={sequence.rid!r}",
            )
        if room.host == FAKE_HOST:
            return
        try:
            if self.mode is Mode.PREFILL:
                await self._send_kv(sequence, room.number, pace)
            else:
                await self._receive_kv(sequence, room, pace)
        except TransferError as error:
            leg = "Prefill bootstrap failed" if self.mode is Mode.PREFILL else "Decode handshake failed"
            raise EngineError(
                500,
                f"{leg} for request rank=0 req.rid={sequence.rid!r} req.bootstrap_room={room.number} "
                f"with exception KVTransferError(bootstrap_room={room.number}): {error}",
            ) from None

    async def _send_kv(self, sequence: Sequence, number: int, pace: Pace) -> None:
        future = self.bootstrap.enter(number, sequence.prompt.digest)
        try:
            await self._while_alive(sequence, future)
            if pace.first_token:
                await self._sleep(sequence, pace.first_token)
        except BaseException:
            self.bootstrap.leave(number, future, "Aborted by AbortReq.")
            raise
        self.bootstrap.transferred(number)

    async def _receive_kv(self, sequence: Sequence, room: Room, pace: Pace) -> None:
        assert room.number is not None
        await self.prefills.want(room.host or "None", room.port or DEFAULT_PORT, room.number, sequence.prompt.digest)
        if pace.first_token:
            await self._sleep(sequence, pace.first_token)

    async def _while_alive(self, sequence: Sequence, future: Future[None]) -> None:
        await future


def new_rid() -> str:
    """A request id as the engine makes them."""
    return uuid.uuid4().hex
