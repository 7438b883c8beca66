"""The control API as one aiohttp application, behind Envoy on a unix socket or on a port of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from extproc.control.auth import Access, auth_middleware
from extproc.control.engine_metrics import EngineMetricsRoutes
from extproc.control.fallback import json_errors
from extproc.control.finish import finish
from extproc.control.fleet_routes import FleetRoutes
from extproc.control.info_routes import InfoRoutes
from extproc.control.loads import LoadRoutes
from extproc.control.openapi import OpenApiRoutes
from extproc.control.request_id import request_id_middleware
from extproc.control.status_routes import StatusRoutes
from extproc.control.tokenizer_routes import TokenizerRoutes
from extproc.control.trial_routes import TrialRoutes, Try, no_trial
from extproc.control.worker_routes import WorkerRoutes
from extproc.discovery.state import DiscoveryState
from extproc.text.library import Library
from extproc.transport.address import SocketFile, TcpAddress, claim_socket_file, parse_address
from extproc.workers.client import WorkerClient
from extproc.workers.registry import Registry

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_LONGEST_HANDLER = 10.0  # seconds; asking a worker twice
_LARGEST_BODY = 1 << 20  # bytes; a worker specification is some hundred
_LARGEST_HEAD = 64 << 10  # bytes; Envoy lets 60 KiB pass, and aiohttp by itself 8 of a line


class ControlApi:
    """Serves ``registry`` at ``address``: ``unix:/path`` or ``host:port`` (IPv6 host in brackets, port 0 for any).

    Args:
        registry: the workers.
        client: asks workers for what is passed on from them.
        address: where to serve.
        access: who may do what; by default anybody may read, and whoever is on this machine may change things.
        model_aliases: further names of models.
        request_id_headers: where a client's own request id is looked for.
        try_pair: has a pair answer a request, for ``/health_generate``.
        tokenizers: those of models that gRPC workers serve; None where there are none.
        discovery: how finding workers goes; None where nobody looks for them.
    """

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        address: str,
        *,
        access: Access | None = None,
        request_id_headers: Sequence[str] = REQUEST_ID_HEADERS,
        model_aliases: Mapping[str, str] | None = None,
        try_pair: Try = no_trial,
        tokenizers: Library | None = None,
        discovery: DiscoveryState | None = None,
    ) -> None:
        self._address = parse_address(address)
        self._socket: SocketFile | None = None
        self._draining = False
        access = access or Access()
        app = web.Application(
            middlewares=[
                request_id_middleware(request_id_headers),
                json_errors,  # of the next one
                auth_middleware(access),
                json_errors,  # of what is let in, so that the former can write down what was answered
            ],
            client_max_size=_LARGEST_BODY,
        )
        app.add_routes(StatusRoutes(registry, lambda: self._draining, model_aliases or {}, discovery).routes())
        app.add_routes(WorkerRoutes(registry, model_aliases or {}).routes())
        app.add_routes(InfoRoutes(registry, client).routes())
        app.add_routes(LoadRoutes(registry).routes())
        app.add_routes(FleetRoutes(registry, client).routes())
        app.add_routes(EngineMetricsRoutes(registry, client).routes())
        app.add_routes(TokenizerRoutes(tokenizers).routes())
        trials = TrialRoutes(registry, try_pair)
        app.add_routes(trials.routes())
        app.on_shutdown.append(trials.stop)
        app.on_response_prepare.append(finish)
        app.add_routes(OpenApiRoutes(access).routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=_LONGEST_HANDLER,
            max_line_size=_LARGEST_HEAD,
            max_field_size=_LARGEST_HEAD,
            # What is no gzip would close the connection without a word, and Envoy sends somebody else's request there.
            auto_decompress=False,
        )

    async def start(self) -> None:
        """Begin serving. Raises OSError when the address cannot be had."""
        await self._runner.setup()
        try:
            await self._listen()
        except OSError:
            await self._runner.cleanup()
            raise

    async def _listen(self) -> None:
        if isinstance(self._address, TcpAddress):
            await web.TCPSite(self._runner, self._address.host, self._address.port).start()
            return
        await claim_socket_file(self._address.path)
        await web.UnixSite(self._runner, self._address.path).start()
        self._socket = SocketFile.bound(self._address.path)

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
        if self._socket is not None:
            self._socket.remove()
            self._socket = None
