"""An Envoy without a mesh: workers written down in its file, or resources that its own control plane hands out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from betterproto2 import Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.core.v3 import (
    AggregatedConfigSource,
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    ConfigSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Metadata,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.endpoint.v3 import Endpoint as EnvoyEndpoint
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpConnectionManager, Rds

from extproc.dataplane.ads import TRANSPORT_SOCKET_MATCH, host_header
from extproc.dataplane.clusters import (
    ads_cluster,
    control_cluster,
    eds_cluster,
    extproc_cluster,
    worker_cluster,
)
from extproc.dataplane.listeners import client_listener
from extproc.dataplane.messages import any_of, socket_address, struct
from extproc.dataplane.snippets.config import SnippetConfig
from extproc.dataplane.snippets.document import as_dict, comment, documents
from extproc.names import ADS_CLUSTER, CLIENT_LISTENER
from extproc.workers.endpoints import ROLES, Endpoint, Snapshot

_STATIC = """
Plain Envoy, static: add the listener and the clusters to your static_resources.

The sidecar beside it, given the same workers:

$ pd-extproc launch --no-envoy --egress direct --pd-disaggregation --extproc-address {listen} --prefill ... --decode
  ...

- Needs Envoy 1.40. The workers' names must mean the same addresses to Envoy and to the sidecar.
- Cannot: workers registered later, or found in Kubernetes, until they are written here (503 no_available_workers);
  see envoy-xds.
- Your own listener instead of this one needs all that is in the connection manager here, the order of the filters
  included, and the routes.
"""

_XDS = """
Plain Envoy, xDS: what your control plane hands out. Four documents: an addition to Envoy's bootstrap, then discovery
responses for LDS, RDS and CDS.

The sidecar beside it:

$ pd-extproc launch --no-envoy --egress direct --pd-disaggregation --extproc-address {listen} --prefill ... --decode
  ...

- Needs Envoy 1.40, and the first document in its bootstrap: Envoy takes endpoints only from clusters that are there
  from the start.
- Workers come and go by the sidecar's EDS (--ads-address): your control plane need not know them.
- Your own listener instead of this one needs all that is in the connection manager here, the order of the filters
  included, and the routes.
"""


def static(config: SnippetConfig) -> str:
    """A whole static configuration: one listener, the workers' clusters, and the sidecar's."""
    dataplane = config.dataplane
    workers = Snapshot(tuple(config.prefill), tuple(config.decode))
    bootstrap = Bootstrap(
        static_resources=BootstrapStaticResources(
            listeners=[client_listener(dataplane)],
            clusters=[
                *(_listed(worker_cluster(name, dataplane), workers.of(name)) for name in ROLES),
                extproc_cluster(dataplane),
                control_cluster(dataplane),
            ],
        )
    )
    head = comment(_STATIC.format(listen=config.listen))
    return documents(head, ("", as_dict(bootstrap)))


def xds(config: SnippetConfig) -> str:
    """What a control plane hands out, as discovery responses; the workers come from the sidecar's EDS."""
    dataplane = config.dataplane
    listener = client_listener(dataplane)
    (network_filter,) = listener.filter_chains[0].filters
    assert network_filter.typed_config is not None
    manager = network_filter.typed_config.unpack()
    assert isinstance(manager, HttpConnectionManager)
    routes = manager.route_config
    assert routes is not None
    manager.route_config = None
    manager.rds = Rds(config_source=_own_plane(), route_config_name=CLIENT_LISTENER)
    network_filter.typed_config = any_of(manager)
    clusters = [
        *(eds_cluster(name, dataplane, _from_sidecar()) for name in ROLES),
        extproc_cluster(dataplane),
        control_cluster(dataplane),
    ]
    head = comment(_XDS.format(listen=config.listen))
    bootstrap = Bootstrap(static_resources=BootstrapStaticResources(clusters=[ads_cluster(dataplane)]))
    return documents(
        head,
        ("bootstrap", as_dict(bootstrap)),
        ("LDS", _response([listener])),
        ("RDS", _response([routes])),
        ("CDS", _response(clusters)),
    )


def _own_plane() -> ConfigSource:
    return ConfigSource(ads=AggregatedConfigSource(), resource_api_version=ApiVersion.V3)


def _from_sidecar() -> ConfigSource:
    """Not by ADS, of which an Envoy has but one: the mesh's own."""
    return ConfigSource(
        api_config_source=ApiConfigSource(
            api_type=ApiConfigSourceApiType.GRPC,
            transport_api_version=ApiVersion.V3,
            grpc_services=[GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=ADS_CLUSTER))],
        )
    )


def _response(resources: Sequence[Message]) -> dict[str, object]:
    """A discovery response, as Envoy also reads it from a file."""
    return {"resources": [as_dict_of_any(resource) for resource in resources]}


def as_dict_of_any(message: Message) -> dict[str, object]:
    """A message with its type in front."""
    return as_dict(any_of(message))


def _listed(cluster: Cluster, endpoints: Iterable[Endpoint]) -> Cluster:
    """The workers stand in the configuration; where they have names, Envoy looks these up."""
    endpoints = list(endpoints)
    named = any(not _is_ip(endpoint.ip) for endpoint in endpoints)
    cluster.type = ClusterDiscoveryType.STRICT_DNS if named else ClusterDiscoveryType.STATIC
    cluster.dns_lookup_family = ClusterDnsLookupFamily.ALL if named else ClusterDnsLookupFamily.AUTO
    cluster.load_assignment = ClusterLoadAssignment(cluster_name=cluster.name)
    if endpoints:
        cluster.load_assignment.endpoints.append(
            LocalityLbEndpoints(lb_endpoints=[_listed_endpoint(endpoint) for endpoint in endpoints])
        )
    return cluster


def _listed_endpoint(endpoint: Endpoint) -> LbEndpoint:
    listed = LbEndpoint(
        endpoint=EnvoyEndpoint(address=socket_address(endpoint.ip, endpoint.port), hostname=host_header(endpoint))
    )
    if endpoint.tls:
        listed.metadata = Metadata(filter_metadata={TRANSPORT_SOCKET_MATCH: struct(tls=True)})
    return listed


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
