"""What a gateway of a mesh needs of ours: one route's worth of filters, headers and limits, and no listener of our own.

In a mesh all workers are one set of hosts (a Service, an InferencePool), prefill and decode alike: the destination says
which. So there is one route for all paths of inference, and the cluster's name is the mesh's.
"""

from __future__ import annotations

from typing import Any, Final

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.route.v3 import RetryPolicy, Route, RouteAction, RouteMatch
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpConnectionManager

from extproc.dataplane.clusters import named_hosts_only
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.listeners import strip_control_headers
from extproc.dataplane.messages import seconds
from extproc.dataplane.paths import DECODE_PATHS, DECODE_PREFIXES, PREFILL_PATHS
from extproc.dataplane.routes import body_limit, worker_route
from extproc.dataplane.snippets.document import as_dict
from extproc.names import CLUSTER, LATE, LOCAL_REPLY, NAMING

POST_PATHS: Final = (*DECODE_PATHS, *PREFILL_PATHS)
PREFIXES: Final = DECODE_PREFIXES


def manager_settings() -> dict[str, Any]:
    """What the connection manager of the mesh's listener needs, to be laid over its own.

    Little, since all routes of the listener have it: neither path rules, on which their authorization may rest, nor
    reports of streams, which their access logs would show, too.
    """
    return as_dict(
        HttpConnectionManager(
            preserve_external_request_id=True, early_header_mutation_extensions=[strip_control_headers()]
        )
    )


def route_settings(config: DataplaneConfig) -> dict[str, Any]:
    """What the route needs besides match and cluster, to be laid over the mesh's own."""
    route = worker_route(RouteMatch(), "", config)
    assert route.route is not None
    assert route.route.retry_policy is not None
    route.request_headers_to_remove.append(CLUSTER)  # there is one cluster only
    route.response_headers_to_remove += [LOCAL_REPLY, LATE, *NAMING]
    route.request_body_buffer_limit = body_limit(config)
    return as_dict(
        Route(
            route=RouteAction(
                idle_timeout=seconds(config.idle_timeout),  # in the place of the listener's 5 minutes
                retry_policy=RetryPolicy(retry_back_off=route.route.retry_policy.retry_back_off),
            ),
            typed_per_filter_config=route.typed_per_filter_config,
            request_headers_to_remove=route.request_headers_to_remove,
            response_headers_to_add=route.response_headers_to_add,
            response_headers_to_remove=route.response_headers_to_remove,
            request_body_buffer_limit=route.request_body_buffer_limit,
        )
    )


def cluster_settings() -> dict[str, Any]:
    """What the workers' cluster needs, to be laid over the mesh's own: the host that was named, or none."""
    return as_dict(Cluster(load_balancing_policy=named_hosts_only()))


def http_route(gateway: str, rule: dict[str, Any]) -> dict[str, Any]:
    """A Gateway API route of all paths of inference, to wherever ``rule`` says."""
    matches = [
        *({"path": {"type": "Exact", "value": path}, "method": "POST"} for path in POST_PATHS),
        *({"path": {"type": "PathPrefix", "value": prefix.rstrip("/")}} for prefix in PREFIXES),
    ]
    return {"parentRefs": [{"name": gateway}], "rules": [{"matches": matches, **rule}]}
