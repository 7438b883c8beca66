"""``GET /openapi.json``: the control API in OpenAPI 3.1, made from the models that the code reads.

:data:`OPERATIONS` is the table; that the application has just these routes is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from extproc import __version__
from extproc.control import schemas
from extproc.control.auth import PUBLIC, Access, is_about_models
from extproc.control.replies import reply
from extproc.control.tokenizer_routes import TokenizerBody
from extproc.control.worker_query import MODES, ROLES
from extproc.workers.registration_body import Body, Patch

_REF: Final = "#/components/schemas/{model}"
_TEXT: Final = "text"  # an answer that is not JSON
_Answer = tuple[str, type[BaseModel] | str]

_BAD: Final[_Answer] = ("the request is not understood", schemas.Error)
_BAD_WORKER: Final[_Answer] = ("the registration or the id is not understood", schemas.WorkerError)
_NO_WORKER: Final[_Answer] = ("no such worker", schemas.WorkerError)
_LEAVING: Final[_Answer] = ("the worker is being removed", schemas.WorkerError)
_TOO_LARGE: Final[_Answer] = ("the body is too large", schemas.Error)
_NO_TOKENIZER: Final[_Answer] = ("there is none", schemas.Error)
_ACCEPTED: Final[_Answer] = ("accepted", schemas.Accepted)

_ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "format": "uuid"},
}
_MODEL: Final = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
_TYPE: Final = {
    "name": "worker_type",
    "in": "query",
    "required": False,
    "schema": {"type": "string", "enum": list(ROLES)},
}
_MODE: Final = {
    "name": "connection_mode",
    "in": "query",
    "required": False,
    "schema": {"type": "string", "enum": list(MODES)},
}
_MODEL_ID: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "may have slashes",
    "schema": {"type": "string", "minLength": 1},
}
_TOKENIZER: Final = {**_MODEL_ID, "name": "name", "description": "its id or the model; may have slashes"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        method, path: as a client writes them, the method in lower case.
        name: the operation's id.
        summary: what it does.
        answers: what may come, by status: when, and in which shape.
        body: what may be sent.
        optional: nothing need be sent.
        parameters: in path and query.
    """

    method: str
    path: str
    name: str
    summary: str
    answers: Mapping[int, _Answer]
    body: type[BaseModel] | None = None
    optional: bool = False
    parameters: tuple[Mapping[str, Any], ...] = field(default=())


def _information(path: str, what: str) -> Operation:
    answers: dict[int, _Answer] = {
        200: ("the worker's own answer", schemas.PassedOn),
        404: ("the worker's own answer: its engine does not have it", schemas.PassedOn),
        502: ("the worker did not answer", schemas.Error),
        503: ("there is no prefill worker to ask", schemas.Error),
    }
    return Operation("get", path, path[1:], f"What a prefill worker says of its {what}", answers)


def _order(path: str, what: str, shape: type[BaseModel], body: type[BaseModel] | None = schemas.Anything) -> Operation:
    answers: dict[int, _Answer] = {
        200: ("all workers did", shape),
        206: ("not all workers did", shape),
        400: _BAD,
        413: _TOO_LARGE,
    }
    return Operation("post", path, path[1:], what, answers, body, optional=True)


_ALIVE: Final[Mapping[int, _Answer]] = {200: ("the process lives", _TEXT)}
OPERATIONS: Final = (
    Operation("get", "/liveness", "liveness", "Whether the process lives", _ALIVE),
    Operation("get", "/health", "health", "The same", _ALIVE),
    Operation(
        "get",
        "/readiness",
        "readiness",
        "Whether a request could be served",
        {200: ("it could", schemas.Ready), 503: ("it could not", schemas.NotReady)},
    ),
    Operation(
        "get",
        "/health_generate",
        "health_generate",
        "Have a pair of workers answer a request of two tokens",
        {200: ("it has", schemas.Generated), 503: ("it has not", schemas.Error)},
        parameters=(_MODEL,),
    ),
    Operation(
        "get",
        "/v1/models",
        "list_models",
        "Every model that workers serve",
        {200: ("models", schemas.ModelList), 503: ("none is known", schemas.Error)},
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "show_model",
        "One model",
        {200: ("the model", schemas.Model), 404: ("no worker serves it", schemas.Error)},
        parameters=(_MODEL_ID,),
    ),
    Operation(
        "get",
        "/engine_metrics",
        "engine_metrics",
        "The Prometheus pages of all workers as one",
        {200: ("the page", _TEXT), 503: ("no worker shows any", schemas.Error)},
    ),
    Operation("get", "/get_loads", "get_loads", "What is under way", {200: ("loads", schemas.Loads)}),
    *(_information(path, "server") for path in ("/server_info", "/get_server_info")),
    *(_information(path, "model") for path in ("/model_info", "/get_model_info")),
    _order("/flush_cache", "Have every worker flush its prefix cache", schemas.Flushed),
    _order("/start_profile", "Have every worker start its profiler; the body is passed on", schemas.ProfileStarted),
    _order("/stop_profile", "Have every worker stop its profiler; the body is passed on", schemas.ProfileStopped),
    Operation(
        "get",
        "/workers",
        "list_workers",
        "All workers, or those of a model, a type, a protocol",
        {200: ("workers", schemas.WorkerList), 400: ("another parameter, or no such value", schemas.WorkerError)},
        parameters=(_MODEL, _TYPE, _MODE),
    ),
    Operation(
        "post",
        "/workers",
        "add_worker",
        "Register a worker",
        {
            202: _ACCEPTED,
            400: _BAD_WORKER,
            409: ("there is a worker of this URL and type", schemas.WorkerError),
            413: _TOO_LARGE,
        },
        Body,
    ),
    Operation(
        "get",
        "/workers/{id}",
        "show_worker",
        "One worker, and what is being done with it",
        {200: ("the worker", schemas.WorkerInfo), 400: _BAD_WORKER, 404: _NO_WORKER},
        parameters=(_ID,),
    ),
    Operation(
        "put",
        "/workers/{id}",
        "replace_worker",
        "Register a worker anew, under the same id; what is left out goes back to its default",
        {202: _ACCEPTED, 400: _BAD_WORKER, 404: _NO_WORKER, 409: _LEAVING, 413: _TOO_LARGE},
        Body,
        parameters=(_ID,),
    ),
    Operation(
        "patch",
        "/workers/{id}",
        "change_worker",
        "Change some of a worker's registration while it is used; what is left out stays",
        {202: _ACCEPTED, 400: _BAD_WORKER, 404: _NO_WORKER, 409: _LEAVING, 413: _TOO_LARGE},
        Patch,
        parameters=(_ID,),
    ),
    Operation(
        "delete",
        "/workers/{id}",
        "remove_worker",
        "Let a worker's requests end, then forget it",
        {202: _ACCEPTED, 400: _BAD_WORKER, 404: _NO_WORKER},
        parameters=(_ID,),
    ),
    Operation(
        "get",
        "/v1/tokenizers",
        "list_tokenizers",
        "The tokenizers of models that gRPC workers serve",
        {200: ("tokenizers", schemas.TokenizerList)},
    ),
    Operation(
        "post",
        "/v1/tokenizers",
        "add_tokenizer",
        "Load a tokenizer for a model",
        {
            202: ("it is being loaded", schemas.TokenizerProgress),
            400: _BAD,
            409: ("the model has one", schemas.TokenizerProgress),
            413: _TOO_LARGE,
            503: ("this process has none", schemas.Error),
        },
        TokenizerBody,
    ),
    Operation(
        "get",
        "/v1/tokenizers/{name}",
        "show_tokenizer",
        "One tokenizer",
        {200: ("the tokenizer", schemas.Tokenizer), 404: _NO_TOKENIZER},
        parameters=(_TOKENIZER,),
    ),
    Operation(
        "get",
        "/v1/tokenizers/{name}/status",
        "tokenizer_status",
        "How loading one goes",
        {200: ("how it is", schemas.TokenizerProgress), 404: _NO_TOKENIZER},
        parameters=(_TOKENIZER,),
    ),
    Operation(
        "delete",
        "/v1/tokenizers/{name}",
        "remove_tokenizer",
        "Forget a tokenizer; one that workers need is looked for again",
        {200: ("it is gone", schemas.TokenizerRemoved), 404: ("there is none", schemas.TokenizerRemoved)},
        parameters=(_TOKENIZER,),
    ),
    Operation("get", "/openapi.json", "openapi", "This document", {200: ("the document", schemas.Document)}),
)


def document(access: Access) -> dict[str, Any]:
    """The document, of an API that lets in whom ``access`` says."""
    models = {model.__name__: model for operation in OPERATIONS for model in _models(operation)}
    _, definitions = models_json_schema([(models[name], "validation") for name in sorted(models)], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, access)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pd-extproc control API",
            "version": __version__,
            "description": "Workers, readiness and information of a prefill/decode gateway.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _models(operation: Operation) -> list[type[BaseModel]]:
    shapes: list[type[BaseModel]] = [schemas.Error]
    shapes += [shape for _, shape in operation.answers.values() if not isinstance(shape, str)]
    return [*shapes, operation.body] if operation.body else shapes


def _described(operation: Operation, access: Access) -> dict[str, Any]:
    changes = operation.method != "get"
    closed = bool(access.all_keys())
    asks = closed and (changes or not _is_public(operation.path, access))
    answers = dict(operation.answers)
    if asks:
        answers[401] = ("no key, or a wrong one", schemas.Error)
    if changes:
        answers[403] = ("the client may not change anything", schemas.Error)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {str(status): _answer(*answers[status]) for status in sorted(answers)},
        "security": [{"bearer": []}] if asks else [],
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body:
        described["requestBody"] = {"required": not operation.optional, "content": _json(operation.body)}
    return described


def _is_public(path: str, access: Access) -> bool:
    return path in PUBLIC or (access.api_key is None and is_about_models(path))


def _answer(when: str, shape: type[BaseModel] | str) -> dict[str, Any]:
    if isinstance(shape, str):
        return {"description": when, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"description": when, "content": _json(shape)}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


class OpenApiRoutes:
    """The handler."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._made: dict[str, Any] | None = None

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get("/openapi.json", self._show)]

    async def _show(self, _request: web.Request) -> web.Response:
        if self._made is None:  # when it is first asked for: the start need not wait for it
            self._made = document(self._access)
        return reply(self._made)
