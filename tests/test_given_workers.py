"""Workers given at start: what flags say of all of a role, and what a worker's own mapping says."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.service import _given
from extproc.sources import SettingsError, load_settings
from extproc.workers.kv_config import KvConfig
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import MOONCAKE, NIXL


def given(flags: dict[str, object], file: Path | None = None) -> list[WorkerSpec]:
    return list(_given(load_settings(flags, {}, None if file is None else str(file))))


def test_a_flag_is_for_workers_that_say_nothing_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "prefill:\n"
        "  - http://a:1 8998\n"
        "  - {url: 'http://b:1', kv_connector: nixl, api_key: own, labels: {dp_size: '2'}}\n"
    )
    flags: dict[str, object] = {"prefill_kv_connector": "mooncake", "api_key": "common", "decode": ["http://d:1"]}
    a, b, d = given(flags, file)
    assert (a.kv, a.bootstrap_port, a.api_key, a.labels) == (KvConfig(MOONCAKE), 8998, "common", {})
    assert (b.kv, b.api_key, b.labels) == (KvConfig(NIXL), "own", {"dp_size": "2"})
    assert (d.kv, d.api_key) == (KvConfig(), "common")


def test_engine_ids_by_flag_are_named() -> None:
    flags: dict[str, object] = {"prefill": ["http://a:1"], "prefill_kv_engine_id": ["e"]}
    (mooncake,) = given(flags | {"prefill_kv_connector": "mooncake"})
    (nixl,) = given(flags | {"prefill_kv_connector": "nixl"})
    assert (mooncake.kv.engine_id, mooncake.idle(MOONCAKE)) == ("e", ())
    assert nixl.idle(NIXL) == ("kv_engine_id is of no effect: only prefill workers with MooncakeConnector need one",)


def test_a_mapping_as_json_in_the_environment_and_by_flag() -> None:
    worker = '{"url": "http://b:1", "kv_connector": "NixlConnector", "labels": {"zone": "a"}}'
    settings = load_settings(
        {"decode": [worker.replace("//b", "//d")]}, {"PD_EXTPROC_PREFILL": f"http://a:1 8998; {worker}"}
    )
    a, b, d = _given(settings)
    assert (a.url.host, a.bootstrap_port) == ("a", 8998)
    assert (b.url.host, b.kv, b.labels) == ("b", KvConfig(NIXL), {"zone": "a"})
    assert (d.url.host, d.kv, d.labels) == ("d", KvConfig(NIXL), {"zone": "a"})


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"url": }', "not valid JSON"), ('{"kv_connector": "nixl"}', "expected URL"), ('{"url": "b:1"}', "b:1")],
)
def test_a_mapping_that_is_none(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings({}, {"PD_EXTPROC_PREFILL": text})
