"""Follows the KV events of a real engine, as the gateway does for one of its workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from servers import MODEL, Server
from vllm_cases import COMPLETIONS_PATH

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.policies.event_prefixes import EventPrefixes
from extproc.workers.kv_event_source import LABEL, REPLAY_LABEL, Common, source_of
from extproc.workers.kv_event_stream import Stream
from extproc.workers.worker import Role, Worker, WorkerUrl


class _Sink:
    def __init__(self, prefixes: EventPrefixes, worker: Worker) -> None:
        self._prefixes = prefixes
        self._worker = worker
        prefixes.begin(worker)

    def apply(self, events: Any) -> None:
        self._prefixes.apply(self._worker, events)

    def lose(self) -> None:
        self._prefixes.lose(self._worker)

    def restart(self) -> None:
        self._prefixes.restart(self._worker)

    def renew(self) -> None:
        self._prefixes.renew(self._worker)


class Follower:
    """Follows one server, whose worker has these labels; ``replay``: also what was published before."""

    def __init__(self, server: Server, labels: Mapping[str, str], *, replay: bool = True) -> None:
        told = {LABEL: labels[LABEL]} | ({REPLAY_LABEL: labels[REPLAY_LABEL]} if replay else {})
        self.worker = Worker("w", WorkerUrl.parse(server.url), Role.PREFILL, labels=told)
        self.prefixes = EventPrefixes(100_000)
        source = source_of(self.worker, Common())
        assert source is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stream = Stream(self._context, source, _Sink(self.prefixes, self.worker), "w")

    def held(self, tokens: list[int]) -> int | None:
        """How many tokens of a prompt it holds; None: that is not known."""
        body = json.dumps({"model": MODEL, "prompt": tokens}).encode()
        found = self.prefixes.overlaps(InferenceRequest.read(APIS[COMPLETIONS_PATH], body), [self.worker])
        assert found is not None
        return found.get(self.worker)

    @property
    def blocks(self) -> int:
        """How many blocks it is known to hold."""
        return self.prefixes.blocks(self.worker)

    @property
    def whole(self) -> bool:
        """Whether all that it holds is known."""
        return self.prefixes.is_whole(self.worker)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Follow it no more."""
        self.stream.close()
        self._context.destroy(0)
