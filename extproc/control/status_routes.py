"""Liveness, readiness, models and load."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web

from extproc import __version__
from extproc.control.replies import fault, reply
from extproc.workers.registry import Registry


class StatusRoutes:
    """The handlers. ``draining`` says whether the gateway is shutting down."""

    def __init__(self, registry: Registry, draining: Callable[[], bool]) -> None:
        self._registry = registry
        self._draining = draining

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.get("/liveness", self._alive),
            web.get("/health", self._alive),
            web.get("/readiness", self._ready),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/get_loads", self._loads),
        ]

    async def _alive(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _ready(self, _request: web.Request) -> web.Response:
        if self._draining():
            return reply({"status": "not ready", "reason": "draining"}, 503)
        state = self._registry.readiness()
        if not state.ready:
            return reply({"status": "not ready", "reason": state.reason}, 503)
        return reply({"status": "ready", "healthy_workers": state.usable_workers, "total_workers": state.total_workers})

    async def _models(self, _request: web.Request) -> web.Response:
        models = self._registry.models()
        if not models:
            return fault(503, "no_models_available", "No models available")
        return reply({"object": "list", "data": [self._entry(model) for model in models]})

    async def _model(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        if model not in self._registry.models():
            return fault(404, "model_not_found", f"The model `{model}` does not exist")
        return reply(self._entry(model))

    def _entry(self, model: str) -> dict[str, object]:
        """A model as its worker lists it (``root``, ``max_model_len``, ...), but that it is this gateway's."""
        ours = {"id": model, "object": "model", "owned_by": "self_hosted"}
        return {"created": 0, **self._registry.listed(model), **ours}

    async def _loads(self, _request: web.Request) -> web.Response:
        """What this gateway has under way per worker; the engines' own figures are not asked for."""
        loads = [
            {
                "worker": worker.name,
                "worker_type": worker.role.value,
                "dp_rank": worker.dp_rank or 0,
                "num_running_reqs": worker.load,
                "num_total_reqs": worker.load,
            }
            for worker in self._registry
        ]
        total = sum(worker.load for worker in self._registry)
        return reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": f"pd-extproc-{__version__}",
                "dp_rank_count": len(loads),
                "loads": loads,
                "aggregate": {"total_running_reqs": total, "total_reqs": total},
            }
        )
