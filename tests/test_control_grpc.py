"""gRPC workers in the control API: registered, shown, asked for their load, ordered to flush and to profile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from control_rig import Api, running
from fleet import eventually

from extproc.mock import RpcMock, SglangMock
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.worker import MOONCAKE, NIXL, Role, Status, Worker

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running() as made:
        made.monitor.start()
        yield made


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def register(api: Api, url: str, role: str, **more: Any) -> Worker:
    """A worker that is ready."""
    answer = await api.ask("POST", "/workers", json={"url": url, "worker_type": role, **more})
    assert answer.status == 202, answer.text
    worker = api.registry.get(answer.json["worker_id"])
    assert worker is not None
    await eventually(lambda: worker.status is Status.READY)
    return worker


async def test_one_is_registered_and_shown(stack: AsyncExitStack, api: Api) -> None:
    mock = await stack.enter_async_context(RpcMock("vllm", "prefill", connector=NIXL, engine_id="e-1"))
    worker = await register(api, mock.url, "prefill", connection_mode="grpc", runtime_type="vllm")
    shown = (await api.get(f"/workers/{worker.id}")).json
    expected = {
        "url": mock.url,
        "connection_mode": "grpc",
        "runtime_type": "vllm",
        "model_id": "tiny",
        "kv_connector": NIXL,
        "kv_role": "kv_producer",
        "kv_engine_id": "e-1",
        "pd_pairing": "vllm/nixl/dtype=auto,page=32,model=torch.float32",
        "status": "ready",
        "is_healthy": True,
    }
    assert {name: shown[name] for name in expected} == expected
    assert "status_reason" not in shown
    assert (await api.get("/readiness")).status == 503


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        (
            NIXL,
            [
                "kv_engine_id is of no effect: only prefill workers with MooncakeConnector need one",
                "bootstrap_port is of no effect with NixlConnector",
            ],
        ),
        (MOONCAKE, []),
    ],
)
async def test_what_is_of_no_effect_hangs_on_the_connector_that_the_server_has(
    stack: AsyncExitStack, api: Api, connector: str, said: list[str]
) -> None:
    mock = await stack.enter_async_context(RpcMock("vllm", "prefill", connector=connector, engine_id="e"))
    fields = {"kv_engine_id": "e", "bootstrap_port": mock.bootstrap_port or 1}
    body = {"url": mock.url, "worker_type": "prefill", **fields}
    answer = await api.ask("POST", "/workers", json=body)
    assert "warnings" not in answer.json  # it has yet to say
    worker = api.registry.get(answer.json["worker_id"])
    assert worker is not None
    await eventually(lambda: worker.status is Status.READY and worker.kv_connector == connector)
    await eventually(lambda: api.registry.trouble(worker) == "; ".join(said))
    for patch, warned in (({"labels": {"zone": "a"}}, []), (fields, said)):
        answer = await api.ask("PATCH", f"/workers/{worker.id}", json=patch)
        assert answer.json.get("warnings", []) == warned
    answer = await api.ask("PUT", f"/workers/{worker.id}", json=body)  # as if it had said nothing yet
    assert "warnings" not in answer.json


async def test_a_change_loses_nothing_that_the_server_has_said(stack: AsyncExitStack, api: Api) -> None:
    mock = await stack.enter_async_context(RpcMock("vllm", "prefill", connector=NIXL, engine_id="e-1"))
    worker = await register(api, mock.url, "prefill")
    answer = await api.ask("PATCH", f"/workers/{worker.id}", json={"labels": {"zone": "a"}, "connection_mode": "grpc"})
    assert answer.status == 202, answer.text
    assert (worker.kv_connector, worker.kv_engine_id, worker.runtime) == (NIXL, "e-1", "vllm")
    assert worker.labels["zone"] == "a"
    wrong = await api.ask("PATCH", f"/workers/{worker.id}", json={"connection_mode": "http"})
    assert (wrong.status, wrong.json["code"]) == (400, "BAD_REQUEST")
    assert wrong.json["error"] == "connection_mode is http, but the URL's scheme is grpc"


async def test_a_replacement_is_asked_anew(stack: AsyncExitStack, api: Api) -> None:
    mock = await stack.enter_async_context(RpcMock("sglang", "decode"))
    worker = await register(api, mock.url, "decode")
    body = {"url": mock.url, "worker_type": "decode", "runtime_type": "vllm"}
    assert (await api.ask("PUT", f"/workers/{worker.id}", json=body)).status == 202
    await eventually(lambda: "registered as vllm, but the server is SGLang" in api.registry.trouble(worker))
    assert worker.status is not Status.READY


async def test_their_loads_are_shown(stack: AsyncExitStack, api: Api) -> None:
    mock = await stack.enter_async_context(RpcMock("sglang", "decode"))
    mock.facts.running, mock.facts.waiting = 3, 2
    worker = await register(api, mock.url, "decode")
    loads = LoadMonitor(api.registry, api.client, 0.01)
    loads.start()
    stack.push_async_callback(loads.stop)
    await eventually(lambda: worker.engine_load)
    (entry,) = (await api.get("/get_loads")).json["loads"]
    expected = {
        "worker": mock.url,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "decode_queue_reqs": 2,
        "max_running_requests": 2048,
    }
    assert {name: entry[name] for name in expected} == expected
    assert entry.keys().isdisjoint({"num_total_tokens", "prefill_queue_reqs", "kv_transfer_latency_ms"})


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tokenspeed"])
@pytest.mark.parametrize("prefix", ["/", "/get_"])
async def test_a_prefill_says_what_it_is(stack: AsyncExitStack, api: Api, engine: str, prefix: str) -> None:
    mock = await stack.enter_async_context(RpcMock(engine, "prefill", connector=NIXL if engine == "vllm" else ""))
    mock.facts.more = {} if engine == "vllm" else {"nested": [{"api_key": "s3cret", "size": 2**40, "share": 0.5}]}
    await register(api, mock.url, "prefill")
    answer = await api.get(f"{prefix}server_info")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    server = answer.json
    model = (await api.get(f"{prefix}model_info")).json
    expected = {"served_model_name": "tiny", "model_path": "/models/tiny", "max_context_length": 2048}
    assert (expected | {"eos_token_ids": [2], "supports_vision": False}).items() <= model.items()
    assert model.keys().isdisjoint({"pad_token_id", "num_labels"})
    if engine == "vllm":
        assert (server["kv_connector"], server["block_size"], server["is_paused"]) == (NIXL, 32, False)
        assert "attention_backend" not in server
        return
    assert server["max_total_num_tokens"] == 8192
    settings = server["server_args"]
    assert (settings["disaggregation_mode"], settings["disaggregation_bootstrap_port"]) == (
        "prefill",
        mock.bootstrap_port,
    )
    assert settings["nested"] == [{"size": 2**40, "share": 0.5}]
    assert "secret" not in answer.text


async def test_a_prefill_that_does_not_say_what_it_is(stack: AsyncExitStack, api: Api) -> None:
    mock = await stack.enter_async_context(RpcMock("vllm", "prefill", connector=NIXL))
    await register(api, mock.url, "prefill")
    mock.errors["GetServerInfo"] = grpc.StatusCode.UNIMPLEMENTED
    answer = await api.get("/server_info")
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    mock.errors["GetServerInfo"] = grpc.StatusCode.INTERNAL
    answer = await api.get("/server_info")
    assert (answer.status, answer.json["error"]["code"]) == (502, "prefill_unreachable")
    assert "GetServerInfo: INTERNAL" in answer.json["error"]["message"]


async def test_a_prefill_over_http_is_asked_first(stack: AsyncExitStack, api: Api) -> None:
    over_grpc = await stack.enter_async_context(RpcMock("sglang", "prefill"))
    over_http = await stack.enter_async_context(SglangMock("prefill"))
    for mock in (over_grpc, over_http):
        await register(api, mock.url, "prefill")
    seen = over_grpc.count("GetServerInfo")
    await eventually(lambda: api.registry.usable(Role.PREFILL, None))
    assert (await api.get("/server_info")).json["disaggregation_mode"] == "prefill"
    assert over_grpc.count("GetServerInfo") == seen


async def test_a_mixed_fleet_flushes(stack: AsyncExitStack, api: Api) -> None:
    http = await stack.enter_async_context(SglangMock("prefill"))
    good = await stack.enter_async_context(RpcMock("sglang", "decode"))
    busy = await stack.enter_async_context(RpcMock("vllm", "decode"))
    busy.busy = True
    dead = RpcMock("tokenspeed", "decode")
    await dead.start()
    for url, role in ((http.url, "prefill"), *((mock.url, "decode") for mock in (good, busy, dead))):
        await register(api, url, role)
    await dead.stop()
    answer = await api.ask("POST", "/flush_cache", json={"timeout_s": 0.5})
    assert (answer.status, answer.json["workers_flushed"]) == (206, 2)
    assert (answer.json["total_http_workers"], answer.json["total_grpc_workers"]) == (1, 3)
    assert answer.json["successful"] == [http.url, good.url]
    refused = "FlushCache: not done: KV prefix cache reset refused; requests may be in flight"
    failed = {entry["worker"]: entry["error"] for entry in answer.json["failed"]}
    assert failed.pop(busy.url) == refused
    assert failed.pop(dead.url).startswith("FlushCache: ")
    assert failed == {}
    assert good.calls[-1].request.timeout_s == 0.5


async def test_a_profile_is_started_and_stopped_where_it_can_be(stack: AsyncExitStack, api: Api) -> None:
    sglang = await stack.enter_async_context(RpcMock("sglang", "decode"))
    vllm = await stack.enter_async_context(RpcMock("vllm", "decode"))
    for mock in (sglang, vllm):
        await register(api, mock.url, "decode")
    answer = await api.ask("POST", "/start_profile", json={"num_steps": 3})
    assert answer.json["successful"] == [sglang.url]
    assert "INVALID_ARGUMENT" in answer.json["failed"][0]["error"]
    assert sglang.calls[-1].request.num_steps == 3
    unknown = await api.ask("POST", "/start_profile", json={"nonsense": 3})
    assert [entry["error"].partition(" has")[2] for entry in unknown.json["failed"]] == [
        ' no field named "nonsense" at "StartProfileRequest".'
    ] * 2
    vllm.profiler = True
    assert (await api.ask("POST", "/start_profile")).status == 200
    assert (await api.ask("POST", "/stop_profile")).status == 200
