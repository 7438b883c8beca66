"""What is said of a KV connector and its engine ids, and what of it is believed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from extproc.workers.connectors import doubt
from extproc.workers.kv_config import KvConfig, KvConfigError, kv_config
from extproc.workers.kv_engines import QueryError, agree, bootstrap_address, of_answer, of_registration, shown_id
from extproc.workers.worker import KvEngine, Role, Worker, WorkerUrl


def multi(*children: Any, **more: Any) -> dict[str, Any]:
    """The engine's --kv-transfer-config of a MultiConnector; vLLM 0.32, multi_connector.py."""
    listed = [{"kv_connector": child, "kv_role": "kv_both"} if isinstance(child, str) else child for child in children]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": listed}, **more}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, KvConfig("NixlConnector", "kv_both")),
        ({"kv_connector": "NixlPullConnector"}, KvConfig("NixlConnector")),
        ({"kv_connector": "MooncakeConnector", "engine_id": "e"}, KvConfig("MooncakeConnector", "", "e")),
        (multi("NixlConnector", "OffloadingConnector"), KvConfig("NixlConnector", "kv_both")),
        (multi("OffloadingConnector", "NixlPullConnector"), KvConfig("NixlConnector", "kv_both")),
        (
            multi("LMCacheConnectorV1", "MooncakeConnector", engine_id="e"),
            KvConfig("MooncakeConnector", "kv_both", "e"),
        ),
        (multi({"kv_connector": "NixlConnector"}, kv_role="kv_both"), KvConfig("NixlConnector", "kv_both")),
        (multi("LMCacheConnectorV1"), KvConfig("LMCacheConnectorV1", "kv_both")),
        (multi("TheirConnector"), KvConfig("TheirConnector", "kv_both")),
        (multi("NixlConnector", "TheirConnector"), KvConfig("NixlConnector", "kv_both")),
        (multi("ExampleConnector", "OffloadingConnector"), KvConfig("ExampleConnector", "kv_both")),
        (multi(multi("NixlConnector"), "OffloadingConnector"), KvConfig("NixlConnector", "kv_both")),
        (
            multi(
                "OffloadingConnector",
                multi("LMCacheMPConnector", multi({"kv_connector": "mooncake"}), kv_role="kv_producer"),
            ),
            KvConfig("MooncakeConnector", "kv_producer"),
        ),
        (
            multi(multi({"kv_connector": "NixlConnector"}), engine_id="e", kv_role="kv_producer"),
            KvConfig("NixlConnector", "kv_producer", "e"),
        ),
    ],
)
def test_the_engines_own_configuration(given: dict[str, Any], expected: KvConfig) -> None:
    assert kv_config(Role.PREFILL, KvConfig(), given) == expected
    assert kv_config(Role.PREFILL, KvConfig(), orjson.dumps(given).decode()) == expected


def test_fields_and_configuration_add_up() -> None:
    given = multi("NixlConnector")
    assert kv_config(Role.DECODE, KvConfig("MultiConnector", engine_id="e"), given) == KvConfig(
        "NixlConnector", "kv_both", "e"
    )
    assert kv_config(Role.DECODE, KvConfig("NixlPullConnector"), given).connector == "NixlConnector"
    assert kv_config(Role.DECODE, KvConfig()) == KvConfig()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nixl", "NixlConnector"),
        ("NIXL", "NixlConnector"),
        ("nixlconnector", "NixlConnector"),
        ("nixlPULLconnector", "NixlConnector"),
        ("Mooncake", "MooncakeConnector"),
        ("mooncakestoreconnector", "MooncakeStoreConnector"),
        ("TheirConnector", "TheirConnector"),
    ],
)
def test_a_connectors_other_names(name: str, expected: str) -> None:
    assert kv_config(Role.DECODE, KvConfig(name)).connector == expected
    assert kv_config(Role.DECODE, KvConfig(name), {"kv_connector": expected}).connector == expected


@pytest.mark.parametrize("name", ["", "LMCacheConnectorV1", "offloadingconnector"])
def test_of_connectors_without_fields_the_one_registered_counts_else_the_first(name: str) -> None:
    given = multi("LMCacheConnectorV1", "OffloadingConnector")
    expected = "OffloadingConnector" if name.startswith("off") else "LMCacheConnectorV1"
    assert kv_config(Role.PREFILL, KvConfig(name), given).connector == expected


def test_a_deep_wrapper_is_read_like_a_flat_one() -> None:
    given = multi("NixlConnector")
    for _ in range(5000):
        given = multi(given)
    assert kv_config(Role.PREFILL, KvConfig(), given) == KvConfig("NixlConnector", "kv_both")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "no kv_connector registered: whatever the prefill returns is relayed"),
        ("TheirConnector", "connector TheirConnector is not known: whatever the prefill returns is relayed"),
        ("NixlConnector", ""),
        ("LMCacheConnectorV1", ""),
    ],
)
def test_what_is_said_of_a_connector(name: str, expected: str) -> None:
    assert doubt(name) == expected


@pytest.mark.parametrize(
    ("role", "said", "given", "message"),
    [
        (Role.PREFILL, KvConfig("MultiConnector"), None, "give that one's name, or the engine's kv_transfer_"),
        (
            Role.PREFILL,
            KvConfig(),
            multi("NixlConnector", "MooncakeConnector"),
            "MultiConnector wraps NixlConnector and MooncakeConnector: every child gets the same kv_transfer_params",
        ),
        (Role.PREFILL, KvConfig(), multi("NixlConnector", "NixlConnector"), "wraps NixlConnector and NixlConnector"),
        (
            Role.PREFILL,
            KvConfig(),
            multi("NixlConnector", multi("OffloadingConnector", "Mooncake")),
            "MultiConnector wraps NixlConnector and MooncakeConnector: every child",
        ),
        (
            Role.PREFILL,
            KvConfig("LMCacheConnectorV1"),
            multi("LMCacheConnectorV1", "TheirConnector"),
            "wraps LMCacheConnectorV1 and TheirConnector: what TheirConnector wants of requests is not known; register",
        ),
        (
            Role.DECODE,
            KvConfig("FlexKVConnectorV1"),
            multi("LMCacheConnectorV1", "OffloadingConnector"),
            "kv_connector is FlexKVConnectorV1, but kv_transfer_config says LMCacheConnectorV1",
        ),
        (Role.DECODE, KvConfig("NixlPushConnector"), None, "NixlPushConnector: its handoff is not supported (requests"),
        (Role.DECODE, KvConfig("moriioconnector"), None, "MoRIIOConnector: its handoff is not supported (requests"),
        (Role.PREFILL, KvConfig("P2pNcclConnector"), None, "P2pNcclConnector: its handoff is not supported (requests"),
        (
            Role.PREFILL,
            KvConfig(),
            {"kv_connector": "MoRIIOConnector"},
            "MoRIIOConnector: its handoff is not supported",
        ),
        (
            Role.PREFILL,
            KvConfig(),
            multi("NixlConnector", multi("NixlPushConnector")),
            "NixlPushConnector: its handoff is not supported",
        ),
        (Role.PREFILL, KvConfig(), multi("NixlConnector", 7), "with a kv_connector each"),
        (Role.PREFILL, KvConfig(), multi("NixlConnector", multi()), "with a kv_connector each"),
        (Role.PREFILL, KvConfig(), multi(), "MultiConnector has no kv_connector_extra_config.connectors"),
        (Role.PREFILL, KvConfig(), multi({"kv_role": "kv_both"}), "with a kv_connector each"),
        (Role.PREFILL, KvConfig(), {"kv_connector": "MultiConnector"}, "has no kv_connector_extra_config.connectors"),
        (Role.PREFILL, KvConfig(), {"kv_role": "kv_both"}, "kv_transfer_config has no kv_connector"),
        (Role.PREFILL, KvConfig(), {"kv_connector": 7}, "kv_transfer_config: kv_connector is not a string"),
        (Role.PREFILL, KvConfig(), "{", "kv_transfer_config: not JSON"),
        (Role.PREFILL, KvConfig(), "[]", "kv_transfer_config: expected an object or its JSON text"),
        (
            Role.PREFILL,
            KvConfig(role="both"),
            None,
            "kv_role 'both': expected one of kv_producer, kv_consumer, kv_both",
        ),
        (Role.DECODE, KvConfig(role="kv_producer"), None, "registered as decode, but kv_role is kv_producer"),
        (Role.PREFILL, KvConfig(role="kv_consumer"), None, "registered as prefill, but kv_role is kv_consumer"),
        (
            Role.DECODE,
            KvConfig(),
            multi({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, kv_role="kv_both"),
            "registered as decode, but kv_role is kv_producer",
        ),
        (
            Role.PREFILL,
            KvConfig("MooncakeConnector"),
            multi("NixlConnector"),
            "kv_connector is MooncakeConnector, but kv_transfer_config says NixlConnector",
        ),
    ],
)
def test_what_cannot_be(role: Role, said: KvConfig, given: object, message: str) -> None:
    with pytest.raises(KvConfigError) as refusal:
        kv_config(role, said, given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, [(0, "e")]),
        ({"dp_size": "1"}, [(0, "e")]),  # one core: vLLM appends nothing
        ({"dp_size": "2"}, [(0, "e_dp0"), (1, "e_dp1")]),
        ({"dp_size": "many"}, [(0, "e")]),
    ],
)
def test_ids_of_a_registration(labels: dict[str, str], expected: list[tuple[int, str]]) -> None:
    assert list(of_registration("e", labels)) == expected
    assert of_registration("", labels) == ()


def test_ids_of_an_answer_are_in_order_of_the_ranks() -> None:
    body = {"10": {"engine_id": "k", "worker_addr": {}}, "2": {"engine_id": "b"}}
    assert of_answer(orjson.dumps(body)).engines == (KvEngine(2, "b"), KvEngine(10, "k"))
    assert of_answer(b"{}") == ((), {})


def test_addresses_of_an_answer_are_by_engine() -> None:
    body = {"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://h:1"}}}}
    assert of_answer(orjson.dumps(body)).addresses == {"e": {"0": {"0": "tcp://h:1"}}}


@pytest.mark.parametrize(
    ("url", "port", "expected"),
    [
        ("http://h:1", 7, "http://h:7"),
        ("https://h:1", None, "http://h:8998"),
        ("http://[::1]:1", 7, "http://[::1]:7"),
    ],
)
def test_what_a_decode_is_told_of_a_bootstrap_server(url: str, port: int | None, expected: str) -> None:
    prefill = Worker("id", WorkerUrl.parse(url), Role.PREFILL, bootstrap_port=port)
    assert bootstrap_address(prefill) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b'{"x":{"engine_id":"e"}}', b'{"0":"e"}', b'{"0":{"engine_id":""}}'])
def test_an_answer_that_makes_no_sense(body: bytes) -> None:
    with pytest.raises(QueryError):
        of_answer(body)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([(0, "e")], True),
        ([(0, "e_dp0"), (1, "e_dp1")], True),
        ([(3, "e_dp3")], True),
        ([(0, "f")], False),
        ([(0, "e_dp0"), (1, "f_dp1")], False),
        ([(0, "e_dp1")], False),
    ],
)
def test_whether_registration_and_server_agree(asked: list[tuple[int, str]], expected: bool) -> None:  # noqa: FBT001
    engines = tuple(KvEngine(*one) for one in asked)
    assert agree("e", of_registration("e", {}), engines) is expected


@pytest.mark.parametrize(
    ("ids", "shown"),
    [((), ""), (("e",), "e"), (("e_dp0",), "e_dp0"), (("e_dp0", "e_dp1"), "e"), (("a", "b"), "a, b")],
)
def test_one_text_for_all_ids(ids: tuple[str, ...], shown: str) -> None:
    assert shown_id(tuple(KvEngine(rank, name) for rank, name in enumerate(ids))) == shown
