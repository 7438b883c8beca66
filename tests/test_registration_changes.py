"""A registration that is changed: what stays, what goes back to its default, and what cannot change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.workers.registration import RegistrationError, as_registration, patched, registration
from extproc.workers.spec import HealthOverrides, Overload, Resilience, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl

FULL: dict[str, Any] = {
    "url": "http://w:8000",
    "worker_type": "prefill",
    "runtime_type": "vllm",
    "models": [{"id": "m", "context_length": 9}],
    "labels": {"zone": "a", "rack": "1"},
    "priority": 7,
    "cost": 2.0,
    "api_key": "k",
    "bootstrap_port": 8999,
    "kv_connector": "MooncakeConnector",
    "kv_role": "kv_producer",
    "kv_engine_id": "e",
    "max_connection_attempts": 3,
    "health": {"timeout_secs": 1.0, "failure_threshold": 4},
    "resilience": {"cb_timeout_secs": 3.0, "capacity_status_codes": [429]},
    "overload": {"waiting_requests": 8},
    "load_monitor_interval_secs": 5.0,
}


def full() -> WorkerSpec:
    return registration(FULL)


def test_a_registration_can_be_told_from_what_it_says() -> None:
    assert as_registration(full()) == FULL
    assert as_registration(WorkerSpec(WorkerUrl("http", "w", 1), Role.DECODE)) == {
        "url": "http://w:1",
        "worker_type": "decode",
        "priority": 50,
        "cost": 1.0,
    }


@given(st.sets(st.sampled_from(sorted(FULL.keys() - {"url", "worker_type"}))))
def test_whatever_is_given_is_there_again(left_out: set[str]) -> None:
    body = {name: value for name, value in FULL.items() if name not in left_out}
    spec = registration(body)
    assert registration(as_registration(spec)) == spec


@pytest.mark.parametrize("name", sorted(FULL.keys() - {"url", "worker_type"}))
def test_a_change_of_one_field_loses_no_other(name: str) -> None:
    """The peer's PATCH forgets bootstrap port and connector."""
    value = {"priority": 1, "cost": 3.0, "kv_role": "kv_both"}.get(name, FULL[name])
    changed = patched(full(), {name: value})
    assert as_registration(changed) == FULL | {name: value}
    assert changed.engine_id_named


@pytest.mark.parametrize("name", sorted(FULL.keys() - {"url", "worker_type"}))
def test_null_takes_a_field_back_to_its_default(name: str) -> None:
    rest = {field: value for field, value in FULL.items() if field != name}
    changed = patched(full(), {name: None})
    assert as_registration(changed) == {"priority": 50, "cost": 1.0} | rest


def test_objects_are_merged() -> None:
    changed = patched(
        full(),
        {
            "labels": {"zone": "b", "rack": None, "host": "h"},
            "health": {"timeout_secs": None, "success_threshold": 1},
            "resilience": {"cb_failure_threshold": 2},
            "overload": {"token_usage": 0.5},
        },
    )
    assert changed.labels == {"zone": "b", "host": "h"}
    assert changed.health == HealthOverrides(success_threshold=1, failure_threshold=4)
    assert changed.resilience == Resilience(2, cb_timeout_secs=3.0, capacity_status_codes=(429,))
    assert changed.overload == Overload(8, 0.5)


def test_labels_that_mean_fields_are_lifted_here_too() -> None:
    changed = patched(full(), {"labels": {"bootstrap_port": "9000", "kv_engine_id": "f"}})
    assert (changed.bootstrap_port, changed.kv.engine_id, changed.labels) == (9000, "f", {"zone": "a", "rack": "1"})


def test_ranks_are_a_label() -> None:
    two = patched(full(), {"dp_size": 2})
    assert two.labels["dp_size"] == "2"
    assert patched(two, {"dp_size": 4}).labels["dp_size"] == "4"
    assert "dp_size" not in patched(two, {"dp_size": None}).labels


def test_the_engines_own_configuration_says_all_of_it_anew() -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    changed = patched(full(), {"kv_transfer_config": config})
    assert (changed.kv.connector, changed.kv.role, changed.kv.engine_id) == ("NixlConnector", "kv_both", "")
    assert not changed.engine_id_named


def test_the_alias_wins_over_what_was() -> None:
    spec = registration({"url": "http://w:1", "worker_type": "decode", "runtime_type": "sglang"})
    assert patched(spec, {"runtime": "vllm"}).runtime == "vllm"
    assert patched(spec, {"runtime_type": "unspecified"}).runtime is None


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"url": "http://other:1"}, "`url` cannot change: DELETE the worker and register the other one"),
        ({"worker_type": "decode"}, "`worker_type` cannot change"),
        ({"prioritty": 1}, "unknown field `prioritty`; did you mean `priority`?"),
        ({"status": "ready"}, "unknown field `status`: it is only shown"),
        ({"priority": "1"}, "priority: expected a valid integer"),
        ({"health": {"timeout_secs": -1}}, "health.timeout_secs: "),
        ({"health": {"timeout": 1}}, "unknown field `health.timeout`; did you mean `timeout_secs`?"),
        ({"labels": {"zone": 1}}, "labels.zone: "),
        ({"kv_role": "kv_consumer"}, "registered as prefill, but kv_role is kv_consumer"),
        ({"runtime_type": "sglang"}, "kv_connector MooncakeConnector: SGLang workers have none"),
        ({"resilience": {"max_retries": -2}}, "resilience.max_retries: "),
        ({"provider": "openai"}, "`provider` is refused: only engines are served; leave it out"),
        ({"dp_rank": 1}, "`dp_rank` is refused"),
    ],
)
def test_what_cannot_be(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError) as refusal:
        patched(full(), patch)
    assert str(refusal.value).startswith(message)


def test_what_a_worker_is_known_by_may_be_repeated() -> None:
    assert patched(full(), {"url": "http://w:8000", "worker_type": "prefill"}) == full()
