"""Envoy Gateway: policies for what they can say, and an EnvoyPatchPolicy for what they cannot."""

from __future__ import annotations

from typing import Any, Final

from extproc.dataplane.ext_proc import ext_proc_filter
from extproc.dataplane.snippets.config import SnippetConfig
from extproc.dataplane.snippets.document import as_dict, comment, documents, kubernetes
from extproc.dataplane.snippets.foreign import cluster_settings, http_route, route_settings
from extproc.names import DESTINATION, METADATA_NAMESPACE

_API: Final = "gateway.envoyproxy.io/v1alpha1"
_GROUP: Final = "gateway.networking.k8s.io"
_ROUTE: Final = "pd-inference"
_LISTENER: Final = "type.googleapis.com/envoy.config.listener.v3.Listener"
_ROUTES: Final = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
_CLUSTER: Final = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
_MOST: Final = 2**32 - 1  # of a circuit breaker
_CLIENT_BUFFER: Final = "256Ki"

_HEAD: Final = """
Envoy Gateway.

The sidecar (deploy/kubernetes has it as a Deployment):

$ pd-extproc launch --no-envoy --egress direct --no-retry-released --pd-disaggregation --extproc-address {listen}
  --service-discovery --service-discovery-namespace {place.namespace} --service-discovery-port {place.worker_port}
  --prefill-selector pd-role=prefill --decode-selector pd-role=decode

- Needs an Envoy Gateway whose proxy is Envoy 1.40, with extensionApis.enableEnvoyPatchPolicy: true.
- Needs the Gateway {place.gateway} in namespace {place.namespace} with a listener named http. The patch names
  listener and routes NAMESPACE/GATEWAY/LISTENER and the cluster httproute/NAMESPACE/ROUTE/rule/0, as Envoy Gateway
  does by default; with merged gateways or another naming scheme look them up in the config dump.
- Needs pods of workers with the label pd-pool: {place.workers}, all on port {place.worker_port}.
- Without the patch nothing is right: a request is sent to any worker, prefill or decode, and is taken for over when
  the head of its answer is there.
- Cannot: gRPC workers, and another attempt after a release (--no-retry-released): both need a second filter. Errors
  that Envoy itself makes are its own text, not JSON.
- The ClientTrafficPolicy is for the whole Gateway: put its settings into yours if you have one.
"""


def envoy_gateway(config: SnippetConfig) -> str:
    """Service, HTTPRoute, and the four policies."""
    place = config.place
    route, gateway = {"group": _GROUP, "kind": "HTTPRoute", "name": _ROUTE}, {"group": _GROUP, "kind": "Gateway"}
    gateway["name"] = place.gateway
    head = comment(_HEAD.format(place=place, listen=config.listen))
    rule = {
        "backendRefs": [{"name": place.workers, "port": place.worker_port}],
        "timeouts": {"request": "0s"},
    }
    port = {"name": "http", "port": place.worker_port, "targetPort": place.worker_port}
    service = {"clusterIP": "None", "selector": {"pd-pool": place.workers}, "ports": [port]}
    return documents(
        head,
        ("All workers, of both roles.", kubernetes("v1", "Service", place.workers, place.namespace, service)),
        ("", kubernetes(f"{_GROUP}/v1", "HTTPRoute", _ROUTE, place.namespace, http_route(place.gateway, rule))),
        ("", kubernetes(_API, "EnvoyExtensionPolicy", place.service, place.namespace, _extension(config, route))),
        ("", kubernetes(_API, "BackendTrafficPolicy", place.workers, place.namespace, _backend(config, route))),
        ("", kubernetes(_API, "ClientTrafficPolicy", place.gateway, place.namespace, _client(config, gateway))),
        (
            "What no policy says.",
            kubernetes(_API, "EnvoyPatchPolicy", place.service, place.namespace, _patches(config, gateway)),
        ),
    )


def _extension(config: SnippetConfig, route: dict[str, str]) -> dict[str, Any]:
    keepalive = {"tcpKeepalive": {"probes": 3, "idleTime": "30s", "interval": "10s"}}
    return {
        "targetRefs": [route],
        "extProc": [
            {
                "backendRefs": [{"name": config.place.service, "port": config.extproc_port}],
                "backendSettings": {
                    "circuitBreaker": _no_circuit_breaker(),
                    "timeout": {"tcp": {"connectTimeout": "1s"}},
                    **keepalive,
                },
                "processingMode": {"request": {"body": "FullDuplexStreamed"}, "response": {}},
                "messageTimeout": "30s",
                "failOpen": False,
                "metadata": {"writableNamespaces": [METADATA_NAMESPACE]},
            }
        ],
    }


def _backend(config: SnippetConfig, route: dict[str, str]) -> dict[str, Any]:
    dataplane = config.dataplane
    return {
        "targetRefs": [route],
        "circuitBreaker": _no_circuit_breaker(),
        # Only a connection that never came about: no worker has seen anything of the request then.
        "retry": {
            "numRetries": dataplane.max_failovers,
            "retryOn": {"triggers": ["connect-failure", "refused-stream"]},
            "perRetry": {"backOff": {"baseInterval": "1ms", "maxInterval": "1ms"}},
        },
        "tcpKeepalive": {"probes": 3, "idleTime": "30s", "interval": "10s"},
        "timeout": {
            "tcp": {"connectTimeout": _seconds(dataplane.connect_timeout)},
            "http": {"requestTimeout": "0s", "connectionIdleTimeout": _seconds(dataplane.upstream_idle_timeout)},
        },
    }


def _client(config: SnippetConfig, gateway: dict[str, str]) -> dict[str, Any]:
    return {
        "targetRefs": [gateway],
        "connection": {"bufferLimit": _CLIENT_BUFFER},
        "headers": {
            "requestID": "PreserveOrGenerate",
            "earlyRequestHeaders": {"remove": [DESTINATION]},  # x-pd-* is taken away by the sidecar
        },
        "timeout": {"http": {"streamIdleTimeout": _seconds(config.dataplane.idle_timeout)}},
    }


def _patches(config: SnippetConfig, gateway: dict[str, str]) -> dict[str, Any]:
    place, dataplane = config.place, config.dataplane
    listener = f"{place.namespace}/{place.gateway}/http"
    cluster = f"httproute/{place.namespace}/{_ROUTE}/rule/0"
    filter_name = f"envoy.filters.http.ext_proc/envoyextensionpolicy/{place.namespace}/{place.service}/extproc/0"
    ours = as_dict(ext_proc_filter(dataplane))["typed_config"]
    on_filter = f"$..http_filters[?(@.name=='{filter_name}')].typed_config"
    on_route = f"$..routes[?(@.route.cluster=='{cluster}')]"
    of_route = route_settings(dataplane)
    filter_fields = {
        "processing_mode": ours["processing_mode"],
        "allow_content_length_header": ours["allow_content_length_header"],
        "status_on_error": ours["status_on_error"],
        "metadata_options": ours["metadata_options"],
        "grpc_service/timeout": ours["grpc_service"]["timeout"],
    }
    route_fields = {
        name: of_route[name]
        for name in (
            "request_headers_to_remove",
            "response_headers_to_add",
            "response_headers_to_remove",
            "request_body_buffer_limit",
        )
    }
    return {
        "type": "JSONPatch",
        "targetRef": gateway,
        "jsonPatches": [
            *(_add(_LISTENER, listener, f"/{path}", value, on_filter) for path, value in filter_fields.items()),
            *(_add(_ROUTES, listener, f"/{path}", value, on_route) for path, value in route_fields.items()),
            _add(_CLUSTER, cluster, "/load_balancing_policy", cluster_settings()["load_balancing_policy"]),
            # The weights of localities go with policies that choose by themselves only.
            _add(_CLUSTER, cluster, "/common_lb_config", {}),
        ],
    }


def _add(kind: str, name: str, path: str, value: object, json_path: str | None = None) -> dict[str, Any]:
    where = {"path": path} if json_path is None else {"jsonPath": json_path, "path": path}
    return {"type": kind, "name": name, "operation": {"op": "add", **where, "value": value}}


def _no_circuit_breaker() -> dict[str, int]:
    return dict.fromkeys(("maxConnections", "maxPendingRequests", "maxParallelRequests", "maxParallelRetries"), _MOST)


def _seconds(value: float) -> str:
    return f"{value:g}s"
