"""A mock worker in general: server, recorder and faults around an engine's rules, in process or as a program.

``async with SglangMock(role="prefill") as mock: ...`` starts one; ``mock.url`` is where it listens, ``mock.requests``
what it received. A program's tests talk to it over HTTP: ``GET`` or ``DELETE /_mock/requests``,
``GET /_mock/received?count=N`` and ``GET /_mock/idle`` (which wait), ``POST`` or ``DELETE /_mock/faults``,
``POST /_mock/listener`` (``{"refuse_seconds": 2}``), ``POST /_mock/crash``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs

import orjson

from extproc.mock.exchange import TEXT, Exchange
from extproc.mock.faults import Fault, FaultError, Rule
from extproc.mock.http_server import HttpServer
from extproc.mock.observed import Observed
from extproc.mock.recorder import Outcome, Record

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

log = logging.getLogger(__name__)


class MockWorker(Observed):
    """One mock worker process; subclasses add an engine's rules."""

    inference_paths: frozenset[str] = frozenset()

    def __init__(
        self, *, role: str, host: str, port: int, keep_alive: float, record_limit: int, faults: tuple[Fault | Rule, ...]
    ) -> None:
        super().__init__(role, record_limit, faults)
        self.host = host
        self.port = port
        self.crashed = asyncio.Event()
        self._server = HttpServer(
            self._serve,
            self.recorder,
            self.faults,
            inference_paths=self.inference_paths,
            is_probe=self._is_probe,
            keep_alive=keep_alive,
            on_error=self._on_error,
        )
        self._background: set[asyncio.Task[None]] = set()

    # --- life ---

    async def start(self) -> None:
        """Listen; ``port`` is the real one afterwards."""
        await self._open()
        self.port = await self._server.start(self.host, self.port)

    async def stop(self, grace: float = 0.0) -> None:
        """Stop; requests under way have ``grace`` seconds to finish."""
        for task in self._background:
            task.cancel()
        await self._server.stop(grace)
        await self._close()

    def crash(self) -> None:
        """Die as a killed process does: listener and connections are gone at once, nothing is answered."""
        self.crashed.set()
        self._server.abort(Outcome.CRASHED)
        self._kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def _answering(self) -> int:
        return self._server.answering

    # --- the port ---

    async def refuse(self) -> None:
        """Refuse new connections, and close the idle ones, until ``accept``."""
        await self._server.refuse()

    async def accept(self) -> None:
        """Accept connections again, on the same port."""
        await self._server.accept(self.host, self.port)

    # --- the engine's part ---

    @abstractmethod
    async def _handle(self, exchange: Exchange) -> None:
        """Answer a request."""

    def _is_probe(self, record: Record) -> bool:  # noqa: ARG002 - for engines that are asked by their inference paths
        """Whether a complete request for an inference path is no leg, but asks what the worker is."""
        return False

    @abstractmethod
    async def _open(self) -> None:
        """Get ready, before the port listens."""

    @abstractmethod
    async def _close(self) -> None:
        """Free everything."""

    @abstractmethod
    def _kill(self) -> None:
        """Break everything at once."""

    # --- the mock's own requests ---

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.record.target.startswith("/_mock/"):
            await self._administer(exchange)
        else:
            await self._handle(exchange)

    async def _administer(self, exchange: Exchange) -> None:
        record = exchange.record
        match record.method, record.path:
            case "GET", "/_mock/requests":
                await exchange.reply(200, orjson.dumps([entry.as_json() for entry in self.recorder]))
            case "DELETE", "/_mock/requests":
                self.clear()
                await exchange.reply(200, b"{}")
            case "GET", "/_mock/received":
                await self._wait(exchange, self.received(int(parse_qs(record.query).get("count", ["1"])[0])))
            case "GET", "/_mock/idle":
                await self._wait(exchange, self.idle())
            case "POST", "/_mock/faults":
                await self._add_faults(exchange)
            case "DELETE", "/_mock/faults":
                self.behave()
                await exchange.reply(200, b"{}")
            case "POST", "/_mock/listener":
                seconds = float(record.json["refuse_seconds"])
                await exchange.reply(200, b"{}")
                await self.refuse()
                task = asyncio.get_running_loop().create_task(self._accept_later(seconds))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            case "POST", "/_mock/crash":
                self.crash()
            case _:
                await exchange.reply(404, b"no such mock command", TEXT)

    @staticmethod
    async def _wait(exchange: Exchange, event: Awaitable[object]) -> None:
        try:
            await event
        except TimeoutError:
            await exchange.reply(504, b"has not happened", TEXT)
        else:
            await exchange.reply(200, b"{}")

    async def _add_faults(self, exchange: Exchange) -> None:
        try:
            data: Any = exchange.record.json
            rules = [Rule.parse(entry) for entry in (data if isinstance(data, list) else [data])]
        except (orjson.JSONDecodeError, FaultError) as error:
            await exchange.reply(400, str(error).encode(), TEXT)
            return
        self.faults.rules.extend(rules)
        await exchange.reply(200, b"{}")

    async def _accept_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.accept()

    @staticmethod
    def _on_error(exchange: Exchange, error: Exception) -> None:
        log.error("%s %s", exchange.record.method, exchange.record.target, exc_info=error)
