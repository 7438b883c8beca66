"""What happens behind a mock's HTTP front whatever the engine: sequences, pacing, aborts. Engines add the hand-off."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from extproc.mock.generation import Limits, Prompt, Text, write

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import AsyncIterator, Callable


class RequestError(Exception):
    """A request that the engine refuses before any sequence runs (a ``ValueError`` there): status 400."""


class InternalError(Exception):
    """A request over which the engine's front end trips: status 500."""


class CrashError(Exception):
    """A request that ends the engine's process."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast tokens come, in seconds, and how many there are when nothing limits them."""

    first_token: float = 0.0
    token: float = 0.0
    tokens: int = 16


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One text being written."""

    prompt: Prompt
    limits: Limits
    rid: str
    index: int = 0
    rank: int = 0  # of the engine core that writes it
    text: Text = field(default_factory=lambda: Text([], []))
    written: int = 0  # tokens so far
    finish: dict[str, object] | None = None  # the engine's finish_reason, once over
    stopper: Future[None] | None = None  # done: aborted
    begun: float = field(default_factory=time.time)

    @property
    def failure(self) -> int | None:
        """The HTTP status if the sequence failed; an abort of a running sequence is no failure."""
        status = None if self.finish is None else self.finish.get("status_code")
        return status if isinstance(status, int) else None

    @property
    def message(self) -> str:
        """Why it failed or was aborted."""
        return "" if self.finish is None else str(self.finish.get("message", ""))

    @property
    def ids(self) -> list[int]:
        """The tokens so far."""
        return self.text.ids[: self.written]

    @property
    def so_far(self) -> str:
        """The text so far."""
        return "".join(self.text.pieces[: self.written])

    @property
    def stopped(self) -> bool:
        """Whether it was aborted."""
        return self.stopper is not None and self.stopper.done()

    async def sleep(self, seconds: float) -> None:
        """Sleep, but no longer than the sequence lives."""
        if not seconds:
            await asyncio.sleep(0)
        elif self.stopper is not None:
            await asyncio.wait([self.stopper], timeout=seconds)


AnySequence = TypeVar("AnySequence", bound=Sequence)


@dataclass(slots=True)
class Batch(Generic[AnySequence]):
    """The sequences of one HTTP request, in the order of the answer's indexes."""

    sequences: list[AnySequence]
    samples: int = 1
    single: bool = True
    unheard: bool = False  # the client has left, the engine has not noticed


class Engine(ABC, Generic[AnySequence]):
    """One engine process."""

    def __init__(self) -> None:
        self.write: Callable[..., Text] = write  # the model
        self.live: dict[str, AnySequence] = {}
        self.admitted = 0
        self._hung: dict[int, tuple[float, asyncio.Event]] = {}  # by rank: since when, and that it goes on

    def hang(self, rank: int) -> None:
        """A rank stops working, as with a scheduler that hangs: what is sent to it waits, what it reports gets old."""
        self._hung.setdefault(rank, (time.time(), asyncio.Event()))

    def revive(self, rank: int) -> None:
        """A rank that hangs goes on."""
        if (hung := self._hung.pop(rank, None)) is not None:
            hung[1].set()

    def hangs_since(self, rank: int) -> float | None:
        """By ``time.time()``; None: it works."""
        hung = self._hung.get(rank)
        return None if hung is None else hung[0]

    async def works(self, rank: int) -> None:
        """Returns when a rank works."""
        while (hung := self._hung.get(rank)) is not None:
            await hung[1].wait()

    def admit(self, batch: Batch[AnySequence]) -> None:
        """Take a batch in; raises RequestError where the engine refuses, CrashError where it dies."""
        loop = asyncio.get_running_loop()
        for sequence in batch.sequences:
            self.live[sequence.rid] = sequence
            sequence.stopper = loop.create_future()
        self.admitted += len(batch.sequences)

    def release(self, batch: Batch[AnySequence]) -> None:
        """Forget a batch, finished or not."""
        for sequence in batch.sequences:
            if self.live.get(sequence.rid) is sequence:
                del self.live[sequence.rid]

    async def run(self, sequence: AnySequence, pace: Pace) -> AsyncIterator[AnySequence]:
        """Write a sequence; yields it after every token, the last time with its ``finish``."""
        if self._hung:
            await self.works(sequence.rank)
        if await self._begin(sequence, pace):
            total = len(sequence.text.ids)
            for count in range(1, total + 1):
                if count > 1:
                    await sequence.sleep(pace.token)
                if self._hung:
                    await self.works(sequence.rank)
                if sequence.stopped:
                    break
                sequence.written = count
                if count < total:
                    yield sequence
            self._end(sequence)
        yield sequence

    async def complete(self, sequence: AnySequence, pace: Pace) -> None:
        """Write a sequence without stopping on the way."""
        if self._hung:
            await self.works(sequence.rank)
        if not await self._begin(sequence, pace):
            return
        total = len(sequence.text.ids)
        if pace.token and total > 1:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await sequence.sleep(pace.token * (total - 1))
            if sequence.stopped:
                total = min(total, 1 + int((loop.time() - begun) / pace.token))
        sequence.written = total
        self._end(sequence)

    @abstractmethod
    async def _begin(self, sequence: AnySequence, pace: Pace) -> bool:
        """Everything before the first token, which sets ``text``; False: there will be none, and ``finish`` is set."""

    @abstractmethod
    def _end(self, sequence: AnySequence) -> None:
        """After the last token, or an abort: set ``finish``."""
