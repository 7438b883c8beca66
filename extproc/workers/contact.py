"""How a server is asked how it is and what it is: one way for each protocol, and the same questions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from extproc.workers.client import Answer, NoAnswerError, WorkerClient
from extproc.workers.identify import identify
from extproc.workers.metadata import Metadata
from extproc.workers.signs_of_life import sign_of_life
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Worker

_NONE: Mapping[str, str] = MappingProxyType({})


class Contact(Protocol):
    """The questions to one server. ``ip`` is where it is; answers must come ``within`` so many seconds."""

    async def probe(self, endpoint: str, *, ip: str, within: float) -> None:
        """Raise NoAnswerError unless it is healthy, MismatchError if it cannot be asked. ``endpoint``: HTTP's path."""

    async def identify(self, spec: WorkerSpec, *, ip: str, within: float) -> Metadata:
        """What it is; raises as :func:`extproc.workers.identify.identify`."""

    async def sign_of_life(self, *, ip: str, within: float) -> str:
        """Empty when its engine works, or cannot be asked; else what is missing."""


class HttpContact:
    """Over HTTP.

    Args:
        worker: the server's entry.
        client: asks.
        token_reuse, dp_aware: what more is asked of vLLM; see :func:`extproc.workers.identify.identify`.
    """

    def __init__(self, worker: Worker, client: WorkerClient, *, token_reuse: bool, dp_aware: bool) -> None:
        self._worker = worker
        self._client = client
        self._token_reuse = token_reuse
        self._dp_aware = dp_aware

    async def probe(self, endpoint: str, *, ip: str, within: float) -> None:
        """See Contact."""
        status = await self._client.probe(self._worker, endpoint, within=within, ip=ip)
        if not 200 <= status < 300:
            raise NoAnswerError(f"GET {endpoint}: HTTP {status}")

    async def identify(self, spec: WorkerSpec, *, ip: str, within: float) -> Metadata:
        """See Contact."""

        async def get(path: str) -> Answer:
            return await self._client.get(self._worker, path, within=within, ip=ip)

        async def post(path: str, body: object, headers: Mapping[str, str] = _NONE) -> Answer:
            return await self._client.post(self._worker, path, body, within=within, ip=ip, headers=headers)

        return await identify(get, post, spec, token_reuse=self._token_reuse, dp_aware=self._dp_aware)

    async def sign_of_life(self, *, ip: str, within: float) -> str:
        """See Contact."""

        async def get(path: str, seconds: float) -> Answer:
            return await self._client.get(self._worker, path, within=seconds, ip=ip)

        async def post(path: str, body: object, seconds: float) -> Answer:
            return await self._client.post(self._worker, path, body, within=seconds, ip=ip)

        return await sign_of_life(get, post, self._worker, within)
