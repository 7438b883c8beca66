"""The shapes of the control API's answers."""

from __future__ import annotations

import orjson
from aiohttp import web

from extproc.errors import error_body

ERROR_CODE_HEADER = "x-pd-error-code"


def reply(value: object, status: int = 200) -> web.Response:
    """``value`` as JSON."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def fault(status: int, code: str, message: str) -> web.Response:
    """An error in the shape of the data plane: ``{"error": {"type", "code", "message", "param"}}``."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.Response(
        body=error_body(code, message, error_type=kind),
        status=status,
        content_type="application/json",
        headers={ERROR_CODE_HEADER: code},
    )


def worker_fault(status: int, code: str, message: str) -> web.Response:
    """An error in the shape of the peer's worker routes: ``{"error": message, "code": CODE}``."""
    return reply({"error": message, "code": code}, status)
