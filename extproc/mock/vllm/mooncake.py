"""Mooncake's connector: the two legs meet by a transfer id, after the decode has asked a bootstrap server for the way.

The prefill's bootstrap server answers ``GET /query`` with the worker addresses of each rank; a decode asks it once for
each engine id that it does not know. Which of the two legs comes first does not matter; the prefill's answer
waits for nobody (0.32, ``distributed/kv_transfer/kv_connector/v1/mooncake``). A decode that cannot ask for the way
fails soon; one that knows it waits, whether or not the prefill's process still lives: ZeroMQ tells it nothing.
Lines between the two processes (``peers``): ``want <number> <transfer id>``, which is answered when the prefill is
finished; a prefill attends to 20 of them at a time, in the order they come, those that ask in vain among them.
Each data-parallel rank of a prefill listens for itself and has its own caches alone, and each of a decode asks for the
way itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson

from extproc.mock.engine import CrashError
from extproc.mock.exchange import Exchange
from extproc.mock.faults import Faults
from extproc.mock.http_server import HttpServer
from extproc.mock.recorder import Outcome, Recorder
from extproc.mock.tasks import looked_at
from extproc.mock.vllm.engine import Connector, Engine, Role, Sequence, core_id
from extproc.mock.vllm.peers import Listener, LoadError, LostError, Peers

if TYPE_CHECKING:
    from extproc.mock.lines import Lines

log = logging.getLogger(__name__)
_REMOTE = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
_RECORDS = 1000
_ATTEMPTS = 3  # of a bootstrap query
_RETRY = 0.1  # seconds between them
_SENDERS = 20  # num_workers x 2: what a prefill attends to; each keeps to its decode until that has its cache
_LONGER = 60.0  # seconds that a decode waits longer than the prefill would (ZMQ_RCVTIMEO)


class _Want(NamedTuple):
    """A decode that waits for a transfer."""

    transfer: str
    rank: int  # on which it is sought
    peer: Lines
    number: str
    timer: asyncio.TimerHandle  # gives up


class Mooncake(Connector):
    """The connector of one process."""

    name = "MooncakeConnector"

    def __init__(self, engine: Engine, engine_id: str, on_change: Callable[[], None]) -> None:
        self.engine_id = engine_id
        self.port = 0
        self._on_change = on_change  # called when a decode wants something, or no longer does
        self.peers = Peers()
        ranks = range(engine.options.dp_size)
        self.listeners = [Listener(partial(self._hear, rank), self._forget) for rank in ranks]
        self.bootstrap = Bootstrap([core_id(engine_id, rank, len(ranks)) for rank in ranks])
        self.searching = 0  # who asks a bootstrap server for the way
        self.deaf = False  # whoever asks waits, as for a process that is gone
        self._engine = engine
        self._waiting: list[_Want] = []  # in the order they came
        self._held: dict[str, int] = {}  # transfers whose caches are kept, and on which rank
        # Engine ids and where their workers are, by the rank that has asked.
        self._known: list[dict[str, tuple[str, int]]] = [{} for _ in ranks]
        self._pulls: dict[str, asyncio.Task[int]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen for decodes."""
        ports = [await listener.start(host, 0 if rank else port) for rank, listener in enumerate(self.listeners)]
        self.port = ports[0]
        self.bootstrap.workers = [f"tcp://{f'[{host}]' if ':' in host else host}:{own}" for own in ports]

    @property
    def wanted(self) -> tuple[str, ...]:
        """The transfers that decodes wait for."""
        return tuple(dict.fromkeys(want.transfer for want in self._waiting))

    def stop(self) -> list[asyncio.Task[Any]]:
        """Break every connection."""
        for listener in self.listeners:
            listener.stop()
        self.peers.close()
        for want in self._waiting:
            want.timer.cancel()
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def survive(self, sequence: Sequence) -> None:
        """``assert not self.is_kv_producer``: either role dies of the other one's parameters."""
        params = sequence.handoff or {}
        role = self._engine.role
        if params.get("do_remote_prefill"):
            if role is Role.PREFILL:
                raise CrashError
        elif params.get("do_remote_decode") and role is Role.DECODE:
            raise CrashError

    def incomplete(self, params: dict[str, Any]) -> bool:
        """Whether parameters that ask for a remote prefill lack what it takes."""
        return not all(name in params for name in _REMOTE)

    async def load(self, params: dict[str, Any], rank: int) -> int:
        """Ask the prefill for the KV cache of the transfer."""
        transfer = str(params["transfer_id"])
        address = await self._worker(rank, str(params["remote_engine_id"]), str(params["remote_bootstrap_addr"]))
        pull = self._pulls.get(transfer)
        if pull is None:  # sequences of one request go in one message there, and all get what comes
            pull = self._pulls[transfer] = asyncio.get_running_loop().create_task(self._pull(address, transfer))
            self._tasks.add(pull)
            pull.add_done_callback(self._pulled)
        return await asyncio.shield(pull)

    async def _pull(self, address: tuple[str, int], transfer: str) -> int:
        try:
            return await self._ask(address, transfer)
        except LostError:
            await asyncio.sleep(self._engine.options.lease + _LONGER)
            raise

    async def _ask(self, address: tuple[str, int], transfer: str) -> int:
        try:
            peer = await self.peers.peer(*address)
            return await peer.ask("want", transfer)
        finally:
            del self._pulls[transfer]  # who asks again, asks whoever listens there by then

    def _pulled(self, pull: asyncio.Task[int]) -> None:
        self._tasks.discard(pull)
        looked_at(pull)  # who wanted it may have left

    def release_remote(self, params: dict[str, Any], rank: int) -> None:
        """The blocks are asked for, so that they get free; without an address this is a ``KeyError`` in the core."""
        if self._engine.role is Role.PREFILL or ("transfer_id" in params and self.incomplete(params)):
            raise CrashError
        if "transfer_id" in params:
            task = asyncio.get_running_loop().create_task(self._fetch_in_vain(params, rank))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def finished(self, sequence: Sequence) -> dict[str, Any] | None:
        """Keep the blocks of a prefill that has ended by length under its transfer id, and serve who waits for it."""
        params = sequence.handoff or {}
        transfer = params.get("transfer_id")
        if params.get("do_remote_decode") and transfer and sequence.capped:
            engine = self._engine
            self._held[str(transfer)] = sequence.rank
            engine.pins.hold(str(transfer), sequence.blocks, sequence.digest)
            sequence.blocks = []
            self._serve()
        return None

    async def _fetch_in_vain(self, params: dict[str, Any], rank: int) -> None:
        with contextlib.suppress(LoadError):
            await self.load(params, rank)

    async def _worker(self, rank: int, engine_id: str, bootstrap: str) -> tuple[str, int]:
        known = self._known[rank if rank < len(self._known) else 0]
        if engine_id not in known:
            self.searching += 1
            try:
                known.update(await _search(bootstrap))
            finally:
                self.searching -= 1
        if engine_id not in known:
            raise LoadError(f"remote engine_id {engine_id} not found from bootstrap server {bootstrap}")
        return known[engine_id]

    async def meet(self, bootstrap: str) -> None:
        """Know the way to a prefill by its bootstrap server's address, as after a first request to each rank."""
        found = await _query(bootstrap)
        for known in self._known:
            known.update(found)

    def _hear(self, rank: int, peer: Lines, word: str, number: str, arguments: list[str]) -> None:
        if word != "want" or self.deaf:
            return
        transfer = arguments[0]
        lease = self._engine.options.lease
        timer = asyncio.get_running_loop().call_later(lease, self._give_up, peer, number)
        self._waiting.append(_Want(transfer, rank, peer, number, timer))
        self._on_change()
        self._serve()

    def _serve(self) -> None:
        """Send to the decodes that are attended to and whose cache is there; others may be attended to then."""
        pins = self._engine.pins
        while ready := [want for want in self._attended_to() if self._is_there(want)]:
            for want in ready:
                want.peer.send(f"kv {want.number} {pins.digest(want.transfer)}")
            self._drop(ready)
            for transfer in {want.transfer for want in ready}:
                pins.release(transfer)
                self._held.pop(transfer, None)

    def _attended_to(self) -> list[_Want]:
        """The first in the line of each rank."""
        ranks = range(len(self.listeners))
        lines = [[want for want in self._waiting if want.rank == rank] for rank in ranks]
        return [want for line in lines for want in line[:_SENDERS]]

    def _is_there(self, want: _Want) -> bool:
        """Whether the rank that is asked keeps what is wanted of it."""
        return self._engine.pins.digest(want.transfer) is not None and self._held.get(want.transfer) == want.rank

    def _give_up(self, peer: Lines, number: str) -> None:
        self._drop([want for want in self._waiting if (want.peer, want.number) == (peer, number)])
        peer.send(f"fail {number} Timeout waiting for P side ready.")
        self._serve()

    def _forget(self, peer: Lines) -> None:
        """A decode's process has ended."""
        self._drop([want for want in self._waiting if want.peer is peer])
        self._serve()

    def _drop(self, wants: list[_Want]) -> None:
        for want in wants:
            want.timer.cancel()
            self._waiting.remove(want)
        self._on_change()


class Bootstrap:
    """A prefill's bootstrap server."""

    def __init__(self, engine_ids: list[str]) -> None:
        self.engine_ids = engine_ids  # by rank
        self.workers: list[str] = []
        self.port = 0
        self.queries = 0
        self._server = HttpServer(
            self._handle,
            Recorder(_RECORDS),
            Faults("prefill"),
            inference_paths=frozenset(),
            keep_alive=5.0,
            on_error=_log,
        )

    async def start(self, host: str, port: int) -> None:
        """Listen."""
        self.port = await self._server.start(host, port)

    async def stop(self) -> None:
        """Listen no longer."""
        if self.port:
            await self._server.stop(0)

    def kill(self) -> None:
        """Be gone at once."""
        if self.port:
            self._server.abort(Outcome.CRASHED)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.record.path != "/query":
            await exchange.reply(404, b'{"detail":"Not Found"}')
            return
        self.queries += 1
        entries = {
            str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": worker}}}
            for rank, (engine_id, worker) in enumerate(zip(self.engine_ids, self.workers, strict=True))
        }
        await exchange.reply(200, orjson.dumps(entries))


async def _query(bootstrap: str) -> dict[str, tuple[str, int]]:
    """The addresses of a bootstrap server's workers by their engine ids; raises ClientError, ValueError."""
    async with aiohttp.ClientSession() as session, session.get(f"{bootstrap}/query") as answer:
        data = await answer.json()
    found = {}
    for entry in data.values():
        address = urlsplit(entry["worker_addr"]["0"]["0"])
        found[str(entry["engine_id"])] = (str(address.hostname), int(address.port or 0))
    return found


async def _search(bootstrap: str) -> dict[str, tuple[str, int]]:
    """The same, tried a few times; nothing where nobody answers."""
    for attempt in range(_ATTEMPTS):
        try:
            return await _query(bootstrap)
        except (aiohttp.ClientError, ValueError):
            if attempt < _ATTEMPTS - 1:
                await asyncio.sleep(_RETRY)
    return {}


def _log(exchange: Exchange, error: Exception) -> None:
    log.error("%s %s", exchange.record.method, exchange.record.target, exc_info=error)
