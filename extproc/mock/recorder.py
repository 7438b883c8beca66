"""What a mock worker received: one record per request, and helpers that wait for the next event instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson


class Outcome(Enum):
    """How a request's exchange ended, seen from the worker."""

    LIVE = "live"
    COMPLETED = "completed"  # the whole answer was handed to the socket
    CLIENT_CLOSED = "client_closed"  # the peer went away first, also during the upload
    FAULT = "fault"  # a configured fault cut the exchange
    CRASHED = "crashed"  # the worker died
    STOPPED = "stopped"  # the worker was stopped in an orderly way


@dataclass(slots=True, eq=False)
class Record:
    """One request. Times are ``time.time()`` seconds; None: has not happened."""

    method: str
    target: str
    headers: list[tuple[str, str]]  # names in lower case, in the order received
    named: dict[str, str]  # the same by name; of several with one name, the last
    inference: bool  # a POST that the engine runs on the model, as opposed to probes and administration
    arrived: float = field(default_factory=time.time)
    body: bytes = b""
    received: float | None = None  # the body is complete
    status: int | None = None
    head_sent: float | None = None
    first_byte: float | None = None  # of the answer's body
    ended: float | None = None
    outcome: Outcome = Outcome.LIVE
    rank: int | None = None  # the data-parallel rank that served it
    kv: str | None = None  # what became of the KV cache that a vLLM worker was to fetch: ``vllm.engine.Kv``
    ids_reused: bool = False  # a vLLM worker took the prompt's token ids from it, and applied no chat template

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """What follows ``?`` in the target."""
        return self.target.partition("?")[2]

    @property
    def json(self) -> Any:
        """The body parsed; raises ``orjson.JSONDecodeError`` where it is no JSON."""
        return orjson.loads(self.body)

    def header(self, name: str, default: str | None = None) -> str | None:
        """The header's value; ``name`` in lower case."""
        return self.named.get(name, default)

    def as_json(self) -> dict[str, Any]:
        """For ``GET /_mock/requests``; the body as text, undecodable bytes replaced."""
        return {
            "method": self.method,
            "target": self.target,
            "headers": self.headers,
            "body": self.body.decode("utf-8", "replace"),
            "inference": self.inference,
            "arrived": self.arrived,
            "received": self.received,
            "status": self.status,
            "head_sent": self.head_sent,
            "first_byte": self.first_byte,
            "ended": self.ended,
            "outcome": self.outcome.value,
            "rank": self.rank,
            "kv": self.kv,
            "ids_reused": self.ids_reused,
        }


class Recorder:
    """The latest ``limit`` requests of one worker, oldest first; fewer when their bodies exceed ``byte_limit``."""

    def __init__(self, limit: int, byte_limit: int = 256 << 20) -> None:
        self._records: deque[Record] = deque()
        self._limit = limit
        self._byte_limit = byte_limit
        self._bytes = 0  # of the bodies of those that have ended
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.live = 0

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def open(self, record: Record) -> None:
        """A request's head has arrived; those to the mock itself are not kept."""
        if not record.target.startswith("/_mock/"):
            self._records.append(record)
        self.live += 1
        self._forget(len(self._records) > self._limit)
        self.changed()

    def close(self, record: Record, outcome: Outcome) -> None:
        """A request's exchange has ended; only the first call for a record counts."""
        if record.ended is not None:
            return
        record.ended = time.time()
        record.outcome = outcome
        self.live -= 1
        self._bytes += len(record.body)
        self._forget(self._bytes > self._byte_limit)
        self.changed()

    def _forget(self, too_much: bool) -> None:  # noqa: FBT001
        """Drop the oldest while there is too much: a load of large prompts would fill the memory."""
        while too_much and self._records and self._records[0].ended is not None:
            self._bytes -= len(self._records.popleft().body)
            too_much = len(self._records) > self._limit or self._bytes > self._byte_limit

    def clear(self) -> None:
        """Forget the requests that have ended."""
        live = [record for record in self._records if record.ended is None]
        self._records.clear()
        self._bytes = 0
        self._records.extend(live)

    def changed(self) -> None:
        """Wake those who wait for a condition that now holds."""
        if not self._waiters:
            return
        still = []
        for condition, future in self._waiters:
            if future.done():
                continue
            if condition():
                future.set_result(None)
            else:
                still.append((condition, future))
        self._waiters = still

    async def until(self, condition: Callable[[], bool], patience: float) -> None:
        """Return when ``condition`` holds; raises TimeoutError after ``patience`` seconds."""
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, future))
        async with asyncio.timeout(patience):
            await future
