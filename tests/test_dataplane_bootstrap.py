"""The Envoy configuration as a document: what must stand in it, whatever Envoy makes of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from betterproto2 import Casing

from extproc.cli import main
from extproc.dataplane import paths
from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.clusters import clusters
from extproc.dataplane.config import STANDALONE, DataplaneConfig
from extproc.dataplane.listeners import client_listener
from extproc.dataplane.local_replies import REPLIES
from extproc.dataplane.messages import envoy_address
from extproc.errors import CATALOGUE, error_body
from extproc.names import LATE
from extproc.transport.address import parse_address
from extproc.workers.endpoints import ROLES

CONFIG = DataplaneConfig(extproc="unix:/r/e", ads="unix:/r/a", control="unix:/r/c", egress="unix:/r/x")


@cache  # rendering and parsing take half a second
def render(**changes: Any) -> Any:
    return yaml.load(bootstrap_yaml(replace(CONFIG, **changes)), yaml.CSafeLoader)


def listener(document: Any, name: str) -> Any:
    return next(each for each in document["static_resources"]["listeners"] if each["name"] == name)


def manager(document: Any, name: str) -> Any:
    return listener(document, name)["filter_chains"][0]["filters"][0]["typed_config"]


def routes(document: Any, name: str) -> list[Any]:
    return manager(document, name)["route_config"]["virtual_hosts"][0]["routes"]


def cluster(document: Any, name: str) -> Any:
    return next(each for each in document["static_resources"]["clusters"] if each["name"] == name)


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def first_route(path: str, method: str = "POST", **headers: str) -> Any:
    """The client route that Envoy takes, by Envoy's rule: the first that matches. Headers: ``x_y`` for ``x-y``."""
    sent = {":method": method} | {name.replace("_", "-"): value for name, value in headers.items()}
    for route in routes(render(), "clients"):
        match = route["match"]
        if any(sent.get(header["name"]) != header["string_match"]["exact"] for header in match.get("headers", [])):
            continue
        if match.get("path") == path or ("prefix" in match and path.startswith(match["prefix"])):
            return route
    return None


def ext_proc_is_on(route: Any) -> bool:
    return "ext_proc" in route.get("typed_per_filter_config", {})


def test_the_same_settings_give_the_same_text() -> None:
    assert bootstrap_yaml(CONFIG) == bootstrap_yaml(CONFIG)


def test_the_standalone_file_is_what_the_code_renders() -> None:
    file = Path(__file__).parent.parent / "envoy" / "standalone.yaml"
    comment, _, body = file.read_text().partition("\n\n")
    assert all(line.startswith("#") for line in comment.splitlines())
    assert body == bootstrap_yaml(STANDALONE)


def test_the_readme_tells_how_to_render_the_standalone_file(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "envoy" / "README.md").read_text()
    (command,) = [line for line in readme.splitlines() if line.startswith("$ pd-extproc envoy-config ")]
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == bootstrap_yaml(STANDALONE)


def test_no_path_is_in_two_tables() -> None:
    tables = (*paths.INFERENCE_PATHS, *paths.NOT_IMPLEMENTED_PATHS, *paths.CONTROL_PATHS)
    assert len(set(tables)) == len(tables)
    assert not [path for path in paths.INFERENCE_PATHS for prefix in paths.CONTROL_PREFIXES if path.startswith(prefix)]


@pytest.mark.parametrize("path", paths.DECODE_PATHS)
def test_decode_paths(path: str) -> None:
    assert first_route(path)["route"]["cluster"] == "decode"
    assert ext_proc_is_on(first_route(path))


@pytest.mark.parametrize("path", paths.DECODE_PATHS)
def test_a_prefill_worker_may_be_chosen_for_a_decode_path(path: str) -> None:
    route = first_route(path, x_pd_cluster="prefill")
    assert route["route"]["cluster"] == "prefill"
    assert "x-pd-cluster" in route["request_headers_to_remove"]
    assert ext_proc_is_on(route)
    assert first_route(path, x_pd_cluster="decode") == first_route(path)


@pytest.mark.parametrize("prefix", paths.DECODE_PREFIXES)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_stored_responses(prefix: str, method: str) -> None:
    route = first_route(f"{prefix}resp_1/cancel", method)
    assert route["route"]["cluster"] == "decode"
    assert ext_proc_is_on(route)
    assert first_route(prefix.rstrip("/"), "GET")["direct_response"]["status"] == 405


@pytest.mark.parametrize("path", paths.PREFILL_PATHS)
def test_prefill_paths(path: str) -> None:
    assert first_route(path)["route"]["cluster"] == "prefill"
    assert ext_proc_is_on(first_route(path))


@pytest.mark.parametrize("path", [*paths.CONTROL_PATHS, "/workers/some-id", "/v1/models/org/model"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_control_paths(path: str, method: str) -> None:
    assert first_route(path, method)["route"]["cluster"] == "control"
    assert not ext_proc_is_on(first_route(path, method))


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [
        *((path, "GET", "method_not_allowed") for path in paths.INFERENCE_PATHS),
        *((path, "POST", "not_implemented") for path in paths.NOT_IMPLEMENTED_PATHS),
        ("/", "GET", "not_found"),
        ("/metrics", "GET", "not_found"),
        ("/v1/chat/completions/", "POST", "not_found"),
    ],
)
def test_refusals(path: str, method: str, code: str) -> None:
    route = first_route(path, method)
    assert route["direct_response"]["status"] == CATALOGUE[code].status
    assert f'"code":"{code}"' in route["direct_response"]["body"]["inline_string"]
    assert not ext_proc_is_on(route)


def test_ext_proc_modes() -> None:
    filters = manager(render(), "clients")["http_filters"]
    assert [each["name"] for each in filters] == ["late", "ext_proc", "envoy.filters.http.router"]
    assert filters[1]["disabled"] is True
    settings = filters[1]["typed_config"]
    assert settings["processing_mode"] == {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    assert settings["allow_content_length_header"] is True
    assert settings["metadata_options"] == {"receiving_namespaces": {"untyped": ["envoy.lb", "pd_extproc"]}}
    assert settings["status_on_error"] == {"code": "ServiceUnavailable"}
    assert settings["grpc_service"]["timeout"] == "0s"
    assert "failure_mode_allow" not in settings


def test_the_late_filter_is_the_first_one_over_again_but_for_its_mode() -> None:
    late, first = (each["typed_config"] for each in manager(render(), "clients")["http_filters"][:2])
    settings = late["extension_config"]["typed_config"]
    assert settings["processing_mode"] == {
        "request_header_mode": "SKIP",
        "response_header_mode": "SEND",
        "request_trailer_mode": "SKIP",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }
    own = {"processing_mode", "stat_prefix", "metadata_options"}
    assert settings["stat_prefix"] == "late"
    assert {k: v for k, v in settings.items() if k not in own} == {k: v for k, v in first.items() if k not in own}


def test_the_late_filter_is_skipped_unless_the_answer_has_its_header() -> None:
    (matcher,) = manager(render(), "clients")["http_filters"][0]["typed_config"]["xds_matcher"]["matcher_list"][
        "matchers"
    ]
    present = matcher["predicate"]["not_matcher"]["single_predicate"]
    assert present["input"]["typed_config"]["header_name"] == LATE
    assert matcher["on_match"]["action"]["typed_config"]["@type"].endswith("SkipFilter")


def test_without_late_answers_there_is_no_late_filter() -> None:
    filters = manager(render(late_answers=False), "clients")["http_filters"]
    assert [each["name"] for each in filters] == ["ext_proc", "envoy.filters.http.router"]


def test_workers_cannot_set_the_late_header() -> None:
    assert LATE in manager(render(), "clients")["route_config"]["response_headers_to_remove"]
    assert all(LATE in route["response_headers_to_remove"] for route in routes(render(), "egress"))


@pytest.mark.parametrize(("request_timeout", "message_timeout"), [(10.0, "12s"), (1e6, "30s")])
def test_a_stuck_service_is_noticed_while_an_answer_waits(request_timeout: float, message_timeout: str) -> None:
    document = render(request_timeout=request_timeout, timeout_margin=2.0)
    late, first = (each["typed_config"] for each in manager(document, "clients")["http_filters"][:2])
    assert first["message_timeout"] == message_timeout
    assert late["extension_config"]["typed_config"]["message_timeout"] == message_timeout


def test_no_envoy_timeout_before_ours() -> None:
    document = render(request_timeout=10.0, timeout_margin=2.0)
    for name in ("clients", "egress"):
        assert manager(document, name)["stream_idle_timeout"] == "12s"
        forwarding = [route["route"] for route in routes(document, name) if "route" in route]
        assert {route["timeout"] for route in forwarding} == {"0s"}
    assert manager(document, "egress")["common_http_protocol_options"]["idle_timeout"] == "0s"


def test_only_connections_that_never_came_about_are_retried() -> None:
    document = render(max_failovers=3)
    policies = [
        route["route"].get("retry_policy")
        for name in ("clients", "egress")
        for route in routes(document, name)
        if "route" in route
    ]
    worker_policies = [policy for policy in policies if policy]
    assert {policy["retry_on"] for policy in worker_policies} == {"connect-failure,refused-stream"}
    assert {policy["num_retries"] for policy in worker_policies} == {3}
    to_workers = (*paths.INFERENCE_PATHS, *paths.DECODE_PATHS, *paths.DECODE_PREFIXES)
    to_clusters = len(ROLES)  # legs on the egress listener
    to_grpc = sum(cluster.endswith("_grpc") for cluster in ROLES)  # of clients' requests
    assert len(worker_policies) == len(to_workers) + to_clusters + to_grpc


@pytest.mark.parametrize(("payload", "buffered"), [(20_000_000, 20_000_000 + 2**20), (2**32, 2**32 - 1)])
def test_a_whole_body_is_kept_for_the_next_host(payload: int, buffered: int) -> None:
    document = render(max_payload_bytes=payload)
    for name in ("clients", "egress"):
        assert manager(document, name)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] == buffered


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_role_clusters_send_to_named_hosts_only(name: str) -> None:
    role = cluster(render(), name)
    assert role["type"] == "EDS"
    policy = role["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    assert policy["@type"].endswith("override_host.v3.OverrideHost")
    fallback = policy["fallback_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    assert fallback["@type"].endswith("subset.v3.Subset")
    assert "fallback_policy" not in fallback  # NO_FALLBACK is the default
    assert "outlier_detection" not in role
    assert "health_checks" not in role


def test_upstream_connections_idle_shorter_than_the_engines_keep_them() -> None:
    options = dict(walk(cluster(render(), "decode")["typed_extension_protocol_options"]))
    assert options["idle_timeout"] == "3s"


@pytest.mark.parametrize(
    ("name", "address", "detects", "asks"),
    [
        ("decode", "unix:/r/e", True, False),
        ("extproc", "unix:/r/e", False, False),
        ("extproc", "sidecar:1", True, True),
        ("ads", "unix:/r/a", False, False),
    ],
)
def test_peers_on_other_machines_are_watched(name: str, address: str, detects: bool, asks: bool) -> None:  # noqa: FBT001
    found = next(each for each in clusters(replace(CONFIG, extproc=address)) if each.name == name)
    document = found.to_dict(casing=Casing.SNAKE)
    assert ("tcp_keepalive" in document.get("upstream_connection_options", {})) is detects
    assert ("upstream_bind_config" in document) is detects
    assert ("connection_keepalive" in dict(walk(document))) is asks


def test_every_circuit_breaker_is_raised() -> None:
    for each in render()["static_resources"]["clusters"]:
        threshold = each["circuit_breakers"]["thresholds"][0]
        assert min(threshold.values()) >= 1_000_000
        assert set(threshold) == {"max_connections", "max_pending_requests", "max_requests", "max_retries"}


def test_workers_are_trusted_by_the_given_ca_only() -> None:
    sockets = cluster(render(ca_file="/my/ca.pem"), "decode")["transport_socket_matches"]
    assert sockets[0]["match"] == {"tls": True}
    tls = sockets[0]["transport_socket"]["typed_config"]
    assert tls["common_tls_context"]["validation_context"] == {"trusted_ca": {"filename": "/my/ca.pem"}}
    assert tls["auto_host_sni"] is True
    assert tls["auto_sni_san_validation"] is True


def test_without_a_ca_no_worker_is_trusted() -> None:
    sockets = cluster(render(ca_file=None), "decode")["transport_socket_matches"]
    validation = sockets[0]["transport_socket"]["typed_config"]["common_tls_context"]["validation_context"]
    assert validation == {"verify_certificate_hash": ["00" * 32]}


def test_admin_is_on_loopback() -> None:
    address = render(admin_port=1234)["admin"]["address"]["socket_address"]
    assert address == {"address": "127.0.0.1", "port_value": 1234}


@pytest.mark.parametrize(
    ("address", "kind", "expected"),
    [
        ("unix:/run/x.sock", "STATIC", {"pipe": {"path": "/run/x.sock"}}),
        ("10.0.0.7:50051", "STATIC", {"socket_address": {"address": "10.0.0.7", "port_value": 50051}}),
        ("[fd00::7]:50051", "STATIC", {"socket_address": {"address": "fd00::7", "port_value": 50051}}),
        ("sidecar:50051", "STRICT_DNS", {"socket_address": {"address": "sidecar", "port_value": 50051}}),
    ],
)
def test_service_addresses(address: str, kind: str, expected: Any) -> None:
    found = next(each for each in clusters(replace(CONFIG, extproc=address)) if each.name == "extproc")
    assert found.type.name == kind
    assert envoy_address(parse_address(address)).to_dict(casing=Casing.SNAKE) == expected


@pytest.mark.parametrize("address", ["", "sidecar", ":1", "sidecar:65536"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected unix:|the port must be"):
        clusters(replace(CONFIG, control=address))


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", {}), ("::1", {}), ("::", {"ipv4_compat": True})])
def test_client_host(host: str, expected: dict[str, bool]) -> None:
    address = client_listener(replace(CONFIG, client_host=host, client_port=80)).address.to_dict(casing=Casing.SNAKE)
    assert address == {"socket_address": {"address": host, "port_value": 80, **expected}}


def test_access_log_is_a_choice() -> None:
    (reports,) = manager(render(), "clients")["access_log"]
    assert "common_config" in reports["typed_config"]
    same, log = manager(render(access_log=True), "clients")["access_log"]
    assert same == reports
    assert log["typed_config"]["log_format"]["json_format"]["flags"] == "%RESPONSE_FLAGS%"
    assert log["filter"] == {"log_type_filter": {"types": ["DownstreamEnd"]}}  # reports are no lines


def test_local_replies_are_of_the_catalogue() -> None:
    mappers = manager(render(), "clients")["local_reply_config"]["mappers"]
    assert len(mappers) == len(REPLIES)
    for reply, mapper in zip(REPLIES, mappers, strict=True):
        assert mapper["status_code"] == CATALOGUE[reply.code].status
        body = mapper["body_format_override"]["text_format_source"]["inline_string"]
        assert body.replace("%%", "%").encode() == error_body(reply.code, reply.message)
        assert reply.flags or reply.expression  # a row that always fits would rewrite our own answers
        assert CATALOGUE[reply.code].retryable or not reply.retry_after


def test_without_the_egress_there_is_no_listener_for_it() -> None:
    document = render(egress=None)
    assert [each["name"] for each in document["static_resources"]["listeners"]] == ["clients"]
    others = [each["name"] for each in render()["static_resources"]["clusters"] if each["name"] != "answers"]
    assert [each["name"] for each in document["static_resources"]["clusters"]] == others  # none are fetched


def test_on_a_port_legs_may_come_as_to_any_proxy() -> None:
    document = render(egress="127.0.0.1:15001")
    address = listener(document, "egress")["address"]["socket_address"]
    assert (address["address"], address["port_value"]) == ("127.0.0.1", 15001)
    assert "codec_type" not in manager(document, "egress"), "AUTO"
    assert manager(render(), "egress")["codec_type"] == "HTTP2"


def test_a_destination_in_a_header_is_taken_behind_ext_proc() -> None:
    names = [each["name"] for each in manager(render(destination_header=True), "clients")["http_filters"]]
    assert names[-3:] == ["ext_proc", "header_to_metadata", "envoy.filters.http.router"]
    assert "header_to_metadata" not in [each["name"] for each in manager(render(), "clients")["http_filters"]]
