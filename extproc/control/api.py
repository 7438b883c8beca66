"""The control API as one aiohttp application, behind Envoy on a unix socket or on a port of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from extproc.control.auth import auth_middleware
from extproc.control.fallback import json_errors
from extproc.control.info_routes import InfoRoutes
from extproc.control.request_id import request_id_middleware
from extproc.control.status_routes import StatusRoutes
from extproc.control.worker_routes import WorkerRoutes
from extproc.workers.client import WorkerClient
from extproc.workers.registry import Registry

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_LARGEST_BODY = 1 << 20  # bytes; a worker specification is some hundred


class ControlApi:
    """Serves ``registry`` at ``address``: ``unix:/path`` or ``host:port`` (IPv6 host in brackets, port 0 for any).

    ``api_key`` None leaves the API open. ``client`` asks workers for what is passed on from them.
    """

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        address: str,
        *,
        api_key: str | None = None,
        request_id_headers: Sequence[str] = REQUEST_ID_HEADERS,
    ) -> None:
        self._address = address
        self._draining = False
        app = web.Application(
            middlewares=[request_id_middleware(request_id_headers), json_errors, auth_middleware(api_key)],
            client_max_size=_LARGEST_BODY,
        )
        app.add_routes(StatusRoutes(registry, lambda: self._draining).routes())
        app.add_routes(WorkerRoutes(registry).routes())
        app.add_routes(InfoRoutes(registry, client).routes())
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Begin serving. Raises OSError when the address cannot be had."""
        await self._runner.setup()
        site: web.BaseSite
        if self._address.startswith("unix:"):
            self._remove_socket()  # left by a process that was killed
            site = web.UnixSite(self._runner, self._address.removeprefix("unix:"))
        else:
            host, _, port = self._address.rpartition(":")
            site = web.TCPSite(self._runner, host.strip("[]"), int(port))
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise

    @property
    def port(self) -> int:
        """The TCP port served on; for addresses with port 0."""
        return int(self._runner.addresses[0][1])

    def set_draining(self) -> None:
        """The gateway is shutting down: ``/readiness`` says so from now on."""
        self._draining = True

    async def stop(self) -> None:
        """Stop serving; the socket file goes too."""
        await self._runner.cleanup()
        self._remove_socket()

    def _remove_socket(self) -> None:
        path = Path(self._address.removeprefix("unix:"))
        if self._address.startswith("unix:") and path.is_socket():
            path.unlink()
