"""``GET /get_loads``."""

from __future__ import annotations

from aiohttp import web

from extproc.control.load_report import load_report
from extproc.control.replies import reply
from extproc.workers.registry import Registry


class LoadRoutes:
    """The handler."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get("/get_loads", self._loads)]

    async def _loads(self, _request: web.Request) -> web.Response:
        return reply(load_report(self._registry))
