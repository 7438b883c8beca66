"""The mocks' data-parallel ranks: what is refused, who serves, and that a KV cache is found on its own rank only.

As read in SGLang 0.5.9, 0.5.10 and 0.5.23 and in vLLM 0.32; docs/sglang-facts.md and docs/vllm-facts.md say where.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fleet import eventually

from extproc.mock import SglangMock, VllmMock
from extproc.mock.sglang.engine import Patience
from extproc.mock.vllm.worker import MOONCAKE
from extproc.workers.load_metrics import of_metrics
from tests.mock_client import Answer, ask

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Say hi"}]
SGLANG = {
    CHAT: {"model": "tiny", "messages": USER, "max_tokens": 3},
    "/v1/completions": {"model": "tiny", "prompt": "Once", "max_tokens": 3},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 3}},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "Once", "max_output_tokens": 3},
}
VLLM = {
    CHAT: {"messages": USER, "max_tokens": 3},
    "/v1/completions": {"prompt": "Once", "max_tokens": 3},
    "/v1/messages": {"model": "mock-model", "messages": USER, "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}},
}


def served(mock: SglangMock | VllmMock) -> list[int | None]:
    """By which ranks the legs were."""
    return [leg.rank for leg in mock.legs]


class TestSglang:
    @asynccontextmanager
    async def pair(self, **prefills: Any) -> AsyncIterator[Any]:
        common = {"version": prefills.get("version", "0.5.23")}
        async with (
            SglangMock("prefill", dp_size=4, **{**common, **prefills}) as prefill,
            SglangMock("decode", dp_size=3, **common) as decode,
        ):
            yield prefill, decode

    async def both(self, pair: Any, room: int, first: Any, second: Any, path: str = CHAT) -> tuple[Answer, Answer]:
        """Both legs' answers; ``first`` and ``second`` are their fields. They meet."""
        return await self.legs(pair, room, first, second, path, Patience())

    async def apart(self, pair: Any, room: int, first: Any, second: Any) -> tuple[Answer, Answer]:
        """The same of legs that do not."""
        return await self.legs(pair, room, first, second, CHAT, Patience(wait=0.3))

    async def legs(
        self, pair: Any, room: int, first: Any, second: Any, path: str, patience: Patience
    ) -> tuple[Answer, Answer]:
        prefill, decode = pair
        prefill.engine._patience = decode.engine._patience = patience
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
        body = {**SGLANG[path], **place}
        return await asyncio.gather(ask(prefill, path, body | first), ask(decode, path, body | second))

    @pytest.mark.parametrize("path", SGLANG)
    async def test_the_ranks_that_are_named_serve(self, path: str) -> None:
        async with self.pair() as pair:
            first = {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}
            second = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 2}
            answers = await self.both(pair, 3, first, second, path)
            assert [answer.status for answer in answers] == [200, 200]
            assert (served(pair[0]), served(pair[1])) == ([2], [1])

    @pytest.mark.parametrize("path", SGLANG)
    async def test_a_rank_that_there_is_not_is_refused(self, path: str) -> None:
        async with SglangMock("regular", dp_size=2) as mock:
            for rank in (2, -1):
                answer = await ask(mock, path, {**SGLANG[path], "routed_dp_rank": rank})
                assert answer.status == 400
                assert f"routed_dp_rank={rank} out of range [0, 2)" in answer.body.decode()
            assert (await ask(mock, path, {**SGLANG[path], "data_parallel_rank": 1})).status == 200
            assert served(mock)[-1] == 1

    async def test_without_a_word_a_prefill_goes_by_the_room_and_so_does_its_decode(self) -> None:
        async with self.pair(dp_attention=True) as pair:
            for room in (4, 5, 6, 7):
                answers = await self.both(pair, room, {}, {})
                assert [answer.status for answer in answers] == [200, 200]
            assert served(pair[0]) == [0, 1, 2, 3]
            assert sorted(set(served(pair[1]))) == [0, 1, 2]

    async def test_without_dp_attention_rooms_of_other_ranks_than_the_first_fail_then(self) -> None:
        """Seen on the real one, with two ranks on a CPU; also where the prefill is told its rank, but not as one."""
        async with self.pair() as pair:
            answers = await self.both(pair, 4, {}, {})
            assert [answer.status for answer in answers] == [200, 200]
            for told in ({}, {"routed_dp_rank": 1}):
                first, second = await self.apart(pair, 5, told, {"disagg_prefill_dp_rank": 1})
                assert (first.status, second.status) == (500, 500)
                assert "follow_bootstrap_room conflict: dispatched to dp_rank 0" in first.body.decode()

    async def test_a_prefill_told_its_rank_only_fails_in_a_room_of_another(self) -> None:
        async with self.pair(dp_attention=True) as pair:
            first, second = await self.apart(pair, 4, {"routed_dp_rank": 2}, {"disagg_prefill_dp_rank": 2})
            assert first.status == 500
            assert "follow_bootstrap_room conflict" in first.body.decode()
            assert second.status == 500  # after its time
            answers = await self.both(pair, 6, {"routed_dp_rank": 2}, {"disagg_prefill_dp_rank": 2})
            assert [answer.status for answer in answers] == [200, 200]

    @pytest.mark.parametrize("told", [{}, {"disagg_prefill_dp_rank": 1}])
    async def test_a_cache_on_another_rank_is_not_found(self, told: dict[str, int]) -> None:
        async with self.pair() as pair:
            first = {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}
            answers = await self.apart(pair, 5, first, told)
            assert [answer.status for answer in answers] == [500, 500]
            assert "timed out" in answers[1].body.decode()

    async def test_before_0_5_10_one_field_means_both(self) -> None:
        async with self.pair(version="0.5.9") as pair:
            answers = await self.both(pair, 6, {"data_parallel_rank": 2}, {})
            assert [answer.status for answer in answers] == [200, 200]
            answers = await self.both(pair, 5, {"data_parallel_rank": 2}, {"data_parallel_rank": 2})
            assert [answer.status for answer in answers] == [200, 200]
            assert (served(pair[0]), served(pair[1])[1]) == ([2, 2], 2)
            answers = await self.apart(pair, 6, {"data_parallel_rank": 2}, {"data_parallel_rank": 1})
            assert [answer.status for answer in answers] == [500, 500]
            answers = await self.both(pair, 5, {"routed_dp_rank": 2}, {"disagg_prefill_dp_rank": 0})  # not read
            assert [answer.status for answer in answers] == [200, 200]

    async def test_it_says_how_many_there_are_and_what_each_has(self) -> None:
        async with SglangMock("decode", dp_size=3) as mock:
            info = (await ask(mock, "/server_info")).json
            assert (info["dp_size"], len(info["internal_states"])) == (3, 3)
            loads = (await ask(mock, "/v1/loads")).json["loads"]
            assert [load["dp_rank"] for load in loads] == [0, 1, 2]

    async def test_a_load_is_of_the_rank_that_has_it(self) -> None:
        async with (
            SglangMock("prefill", dp_size=3, dp_attention=True, wait_timeout=60) as mock,
            asyncio.TaskGroup() as group,
        ):
            place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": mock.bootstrap_port, "bootstrap_room": 8}
            leg = group.create_task(ask(mock, CHAT, {**SGLANG[CHAT], **place, "rid": "r"}))
            await eventually(lambda: mock.engine.waiting(2))
            loads = (await ask(mock, "/v1/loads")).json["loads"]
            assert [(load["num_running_reqs"], load["num_waiting_reqs"]) for load in loads] == [(0, 0), (0, 0), (0, 1)]
            assert [load["num_total_tokens"] > 0 for load in loads] == [False, False, True]
            (one,) = (await ask(mock, "/v1/loads?dp_rank=2")).json["loads"]
            assert one["dp_rank"] == 2
            assert (await ask(mock, "/v1/loads?dp_rank=3")).json["loads"] == []
            ranks = of_metrics((await ask(mock, "/metrics")).body)
            assert ranks is not None
            assert [rank.rank for rank in ranks] == [0, 1, 2]
            await ask(mock, "/abort_request", {"rid": "r"})
            await leg


class TestVllm:
    @pytest.mark.parametrize("path", VLLM)
    async def test_the_rank_that_is_named_serves_and_one_that_there_is_not_is_refused(self, path: str) -> None:
        async with VllmMock("aggregated", dp_size=4) as mock:
            assert (await ask(mock, path, VLLM[path], headers={"X-data-parallel-rank": "3"})).status == 200
            assert served(mock) == [3]
            answer = await ask(mock, path, VLLM[path], headers={"X-data-parallel-rank": "4"})
            assert answer.status == 400
            assert "data_parallel_rank 4 is out of range [0, 4)." in answer.body.decode()
            assert (await ask(mock, path, VLLM[path], headers={"X-data-parallel-rank": "x"})).status == 200

    async def test_each_engine_core_has_figures_of_its_own(self) -> None:
        async with VllmMock("aggregated", dp_size=2, token_delay=60) as mock, asyncio.TaskGroup() as group:
            leg = group.create_task(ask(mock, CHAT, VLLM[CHAT], headers={"X-data-parallel-rank": "1"}))
            await eventually(lambda: mock.engine.gauges(1)[:2] == (1, 0))
            ranks = of_metrics((await ask(mock, "/metrics")).body)
            assert ranks is not None
            assert [(rank.rank, rank.running, rank.waiting) for rank in ranks] == [(0, 0, 0), (1, 1, 0)]
            assert all(rank.max_tokens for rank in ranks)
            leg.cancel()

    async def test_responses_do_not_read_it(self) -> None:
        async with VllmMock("aggregated", dp_size=2) as mock:
            for _ in range(4):
                answer = await ask(mock, "/v1/responses", {"input": "a"}, headers={"X-data-parallel-rank": "7"})
                assert answer.status == 200
            assert sorted(served(mock)) == [0, 0, 1, 1]

    async def test_nixl_a_cache_is_its_engine_cores(self) -> None:
        async with VllmMock("prefill", dp_size=3, engine_id="e") as prefill, VllmMock("decode", dp_size=2) as decode:
            body = VLLM[CHAT]
            ask_for = {"do_remote_decode": True, "do_remote_prefill": False}
            params = {}
            for rank in (1, 2):
                leg = {**body, "max_tokens": 1, "kv_transfer_params": ask_for}
                answer = await ask(prefill, CHAT, leg, headers={"X-data-parallel-rank": str(rank)})
                params[rank] = answer.json["kv_transfer_params"]
                assert params[rank]["remote_engine_id"] == f"e_dp{rank}"
            told = {**body, "kv_transfer_params": params[1]}
            assert (await ask(decode, CHAT, told, headers={"X-data-parallel-rank": "1"})).status == 200
            assert (decode.legs[-1].kv, decode.legs[-1].rank) == ("transferred", 1)

    @asynccontextmanager
    async def mooncake(self, **prefills: Any) -> AsyncIterator[Any]:
        async with (
            VllmMock("prefill", connector=MOONCAKE, dp_size=3, engine_id="e", **prefills) as prefill,
            VllmMock("decode", connector=MOONCAKE, dp_size=2) as decode,
        ):
            yield prefill, decode

    async def legs(self, pair: Any, rank: int, engine: str) -> Answer:
        """The decode's answer, after a prefill by ``rank`` of which it is told ``engine``."""
        prefill, decode = pair
        transfer = f"t{random.getrandbits(64)}"
        first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        leg = {**VLLM[CHAT], "max_tokens": 1, "kv_transfer_params": first}
        assert (await ask(prefill, CHAT, leg, headers={"X-data-parallel-rank": str(rank)})).status == 200
        second = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": engine,
            "remote_bootstrap_addr": prefill.bootstrap_url,
            "transfer_id": transfer,
        }
        return await ask(decode, CHAT, {**VLLM[CHAT], "kv_transfer_params": second})

    async def test_mooncake_the_bootstrap_server_lists_the_ranks(self) -> None:
        async with self.mooncake() as (prefill, _), aiohttp.ClientSession() as session:
            async with session.get(f"{prefill.bootstrap_url}/query") as answer:
                found = await answer.json()
            assert {rank: entry["engine_id"] for rank, entry in found.items()} == {
                "0": "e_dp0",
                "1": "e_dp1",
                "2": "e_dp2",
            }
            assert len({entry["worker_addr"]["0"]["0"] for entry in found.values()}) == 3

    async def test_mooncake_a_cache_is_found_on_its_rank_only(self) -> None:
        async with self.mooncake() as pair:
            for rank in range(3):
                assert (await self.legs(pair, rank, f"e_dp{rank}")).status == 200
                assert pair[1].legs[-1].kv == "transferred"
        async with self.mooncake(lease=0.3) as pair:
            assert (await self.legs(pair, 1, "e_dp2")).status == 500
            assert (await self.legs(pair, 1, "e")).status == 500  # whom nobody knows


@pytest.mark.parametrize("make", [SglangMock, VllmMock])
async def test_a_rank_that_hangs_answers_nothing_and_its_figures_stand_still(make: type[SglangMock | VllmMock]) -> None:
    async with make("decode", dp_size=2) as mock:
        model = mock.model if isinstance(mock, VllmMock) else "tiny"
        body = {"model": model, "prompt": "Once", "max_tokens": 2}
        place = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1, "routed_dp_rank": 1}

        async def complete(rank: int) -> Answer:
            fields = {**place, "bootstrap_room": rank, "routed_dp_rank": rank} if make is SglangMock else {}
            return await ask(mock, "/v1/completions", body | fields, headers={"x-data-parallel-rank": str(rank)})

        mock.engine.hang(1)
        waits = asyncio.create_task(complete(1))
        await eventually(lambda: len(mock.engine.live) == 1)
        assert (await complete(0)).status == 200
        assert not waits.done()
        if isinstance(mock, VllmMock):
            assert mock.engine.gauges(1)[:2] == (0, 0)
        mock.engine.revive(1)
        assert (await waits).status == 200
