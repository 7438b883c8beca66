"""What meshes make of the snippets' Kubernetes objects: the part of it that an Envoy runs.

Each function does what the mesh's control plane does with the objects of one snippet, as far as these use it, and
gives what that sends to a gateway's Envoy: a listener, its routes and the clusters. Sources: Istio's
pilot/pkg/networking/core (route.go, cluster_builder.go, envoyfilter/) and pilot/pkg/xds/filters (the picker's filter),
Envoy Gateway's internal/xds/translator (its testdata show names and fields), and the endpoint picker protocol of the
inference extension.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]
Address = tuple[str, int]

_TYPES = "type.googleapis.com/envoy."
_MANAGER_TYPE = f"{_TYPES}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_EXT_PROC_TYPE = f"{_TYPES}extensions.filters.http.ext_proc.v3.ExternalProcessor"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
MANAGER = "envoy.filters.network.http_connection_manager"
ROUTER = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": f"{_TYPES}extensions.filters.http.router.v3.Router"},
}


def of_kind(objects: Sequence[Json], kind: str, name: str | None = None) -> Json:
    """The one object of a kind (and name)."""
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


# -- what all have in common -------------------------------------------------------------------------------------------


def bootstrap(listener: Json, clusters: Sequence[Json]) -> Json:
    """As if a control plane had sent them."""
    return {"static_resources": {"listeners": [listener], "clusters": list(clusters)}}


def _listener(name: str, filters: Sequence[Json], routes: Sequence[Json], **settings: object) -> Json:
    manager = {
        "@type": _MANAGER_TYPE,
        "stat_prefix": name,
        "use_remote_address": True,
        "normalize_path": True,
        "route_config": {
            "name": name,
            "virtual_hosts": [{"name": name, "domains": ["*"], "routes": list(routes)}],
        },
        "http_filters": [*filters, copy.deepcopy(ROUTER)],
        **settings,
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": MANAGER, "typed_config": manager}]}],
    }


def _cluster(name: str, addresses: Sequence[Address | str], options: Json, **settings: object) -> Json:
    """Its endpoints, which a mesh sends by EDS, stand in it. An address may be a unix socket."""
    endpoints = [_endpoint(address) for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": each}} for each in endpoints]}],
        },
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {"@type": f"type.googleapis.com/{_HTTP_OPTIONS}", **options}
        },
        **settings,
    }


def _endpoint(address: Address | str) -> Json:
    if isinstance(address, str):
        return {"pipe": {"path": address}}
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


_HTTP2: Json = {"explicit_http_config": {"http2_protocol_options": {}}}


def _http1(idle_timeout: str) -> Json:
    return {
        "common_http_protocol_options": {"idle_timeout": idle_timeout},
        "explicit_http_config": {"http_protocol_options": {}},
    }


# -- Istio -------------------------------------------------------------------------------------------------------------


_BREAKERS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")


def of_istio(objects: Sequence[Json], workers: Sequence[Address], sidecar: str) -> Json:
    """Gateway, VirtualService, DestinationRules, and over all of it the EnvoyFilter."""
    virtual, rule = (of_kind(objects, kind)["spec"] for kind in ("VirtualService", "EnvoyFilter"))
    service = of_kind(objects, "Service")
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
    (port,) = [each["port"] for each in service["spec"]["ports"]]
    pool = of_kind(objects, "DestinationRule", service["metadata"]["name"])["spec"]["trafficPolicy"]["connectionPool"]
    names = {patch["patch"]["value"].get("name") for patch in rule["configPatches"]}
    assert "ext_proc" in names
    cluster = _cluster(
        f"outbound|{port}||{host}",
        workers,
        _http1(pool["http"]["idleTimeout"]),
        connect_timeout=pool["tcp"]["connectTimeout"],
        lb_policy="ROUND_ROBIN",
        common_lb_config={},
        circuit_breakers={"thresholds": [dict.fromkeys(_BREAKERS, 2**32 - 1)]},
        metadata={"filter_metadata": {"istio": {"services": [{"host": host}]}}},
    )
    (of_sidecar,) = {
        match["cluster_name"]
        for patch in rule["configPatches"]
        for match in _found(patch["patch"]["value"], "envoy_grpc")
    }
    routes = [route for http in virtual["http"] for route in _istio_routes(http)]
    listener = _listener(
        "0.0.0.0_80", [_named("envoy.filters.http.cors", "extensions.filters.http.cors.v3.Cors")], routes
    )
    control = next(route["route"]["cluster"] for route in routes if route["name"] == "pd-control")
    clusters = [
        cluster,
        _cluster(of_sidecar, [sidecar], _HTTP2, connect_timeout="1s"),
        _cluster(control, [], _http1("1s"), connect_timeout="1s"),
    ]
    for patch in rule["configPatches"]:
        _patch_of_istio(patch, listener, clusters)
    return bootstrap(listener, clusters)


def _istio_routes(http: Json) -> Iterator[Json]:
    (target,) = http["route"]
    destination = target["destination"]
    action: Json = {
        "cluster": f"outbound|{destination['port']['number']}||{destination['host']}",
        "timeout": http.get("timeout", "0s"),
    }
    if "retries" in http:
        action["retry_policy"] = {
            "retry_on": http["retries"]["retryOn"],
            "num_retries": http["retries"]["attempts"],
            "retry_host_predicate": [_named("envoy.retry_host_predicates.previous_hosts", _PREVIOUS)],
            "host_selection_retry_max_attempts": "5",
        }
    for match in http["match"]:
        found: Json = {"path": match["uri"]["exact"]} if "exact" in match["uri"] else {"prefix": match["uri"]["prefix"]}
        found["case_sensitive"] = True
        if "method" in match:
            found["headers"] = [{"name": ":method", "string_match": match["method"]}]
        yield {"name": http["name"], "match": found, "route": copy.deepcopy(action)}


_PREVIOUS = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"


def _patch_of_istio(patch: Json, listener: Json, clusters: Sequence[Json]) -> None:
    match, operation, value = patch["match"], patch["patch"]["operation"], patch["patch"]["value"]
    assert match["context"] == "GATEWAY"
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    settings = manager["typed_config"]
    where = (patch["applyTo"], operation)
    if where == ("HTTP_FILTER", "INSERT_BEFORE"):
        before = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
        names = [each["name"] for each in settings["http_filters"]]
        settings["http_filters"].insert(names.index(before), value)
    elif where == ("NETWORK_FILTER", "MERGE"):
        assert match["listener"]["filterChain"]["filter"]["name"] == manager["name"]
        _merge(manager, value)
    elif where == ("HTTP_ROUTE", "MERGE"):
        name = match["routeConfiguration"]["vhost"]["route"]["name"]
        routes = settings["route_config"]["virtual_hosts"][0]["routes"]
        assert any(route["name"] == name for route in routes)
        for route in routes:
            if route["name"] == name:
                _merge(route, value)
    elif where == ("CLUSTER", "MERGE"):
        (cluster,) = [each for each in clusters if "metadata" in each and match["cluster"]["service"] in each["name"]]
        _merge(cluster, value)
    else:
        raise AssertionError(f"no such patch: {where}")


def _merge(target: Json, value: Json) -> None:
    """As protobuf merges messages: fields replace, lists grow."""
    for key, new in copy.deepcopy(value).items():
        old = target.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            _merge(old, new)
        elif isinstance(old, list) and isinstance(new, list):
            old += new
        else:
            target[key] = new


# -- Envoy Gateway -----------------------------------------------------------------------------------------------------


def of_envoy_gateway(objects: Sequence[Json], workers: Sequence[Address], sidecar: str) -> Json:
    """HTTPRoute and policies, and over all of it the EnvoyPatchPolicy."""
    route, extension, backend, client, patches = (
        of_kind(objects, kind)
        for kind in (
            "HTTPRoute",
            "EnvoyExtensionPolicy",
            "BackendTrafficPolicy",
            "ClientTrafficPolicy",
            "EnvoyPatchPolicy",
        )
    )
    namespace, gateway = route["metadata"]["namespace"], route["spec"]["parentRefs"][0]["name"]
    owner = f"envoyextensionpolicy/{namespace}/{extension['metadata']['name']}"
    filter_name, of_sidecar = f"envoy.filters.http.ext_proc/{owner}/extproc/0", f"{owner}/0"
    of_workers = f"httproute/{namespace}/{route['metadata']['name']}/rule/0"
    (processor,) = extension["spec"]["extProc"]
    policy, clients = backend["spec"], client["spec"]
    action = {
        "cluster": of_workers,
        "timeout": policy["timeout"]["http"]["requestTimeout"],
        "retry_policy": {
            "retry_on": ",".join(policy["retry"]["retryOn"]["triggers"]),
            "num_retries": policy["retry"]["numRetries"],
            "retry_host_predicate": [_named("envoy.retry_host_predicates.previous_hosts", _PREVIOUS)],
            "host_selection_retry_max_attempts": "5",
            "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.001s"},
        },
    }
    on = {filter_name: {"@type": f"{_TYPES}config.route.v3.FilterConfig", "config": {}}}
    (rule,) = route["spec"]["rules"]
    routes = [
        {"name": f"{of_workers}/match/{at}/*", "match": match, "route": action, "typed_per_filter_config": on}
        for at, match in enumerate(_gateway_matches(rule))
    ]
    listener = _listener(
        f"{namespace}/{gateway}/http",
        [{"name": filter_name, "disabled": True, "typed_config": _extension_filter(processor, of_sidecar)}],
        copy.deepcopy(routes),
        stream_idle_timeout=clients["timeout"]["http"]["streamIdleTimeout"],
        preserve_external_request_id=True,
        early_header_mutation_extensions=[
            _named(
                "envoy.http.early_header_mutation.header_mutation",
                "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                mutations=[{"remove": name} for name in clients["headers"]["earlyRequestHeaders"]["remove"]],
            )
        ],
    )
    listener["per_connection_buffer_limit_bytes"] = 256 * 1024
    timeouts = policy["timeout"]
    clusters = [
        _cluster(
            of_workers,
            workers,
            _http1(timeouts["http"]["connectionIdleTimeout"]),
            connect_timeout=timeouts["tcp"]["connectTimeout"],
            lb_policy="LEAST_REQUEST",
            common_lb_config={"locality_weighted_lb_config": {}},
            per_connection_buffer_limit_bytes=32768,
        ),
        _cluster(of_sidecar, [sidecar], _HTTP2, connect_timeout="1s", per_connection_buffer_limit_bytes=32768),
    ]
    resources = [listener, _routes_of(listener), *clusters]
    for patch in patches["spec"]["jsonPatches"]:
        _json_patch(patch, resources)
    return bootstrap(listener, clusters)


def _gateway_matches(rule: Json) -> Iterator[Json]:
    for match in rule["matches"]:
        path = match["path"]
        found = {"path": path["value"]} if path["type"] == "Exact" else {"path_separated_prefix": path["value"]}
        method = {"name": ":method", "string_match": {"exact": match["method"]}} if "method" in match else None
        yield {**found, **({"headers": [method]} if method else {})}


def _extension_filter(processor: Json, cluster: str) -> Json:
    mode = processor["processingMode"]
    assert mode["request"]["body"] == "FullDuplexStreamed"
    return {
        "@type": _EXT_PROC_TYPE,
        "failure_mode_allow": processor["failOpen"],
        "grpc_service": {
            "envoy_grpc": {"cluster_name": cluster, "authority": "pd-extproc.llm:50051"},
            "timeout": "10s",
        },
        "message_timeout": processor["messageTimeout"],
        "metadata_options": {"receiving_namespaces": {"untyped": processor["metadata"]["writableNamespaces"]}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND" if "response" in mode else "SKIP",
            "response_trailer_mode": "SKIP",
        },
    }


def _routes_of(listener: Json) -> Json:
    routes: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]
    return routes


def _json_patch(patch: Json, resources: Sequence[Json]) -> None:
    """RFC 6902's ``add``, at each place that a JSONPath of the form ``$..LIST[?(@.FIELD=='VALUE')].REST`` names."""
    is_routes = patch["type"].endswith("RouteConfiguration")
    (resource,) = [
        each for each in resources if each["name"] == patch["name"] and ("virtual_hosts" in each) is is_routes
    ]
    operation = patch["operation"]
    assert operation["op"] == "add"
    places = list(_places(resource, operation["jsonPath"])) if "jsonPath" in operation else [resource]
    assert places, f"nothing to patch at {operation.get('jsonPath')}"
    *way, last = operation["path"].removeprefix("/").split("/")
    for place in places:
        for key in way:
            place = place[key]  # noqa: PLW2901 - walks down
        place[last] = copy.deepcopy(operation["value"])


def _places(resource: Json, path: str) -> Iterator[Json]:
    form = re.fullmatch(r"\$\.\.(\w+)\[\?\(@((?:\.\w+)+)=='([^']*)'\)\]((?:\.\w+)*)", path)
    assert form, path
    key, field, wanted, rest = form.groups()
    for items in _found(resource, key):
        for item in items:
            if _walk(item, field) == wanted:
                place = _walk(item, rest)
                assert isinstance(place, dict)
                yield place


def _walk(value: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _found(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for inner in value.values():
            yield from _found(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _found(inner, key)


# -- Gateway API Inference Extension -----------------------------------------------------------------------------------


def of_inference_pool(
    objects: Sequence[Json],
    workers: Sequence[Address],
    sidecar: str,
    *,
    by_header: bool = False,
    picker_cluster: str = "picker",
    picker_timeout: str = "10s",
    before: Sequence[Json] = (),
) -> Json:
    """InferencePool and HTTPRoute; ``by_header``: the gateway reads the picker's header, not its metadata.

    As Istio has it, but for the names of clusters, and for hints of a subset, which other gateways forward. ``before``:
    filters that stand in front of the picker's.
    """
    pool, route = (of_kind(objects, kind) for kind in ("InferencePool", "HTTPRoute"))
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    picker = pool["spec"]["endpointPickerRef"]
    processor = {
        "@type": _EXT_PROC_TYPE,
        "failure_mode_allow": picker["failureMode"] == "FailOpen",
        "grpc_service": {"envoy_grpc": {"cluster_name": picker_cluster}, "timeout": picker_timeout},
        "message_timeout": "1000s",
        "metadata_options": {
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
    }
    removed = [name for each in rule["filters"] for name in each["requestHeaderModifier"]["remove"]]
    action = {"cluster": "pool", "timeout": rule["timeouts"]["request"]}
    action["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    routes = [
        {"match": match, "route": action, "request_headers_to_remove": removed} for match in _gateway_matches(rule)
    ]
    key = "x-gateway-destination-endpoint"
    source: Json = {"header": key} if by_header else {"metadata": {"key": "envoy.lb", "path": [{"key": key}]}}
    fallback = {"policies": [{"typed_extension_config": _named(_ROUND_ROBIN, f"{_POLICIES}round_robin.v3.RoundRobin")}]}
    named_host = _named(
        "envoy.load_balancing_policies.override_host",
        f"{_POLICIES}override_host.v3.OverrideHost",
        override_host_sources=[source],
        fallback_policy=fallback,
    )
    asking = {"name": "envoy.filters.http.ext_proc", "typed_config": processor}
    listener = _listener("http", [*before, asking], copy.deepcopy(routes))
    clusters = [
        _cluster(
            "pool",
            workers,
            _http1("3600s"),
            connect_timeout="10s",
            load_balancing_policy={"policies": [{"typed_extension_config": named_host}]},
        ),
        _cluster(picker_cluster, [sidecar], _HTTP2, connect_timeout="10s"),
    ]
    return bootstrap(listener, clusters)


_POLICIES = "extensions.load_balancing_policies."
_ROUND_ROBIN = "envoy.load_balancing_policies.round_robin"


def _named(name: str, kind: str, **fields: object) -> Json:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}{kind}", **fields}}
