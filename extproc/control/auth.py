"""Who may use the control API; and the log of what was changed by whom."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extproc.control.client import Client, client_of, foreign_origin
from extproc.control.keys import ControlKey, KeyRole, key_of, of_api_key
from extproc.control.replies import fault
from extproc.control.request_id import REQUEST_ID

PUBLIC = frozenset({"/liveness", "/health", "/readiness"})
AUDIT = web.RequestKey("audit", dict[str, object])  # what a handler says of a change, for the log
_MODELS = "/v1/models"  # a client of the models asks for it, too
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_audit = logging.getLogger("extproc.control.audit")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what.

    Attributes:
        api_key: the gateway's own; it opens everything.
        keys: those of the control API.
        open: without any key everybody may change things; else only clients on this machine may.
    """

    api_key: str | None = None
    keys: Sequence[ControlKey] = ()
    open: bool = False

    def all_keys(self) -> tuple[ControlKey, ...]:
        """Every key that opens something."""
        return (*self.keys, *(() if self.api_key is None else (of_api_key(self.api_key),)))


def auth_middleware(access: Access) -> Middleware:
    """Refuse who may not, and write a line for every change, also for one that was refused."""
    keys = access.all_keys()

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        changes = request.method not in _READS
        client = client_of(request)
        key = key_of(request.headers.get("authorization", ""), keys)
        response = _refusal(request, access, key, client, changes=changes, closed=bool(keys))
        if response is None:
            response = await handler(request)
        if changes:
            _log(request, response, key, client)
        return response

    return authorise


def _refusal(
    request: web.Request, access: Access, key: ControlKey | None, client: Client, *, changes: bool, closed: bool
) -> web.StreamResponse | None:
    if not closed:
        return _unless_local(request, client) if changes and not access.open else None
    if not changes and (request.path in PUBLIC or (access.api_key is None and is_about_models(request.path))):
        return None
    if key is None:
        response = fault(401, "unauthorized", "Missing or wrong API key: send 'Authorization: Bearer <key>'")
        response.headers["www-authenticate"] = "Bearer"
        return response
    if changes and key.role is not KeyRole.ADMIN:
        return fault(403, "forbidden", f"The key {key.id} is a user's: it may read, and only an admin's may change")
    return None


def _unless_local(request: web.Request, client: Client) -> web.StreamResponse | None:
    """Without a key: whoever can run a process on this machine may change things, and nobody else."""
    origin = foreign_origin(request)
    if client.local and not origin:
        return None
    who = f"a web page of {origin}" if client.local else f"this client ({client.address or 'unknown'})"
    return fault(
        403,
        "forbidden",
        f"No key is set, so that only clients on the gateway's own machine may change anything, and {who} is not one. "
        "Start the gateway with --api-key KEY or --control-plane-api-keys ID:NAME:admin:KEY and send "
        "'Authorization: Bearer KEY', or start it with --control-plane-open to let everybody",
    )


def is_about_models(path: str) -> bool:
    return path == _MODELS or path.startswith(f"{_MODELS}/")


def _log(request: web.Request, response: web.StreamResponse, key: ControlKey | None, client: Client) -> None:
    _audit.log(
        logging.INFO if response.status < 400 else logging.WARNING,
        "control change",
        extra={
            "key": key.id if key else "none",
            "key_name": (key.name or None) if key else None,
            "client": client.address or "local",
            "method": request.method,
            "path": request.path[:256],
            "status": response.status,
            "request_id": request.get(REQUEST_ID),
            **request.get(AUDIT, {}),
        },
    )
