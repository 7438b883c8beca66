"""Data-parallel ranks: how their entries come, change and go with their server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from fleet import FAST, PACE, FakeEnvoy, add_ready, engine, eventually, fleet, spec, until

from extproc.workers import ranks
from extproc.workers.addresses import EndpointTakenError
from extproc.workers.kv_config import KvConfig
from extproc.workers.metadata import Metadata
from extproc.workers.registry import Change, Registry, WorkerExistsError
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
URL = "http://10.0.0.1:8000"


@pytest.fixture
async def envoy() -> FakeEnvoy:
    return FakeEnvoy()


@pytest.fixture
async def registry(envoy: FakeEnvoy) -> AsyncIterator[Registry]:
    registry = Registry(envoy.publish, drain_limit=60, drain_poll=0.001, publish_retry=0.01, dp_aware=True)
    yield registry
    await registry.close()


def of(size: int, version: str = "0.5.23") -> Metadata:
    """What an SGLang server of so many ranks says."""
    labels = {"version": version, "dp_size": str(size)}
    return Metadata(model_ids=("tiny",), labels=labels, runtime="sglang", dp_size=size)


async def ready(registry: Registry, role: Role = D, size: int = 3, url: str = URL) -> Worker:
    """A server of so many ranks that is in use; its first entry."""
    worker = registry.add(spec(role, url))
    registry.place(worker, worker.url.host)
    registry.describe(worker, of(size))
    registry.set_status(worker, Status.READY)
    await until(registry, lambda: worker.usable)
    return worker


def names(registry: Registry) -> list[str]:
    return [worker.name for worker in registry]


class TestComing:
    async def test_a_server_is_one_entry_until_it_says_how_many_ranks_it_has(self, registry: Registry) -> None:
        worker = registry.add(spec(P, URL))
        assert (worker.name, worker.dp_rank, worker.dp_size, worker.ranks) == (URL, None, 1, ())
        registry.describe(worker, of(3))
        assert names(registry) == [f"{URL}@0", f"{URL}@1", f"{URL}@2"]
        entries = list(registry)
        assert entries[0] is worker  # so that the id given at registration stays good
        assert len({entry.id for entry in entries}) == 3
        assert [(entry.dp_rank, entry.dp_size, entry.base_url) for entry in entries] == [(r, 3, URL) for r in range(3)]
        assert {entry.server for entry in entries} == {worker}
        assert {entry.model_ids for entry in entries} == {("tiny",)}
        assert {entry.status for entry in entries} == {Status.PENDING}
        assert [registry.get(entry.id) for entry in entries] == entries
        assert all(registry.spec(entry) is registry.spec(worker) for entry in entries)

    async def test_one_rank_is_a_server_as_a_whole(self, registry: Registry) -> None:
        worker = registry.add(spec(P, URL))
        registry.describe(worker, of(1))
        assert (names(registry), worker.dp_rank) == ([URL], None)

    async def test_without_dp_aware_so_are_several(self, envoy: FakeEnvoy) -> None:
        registry = Registry(envoy.publish)
        worker = registry.add(spec(P, URL))
        registry.describe(worker, of(3))
        assert (names(registry), worker.labels["dp_size"]) == ([URL], "3")
        await registry.close()

    async def test_all_are_used_at_one_endpoint_once_envoy_has_it(self, registry: Registry, envoy: FakeEnvoy) -> None:
        envoy.hold()
        worker = registry.add(spec(D, URL))
        registry.describe(worker, of(3))
        registry.place(worker, "10.0.0.1")
        registry.set_status(worker, Status.READY)
        assert registry.usable(D, "tiny") == ()
        envoy.release()
        await until(registry, lambda: len(registry.usable(D, "tiny")) == 3)
        assert {entry.endpoint for entry in registry} == {"10.0.0.1:8000"}
        assert envoy.addresses(D) == ["10.0.0.1:8000"]

    async def test_a_stranger_at_their_address_is_refused(self, registry: Registry) -> None:
        await ready(registry)
        stranger = registry.add(spec(D, "http://other:8000"))
        with pytest.raises(EndpointTakenError, match=r"decode worker http://10\.0\.0\.1:8000"):
            registry.place(stranger, "10.0.0.1")

    async def test_the_url_cannot_be_registered_twice(self, registry: Registry) -> None:
        await ready(registry)
        with pytest.raises(WorkerExistsError):
            registry.add(spec(D, URL))

    @pytest.mark.parametrize(
        ("label", "said", "count"),
        [("4", None, 4), (None, 4, 4), ("4", 2, 2), ("many", None, 1), (None, 0, 1), (None, 1025, 1), ("1", 3, 3)],
    )
    async def test_the_servers_word_counts_more_than_the_label(
        self, registry: Registry, label: str | None, said: int | None, count: int
    ) -> None:
        labels = {} if label is None else {"dp_size": label}
        worker = registry.add(spec(P, URL, labels=labels, runtime="vllm"))
        registry.describe(worker, Metadata(runtime="vllm", dp_size=said))
        assert len(registry) == count
        if said:
            assert worker.labels["dp_size"] == str(said)

    @pytest.mark.parametrize(("role", "count"), [(P, 3), (D, 1)])
    async def test_a_decode_of_an_sglang_that_knows_one_field_is_not_divided(
        self, registry: Registry, role: Role, count: int
    ) -> None:
        worker = registry.add(spec(role, URL))
        registry.describe(worker, of(3, "0.5.9"))
        assert len(registry) == count


@pytest.mark.parametrize(
    ("version", "two"),
    [
        ("0.5.9", False),
        ("0.5.9.post1", False),
        ("0.4.10", False),
        ("v0.5.6", False),
        ("0.5.10", True),
        ("0.5.10rc0", True),
        ("0.6.0", True),
        ("1.0.0", True),
        ("0.0.0.dev1+g1234567", True),  # a build of one's own
        ("main", True),
        ("", True),
    ],
)
def test_from_which_version_on_sglang_has_two_fields(version: str, two: bool) -> None:  # noqa: FBT001
    assert ranks.has_two_fields(version) is two


class TestTogether:
    async def test_they_share_one_state(self, registry: Registry) -> None:
        worker = await ready(registry)
        told: list[tuple[str, Change]] = []
        registry.subscribe(lambda entry, change: told.append((entry.name, change)))
        registry.set_status(worker, Status.NOT_READY, "gone")
        assert {(entry.status, entry.reason) for entry in registry} == {(Status.NOT_READY, "gone")}
        assert told == [(f"{URL}@{rank}", Change.STATUS) for rank in range(3)]
        assert registry.usable(D, "tiny") == ()

    async def test_whatever_is_told_of_one_holds_for_all(self, registry: Registry) -> None:
        last = (await ready(registry)).ranks[-1]
        registry.set_status(last, Status.NOT_READY)
        registry.describe(last, Metadata(model_ids=("other",), runtime="sglang", dp_size=3))
        assert {(entry.status, entry.model_ids) for entry in registry} == {(Status.NOT_READY, ("other",))}

    async def test_loads_are_counted_apart(self, registry: Registry) -> None:
        worker = await ready(registry)
        worker.ranks[1].load += 1
        assert [entry.load for entry in registry] == [0, 1, 0]

    async def test_they_move_together_and_the_former_address_stays_for_the_last_request(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        worker = await ready(registry)
        worker.ranks[2].load = 1
        registry.place(worker, "10.0.0.2")
        await until(registry, lambda: {entry.endpoint for entry in registry} == {"10.0.0.2:8000"})
        assert envoy.addresses(D) == ["10.0.0.2:8000", "10.0.0.1:8000"]
        worker.ranks[2].load = 0
        await eventually(lambda: envoy.addresses(D) == ["10.0.0.2:8000"])

    @pytest.mark.parametrize("rank", [0, 2])
    async def test_removing_one_removes_all_when_the_last_request_has_ended(
        self, registry: Registry, envoy: FakeEnvoy, rank: int
    ) -> None:
        worker = await ready(registry)
        entries = worker.ranks
        entries[1].load = 1
        registry.remove(entries[rank])
        registry.remove(entries[0])
        assert {entry.status for entry in entries} == {Status.DRAINING}
        assert registry.usable(D, "tiny") == ()
        again = await ready(registry)  # meanwhile
        assert again.id not in {entry.id for entry in entries}
        assert len(registry) == 6
        entries[1].load = 0
        await until(registry, lambda: len(registry) == 3)
        assert list(registry) == list(again.ranks)
        assert {entry.endpoint for entry in entries} == {None}
        assert envoy.addresses(D) == ["10.0.0.1:8000"]


class TestAnotherNumber:
    async def test_more_ranks_are_in_use_at_once(self, registry: Registry) -> None:
        worker = await ready(registry, size=2)
        before = worker.ranks
        registry.describe(worker, of(4))
        assert worker.ranks[:2] == before
        assert [entry.name for entry in registry.usable(D, "tiny")] == [f"{URL}@{rank}" for rank in range(4)]
        assert {entry.dp_size for entry in registry} == {4}

    async def test_fewer_get_no_requests_and_are_forgotten_when_theirs_have_ended(self, registry: Registry) -> None:
        worker = await ready(registry, size=4)
        former = worker.ranks[2:]
        former[1].load = 1
        registry.describe(worker, of(2))
        assert [entry.name for entry in registry.usable(D, "tiny")] == [f"{URL}@0", f"{URL}@1"]
        assert {entry.status for entry in former} == {Status.DRAINING}
        registry.set_status(worker, Status.NOT_READY)
        registry.set_status(former[1], Status.READY)
        assert former[1].status is Status.DRAINING
        await until(registry, lambda: len(registry) == 3)
        former[1].load = 0
        await until(registry, lambda: len(registry) == 2)
        registry.describe(worker, of(3))
        assert worker.ranks[2].id not in {entry.id for entry in former}

    async def test_one_is_a_server_as_a_whole_again(self, registry: Registry) -> None:
        worker = await ready(registry, size=2)
        registry.describe(worker, of(1))
        assert (worker.name, worker.dp_rank, worker.dp_size, worker.ranks) == (URL, None, 1, ())
        assert registry.usable(D, "tiny") == (worker,)
        await until(registry, lambda: len(registry) == 1)

    async def test_what_is_left_over_is_removed_too(self, registry: Registry) -> None:
        worker = await ready(registry, size=2)
        former = worker.ranks[1]
        former.load = 1
        registry.describe(worker, of(1))
        registry.remove(former)
        assert worker.status is Status.READY
        registry.remove(worker)
        former.load = 0
        await until(registry, lambda: len(registry) == 0)


class TestEngines:
    """Mooncake: each rank has the engine core that a decode is told."""

    def add(self, registry: Registry, engine_id: str = "", **labels: str) -> Worker:
        kv = KvConfig(MOONCAKE, engine_id=engine_id)
        return registry.add(spec(P, URL, kv=kv, labels=labels))

    async def test_registered(self, registry: Registry) -> None:
        worker = self.add(registry, "e", dp_size="2")
        registry.describe(worker, Metadata(runtime="vllm"))
        assert [entry.kv_engines for entry in registry] == [(KvEngine(0, "e_dp0"),), (KvEngine(1, "e_dp1"),)]

    async def test_asked_for(self, registry: Registry) -> None:
        worker = self.add(registry)
        registry.describe(worker, Metadata(runtime="vllm"))
        early: list[Change] = []
        registry.subscribe(lambda _, change: early.append(change))
        registry.set_engines(worker, (KvEngine(0, "a_dp0"), KvEngine(1, "a_dp1")))
        assert [entry.kv_engines for entry in registry] == [(KvEngine(0, "a_dp0"),), (KvEngine(1, "a_dp1"),)]
        assert Change.RESTARTED not in early
        changes: list[tuple[Worker, Change]] = []
        registry.subscribe(lambda entry, change: changes.append((entry, change)))
        registry.set_engines(worker, (KvEngine(0, "b_dp0"), KvEngine(1, "b_dp1")))
        assert [entry.kv_engines for entry in registry] == [(KvEngine(0, "b_dp0"),), (KvEngine(1, "b_dp1"),)]
        assert [entry for entry, change in changes if change is Change.RESTARTED] == list(registry)

    @pytest.mark.parametrize(("last", "said"), [(1_000_000, None), (1, 1)])
    async def test_no_ranks_are_made_of_nonsense_or_against_the_servers_word(
        self, registry: Registry, last: int, said: int | None
    ) -> None:
        worker = self.add(registry)
        registry.describe(worker, Metadata(runtime="vllm", dp_size=said))
        registry.set_engines(worker, (KvEngine(0, "a"), KvEngine(last, "b")))
        assert (len(registry), len(worker.kv_engines)) == (1, 2)

    async def test_a_rank_that_is_new_has_none_until_it_is_told(self, registry: Registry) -> None:
        worker = self.add(registry, "e", dp_size="2")
        registry.describe(worker, Metadata(runtime="vllm", dp_size=3))
        assert [len(entry.kv_engines) for entry in registry] == [1, 1, 0]

    async def test_without_dp_aware_the_server_has_all(self, envoy: FakeEnvoy) -> None:
        registry = Registry(envoy.publish)
        worker = self.add(registry)
        registry.set_engines(worker, (KvEngine(0, "a_dp0"), KvEngine(1, "a_dp1")))
        assert (len(registry), len(worker.kv_engines)) == (1, 2)
        await registry.close()


class TestWatching:
    async def test_one_probe_and_one_question_for_all_ranks(self) -> None:
        async with engine(extra_info={"dp_size": 4}) as server, fleet(dp_aware=True) as f:
            f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 4)
            assert [server.count(path) for path in ("/health", "/v1/models", "/server_info")] == [1, 1, 1]
            assert f.envoy.addresses(P) == [f"127.0.0.1:{server.port}"]

    async def test_a_restart_with_another_number_is_noticed_after_a_report_of_any_rank(self) -> None:
        async with engine(mode="decode", extra_info={"dp_size": 2}) as server, fleet(dp_aware=True) as f:
            worker = f.registry.add(spec(D, server.url))
            await until(f.registry, lambda: len(f.registry.usable(D, "tiny")) == 2)
            await server.stop()
            server.extra_info = {"dp_size": 3}
            f.monitor.report_unreachable(worker.ranks[1])
            await f.becomes(worker, Status.NOT_READY)
            assert f.registry.usable(D, "tiny") == ()
            await server.start()
            await until(f.registry, lambda: len(f.registry.usable(D, "tiny")) == 3)

    async def test_an_unnoticed_restart_shows_after_a_refusal(self) -> None:
        async with engine(extra_info={"dp_size": 3}) as server, fleet(FAST, dp_aware=True) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 3)
            server.extra_info = {"dp_size": 1}
            watch = f.monitor._watches[worker.id]
            watch._identity.identified_at -= 60
            f.monitor.report_failure(worker.ranks[2])
            await until(f.registry, lambda: f.registry.usable(P, "tiny") == (worker,))

    async def test_it_is_asked_again_from_time_to_time(self) -> None:
        pace = replace(PACE, ranks=0.05)
        async with engine(extra_info={"dp_size": 2}) as server, fleet(FAST, pace, dp_aware=True) as f:
            f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            server.extra_info = {"dp_size": 3}
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 3)

    async def test_vllm_tells_by_refusing_a_rank_that_it_does_not_have(self) -> None:
        async with engine(owner="vllm", ranks=4) as server, fleet(dp_aware=True) as f:
            worker = f.registry.add(spec(D, server.url, kv=KvConfig(NIXL)))
            await until(f.registry, lambda: len(f.registry.usable(D, "tiny")) == 4)
            assert f.registry.trouble(worker) == ""
            posts = [body for path, body in server.posts if path == "/v1/completions"]
            assert posts == [{"model": "tiny", "prompt": "x", "max_tokens": 1}]

    async def test_of_an_engine_that_does_not_the_label_counts(self) -> None:
        async with engine(owner="vllm") as server, fleet(dp_aware=True) as f:
            f.registry.add(spec(D, server.url, kv=KvConfig(NIXL), labels={"dp_size": "2"}))
            await until(f.registry, lambda: len(f.registry.usable(D, "tiny")) == 2)

    async def test_a_label_that_is_not_true_is_said(self) -> None:
        async with engine(owner="vllm", ranks=2) as server, fleet(dp_aware=True) as f:
            worker = f.registry.add(spec(D, server.url, kv=KvConfig(NIXL), labels={"dp_size": "4"}))
            await until(f.registry, lambda: len(f.registry.usable(D, "tiny")) == 2)
            assert f.registry.trouble(worker.ranks[1]) == "registered with dp_size 4, but the server says 2"

    async def test_without_dp_aware_nobody_asks(self) -> None:
        async with engine(owner="vllm", ranks=4) as server, fleet() as f:
            worker = f.registry.add(spec(D, server.url, kv=KvConfig(NIXL)))
            await until(f.registry, lambda: worker.usable)
            assert len(f.registry) == 1
            assert not any(path == "/v1/completions" for path, _ in server.posts)

    async def test_mooncakes_bootstrap_server_tells_the_ranks_too(self) -> None:
        ids = {"0": "e_dp0", "1": "e_dp1"}
        async with engine(owner="vllm", engine_ids=ids) as server, fleet(dp_aware=True) as f:
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            assert [entry.kv_engines for entry in worker.ranks] == [(KvEngine(0, "e_dp0"),), (KvEngine(1, "e_dp1"),)]
            assert server.count("/query") == 1

    async def test_and_asking_again_changes_nothing(self) -> None:
        ids = {"0": "e_dp0", "1": "e_dp1"}
        async with engine(owner="vllm", engine_ids=ids) as server, fleet(FAST, dp_aware=True) as f:
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            before, asked = list(f.registry), server.count("/version")
            f.monitor._watches[worker.id]._identity.identified_at -= 60
            f.monitor.report_failure(worker.ranks[1])
            await eventually(lambda: server.count("/version") > asked and server.count("/query") > 1)
            assert list(f.registry) == before
            server.engine_ids = {"0": "e_dp0", "1": "e_dp1", "2": "e_dp2"}
            f.monitor._watches[worker.id]._identity.identified_at -= 60
            f.monitor.report_failure(worker)
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 3)
            assert list(f.registry)[:2] == before

    async def test_without_dp_aware_several_engine_cores_are_a_warning(self) -> None:
        ids = {"0": "e_dp0", "1": "e_dp1"}
        async with engine(owner="vllm", engine_ids=ids) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, kv=KvConfig(MOONCAKE), bootstrap_port=server.bootstrap_port))
            await until(f.registry, lambda: worker.usable)
            assert f.registry.trouble(worker) == (
                "2 engine cores, and no --dp-aware: the decode recomputes each prompt"
            )

    async def test_removing_ends_the_watch(self) -> None:
        async with engine(extra_info={"dp_size": 2}) as server, fleet(FAST, dp_aware=True) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            f.registry.remove(worker.ranks[1])
            await until(f.registry, lambda: len(f.registry) == 0)
            assert not f.monitor._watches


async def test_ranks_count_as_workers_for_readiness(registry: Registry) -> None:
    await ready(registry, P, 2, "http://10.0.0.1:1")
    add_ready(registry, D, "http://10.0.0.2:1", "tiny")
    await until(registry, lambda: registry.readiness().ready)
    assert (registry.readiness().usable_workers, registry.readiness().total_workers) == (3, 3)
