"""``/server_info`` and ``/model_info``, old names and new: one prefill worker's own answer, less its secrets."""

from __future__ import annotations

import orjson
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
# SGLang dumps its settings, keys included. Whoever may ask the gateway need not be someone who may ask the engine.
_SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password", "launch_command"})


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
            status=answer.status,
            body=_without_secrets(answer.body),
            headers={"content-type": answer.content_type or "application/json"},
        )

    async def _ask(self, worker: Worker, path: str) -> Answer:
        answer = await self._client.get(worker, path, within=_TIMEOUT)
        if answer.status == 404:
            answer = await self._client.get(worker, _OTHER_NAME[path], within=_TIMEOUT)
        return answer


def _without_secrets(body: bytes) -> bytes:
    """The worker's own bytes, unless they hold a secret."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    return orjson.dumps(value) if _remove_secrets(value) else body


def _remove_secrets(value: object) -> bool:
    """Remove secrets from ``value`` at any depth (SGLang: ``internal_states`` repeat its settings); were there any?"""
    found = False
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            for name in [name for name in _SECRETS if item.get(name)]:
                del item[name]
                found = True
            left += item.values()
        elif isinstance(item, list):
            left += item
    return found
