"""``/server_info`` and ``/model_info``, old names and new: one prefill worker's own answer."""

from __future__ import annotations

from aiohttp import web

from extproc.control.replies import fault
from extproc.workers.client import Answer, NoAnswerError, WorkerClient
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Worker

_OTHER_NAME = {
    "/server_info": "/get_server_info",
    "/get_server_info": "/server_info",
    "/model_info": "/get_model_info",
    "/get_model_info": "/model_info",
}
_TIMEOUT = 5.0  # seconds


class InfoRoutes:
    """The handlers; ``client`` asks the worker directly."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get(path, self._pass_on) for path in _OTHER_NAME]

    async def _pass_on(self, request: web.Request) -> web.Response:
        usable = self._registry.usable(Role.PREFILL, None)
        if not usable:
            return fault(503, "no_prefill_servers", "No prefill servers available")
        try:
            answer = await self._ask(usable[0], request.path)
        except NoAnswerError as error:
            return fault(502, "prefill_unreachable", f"Prefill worker {usable[0].url}: {error}")
        return web.Response(
            status=answer.status, body=answer.body, headers={"content-type": answer.content_type or "application/json"}
        )

    async def _ask(self, worker: Worker, path: str) -> Answer:
        answer = await self._client.get(worker, path, within=_TIMEOUT)
        if answer.status == 404:
            answer = await self._client.get(worker, _OTHER_NAME[path], within=_TIMEOUT)
        return answer
