"""Istio: an EnvoyFilter lays our parts over what Istio makes of its own objects for a gateway's Envoy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.ext_proc import ext_proc_filter, late_filter
from extproc.dataplane.snippets.config import SnippetConfig
from extproc.dataplane.snippets.document import as_dict, comment, documents, kubernetes
from extproc.dataplane.snippets.foreign import (
    POST_PATHS,
    PREFIXES,
    cluster_settings,
    manager_settings,
    route_settings,
)

_API: Final = "networking.istio.io/v1"
_ROUTE: Final = "pd-inference"
_MANAGER: Final = "envoy.filters.network.http_connection_manager"

_HEAD: Final = """
Istio, for an ingress gateway (not for sidecars).

The sidecar of this project (deploy/kubernetes has it as a Deployment):

$ pd-extproc launch --no-envoy --egress direct --pd-disaggregation --extproc-address {listen} --service-discovery
  --service-discovery-namespace {place.namespace} --service-discovery-port {place.worker_port} --prefill-selector
  pd-role=prefill --decode-selector pd-role=decode

- Needs an Istio whose proxy is built on Envoy 1.40: `istioctl proxy-config bootstrap` shows which.
- Needs a gateway in namespace {place.namespace} whose pods have the label istio: {place.gateway}. Where it has a
  Gateway object of its own, leave out the one here and name that one in the VirtualService.
- Needs pods of workers with the label pd-pool: {place.workers}, all on port {place.worker_port}. For workers outside
  the cluster put a ServiceEntry in the place of the Service: the same host, resolution STATIC, their addresses.
- Cannot: gRPC workers, since one cluster speaks one protocol. Errors that Envoy itself makes are its own text, not
  JSON: local replies belong to all routes of the gateway.
- With PILOT_FILTER_GATEWAY_CLUSTER_CONFIG a gateway knows the clusters of its routes only: the route pd-control here
  names the sidecar's Service, but not its port {port}, so that the setting must be off.
"""


def istio(config: SnippetConfig) -> str:
    """Service, DestinationRules, Gateway, VirtualService and EnvoyFilter."""
    place = config.place
    workers, sidecar = place.host(place.workers), place.host(place.service)
    head = comment(_HEAD.format(place=place, port=config.extproc_port, listen=config.listen))
    return documents(
        head,
        (
            "All workers, of both roles. Headless: sidecars then know each pod's address for --egress direct.",
            _service(config),
        ),
        (
            "",
            kubernetes(_API, "DestinationRule", place.workers, place.namespace, _to_workers(config.dataplane, workers)),
        ),
        ("", kubernetes(_API, "DestinationRule", place.service, place.namespace, _to_sidecar(sidecar))),
        ("", kubernetes(_API, "Gateway", place.gateway, place.namespace, _gateway(place.gateway))),
        ("", kubernetes(_API, "VirtualService", _ROUTE, place.namespace, _virtual_service(config, workers))),
        (
            "What no object of Istio's says: the filters, which host is taken, and the limits.",
            kubernetes(
                "networking.istio.io/v1alpha3", "EnvoyFilter", place.service, place.namespace, _envoy_filter(config)
            ),
        ),
    )


def _service(config: SnippetConfig) -> dict[str, Any]:
    place = config.place
    port = {"name": "http", "port": place.worker_port, "targetPort": place.worker_port}
    spec = {"clusterIP": "None", "selector": {"pd-pool": place.workers}, "ports": [port]}
    return kubernetes("v1", "Service", place.workers, place.namespace, spec)


def _to_workers(config: DataplaneConfig, host: str) -> dict[str, Any]:
    return {
        "host": host,
        "trafficPolicy": {
            # A weight by place would keep Envoy from the policy that takes the named host.
            "loadBalancer": {"simple": "ROUND_ROBIN", "localityLbSetting": {"enabled": False}},
            "connectionPool": {
                "tcp": {"connectTimeout": _seconds(config.connect_timeout), "tcpKeepalive": _KEEPALIVE},
                "http": {
                    "idleTimeout": _seconds(config.upstream_idle_timeout),  # below the engines' own 5 s
                    "h2UpgradePolicy": "DO_NOT_UPGRADE",
                },
            },
        },
    }


_KEEPALIVE: Final = {"probes": 3, "time": "30s", "interval": "10s"}


def _gateway(name: str) -> dict[str, Any]:
    server = {"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": ["*"]}
    return {"selector": {"istio": name}, "servers": [server]}


def _to_sidecar(host: str) -> dict[str, Any]:
    return {
        "host": host,
        "trafficPolicy": {"connectionPool": {"tcp": {"connectTimeout": "1s", "tcpKeepalive": _KEEPALIVE}}},
    }


def _virtual_service(config: SnippetConfig, host: str) -> dict[str, Any]:
    place = config.place
    matches = [
        *({"uri": {"exact": path}, "method": {"exact": "POST"}} for path in POST_PATHS),
        *({"uri": {"prefix": prefix}} for prefix in PREFIXES),
    ]
    route = {
        "name": _ROUTE,
        "match": matches,
        "route": [{"destination": {"host": host, "port": {"number": place.worker_port}}}],
        "timeout": "0s",
        # Only a connection that never came about: no worker has seen anything of the request then.
        "retries": {
            "attempts": config.dataplane.max_failovers,
            "retryOn": "connect-failure,refused-stream",
        },
    }
    models = {
        "name": "pd-control",
        "match": [
            {"uri": {"exact": "/v1/models"}},
            {"uri": {"prefix": "/v1/models/"}},
            {"uri": {"exact": "/readiness"}},
        ],
        "route": [{"destination": {"host": place.host(place.service), "port": {"number": config.control_port}}}],
    }
    return {"hosts": ["*"], "gateways": [f"{place.namespace}/{place.gateway}"], "http": [route, models]}


def _envoy_filter(config: SnippetConfig) -> dict[str, Any]:
    place = config.place
    sidecar = f"outbound|{config.extproc_port}||{place.host(place.service)}"
    dataplane = replace(config.dataplane, extproc_cluster=sidecar, extproc_authority=place.host(place.service))
    filters = [*([late_filter(dataplane)] if dataplane.late_answers else []), ext_proc_filter(dataplane)]
    before_router = {
        "context": "GATEWAY",
        "listener": {"filterChain": {"filter": {"name": _MANAGER, "subFilter": {"name": "envoy.filters.http.router"}}}},
    }
    return {
        "workloadSelector": {"labels": {"istio": place.gateway}},
        "configPatches": [
            *(_patch("HTTP_FILTER", before_router, "INSERT_BEFORE", as_dict(each)) for each in filters),
            _patch(
                "NETWORK_FILTER",
                {"context": "GATEWAY", "listener": {"filterChain": {"filter": {"name": _MANAGER}}}},
                "MERGE",
                {
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
                        "HttpConnectionManager",
                        **manager_settings(),
                    }
                },
            ),
            _patch(
                "HTTP_ROUTE",
                {"context": "GATEWAY", "routeConfiguration": {"vhost": {"route": {"name": _ROUTE}}}},
                "MERGE",
                route_settings(dataplane),
            ),
            _patch(
                "CLUSTER",
                {"context": "GATEWAY", "cluster": {"service": place.host(place.workers)}},
                "MERGE",
                cluster_settings(),
            ),
        ],
    }


def _patch(apply_to: str, match: dict[str, Any], operation: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"applyTo": apply_to, "match": match, "patch": {"operation": operation, "value": value}}


def _seconds(value: float) -> str:
    return f"{value:g}s"
