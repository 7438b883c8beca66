"""Data-parallel ranks (``--dp-aware``): each is a worker, and both legs and the KV cache are on the ranks chosen.

The mocks find a cache on its own rank only, refuse ranks that they do not have, and record who served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http_client import Reply
from product import Product, soon
from vllm_product import WAYS, VllmProduct, of_all, params

from extproc.mock import Fault, Point, Record, SglangMock
from extproc.workers.worker import Role, Status, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Say hi"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    "/v1/completions": {"model": "tiny", "prompt": "Once", "max_tokens": 4},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 4}},
    "/v1/messages": BODY,
    "/v1/responses": {"model": "tiny", "input": "Once", "max_output_tokens": 4},
}
PREFILL_RANKS, DECODE_RANKS = 3, 2
WATCHFUL = {
    "health_check_interval_secs": 0.1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
}


class Ranks(Product):
    """One prefill server and two decode servers, each of several ranks."""

    def _mock(self, role: str) -> SglangMock:
        return SglangMock(role, dp_size=PREFILL_RANKS if role == "prefill" else DECODE_RANKS)

    async def restart(self, mock: SglangMock, dp_size: int) -> SglangMock:
        """Start a server anew at its ports, with another number of ranks."""
        await mock.stop()
        again = SglangMock(mock.role, port=mock.port, bootstrap_port=mock.bootstrap_port, dp_size=dp_size)
        await self._stack.enter_async_context(again)
        for mocks in (self.prefills, self.decodes, self.mocks):
            mocks[:] = [again if one is mock else one for one in mocks]
        return again


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Ranks(dp_aware=True) as product:
        yield product


def named(mock: SglangMock, leg: Record) -> str:
    """What the gateway calls the rank that served a leg."""
    return f"{mock.url}@{leg.rank}"


async def entries(product: Product, mock: Any, count: int) -> list[Worker]:
    """Wait until a server has so many usable entries."""

    def found() -> list[Worker]:
        return [worker for worker in product.service.registry if str(worker.url) == mock.url and worker.usable]

    await product.fleet(lambda _: len(found()) == count)
    return found()


# -- SGLang -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_every_rank_serves_and_finds_its_cache(product: Product, path: str, *, stream: bool) -> None:
    pairs = Counter[tuple[str | None, str | None]]()
    for _ in range(12):
        answer = await product.post(path, {**BODIES[path], "stream": stream})
        assert answer.status == 200, answer.body
        pairs[answer.header("x-pd-prefill"), answer.header("x-pd-decode")] += 1
    prefills = {named(mock, leg) for mock in product.prefills for leg in mock.legs}
    decodes = {named(mock, leg) for mock in product.decodes for leg in mock.legs}
    assert prefills == {f"{product.prefill.url}@{rank}" for rank in range(PREFILL_RANKS)}
    assert decodes == {f"{mock.url}@{rank}" for mock in product.decodes for rank in range(DECODE_RANKS)}
    assert len(pairs) == 12  # three and four in turn: all of them
    assert {name for name, _ in pairs} == prefills
    assert {name for _, name in pairs} == decodes


async def test_a_leg_is_served_by_the_rank_that_the_answer_names(product: Product) -> None:
    for _ in range(6):
        answer = await product.post(CHAT, BODY)
        prefill, decode = product.legs
        assert answer.header("x-pd-prefill") == named(product.prefill, prefill)
        (mock,) = [mock for mock in product.decodes if mock.legs]
        assert answer.header("x-pd-decode") == named(mock, decode)
        assert decode.json["disagg_prefill_dp_rank"] == prefill.rank
        assert decode.json["bootstrap_room"] % PREFILL_RANKS == prefill.rank
        await product.forget()


async def test_each_rank_has_a_load_of_its_own_and_its_server_is_asked_once(product: Product) -> None:
    ranks = {worker.name for mock in product.mocks for worker in await entries(product, mock, mock.engine.dp_size)}
    await soon(lambda: all(worker.engine_load for worker in product.service.registry), "an engine says nothing")
    answer = (await product.client.get("/get_loads")).json
    known = {entry["worker"]: entry for entry in answer["loads"]}
    assert set(known) == ranks
    assert len(known) == len(answer["loads"])
    assert all(name.endswith(f"@{entry['dp_rank']}") for name, entry in known.items())
    assert all(entry["num_running_reqs"] >= 0 for entry in known.values())  # as they were when it was asked


async def test_an_order_to_the_fleet_is_given_to_each_server(product: Product) -> None:
    answer = await product.client.post("/flush_cache", None)
    assert answer.json["successful"] == [mock.url for mock in product.mocks]


async def test_lists_of_prompts_and_samples(product: Product) -> None:
    body = {"model": "tiny", "prompt": ["a", "b", "c"], "max_tokens": 3}
    for _ in range(4):
        answer = await product.post("/v1/completions", body)
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        answer = await product.post(CHAT, {**BODY, "n": 3})
        assert len(answer.json["choices"]) == 3
    assert {leg.status for mock in product.mocks for leg in mock.legs} == {200}


async def test_a_decode_server_that_refuses_is_followed_by_the_same_rank_of_the_other(product: Product) -> None:
    dead, alive = product.decodes
    await dead.refuse()
    ranks = []
    for _ in range(8):
        answer = await product.post(CHAT, BODY)
        assert (answer.status, answer.header("x-pd-attempts")) == (200, None)
        leg = alive.legs[-1]
        assert answer.header("x-pd-decode") == named(alive, leg)
        assert leg.rank == leg.json["routed_dp_rank"]
        ranks.append(leg.rank)
    assert set(ranks) == set(range(DECODE_RANKS))
    assert dead.legs == []


async def test_a_client_that_leaves_gives_every_rank_its_load_back(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.05, tokens=400))
    exchanges = [await product.client.open(CHAT, {**BODY, "max_tokens": 400, "stream": True}) for _ in range(12)]
    for exchange in exchanges:
        await exchange.piece()
    loads = {worker.name: worker.load for worker in product.service.registry if worker.role is Role.DECODE}
    assert set(loads.values()) == {3}
    shown = (await product.client.get("/workers")).json["workers"]
    assert {worker["url"]: worker["load"] for worker in shown if worker["worker_type"] == "decode"} == loads
    for exchange in exchanges:
        exchange.close()
    await product.settled()
    assert {worker.load for worker in product.service.registry} == {0}


async def test_ranks_are_shown_as_workers_with_one_probe(product: Product) -> None:
    shown = [
        worker
        for worker in (await product.client.get("/workers")).json["workers"]
        if worker["worker_type"] == "prefill"
    ]
    url = product.prefill.url
    assert [worker["url"] for worker in shown] == [f"{url}@{rank}" for rank in range(PREFILL_RANKS)]
    assert [(w["dp_base_url"], w["dp_rank"], w["dp_size"]) for w in shown] == [(url, rank, 3) for rank in range(3)]
    assert len({worker["id"] for worker in shown}) == PREFILL_RANKS
    assert len([record for record in product.prefill.requests if record.path == "/server_info"]) <= 1
    readiness = (await product.client.get("/readiness")).json
    assert readiness["total_workers"] == PREFILL_RANKS + 2 * DECODE_RANKS


async def test_a_prefill_server_that_dies_is_left_with_all_its_ranks() -> None:
    async with Ranks(prefills=2, decodes=1, dp_aware=True) as product:
        dead, alive = product.prefills
        await dead.refuse()
        for _ in range(6):
            answer = await product.post(CHAT, BODY)
            assert answer.status == 200, answer.body
            assert int(answer.header("x-pd-attempts") or "1") <= 2  # not one for each rank of the dead one
            assert (answer.header("x-pd-prefill") or "").startswith(alive.url)
        await dead.accept()
        await product.settled()


async def test_a_rank_that_hangs_is_out_alone_until_it_goes_on() -> None:
    quick = {"worker_stall_secs": 0.5, "worker_wedge_secs": 3}
    async with Ranks(decodes=1, dp_aware=True, **WATCHFUL, **quick) as product:
        hung = next(worker for worker in product.service.registry if worker.name == f"{product.decode.url}@1")
        product.decode.engine.hang(1)
        asked = [asyncio.create_task(product.post(CHAT, BODY)) for _ in range(DECODE_RANKS)]
        await product.fleet(lambda _: hung.status is Status.NOT_READY)
        assert product.service.registry.trouble(hung).startswith("wedged: 1 legs under way, no answer; rank 1")
        answers = [await product.post(CHAT, BODY) for _ in range(4)]
        assert {answer.header("x-pd-decode") for answer in answers} == {f"{product.decode.url}@0"}
        product.decode.engine.revive(1)
        await product.fleet(lambda _: hung.usable)
        assert {(await answer).status for answer in asked} == {200}
        await product.settled()


# -- coming and going -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2, 5])
async def test_a_restart_with_another_number_of_ranks(dp_size: int) -> None:
    async with Ranks(decodes=1, dp_aware=True, **WATCHFUL) as product:
        first = product.worker(product.prefill)
        await product.prefill.refuse()
        await product.fleet(lambda _: not first.usable)
        mock = await product.restart(product.prefill, dp_size)
        assert await entries(product, mock, dp_size)
        assert product.worker(mock) is first
        for _ in range(2 * dp_size):
            assert (await product.post(CHAT, BODY)).status == 200
        assert {leg.rank for leg in mock.legs} == set(range(dp_size))
        await product.settled()


async def test_a_restart_that_nobody_noticed_shows_by_a_refusal_of_which_no_client_hears() -> None:
    async with Ranks(decodes=1, dp_aware=True) as product:
        first = product.worker(product.prefill)
        mock = await product.restart(product.prefill, 2)
        product.service._monitor._watches[first.id]._identity.identified_at -= 60  # it is not asked at once again
        answers = [await product.post(CHAT, BODY) for _ in range(3)]
        assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers]
        assert {answer.header("x-pd-attempts") for answer in answers} == {None, "2"}
        assert len(await entries(product, mock, 2)) == 2
        await product.settled()


async def test_the_last_requests_of_a_rank_that_is_gone_end_in_peace() -> None:
    async with Ranks(decodes=1, dp_aware=True) as product:
        registry = product.service.registry
        go_on = asyncio.Event()
        product.decode.fail(Fault(hang=Point.MID_BODY, until=go_on))
        exchanges = [await product.client.open(CHAT, {**BODY, "max_tokens": 60, "stream": True}) for _ in range(2)]
        for exchange in exchanges:
            await exchange.piece()
        registry._set_ranks(product.worker(product.decode), 1)  # as its next word about itself would
        assert [worker.load for worker in registry if worker.role is Role.DECODE] == [1, 1]
        go_on.set()
        assert [(await exchange.whole()).events[-1] for exchange in exchanges] == ["[DONE]", "[DONE]"]
        await product.fleet(lambda workers: sum(worker.role is Role.DECODE for worker in workers) == 1)
        await product.settled()


async def test_registering_a_url_makes_all_ranks_and_deleting_one_removes_all(product: Product) -> None:
    async with SglangMock("decode", model="other", dp_size=4) as mock:
        worker_id = await product.add(mock)
        found = await entries(product, mock, 4)
        assert found[0].id == worker_id
        again = await product.client.post("/workers", {"url": mock.url, "worker_type": "decode"})
        assert again.status == 409
        answer = await product.client.delete(f"/workers/{found[2].id}")
        assert answer.status == 202
        await product.fleet(lambda workers: not any(str(worker.url) == mock.url for worker in workers))
        assert (await product.client.get(f"/workers/{worker_id}")).status == 404


async def test_an_sglang_with_one_field_for_two_ranks() -> None:
    class Former(Ranks):
        def _mock(self, role: str) -> SglangMock:
            return SglangMock(role, dp_size=PREFILL_RANKS, version="0.5.9")

    async with Former(dp_aware=True) as product:
        assert len(list(product.service.registry)) == PREFILL_RANKS + 2  # its decodes choose themselves
        for _ in range(12):
            assert (await product.post(CHAT, BODY)).status == 200
        assert {leg.rank for leg in product.prefill.legs} == set(range(PREFILL_RANKS))
        await product.settled()


async def test_without_dp_aware_a_server_is_one_worker_and_chooses_itself() -> None:
    class Choosing(Ranks):
        def _mock(self, role: str) -> SglangMock:
            return SglangMock(role, dp_size=PREFILL_RANKS, dp_attention=True)  # else most of its rooms would fail

    async with Choosing() as product:
        assert len(list(product.service.registry)) == 3
        for _ in range(30):
            assert (await product.post(CHAT, BODY)).status == 200
        assert "routed_dp_rank" not in product.prefill.legs[0].json
        assert {leg.rank for leg in product.prefill.legs} == set(range(PREFILL_RANKS))
        await product.settled()


# -- vLLM -------------------------------------------------------------------------------------------------------------

RANKS = 3


def vllm(way: str, **settings: Any) -> VllmProduct:
    """One prefill server and two decode servers of three ranks."""
    options = {"dp_size": RANKS, "engine_id": "engine"}
    return VllmProduct(1, 2, way=WAYS[way], options=options, **{"dp_aware": True, **settings})


async def ask(product: VllmProduct, path: str = CHAT, **fields: Any) -> Reply:
    """Ask with headers that would choose a rank, which is not the client's to do."""
    theirs = [("x-data-parallel-rank", "7"), ("X-Data-Parallel-Rank", "8")]
    answer = await product.post(path, {**BODIES[path], **fields}, theirs)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("way", WAYS)
async def test_vllm_every_rank_serves_and_finds_its_cache(way: str) -> None:
    async with vllm(way) as product:
        for number in range(18):
            answer = await ask(product, stream=number % 2 == 1)
            prefill = next(leg for leg in reversed(product.prefill.legs))
            mock = next(mock for mock in product.decodes if (answer.header("x-pd-decode") or "").startswith(mock.url))
            decode = mock.legs[-1]
            assert answer.header("x-pd-prefill") == f"{product.prefill.url}@{prefill.rank}"
            assert answer.header("x-pd-decode") == f"{mock.url}@{decode.rank}"
            assert [value for name, value in decode.headers if name == "x-data-parallel-rank"] == [str(decode.rank)]
            if way != "passthrough":
                assert decode.kv == "transferred"
                assert params(decode)["remote_engine_id"] == f"engine_dp{prefill.rank}"
        assert {leg.rank for leg in product.prefill.legs} == set(range(RANKS))
        for mock in product.decodes:
            assert {leg.rank for leg in mock.legs} == set(range(RANKS))
        await product.settled()


@pytest.mark.parametrize("way", ["nixl", "mooncake"])
async def test_vllm_a_decode_server_that_refuses_is_followed_by_the_same_rank_of_the_other(way: str) -> None:
    async with vllm(way) as product:
        dead, alive = product.decodes
        await dead.refuse()
        for _ in range(8):
            answer = await ask(product)
            leg = alive.legs[-1]
            assert answer.header("x-pd-decode") == f"{alive.url}@{leg.rank}"
            assert (leg.header("x-data-parallel-rank"), leg.kv) == (str(leg.rank), "transferred")
        await dead.accept()
        await product.settled()


@pytest.mark.parametrize("way", ["nixl", "mooncake", "mooncake in turn"])
async def test_vllm_a_failed_prefill_is_followed_by_another_and_nothing_is_kept(way: str) -> None:
    async with vllm(way) as product:
        product.prefill.fail(Fault(status=500), times=1)
        answer = await ask(product)
        assert answer.header("x-pd-attempts") == "2"
        await product.settled()


@pytest.mark.parametrize("way", ["nixl", "mooncake", "mooncake in turn"])
async def test_vllm_a_client_that_leaves_gives_every_rank_its_load_back(way: str) -> None:
    async with vllm(way) as product:
        for mock in product.decodes:
            mock.fail(Fault(delay_token=0.05, tokens=400))
        body = {**BODY, "max_tokens": 400, "stream": True}
        exchanges = [await product.client.open(CHAT, body) for _ in range(2 * RANKS)]
        for exchange in exchanges:
            await exchange.piece()
        decodes = [worker for worker in product.service.registry if worker.role is Role.DECODE]
        assert [worker.load for worker in decodes] == [1] * (2 * RANKS)
        for exchange in exchanges:
            exchange.close()
        for mock in product.decodes:
            mock.behave()
        await product.settled()


async def test_vllm_responses_whose_rank_nobody_chooses() -> None:
    async with vllm("mooncake") as product:
        answer = await ask(product, "/v1/responses")
        assert answer.header("x-pd-kv") == "recomputed"
        await product.settled()
    async with vllm("nixl") as product:
        for _ in range(6):
            answer = await ask(product, "/v1/responses")
            assert answer.header("x-pd-kv") == "handed"
        assert {leg.kv for mock in product.decodes for leg in mock.legs} == {"transferred"}
        await product.settled()


async def test_vllm_without_dp_aware_mooncake_is_not_minted_and_that_is_said() -> None:
    async with vllm("mooncake", dp_aware=False) as product:
        answer = await ask(product)
        assert (answer.header("x-pd-kv"), product.prefill.legs) == ("recomputed", [])
        shown = (await product.client.get("/workers")).json["workers"]
        (prefill,) = [worker for worker in shown if worker["worker_type"] == "prefill"]
        assert prefill["status_reason"] == "3 engine cores, and no --dp-aware: the decode recomputes each prompt"
        await product.settled()


async def test_vllm_without_dp_aware_nixl_is_handed_over_from_whichever_rank_the_engine_chose() -> None:
    async with vllm("nixl", dp_aware=False) as product:
        for _ in range(9):
            await ask(product)
        assert {leg.rank for leg in product.prefill.legs} == set(range(RANKS))
        assert {leg.kv for mock in product.decodes for leg in mock.legs} == {"transferred"}
        await product.settled()


async def test_vllm_a_mooncake_prefill_that_restarts_is_found_by_every_rank_of_a_decode() -> None:
    async with vllm("mooncake", **WATCHFUL) as product:
        for _ in range(18):
            await ask(product)
        former = product.prefill
        former.crash()
        await product.fleet(lambda _: not product.worker(former).usable)
        mock = await product.restart(former)
        found = await entries(product, mock, RANKS)
        await soon(lambda: all(worker.kv_engines for worker in found), "a rank has no engine id")
        for _ in range(18):
            answer = await ask(product)
            assert answer.header("x-pd-kv") == "handed"
        assert {leg.kv for leg in of_all(product.decodes)} == {"transferred"}
        await product.settled()


async def test_vllm_a_restart_with_another_number_of_ranks() -> None:
    async with vllm("mooncake", **WATCHFUL) as product:
        for _ in range(6):
            await ask(product)
        former = product.prefill
        former.crash()
        await product.fleet(lambda _: not product.worker(former).usable)
        mock = await product.restart(former, dp_size=2)
        found = await entries(product, mock, 2)
        await soon(lambda: all(worker.kv_engines for worker in found), "a rank has no engine id")
        for _ in range(12):
            await ask(product)
        assert {leg.rank for leg in mock.legs} == {0, 1}
        await product.settled()
