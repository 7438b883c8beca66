"""``/server_info`` and ``/model_info``, old names and new: one prefill worker's own answer, less its secrets.

Of a gRPC server it is the answer to ``GetServerInfo`` or ``GetModelInfo`` with the names of its fields.
"""

from __future__ import annotations

import orjson
from aiohttp import web

from extproc.control.replies import fault
from extproc.workers.client import Answer, NoAnswerError, WorkerClient
from extproc.workers.registry import Registry
from extproc.workers.rpc.as_json import as_json
from extproc.workers.rpc.channels import UnimplementedError
from extproc.workers.rpc.services import GET_MODEL_INFO, GET_SERVER_INFO, service_of
from extproc.workers.worker import Role, Worker

_OTHER_NAME = {
    "/server_info": "/get_server_info",
    "/get_server_info": "/server_info",
    "/model_info": "/get_model_info",
    "/get_model_info": "/model_info",
}
_METHODS = {
    "/server_info": GET_SERVER_INFO,
    "/get_server_info": GET_SERVER_INFO,
    "/model_info": GET_MODEL_INFO,
    "/get_model_info": GET_MODEL_INFO,
}
_TIMEOUT = 5.0  # seconds
# SGLang dumps its settings, keys included. Whoever may ask the gateway need not be someone who may ask the engine.
_SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password", "launch_command"})
_JSON = "application/json"
_ABSENT = Answer(404, _JSON, b'{"detail":"Not Found"}')  # what an HTTP server without the path says


class InfoRoutes:
    """The handlers; ``client`` asks the worker directly."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get(path, self._pass_on) for path in _OTHER_NAME]

    async def _pass_on(self, request: web.Request) -> web.Response:
        worker = self._one()
        if worker is None:
            return fault(503, "no_prefill_servers", "No prefill servers available")
        try:
            answer = await (self._ask_over_grpc if worker.url.is_grpc else self._ask)(worker, request.path)
        except NoAnswerError as error:
            return fault(502, "prefill_unreachable", f"Prefill worker {worker.url}: {error}")
        return web.Response(
            status=answer.status,
            body=_without_secrets(answer.body),
            headers={"content-type": answer.content_type or _JSON},
        )

    def _one(self) -> Worker | None:
        """The first that is given requests; one over HTTP rather, whose answer is the engine's own."""
        usable = self._registry.usable(Role.PREFILL, None)
        return next((worker for worker in usable if not worker.url.is_grpc), usable[0] if usable else None)

    async def _ask_over_grpc(self, worker: Worker, path: str) -> Answer:
        service, method = service_of(worker.runtime), _METHODS[path]
        request, response = service.request(method), service.response(method)
        try:
            said = await self._client.rpc.ask(worker, service.path(method), request, response, within=_TIMEOUT)
        except UnimplementedError:
            return _ABSENT
        return Answer(200, _JSON, orjson.dumps(as_json(said)))

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
