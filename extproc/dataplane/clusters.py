"""Where Envoy sends: two clusters per role, of HTTP and of gRPC workers, and the service's own four."""

from __future__ import annotations

import ipaddress
import socket

from betterproto2 import Message
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterEdsClusterConfig,
    ClusterTransportSocketMatch,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    AggregatedConfigSource,
    ApiVersion,
    BindConfig,
    ConfigSource,
    DataSource,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    SocketOption,
    TransportSocket,
)
from envoy_data_plane.envoy.config.core.v3 import (
    HttpProtocolOptions as CommonHttpOptions,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.load_balancing_policies.subset.v3 import (
    Subset,
    SubsetLbSubsetFallbackPolicy,
    SubsetLbSubsetSelector,
)
from envoy_data_plane.envoy.extensions.transport_sockets.raw_buffer.v3 import RawBuffer
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.http2 import to_answers, to_engines, trusted_http2, with_signs_of_life
from extproc.dataplane.messages import any_of, dead_peer_detection, envoy_address, extension, seconds, struct
from extproc.names import (
    ADMIN_CLUSTER,
    ADS_CLUSTER,
    ANSWERS_CLUSTER,
    CONTROL_CLUSTER,
    DESTINATION,
    EXTPROC_CLUSTER,
    METADATA_NAMESPACE,
)
from extproc.transport.address import Address, TcpAddress, UnixAddress, parse_address
from extproc.workers.endpoints import DECODE_GRPC_CLUSTER, PREFILL_GRPC_CLUSTER, ROLES

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TCP_USER_TIMEOUT = 18  # of Linux, where Envoy runs; the Python that renders this need not
_UNLIMITED = 1_000_000_000
_NO_CERTIFICATE_HAS_THIS_HASH = "00" * 32


def clusters(config: DataplaneConfig) -> list[Cluster]:
    """Every cluster of the bootstrap."""
    admin = TcpAddress("127.0.0.1", config.admin_port)
    return [
        *(eds_cluster(name, config, ConfigSource(ads=AggregatedConfigSource())) for name in ROLES),
        extproc_cluster(config),
        ads_cluster(config),
        *([_answers_cluster(config)] if config.fetched_answers else []),
        control_cluster(config),
        *([_service_cluster(ADMIN_CLUSTER, admin, _http1(config.upstream_idle_timeout))] if config.status_port else []),
    ]


def extproc_cluster(config: DataplaneConfig) -> Cluster:
    """The ext_proc service."""
    return _http2_cluster(EXTPROC_CLUSTER, parse_address(config.extproc), trusted_http2())


def ads_cluster(config: DataplaneConfig) -> Cluster:
    """Where the workers' endpoints are told."""
    return _http2_cluster(ADS_CLUSTER, parse_address(config.ads), trusted_http2())


def _answers_cluster(config: DataplaneConfig) -> Cluster:
    """The service, for answers that it makes."""
    return _http2_cluster(ANSWERS_CLUSTER, parse_address(config.extproc), to_answers())


def control_cluster(config: DataplaneConfig) -> Cluster:
    """The control API."""
    return _service_cluster(CONTROL_CLUSTER, parse_address(config.control), _http1(config.upstream_idle_timeout))


def eds_cluster(name: str, config: DataplaneConfig, source: ConfigSource) -> Cluster:
    """Workers of one role and protocol; they come and go by what ``source`` says of them."""
    cluster = worker_cluster(name, config)
    cluster.type = ClusterDiscoveryType.EDS
    source.resource_api_version = ApiVersion.V3
    # Envoy listens at the latest after this time when the service is not there yet: a JSON 503 is a clearer answer
    # than a refused connection.
    source.initial_fetch_timeout = seconds(2)
    cluster.eds_cluster_config = ClusterEdsClusterConfig(eds_config=source)
    return cluster


def worker_cluster(name: str, config: DataplaneConfig) -> Cluster:
    """Workers of one role that speak one protocol, both by the cluster's ``name``; where they are, it does not say.

    There is no outlier detection and no active health check: the service alone decides who is usable, and an engine
    that answers 500 to one bad prompt must not vanish behind the decision's back. A worker that cannot be connected
    to is skipped by the retry over the ordered destination list.
    """
    options = _http2() if name in (PREFILL_GRPC_CLUSTER, DECODE_GRPC_CLUSTER) else _http1(config.upstream_idle_timeout)
    cluster = Cluster(
        name=name,
        connect_timeout=seconds(config.connect_timeout),
        circuit_breakers=_no_circuit_breakers(),
        load_balancing_policy=named_hosts_only(),
        typed_extension_protocol_options={_HTTP_OPTIONS: any_of(options)},
        transport_socket_matches=_transport_sockets(config.ca_file),
    )
    return _notice_dead_peers(cluster)


def _http2_cluster(name: str, address: Address, options: Http2ProtocolOptions) -> Cluster:
    if not isinstance(address, UnixAddress):
        options = with_signs_of_life(options)
    explicit = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=options)
    return _service_cluster(name, address, HttpProtocolOptions(explicit_http_config=explicit))


def _service_cluster(name: str, address: Address, options: HttpProtocolOptions) -> Cluster:
    literal = _is_literal(address)
    cluster = Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if literal else ClusterDiscoveryType.STRICT_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.AUTO if literal else ClusterDnsLookupFamily.ALL,
        connect_timeout=seconds(1),
        circuit_breakers=_no_circuit_breakers(),
        typed_extension_protocol_options={_HTTP_OPTIONS: any_of(options)},
        load_assignment=ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                LocalityLbEndpoints(
                    lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=envoy_address(address)))],
                )
            ],
        ),
    )
    return cluster if isinstance(address, UnixAddress) else _notice_dead_peers(cluster)


def _is_literal(address: Address) -> bool:
    """There is no name to resolve."""
    if isinstance(address, UnixAddress):
        return True
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return False
    return True


def named_hosts_only() -> LoadBalancingPolicy:
    """Send to the hosts that the request names, in their order, and to nobody else.

    The policy insists on a fallback for an unknown host and for a used-up list; this one finds no host, ever: it looks
    for a subset by a key that no request has, and falls back to nothing.
    """
    nobody = Subset(
        fallback_policy=SubsetLbSubsetFallbackPolicy.NO_FALLBACK,
        subset_selectors=[SubsetLbSubsetSelector(keys=["never"])],
        subset_lb_policy=_policy("envoy.load_balancing_policies.round_robin", RoundRobin()),
    )
    named = OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(
                metadata=MetadataKey(key=METADATA_NAMESPACE, path=[MetadataKeyPathSegment(key=DESTINATION)])
            )
        ],
        fallback_policy=_policy("envoy.load_balancing_policies.subset", nobody),
    )
    return _policy("envoy.load_balancing_policies.override_host", named)


def _policy(name: str, message: Message) -> LoadBalancingPolicy:
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=extension(name, message))])


def _transport_sockets(ca_file: str | None) -> list[ClusterTransportSocketMatch]:
    """TLS for endpoints whose metadata says so (see ads.py), plain TCP for the others."""
    if ca_file is None:
        validation = CertificateValidationContext(verify_certificate_hash=[_NO_CERTIFICATE_HAS_THIS_HASH])
    else:
        validation = CertificateValidationContext(trusted_ca=DataSource(filename=ca_file))
    tls = UpstreamTlsContext(
        common_tls_context=CommonTlsContext(validation_context=validation),
        auto_host_sni=True,
        auto_sni_san_validation=ca_file is not None,  # Envoy wants a CA for it
    )
    return [
        ClusterTransportSocketMatch(
            name="tls",
            match=struct(tls=True),
            transport_socket=TransportSocket(name="envoy.transport_sockets.tls", typed_config=any_of(tls)),
        ),
        ClusterTransportSocketMatch(
            name="plain",
            match=struct(),
            transport_socket=TransportSocket(
                name="envoy.transport_sockets.raw_buffer", typed_config=any_of(RawBuffer())
            ),
        ),
    ]


def _no_circuit_breakers() -> CircuitBreakers:
    """Envoy's defaults (1024 connections and requests, 3 retries at once) would be limits nobody asked for."""
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=_UNLIMITED,
                max_pending_requests=_UNLIMITED,
                max_requests=_UNLIMITED,
                max_retries=_UNLIMITED,
            )
        ]
    )


def _notice_dead_peers(cluster: Cluster) -> Cluster:
    """Keepalive notices a dead machine while a leg waits; the user timeout, while a request is not yet acknowledged."""
    cluster.upstream_connection_options = UpstreamConnectionOptions(tcp_keepalive=dead_peer_detection())
    cluster.upstream_bind_config = BindConfig(
        socket_options=[
            SocketOption(
                description="TCP_USER_TIMEOUT",
                level=socket.IPPROTO_TCP,
                name=_TCP_USER_TIMEOUT,
                int_value=60_000,
            )
        ]
    )
    return cluster


def _http2() -> HttpProtocolOptions:
    """For gRPC workers. Their connections stay open: servers announce (GOAWAY) that they are about to close one."""
    explicit = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=to_engines())
    return HttpProtocolOptions(explicit_http_config=explicit)


def _http1(idle_timeout: float) -> HttpProtocolOptions:
    return HttpProtocolOptions(
        common_http_protocol_options=CommonHttpOptions(idle_timeout=seconds(idle_timeout)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
    )
