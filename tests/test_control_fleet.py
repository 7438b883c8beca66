"""What is asked of every worker at once: strict mocks, and the summary of what they said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from control_rig import Api, running
from fleet import add_ready, spec, until

from extproc.mock import SglangMock, VllmMock
from extproc.workers.metadata import Metadata
from extproc.workers.worker import Role, Worker

P, D = Role.PREFILL, Role.DECODE
ACTIONS = ["/flush_cache", "/start_profile", "/stop_profile"]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


@pytest.fixture
async def api(stack: AsyncExitStack) -> Api:
    return await stack.enter_async_context(running())


async def sglang(stack: AsyncExitStack, api: Api, role: Role) -> tuple[SglangMock, Worker]:
    mock = await stack.enter_async_context(SglangMock(role.value))
    worker = add_ready(api.registry, role, mock.url)
    await until(api.registry, lambda: worker.usable)
    return mock, worker


async def vllm(stack: AsyncExitStack, api: Api, role: Role, **options: bool) -> tuple[VllmMock, Worker]:
    mock = await stack.enter_async_context(VllmMock(role.value, **options))
    worker = add_ready(api.registry, role, mock.url)
    api.registry.describe(worker, Metadata(runtime="vllm"))
    await until(api.registry, lambda: worker.usable)
    return mock, worker


@pytest.mark.parametrize("path", ACTIONS)
async def test_without_workers_all_have_done_it(api: Api, path: str) -> None:
    answer = await api.ask("POST", path)
    assert (answer.status, answer.json["status"], answer.json["total_workers"]) == (200, "success", 0)


async def test_all_flush(stack: AsyncExitStack, api: Api) -> None:
    mocks = [await sglang(stack, api, P), await sglang(stack, api, D), await vllm(stack, api, D, dev_mode=True)]
    answer = await api.ask("POST", "/flush_cache")
    urls = [mock.url for mock, _ in mocks]
    assert (answer.status, answer.json) == (
        200,
        {
            "status": "success",
            "message": "Successfully flushed cache on all 3 workers",
            "workers_flushed": 3,
            "total_http_workers": 3,
            "total_grpc_workers": 0,
            "total_zmq_workers_skipped": 0,
            "total_workers": 3,
            "successful": urls,
            "failed": [],
        },
    )
    asked = [mock.requests[-1].path for mock, _ in mocks]
    assert asked == ["/flush_cache", "/flush_cache", "/reset_prefix_cache"]


async def test_those_who_do_not_are_named_with_the_reason(stack: AsyncExitStack, api: Api) -> None:
    good, _ = await sglang(stack, api, P)
    old, _ = await vllm(stack, api, D)
    busy, _ = await vllm(stack, api, D, dev_mode=True)
    await busy.engine.blocks.take(16, 1)
    dead, _ = await sglang(stack, api, D)
    await dead.stop()
    answer = await api.ask("POST", "/flush_cache")
    assert (answer.status, answer.json["status"], answer.json["workers_flushed"]) == (206, "partial_success", 1)
    assert answer.json["message"] == "1 of 4 workers did it; see failed"
    assert answer.json["successful"] == [good.url]
    failed = {entry["worker"]: entry["error"] for entry in answer.json["failed"]}
    assert failed == {
        old.url: "POST /reset_prefix_cache: HTTP 404; vLLM has it with VLLM_SERVER_DEV_MODE=1 only",
        busy.url: "POST /reset_prefix_cache: not done: requests under way hold the cache",
        dead.url: "POST /flush_cache: Connection refused",
    }


async def test_a_profile_is_started_with_the_clients_body_and_stopped(stack: AsyncExitStack, api: Api) -> None:
    one, worker = await sglang(stack, api, P)
    other, _ = await vllm(stack, api, D, profiler=True)
    worker.api_key = "k"
    body = {"num_steps": 3, "profile_prefix": "x"}
    answer = await api.ask("POST", "/start_profile", json=body)
    assert (answer.status, answer.json["workers_started"]) == (200, 2)
    assert [mock.requests[-1].json for mock in (one, other)] == [body, body]
    assert one.requests[-1].header("authorization") == "Bearer k"
    again = await api.ask("POST", "/start_profile")
    assert (again.status, len(again.json["failed"])) == (206, 2)
    assert "already active" in again.json["failed"][1]["error"]
    stopped = await api.ask("POST", "/stop_profile")
    assert (stopped.status, stopped.json["workers_stopped"]) == (200, 2)


async def test_a_vllm_without_a_profiler_says_so(stack: AsyncExitStack, api: Api) -> None:
    await vllm(stack, api, P)
    (failure,) = (await api.ask("POST", "/start_profile")).json["failed"]
    assert failure["error"] == "POST /start_profile: HTTP 404; vLLM has it with --profiler-config only"


async def test_a_worker_that_is_nowhere_or_leaves(api: Api) -> None:
    nowhere = api.registry.add(spec(P, "http://10.0.0.1:1"))
    leaving = add_ready(api.registry, D, "http://10.0.0.2:1")
    leaving.load = 1
    api.registry.remove(leaving)
    answer = await api.ask("POST", "/flush_cache")
    assert [entry["worker"] for entry in answer.json["failed"]] == [nowhere.name]
    assert "has no address" in answer.json["failed"][0]["error"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b"null", b'{"x": ' + b"[" * 400 + b"]" * 400 + b"}"])
async def test_bodies_that_are_none(api: Api, body: bytes) -> None:
    answer = await api.ask("POST", "/start_profile", data=body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
