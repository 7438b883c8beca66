"""Liveness, readiness and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from extproc.control.replies import fault, reply
from extproc.discovery.state import DiscoveryState
from extproc.workers.registry import Registry


class StatusRoutes:
    """The handlers. ``draining`` says whether the gateway is shutting down; ``aliases`` stand for models.

    ``discovery``: how finding workers goes, if anybody looks for them.
    """

    def __init__(
        self,
        registry: Registry,
        draining: Callable[[], bool],
        aliases: Mapping[str, str],
        discovery: DiscoveryState | None = None,
    ) -> None:
        self._registry = registry
        self._draining = draining
        self._aliases = aliases
        self._discovery = discovery

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.get("/liveness", self._alive),
            web.get("/health", self._alive),
            web.get("/readiness", self._ready),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
        ]

    async def _alive(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _ready(self, _request: web.Request) -> web.Response:
        if self._draining():
            return reply({"status": "not ready", "reason": "draining"}, 503)
        state = self._registry.readiness()
        if not state.ready:
            doubt = "" if self._discovery is None else self._discovery.doubt
            return reply({"status": "not ready", "reason": "; ".join(filter(None, (state.reason, doubt)))}, 503)
        return reply({"status": "ready", "healthy_workers": state.usable_workers, "total_workers": state.total_workers})

    async def _models(self, _request: web.Request) -> web.Response:
        models = self._served()
        if not models:
            return fault(503, "no_models_available", "No models available")
        return reply({"object": "list", "data": [self._entry(model) for model in models]})

    async def _model(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        if model not in self._served():
            return fault(404, "model_not_found", f"The model `{model}` does not exist")
        return reply(self._entry(model))

    def _served(self) -> list[str]:
        """Every name that a request may give: of models that workers serve, and aliases of these."""
        models = self._registry.models()
        own = [model for model in models if model not in self._aliases]
        return own + [alias for alias, model in self._aliases.items() if model in models]

    def _entry(self, model: str) -> dict[str, object]:
        """A model as its worker lists it (``root``, ``max_model_len``, ...), but that it is this gateway's."""
        alias_of = {"alias_of": self._aliases[model]} if model in self._aliases else {}
        ours = {"id": model, "object": "model", "owned_by": "self_hosted", **alias_of}
        return {"created": 0, **self._registry.listed(self._aliases.get(model, model)), **ours}
