"""``POST /workers`` bodies: what is accepted, and what an error says."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from extproc.control.worker_spec import SpecError, parse_worker_spec
from extproc.workers.spec import HealthOverrides, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl

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
    )
    assert spec == WorkerSpec(
        WorkerUrl("http", "w", 8000),
        Role.PREFILL,
        cards=({"id": "m", "context_length": 4096, "anything": [1]},),
        bootstrap_port=8999,
        api_key="k",
        priority=10,
        cost=2.0,
        labels={"zone": "a"},
        runtime="sglang",
        health=HealthOverrides(1, 2.5, 1, 4, disable_health_check=False, drain_settle_secs=0),
    )
    assert spec.model_ids == ("m",)


def test_the_peers_alias_and_nulls() -> None:
    assert parsed(runtime="sglang").runtime == "sglang"
    assert parsed(runtime_type="unspecified").runtime is None
    assert parsed(api_key=None, bootstrap_port=None, kv_role=None) == parsed()


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
                "URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme"
            ),
        ),
        (
            LEAST | {"url": "grpc://w:1"},
            "Invalid value for field 'url': not a url - grpc:// workers are not served yet; use http:// or https://",
        ),
        (
            LEAST | {"worker_type": "banana"},
            (
                "Invalid JSON data: worker_type: unknown variant 'banana', "
                "expected one of 'prefill', 'decode', 'regular' or 'encode'"
            ),
        ),
        (
            {"url": "http://w:1"},
            (
                "Invalid JSON data: worker_type: `regular` workers are not served here; "
                "expected one of `prefill`, `decode`"
            ),
        ),
        (LEAST | {"worker_type": "encode"}, "Invalid JSON data: worker_type: `encode` workers are not served here"),
        (
            LEAST | {"connection_mode": "grpc"},
            "Invalid JSON data: connection_mode: unknown variant 'grpc', expected one of 'http'",
        ),
        (
            LEAST | {"runtime_type": "mlx"},
            "Invalid JSON data: runtime_type: unknown variant 'mlx', expected one of 'unspecified', 'sglang' or 'vllm'",
        ),
        (LEAST | {"priority": "3"}, "Invalid JSON data: priority: expected a valid integer"),
        (LEAST | {"priority": True}, "Invalid JSON data: priority: expected a valid integer"),
        (LEAST | {"cost": "x"}, "Invalid JSON data: cost: expected a valid number"),
        (LEAST | {"labels": {"a": 1}}, "Invalid JSON data: labels.a: expected a valid string"),
        (LEAST | {"labels": None}, "Invalid JSON data: labels: expected a valid dictionary"),
        (LEAST | {"models": ["m"]}, "Invalid JSON data: models.0: "),
        (LEAST | {"models": [{"name": "m"}]}, "Invalid JSON data: missing field `models.0.id`"),
        (LEAST | {"bootstrap_port": 0}, "Invalid JSON data: bootstrap_port: "),
        (LEAST | {"bootstrap_port": 65536}, "Invalid JSON data: bootstrap_port: "),
        (LEAST | {"health": {"timeout_secs": 0}}, "Invalid JSON data: health.timeout_secs: "),
        (LEAST | {"health": {"timeout": 1}}, "Invalid JSON data: unknown field `health.timeout`"),
        (LEAST | {"bootstrap_prot": 1}, "Invalid JSON data: unknown field `bootstrap_prot`"),
        (LEAST | {"zone": None}, "Invalid JSON data: unknown field `zone`"),
        (
            LEAST | {"dp_rank": 1, "dp_size": 2},
            "Invalid JSON data: not supported yet: `dp_rank`, `dp_size`",
        ),
    ],
)
def test_errors_name_the_field(body: bytes | dict[str, Any], message: str) -> None:
    assert problem(body).startswith(message)


def test_all_errors_are_told_at_once() -> None:
    said = problem({"worker_type": "decode", "priority": "x", "zone": 1})
    assert "missing field `url`" in said
    assert "priority: expected a valid integer" in said
    assert "unknown field `zone`" in said


def test_an_api_key_is_not_repeated_in_an_error() -> None:
    assert "s3cret" not in problem(LEAST | {"api_key": ["s3cret"], "connection_mode": "zmq"})
