"""Who may use the control API."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extproc.control.replies import fault

PUBLIC = frozenset({"/liveness", "/health", "/readiness"})


def auth_middleware(api_key: str | None) -> Middleware:
    """Ask for ``Authorization: Bearer <api_key>`` everywhere but on probes; None asks nobody."""
    expected = None if api_key is None else api_key.encode()

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is None or request.path in PUBLIC or _bears(request, expected):
            return await handler(request)
        response = fault(401, "unauthorized", "Missing or wrong API key: send 'Authorization: Bearer <key>'")
        response.headers["www-authenticate"] = "Bearer"
        return response

    return authorise


def _bears(request: web.Request, expected: bytes) -> bool:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip().encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, expected) and scheme.lower() == "bearer"
