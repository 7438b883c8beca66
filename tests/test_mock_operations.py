"""Flushing the cache and the profiler, on the mocks, as the engines' sources have them."""

from __future__ import annotations

import pytest

from extproc.mock import SglangMock, VllmMock
from extproc.mock.engine import Pace
from tests.mock_client import Call, ask

GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
PROMPT = {"model": "mock-model", "prompt": "word " * 40, "max_tokens": 2}


async def test_sglang_flushes_when_nothing_is_under_way() -> None:
    async with SglangMock("regular") as mock:
        done = await ask(mock, "/flush_cache", {})
        assert (done.status, done.body.splitlines()[0]) == (200, b"Cache flushed.")
        mock.pace = Pace(first_token=60)
        call = await Call.open(mock)
        call.send("POST", "/generate", GENERATE)
        await mock.received()
        busy = await ask(mock, "/flush_cache", {})
        assert (busy.status, busy.body) == (400, b"Flush cache failed.\n")
        await call.close()


async def test_sglangs_profiler_runs_once_at_a_time() -> None:
    async with SglangMock("regular") as mock:
        statuses = [
            (await ask(mock, path, body)).status
            for path, body in (
                ("/stop_profile", {}),
                ("/start_profile", {"num_steps": "many"}),
                ("/start_profile", {"num_steps": 3, "activities": ["CPU"]}),
                ("/start_profile", {}),
                ("/stop_profile", {}),
            )
        ]
        assert statuses == [500, 400, 200, 500, 200]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/start_profile", "/stop_profile"])
async def test_vllm_has_them_only_where_it_was_started_so(path: str) -> None:
    async with VllmMock() as mock:
        answer = await ask(mock, path, {})
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


async def test_vllm_resets_its_prefix_cache_unless_blocks_are_held() -> None:
    async with VllmMock(dev_mode=True) as mock:
        await ask(mock, "/v1/completions", PROMPT)
        second = (await ask(mock, "/v1/completions", PROMPT)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert second > 0
        blocks = await mock.engine.blocks.take(16, 1)
        assert (await ask(mock, "/reset_prefix_cache", {})).json == {"success": False}
        mock.engine.blocks.give(blocks)
        assert (await ask(mock, "/reset_prefix_cache", {})).json == {"success": True}
        usage = (await ask(mock, "/v1/completions", PROMPT)).json["usage"]
        assert (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == 0


async def test_vllms_profiler_runs_once_at_a_time() -> None:
    async with VllmMock(profiler=True) as mock:
        assert (await ask(mock, "/start_profile", {"max_iterations": "3"})).status == 400
        assert (await ask(mock, "/start_profile", {"max_iterations": 3, "unknown": 1})).status == 200
        again = await ask(mock, "/start_profile", {})
        assert (again.status, again.json["error"]["type"]) == (409, "Conflict")
        assert (await ask(mock, "/stop_profile", {})).status == 200
        assert (await ask(mock, "/start_profile", {})).status == 200
