"""Where Envoy's state may be read by others: what of its admin interface changes nothing, on a port of its own.

The admin interface itself stays on loopback, since it can also end Envoy. Prometheus, and a sidecar in another
container (``--envoy-admin-address``), read here.
"""

from __future__ import annotations

from typing import Final

from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.messages import any_of, http_filter, seconds, socket_address
from extproc.names import ADMIN_CLUSTER, STATUS_LISTENER

STATUS_PATHS: Final = ("/ready", "/clusters", "/stats/prometheus")  # GET only
_SECONDS: Final = 10.0  # with ten thousand series a page takes well below one


def status_listener(config: DataplaneConfig) -> Listener:
    """The port of ``config.status_port``."""
    routes = [
        Route(
            match=RouteMatch(
                path=path, headers=[HeaderMatcher(name=":method", string_match=StringMatcher(exact="GET"))]
            ),
            route=RouteAction(cluster=ADMIN_CLUSTER, timeout=seconds(_SECONDS)),
        )
        for path in STATUS_PATHS
    ]
    manager = HttpConnectionManager(
        stat_prefix=STATUS_LISTENER,
        codec_type=HttpConnectionManagerCodecType.HTTP1,
        route_config=RouteConfiguration(
            name=STATUS_LISTENER, virtual_hosts=[VirtualHost(name=STATUS_LISTENER, domains=["*"], routes=routes)]
        ),
        http_filters=[http_filter("envoy.filters.http.router", Router())],
    )
    name = "envoy.filters.network.http_connection_manager"
    return Listener(
        name=STATUS_LISTENER,
        address=socket_address(config.status_host, config.status_port),
        filter_chains=[FilterChain(filters=[Filter(name=name, typed_config=any_of(manager))])],
    )
