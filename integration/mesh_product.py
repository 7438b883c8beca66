"""The whole product in an Envoy of somebody else's: the service alone, its snippet, and what a mesh makes of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import yaml
from foreign_envoy import ForeignEnvoy
from foreign_plane import ForeignPlane
from http_client import Client
from mesh_translation import Address, Json, of_envoy_gateway, of_inference_pool, of_istio
from product import Product
from vllm_product import VllmProduct

from extproc.dataplane.snippets import SNIPPETS
from extproc.envoy_config import snippet_config
from extproc.settings import Settings

Translation = Callable[[Sequence[Json], Sequence[Address], str], Json]
TRANSLATIONS: dict[str, Translation] = {
    "istio": of_istio,
    "envoy-gateway": of_envoy_gateway,
    "inference-pool": of_inference_pool,
}
# What each snippet's head tells to start the service with, besides --egress direct.
OPTIONS: dict[str, dict[str, object]] = {
    "envoy-static": {},
    "envoy-xds": {},
    "istio": {},
    "envoy-gateway": {"retry_released": False},
    "inference-pool": {"retry_released": False, "destination": "both"},
}


class InMesh(Product):
    """A Product whose Envoy is configured by ``snippet``, as its ``translation`` has it if it is for Kubernetes."""

    def __init__(
        self,
        *counts: int,
        snippet: str,
        translation: Translation | None = None,
        known: Sequence[str] = ("prefill", "decode"),
        **more: Any,
    ) -> None:
        self.snippet = snippet
        self._translation = translation or TRANSLATIONS.get(snippet)
        self._known = known  # roles whose workers the mesh has found
        super().__init__(*counts, **{"no_envoy": True, "egress": "direct", **OPTIONS[snippet], **more})

    def rendered(self) -> list[Json]:
        """The snippet's documents, for this service and these workers."""
        return list(yaml.safe_load_all(SNIPPETS[self.snippet](snippet_config(self.service._settings))))

    def _settings(self) -> Settings:
        names = ("extproc", "ads", "control")
        self._given |= {f"{name}_address": f"unix:{self.directory}/{name}.sock" for name in names}
        return super()._settings()

    async def _start(self) -> None:
        await super()._start()
        documents = self.rendered()
        workers = [("127.0.0.1", mock.port) for mock in self.mocks if mock.role in self._known]
        if self._translation is not None:
            await self._run(self._translation(documents, workers, f"{self.directory}/extproc.sock"))
        elif self.snippet == "envoy-xds":
            self._plane = ForeignPlane(documents[1:])
            await self._plane.start()
            await self._run(self._plane.bootstrap(documents[0]))
        else:
            (document,) = documents
            await self._run(document)
        await self.client.close()
        self.client = Client(*self.foreign.address)

    async def _run(self, document: Json) -> None:
        listeners = document["static_resources"].get("listeners", [])
        for listener in listeners:
            listener["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
        self.foreign = ForeignEnvoy(document, listeners[0]["name"] if listeners else "clients")
        await self.foreign.__aenter__()

    async def _stop(self) -> None:
        await self.foreign.__aexit__()
        if self.snippet == "envoy-xds":
            await self._plane.stop()
        await super()._stop()


class VllmInMesh(InMesh, VllmProduct):
    """The same with vLLM workers."""
