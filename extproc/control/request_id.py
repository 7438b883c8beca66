"""Every answer names its request: the client's id where it sent a usable one, else a new one."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

REQUEST_ID = web.RequestKey("request_id", str)
_ALPHABET = string.ascii_letters + string.digits
_LONGEST = 128


def request_id_middleware(headers: Sequence[str]) -> Middleware:
    """``headers`` are looked at in order; ids of 1 to 128 visible ASCII characters are taken over."""

    @web.middleware
    async def add_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID] = _given(request, headers) or _made()
        response = await handler(request)
        response.headers["x-request-id"] = request_id
        return response

    return add_request_id


def _given(request: web.Request, headers: Sequence[str]) -> str | None:
    for name in headers:
        value = request.headers.get(name, "")
        if 0 < len(value) <= _LONGEST and all("!" <= character <= "~" for character in value):
            return value
    return None


def _made() -> str:
    return "req-" + "".join(secrets.choice(_ALPHABET) for _ in range(24))
