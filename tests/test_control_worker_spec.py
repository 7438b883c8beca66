"""``POST /workers`` bodies: what is accepted, and what an error says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from extproc.control.worker_spec import SpecError, parse_worker_spec
from extproc.workers import registration_body
from extproc.workers.kv_config import KvConfig
from extproc.workers.registration import as_registration, registration
from extproc.workers.spec import HealthOverrides, HttpPool, Overload, Resilience, WorkerSpec
from extproc.workers.worker import MOONCAKE, NIXL, Role, WorkerUrl

LEAST: dict[str, Any] = {"url": "http://w:8000", "worker_type": "decode"}


def parsed(**fields: Any) -> WorkerSpec:
    return parse_worker_spec(orjson.dumps(LEAST | fields))


def problem(body: bytes | dict[str, Any]) -> str:
    with pytest.raises(SpecError) as refusal:
        parse_worker_spec(body if isinstance(body, bytes) else orjson.dumps(body))
    return str(refusal.value)


def test_the_least() -> None:
    assert parsed() == WorkerSpec(WorkerUrl("http", "w", 8000), Role.DECODE)


def test_everything() -> None:
    spec = parsed(
        worker_type="prefill",
        connection_mode="http",
        runtime_type="sglang",
        models=[{"id": "m", "context_length": 4096, "anything": [1]}],
        labels={"zone": "a"},
        priority=10,
        cost=2,
        api_key="k",
        bootstrap_port=8999,
        max_connection_attempts=3,
        health={
            "timeout_secs": 1,
            "check_interval_secs": 2.5,
            "success_threshold": 1,
            "failure_threshold": 4,
            "disable_health_check": False,
            "drain_settle_secs": 0,
        },
        resilience={
            "cb_failure_threshold": 5,
            "cb_success_threshold": 2,
            "cb_timeout_secs": 30,
            "cb_window_secs": 60.5,
            "disable_circuit_breaker": True,
            "capacity_status_codes": [429, 503],
        },
        overload={"waiting_requests": 8, "token_usage": 0.8},
        load_monitor_interval_secs=3,
        dp_size=2,
    )
    assert spec == WorkerSpec(
        WorkerUrl("http", "w", 8000),
        Role.PREFILL,
        cards=({"id": "m", "context_length": 4096, "anything": [1]},),
        bootstrap_port=8999,
        api_key="k",
        priority=10,
        cost=2.0,
        labels={"zone": "a", "dp_size": "2"},
        runtime="sglang",
        health=HealthOverrides(1, 2.5, 1, 4, disable_health_check=False, drain_settle_secs=0),
        resilience=Resilience(5, 2, 30, 60.5, disable_circuit_breaker=True, capacity_status_codes=(429, 503)),
        overload=Overload(8, 0.8),
        load_monitor_interval_secs=3,
        max_connection_attempts=3,
    )
    assert spec.model_ids == ("m",)


def test_the_peers_alias_and_nulls() -> None:
    assert parsed(runtime="sglang").runtime == "sglang"
    assert parsed(runtime_type="unspecified").runtime is None
    assert parsed(api_key=None, bootstrap_port=None, kv_role=None) == parsed()


def test_how_the_cache_is_moved() -> None:
    spec = parsed(
        worker_type="prefill",
        runtime="vllm",
        kv_connector="MooncakeConnector",
        kv_role="kv_producer",
        kv_engine_id="e",
        bootstrap_port=8999,
    )
    assert (spec.kv, spec.bootstrap_port, spec.runtime) == (
        KvConfig("MooncakeConnector", "kv_producer", "e"),
        8999,
        "vllm",
    )


def test_labels_of_the_same_names_are_lifted_and_the_field_wins() -> None:
    labels = {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_both",
        "kv_engine_id": "e",
        "bootstrap_port": "8999",
        "zone": "a",
    }
    spec = parsed(worker_type="prefill", labels=labels)
    assert (spec.kv, spec.bootstrap_port) == (KvConfig("MooncakeConnector", "kv_both", "e"), 8999)
    assert spec.labels == {"zone": "a"}
    won = parsed(worker_type="prefill", labels=labels, kv_engine_id="f", bootstrap_port=None)
    assert (won.kv.engine_id, won.bootstrap_port) == ("f", 8999)


def test_short_names_of_connectors() -> None:
    assert parsed(kv_connector="nixl").kv == KvConfig("NixlConnector")
    assert parsed(labels={"kv_connector": "Mooncake"}).kv == KvConfig("MooncakeConnector")


def test_the_document_has_every_field() -> None:
    text = (Path(__file__).parent.parent / "docs/behaviour.md").read_text()
    table = text.split("## Registration\n")[1].split("\n\n`bootstrap_port`")[0]
    names = {name for row in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert names == {*registration_body.Body.model_fields, "runtime"}


@pytest.mark.parametrize("text", [False, True], ids=["object", "text"])
def test_the_engines_own_transfer_configuration(text: bool) -> None:  # noqa: FBT001 - a parameter
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            ]
        },
    }
    spec = parsed(kv_transfer_config=orjson.dumps(config).decode() if text else config)
    assert spec.kv == KvConfig("NixlConnector", "kv_both")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON syntax error: "),
        (b"{", "JSON syntax error: "),
        (b"[]", "Invalid JSON data: expected an object"),
        (b"{}", "Invalid JSON data: missing field `url`"),
        (LEAST | {"url": 7}, "Invalid JSON data: url: expected a valid string"),
        (LEAST | {"url": ""}, "Invalid value for field 'url': not a url - URL cannot be empty"),
        (
            LEAST | {"url": "w:8000"},
            (
                "Invalid value for field 'url': not a url - "
                "URL must start with a lowercase http://, https://, grpc://, or grpcs:// scheme"
            ),
        ),
        (
            LEAST | {"url": "ipc://w"},
            "Invalid value for field 'url': not a url - ipc:// workers are not served; expected one of http://",
        ),
        (
            LEAST | {"worker_type": "banana"},
            ("Invalid JSON data: worker_type: unknown variant 'banana', expected one of 'prefill', 'decode', "),
        ),
        (
            {"url": "http://w:1"},
            "Invalid JSON data: missing field `worker_type`: expected `prefill`, `decode`, `regular` or `encode`",
        ),
        (
            LEAST | {"connection_mode": "zmq"},
            "connection_mode: `zmq` is refused: workers over ZeroMQ are not served; expected http or grpc",
        ),
        (LEAST | {"connection_mode": "grpc"}, "connection_mode is grpc, but the URL's scheme is http"),
        (
            LEAST | {"url": "grpcs://w:1", "connection_mode": "http"},
            "connection_mode is http, but the URL's scheme is grpcs",
        ),
        (
            LEAST | {"runtime_type": "tokenspeed"},
            "runtime_type is tokenspeed, which is reached over gRPC, but the scheme is http",
        ),
        (
            LEAST | {"url": "grpc://w:1", "runtime_type": "tokenspeed", "kv_connector": "nixl"},
            "kv_connector NixlConnector: TokenSpeed workers have none",
        ),
        (
            LEAST | {"runtime_type": "mlx"},
            "runtime_type: `mlx` is refused: its handoff is not known; give sglang, vllm or tokenspeed if the engine",
        ),
        (LEAST | {"priority": "3"}, "Invalid JSON data: priority: expected a valid integer"),
        (LEAST | {"priority": True}, "Invalid JSON data: priority: expected a valid integer"),
        (LEAST | {"cost": "x"}, "Invalid JSON data: cost: expected a valid number"),
        (LEAST | {"labels": {"a": 1}}, "Invalid JSON data: labels.a: expected a valid string"),
        (LEAST | {"labels": None}, "Invalid JSON data: labels: expected a valid dictionary"),
        (LEAST | {"models": ["m"]}, "Invalid JSON data: models.0: expected an object, with an `id` at least"),
        (LEAST | {"health": 3}, "Invalid JSON data: health: expected an object"),
        (LEAST | {"models": [{"name": "m"}]}, "Invalid JSON data: missing field `models.0.id`"),
        (LEAST | {"bootstrap_port": 0}, "Invalid JSON data: bootstrap_port: "),
        (LEAST | {"bootstrap_port": 65536}, "Invalid JSON data: bootstrap_port: expected less than or equal to 65535"),
        (LEAST | {"health": {"timeout_secs": 0}}, "Invalid JSON data: health.timeout_secs: "),
        (
            LEAST | {"health": {"timeout": 1}},
            "Invalid JSON data: unknown field `health.timeout`; did you mean `timeout_secs`?",
        ),
        (
            LEAST | {"bootstrap_prot": 1},
            "Invalid JSON data: unknown field `bootstrap_prot`; did you mean `bootstrap_port`?",
        ),
        (LEAST | {"zone": None}, "Invalid JSON data: unknown field `zone`"),
        (LEAST | {"kv_connector": ""}, "Invalid JSON data: kv_connector: "),
        (LEAST | {"kv_connector": "None"}, "kv_connector 'None' is no connector's name: leave it out"),
        (LEAST | {"labels": {"kv_connector": "null"}}, "kv_connector 'null' is no connector's name: leave it out"),
        (LEAST | {"kv_role": "both"}, "Invalid JSON data: kv_role: unknown variant 'both', expected one of "),
        (LEAST | {"labels": {"kv_role": "both"}}, "Invalid JSON data: kv_role: unknown variant 'both'"),
        (LEAST | {"labels": {"bootstrap_port": "x"}}, "Invalid JSON data: bootstrap_port: expected a valid integer"),
        (LEAST | {"kv_role": "kv_producer"}, "registered as decode, but kv_role is kv_producer"),
        (
            LEAST | {"kv_connector": "MultiConnector"},
            (
                "MultiConnector does not say which of its connectors moves the cache: "
                "give that one's name, or the engine's kv_transfer_config"
            ),
        ),
        (
            LEAST | {"labels": {"kv_connector": "NixlPushConnector"}},
            "NixlPushConnector: its handoff is not supported (requests must name the transfer",
        ),
        (LEAST | {"kv_transfer_config": []}, "Invalid JSON data: kv_transfer_config"),
        (LEAST | {"kv_transfer_config": "{"}, "kv_transfer_config: not JSON"),
        (
            LEAST | {"runtime_type": "sglang", "kv_connector": "NixlConnector"},
            "kv_connector NixlConnector: SGLang workers have none",
        ),
        (LEAST | {"runtime": "trtllm"}, "runtime: `trtllm` is refused: "),
        (
            LEAST | {"runtime_type": "max"},
            "Invalid JSON data: runtime_type: unknown variant 'max', expected one of 'unspecified', 'sglang', 'vllm'",
        ),
        (LEAST | {"connection_mode": "tcp"}, "Invalid JSON data: connection_mode: unknown variant 'tcp', expected"),
        (LEAST | {"dp_rank": 1, "dp_size": 2}, "`dp_rank` is refused: ranks are not registered one by one"),
        (LEAST | {"dp_base_url": "http://w:1"}, "`dp_base_url` is refused: "),
        (LEAST | {"dp_size": 2, "labels": {"dp_size": "3"}}, "dp_size is 2, but the label dp_size is '3'"),
        (LEAST | {"dp_size": 0}, "Invalid JSON data: dp_size: "),
        (LEAST | {"resilience": {"cb_timeout": 1}}, "Invalid JSON data: unknown field `resilience.cb_timeout`; did"),
        (LEAST | {"resilience": {"max_retries": "1"}}, "Invalid JSON data: resilience.max_retries: "),
        (LEAST | {"resilience": {"capacity_status_codes": [200]}}, "Invalid JSON data: resilience.capacity_status_co"),
        (LEAST | {"overload": {"token_usage": 1.5}}, "Invalid JSON data: overload.token_usage: "),
        (LEAST | {"http_pool": {"timeout_secs": -1}}, "Invalid JSON data: http_pool.timeout_secs: "),
        (LEAST | {"http_pool": {"size": 1}}, "Invalid JSON data: unknown field `http_pool.size`"),
        (LEAST | {"http_pool": 1}, "Invalid JSON data: http_pool: "),
        (LEAST | {"bootstrap_host": "a b"}, "Invalid JSON data: bootstrap_host: "),
        (LEAST | {"bootstrap_host": "::x"}, "Invalid JSON data: bootstrap_host: "),
        (LEAST | {"bootstrap_host": "1:2"}, "bootstrap_host: '1:2' is neither a name nor an IP address"),
        (LEAST | {"kv_block_size": 0}, "Invalid JSON data: kv_block_size: "),
        (
            LEAST | {"multimodal_tensor_transport": "usb"},
            "Invalid JSON data: multimodal_tensor_transport: unknown vari",
        ),
        (LEAST | {"multimodal_shm_min_bytes": -1}, "Invalid JSON data: multimodal_shm_min_bytes: "),
        (LEAST | {"status": "ready"}, "Invalid JSON data: unknown field `status`: it is only shown"),
        (
            LEAST | {"models": [{"id": "m", "x": orjson.loads("[" * 70 + "]" * 70)}]},
            "Invalid JSON data: nested deeper than 64",
        ),
        (LEAST | {"dp_base_url": "http://a"}, "`dp_base_url` is refused: ranks are not registered one by one"),
        (LEAST | {"dp_size": 1025}, "Invalid JSON data: dp_size: "),
    ],
)
def test_errors_name_the_field(body: bytes | dict[str, Any], message: str) -> None:
    assert problem(body).startswith(message)


NIXL_ID = "kv_engine_id is of no effect: only prefill workers with MooncakeConnector need one"
DECODE_PORT = "bootstrap_port is of no effect: only prefill workers have a bootstrap server"


@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({"worker_type": "prefill", "kv_connector": "MooncakeConnector", "kv_engine_id": "e", "bootstrap_port": 1}, ()),
        ({"worker_type": "prefill", "bootstrap_port": 1}, ()),
        ({"worker_type": "prefill", "kv_connector": "NixlConnector", "kv_engine_id": "e"}, (NIXL_ID,)),
        ({"worker_type": "prefill", "labels": {"kv_engine_id": "e"}}, (NIXL_ID,)),
        (
            {"worker_type": "prefill", "kv_connector": "NixlConnector", "bootstrap_port": 1},
            ("bootstrap_port is of no effect with NixlConnector",),
        ),
        (
            {"kv_connector": "MooncakeConnector", "kv_engine_id": "e", "bootstrap_port": 1},
            (NIXL_ID, DECODE_PORT),
        ),
        # The engine's whole configuration may be given, whatever of it is needed.
        ({"kv_transfer_config": {"kv_connector": "NixlConnector", "engine_id": "e"}}, ()),
    ],
)
def test_what_changes_nothing_is_known(fields: dict[str, Any], idle: tuple[str, ...]) -> None:
    spec = parsed(**fields)
    assert spec.idle(spec.kv.connector) == idle


def test_what_changes_nothing_is_told_by_the_connector_that_the_worker_has() -> None:
    fields = {"url": "grpc://w:1", "worker_type": "prefill", "kv_engine_id": "e", "bootstrap_port": 1}
    assert parsed(**fields).idle(None) == ()
    assert parsed(**fields).idle(MOONCAKE) == ()
    assert parsed(**fields).idle("") == (NIXL_ID,)
    assert parsed(**fields).idle(NIXL) == (NIXL_ID, "bootstrap_port is of no effect with NixlConnector")
    assert parsed(**fields | {"worker_type": "decode"}).idle(None) == (NIXL_ID, DECODE_PORT)


def test_all_errors_are_told_at_once() -> None:
    said = problem({"worker_type": "decode", "priority": "x", "zone": 1})
    assert "missing field `url`" in said
    assert "priority: expected a valid integer" in said
    assert "unknown field `zone`" in said


def test_an_api_key_is_not_repeated_in_an_error() -> None:
    assert "s3cret" not in problem(LEAST | {"api_key": ["s3cret"], "connection_mode": "zmq"})


# What a registration of the peer's may say, besides what is read above.
PEERS: dict[str, Any] = {
    "http_pool": {
        "pool_max_idle_per_host": 8,
        "pool_idle_timeout_secs": 50,
        "timeout_secs": 30,
        "connect_timeout_secs": 10,
    },
    "kv_block_size": 16,
    "resilience": {
        "max_retries": 2,
        "initial_backoff_ms": 10,
        "max_backoff_ms": 100,
        "backoff_multiplier": 1.5,
        "jitter_factor": 0.1,
        "disable_retry": False,
        "retryable_status_codes": [503],
    },
    "multimodal_tensor_transport": "shm",
    "multimodal_shm_min_bytes": 0,
    "bootstrap_host": "w2",
}


def test_what_the_peer_takes_is_taken_and_what_changes_nothing_is_told() -> None:
    spec = parsed(worker_type="prefill", **PEERS)
    names = {f"{group}.{name}" for group in ("http_pool", "resilience") for name in PEERS[group]}
    names |= {"multimodal_tensor_transport", "multimodal_shm_min_bytes"}
    assert {words.split(" ")[0] for words in spec.unused} == names
    assert (spec.kv_block_size, spec.bootstrap_host, spec.idle("")) == (16, "w2", ())
    assert spec.resilience == Resilience(
        max_retries=2,
        initial_backoff_ms=10,
        max_backoff_ms=100,
        backoff_multiplier=1.5,
        jitter_factor=0.1,
        disable_retry=False,
        retryable_status_codes=(503,),
    )
    assert spec.http_pool == HttpPool(8, 50, 30, 10)
    shown = as_registration(spec)
    assert {name: shown[name] for name in PEERS} == PEERS
    assert registration(shown) == spec


@pytest.mark.parametrize(
    ("given", "host"),
    [("W", ""), ("other", "other"), ("10.0.0.1", "10.0.0.1"), ("::1", "[::1]"), ("[::1]", "[::1]")],
)
def test_the_host_of_the_bootstrap_server(given: str, host: str) -> None:
    assert parsed(worker_type="prefill", bootstrap_host=given).bootstrap_host == host


@pytest.mark.parametrize("role", ["regular", "encode"])
def test_workers_that_get_no_requests(role: str) -> None:
    spec = parsed(worker_type=role, bootstrap_port=8995)
    assert (spec.role, bool(spec.unserved)) == (Role(role), True)
    # With the peer, encode workers have a bootstrap server.
    assert bool(spec.idle("")) is (role == "regular")
    assert not parsed().unserved


REFUSED = {"dp_base_url": "http://w:1", "dp_rank": 1, "provider": "openai", "zmq_handshake_address": "tcp://w:1"}


def test_what_cannot_be_done_here_is_refused_by_name() -> None:
    assert set(re.findall(r"`([\w.]+)` is refused: ", problem(LEAST | REFUSED))) == set(REFUSED)


def test_a_rank_that_is_the_whole_server_says_nothing() -> None:
    assert parsed(dp_base_url=LEAST["url"], dp_rank=0, dp_size=1) == parsed(dp_size=1)
    assert "`dp_rank` is refused" in problem(LEAST | {"dp_rank": 0, "dp_size": 2})
    assert "`dp_rank` is refused" in problem(LEAST | {"dp_rank": False})


def test_null_says_nothing() -> None:
    assert parsed(**dict.fromkeys((REFUSED.keys() | PEERS.keys()) - {"resilience"})) == parsed()
    assert parsed(http_pool={"timeout_secs": None}, resilience={"max_retries": None, "cb_timeout_secs": 1}) == parsed(
        resilience={"cb_timeout_secs": 1}
    )


def test_what_is_kept_and_changes_nothing_is_told() -> None:
    said = parsed(priority=1, cost=2, max_connection_attempts=3).unused
    assert [words.split(" ")[0] for words in said] == [
        "priority",
        "cost",
        "max_connection_attempts",
    ]
    assert parsed().unused == ()
