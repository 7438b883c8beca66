"""vLLM workers: registered at start or while the gateway runs, with what their servers do not say."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
from http_client import Client
from processes import free_port
from product import Product, soon
from vllm_product import MOONCAKE, NIXL, WAYS, VllmProduct, of_all, params
from vllm_requests import CHAT, names

from extproc.mock import SglangMock
from extproc.mock.vllm.worker import VllmMock

CHATS = "/v1/chat/completions"
PLAIN: dict[str, Any] = {"model": "tiny", "prompt_tokens_details": False, "prefix_caching": False}


async def status_of(product: Product, url: str) -> dict[str, Any]:
    """What ``GET /workers`` says of a worker."""
    answer = await product.client.get("/workers")
    return next(worker for worker in answer.json["workers"] if worker["url"] == url)


async def register(client: Client, body: dict[str, object], status: int = 202) -> Any:
    """``POST /workers``."""
    answer = await client.post("/workers", body)
    assert answer.status == status, answer.body
    return answer.json


@pytest.mark.parametrize("where", ["fields", "labels"])
async def test_workers_are_registered_while_the_gateway_runs(where):
    async with (
        VllmProduct(0, 0) as product,
        VllmMock("prefill", connector=MOONCAKE, engine_id="p1", **PLAIN) as prefill,
        VllmMock("decode", connector=MOONCAKE, **PLAIN) as decode,
    ):
        assert (await product.client.get("/readiness")).status == 503
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, answer.code) == (503, "no_available_workers")
        of_prefill = {"kv_connector": MOONCAKE, "kv_role": "kv_producer", "kv_engine_id": "p1"}
        of_decode = {"kv_connector": MOONCAKE, "kv_role": "kv_consumer"}
        port: Any = prefill.bootstrap_port
        for mock, fields in ((prefill, {**of_prefill, "bootstrap_port": port}), (decode, of_decode)):
            said = {"labels": {k: str(v) for k, v in fields.items()}} if where == "labels" else fields
            common = {"url": mock.url, "worker_type": mock.role, "runtime_type": "vllm", "connection_mode": "http"}
            await register(product.client, {**common, **said})
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, *names(answer)) == (200, "mooncake", "handed", prefill.url, decode.url)
        assert (decode.legs[0].kv, params(decode.legs[0])["remote_engine_id"]) == ("transferred", "p1")
        await product.settled()


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_kv_connector": NIXL, "decode_kv_connector": NIXL},
        {"prefill_kv_connector": MOONCAKE, "decode_kv_connector": MOONCAKE, "prefill_kv_engine_id": ["p1"]},
    ],
    ids=["nixl", "mooncake"],
)
async def test_flags_say_it_for_workers_given_at_start(settings):
    connector = settings["prefill_kv_connector"]
    async with (
        VllmMock("prefill", connector=connector, engine_id="p1", **PLAIN) as prefill,
        VllmMock("decode", connector=connector, **PLAIN) as decode,
    ):
        given = {"prefill": [f"{prefill.url} {prefill.bootstrap_port or 'none'}"], "decode": [decode.url]}
        async with VllmProduct(0, 0, **settings, **given) as product:
            answer = await product.post(CHATS, CHAT)
            assert (answer.status, names(answer)[1]) == (200, "handed")
            assert decode.legs[0].kv == "transferred"
            await product.settled()


MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "connectors": [
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
            {"kv_connector": NIXL, "kv_role": "kv_both"},
        ]
    },
}


async def test_a_multi_connector_is_its_one_child_that_hands_over():
    async with (
        VllmProduct(0, 0) as product,
        VllmMock("prefill", **PLAIN) as prefill,
        VllmMock("decode", **PLAIN) as decode,
    ):
        for mock in (prefill, decode):
            await register(product.client, {"url": mock.url, "worker_type": mock.role, "kv_transfer_config": MULTI})
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, *names(answer)[:2]) == (200, "nixl", "handed")
        assert decode.legs[0].kv == "transferred"
        two = {"connectors": [{"kv_connector": NIXL}, {"kv_connector": MOONCAKE}]}
        body = {"url": "http://127.0.0.1:9", "worker_type": "prefill"}
        refused = await register(
            product.client, {**body, "kv_transfer_config": {**MULTI, "kv_connector_extra_config": two}}, 400
        )
        assert "MultiConnector wraps NixlConnector and MooncakeConnector" in str(refused)


async def test_a_connectors_short_name_hands_over_and_one_that_cannot_be_served_is_refused():
    async with (
        VllmProduct(0, 0) as product,
        VllmMock("prefill", **PLAIN) as prefill,
        VllmMock("decode", **PLAIN) as decode,
    ):
        for mock, name in ((prefill, "nixl"), (decode, NIXL)):
            await register(product.client, {"url": mock.url, "worker_type": mock.role, "kv_connector": name})
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, *names(answer)[:2]) == (200, "nixl", "handed")
        assert decode.legs[0].kv == "transferred"
        body = {"url": "http://127.0.0.1:9", "worker_type": "prefill", "kv_connector": "MoRIIOConnector"}
        assert "its handoff is not supported" in str(await register(product.client, body, 400))
        await register(product.client, {**body, "kv_connector": "MultiConnector"}, 400)
        await register(product.client, {**body, "kv_connector": NIXL, "kv_role": "kv_consumer"}, 400)
        await product.settled()


async def test_without_an_engine_id_the_decode_computes_the_prompt():
    """Nobody answers at the prefill's bootstrap port; it is said wherever one may look."""
    async with (
        VllmProduct(0, 1, way=WAYS["mooncake"]) as product,
        VllmMock("prefill", connector=NIXL, **PLAIN) as prefill,  # so there is no bootstrap server
    ):
        silent = free_port()
        await product.add(prefill, kv_connector=MOONCAKE, bootstrap_port=silent)
        await product.ready()
        reason = (await status_of(product, prefill.url))["status_reason"]
        assert "no engine id" in reason
        assert str(silent) in reason
        answer = await product.post(CHATS, CHAT)
        assert answer.status == 200
        assert answer.header("x-pd-kv") == "recomputed"
        assert not of_all([prefill])
        assert product.decode.legs[0].kv == "recomputed"
        await product.settled()
        assert product.records.all[0].note
        metrics = (await Client("127.0.0.1", product.service.metrics_port).get("/metrics")).body.decode()
        (line,) = [line for line in metrics.splitlines() if line.startswith("pd_kv_caches_total{")]
        assert 'kv="recomputed"' in line


@pytest.mark.parametrize("seen", [True, False], ids=["seen to be down", "unseen"])
async def test_an_engine_that_restarts_has_another_id(seen):
    """And another address: a decode that is told the former id asks nobody, and gets nothing."""
    async with VllmProduct(1, 1, way=WAYS["mooncake"], health_check_interval_secs=1) as product:
        assert (await product.post(CHATS, CHAT)).status == 200
        first = product.prefill
        worker = product.worker(first)
        first.crash()
        if seen:
            answer = await product.post(CHATS, CHAT)
            assert (answer.status, answer.code) == (503, "prefill_unreachable")
            await soon(lambda: "refused" in worker.reason, "a prefill that is down is not seen to be")
        await product.restart(first, engine_id="another", side_channel_port=0)
        await product.fleet(lambda _: [engine.id for engine in worker.kv_engines] == ["another"])
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, answer.header("x-pd-kv")) == (200, "handed")
        assert params(product.decode.legs[-1])["remote_engine_id"] == "another"
        assert product.decode.legs[-1].kv == "transferred"
        await product.settled()


async def test_fleets_of_two_engines_are_never_crossed():
    async with AsyncExitStack() as stack:
        product = await stack.enter_async_context(VllmProduct(1, 1))
        sglang = [await stack.enter_async_context(SglangMock(role)) for role in ("prefill", "decode")]
        for mock in sglang:
            body = {"url": mock.url, "worker_type": mock.role}
            port = {"bootstrap_port": mock.bootstrap_port} if mock.role == "prefill" else {}
            await register(product.client, body | port)
        await product.fleet(lambda workers: len(workers) == 4 and all(worker.usable for worker in workers))
        pairs = set()
        for _ in range(12):
            answer = await product.post(CHATS, CHAT)
            assert answer.status == 200, answer.body
            pairs.add((answer.header("x-pd-handoff"), answer.header("x-pd-prefill"), answer.header("x-pd-decode")))
        assert pairs == {
            ("nixl", product.prefill.url, product.decode.url),
            ("sglang", sglang[0].url, sglang[1].url),
        }
        await product.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_two_workers_speak_the_same(role):
    """A prefill with NIXL, a decode with Mooncake."""
    connectors = {"prefill": NIXL, "decode": NIXL, role: MOONCAKE}
    async with VllmProduct(0, 0) as product, AsyncExitStack() as stack:
        for name, connector in connectors.items():
            mock = await stack.enter_async_context(VllmMock(name, connector=connector, **PLAIN))
            port = {"bootstrap_port": mock.bootstrap_port} if mock.has_bootstrap else {}
            body = {"url": mock.url, "worker_type": name, "kv_connector": connector}
            await register(product.client, body | port)
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        answer = await product.post(CHATS, CHAT)
        assert (answer.status, answer.code) == (503, "no_compatible_pd_pair")
        assert (await product.client.get("/readiness")).status == 503


async def test_a_server_that_is_no_vllm_is_kept_out():
    async with VllmProduct(0, 0) as product, SglangMock("prefill") as mock:
        await register(product.client, {"url": mock.url, "worker_type": "prefill", "kv_connector": NIXL})
        await product.fleet(lambda workers: bool(workers and workers[0].reason))
        found = await status_of(product, mock.url)
        assert "SGLang" in found["status_reason"]
        assert not product.worker(mock).usable
