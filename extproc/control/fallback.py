"""What this API does not have, and what goes wrong in it, is answered in JSON too."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.control.replies import fault

_logger = logging.getLogger(__name__)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn aiohttp's own error pages and unforeseen exceptions into JSON errors."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = fault(405, "method_not_allowed", f"{request.method} is not allowed here, only {allowed}")
        response.headers["allow"] = allowed
        return response
    except web.HTTPNotFound:
        return fault(404, "not_found", f"Invalid URL ({request.method} {request.path})")
    except web.HTTPRequestEntityTooLarge as error:
        return fault(413, "payload_too_large", error.text or "The body is too large")
    except ConnectionResetError:  # the client left before its body was here: an answer to nobody
        return fault(400, "invalid_request", "The request was not sent completely")
    except web.HTTPException as error:
        return fault(error.status, "invalid_request", error.reason)
    except Exception:
        _logger.exception("%s %s failed", request.method, request.path)
        return fault(500, "internal_error", "Internal error; see the gateway's log")
