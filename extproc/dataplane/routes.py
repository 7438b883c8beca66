"""Which path goes where, on the client listener and on the egress listener."""

from __future__ import annotations

from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcOverrides, ExtProcPerRoute
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.ext_proc import EXT_PROC_FILTER
from extproc.dataplane.messages import any_of, inline, seconds, set_header
from extproc.dataplane.paths import (
    CONTROL_PATHS,
    CONTROL_PREFIXES,
    DECODE_PATHS,
    DECODE_PREFIXES,
    INFERENCE_PATHS,
    NOT_IMPLEMENTED_PATHS,
    PREFILL_PATHS,
)
from extproc.errors import CATALOGUE, error_body
from extproc.names import (
    ANSWERS_CLUSTER,
    CLIENT_ADDRESS,
    CLIENT_LISTENER,
    CLUSTER,
    CONTROL_CLUSTER,
    EGRESS_LISTENER,
    ERROR_CODE,
    LATE,
    LOCAL_REPLY,
    NAMING,
    UPSTREAM,
)
from extproc.workers.endpoints import DECODE_CLUSTER, DECODE_GRPC_CLUSTER, PREFILL_CLUSTER, PREFILL_GRPC_CLUSTER, ROLES

# Envoy adds it for itself when it trusts the connection's address; workers have no use for it.
_EXTERNAL_ADDRESS = "x-envoy-external-address"

# Room for what a handoff adds to a body, so that a body of the permitted size can still be sent to the next worker.
_BODY_ADDITIONS = 1024 * 1024


def client_routes(config: DataplaneConfig) -> RouteConfiguration:
    """The client port: see paths.py.

    The ext_proc filter is off but on the worker routes. Were it on by default, it would be asked about the answers to
    requests that have no route as well, malformed ones for example, and their clients would see a closed connection.
    """
    routes = [
        _grpc_route(PREFILL_GRPC_CLUSTER, config),
        _grpc_route(DECODE_GRPC_CLUSTER, config),
        *([_answer_route()] if config.fetched_answers else []),
        *(_chosen_prefill_route(path, config) for path in DECODE_PATHS),
        *(worker_route(_post(path), DECODE_CLUSTER, config) for path in DECODE_PATHS),
        *(worker_route(RouteMatch(prefix=prefix), DECODE_CLUSTER, config) for prefix in DECODE_PREFIXES),
        *(worker_route(_post(path), PREFILL_CLUSTER, config) for path in PREFILL_PATHS),
        *(_control_route(RouteMatch(path=path)) for path in CONTROL_PATHS),
        *(_control_route(RouteMatch(prefix=prefix)) for prefix in CONTROL_PREFIXES),
        *(_wrong_method(path) for path in INFERENCE_PATHS),
        *(_not_implemented(path) for path in NOT_IMPLEMENTED_PATHS),
        _refusal(RouteMatch(prefix="/"), "not_found", "no such path"),
    ]
    return RouteConfiguration(
        name=CLIENT_LISTENER,
        virtual_hosts=[_virtual_host(CLIENT_LISTENER, routes, config)],
        response_headers_to_remove=[LOCAL_REPLY, LATE, *NAMING],  # happens before the ext_proc service has its say
    )


def egress_routes(config: DataplaneConfig) -> RouteConfiguration:
    """Legs of the service: the role cluster by header; which worker, the destination says."""
    routes = [_egress_route(cluster, config) for cluster in ROLES]
    return RouteConfiguration(
        name=EGRESS_LISTENER,
        virtual_hosts=[_virtual_host(EGRESS_LISTENER, routes, config)],
    )


def _virtual_host(name: str, routes: list[Route], config: DataplaneConfig) -> VirtualHost:
    return VirtualHost(
        name=name,
        domains=["*"],
        routes=routes,
        # What was sent of the body is kept for the next host up to this size; Envoy's default of 1 MB would let larger
        # requests fail with the first host.
        request_body_buffer_limit=body_limit(config),
    )


def body_limit(config: DataplaneConfig) -> int:
    """How much of a body is kept for the next host."""
    return min(config.max_payload_bytes + _BODY_ADDITIONS, 2**32 - 1)


def _to_worker(cluster: str, config: DataplaneConfig) -> RouteAction:
    """To the first host of the destination list that can be connected to.

    Only a connection that never came about is retried: then no worker has seen anything of the request. A request
    that was sent is never sent again, because a worker may have begun it (its handoff's room would be used twice).
    """
    return RouteAction(
        cluster=cluster,
        timeout=seconds(0),
        auto_host_rewrite=True,
        retry_policy=RetryPolicy(
            retry_on="connect-failure,refused-stream",
            num_retries=config.max_failovers,
            retry_back_off=RetryPolicyRetryBackOff(base_interval=seconds(0.001), max_interval=seconds(0.001)),
        ),
    )


def worker_route(match: RouteMatch, cluster: str, config: DataplaneConfig) -> Route:
    """One on which the service is asked."""
    return Route(
        match=match,
        route=_to_worker(cluster, config),
        request_headers_to_remove=[_EXTERNAL_ADDRESS],
        response_headers_to_add=[set_header(UPSTREAM, "%UPSTREAM_REMOTE_ADDRESS%")],
        response_headers_to_remove=[ERROR_CODE],
        typed_per_filter_config={EXT_PROC_FILTER: any_of(ExtProcPerRoute(overrides=ExtProcOverrides()))},
    )


def _chosen_prefill_route(path: str, config: DataplaneConfig) -> Route:
    """For a request that a prefill worker answers alone, though its path is one for pairs: the service says so."""
    route = worker_route(_post(path, _header(CLUSTER, PREFILL_CLUSTER)), PREFILL_CLUSTER, config)
    route.request_headers_to_remove.append(CLUSTER)
    return route


def _grpc_route(cluster: str, config: DataplaneConfig) -> Route:
    """For a request that the service has made one to a gRPC worker: the path is a method's by then."""
    route = worker_route(RouteMatch(prefix="/", headers=[_header(CLUSTER, cluster)]), cluster, config)
    route.request_headers_to_remove.append(CLUSTER)
    return route


def _answer_route() -> Route:
    """For a request whose answer the service makes itself, for Envoy to read as fast as the client does."""
    return Route(
        match=RouteMatch(prefix="/", headers=[_header(CLUSTER, ANSWERS_CLUSTER)]),
        route=RouteAction(cluster=ANSWERS_CLUSTER, timeout=seconds(0)),
        request_headers_to_remove=[CLUSTER, _EXTERNAL_ADDRESS],
        typed_per_filter_config={EXT_PROC_FILTER: any_of(ExtProcPerRoute(overrides=ExtProcOverrides()))},
    )


def _egress_route(cluster: str, config: DataplaneConfig) -> Route:
    return Route(
        match=RouteMatch(prefix="/", headers=[_header(CLUSTER, cluster)]),
        route=_to_worker(cluster, config),
        request_headers_to_remove=[CLUSTER, _EXTERNAL_ADDRESS],
        response_headers_to_add=[set_header(UPSTREAM, "%UPSTREAM_REMOTE_ADDRESS%")],
        response_headers_to_remove=[ERROR_CODE, LOCAL_REPLY, LATE, *NAMING],
    )


def _control_route(match: RouteMatch) -> Route:
    return Route(
        match=match,
        route=RouteAction(cluster=CONTROL_CLUSTER, timeout=seconds(0)),
        # In x-forwarded-for Envoy names itself where the client is on its machine.
        request_headers_to_add=[set_header(CLIENT_ADDRESS, "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%")],
    )


def _wrong_method(path: str) -> Route:
    route = _refusal(RouteMatch(path=path), "method_not_allowed", "this path takes POST only")
    route.response_headers_to_add.append(set_header("allow", "POST"))
    return route


def _not_implemented(path: str) -> Route:
    return _refusal(RouteMatch(path=path), "not_implemented", "this API is not served by a prefill/decode fleet")


def _refusal(match: RouteMatch, code: str, message: str) -> Route:
    return Route(
        match=match,
        direct_response=DirectResponseAction(
            status=CATALOGUE[code].status, body=inline(error_body(code, message).decode())
        ),
        response_headers_to_add=[set_header("content-type", "application/json"), set_header(ERROR_CODE, code)],
    )


def _post(path: str, *headers: HeaderMatcher) -> RouteMatch:
    return RouteMatch(path=path, headers=[_header(":method", "POST"), *headers])


def _header(name: str, value: str) -> HeaderMatcher:
    return HeaderMatcher(name=name, string_match=StringMatcher(exact=value))
