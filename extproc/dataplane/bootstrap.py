"""Envoy's bootstrap: everything but the workers' addresses, which come by ADS (ads.py)."""

from __future__ import annotations

import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapDynamicResources,
    BootstrapStaticResources,
    LayeredRuntime,
    RuntimeLayer,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Node,
    RetryPolicy,
)
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.google.protobuf import Struct, Value

from extproc.dataplane.clusters import clusters
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.listeners import client_listener, egress_listener
from extproc.dataplane.messages import any_of, seconds, socket_address
from extproc.dataplane.status import status_listener
from extproc.names import ADS_CLUSTER


def bootstrap_yaml(config: DataplaneConfig) -> str:
    """The whole configuration, as ``envoy -c`` takes it. Raises ValueError for an address that is none."""
    return yaml.safe_dump(bootstrap(config).to_dict(casing=Casing.SNAKE), sort_keys=False, width=120)


def bootstrap(config: DataplaneConfig) -> Bootstrap:
    """The same as a message."""
    return Bootstrap(
        node=Node(id="pd-extproc", cluster="pd-extproc"),
        admin=Admin(address=socket_address("127.0.0.1", config.admin_port)),
        layered_runtime=_runtime(),
        overload_manager=_overload_manager(),
        dynamic_resources=BootstrapDynamicResources(ads_config=_ads()),
        static_resources=BootstrapStaticResources(
            listeners=[
                client_listener(config),
                *([egress_listener(config, config.egress)] if config.egress else []),
                *([status_listener(config)] if config.status_port else []),
            ],
            clusters=clusters(config),
        ),
    )


def _ads() -> ApiConfigSource:
    return ApiConfigSource(
        api_type=ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        set_node_on_first_message_only=True,
        grpc_services=[
            GrpcService(
                envoy_grpc=GrpcServiceEnvoyGrpc(
                    cluster_name=ADS_CLUSTER,
                    # Back at the service soon after it returned; Envoy's default waits up to 30 s.
                    retry_policy=RetryPolicy(
                        retry_back_off=BackoffStrategy(base_interval=seconds(0.1), max_interval=seconds(1))
                    ),
                )
            )
        ],
    )


def _overload_manager() -> OverloadManager:
    """No limit to the number of clients, said in so many words: without them Envoy warns at every start."""
    connections = DownstreamConnectionsConfig(max_active_downstream_connections=2**31)
    return OverloadManager(
        resource_monitors=[
            ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections", typed_config=any_of(connections)
            )
        ]
    )


def _runtime() -> LayeredRuntime:
    """Runtime keys that have no place elsewhere."""
    # Envoy closes a whole HTTP/2 connection when half of its first 500 streams were reset within a second. On the
    # egress connection such resets are the service's cancellations; closing it would take all other legs along.
    layer = {"overload.premature_reset_total_stream_count": 2**31 - 1}
    fields = {key: Value(number_value=float(value)) for key, value in layer.items()}
    return LayeredRuntime(layers=[RuntimeLayer(name="static", static_layer=Struct(fields=fields))])
