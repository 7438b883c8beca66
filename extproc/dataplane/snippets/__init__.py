"""Configuration for Envoys of others, rendered from the same parts as our own: one module per kind of mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from extproc.dataplane.snippets.config import Place, SnippetConfig
from extproc.dataplane.snippets.envoy_gateway import envoy_gateway
from extproc.dataplane.snippets.inference_pool import inference_pool
from extproc.dataplane.snippets.istio import istio
from extproc.dataplane.snippets.plain import static, xds

__all__ = ["SNIPPETS", "Place", "SnippetConfig"]

SNIPPETS: Final[Mapping[str, Callable[[SnippetConfig], str]]] = {
    "envoy-static": static,
    "envoy-xds": xds,
    "istio": istio,
    "envoy-gateway": envoy_gateway,
    "inference-pool": inference_pool,
}
