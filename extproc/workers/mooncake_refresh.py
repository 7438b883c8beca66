"""Making decode workers forget where a Mooncake prefill worker was before it restarted under the same engine id.

The fault is the engine's (vLLM 0.32, ``kv_connector/v1/mooncake/mooncake_connector.py``, ``receive_kv``): a decode asks
a prefill's bootstrap server only for an engine id that it does not know, and keeps the addresses for good. A restarted
prefill listens elsewhere, so every later handoff between the two hangs, at both ends healthy. The cure is a request
that names an engine id nobody has, at that bootstrap server: the decode asks again and takes over all that it is told.
It is refused before it is scheduled (``max_tokens`` -1, over gRPC 0), in a few milliseconds; the decode logs one error,
that the engine id is not found. An engine id that is new, which is vLLM's default, needs none of this.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Final

from extproc.workers.client import NoAnswerError, WorkerClient
from extproc.workers.kv_engines import bootstrap_address, dp_size
from extproc.workers.pairing import PairingMode, may_pair
from extproc.workers.ranks import RANK_HEADER
from extproc.workers.registry import Registry
from extproc.workers.rpc.refusal import be_refused
from extproc.workers.worker import MOONCAKE, Role, Status, Worker

TELL_SECONDS: Final = 3.0  # that a decode worker has for its refusal
TELL_AT_ONCE: Final = 16
_REMEMBERED: Final = 10_000  # engine ids
_PATH: Final = "/v1/completions"
_logger = logging.getLogger(__name__)


class MooncakeRefresh:
    """Remembers which engine is where, and which decode worker has yet to be told that one has moved."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client
        self._addresses: dict[str, object] = {}  # by engine id, as the bootstrap server has them
        self._owed: dict[str, set[str]] = {}  # decode worker's id -> bootstrap addresses it must ask again
        self._gate = asyncio.Semaphore(TELL_AT_ONCE)

    async def found(self, prefill: Worker, addresses: Mapping[str, object]) -> None:
        """Its bootstrap server says so. Returns when the decode workers in use know it too, or will not listen."""
        moved = [engine for engine, now in addresses.items() if self._addresses.get(engine, now) != now]
        self._remember(addresses)
        if not moved:
            return
        self._registry.restarted(prefill, moved)
        decodes = [worker for worker in self._registry if _is_told(prefill, worker, self._registry.pairing)]
        _logger.warning(
            "a Mooncake prefill restarted under the same engine id; its decode workers are told",
            extra={"worker": prefill.name, "decodes": len(decodes)},
        )
        self._owed = {worker.id: self._owed[worker.id] for worker in self._registry if worker.id in self._owed}
        for decode in decodes:
            self._owed.setdefault(decode.id, set()).add(bootstrap_address(prefill))
        await asyncio.gather(*(self.settle(decode) for decode in decodes if decode.status is Status.READY))

    async def settle(self, decode: Worker, ip: str | None = None) -> None:
        """Tell ``decode`` what it has yet to be told; what it does not answer is logged and kept for the next time."""
        owed = self._owed.get(decode.id, set())
        for address in tuple(owed):
            owed.discard(address)  # by now, so that the watches of prefill and decode do not both tell it
            told = False
            try:
                async with self._gate:
                    await self._tell(decode, address, ip)
                told = True
            except NoAnswerError as error:
                _logger.warning(
                    "a decode worker cannot be told that a Mooncake prefill restarted: handoffs from it hang",
                    extra={"worker": decode.name, "bootstrap": address, "reason": str(error)},
                )
            finally:
                if not told:
                    owed.add(address)

    def _remember(self, addresses: Mapping[str, object]) -> None:
        self._addresses.update(addresses)
        for engine in tuple(self._addresses)[: max(0, len(self._addresses) - _REMEMBERED)]:
            del self._addresses[engine]

    async def _tell(self, decode: Worker, address: str, ip: str | None) -> None:
        """Every engine core of the decode keeps addresses of its own. Raises NoAnswerError."""
        ranks = dp_size(decode.labels)
        for rank in range(ranks):
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"refresh-{secrets.token_hex(8)}",
                "remote_bootstrap_addr": address,
                "transfer_id": f"refresh-{secrets.token_hex(16)}",
            }
            if decode.url.is_grpc:  # no rank can be named: the server gives them to its ranks by turns
                await be_refused(self._client.rpc, decode, params, within=TELL_SECONDS, ip=ip)
                continue
            answer = await self._client.post(
                decode,
                _PATH,
                {"prompt": "x", "max_tokens": -1, "kv_transfer_params": params},
                within=TELL_SECONDS,
                ip=ip,
                headers={RANK_HEADER: str(rank)} if ranks > 1 else {},
            )
            if answer.status != 400:
                raise NoAnswerError(f"POST {_PATH}: HTTP {answer.status}")


def _is_told(prefill: Worker, worker: Worker, mode: PairingMode) -> bool:
    """A decode with another connector than Mooncake's may not be: NIXL's dies of parameters that are not its own.

    All ranks of a server are told as one worker.
    """
    decodes = worker.role is Role.DECODE and worker.server is worker
    return decodes and worker.kv_connector == MOONCAKE and may_pair(prefill, worker, mode)
