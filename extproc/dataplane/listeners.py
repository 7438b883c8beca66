"""Where Envoy listens: the client port and the egress socket."""

from __future__ import annotations

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    TrafficDirection,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener, ListenerDrainType
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    Config as HeaderToMetadata,
)
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    ConfigKeyValuePair,
    ConfigRule,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from extproc.dataplane.access_log import access_log_options, access_logs
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.ext_proc import ext_proc_filter, late_filter
from extproc.dataplane.http2 import MAX_STREAMS, legs_http2
from extproc.dataplane.local_replies import client_replies, egress_replies
from extproc.dataplane.messages import (
    any_of,
    dead_peer_detection,
    envoy_address,
    extension,
    http_filter,
    seconds,
    socket_address,
)
from extproc.dataplane.routes import client_routes, egress_routes
from extproc.names import (
    CLIENT_LISTENER,
    DESTINATION,
    EGRESS_LISTENER,
    METADATA_NAMESPACE,
    OUR_PREFIX,
)
from extproc.transport.address import UnixAddress, parse_address

# How much Envoy keeps of an answer that is read slowly; over HTTP/2 it is the window of a stream, too.
# Of pieces of 0.5 to 4 KiB each takes 4 KiB of its memory: so a thousand such clients take 2 GiB at most. Its defaults
# are 1 and 16 MiB.
_CLIENT_BUFFER = 256 * 1024
_EGRESS_SOCKET_MODE = 0o666  # the directory decides who gets in; Envoy and the service may run as different users


def client_listener(config: DataplaneConfig) -> Listener:
    """The port clients talk to: HTTP/1.1 and HTTP/2 in the clear, told apart by the first bytes."""
    manager = HttpConnectionManager(
        stat_prefix=CLIENT_LISTENER,
        codec_type=HttpConnectionManagerCodecType.AUTO,
        http_protocol_options=Http1ProtocolOptions(
            accept_http_10=True,
            default_host_for_http_10="localhost",
            ignore_http_11_upgrade=[StringMatcher(safe_regex=RegexMatcher(regex=".*"))],
            # Envoy takes any 400 for a broken message and would close the connection, also when it is the service or a
            # worker that says 400 to a well-formed request. Messages that cannot be parsed still end the connection.
            override_stream_error_on_invalid_http_message=True,
        ),
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=MAX_STREAMS,
            initial_stream_window_size=_CLIENT_BUFFER,
            override_stream_error_on_invalid_http_message=True,
        ),
        route_config=client_routes(config),
        http_filters=[
            *([late_filter(config)] if config.late_answers else []),
            ext_proc_filter(config),
            # A route that removes the header does so before the cluster looks for it.
            *([_destination_filter()] if config.destination_header else []),
            _router(),
        ],
        stream_idle_timeout=seconds(config.idle_timeout),
        use_remote_address=True,  # x-forwarded-for gets the client's address
        early_header_mutation_extensions=[strip_control_headers("x-envoy-")],  # these steer Envoy
        local_reply_config=client_replies(),
        access_log=access_logs(config),
        access_log_options=access_log_options(),
    )
    _leave_alone(manager)
    listener = _listener(CLIENT_LISTENER, socket_address(config.client_host, config.client_port), manager)
    listener.per_connection_buffer_limit_bytes = _CLIENT_BUFFER
    listener.tcp_keepalive = dead_peer_detection()  # nobody computes for a client that is gone
    listener.traffic_direction = TrafficDirection.INBOUND  # what EnvoyAdmin.begin_draining closes
    return listener


def egress_listener(config: DataplaneConfig, address: str) -> Listener:
    """The socket the service sends its legs to: HTTP/2 with as many streams and as much window as it likes."""
    parsed = parse_address(address)
    local = isinstance(parsed, UnixAddress)  # on a port, as in a mesh, legs come as to any proxy
    manager = HttpConnectionManager(
        stat_prefix=EGRESS_LISTENER,
        codec_type=HttpConnectionManagerCodecType.HTTP2 if local else HttpConnectionManagerCodecType.AUTO,
        http2_protocol_options=legs_http2(),
        # The service adds headers to those that the client's listener has let in.
        max_request_headers_kb=1024,
        common_http_protocol_options=HttpProtocolOptions(max_headers_count=1000, idle_timeout=seconds(0)),
        route_config=egress_routes(config),
        http_filters=[_destination_filter(), _router()],
        stream_idle_timeout=seconds(config.idle_timeout),
        local_reply_config=egress_replies(),
    )
    _leave_alone(manager)
    listener = _listener(EGRESS_LISTENER, envoy_address(parsed, mode=_EGRESS_SOCKET_MODE), manager)
    if not local:
        listener.tcp_keepalive = dead_peer_detection()
    # While the gateway drains, requests under way still need their legs: this listener stays as it is until the end.
    listener.traffic_direction = TrafficDirection.OUTBOUND
    listener.drain_type = ListenerDrainType.MODIFY_ONLY
    return listener


def _listener(name: str, address: Address, manager: HttpConnectionManager) -> Listener:
    return Listener(
        name=name,
        address=address,
        filter_chains=[
            FilterChain(
                filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=any_of(manager))]
            )
        ],
    )


def _leave_alone(manager: HttpConnectionManager) -> None:
    """Switch off what Envoy would change in a request or an answer by itself."""
    manager.generate_request_id = False
    manager.preserve_external_request_id = True
    manager.server_header_transformation = HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH
    manager.normalize_path = False
    manager.path_with_escaped_slashes_action = HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED


def _destination_filter() -> HttpFilter:
    """Make metadata of the header, which no worker gets to see then."""
    rule = ConfigRule(
        header=DESTINATION,
        on_header_present=ConfigKeyValuePair(metadata_namespace=METADATA_NAMESPACE, key=DESTINATION),
        remove=True,
    )
    return http_filter("header_to_metadata", HeaderToMetadata(request_rules=[rule]))


def strip_control_headers(*more: str) -> TypedExtensionConfig:
    """Take from clients what would be taken for our own, and prefixes of ``more``: before routes and filters see it."""
    prefixes = [
        HeaderMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
        for prefix in (OUR_PREFIX, *more)
    ]
    return extension(
        "envoy.http.early_header_mutation.header_mutation",
        EarlyHeaderMutation(mutations=[HeaderMutation(remove=DESTINATION), *prefixes]),
    )


def _router() -> HttpFilter:
    return http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True))
