"""What the monitor finds at a prefill's bootstrap server: whether it answers, and Mooncake's engine ids."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import FAST, SLOW, Engine, Fleet, engine, eventually, fleet, spec, until

from extproc.workers import bootstrap
from extproc.workers.health_state import Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.registry import Change
from extproc.workers.worker import MOONCAKE, MOONCAKE_BOOTSTRAP_PORT, NIXL, KvEngine, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
SEVERAL = "2 engine cores, and no --dp-aware: the decode recomputes each prompt"
# What the data path gives reason for is done at once.
EAGER = Pace(seek=0.01, confirm=0.005, report=0.0, doubt=0.0)


def mooncake(f: Fleet, server: Engine, engine_id: str = "", role: Role = P, **more: Any) -> Worker:
    kv = KvConfig(MOONCAKE, engine_id=engine_id)
    return f.registry.add(spec(role, server.url, kv=kv, bootstrap_port=server.bootstrap_port, **more))


class TestSglang:
    async def test_a_silent_bootstrap_port_is_said_once_and_the_worker_usable(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with engine() as server, fleet() as f:
            await server.stop_bootstrap()
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            trouble = f"bootstrap port 127.0.0.1:{server.bootstrap_port} does not answer (Connection refused)"
            assert f.registry.trouble(worker) == trouble
            probes = server.count("/health")
            await eventually(lambda: server.count("/health") > probes + 1)
            assert [record.message for record in caplog.records].count(trouble) == 1
            assert server.count("/server_info") == 1
            await server.start_bootstrap()
            await eventually(lambda: f.registry.trouble(worker) == "")

    async def test_a_host_of_its_own_is_looked_at(self) -> None:
        async with engine(host="127.0.0.1") as server, fleet() as f:
            port = server.bootstrap_port or 0
            there = f.registry.add(spec(P, server.url, bootstrap_port=port, bootstrap_host="localhost"))
            await until(f.registry, lambda: there.usable)
            assert f.registry.trouble(there) == ""
            f.registry.change(there, spec(P, server.url, bootstrap_port=port, bootstrap_host="127.0.0.2"))
            await f.is_said(there, f"bootstrap port 127.0.0.2:{port} does not answer")

    async def test_only_prefill_workers_need_one(self) -> None:
        async with engine(mode="decode") as server, fleet() as f:
            await server.stop_bootstrap()
            worker = f.registry.add(spec(D, server.url))
            await until(f.registry, lambda: worker.usable)
            assert f.registry.trouble(worker) == ""

    async def test_it_is_not_looked_at_with_every_probe(self) -> None:
        async with engine() as server, fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            await server.stop_bootstrap()
            probes = server.count("/health")
            await eventually(lambda: server.count("/health") > probes + 2)
            assert f.registry.trouble(worker) == ""


class TestVllm:
    async def test_without_a_connector_it_is_usable_and_the_lack_is_said(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with engine(owner="vllm") as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            trouble = "no kv_connector registered: whatever the prefill returns is relayed"
            assert f.registry.trouble(worker) == trouble
            assert trouble in caplog.text
            assert worker.pairing.key == "vllm/?/?"
            assert [path for path, _ in server.requests] == ["/health", "/v1/models", "/version", "/metrics"]

    async def test_of_a_connector_that_nobody_knows_that_is_said(self) -> None:
        async with engine(owner="vllm") as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, kv=KvConfig("TheirConnector")))
            await until(f.registry, lambda: worker.usable)
            trouble = "connector TheirConnector is not known: whatever the prefill returns is relayed"
            assert f.registry.trouble(worker) == trouble
            assert worker.pairing.key == "vllm/theirconnector/?"

    async def test_nixl_has_no_bootstrap_server(self) -> None:
        async with engine(owner="vllm") as server, fleet() as f:
            await server.stop_bootstrap()
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(NIXL), bootstrap_port=server.bootstrap_port))
            await until(f.registry, lambda: worker.usable)
            assert f.registry.trouble(worker) == "bootstrap_port is of no effect with NixlConnector"
            assert worker.kv_engines == ()

    async def test_a_connector_on_an_sglang_server_keeps_it_out(self) -> None:
        async with engine() as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(NIXL)))
            await f.becomes(worker, Status.FAILED)
            assert f.registry.trouble(worker).startswith(
                "registered with kv_connector NixlConnector, but the server is"
            )


class TestMooncake:
    async def test_the_engine_id_is_asked_for_before_requests_come(self) -> None:
        async with engine(owner="vllm", engine_ids={"0": "e-1"}) as server, fleet() as f:
            worker = mooncake(f, server, api_key="s3cret")
            await until(f.registry, lambda: worker.usable)
            assert worker.kv_engines == (KvEngine(0, "e-1"),)
            assert f.registry.trouble(worker) == ""
            headers = next(headers for path, headers in server.requests if path == "/query")
            assert headers["host"] == f"127.0.0.1:{server.bootstrap_port}"
            assert "authorization" not in headers

    async def test_every_rank_has_its_own(self) -> None:
        async with engine(owner="vllm", engine_ids={"1": "e_dp1", "0": "e_dp0"}) as server, fleet() as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            assert worker.kv_engines == (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))

    async def test_a_decode_worker_is_not_asked(self) -> None:
        async with engine(owner="vllm", engine_ids={"0": "e-1"}) as server, fleet() as f:
            worker = mooncake(f, server, role=D)
            await until(f.registry, lambda: worker.usable)
            assert worker.kv_engines == ()
            assert server.count("/query") == 0

    async def test_the_port_is_vllms_usual_one_unless_registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert MOONCAKE_BOOTSTRAP_PORT == 8998
        async with engine(owner="vllm", engine_ids={"0": "e-1"}) as server, fleet() as f:
            monkeypatch.setattr(bootstrap, "MOONCAKE_BOOTSTRAP_PORT", server.bootstrap_port)
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE)))
            await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "e-1"),))
            assert worker.bootstrap_port is None

    async def test_a_registered_id_is_used_though_nothing_answers(self) -> None:
        async with engine(owner="vllm") as server, fleet() as f:
            await server.stop_bootstrap()
            worker = mooncake(f, server, "mine", labels={"dp_size": "2"})
            assert worker.kv_engines == (KvEngine(0, "mine_dp0"), KvEngine(1, "mine_dp1"))
            await until(f.registry, lambda: worker.usable)
            assert worker.kv_engines == (KvEngine(0, "mine_dp0"), KvEngine(1, "mine_dp1"))
            assert f.registry.trouble(worker) == (
                f"bootstrap port 127.0.0.1:{server.bootstrap_port} does not answer (GET /query: Connection refused); "
                f"{SEVERAL}"
            )

    @pytest.mark.parametrize("ids", [{"0": "mine"}, {"0": "mine_dp0", "1": "mine_dp1"}])
    async def test_a_registered_id_that_the_server_confirms(self, ids: dict[str, str]) -> None:
        async with engine(owner="vllm", engine_ids=ids) as server, fleet() as f:
            worker = mooncake(f, server, "mine")
            await until(f.registry, lambda: worker.usable)
            assert [engine.id for engine in worker.kv_engines] == list(ids.values())
            assert f.registry.trouble(worker) == ("" if len(ids) == 1 else SEVERAL)

    async def test_a_registered_id_that_the_server_contradicts(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine(owner="vllm", engine_ids={"0": "other"}) as server, fleet() as f:
            worker = mooncake(f, server, "mine")
            await until(f.registry, lambda: worker.usable)
            trouble = "registered with engine id mine, but the server says other"
            assert f.registry.trouble(worker) == trouble
            assert trouble in caplog.text
            assert worker.kv_engines == (KvEngine(0, "other"),)

    async def test_no_id_at_all_is_said_until_there_is_one(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine(owner="vllm") as server, fleet() as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            trouble = (
                f"bootstrap port 127.0.0.1:{server.bootstrap_port} knows no engine yet; "
                "no engine id: the decode recomputes each prompt"
            )
            assert f.registry.trouble(worker) == trouble
            assert trouble in caplog.text
            server.engine_ids = {"0": "late"}
            await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "late"),))
            await eventually(lambda: f.registry.trouble(worker) == "")

    async def test_a_restarted_worker_has_its_new_id_before_requests_come(self) -> None:
        async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(FAST) as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            server.health = 500
            await f.becomes(worker, Status.NOT_READY)
            server.engine_ids = {"0": "second"}
            seen: list[tuple[Change, str]] = []
            f.registry.subscribe(lambda _worker, change: seen.append((change, worker.kv_engines[0].id)))
            server.health = 200
            await f.becomes(worker, Status.READY)
            assert seen == [
                (Change.IDENTITY, "first"),
                (Change.IDENTITY, "second"),
                (Change.RESTARTED, "second"),
                (Change.STATUS, "second"),
            ]

    async def test_a_former_id_is_not_kept_when_the_server_stops_telling(self) -> None:
        async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(SLOW, EAGER) as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            await server.stop_bootstrap()
            f.monitor.report_failure(worker)
            await until(f.registry, lambda: not worker.kv_engines)
            assert worker.usable

    async def test_a_reported_failure_has_it_asked_again(self) -> None:
        async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(SLOW, EAGER) as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            server.engine_ids = {"0": "second"}
            f.monitor.report_failure(worker)
            await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "second"),))

    async def test_many_failures_cost_few_questions(self) -> None:
        pace = Pace(seek=0.01, report=0.0, doubt=60)
        async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(SLOW, pace) as f:
            worker = mooncake(f, server)
            await until(f.registry, lambda: worker.usable)
            for _ in range(3):
                probes = server.count("/health")
                f.monitor.report_failure(worker)
                await eventually(lambda: server.count("/health") > probes)  # noqa: B023 - awaited here
            assert (server.count("/query"), server.count("/v1/models")) == (1, 1)

    async def test_a_failure_of_a_stranger_is_ignored(self) -> None:
        async with fleet() as f:
            worker = f.registry.add(spec(P, "http://nowhere:1"))
            f.registry.remove(worker)
            await until(f.registry, lambda: not len(f.registry))
            f.monitor.report_failure(worker)
