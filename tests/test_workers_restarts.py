"""A Mooncake prefill that restarted between two probes is noticed at its bootstrap server."""

from __future__ import annotations

from fleet import SLOW, engine, eventually, fleet, spec, until

from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Status

P, D = Role.PREFILL, Role.DECODE
PACE = Pace(seek=0.01, report=0.0, doubt=3600, restart=0.01)  # no probe looks at the bootstrap server by itself
UNPROBED = HealthSettings(enabled=False)


async def test_a_new_engine_id_is_told_before_the_next_probe() -> None:
    async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(SLOW, PACE) as f:
        worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
        await until(f.registry, lambda: worker.usable)
        server.engine_ids = {"0": "second"}
        await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "second"),))


async def test_a_worker_that_is_not_probed_is_noticed_too() -> None:
    async with engine(owner="vllm", engine_ids={"0": "first"}) as server, fleet(UNPROBED, PACE) as f:
        worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
        await until(f.registry, lambda: worker.usable)
        server.engine_ids = {"0": "second"}
        await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "second"),))


async def test_an_answer_like_the_one_before_costs_no_probe() -> None:
    async with engine(owner="vllm", engine_ids={"0": "e"}) as server, fleet(SLOW, PACE) as f:
        worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
        await until(f.registry, lambda: worker.usable)
        await eventually(lambda: server.count("/query") > 5)
        probes = server.count("/health")
        assert probes <= 2  # when it joined, and after the first answer
        asked = server.count("/query")
        await eventually(lambda: server.count("/query") > asked + 5)
        assert server.count("/health") == probes


async def test_a_server_that_stops_answering_has_its_worker_looked_at_once() -> None:
    async with engine(owner="vllm", engine_ids={"0": "e"}) as server, fleet(SLOW, PACE) as f:
        worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
        await until(f.registry, lambda: worker.usable)
        await server.stop_bootstrap()
        await f.is_said(worker, "does not answer")
        assert worker.kv_engines == ()
        await server.start_bootstrap()
        await until(f.registry, lambda: worker.kv_engines == (KvEngine(0, "e"),))


async def test_only_ready_mooncake_prefills_are_asked() -> None:
    async with (
        engine(owner="vllm", engine_ids={"0": "e"}) as asked,
        engine(owner="vllm", engine_ids={"0": "e"}) as decode,
        engine(owner="vllm", engine_ids={"0": "e"}) as nixl,
        fleet(SLOW, PACE) as f,
    ):
        first = f.registry.add(spec(P, asked.url, kv=KvConfig(MOONCAKE), bootstrap_port=asked.bootstrap_port))
        second = f.registry.add(spec(D, decode.url, kv=KvConfig(MOONCAKE), bootstrap_port=decode.bootstrap_port))
        third = f.registry.add(spec(P, nixl.url, kv=KvConfig(NIXL), bootstrap_port=nixl.bootstrap_port))
        await until(f.registry, lambda: first.usable and second.usable and third.usable)
        await eventually(lambda: asked.count("/query") > 5)
        assert (decode.count("/query"), nixl.count("/query")) == (0, 0)
        f.registry.remove(first)
        await until(f.registry, lambda: first not in list(f.registry))
        assert f.registry.get(first.id) is None
        assert first.status is Status.DRAINING
