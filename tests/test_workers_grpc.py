"""Workers that are gRPC servers: the monitor and the load monitor against mock servers on real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet import FAST, LONG, SLOW, Engine, Fleet, engine, eventually, fleet, spec, until

from extproc.mock import RpcMock
from extproc.workers.client import WorkerClient
from extproc.workers.endpoints import DECODE_CLUSTER, DECODE_GRPC_CLUSTER
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.load import EngineLoad
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.rpc.channels import pem_roots
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
ENGINES = ("sglang", "vllm", "tokenspeed")
CERTIFICATE = Path(__file__).parent / "data/tls/engine.pem"


@asynccontextmanager
async def loads(f: Fleet, interval: float = 0.01) -> AsyncIterator[LoadMonitor]:
    monitor = LoadMonitor(f.registry, f.client, interval)
    monitor.start()
    try:
        yield monitor
    finally:
        await monitor.stop()


@asynccontextmanager
async def stranger(service: str, *, standard: bool, port: int = 0) -> AsyncIterator[int]:
    """A server of another service that tells its health, by ``grpc.health.v1`` too if ``standard``; its port."""

    async def answer(_request: bytes, _context: Any) -> bytes:
        return b""

    async def serving(request: bytes, context: Any) -> bytes:
        if request:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return b"\x08\x01"

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    names = {service: ("HealthCheck", answer)} | ({"grpc.health.v1.Health": ("Check", serving)} if standard else {})
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {method: grpc.unary_unary_rpc_method_handler(function)})
            for name, (method, function) in names.items()
        )
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def asked(mock: RpcMock) -> list[str]:
    return [call.method for call in mock.calls]


class TestIdentity:
    @pytest.mark.parametrize("runtime", [None, "sglang"])
    async def test_sglang(self, runtime: str | None) -> None:
        async with RpcMock("sglang", "prefill") as mock, fleet() as f:
            worker = f.registry.add(spec(P, mock.url, api_key="s3cret", runtime=runtime))
            await f.becomes(worker, Status.READY)
            assert asked(mock) == ["HealthCheck", "GetModelInfo", "GetServerInfo"]
            assert all(call.metadata["authorization"] == "Bearer s3cret" for call in mock.calls)
            assert (worker.runtime, worker.model_ids) == ("sglang", ("tiny",))
            assert worker.bootstrap_port == mock.bootstrap_port
            assert worker.pairing.key == "sglang/mooncake/dtype=auto,page=1,attn=torch_native,model=float32"
            expected = {
                "version": "0.5.23",
                "dp_size": "1",
                "tp_size": "1",
                "disaggregation_mode": "prefill",
                "max_running_requests": "2048",
                "max_context_length": "2048",
                "model_path": "/models/tiny",
                "eos_token_ids": "[2]",
                "architectures": '["LlamaForCausalLM"]',
                "supports_vision": "false",
            }
            assert expected.items() <= worker.labels.items()
            assert "secret" not in str(worker.labels)
            assert worker.cards[0]["context_length"] == 2048
            assert worker.listed[0] == {"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}

    @pytest.mark.parametrize(("role", "kv_role", "name"), [("prefill", "kv_producer", P), ("decode", "kv_consumer", D)])
    async def test_vllm_with_nixl(self, role: str, kv_role: str, name: Role) -> None:
        async with RpcMock("vllm", role, connector=NIXL, engine_id="e-1") as mock, fleet() as f:
            worker = f.registry.add(spec(name, mock.url))
            await f.becomes(worker, Status.READY)
            assert (worker.runtime, worker.kv_connector, worker.kv_role) == ("vllm", NIXL, kv_role)
            assert (worker.kv_engine_id, worker.kv_engines) == ("e-1", ())
            assert worker.pairing.key == "vllm/nixl/dtype=auto,page=32,model=torch.float32"
            assert (worker.pairing.version, worker.pairing.model_path) == ("0.32.0", "/models/tiny")
            assert worker.labels["max_num_seqs"] == "16"
            assert worker.labels.keys().isdisjoint({"uptime_seconds", "server_type", "kv_role", "kv_engine_id"})
            assert f.registry.trouble(worker) == ""

    async def test_vllm_with_mooncake_is_known_by_its_bootstrap_server_too(self) -> None:
        async with RpcMock("vllm", "prefill", connector=MOONCAKE, engine_id="e", dp_size=2) as mock, fleet() as f:
            worker = f.registry.add(spec(P, mock.url, bootstrap_port=mock.bootstrap_port))
            await eventually(lambda: worker.kv_engines)
            assert worker.kv_engines == (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))
            assert worker.labels["dp_size"] == "2"
            assert worker.pairing.transport == "mooncake"

    async def test_vllm_says_its_engine_id_where_its_bootstrap_server_does_not(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        async with RpcMock("vllm", "prefill", connector=MOONCAKE, engine_id="own") as mock, fleet() as f:
            worker = f.registry.add(spec(P, mock.url, bootstrap_port=port, kv=KvConfig(engine_id="former")))
            await f.is_said(worker, "does not answer")
            assert worker.kv_engines == (KvEngine(0, "own"),)
            assert "registered with engine id former, but the server says own" in f.registry.trouble(worker)

    async def test_tokenspeed(self) -> None:
        async with RpcMock("tokenspeed", "prefill", dp_size=2) as mock, fleet() as f:
            worker = f.registry.add(spec(P, mock.url))
            await f.becomes(worker, Status.READY)
            assert (worker.runtime, worker.model_ids) == ("tokenspeed", ("tiny",))
            assert worker.bootstrap_port == mock.bootstrap_port
            assert worker.pairing.key == "tokenspeed/mooncake/dtype=auto,attn=fa3,model=bfloat16"
            assert (worker.labels["version"], worker.labels["dp_size"]) == ("0.1.0", "2")

    async def test_what_is_registered_wins(self) -> None:
        async with RpcMock("vllm", "decode", connector=NIXL) as mock, fleet() as f:
            more: dict[str, Any] = {"cards": ({"id": "named"},), "labels": {"block_size": "64"}}
            worker = f.registry.add(spec(D, mock.url, **more))
            await f.becomes(worker, Status.READY)
            assert worker.model_ids == ("named",)
            assert worker.pairing.page_size == "64"

    @pytest.mark.parametrize("engine_name", ENGINES)
    async def test_every_rank_is_a_worker_when_asked_for(self, engine_name: str) -> None:
        async with RpcMock(engine_name, "decode", dp_size=3) as mock, fleet(dp_aware=True) as f, loads(f):
            mock.facts.waiting = 2
            worker = f.registry.add(spec(D, mock.url))
            await until(f.registry, lambda: len(worker.ranks) == 3)
            await eventually(lambda: all(rank.engine_load for rank in worker.ranks))
            assert [rank.name for rank in worker.ranks] == [f"{mock.url}@{rank}" for rank in range(3)]
            assert [rank.engine_load and rank.engine_load.waiting for rank in worker.ranks] == [2, 2, 2]
            await until(f.registry, lambda: all(rank.usable for rank in worker.ranks))
            assert len(f.client.rpc) == 1

    @pytest.mark.parametrize("method", ["GetModelInfo", "GetServerInfo"])
    async def test_one_that_does_not_say_what_it_is_is_asked_again(self, method: str) -> None:
        async with RpcMock("sglang", "decode") as mock, fleet() as f:
            mock.errors[method] = grpc.StatusCode.INTERNAL
            worker = f.registry.add(spec(D, mock.url))
            await f.is_said(worker, f"cannot learn what it serves: {method}: INTERNAL: {method} fails")
            del mock.errors[method]
            await eventually(lambda: worker.model_ids == ("tiny",))
            assert f.registry.trouble(worker) == ""

    async def test_a_version_that_cannot_be_had_is_asked_for_again_and_a_known_one_kept(self) -> None:
        async with RpcMock("vllm", "prefill", connector=NIXL) as mock, fleet() as f:
            mock.errors["GetLoads"] = grpc.StatusCode.INTERNAL
            worker = f.registry.add(spec(P, mock.url))
            await f.becomes(worker, Status.READY)
            assert "does not tell everything of itself: GetLoads: INTERNAL" in f.registry.trouble(worker)
            assert worker.pairing.version != "0.32.0"
            del mock.errors["GetLoads"]
            await eventually(lambda: worker.pairing.version == "0.32.0")
            mock.errors["GetLoads"] = grpc.StatusCode.INTERNAL
            f.registry.change(worker, spec(P, mock.url, labels={"zone": "a"}))
            await f.is_said(worker, "does not say again what it is: GetLoads: INTERNAL")
            assert worker.pairing.version == "0.32.0"

    async def test_a_method_that_it_does_not_have_is_no_obstacle(self) -> None:
        async with RpcMock("vllm", "decode") as mock, fleet() as f:
            mock.errors = dict.fromkeys(("GetServerInfo", "GetLoads"), grpc.StatusCode.UNIMPLEMENTED)
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)
            assert (worker.runtime, worker.model_ids, worker.pairing.key) == ("vllm", ("tiny",), "vllm/?/?")
            assert "the server has no kv_connector" in f.registry.trouble(worker)


class TestMismatch:
    @pytest.mark.parametrize(
        ("engine_name", "role", "more", "facts", "reason"),
        [
            ("sglang", P, {"runtime": "vllm"}, {}, "registered as vllm, but the server is SGLang"),
            ("vllm", D, {"runtime": "tokenspeed"}, {}, "registered as tokenspeed, but the server is vLLM"),
            ("sglang", D, {}, {}, "registered as decode, but the server's disaggregation_mode is prefill"),
            ("tokenspeed", D, {}, {}, "registered as decode, but the server's disaggregation_mode is prefill"),
            ("tokenspeed", P, {"kv": KvConfig(NIXL)}, {}, "but the server is TokenSpeed, which has none"),
            ("vllm", D, {}, {}, "registered as decode, but the server's kv_role is kv_producer"),
            ("vllm", P, {"kv": KvConfig(MOONCAKE)}, {}, f"kv_connector {MOONCAKE}, but the server says {NIXL}"),
            ("vllm", P, {}, {"kv_connector": "MoRIIOConnector"}, "MoRIIOConnector: its handoff is not supported"),
        ],
    )
    async def test_one_that_is_something_else_is_kept_out(
        self, engine_name: str, role: Role, more: dict[str, Any], facts: dict[str, Any], reason: str
    ) -> None:
        connector = NIXL if engine_name == "vllm" else ""
        async with RpcMock(engine_name, "prefill", connector=connector) as mock, fleet(FAST) as f:
            mock.facts.more = facts
            worker = f.registry.add(spec(role, mock.url, **more))
            await f.is_said(worker, reason)
            assert worker.status is not Status.READY

    async def test_the_one_child_that_was_registered_of_several_is_believed(self) -> None:
        async with RpcMock("vllm", "prefill", connector="MultiConnector") as mock, fleet() as f:
            worker = f.registry.add(spec(P, mock.url, kv=KvConfig(NIXL)))
            await f.becomes(worker, Status.READY)
            assert worker.kv_connector == NIXL

    @pytest.mark.parametrize(
        ("service", "title"),
        [
            ("trtllm.TrtllmService", "the server is TensorRT-LLM, whose handoff is not known"),
            ("mlx.grpc.engine.MlxEngine", "the server is MLX, whose handoff is not known"),
            ("some.other.Service", "the server is none of SGLang, vLLM, TokenSpeed"),
        ],
    )
    @pytest.mark.parametrize("standard", [True, False])
    async def test_an_engine_that_is_not_served_is_named(self, service: str, title: str, *, standard: bool) -> None:
        async with stranger(service, standard=standard) as port, fleet(FAST) as f:
            worker = f.registry.add(spec(D, f"grpc://127.0.0.1:{port}"))
            await f.is_said(worker, title)
            assert worker.status is Status.FAILED


class TestHealth:
    @pytest.mark.parametrize("engine_name", ENGINES)
    async def test_failures_in_a_row_take_it_out_and_successes_bring_it_back(self, engine_name: str) -> None:
        async with RpcMock(engine_name, "decode") as mock, fleet(FAST) as f:
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)
            mock.healthy = False
            await f.becomes(worker, Status.NOT_READY)
            assert f.registry.trouble(worker) == "HealthCheck: not healthy: Engine is not alive"
            mock.healthy = True
            seen = mock.count("GetServerInfo")
            await f.becomes(worker, Status.READY)
            assert mock.count("GetServerInfo") > seen

    async def test_silence_is_a_failure(self) -> None:
        async with RpcMock("vllm", "decode") as mock, fleet(HealthSettings(timeout=0.05)) as f:
            mock.hang = True
            worker = f.registry.add(spec(D, mock.url))
            await f.is_said(worker, "HealthCheck: no answer within 0.05 s")

    async def test_one_that_is_down_joins_when_it_comes_and_again_when_it_comes_back(self) -> None:
        mock = RpcMock("vllm", "decode", connector=NIXL, engine_id="first")
        await mock.start()
        await mock.stop()
        async with fleet(FAST) as f:
            worker = f.registry.add(spec(D, mock.url))
            await f.is_said(worker, "HealthCheck: Connection refused")
            assert worker.status is Status.PENDING
            await mock.start()
            await f.becomes(worker, Status.READY)
            await mock.stop()
            await f.becomes(worker, Status.NOT_READY)
            mock.facts.engine_id, mock.facts.model = "second", "other"
            await mock.start()
            await f.becomes(worker, Status.READY)
            assert (worker.kv_engine_id, worker.model_ids) == ("second", ("other",))
            await mock.stop()

    async def test_another_engine_in_its_place_is_noticed(self) -> None:
        first = RpcMock("sglang", "decode")
        await first.start()
        async with fleet(FAST) as f:
            worker = f.registry.add(spec(D, first.url))
            await f.becomes(worker, Status.READY)
            await first.stop()
            async with RpcMock("vllm", "decode", connector=NIXL, port=first.port):
                await eventually(lambda: worker.runtime == "vllm" and worker.status is Status.READY)
                assert worker.kv_connector == NIXL

    async def test_a_server_may_tell_its_health_by_the_standard_service_alone(self) -> None:
        async with RpcMock("tokenspeed", "decode") as mock, fleet(FAST) as f:
            mock.healthy = None
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)
            assert worker.runtime == "tokenspeed"
            mock.serving = False
            await f.is_said(worker, "Check: tokenspeed.grpc.scheduler.TokenSpeedScheduler is not serving")
            await f.becomes(worker, Status.NOT_READY)

    async def test_without_health_checks_it_counts_as_healthy_and_is_asked_what_it_is(self) -> None:
        async with RpcMock("sglang", "decode") as mock, fleet(HealthSettings(enabled=False)) as f:
            mock.healthy = False
            worker = f.registry.add(spec(D, mock.url))
            await eventually(lambda: worker.model_ids == ("tiny",))
            assert worker.status is Status.READY

    async def test_without_health_checks_another_engine_in_its_place_is_found_when_it_is_asked_again(self) -> None:
        first = RpcMock("sglang", "decode")
        await first.start()
        async with fleet(HealthSettings(enabled=False)) as f:
            worker = f.registry.add(spec(D, first.url))
            await eventually(lambda: worker.model_ids == ("tiny",))
            await first.stop()
            async with RpcMock("vllm", "decode", connector=NIXL, port=first.port, model="other"):
                f.registry.change(worker, spec(D, first.url, labels={"zone": "a"}))
                await eventually(lambda: worker.runtime == "vllm" and worker.model_ids == ("other",))
                assert (worker.kv_connector, worker.status) == (NIXL, Status.READY)
            async with stranger("trtllm.TrtllmService", standard=False, port=first.port):
                f.registry.change(worker, spec(D, first.url))
                await f.is_said(worker, "the server is TensorRT-LLM, whose handoff is not known")
                assert worker.status is Status.FAILED

    async def test_without_health_checks_one_replaced_as_the_engine_that_it_is_now_joins(self) -> None:
        first = RpcMock("sglang", "decode")
        await first.start()
        async with fleet(HealthSettings(enabled=False)) as f:
            worker = f.registry.add(spec(D, first.url, runtime="sglang"))
            await eventually(lambda: worker.model_ids == ("tiny",))
            await first.stop()
            async with RpcMock("vllm", "decode", port=first.port):
                f.registry.replace(worker, spec(D, first.url, runtime="vllm"))
                await f.becomes(worker, Status.READY)
                assert (worker.runtime, worker.model_ids) == ("vllm", ("tiny",))

    async def test_over_ipv6(self) -> None:
        if not socket.has_ipv6:
            pytest.skip("no IPv6")
        async with RpcMock("vllm", "decode", host="::1") as mock, fleet() as f:
            assert mock.url == f"grpc://[::1]:{mock.port}"
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)

    async def test_an_unknown_name_is_said(self) -> None:
        async with RpcMock("vllm", "decode") as mock, fleet(pace=Pace(seek=0.01, resolve=0.01)) as f:
            worker = f.registry.add(spec(D, f"grpc://worker.example:{mock.port}"))
            await f.is_said(worker, "cannot resolve worker.example")
            f.names["worker.example"] = ["127.0.0.1"]
            await f.becomes(worker, Status.READY)
            assert worker.ip == "127.0.0.1"

    async def test_a_sign_of_life_is_its_health_and_the_standard_one_of_its_service(self) -> None:
        async with RpcMock("sglang", "decode") as mock, fleet() as f:
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)
            contact = f.monitor._contact(worker)
            await contact.probe("", ip="127.0.0.1", within=LONG)
            assert await contact.sign_of_life(ip="127.0.0.1", within=LONG) == ""
            mock.serving = False
            missing = await contact.sign_of_life(ip="127.0.0.1", within=LONG)
            assert missing == "Check: sglang.grpc.scheduler.SglangScheduler is not serving"
            mock.serving = None
            assert await contact.sign_of_life(ip="127.0.0.1", within=LONG) == ""
            mock.healthy = False
            assert "not healthy" in await contact.sign_of_life(ip="127.0.0.1", within=LONG)


class TestRequests:
    async def test_envoy_is_told_of_it_as_what_it_is(self) -> None:
        async with RpcMock("sglang", "prefill") as mock, RpcMock("sglang", "decode") as other, fleet(FAST) as f:
            workers = [f.registry.add(spec(P, mock.url)), f.registry.add(spec(D, other.url))]
            for worker in workers:
                await f.becomes(worker, Status.READY)
                await until(f.registry, lambda worker=worker: worker.usable)
            assert f.registry.usable(P, None) == (workers[0],)
            assert f.registry.readiness().ready
            snapshot = f.envoy.published[-1]
            assert [endpoint.port for endpoint in snapshot.of(DECODE_GRPC_CLUSTER)] == [other.port]
            assert snapshot.of(DECODE_CLUSTER) == ()
            assert all(endpoint.grpc for endpoint in (*snapshot.prefill, *snapshot.decode))

    async def test_http_workers_beside_it_are_used_with_each_other(self) -> None:
        async with RpcMock("sglang", "decode") as mock, engine() as http, engine(mode="decode") as decode, fleet() as f:
            over_grpc = f.registry.add(spec(D, mock.url))
            workers = [f.registry.add(spec(P, http.url)), f.registry.add(spec(D, decode.url))]
            await until(f.registry, lambda: all(worker.usable for worker in workers))
            await f.becomes(over_grpc, Status.READY)
            await until(f.registry, lambda: over_grpc.usable)
            (prefill,) = f.registry.pairs(None).prefills
            assert f.registry.pairs(None).tiers(prefill) == ((workers[1],),)
            assert f.registry.readiness().ready

    async def test_none_is_paired_with_one_over_http(self) -> None:
        async with RpcMock("sglang", "decode") as mock, engine() as http, fleet() as f:
            prefill, decode = f.registry.add(spec(P, http.url)), f.registry.add(spec(D, mock.url))
            await until(f.registry, lambda: prefill.usable)
            await f.becomes(decode, Status.READY)
            await until(f.registry, lambda: decode.usable)
            assert f.registry.pairs(None).prefills == ()
            assert 'mismatch on ["connection_mode"]' in f.registry.readiness().reason
            assert 'connection_mode: ["http"] and ["grpc"]' in f.registry.trouble(decode)


class TestLoads:
    async def known(self, worker: Worker) -> EngineLoad:
        await eventually(lambda: worker.engine_load)
        assert worker.engine_load is not None
        return worker.engine_load

    async def test_sglang(self) -> None:
        async with RpcMock("sglang", "prefill") as mock, fleet() as f, loads(f):
            mock.facts.running, mock.facts.waiting = 3, 2
            worker = f.registry.add(spec(P, mock.url, api_key="s3cret"))
            load = await self.known(worker)
            assert (load.running, load.waiting, load.used_tokens, load.max_tokens) == (3, 2, 48, 8192)
            assert (load.max_running, load.kv_usage) == (2048, pytest.approx(48 / 8192))
            assert (load.ranks[0].prefill_queue, load.ranks[0].decode_queue) == (2, None)
            assert load.total_tokens is None
            call = next(call for call in mock.calls if call.method == "GetLoads")
            assert list(call.request.include) == ["core", "disagg", "queues", "memory"]
            assert call.metadata["authorization"] == "Bearer s3cret"

    async def test_what_vllm_does_not_say_is_absent(self) -> None:
        async with RpcMock("vllm", "decode", dp_size=2) as mock, fleet() as f, loads(f):
            mock.facts.running = 3
            load = await self.known(f.registry.add(spec(D, mock.url)))
            assert [rank.running for rank in load.ranks] == [3, 3]
            assert (load.max_running, load.max_tokens) == (32, 65536)
            first = load.ranks[0]
            assert (first.used_tokens, first.utilization, first.prefill_queue, first.transfer_ms) == (None,) * 4

    async def test_an_engine_that_has_not_reported_has_no_load(self) -> None:
        async with RpcMock("sglang", "decode") as mock, fleet() as f, loads(f):
            mock.facts.ranks_that_report = 0
            worker = f.registry.add(spec(D, mock.url))
            await eventually(lambda: mock.count("GetLoads") > 2)
            assert worker.engine_load is None
            mock.facts.ranks_that_report = None
            await self.known(worker)

    async def test_one_without_loads_is_named_and_asked_seldom(self) -> None:
        async with RpcMock("tokenspeed", "decode") as mock, fleet() as f, loads(f, interval=0.05):
            mock.errors["GetLoads"] = grpc.StatusCode.UNIMPLEMENTED
            worker = f.registry.add(spec(D, mock.url))
            await eventually(lambda: mock.count("GetLoads") > 1)
            assert worker.engine_load is None

    async def test_a_worker_that_is_out_has_none(self) -> None:
        async with RpcMock("vllm", "decode") as mock, fleet(FAST) as f, loads(f):
            worker = f.registry.add(spec(D, mock.url))
            await self.known(worker)
            mock.healthy = False
            await f.becomes(worker, Status.NOT_READY)
            assert worker.engine_load is None


class TestChannels:
    async def test_a_worker_has_one_and_none_when_it_has_left(self) -> None:
        async with RpcMock("sglang", "decode") as mock, RpcMock("vllm", "decode") as other, fleet(FAST) as f, loads(f):
            workers = [f.registry.add(spec(D, each.url)) for each in (mock, other)]
            await eventually(lambda: all(worker.engine_load for worker in workers))
            assert len(f.client.rpc) == 2
            f.registry.remove(workers[0])
            await until(f.registry, lambda: f.registry.get(workers[0].id) is None)
            assert len(f.client.rpc) == 1
            seen = len(mock.calls)
            await eventually(lambda: other.count("HealthCheck") > 10)
            assert len(mock.calls) == seen

    async def test_one_question_that_fails_leaves_others_under_way_alone(self) -> None:
        async with RpcMock("sglang", "decode") as mock, fleet(SLOW) as f:
            worker = f.registry.add(spec(D, mock.url))
            await f.becomes(worker, Status.READY)
            mock.hang = True
            contact = f.monitor._contact(worker)
            slow = asyncio.create_task(f.client.rpc.ask(worker, "/x.Y/Z", b"", bytes, within=LONG))
            with pytest.raises(Exception, match="no answer within"):
                await contact.probe("", ip="127.0.0.1", within=0.05)
            with pytest.raises(Exception, match="Z: not implemented"):
                await slow

    async def test_a_certificate_is_checked_with_the_authority_of_https_workers(self) -> None:
        text = CERTIFICATE.read_bytes()
        begin = text.index(b"-----BEGIN CERTIFICATE")
        chain, key = text[begin:], text[:begin]
        if b"PRIVATE KEY" not in key:
            end = text.index(b"-----END CERTIFICATE-----") + len(b"-----END CERTIFICATE-----\n")
            chain, key = text[:end], text[end:]
        context = ssl.create_default_context(cafile=str(CERTIFICATE))
        name = context.get_ca_certs()[0]["subject"][0][0][1]
        pair = (chain, key)
        for tls, good in ((context, True), (None, False)):
            async with RpcMock("vllm", "decode", tls=pair) as mock:
                f = Fleet(FAST)
                await f.client.close()
                f.client.rpc = WorkerClient(tls).rpc
                f.names[str(name)] = ["127.0.0.1"]
                f.monitor.start()
                try:
                    worker = f.registry.add(spec(D, f"grpcs://{name}:{mock.port}"))
                    if good:
                        await f.becomes(worker, Status.READY)
                    else:
                        await f.is_said(worker, "CERTIFICATE_VERIFY_FAILED")
                finally:
                    await f.monitor.stop()
                    await f.registry.close()
                    await f.client.close()

    def test_the_systems_authorities_are_those_of_its_trust_store(self) -> None:
        roots = pem_roots(None)
        assert roots is None or roots.startswith(b"-----BEGIN CERTIFICATE") or b"BEGIN CERTIFICATE" in roots

    async def test_an_http_server_is_no_grpc_server(self) -> None:
        server = Engine()
        await server.start()
        async with fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url.replace("http", "grpc")))
            await f.is_said(worker, "HealthCheck: ")
            assert worker.status is Status.PENDING
        await server.stop()
