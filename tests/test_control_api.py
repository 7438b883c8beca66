"""The control API over a real socket: the peer's shapes, who may ask, and what is not there."""

from __future__ import annotations

import io
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from control_rig import Api, running
from fleet import FakeEnvoy, add_ready, engine, spec, until

from extproc.control.api import ControlApi
from extproc.control.auth import Access
from extproc.workers.client import WorkerClient
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.metadata import Metadata
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status

P, D = Role.PREFILL, Role.DECODE
BEARER = {"authorization": "Bearer s3cret"}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running() as made:
        yield made


class TestWorkers:
    async def test_none(self, api: Api) -> None:
        answer = await api.get("/workers")
        assert answer.status == 200
        assert answer.text == (
            '{"workers":[],"total":0,"stats":{"prefill_count":0,"decode_count":0,"regular_count":0}}'
        )

    async def test_adding_is_accepted_and_located(self, api: Api) -> None:
        body = {"url": "http://10.0.0.1:31013", "worker_type": "prefill", "bootstrap_port": 8999, "api_key": "k"}
        answer = await api.ask("POST", "/workers", json=body)
        worker_id = answer.json["worker_id"]
        assert answer.status == 202
        assert answer.headers["location"] == f"/workers/{worker_id}"
        assert answer.json == {
            "status": "accepted",
            "worker_id": worker_id,
            "url": "http://10.0.0.1:31013",
            "location": f"/workers/{worker_id}",
            "message": "Worker addition queued for background processing",
        }
        shown = (await api.get(answer.headers["location"])).json
        timestamp = shown["job_status"].pop("timestamp")
        assert isinstance(timestamp, int)
        assert shown == {
            "id": worker_id,
            "url": "http://10.0.0.1:31013",
            "worker_type": "prefill",
            "connection_mode": "http",
            "runtime_type": "sglang",
            "priority": 50,
            "cost": 1.0,
            "max_connection_attempts": 20,
            "bootstrap_port": 8999,
            "is_healthy": False,
            "status": "pending",
            "load": 0,
            "http2": False,
            "pd_pairing": "sglang/?/?",
            "job_status": {
                "job_type": "AddWorker",
                "worker_url": "http://10.0.0.1:31013",
                "status": "processing",
                "message": None,
            },
        }

    async def test_what_is_of_no_effect_is_said(self, api: Api) -> None:
        body = {"url": "http://10.0.0.1:1", "worker_type": "decode", "bootstrap_port": 8998}
        answer = await api.ask("POST", "/workers", json=body)
        warning = "bootstrap_port is of no effect: only prefill workers have a bootstrap server"
        assert (answer.status, answer.json["warnings"]) == (202, [warning])

    async def test_a_worker_in_full(self, api: Api) -> None:
        api.monitor.start()
        async with engine() as server:
            body = {
                "url": server.url,
                "worker_type": "prefill",
                "priority": 10,
                "cost": 2.0,
                "labels": {"zone": "a"},
                "health": {"failure_threshold": 4},
                "api_key": "s3cret",
            }
            worker_id = (await api.ask("POST", "/workers", json=body)).json["worker_id"]
            worker = api.registry.get(worker_id)
            assert worker is not None
            await until(api.registry, lambda: worker.usable)
            worker.load = 3
            answer = await api.get(f"/workers/{worker_id}")
        assert answer.json == {
            "id": worker_id,
            "model_id": "tiny",
            "url": server.url,
            "models": [
                {
                    "id": "tiny",
                    "model_type": ["chat", "completions", "responses", "tools"],
                    "hf_model_type": "llama",
                    "architectures": ["Llama"],
                    "context_length": 2048,
                }
            ],
            "worker_type": "prefill",
            "connection_mode": "http",
            "runtime_type": "sglang",
            "labels": {
                "zone": "a",
                "version": "0.5.23",
                "tp_size": "1",
                "disaggregation_mode": "prefill",
                "max_model_len": "2048",
                "is_generation": "true",
                "model_type": "llama",
                "architectures": '["Llama"]',
            },
            "priority": 10,
            "cost": 2.0,
            "bootstrap_port": server.bootstrap_port,
            "max_connection_attempts": 20,
            "health": {"failure_threshold": 4},
            "is_healthy": True,
            "status": "ready",
            "load": 3,
            "http2": False,
            "pd_pairing": "sglang/?/?",
        }
        assert "s3cret" not in answer.text

    async def test_a_vllm_worker_is_shown_as_the_peer_does(self, api: Api) -> None:
        api.monitor.start()
        async with engine(owner="vllm", engine_ids={"0": "engine-abc"}) as server:
            body = {
                "url": server.url,
                "worker_type": "prefill",
                "kv_connector": "MooncakeConnector",
                "kv_role": "kv_producer",
                "bootstrap_port": server.bootstrap_port,
            }
            worker_id = (await api.ask("POST", "/workers", json=body)).json["worker_id"]
            worker = api.registry.get(worker_id)
            assert worker is not None
            await until(api.registry, lambda: worker.usable)
            answer = await api.get(f"/workers/{worker_id}")
        # As the peer's reference capture 30v_mooncake_registration_by_post has it; the peer has to be told the id.
        assert answer.json == {
            "id": worker_id,
            "model_id": "tiny",
            "url": server.url,
            "models": [
                {"id": "tiny", "model_type": ["chat", "completions", "responses", "tools"], "context_length": 2048}
            ],
            "worker_type": "prefill",
            "connection_mode": "http",
            "runtime_type": "vllm",
            "labels": {
                "model_path": "/models/tiny",
                "max_model_len": "2048",
                "served_model_name": "tiny",
                "version": "0.32.0",
            },
            "priority": 50,
            "cost": 1.0,
            "bootstrap_port": server.bootstrap_port,
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_producer",
            "kv_engine_id": "engine-abc",
            "max_connection_attempts": 20,
            "is_healthy": True,
            "status": "ready",
            "load": 0,
            "http2": False,
            "pd_pairing": "vllm/mooncake/?",
        }

    async def test_a_registered_engine_id_is_shown_as_registered(self, api: Api) -> None:
        body = {
            "url": "http://10.0.0.1:1",
            "worker_type": "prefill",
            "kv_connector": "MooncakeConnector",
            "kv_engine_id": "e",
            "labels": {"dp_size": "2", "pairing_protocol": "ours"},
        }
        location = (await api.ask("POST", "/workers", json=body)).headers["location"]
        shown = (await api.get(location)).json
        assert (shown["kv_engine_id"], shown["runtime_type"], shown["pd_pairing"]) == ("e", "vllm", "ours")

    async def test_the_list_counts_and_filters(self, api: Api) -> None:
        a = add_ready(api.registry, P, "http://10.0.0.1:1", "a")
        b = add_ready(api.registry, D, "http://10.0.0.2:1", "b")
        everything = (await api.get("/workers")).json
        assert [worker["id"] for worker in everything["workers"]] == [a.id, b.id]
        assert all("job_status" not in worker for worker in everything["workers"])
        assert everything["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
        some = (await api.get("/workers?model=b")).json
        assert [worker["id"] for worker in some["workers"]] == [b.id]
        assert (some["total"], some["stats"]["prefill_count"]) == (1, 0)

    @pytest.mark.parametrize(
        ("query", "shown"),
        [
            ("worker_type=prefill", [0, 2]),
            ("worker_type=decode", [1]),
            ("worker_type=encode", []),
            ("connection_mode=grpc", [2]),
            ("connection_mode=http&worker_type=prefill", [0]),
            ("model=a&worker_type=prefill&connection_mode=http", [0]),
            ("model=a", [0, 2]),
            ("", [0, 1, 2]),
        ],
    )
    async def test_a_part_of_the_list(self, api: Api, query: str, shown: list[int]) -> None:
        urls = ((P, "http://10.0.0.1:1", "a"), (D, "http://10.0.0.2:1", "b"), (P, "grpc://10.0.0.3:1", "a"))
        ids = [add_ready(api.registry, *worker).id for worker in urls]
        listed = (await api.get(f"/workers?{query}")).json
        assert [ids.index(worker["id"]) for worker in listed["workers"]] == shown
        assert listed["total"] == len(shown)

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("role=prefill", "Unknown query parameter 'role', expected one of model, worker_type, connection_mode"),
            (
                "worker_type=Prefill",
                "Query parameter 'worker_type': 'Prefill' is none of regular, prefill, decode, encode",
            ),
            ("worker_type=", "Query parameter 'worker_type': '' is none of regular, prefill, decode, encode"),
            ("connection_mode=zmq", "Query parameter 'connection_mode': 'zmq' is none of http, grpc"),
            ("model=a&model=b", "Query parameter 'model' is given more than once"),
        ],
    )
    async def test_a_part_that_nobody_knows(self, api: Api, query: str, message: str) -> None:
        answer = await api.get(f"/workers?{query}")
        assert (answer.status, answer.json) == (400, {"error": message, "code": "BAD_REQUEST"})

    async def test_the_list_of_an_alias_is_that_of_its_model(self) -> None:
        async with running(model_aliases={"alias": "a"}) as api:
            worker = add_ready(api.registry, P, "http://10.0.0.1:1", "a")
            add_ready(api.registry, D, "http://10.0.0.2:1", "b")
            assert [shown["id"] for shown in (await api.get("/workers?model=alias")).json["workers"]] == [worker.id]

    async def test_a_duplicate_conflicts_naming_the_first(self, api: Api) -> None:
        worker = api.registry.add(spec(P, "http://10.0.0.1:1"))
        answer = await api.ask("POST", "/workers", json={"url": "http://10.0.0.1:1", "worker_type": "prefill"})
        assert answer.status == 409
        assert answer.json["code"] == "WORKER_ALREADY_EXISTS"
        assert answer.json["error"].startswith(f"Worker already exists at URL 'http://10.0.0.1:1' with ID {worker.id}.")

    async def test_a_bad_body_is_400_in_the_worker_shape(self, api: Api) -> None:
        answer = await api.ask("POST", "/workers", json={"url": "http://w:1", "worker_type": "decode", "zone": 1})
        assert answer.status == 400
        assert answer.json == {"error": "Invalid JSON data: unknown field `zone`", "code": "BAD_REQUEST"}
        assert len(api.registry) == 0

    async def test_why_a_worker_is_out_is_shown(self, api: Api) -> None:
        worker = add_ready(api.registry, P, "http://10.0.0.1:1")
        api.registry.set_status(worker, Status.NOT_READY, "GET /health: HTTP 503")
        shown = (await api.get(f"/workers/{worker.id}")).json
        assert (shown["status"], shown["is_healthy"]) == ("not_ready", False)
        assert shown["status_reason"] == "GET /health: HTTP 503"
        assert "job_status" not in shown

    async def test_adding_that_fails_is_a_failed_job(self, api: Api) -> None:
        worker = api.registry.add(spec(P, "http://10.0.0.1:1"))
        api.registry.set_status(worker, Status.FAILED, "Connect call failed")
        job = (await api.get(f"/workers/{worker.id}")).json["job_status"]
        assert (job["status"], job["message"]) == ("failed", "Connect call failed")

    async def test_removing_drains_and_may_be_repeated(self, api: Api) -> None:
        worker = add_ready(api.registry, P, "http://10.0.0.1:1")
        await until(api.registry, lambda: worker.usable)
        worker.load = 1
        for _ in range(2):
            answer = await api.ask("DELETE", f"/workers/{worker.id}")
            assert answer.status == 202
            assert answer.json == {
                "status": "accepted",
                "worker_id": worker.id,
                "message": "Worker removal queued for background processing",
            }
        shown = (await api.get(f"/workers/{worker.id}")).json
        assert (shown["status"], shown["is_healthy"]) == ("draining", False)
        assert shown["job_status"]["job_type"] == "RemoveWorker"
        worker.load = 0
        await until(api.registry, lambda: not len(api.registry))
        gone = await api.get(f"/workers/{worker.id}")
        assert (gone.status, gone.json["code"]) == (404, "WORKER_NOT_FOUND")

    @pytest.mark.parametrize("method", ["GET", "DELETE"])
    async def test_ids_that_are_not(self, api: Api, method: str) -> None:
        bad = await api.ask(method, "/workers/7")
        assert (bad.status, bad.json["code"]) == (400, "BAD_REQUEST")
        unknown = str(uuid.uuid4())
        missing = await api.ask(method, f"/workers/{unknown}")
        assert (missing.status, missing.json) == (
            404,
            {"error": f"Worker {unknown} not found", "code": "WORKER_NOT_FOUND"},
        )


class TestProbes:
    @pytest.mark.parametrize("path", ["/liveness", "/health"])
    async def test_alive(self, api: Api, path: str) -> None:
        answer = await api.get(path)
        assert (answer.status, answer.text) == (200, "OK")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert (await api.ask("HEAD", path)).status == 200

    async def test_ready_only_with_both_roles(self, api: Api) -> None:
        answer = await api.get("/readiness")
        assert answer.status == 503
        assert answer.json["status"] == "not ready"
        prefill = add_ready(api.registry, P, "http://10.0.0.1:1", "m")
        answer = await api.get("/readiness")
        assert "no usable decode worker" in answer.json["reason"]
        decode = add_ready(api.registry, D, "http://10.0.0.2:1", "m")
        await until(api.registry, lambda: prefill.usable and decode.usable)
        answer = await api.get("/readiness")
        assert (answer.status, answer.json) == (200, {"status": "ready", "healthy_workers": 2, "total_workers": 2})

    async def test_draining(self, api: Api) -> None:
        workers = [add_ready(api.registry, role, "http://10.0.0.1:1") for role in (P, D)]
        await until(api.registry, lambda: all(worker.usable for worker in workers))
        api.api.set_draining()
        answer = await api.get("/readiness")
        assert (answer.status, answer.json) == (503, {"status": "not ready", "reason": "draining"})
        assert (await api.get("/liveness")).status == 200


class TestModels:
    async def test_none(self, api: Api) -> None:
        answer = await api.get("/v1/models")
        assert answer.status == 503
        assert answer.headers["x-pd-error-code"] == "no_models_available"
        assert answer.text == (
            '{"error":{"type":"server_error","code":"no_models_available",'
            '"message":"No models available","param":null}}'
        )

    async def test_each_once_in_order(self, api: Api) -> None:
        add_ready(api.registry, P, "http://10.0.0.1:1", "b", "only prefill", "org/a")
        add_ready(api.registry, D, "http://10.0.0.2:1", "org/a", "b", "only decode")
        one = {"object": "model", "created": 0, "owned_by": "self_hosted"}
        listing = await api.get("/v1/models")
        assert listing.json == {"object": "list", "data": [{"id": "b"} | one, {"id": "org/a"} | one]}
        assert (await api.get("/v1/models/org/a")).json == {"id": "org/a"} | one
        assert (await api.get("/v1/models/only%20decode")).status == 404

    async def test_aliases_of_what_is_served(self) -> None:
        aliases = {"short": "org/a", "b": "org/a", "gone": "org/c"}
        one = {"object": "model", "created": 0, "owned_by": "self_hosted"}
        alias = one | {"alias_of": "org/a"}
        async with running(model_aliases=aliases) as api:
            add_ready(api.registry, P, "http://10.0.0.1:1", "b", "org/a")
            add_ready(api.registry, D, "http://10.0.0.2:1", "b", "org/a")
            listing = await api.get("/v1/models")
            assert listing.json["data"] == [{"id": "org/a"} | one, {"id": "short"} | alias, {"id": "b"} | alias]
            assert (await api.get("/v1/models/short")).json == {"id": "short"} | alias
            assert (await api.get("/v1/models/gone")).status == 404

    @pytest.mark.parametrize("owner", ["vllm", "sglang"])
    async def test_what_the_worker_lists_of_it_is_kept(self, api: Api, owner: str) -> None:
        api.monitor.start()
        async with engine(owner=owner) as server:
            worker = api.registry.add(spec(P, server.url))
            decode = api.registry.add(spec(D, "http://10.0.0.2:1"))
            api.registry.describe(decode, Metadata(model_ids=("tiny",), runtime=owner))
            await until(api.registry, lambda: worker.usable)
            listing = await api.get("/v1/models")
            alone = await api.get("/v1/models/tiny")
        root = {"root": "/models/tiny"} if owner == "vllm" else {}
        ours = {"id": "tiny", "object": "model", "created": 0, "owned_by": "self_hosted"}
        assert listing.json["data"] == [ours | root | {"max_model_len": 2048}]
        assert alone.json == listing.json["data"][0]
        missing = await api.get("/v1/models/c")
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


class TestInformation:
    @pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
    @pytest.mark.parametrize("known_as", ["/server_info", "/get_server_info"])
    async def test_is_a_prefill_workers_own(self, api: Api, path: str, known_as: str) -> None:
        async with engine(server_info_path=known_as, extra_info={"x": 12345678901234567890}) as server:
            worker = api.registry.add(spec(P, server.url, api_key="k"))
            api.registry.place(worker, "127.0.0.1")
            api.registry.set_status(worker, Status.READY)
            await until(api.registry, lambda: worker.usable)
            answer = await api.get(path)
            assert answer.status == 200
            assert answer.json["version"] == "0.5.23"
            assert '"x": 12345678901234567890' in answer.text  # as the worker wrote it
            assert server.requests[-1][1]["authorization"] == "Bearer k"

    @pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
    async def test_of_the_model(self, api: Api, path: str) -> None:
        async with engine() as server:
            worker = add_ready(api.registry, P, server.url)
            await until(api.registry, lambda: worker.usable)
            assert (await api.get(path)).json["model_type"] == "llama"

    async def test_secrets_stay_with_the_worker(self, api: Api) -> None:
        secrets = {"api_key": "s3cret", "admin_api_key": "s3cret", "tp_size": 1}
        own = {**secrets, "launch_command": "--api-key s3cret", "internal_states": [secrets, {"nested": [secrets]}]}
        async with engine(extra_info=own) as server:
            worker = add_ready(api.registry, P, server.url)
            await until(api.registry, lambda: worker.usable)
            answer = await api.get("/server_info")
            assert answer.json["version"] == "0.5.23"
            assert answer.json["internal_states"] == [{"tp_size": 1}, {"nested": [{"tp_size": 1}]}]
            assert "s3cret" not in answer.text

    async def test_nobody_to_ask(self, api: Api) -> None:
        answer = await api.get("/get_server_info")
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_prefill_servers")
        assert answer.json["error"]["message"] == "No prefill servers available"

    async def test_a_worker_that_does_not_answer(self, api: Api) -> None:
        with socket.socket() as unbound:
            unbound.bind(("127.0.0.1", 0))  # and does not listen
            worker = add_ready(api.registry, P, f"http://127.0.0.1:{unbound.getsockname()[1]}")
            await until(api.registry, lambda: worker.usable)
            answer = await api.get("/server_info")
        assert (answer.status, answer.json["error"]["code"]) == (502, "prefill_unreachable")

    async def test_of_an_engine_that_says_nothing_only_our_load_is_told(self, api: Api) -> None:
        worker = add_ready(api.registry, P, "http://10.0.0.1:1")
        for _ in range(4):
            worker.begin(100)
        loads = (await api.get("/get_loads")).json
        assert loads["dp_rank_count"] == 1
        assert loads["loads"] == [
            {
                "worker": "http://10.0.0.1:1",
                "worker_type": "prefill",
                "dp_rank": 0,
                "gateway_reqs": 4,
                "gateway_prompt_tokens": 400,
            }
        ]
        assert loads["aggregate"] == {"gateway_reqs": 4, "gateway_prompt_tokens": 400}

    async def test_the_engines_loads_are_told_by_rank(self, api: Api) -> None:
        silent = add_ready(api.registry, P, "http://10.0.0.1:1")
        silent.envoy_active = 0
        two = add_ready(api.registry, D, "http://10.0.0.2:1")
        two.envoy_active = 7
        two.begin(10)
        ranks = [RankLoad(1, running=2, waiting=1, kv_usage=0.5), RankLoad(0, running=3, waiting=0, max_running=8)]
        two.engine_load = EngineLoad(time.monotonic(), ranks)
        loads = (await api.get("/get_loads")).json
        assert loads["dp_rank_count"] == 3
        assert [entry.pop("timestamp", None) is not None for entry in loads["loads"]] == [False, True, True]
        decode = {"worker": "http://10.0.0.2:1", "worker_type": "decode"}
        assert loads["loads"] == [
            {
                "worker": "http://10.0.0.1:1",
                "worker_type": "prefill",
                "dp_rank": 0,
                "gateway_reqs": 0,
                "gateway_prompt_tokens": 0,
                "envoy_reqs": 0,
            },
            decode
            | {
                "dp_rank": 0,
                "num_running_reqs": 3,
                "num_waiting_reqs": 0,
                "num_total_reqs": 3,
                "max_running_requests": 8,
                "gateway_reqs": 1,
                "gateway_prompt_tokens": 10,
                "envoy_reqs": 7,
            },
            decode
            | {
                "dp_rank": 1,
                "num_running_reqs": 2,
                "num_waiting_reqs": 1,
                "num_total_reqs": 3,
                "token_usage": 0.5,
            },
        ]
        assert loads["aggregate"] == {
            "total_running_reqs": 5,
            "total_waiting_reqs": 1,
            "total_reqs": 6,
            "avg_token_usage": 0.5,
            "gateway_reqs": 1,
            "gateway_prompt_tokens": 10,
        }


class TestAccess:
    @pytest.mark.parametrize("path", ["/liveness", "/health", "/readiness"])
    async def test_probes_need_no_key(self, path: str) -> None:
        async with running(access=Access("s3cret")) as api:
            assert (await api.get(path)).status in (200, 503)

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/workers"),
            ("POST", "/workers"),
            ("GET", f"/workers/{uuid.uuid4()}"),
            ("DELETE", f"/workers/{uuid.uuid4()}"),
            ("GET", "/v1/models"),
            ("GET", "/get_loads"),
            ("GET", "/server_info"),
            ("GET", "/nowhere"),
            ("GET", "//health"),
        ],
    )
    async def test_everything_else_does(self, method: str, path: str) -> None:
        async with running(access=Access("s3cret")) as api:
            for headers in (
                {},
                {"authorization": "Bearer s3cre"},
                {"authorization": "Bearer s3crets"},
                {"authorization": "Basic s3cret"},
                {"authorization": "s3cret"},
                {"authorization": "Bearer \u00fc"},
            ):
                answer = await api.ask(method, path, headers=headers)
                assert (answer.status, answer.json["error"]["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await api.ask(method, path, headers=BEARER)).status != 401
            assert (await api.ask(method, path, headers={"authorization": "bearer  s3cret"})).status != 401


class TestShapes:
    async def test_unknown_paths(self, api: Api) -> None:
        answer = await api.get("/nonexistent")
        assert answer.status == 404
        assert answer.headers["x-pd-error-code"] == "not_found"
        assert answer.text == (
            '{"error":{"type":"invalid_request_error","code":"not_found",'
            '"message":"Invalid URL (GET /nonexistent)","param":null}}'
        )

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("PUT", "/workers", "GET, HEAD, POST"),
            ("POST", f"/workers/{uuid.uuid4()}", "DELETE, GET, HEAD, PATCH, PUT"),
            ("POST", "/readiness", "GET, HEAD"),
        ],
    )
    async def test_wrong_methods(self, api: Api, method: str, path: str, allow: str) -> None:
        answer = await api.ask(method, path)
        assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == allow
        assert answer.json["error"]["message"] == f"{method} is not allowed here, only {allow}"

    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/workers"), ("GET", "/health"), ("GET", "/nowhere"), ("PUT", "/workers")]
    )
    async def test_an_expectation_that_nobody_can_meet(self, api: Api, method: str, path: str) -> None:
        answer = await api.ask(method, path, headers={"expect": "foo"})
        assert (answer.status, answer.headers["x-pd-error-code"]) == (417, "invalid_request")
        assert answer.json["error"]["message"] == "Expect: 'foo' is not met, only 100-continue is"
        assert answer.headers["content-length"] == str(len(answer.text))
        known = await api.ask("POST", "/workers", data=b"{}", headers={"expect": "100-continue"})
        assert (known.status, known.json["code"]) == (400, "BAD_REQUEST")

    @pytest.mark.parametrize("path", ["/health", "/readiness", "/workers", "/nowhere", "/workers/x"])
    async def test_nothing_is_said_of_versions(self, api: Api, path: str) -> None:
        for headers in ({}, {"expect": "foo"}):
            answer = await api.get(path, headers=headers)
            assert "server" not in answer.headers
            assert not any("aiohttp" in value.lower() or "python" in value.lower() for value in answer.headers.values())

    async def test_too_large(self, api: Api) -> None:
        answer = await api.ask("POST", "/workers", data=io.BytesIO(b" " * (1 << 20) + b"x"))
        assert (answer.status, answer.json["error"]["code"]) == (413, "payload_too_large")

    async def test_as_large_a_head_as_envoy_lets_pass(self, api: Api) -> None:
        name = "x" * 20_000
        answer = await api.get(f"/v1/models/{name}", headers={"cookie": "c" * 30_000})
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
    async def test_a_body_that_is_not_what_its_encoding_says(
        self, api: Api, encoding: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = await api.ask("POST", "/workers", data=b"abc", headers={"content-encoding": encoding})
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    async def test_a_defect_is_a_json_500_and_a_traceback_in_the_log(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken() -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(api.registry, "readiness", broken)
        answer = await api.get("/readiness")
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        assert "a defect" not in answer.text
        assert "a defect" in caplog.text
        assert answer.headers["x-request-id"]


class TestRequestIds:
    async def test_the_clients_is_returned(self, api: Api) -> None:
        assert (await api.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        both = {"x-trace-id": "trace", "x-correlation-id": "correlation"}
        assert (await api.get("/nowhere", headers=both)).headers["x-request-id"] == "correlation"

    @pytest.mark.parametrize("unusable", ["", "a b", "x" * 129, "\u00fc"])
    async def test_one_is_made_where_none_is_usable(self, api: Api, unusable: str) -> None:
        made = (await api.get("/health", headers={"x-request-id": unusable})).headers["x-request-id"]
        assert re.fullmatch(r"req-[A-Za-z0-9]{24}", made)

    async def test_the_headers_are_the_operators(self) -> None:
        async with running(request_id_headers=("x-mine",)) as api:
            headers = {"x-request-id": "not-mine", "x-mine": "mine"}
            assert (await api.get("/health", headers=headers)).headers["x-request-id"] == "mine"


class TestListening:
    async def test_on_a_unix_socket_that_is_gone_afterwards(self, tmp_path: Path) -> None:
        path = tmp_path / "control.sock"
        with socket.socket(socket.AF_UNIX) as killed:  # left by a process that was killed
            killed.bind(str(path))
        api = ControlApi(Registry(FakeEnvoy().publish), WorkerClient(), f"unix:{path}")
        await api.start()
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
            session.get("http://control/health") as response,
        ):
            assert await response.text() == "OK"
        await api.stop()
        assert not path.exists()

    async def test_an_address_in_use_is_an_oserror(self, tmp_path: Path, api: Api) -> None:
        with pytest.raises(OSError, match="address already in use"):
            await ControlApi(api.registry, api.client, f"127.0.0.1:{api.api.port}").start()
        first = ControlApi(api.registry, api.client, f"unix:{tmp_path}/c.sock")
        await first.start()
        with pytest.raises(OSError, match="another server listens"):
            await ControlApi(api.registry, api.client, f"unix:{tmp_path}/c.sock").start()
        await first.stop()
