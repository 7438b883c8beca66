"""How a server is asked how it is and what it is: one way for each protocol, and the same questions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from extproc.workers.client import Answer, NoAnswerError, WorkerClient
from extproc.workers.identify import identify
from extproc.workers.metadata import Metadata
from extproc.workers.rank_life import Get, RankLife, rank_life
from extproc.workers.signs_of_life import sign_of_life
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Worker

_NONE: Mapping[str, str] = MappingProxyType({})


class _AnyPost(Protocol):
    async def __call__(self, path: str, body: object, within: float, headers: Mapping[str, str] = ...) -> Answer: ...


class Contact(Protocol):
    """The questions to one server. ``ip`` is where it is; answers must come ``within`` so many seconds."""

    async def probe(self, endpoint: str, *, ip: str, within: float) -> None:
        """Raise NoAnswerError unless it is healthy, MismatchError if it cannot be asked. ``endpoint``: HTTP's path."""

    async def identify(self, spec: WorkerSpec, *, ip: str, within: float) -> Metadata:
        """What it is; raises MismatchError."""

    async def sign_of_life(self, *, ip: str, within: float) -> str:
        """Empty when its engine works, or cannot be asked; else what is missing."""

    async def life_of(self, rank: Worker, *, ip: str, within: float) -> RankLife:
        """Whether one of its data-parallel ranks works."""


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
            return await self._client.get_often(self._worker, path, within=within, ip=ip)

        async def post(path: str, body: object, headers: Mapping[str, str] = _NONE) -> Answer:
            return await self._client.post(self._worker, path, body, within=within, ip=ip, headers=headers)

        return await identify(get, post, spec, token_reuse=self._token_reuse, dp_aware=self._dp_aware)

    async def sign_of_life(self, *, ip: str, within: float) -> str:
        """See Contact."""

        return await sign_of_life(self._get_at(ip), self._post_at(ip), self._worker, within)

    async def life_of(self, rank: Worker, *, ip: str, within: float) -> RankLife:
        """See Contact."""
        return await rank_life(self._get_at(ip), self._post_at(ip), rank, within)

    def _get_at(self, ip: str) -> Get:
        async def get(path: str, within: float) -> Answer:
            return await self._client.get_often(self._worker, path, within=within, ip=ip)

        return get

    def _post_at(self, ip: str) -> _AnyPost:
        async def post(path: str, body: object, within: float, headers: Mapping[str, str] = _NONE) -> Answer:
            return await self._client.post(self._worker, path, body, within=within, ip=ip, headers=headers)

        return post
