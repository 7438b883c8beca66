"""``/v1/tokenizers``: those that there are, adding one, taking one away, with the peer's statuses and JSON.

Seen with smg 1.13.0.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from extproc.control.replies import fault, reply
from extproc.text.entry import Entry, State
from extproc.text.library import Library

_NAME: Final = "{name:(?:(?!/status$).)+}"  # models' names have slashes


class TokenizerBody(BaseModel):
    """``POST /v1/tokenizers``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=1024, description="the model that it is for")
    source: str = Field(min_length=1, max_length=4096, description="a directory of the gateway's, or an id on the hub")
    chat_template_path: str | None = Field(default=None, description="a Jinja file of the gateway's")


class TokenizerRoutes:
    """The handlers; ``library`` does the work, None where this process has none."""

    def __init__(self, library: Library | None) -> None:
        self._library = library

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.get("/v1/tokenizers", self._list),
            web.post("/v1/tokenizers", self._add),
            web.get(f"/v1/tokenizers/{_NAME}/status", self._status),
            web.get(f"/v1/tokenizers/{_NAME}", self._show),
            web.delete(f"/v1/tokenizers/{_NAME}", self._remove),
        ]

    async def _list(self, _request: web.Request) -> web.Response:
        return reply({"tokenizers": [_info(entry) for entry in self._entries() if entry.ready is not None]})

    async def _show(self, request: web.Request) -> web.Response:
        entry = self._find(request)
        if entry is None or entry.ready is None:
            return _not_found(request)
        return reply(_info(entry))

    async def _status(self, request: web.Request) -> web.Response:
        entry = self._find(request)
        return _not_found(request) if entry is None else reply(_progress(entry))

    async def _add(self, request: web.Request) -> web.Response:
        try:
            body = TokenizerBody.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            return fault(400, "invalid_type", ": ".join(filter(None, (where, first["msg"]))))
        if self._library is None:
            return fault(503, "tokenizer_not_found", "this process has no tokenizers")
        try:
            entry = self._library.add(body.name, body.source, body.chat_template_path)
        except KeyError as error:
            message = f"Tokenizer '{body.name}' already exists"
            return reply({"id": error.args[0], "status": "failed", "message": message}, 409)
        message = f"Tokenizer '{body.name}' registration job submitted. Loading from: {body.source}"
        return reply({"id": entry.id, "status": State.PENDING.value, "message": message}, 202)

    async def _remove(self, request: web.Request) -> web.Response:
        entry = self._find(request)
        if entry is None or self._library is None:
            name = request.match_info["name"]
            return reply({"success": False, "message": f"Tokenizer '{name}' not found"}, 404)
        self._library.remove(entry)
        return reply({"success": True, "message": f"Tokenizer '{entry.name}' removed successfully"})

    def _entries(self) -> tuple[Entry, ...]:
        return () if self._library is None else tuple(self._library)

    def _find(self, request: web.Request) -> Entry | None:
        return None if self._library is None else self._library.find(request.match_info["name"])


def _info(entry: Entry) -> dict[str, Any]:
    assert entry.ready is not None  # asked before
    return {
        "id": entry.id,
        "name": entry.name,
        "source": entry.source,
        "vocab_size": entry.ready.tokenizer.vocab_size,
    }


def _progress(entry: Entry) -> dict[str, Any]:
    if entry.ready is not None:
        message, size = f"Tokenizer '{entry.name}' is loaded and ready", entry.ready.tokenizer.vocab_size
        return {"id": entry.id, "status": State.READY.value, "message": message, "vocab_size": size}
    return {"id": entry.id, "status": entry.state.value, "message": entry.reason or "Tokenizer is being loaded"}


def _not_found(request: web.Request) -> web.Response:
    return fault(404, "tokenizer_not_found", f"Tokenizer '{request.match_info['name']}' not found")
