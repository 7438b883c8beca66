"""Where settings come from, which source wins, and what is said when one is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from extproc import settings as settings_module
from extproc.admission.legs import LegSettings
from extproc.admission.priority import Priority, Tenants
from extproc.admission_settings import gate_settings, leg_settings, tenants
from extproc.control.keys import ControlKey
from extproc.discovery_settings import DiscoverySettings
from extproc.flags import add_arguments, read_settings
from extproc.logs import LogLevel
from extproc.model_aliases import ModelAlias
from extproc.options import Option
from extproc.peer_options import ALIASES, NOT_AVAILABLE_YET
from extproc.policies.names import AssignmentMode, LoadMetric
from extproc.policies.tuning import Tuning
from extproc.settings import (
    CacheIndex,
    Destination,
    GrpcTransport,
    KvMissing,
    LegsMode,
    MooncakeDispatch,
    OnPrefillFailure,
    PairingMode,
    PolicyName,
    PriorityName,
    Settings,
    usable_cores,
)
from extproc.sources import SettingsError, load_settings
from extproc.workers.kv_config import KvConfig
from extproc.workers.spec import HealthOverrides, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl


def load(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, config: str | None = None
) -> Settings:
    return load_settings(flags or {}, environ or {}, config)


def problems(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, config: str | None = None
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags, environ, config)
    return list(caught.value.problems)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def test_the_defaults_are_the_peers() -> None:
    settings = load()
    assert settings.pd_disaggregation is False
    assert (settings.host, settings.port) == ("0.0.0.0", 30000)
    assert settings.max_payload_size == 512 * 1024 * 1024
    assert (settings.request_timeout_secs, settings.sse_keepalive_secs) == (1800, 15)
    assert settings.request_id_headers == ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    assert (settings.prometheus_host, settings.prometheus_port) == ("0.0.0.0", 29000)
    assert (settings.health_failure_threshold, settings.health_success_threshold) == (3, 2)
    assert (settings.health_check_timeout_secs, settings.health_check_interval_secs) == (5, 60)
    assert settings.health_check_endpoint == "/health"
    assert settings.disable_health_check is False
    assert (settings.cb_failure_threshold, settings.cb_success_threshold) == (10, 3)
    assert (settings.cb_timeout_duration_secs, settings.cb_window_duration_secs) == (60, 120)
    assert settings.disable_circuit_breaker is False
    assert settings.drain_settle_secs == 5
    assert settings.pd_pairing_mode is PairingMode.LENIENT
    assert settings.policy is settings.prefill_policy is settings.decode_policy is PolicyName.CACHE_AWARE
    assert (settings.balance_abs_threshold, settings.balance_rel_threshold) == (64, 1.5)
    assert (settings.balance_token_usage_threshold, settings.overload_token_usage_threshold) == (1, 1)
    assert (settings.overlap_decay, settings.selection_temperature, settings.cache_boundaries) == (0, 0, ())
    assert (settings.max_tree_size, settings.block_size, settings.cache_index) == (67108864, 16, CacheIndex.TREE)
    assert (settings.cache_ttl_secs, settings.eviction_interval_secs) == (180, 60)
    assert settings.model_alias == ()
    assert (settings.model_path, settings.tokenizer_path, settings.chat_template) == (None, None, None)
    assert (settings.disable_tokenizer_autoload, settings.tokenizer_cache_enable_l0) == (False, False)
    assert (settings.tokenizer_cache_l0_max_entries, settings.tokenizer_cache_l0_max_memory) == (10000, 268435456)
    assert (settings.tokenizer_cache_enable_l1, settings.tokenizer_cache_l1_max_memory) == (False, 52428800)
    assert settings.retry_max_retries == 5
    assert (settings.retry_initial_backoff_ms, settings.retry_max_backoff_ms) == (50, 30000)
    assert (settings.retry_backoff_multiplier, settings.retry_jitter_factor) == (1.5, 0.2)
    assert settings.disable_retries is False
    assert (settings.load_monitor_interval, settings.disable_load_monitoring) == (10, False)
    assert settings.shutdown_grace_period_secs == 180
    assert settings.encode_policy is PolicyName.CONSISTENT_HASHING
    assert Tuning.of(settings) == Tuning()
    assert settings.log_level is LogLevel.INFO
    assert settings.api_key is None


def test_our_own_defaults() -> None:
    settings = load()
    assert settings.cache_threshold == 0  # the peer's 0.3 costs hits here
    assert settings.envoy_admin_port == 9901
    assert settings.envoy_concurrency == usable_cores()
    assert settings.grpc_transport is GrpcTransport.NGH2
    assert settings.response_headers is True
    assert settings.trust_client_control_fields is False
    assert settings.no_envoy is False
    assert settings.worker_transport_failures == 3
    assert (settings.worker_stall_secs, settings.worker_wedge_secs) == (10, 20)  # the peer's 2 and 3 mean less
    assert settings.worker_drain_timeout_secs == settings.request_timeout_secs
    assert settings.envoy_hosts_interval_secs == 10
    assert settings.envoy_admin_address is None
    assert settings.on_prefill_failure is OnPrefillFailure.RETRY
    assert settings.kv_missing is KvMissing.RECOMPUTE
    assert settings.mooncake_dispatch is MooncakeDispatch.CONCURRENT
    assert (settings.worker_overload_protection, settings.worker_overload_shed) == (False, False)


@pytest.mark.parametrize(
    ("flag", "variable", "yaml_value", "expected"),
    [
        ("1001", "1002", "1003", 1001),
        (None, "1002", "1003", 1002),
        (None, None, "1003", 1003),
        (None, None, None, 30000),
        ("1001", None, "1003", 1001),
        ("1001", "not a port", "nor this", 1001),
    ],
)
def test_flags_win_over_environment_over_file_over_default(
    yaml_file: Path, flag: str | None, variable: str | None, yaml_value: str | None, expected: int
) -> None:
    yaml_file.write_text("" if yaml_value is None else f"port: {yaml_value}\n")
    flags: dict[str, object] = {} if flag is None else {"port": flag}
    environ = {} if variable is None else {"PD_EXTPROC_PORT": variable}
    assert load(flags, environ, str(yaml_file)).port == expected


def test_a_list_is_replaced_as_a_whole(yaml_file: Path) -> None:
    yaml_file.write_text("decode: [http://file:1, http://file:2]\n")
    assert load({"decode": ["http://flag:1"]}, config=str(yaml_file)).decode == (
        WorkerSpec(WorkerUrl("http", "flag", 1), Role.DECODE),
    )


def test_the_file_can_be_named_by_the_environment_and_the_flag_wins(yaml_file: Path, tmp_path: Path) -> None:
    yaml_file.write_text("port: 1\n")
    other = tmp_path / "other.yaml"
    other.write_text("port: 2\n")
    environ = {"PD_EXTPROC_CONFIG": str(yaml_file)}
    assert load(environ=environ).port == 1
    assert load(environ=environ, config=str(other)).port == 2


SAMPLES: dict[str, tuple[str, str, object]] = {
    # field: (text for flag and environment, YAML, what it means)
    "pd_disaggregation": ("true", "true", True),
    "prefill": (
        "http://a:1 8998",
        "[http://a:1 8998]",
        (WorkerSpec(WorkerUrl("http", "a", 1), Role.PREFILL, bootstrap_port=8998),),
    ),
    "decode": ("http://a:1", "[http://a:1]", (WorkerSpec(WorkerUrl("http", "a", 1), Role.DECODE),)),
    "prefill_kv_connector": ("NixlConnector", "NixlConnector", "NixlConnector"),
    "decode_kv_connector": ("NixlPullConnector", "NixlPullConnector", "NixlConnector"),
    "mooncake_dispatch": ("sequential", "sequential", MooncakeDispatch.SEQUENTIAL),
    "token_reuse": ("false", "false", False),
    "pd_pairing_mode": ("strict", "strict", PairingMode.STRICT),
    "pd_min_prompt_tokens": ("7", "7", 7),
    "pd_min_uncached_tokens": ("7", "7", 7),
    "kv_event_source": ("tcp://*:5557", "'tcp://*:5557'", "tcp://*:5557"),
    "kv_event_max_blocks": ("7", "7", 7),
    "model_alias": ("a=m; b=x=y", "{a: m, b: 'x=y'}", (ModelAlias("a", "m"), ModelAlias("b", "x=y"))),
    "model_path": ("org/model", "org/model", "org/model"),
    "tokenizer_path": ("/model", "/model", "/model"),
    "chat_template": ("tool_use", "tool_use", "tool_use"),
    "trust_request_chat_template": ("true", "true", True),
    "disable_tokenizer_autoload": ("true", "true", True),
    "tokenizer_cache_enable_l0": ("true", "true", True),
    "tokenizer_cache_l0_max_entries": ("7", "7", 7),
    "tokenizer_cache_l0_max_memory": ("7", "7", 7),
    "tokenizer_cache_enable_l1": ("true", "true", True),
    "tokenizer_cache_l1_max_memory": ("7", "7", 7),
    "dp_aware": ("true", "true", True),
    "worker_ca_file": ("/ca.pem", "/ca.pem", Path("/ca.pem")),
    "policy": ("random", "random", PolicyName.RANDOM),
    "prefill_policy": ("random", "random", PolicyName.RANDOM),
    "decode_policy": ("random", "random", PolicyName.RANDOM),
    "cache_threshold": ("0.5", "0.5", 0.5),
    "balance_token_usage_threshold": ("0.5", "0.5", 0.5),
    "overload_token_usage_threshold": ("0.5", "0.5", 0.5),
    "overlap_decay": ("0.5", "0.5", 0.5),
    "selection_temperature": ("0.5", "0.5", 0.5),
    "max_tree_size": ("7", "7", 7),
    "block_size": ("32", "32", 32),
    "cache_boundaries": ("512, 2048", "[512, 2048]", (512, 2048)),
    "cache_index": ("hash", "hash", CacheIndex.HASH),
    "cache_ttl_secs": ("7", "7", 7),
    "eviction_interval_secs": ("7", "7", 7),
    "encode_policy": ("random", "random", PolicyName.RANDOM),
    "routing_key_override": ("true", "true", True),
    "routing_key_headers": ("X-Session, x-other", "[X-Session, x-other]", ("x-session", "x-other")),
    "max_idle_secs": ("7", "7", 7),
    "assignment_mode": ("min_group", "min_group", AssignmentMode.MIN_GROUP),
    "power_of_two_load_metric": ("requests", "requests", LoadMetric.REQUESTS),
    "least_load_kv_pressure_weight": ("0", "0", 0),
    "least_load_default_throughput": ("7", "7", 7),
    "least_load_mean_prefill_tokens": ("7", "7", 7),
    "least_load_max_waiting_requests": ("7", "7", 7),
    "prefix_token_count": ("7", "7", 7),
    "prefix_hash_load_factor": ("1", "1", 1),
    "prefix_hash_balance_abs_threshold": ("0", "0", 0),
    "bucket_adjust_interval_secs": ("7", "7", 7),
    "balance_abs_threshold": ("0", "0", 0),
    "balance_rel_threshold": ("7", "7", 7),
    "host": ("::1", "'::1'", "::1"),
    "port": ("81", "81", 81),
    "api_key": ("secret", "secret", "secret"),
    "control_plane_api_keys": (
        "a:A:admin:k;b::user:l",
        "['a:A:admin:k', 'b::user:l']",
        (ControlKey.parse("a:A:admin:k"), ControlKey.parse("b::user:l")),
    ),
    "control_plane_open": ("true", "true", True),
    "max_payload_size": ("1024", "1024", 1024),
    "request_timeout_secs": ("0.5", "0.5", 0.5),
    "sse_keepalive_secs": ("0", "0", 0),
    "relay_grpc_streams": ("true", "true", True),
    "request_id_headers": ("X-One", "[X-One]", ("x-one",)),
    "response_headers": ("false", "false", False),
    "trust_client_control_fields": ("true", "true", True),
    "worker_transport_failures": ("0", "0", 0),
    "worker_stall_secs": ("0", "0", 0),
    "worker_wedge_secs": ("7", "7", 7),
    "worker_drain_timeout_secs": ("7", "7", 7),
    "envoy_hosts_interval_secs": ("0", "0", 0),
    "envoy_admin_address": ("envoy.test:9901", "envoy.test:9901", "envoy.test:9901"),
    "disable_circuit_breaker": ("true", "true", True),
    "cb_failure_threshold": ("7", "7", 7),
    "cb_success_threshold": ("7", "7", 7),
    "cb_timeout_duration_secs": ("7", "7", 7),
    "cb_window_duration_secs": ("7", "7", 7),
    "disable_health_check": ("true", "true", True),
    "health_check_endpoint": ("/ping?deep=1", "/ping?deep=1", "/ping?deep=1"),
    "health_check_interval_secs": ("7", "7", 7),
    "health_check_timeout_secs": ("7", "7", 7),
    "health_failure_threshold": ("7", "7", 7),
    "health_success_threshold": ("7", "7", 7),
    "disable_load_monitoring": ("true", "true", True),
    "load_monitor_interval": ("7", "7", 7),
    "worker_overload_protection": ("true", "true", True),
    "worker_overload_waiting_requests": ("7", "7", 7),
    "worker_overload_token_usage": ("0.7", "0.7", 0.7),
    "worker_overload_shed": ("true", "true", True),
    "max_concurrent_requests": ("0", "0", 0),
    "queue_size": ("0", "0", 0),
    "queue_timeout_secs": ("7", "7", 7),
    "rate_limit_tokens_per_second": ("7", "7", 7),
    "priority_scheduler_enabled": ("true", "true", True),
    "tenant_max_priority": (
        "a=bulk;b=system",
        "{a: bulk, b: system}",
        (("a", PriorityName.BULK), ("b", PriorityName.SYSTEM)),
    ),
    "default_max_priority": ("bulk", "bulk", PriorityName.BULK),
    "pd_admission_wait_secs": ("0", "0", 0),
    "on_prefill_failure": ("decode-only", "decode-only", OnPrefillFailure.DECODE_ONLY),
    "kv_missing": ("fail", "fail", KvMissing.FAIL),
    "pd_bootstrap_timeout_secs": ("0", "0", 0),
    "retry_max_retries": ("7", "7", 7),
    "retry_initial_backoff_ms": ("7", "7", 7),
    "retry_max_backoff_ms": ("70", "70", 70),
    "retry_backoff_multiplier": ("1", "1", 1.0),
    "retry_jitter_factor": ("0", "0", 0.0),
    "retry_released": ("false", "false", False),
    "disable_retries": ("true", "true", True),
    "drain_settle_secs": ("0", "0", 0),
    "shutdown_grace_period_secs": ("0", "0", 0),
    "no_envoy": ("true", "true", True),
    "mode": ("select-only", "select-only", LegsMode.SELECT_ONLY),
    "egress": ("http://localhost:15001/", "'http://localhost:15001'", "http://localhost:15001"),
    "destination": ("header", "header", Destination.HEADER),
    "destination_hosts": ("1", "1", 1),
    "envoy_path": ("/opt/envoy", "/opt/envoy", Path("/opt/envoy")),
    "envoy_admin_port": ("81", "81", 81),
    "envoy_status_port": ("81", "81", 81),
    "envoy_concurrency": ("7", "7", 7),
    "access_log": ("true", "true", True),
    "run_dir": ("/srv/run", "/srv/run", Path("/srv/run")),
    "extproc_address": ("unix:/x.sock", "unix:/x.sock", "unix:/x.sock"),
    "ads_address": ("[::1]:81", "'[::1]:81'", "[::1]:81"),
    "control_address": ("name:81", "name:81", "name:81"),
    "egress_address": ("envoy:81", "envoy:81", "envoy:81"),
    "grpc_transport": ("grpcio", "grpcio", GrpcTransport.GRPCIO),
    "log_level": ("debug", "debug", LogLevel.DEBUG),
    "log_json": ("true", "true", True),
    "prometheus_host": ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    "prometheus_port": ("81", "81", 81),
}


# A rule between fields is about it: it has a test of its own.
APART = {
    *("prefill_kv_engine_id", "prefill_max_inflight_requests_per_worker", "prefill_queue_size"),
    *("prefill_queue_timeout_secs", "kv_event_replay", "dp_minimum_tokens_scheduler"),
    *DiscoverySettings.__annotations__,
}


@pytest.mark.parametrize("field", [field for field in Settings.model_fields if field not in APART])
def test_every_field_is_reachable_by_environment_and_file(yaml_file: Path, field: str) -> None:
    text, yaml_text, expected = SAMPLES[field]
    assert getattr(load(), field) != expected, "a sample that equals the default shows nothing"
    assert getattr(load(environ={f"PD_EXTPROC_{field.upper()}": text}), field) == expected
    yaml_file.write_text(f"{field}: {yaml_text}\n")
    assert getattr(load(config=str(yaml_file)), field) == expected


def test_every_field_says_how_it_looks_in_help() -> None:
    for name, field in Settings.model_fields.items():
        assert [item for item in field.metadata if isinstance(item, Option)], name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1 8998;http://b:2 none", [("a", 1, 8998), ("b", 2, None)]),
        (" http://a:1 ; ;http://b:2 NONE;", [("a", 1, None), ("b", 2, None)]),
        ("http://[fd00::1]:8000 8998", [("fd00::1", 8000, 8998)]),
        ("", []),
    ],
)
def test_prefill_workers_in_the_environment(text: str, expected: list[tuple[str, int, int | None]]) -> None:
    workers = load(environ={"PD_EXTPROC_PREFILL": text}).prefill
    assert [(worker.url.host, worker.url.port, worker.bootstrap_port) for worker in workers] == expected


def test_prefill_workers_in_yaml_may_be_mappings(yaml_file: Path) -> None:
    yaml_file.write_text(
        "prefill:\n"
        "  - http://a:1 8998\n"
        "  - {url: 'http://b:2', bootstrap_port: 8999}\n"
        "  - {url: 'http://c:3', bootstrap_port: null}\n"
        "  - {url: 'http://d:4'}\n"
    )
    workers = load(config=str(yaml_file)).prefill
    assert [(worker.url.host, worker.bootstrap_port) for worker in workers] == [
        ("a", 8998),
        ("b", 8999),
        ("c", None),
        ("d", None),
    ]


def test_workers_in_yaml_may_say_all_that_a_registration_does(yaml_file: Path) -> None:
    yaml_file.write_text(
        "prefill:\n"
        "  - {url: 'http://a:1', bootstrap_port: 8999, kv_connector: mooncake, kv_role: kv_producer,\n"
        "     kv_engine_id: engine-a, runtime: vllm, labels: {dp_size: '2', zone: x}, api_key: k, priority: 3}\n"
        "decode:\n"
        "  - {url: 'http://b:2', worker_type: decode, models: [{id: m}], health: {failure_threshold: 9},\n"
        "     kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_consumer}}\n"
    )
    settings = load(config=str(yaml_file))
    assert settings.prefill == (
        WorkerSpec(
            WorkerUrl("http", "a", 1),
            Role.PREFILL,
            bootstrap_port=8999,
            kv=KvConfig("MooncakeConnector", "kv_producer", "engine-a"),
            engine_id_named=True,
            runtime="vllm",
            labels={"dp_size": "2", "zone": "x"},
            api_key="k",
            priority=3,
        ),
    )
    assert settings.decode == (
        WorkerSpec(
            WorkerUrl("http", "b", 2),
            Role.DECODE,
            cards=({"id": "m"},),
            kv=KvConfig("NixlConnector", "kv_consumer"),
            health=HealthOverrides(failure_threshold=9),
        ),
    )


@pytest.mark.parametrize(
    ("source", "value"),
    [("flag", ["a", "b"]), ("environment", "a;b"), ("file", "[a, b]")],
)
def test_engine_ids_go_with_the_prefill_workers_in_order(yaml_file: Path, source: str, value: Any) -> None:
    flags: dict[str, object] = {"prefill": ["http://p:1", "http://p:2"]}
    environ = {}
    if source == "flag":
        flags["prefill_kv_engine_id"] = value
    elif source == "environment":
        environ["PD_EXTPROC_PREFILL_KV_ENGINE_ID"] = value
    yaml_file.write_text(f"prefill_kv_engine_id: {value}\n" if source == "file" else "")
    assert load(flags, environ, str(yaml_file)).prefill_kv_engine_id == ("a", "b")


def test_every_prefill_worker_has_an_engine_id_or_none_has() -> None:
    assert problems({"prefill": ["http://p:1", "http://p:2"], "prefill_kv_engine_id": ["a"]}) == [
        "1 x --prefill-kv-engine-id for 2 x --prefill: give one for each"
    ]
    assert problems({"prefill_kv_engine_id": ["a"]}) == [
        "1 x --prefill-kv-engine-id for 0 x --prefill: give one for each"
    ]


def test_the_longest_pause_is_not_shorter_than_the_first() -> None:
    assert problems({"retry_max_backoff_ms": "49"}) == [
        "--retry-max-backoff-ms 49 must not be less than --retry-initial-backoff-ms 50"
    ]
    assert load({"retry_max_backoff_ms": "50"}).retry_max_backoff_ms == 50


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("unix:/x.sock", "--envoy-admin-address: Must be host:port (got 'unix:/x.sock')"),
        ("name:0", "--envoy-admin-address: Port must be between 1 and 65535 (got 'name:0')"),
    ],
)
def test_an_admin_interface_is_at_a_tcp_port(address: str, problem: str) -> None:
    assert problems({"envoy_admin_address": address}) == [problem]


def test_yaml_keys_may_have_dashes(yaml_file: Path) -> None:
    yaml_file.write_text("log-level: error\n")
    assert load(config=str(yaml_file)).log_level is LogLevel.ERROR


@pytest.mark.parametrize("text", ["X-One, x-two", "x-one x-two", "x-one,X-Two,"])
def test_request_id_headers_are_separated_by_commas_or_blanks(text: str) -> None:
    assert load(environ={"PD_EXTPROC_REQUEST_ID_HEADERS": text}).request_id_headers == ("x-one", "x-two")


def test_role_policies_follow_the_common_one_unless_named() -> None:
    settings = load({"policy": "random", "decode_policy": "round_robin"})
    assert settings.prefill_policy is PolicyName.RANDOM
    assert settings.decode_policy is PolicyName.ROUND_ROBIN


PREFILL_ADMISSION: dict[str, object] = {
    "pd_disaggregation": True,
    "prefill_max_inflight_requests_per_worker": "4",
}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"prefill_queue_size": "1"},
            "Prefill queue options require --prefill-max-inflight-requests-per-worker to be positive",
        ),
        (
            {"prefill_queue_timeout_secs": "1"},
            "Prefill queue options require --prefill-max-inflight-requests-per-worker to be positive",
        ),
        (
            {"prefill_max_inflight_requests_per_worker": "1"},
            "Prefill admission is only supported in PD or EPD mode",
        ),
        (
            {**PREFILL_ADMISSION, "prefill_queue_timeout_secs": "0"},
            "--prefill-queue-timeout-secs: Must be > 0 when the Prefill queue is enabled",
        ),
        ({"queue_timeout_secs": "0"}, "--queue-timeout-secs: Must be > 0 when --queue-size is"),
        ({"tenant_max_priority": ["a=bulk", "a=system"]}, "--tenant-max-priority: tenant a is given both bulk and"),
    ],
)
def test_rules_of_admission(flags: dict[str, object], problem: str) -> None:
    (found,) = problems(flags)
    assert found.startswith(problem)


def test_prefill_admission_and_what_is_derived_for_it() -> None:
    none = leg_settings(load())
    assert (none.prefill_limit, none.prefill_queue_size, none.prefill_queue_timeout) == (0, 100, 60)
    settings = load(PREFILL_ADMISSION | {"prefill_queue_size": "0", "prefill_queue_timeout_secs": "0"})
    assert leg_settings(settings) == LegSettings(4, 0, 0.0, 30.0)
    assert load(PREFILL_ADMISSION | {"priority_scheduler_enabled": True}).priority_scheduler_enabled


def test_how_many_requests_at_once() -> None:
    assert gate_settings(load()).limit == max(4096, 1024 * usable_cores())
    assert gate_settings(load({"max_concurrent_requests": "0"})).limit == 0
    given = gate_settings(load({"max_concurrent_requests": "7", "rate_limit_tokens_per_second": "3"}))
    assert (given.limit, given.burst, given.rate, given.classes) == (7, 7, 3.0, None)
    assert gate_settings(load({"rate_limit_tokens_per_second": "3"})).burst == 0


def test_classes_of_tenants() -> None:
    found = tenants(load({"tenant_max_priority": ["ops=system"], "default_max_priority": "bulk"}))
    assert found == Tenants({"ops": Priority.SYSTEM}, Priority.BULK)


def test_bucket_is_for_prefill_workers() -> None:
    refused = ["Decode policy should not be allowed to be bucket: give --decode-policy another"]
    assert problems({"decode_policy": "bucket"}) == refused
    assert problems({"policy": "bucket"}) == refused  # the peer lets it pass, and its decodes are chosen at random
    assert load({"policy": "bucket", "decode_policy": "random"}).prefill_policy is PolicyName.BUCKET
    assert load({"prefill_policy": "bucket"}).decode_policy is PolicyName.CACHE_AWARE


def test_ranks_can_be_chosen_among_only_where_they_are_workers() -> None:
    assert problems({"dp_minimum_tokens_scheduler": True}) == [
        "--dp-minimum-tokens-scheduler needs --dp-aware: it chooses among ranks"
    ]
    assert load({"dp_minimum_tokens_scheduler": True, "dp_aware": True}).dp_minimum_tokens_scheduler


@pytest.mark.parametrize("alias", [alias.replace("-", "_") for alias in ALIASES])
def test_the_other_names_of_a_field(yaml_file: Path, alias: str) -> None:
    field = ALIASES[alias.replace("_", "-")].replace("-", "_")
    text, yaml_text, expected = SAMPLES[field]
    assert getattr(load(environ={f"PD_EXTPROC_{alias.upper()}": text}), field) == expected
    yaml_file.write_text(f"{alias}: {yaml_text}\n")
    assert getattr(load(config=str(yaml_file)), field) == expected
    yaml_file.write_text(f"{alias}: {yaml_text}\n{field}: {yaml_text}\n")
    assert problems(config=str(yaml_file)) == [f"{yaml_file}: {field}: given twice"]
    variables = [f"PD_EXTPROC_{name.upper()}" for name in (alias, field)]
    assert problems(environ=dict.fromkeys(variables, text)) == [f"{variables[1]}: given twice, as {variables[0]}"]
    if field != "routing_key_override":  # a switch takes no value
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        assert getattr(read_settings(parser.parse_args([f"--{alias.replace('_', '-')}", text])), field) == expected


def test_empty_worker_lists_are_allowed() -> None:
    settings = load({"pd_disaggregation": True})
    assert settings.pd_disaggregation is True
    assert settings.prefill == settings.decode == ()


def test_sockets_are_in_the_run_directory_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    settings = load({"port": "31999"})
    assert settings.run_dir == Path("/run/pd-extproc-31999")
    assert settings.extproc_address == "unix:/run/pd-extproc-31999/extproc.sock"
    assert settings.ads_address == "unix:/run/pd-extproc-31999/ads.sock"
    assert settings.control_address == "unix:/run/pd-extproc-31999/control.sock"
    assert settings.egress_address == "unix:/run/pd-extproc-31999/egress.sock"


def test_the_run_directory_of_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert load().run_dir == Path("/run/user/1000/pd-extproc-30000")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load().run_dir.name == "pd-extproc-30000-1000"


def test_a_tcp_address_for_ext_proc_brings_ports_for_the_others_along() -> None:
    settings = load({"extproc_address": "[::1]:50051", "run_dir": "/run/x"})
    assert settings.ads_address == "[::1]:50052"
    assert settings.control_address == "[::1]:50053"
    assert settings.egress_address == "unix:/run/x/egress.sock"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("900000 100000", 4)],
)
def test_usable_cores_respect_a_containers_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(f"{quota}\n")
    monkeypatch.setattr(settings_module, "_CGROUP_CPU_MAX", cpu_max)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert usable_cores() == expected


def test_a_chat_template_is_a_file_with_something_in_it(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("")
    assert problems({"chat_template": str(template)}) == [
        f"--chat-template: The file {template} is empty (got '{template}')"
    ]
    template.write_text("{{ messages }}")
    assert load({"chat_template": str(template)}).chat_template == str(template)


def test_settings_are_frozen_and_hide_the_key() -> None:
    settings = load({"api_key": "top-secret"})
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]
    assert "top-secret" not in repr(settings)


URL_SCHEME = "URL must start with a lowercase http://, https://, grpc://, or grpcs:// scheme"
WRONG: list[tuple[str, str, str]] = [
    ("port", "65536", "Port must be between 0 and 65535 (got '65536')"),
    ("port", "x", "Input should be a valid integer, unable to parse string as an integer (got 'x')"),
    ("port", "", "Input should be a valid integer, unable to parse string as an integer (got '')"),
    ("host", "example.org", "Must be an IP address or localhost (got 'example.org')"),
    ("max_payload_size", "0", "Must be >= 1 (got '0')"),
    ("request_timeout_secs", "0", "Must be > 0 (got '0')"),
    ("request_timeout_secs", "inf", "Input should be a finite number (got 'inf')"),
    ("shutdown_grace_period_secs", "-1", "Must be >= 0 (got '-1')"),
    ("health_failure_threshold", "0", "Must be >= 1 (got '0')"),
    ("health_check_interval_secs", "0", "Must be > 0 (got '0')"),
    ("health_check_endpoint", "health", "Must be a path that starts with / (got 'health')"),
    ("max_concurrent_requests", "-2", "Must be >= -1 (got '-2')"),
    ("queue_size", "-1", "Must be >= 0 (got '-1')"),
    ("rate_limit_tokens_per_second", "0", "Must be >= 1 (got '0')"),
    ("prefill_max_inflight_requests_per_worker", "0", "Must be -1 (off) or >= 1 (got '0')"),
    (
        "tenant_max_priority",
        "a=urgent",
        "'a=urgent': expected TENANT=CLASS, with a class of system, interactive, default, bulk",
    ),
    (
        "default_max_priority",
        "urgent",
        "Input should be 'system', 'interactive', 'default' or 'bulk' (got 'urgent')",
    ),
    ("model_path", "", "Must not be empty (got '')"),
    ("chat_template", "/no/such.jinja", "There is no file /no/such.jinja (got '/no/such.jinja')"),
    ("chat_template", "/dev/null/x", "There is no file /dev/null/x (got '/dev/null/x')"),
    ("tokenizer_cache_l0_max_entries", "0", "Must be >= 1 (got '0')"),
    ("retry_max_retries", "0", "Must be >= 1 (got '0')"),
    ("retry_initial_backoff_ms", "0", "Must be >= 1 (got '0')"),
    ("retry_max_backoff_ms", "-1", "Must be >= 1 (got '-1')"),
    ("retry_backoff_multiplier", "0.9", "Must be >= 1 (got '0.9')"),
    ("retry_jitter_factor", "1.1", "Must be between 0 and 1 (got '1.1')"),
    ("on_prefill_failure", "hope", "Input should be 'retry', 'decode-only' or 'fail' (got 'hope')"),
    ("kv_missing", "retry", "Input should be 'recompute' or 'fail' (got 'retry')"),
    ("mooncake_dispatch", "both", "Input should be 'concurrent' or 'sequential' (got 'both')"),
    ("prefill_kv_connector", "", "Must not be empty (got '')"),
    (
        "prefill_kv_connector",
        "none",
        "kv_connector 'none' is no connector's name: leave it out for an engine that has none",
    ),
    (
        "decode_kv_connector",
        "MultiConnector",
        (
            "MultiConnector does not say which of its connectors moves the cache: give that one's name, or the "
            "engine's kv_transfer_config (a field of POST /workers, and of a worker's mapping in the YAML file) "
            "(got 'MultiConnector')"
        ),
    ),
    ("envoy_concurrency", "0", "Must be >= 1 (got '0')"),
    ("request_id_headers", "x y:z", "'y:z' is not a header name"),
    ("api_key", "", "Must not be empty"),
    ("log_level", "trace", "Input should be 'debug', 'info', 'warn' or 'error' (got 'trace')"),
    ("log_json", "perhaps", "Input should be a valid boolean, unable to interpret input (got 'perhaps')"),
    ("grpc_transport", "h3", "Input should be 'ngh2' or 'grpcio' (got 'h3')"),
    (
        "policy",
        "best",
        (
            "Input should be 'random', 'round_robin', 'cache_aware', 'passthrough', 'power_of_two', 'least_load', "
            "'consistent_hashing', 'prefix_hash', 'manual' or 'bucket' (got 'best')"
        ),
    ),
    ("encode_policy", "manual", "Encode policy supports random, round_robin, or consistent_hashing (got 'manual')"),
    ("prefix_hash_load_factor", "0.9", "Must be >= 1 (got '0.9')"),
    ("least_load_max_waiting_requests", "-1", "Must be >= 0 (got '-1')"),
    ("least_load_kv_pressure_weight", "-1", "Must be >= 0 (got '-1')"),
    ("assignment_mode", "any", "Input should be 'random', 'min_load', 'min_group' or 'delegate' (got 'any')"),
    ("envoy_path", "", "Must not be empty (got '')"),
    ("extproc_address", "unix:x.sock", "A unix socket's path must be absolute: unix:/path (got 'unix:x.sock')"),
    ("extproc_address", "::1:81", "'::1:81': expected unix:/path or host:port, an IPv6 host in brackets"),
    ("extproc_address", "host:0", "Port must be between 1 and 65535 (got 'host:0')"),
    ("egress_address", "envoy:0", "Port must be between 1 and 65535 (got 'envoy:0')"),
    ("decode", "HTTP://a:1", f"'HTTP://a:1': {URL_SCHEME}"),
    ("decode", "http://", "'http://': URL must have a valid host"),
    (
        "decode",
        "ipc://a",
        "'ipc://a': ipc:// workers are not served; expected one of http://, https://, grpc://, grpcs://",
    ),
    ("prefill", "a:1 8998", f"'a:1': {URL_SCHEME} (got 'a:1 8998')"),
    ("prefill", "http://a:1 x", "Invalid bootstrap port: x. Must be a number or 'none' (got 'http://a:1 x')"),
    ("prefill", "http://a:1 -1", "Invalid bootstrap port: -1. Must be a number or 'none' (got 'http://a:1 -1')"),
    ("prefill", "http://a:1 0", "Port must be between 1 and 65535 (got 'http://a:1 0')"),
    ("prefill", "http://a:1 65536", "Port must be between 1 and 65535 (got 'http://a:1 65536')"),
    ("prefill", "http://a:1 1 2", "'http://a:1 1 2': expected URL [PORT|none]"),
]


@pytest.mark.parametrize(("field", "text", "message"), WRONG)
def test_a_wrong_value_is_named_with_its_source(yaml_file: Path, field: str, text: str, message: str) -> None:
    variable = f"PD_EXTPROC_{field.upper()}"
    flag = f"--{field.replace('_', '-')}"
    assert problems(environ={variable: text}) == [f"{variable}: {message}"]
    assert problems({field: [text] if field in ("prefill", "decode") else text}) == [f"{flag}: {message}"]
    yaml_file.write_text(f'{field}: "{text}"\n')
    assert problems(config=str(yaml_file)) == [f"{yaml_file}: {field}: {message}"]


def test_an_empty_url_is_named() -> None:
    assert problems({"decode": [""]}) == ["--decode: URL cannot be empty (got '')"]
    assert problems({"prefill": [""]}) == ["--prefill: URL cannot be empty (got '')"]


def test_everything_wrong_is_said_at_once() -> None:
    found = problems({"port": "x", "log_level": "loud"}, {"PD_EXTPROC_POLICY": "best", "PD_EXTPROC_PROT": "1"})
    assert [line.split(":")[0] for line in found] == ["environment", "PD_EXTPROC_POLICY", "--port", "--log-level"]


def test_a_workers_key_is_never_shown(yaml_file: Path) -> None:
    yaml_file.write_text("decode: [{url: 'http://a', api_key: sesame, zone: 1}]\n")
    (line,) = problems(config=str(yaml_file))
    assert "sesame" not in line
    yaml_file.write_text("decode: [{url: 'http://a', api_key: sesame}]\n")
    assert "sesame" not in repr(load(config=str(yaml_file)))


def test_the_key_is_never_shown() -> None:
    assert not any("sesame" in line for line in problems({"api_key": "sesame", "port": "x"}))
    with pytest.raises(ValidationError) as caught:
        Settings(api_key="sesame", port=70000)
    assert "sesame" not in str(caught.value)


def test_an_unknown_variable_is_named_with_the_nearest_one() -> None:
    assert problems(environ={"PD_EXTPROC_PREFIL": "x", "PATH": "/bin"}) == [
        "environment: unknown variable PD_EXTPROC_PREFIL; did you mean PD_EXTPROC_PREFILL?"
    ]
    assert problems(environ={"PD_EXTPROC_port": "1"}) == [
        "environment: unknown variable PD_EXTPROC_port; did you mean PD_EXTPROC_PORT?"
    ]


def test_an_unknown_key_is_named_with_the_nearest_one(yaml_file: Path) -> None:
    yaml_file.write_text("log_levle: info\nzzzzzzzz: 1\n")
    assert problems(config=str(yaml_file)) == [
        f"{yaml_file}: unknown key log_levle; did you mean log_level?",
        f"{yaml_file}: unknown key zzzzzzzz",
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["gpt"], "'gpt': expected ALIAS=MODEL"),
        (["=m"], "'=m': expected ALIAS=MODEL"),
        (["a="], "'a=': expected ALIAS=MODEL"),
        (["a=m", "a=n"], "alias a is given for both m and n"),
        (["a=m", "m=n"], "alias a stands for m, which is an alias itself"),
        (["a=a"], "alias a stands for a, which is an alias itself"),
    ],
)
def test_an_alias_stands_for_one_model(given: list[str], problem: str) -> None:
    (found,) = problems({"model_alias": given})
    assert found.startswith(f"--model-alias: {problem}")


def test_an_alias_may_be_given_twice_alike() -> None:
    assert dict(load({"model_alias": ["a=m", "a=m"]}).model_alias) == {"a": "m"}


@pytest.mark.parametrize("option", ["enable-igw", "router-selector"])
def test_options_of_later_versions_are_refused_in_every_source(yaml_file: Path, option: str) -> None:
    assert option in NOT_AVAILABLE_YET
    variable = f"PD_EXTPROC_{option.replace('-', '_').upper()}"
    assert problems(environ={variable: "1"}) == [f"{variable} is an option of smg that is not available yet"]
    yaml_file.write_text(f"{option}: 1\n")
    assert problems(config=str(yaml_file)) == [f"{yaml_file}: {option} is an option of smg that is not available yet"]


def test_no_option_is_both_there_and_not_available() -> None:
    assert not {field.replace("_", "-") for field in Settings.model_fields} & NOT_AVAILABLE_YET


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must be a mapping of option names to values"),
        ("port: 1\nport: 2\n", "key 'port' occurs twice"),
        ("port: [1\n", "not valid YAML"),
        ("log-level: info\nlog_level: info\n", "log_level: given twice"),
        ("prefill: {a: b}\n", "prefill: Input should be a valid tuple"),
        ("prefill: [{urk: 'http://a'}]\n", "prefill: expected URL [PORT|none], or a mapping with url and other fields"),
        (
            "decode: [{url: 'http://a', kv_connecter: nixl}]\n",
            "decode: http://a: unknown field `kv_connecter`; did you mean `kv_connector`?",
        ),
        (
            "decode: [{url: 'http://a', worker_type: prefill}]\n",
            "http://a: worker_type is prefill, but it is listed as",
        ),
        ("decode: [{url: 'http://a', labels: {dp_size: 2}}]\n", "http://a: labels.dp_size: expected a valid string"),
        ("decode: [{url: 'a'}]\n", f"decode: 'a': {URL_SCHEME}"),
        ("decode: [1]\n", "decode: expected a URL"),
        ("decode: [{url: 'http://a', kv_role: 1}]\n", "decode: http://a: kv_role: unknown variant 1, expected"),
        ("decode: [{url: 'http://a', runtime: mlx}]\n", "decode: http://a: runtime: `mlx` is refused"),
        (
            "decode: [{url: 'http://a', kv_role: kv_producer}]\n",
            "decode: http://a: registered as decode, but kv_role is kv_producer",
        ),
        ("prefill: [{url: 'http://a', bootstrap_port: 0}]\n", "prefill: http://a: bootstrap_port: "),
        ("prefill: [{url: 'http://a', bootstrap_port: x}]\n", "prefill: Invalid bootstrap port: x."),
        ("port: 1.5\n", "port: Input should be a valid integer, got a number with a fractional part (got 1.5)"),
    ],
)
def test_a_file_that_cannot_be_used(yaml_file: Path, text: str, message: str) -> None:
    yaml_file.write_text(text)
    (line,) = problems(config=str(yaml_file))
    assert line.startswith(f"{yaml_file}: ")
    assert message in line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert problems(config=str(tmp_path / "none.yaml")) == [f"{tmp_path / 'none.yaml'}: No such file or directory"]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(["http://a:1", "http://a:1 8998"], []), (["http://a:1"], ["http://a:1/"]), ([], ["http://a", "http://A:80"])],
)
def test_a_worker_is_given_once(prefill: list[str], decode: list[str]) -> None:
    (line,) = problems({"prefill": prefill, "decode": decode})
    assert line.endswith("is given more than once (--prefill, --decode)")


def test_listening_ports_differ() -> None:
    assert problems({"port": "9901"}) == ["--port and --envoy-admin-port cannot both be 9901"]
    assert load({"port": "9901", "no_envoy": True}).port == 9901
    assert load({"port": "0", "envoy_admin_port": "0", "prometheus_port": "0"}).port == 0


def test_a_default_that_cannot_be_derived_is_named() -> None:
    assert problems({"extproc_address": "h:65535"}) == [
        "--ads-address (its default): 'h:65536': the port must be between 0 and 65535"
    ]


def test_a_socket_path_that_the_kernel_would_refuse() -> None:
    (line,) = problems({"run_dir": f"/{'x' * 100}"})
    assert line.startswith("--extproc-address (its default): A unix socket's path must not be longer than 107 bytes")


def test_unknown_fields_of_the_model_are_refused() -> None:
    unknown: dict[str, Any] = {"prot": 1}
    with pytest.raises(ValidationError):
        Settings(**unknown)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"control_plane_api_keys": ["a:A:admin"]}, "--control-plane-api-keys: Must be id:name:admin|user:key"),
        (
            {"control_plane_api_keys": ["a:A:root:s3cret"]},
            "--control-plane-api-keys: Must be id:name:admin|user:key: the",
        ),
        (
            {"control_plane_api_keys": ["a::user:s3cret", "a::user:s4cret"]},
            "--control-plane-api-keys: the id 'a' is given more than once, or reserved",
        ),
        ({"control_plane_api_keys": ["api-key::user:s3cret"]}, "--control-plane-api-keys: the id 'api-key' is given"),
        (
            {"control_plane_api_keys": ["a::user:s3cret", "b::admin:s3cret"]},
            "--control-plane-api-keys: each must have a key of its own, which is not --api-key either",
        ),
        (
            {"control_plane_api_keys": ["a::user:s3cret"], "api_key": "s3cret"},
            "--control-plane-api-keys: each must have",
        ),
        ({"control_plane_open": True, "api_key": "s3cret"}, "--control-plane-open is for a gateway without keys"),
    ],
)
def test_keys_of_the_control_api_that_cannot_be(flags: dict[str, object], problem: str) -> None:
    (said,) = problems(flags)
    assert said.startswith(problem)
    assert "s3cret" not in said


def test_keys_are_not_shown() -> None:
    settings = load({"control_plane_api_keys": ["a:A:admin:s3cret"], "api_key": "s4cret"})
    assert "cret" not in repr(settings)


@pytest.mark.parametrize("text", ["0", "512 512", "512,256"])
def test_boundaries_rise(text: str) -> None:
    (problem,) = problems({"cache_boundaries": text})
    assert problem.startswith("--cache-boundaries: Must be >= 1, each more than the one before")


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ({}, False),
        ({"worker_overload_protection": "true"}, True),
        ({"worker_overload_waiting_requests": "3"}, True),
        ({"worker_overload_token_usage": "0.5"}, True),
        ({"worker_overload_token_usage": "0.5", "worker_overload_protection": "false"}, False),
    ],
)
def test_a_limit_switches_overload_protection_on(given: dict[str, object], *, on: bool) -> None:
    assert load(given).worker_overload_protection is on


@pytest.mark.parametrize("share", ["0", "1.1", "-0.5", "nan"])
def test_a_limit_of_usage_is_a_share(share: str) -> None:
    assert problems({"worker_overload_token_usage": share})


def test_overload_protection_needs_somebody_to_ask() -> None:
    (problem,) = problems({"worker_overload_protection": "true", "disable_load_monitoring": "true"})
    assert "--disable-load-monitoring" in problem


def test_cached_tokens_are_known_to_cache_aware_alone() -> None:
    (problem,) = problems({"pd_min_uncached_tokens": "7", "decode_policy": "round_robin"})
    assert "--decode-policy cache_aware" in problem


def test_where_kv_events_are() -> None:
    assert load().kv_event_source == "off"
    both = load({"kv_event_source": "tcp://*:5557", "kv_event_replay": "tcp://10.0.0.1:5558"})
    assert both.kv_event_replay == "tcp://10.0.0.1:5558"
    for wrong in ("on", "5557", "http://a:1", "tcp://*:0", "tcp://*:65536", "tcp://a b:1", "ipc:///x"):
        (problem,) = problems({"kv_event_source": wrong})
        assert "tcp://HOST:PORT" in problem
    (problem,) = problems({"kv_event_source": "auto", "kv_event_replay": "tcp://*:5558"})
    assert "--kv-event-replay" in problem


def test_what_envoy_tells_needs_a_known_admin_port() -> None:
    with pytest.raises(SettingsError, match="--envoy-status-port"):
        load({"envoy_status_port": "9902", "envoy_admin_port": "0"})
    with pytest.raises(SettingsError, match="cannot both be 9902"):
        load({"envoy_status_port": "9902", "port": "9902"})
