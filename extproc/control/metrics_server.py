"""Where Prometheus reads: ``GET /metrics`` on a listener of its own, and nothing else there."""

from __future__ import annotations

from aiohttp import web

from extproc.control.fallback import json_errors
from extproc.control.finish import finish
from extproc.control.metrics import CONTENT_TYPE, Metrics


class MetricsServer:
    """Serves ``metrics`` on ``host`` and ``port`` (0: any free one)."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._host = host
        self._port = port
        app = web.Application(middlewares=[json_errors])
        app.add_routes([web.get("/metrics", self._page)])
        app.on_response_prepare.append(finish)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Begin serving. Raises OSError when the port cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError:
            await self._runner.cleanup()
            raise

    @property
    def port(self) -> int:
        """The port served on."""
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _page(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"content-type": CONTENT_TYPE})
