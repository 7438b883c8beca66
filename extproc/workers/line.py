"""The way to one server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from extproc.workers.client import Answer, UnreachableError, WorkerClient
from extproc.workers.worker import Worker

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Line:
    """Puts questions to the server of ``worker`` at ``ip``, None while that is not known. All raise NoAnswerError."""

    def __init__(self, worker: Worker, client: WorkerClient) -> None:
        self.ip: str | None = None
        self._worker = worker
        self._client = client

    async def probe(self, path: str, within: float) -> int:
        """The status of ``GET path``, in so many seconds."""
        return await self._client.probe(self._worker, path, within=within, ip=self._known_ip())

    async def get(self, path: str, within: float) -> Answer:
        """``GET path``."""
        return await self._client.get_often(self._worker, path, within=within, ip=self._known_ip())

    async def post(self, path: str, body: object, within: float, headers: Mapping[str, str] = _NONE) -> Answer:
        """``POST path`` with ``body`` as JSON."""
        return await self._client.post(self._worker, path, body, within=within, ip=self._known_ip(), headers=headers)

    def _known_ip(self) -> str:
        if self.ip is None:
            raise UnreachableError("address not known")
        return self.ip
