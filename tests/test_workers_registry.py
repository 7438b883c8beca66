"""The registry: who may be given requests, what Envoy is told, and what is waited for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import pytest
from fleet import FakeEnvoy, add_ready, endpoint, eventually, spec, until

from extproc.workers.addresses import EndpointTakenError
from extproc.workers.endpoints import Endpoint, Snapshot
from extproc.workers.identify import CANNOT_LEARN
from extproc.workers.kv_config import KvConfig
from extproc.workers.metadata import Metadata
from extproc.workers.pairing import PairingMode
from extproc.workers.registry import Change, Registry, WorkerExistsError
from extproc.workers.spec import HealthOverrides
from extproc.workers.worker import MOONCAKE, NIXL, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
async def envoy() -> FakeEnvoy:
    return FakeEnvoy()


@pytest.fixture
async def registry(envoy: FakeEnvoy) -> AsyncIterator[Registry]:
    registry = Registry(envoy.publish, drain_limit=60, drain_poll=0.001, publish_retry=0.01)
    yield registry
    await registry.close()


def addresses(snapshots: list[Snapshot]) -> list[list[str]]:
    return [[endpoint.address for endpoint in snapshot.prefill] for snapshot in snapshots]


class TestAdding:
    async def test_a_new_worker_is_pending_and_has_a_version_7_id(self, registry: Registry) -> None:
        worker = registry.add(spec(P, "http://w:8000", bootstrap_port=8998, priority=3, labels={"zone": "a"}))
        identity = uuid.UUID(worker.id)
        assert (identity.version, identity.variant) == (7, uuid.RFC_4122)
        assert abs((identity.int >> 80) / 1000 - time.time()) < 60
        assert worker.status is Status.PENDING
        assert (worker.bootstrap_port, worker.priority, worker.labels) == (8998, 3, {"zone": "a"})
        assert registry.get(worker.id) is worker
        assert list(registry) == [worker]

    async def test_the_same_url_and_role_is_refused_naming_the_first(self, registry: Registry) -> None:
        first = registry.add(spec(P, "http://w:8000"))
        with pytest.raises(WorkerExistsError, match=first.id) as refusal:
            registry.add(spec(P, "http://W:8000/"))
        assert refusal.value.worker is first
        assert len(registry) == 1

    async def test_the_same_url_in_another_role_is_another_worker(self, registry: Registry) -> None:
        assert registry.add(spec(P, "http://w:8000")).id != registry.add(spec(D, "http://w:8000")).id

    async def test_the_api_key_is_in_no_representation(self, registry: Registry) -> None:
        registration = spec(P, "http://w:8000", api_key="s3cret")
        worker = registry.add(registration)
        assert "s3cret" not in repr(worker) + repr(registration)


class TestUsable:
    async def test_needs_health_and_envoys_acknowledgement(self, registry: Registry, envoy: FakeEnvoy) -> None:
        envoy.hold()
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await envoy.started.wait()
        assert worker.endpoint is None
        assert registry.usable(P, None) == ()
        assert registry.trouble(worker) == "Envoy has not acknowledged its endpoint"
        envoy.release()
        await until(registry, lambda: registry.usable(P, None) == (worker,))
        assert worker.endpoint == "10.0.0.1:8000"
        assert registry.trouble(worker) == ""
        registry.set_status(worker, Status.NOT_READY, "HTTP 503")
        assert registry.usable(P, None) == ()
        assert registry.trouble(worker) == "HTTP 503"

    async def test_is_the_same_object_until_something_changes(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        await until(registry, lambda: worker.usable)
        before = registry.usable(P, "m")
        assert registry.usable(P, "m") is before
        other = add_ready(registry, P, "http://10.0.0.2:8000", "m")
        await until(registry, lambda: other.usable)
        assert registry.usable(P, "m") == (worker, other)

    async def test_pairs_are_worked_out_anew_only_when_something_changes(self, registry: Registry) -> None:
        prefill = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        decode = add_ready(registry, D, "http://10.0.0.2:8000", "m")
        await until(registry, lambda: prefill.usable and decode.usable)
        before = registry.pairs("m")
        assert before.prefills == (prefill,)
        assert registry.pairs("m") is before
        registry.describe(decode, Metadata(model_ids=("m",), labels={"page_size": "64"}))
        registry.describe(prefill, Metadata(model_ids=("m",), labels={"page_size": "16"}))
        assert registry.pairs("m").prefills == ()
        assert '(mismatch on ["page_size"];' in registry.readiness().reason
        registry.describe(decode, Metadata(model_ids=("m",), labels={"page_size": "16"}))
        assert registry.pairs("m").prefills == (prefill,)
        assert registry.readiness().ready
        for number in range(100):
            registry.pairs(f"made-up-{number}")
        assert len(registry._index._pairs) == 2

    async def test_a_decode_that_compares_nothing_is_paired_across_versions(self, registry: Registry) -> None:
        """As its ``kv_transfer_config`` says, and the other one's does not."""
        kvs = {P: KvConfig(NIXL), D: KvConfig(NIXL, enforces_handshake=False)}
        workers = [registry.add(spec(role, f"http://10.0.0.{role is P:d}:1", kv=kv)) for role, kv in kvs.items()]
        for worker, version in zip(workers, ("0.31.0", "0.32.0"), strict=True):
            registry.describe(worker, Metadata(labels={"version": version}, runtime="vllm"))
            registry.place(worker, worker.url.host)
            registry.set_status(worker, Status.READY)
        await until(registry, lambda: all(worker.usable for worker in workers))
        assert registry.pairs(None).prefills == (workers[0],)

    @pytest.mark.parametrize(
        ("connector", "paired"), [(NIXL, False), (MOONCAKE, False), ("LMCacheConnectorV1", True), ("", True)]
    )
    async def test_what_vllm_tells_of_its_blocks_counts_where_they_are_moved(
        self, registry: Registry, connector: str, *, paired: bool
    ) -> None:
        """A decode that computes the prompt itself, or has a store's cache, has blocks of its own."""
        workers = [registry.add(spec(role, f"http://{role.value}:1", kv=KvConfig(connector))) for role in (P, D)]
        for worker, size in zip(workers, ("16", "32"), strict=True):
            registry.describe(worker, Metadata(runtime="vllm", layout={"block_size": size}))
            registry.place(worker, f"10.0.0.{size}")
            registry.set_status(worker, Status.READY)
        await until(registry, lambda: all(worker.usable for worker in workers))
        assert bool(registry.pairs(None).prefills) is paired

    async def test_who_has_no_partner_says_why(self, registry: Registry) -> None:
        prefill = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        decode = add_ready(registry, D, "http://10.0.0.2:8000", "m")
        assert registry.trouble(decode) == "Envoy has not acknowledged its endpoint"
        await until(registry, lambda: prefill.usable and decode.usable)
        assert registry.trouble(prefill) == registry.trouble(decode) == ""
        registry.describe(decode, Metadata(model_ids=("other",)))
        registry.set_status(decode, Status.READY, "its clock is slow")
        alone = "no usable prefill worker fits (none has a model in common)"
        assert registry.trouble(decode) == f"its clock is slow; {alone}"
        assert registry.trouble(prefill) == alone.replace("prefill", "decode")

    async def test_selects_by_role_and_model(self, registry: Registry) -> None:
        a = add_ready(registry, P, "http://10.0.0.1:8000", "a")
        ab = add_ready(registry, P, "http://10.0.0.2:8000", "a", "b")
        anything = add_ready(registry, P, "http://10.0.0.3:8000")
        decode = add_ready(registry, D, "http://10.0.0.1:8000", "a")
        await until(registry, lambda: all(worker.usable for worker in (a, ab, anything, decode)))
        assert registry.usable(P, "a") == (a, ab, anything)
        assert registry.usable(P, "b") == (ab, anything)
        assert registry.usable(P, "other") == (anything,)
        assert registry.usable(P, None) == (a, ab, anything)
        assert registry.usable(D, "a") == (decode,)
        assert registry.usable(D, "b") == ()

    async def test_follows_a_changed_identity(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000", "old")
        await until(registry, lambda: worker.usable)
        assert registry.usable(P, "old") == (worker,)
        registry.describe(worker, Metadata(model_ids=("new",)))
        assert registry.usable(P, "old") == ()
        assert registry.usable(P, "new") == (worker,)
        assert registry.knows_model("new")

    async def test_unknown_model_names_are_not_remembered(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        await until(registry, lambda: worker.usable)
        for number in range(100):
            registry.usable(P, f"made-up-{number}")
        assert len(registry._index._of_roles[P].by_model) == 2


class TestModels:
    async def test_a_model_whose_workers_are_down_is_known(self, registry: Registry) -> None:
        workers = [add_ready(registry, role, f"http://10.0.0.{at}:8000", "m") for at, role in enumerate((P, D))]
        for worker in workers:
            registry.set_status(worker, Status.FAILED, "gone")
        assert registry.knows_model("m")
        assert not registry.knows_model("other")
        assert registry.models() == ("m",)

    async def test_what_no_pair_can_serve_is_known_and_not_offered(self, registry: Registry) -> None:
        """Whoever asks for it is told what is missing: that is not the answer to a name that nobody has."""

        def add(role: Role, at: int, connector: str, *models: str) -> Worker:
            worker = registry.add(spec(role, f"http://10.0.0.{at}:1", kv=KvConfig(connector)))
            registry.describe(worker, Metadata(model_ids=models, runtime="vllm"))
            return worker

        add(P, 1, NIXL, "both", "prefill", "apart", "itself")
        assert registry.models() == ()
        decode = add(D, 2, NIXL, "decode", "both")
        assert registry.models() == ("both",)
        add(D, 3, MOONCAKE, "apart")
        add(D, 1, NIXL, "itself")
        add(Role.REGULAR, 4, "", "prefill")
        registry.add(spec(D, "http://10.0.0.5:1"))  # which has not said what it serves
        assert registry.models() == ("both",)
        assert all(map(registry.knows_model, ("prefill", "decode", "apart", "itself")))
        registry.describe(decode, Metadata(model_ids=("apart", "both", "itself"), runtime="vllm"))
        assert registry.models() == ("both", "apart", "itself")

    async def test_a_worker_that_has_not_said_might_serve_any(self, registry: Registry) -> None:
        assert not registry.knows_model("m")
        worker = registry.add(spec(P, "http://10.0.0.1:8000"))
        assert registry.knows_model("m")
        registry.describe(worker, Metadata(model_ids=("x",)))
        assert not registry.knows_model("m")

    async def test_a_removed_worker_takes_its_models_along(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        registry.remove(worker)
        await until(registry, lambda: not len(registry))
        assert not registry.knows_model("m")
        assert registry.models() == ()

    async def test_the_registration_wins_over_what_the_worker_says(self, registry: Registry) -> None:
        worker = registry.add(
            spec(P, "http://w:8000", cards=({"id": "mine"},), labels={"zone": "a"}, bootstrap_port=1, runtime="sglang")
        )
        found = Metadata(
            model_ids=("its",),
            cards=({"id": "its"},),
            labels={"zone": "b", "version": "1"},
            runtime="vllm",
            bootstrap_port=2,
        )
        registry.describe(worker, found)
        assert (worker.model_ids, worker.cards) == (("mine",), ({"id": "mine"},))
        assert worker.labels == {"zone": "a", "version": "1"}
        assert (worker.bootstrap_port, worker.runtime) == (1, "sglang")

    async def test_a_new_process_that_does_not_say_its_engine_is_not_the_former(self, registry: Registry) -> None:
        worker = registry.add(spec(D, "grpc://w:8000"))
        registry.describe(worker, Metadata(runtime="tokenspeed"))
        assert worker.runtime == "tokenspeed"
        registry.describe(worker, Metadata())
        assert worker.runtime == "sglang"
        registry.change(worker, spec(D, "grpc://w:8000", kv=KvConfig(NIXL)))
        assert worker.runtime == "vllm"

    async def test_only_prefill_workers_take_over_a_bootstrap_port(self, registry: Registry) -> None:
        prefill, decode = registry.add(spec(P, "http://w:8000")), registry.add(spec(D, "http://w:8000"))
        for worker in (prefill, decode):
            registry.describe(worker, Metadata(bootstrap_port=8998))
        assert (prefill.bootstrap_port, decode.bootstrap_port) == (8998, None)
        registry.describe(prefill, Metadata(bootstrap_port=9000))
        assert prefill.bootstrap_port == 9000


class TestReadiness:
    @pytest.mark.parametrize(
        ("prefill", "decode", "reason"),
        [
            ([], [], "no usable prefill worker (of 0 registered), no usable decode worker (of 0 registered)"),
            (["a"], [], "no usable decode worker (of 0 registered)"),
            ([], ["a"], "no usable prefill worker (of 0 registered)"),
            (["a"], ["b"], "no model is served by both a usable prefill worker and a usable decode worker"),
            (["a", "b"], ["b"], ""),
            ([""], ["b"], ""),
            (["a"], [""], ""),
        ],
    )
    async def test_needs_both_roles_with_a_common_model(
        self, registry: Registry, prefill: list[str], decode: list[str], reason: str
    ) -> None:
        workers: list[Worker] = []
        for role, models in ((P, prefill), (D, decode)):
            for number, model in enumerate(models):
                named = (model,) if model else ()
                workers.append(add_ready(registry, role, f"http://10.0.{role is P:d}.{number}:8000", *named))
        await until(registry, lambda: all(worker.usable for worker in workers))
        state = registry.readiness()
        assert (state.ready, state.reason) == (not reason, reason)
        assert (state.usable_workers, state.total_workers) == (len(workers), len(workers))

    async def test_needs_a_pair_that_can_hand_the_cache_over(self, registry: Registry) -> None:
        """The peer says ready here and answers every request with 503."""

        def add(role: Role, number: int, connector: str, model: str) -> Worker:
            worker = registry.add(spec(role, f"http://10.0.0.{number}:8000", kv=KvConfig(connector)))
            registry.describe(worker, Metadata(model_ids=(model,), runtime="vllm"))
            registry.place(worker, worker.url.host)
            registry.set_status(worker, Status.READY)
            return worker

        workers = [add(P, 1, NIXL, "m"), add(D, 2, MOONCAKE, "m"), add(D, 3, NIXL, "other")]
        await until(registry, lambda: all(worker.usable for worker in workers))
        assert registry.readiness().reason == (
            "No prefill/decode pair shares a KV transfer protocol "
            '(mismatch on ["transport"]; prefill: ["vllm/nixl/?"], decode: ["vllm/mooncake/?"])'
        )
        add(D, 4, "", "m")
        await until(registry, lambda: registry.readiness().ready)

    @pytest.mark.parametrize("mode", PairingMode)
    async def test_is_as_strict_as_placement(self, mode: PairingMode) -> None:
        registry = Registry(FakeEnvoy().publish, drain_poll=0.001, pairing=mode)
        workers = [add_ready(registry, role, f"http://10.0.0.{at}:1", "m") for at, role in enumerate((P, D), 1)]
        await until(registry, lambda: all(worker.usable for worker in workers))
        state = registry.readiness()
        assert state.ready is bool(registry.pairs("m").prefills) is (mode is not PairingMode.STRICT)
        assert state.ready or 'prefill: ["sglang/?/?"], decode: ["sglang/?/?"]; not known of ' in state.reason
        await registry.close()

    async def test_a_server_in_both_roles_is_no_pair(self, registry: Registry) -> None:
        prefill, decode = (add_ready(registry, role, "http://10.0.0.1:1", "m") for role in (P, D))
        await until(registry, lambda: prefill.usable and decode.usable)
        assert registry.readiness().reason == (
            "No prefill/decode pair: the only one that fits is the same server, which is registered as prefill and as "
            "decode worker"
        )
        assert registry.trouble(prefill).startswith("no usable decode worker fits (the only one that fits is the same")
        assert registry.trouble(decode).startswith("no usable prefill worker fits (the only one that fits is the same")
        other = add_ready(registry, D, "http://10.0.0.2:1", "m")
        await until(registry, lambda: other.usable)
        assert registry.readiness().ready
        assert registry.pairs("m").tiers(prefill) == ((other,),)
        assert (registry.trouble(prefill), bool(registry.trouble(decode))) == ("", True)

    async def test_pairs_without_a_common_model_do_not_count(self, registry: Registry) -> None:
        """Nixl has one model, Mooncake another, and across them nobody may be paired."""

        def add(role: Role, number: int, connector: str, model: str) -> Worker:
            worker = registry.add(spec(role, f"http://10.0.0.{number}:8000", kv=KvConfig(connector)))
            registry.describe(worker, Metadata(model_ids=(model,), runtime="vllm"))
            registry.place(worker, worker.url.host)
            registry.set_status(worker, Status.READY)
            return worker

        workers = [add(P, 1, NIXL, "a"), add(P, 2, MOONCAKE, "b"), add(D, 3, NIXL, "b"), add(D, 4, MOONCAKE, "a")]
        await until(registry, lambda: all(worker.usable for worker in workers))
        assert not registry.readiness().ready
        assert 'mismatch on ["transport"]' in registry.readiness().reason

    async def test_counts_only_usable_workers(self, registry: Registry) -> None:
        prefill = add_ready(registry, P, "http://10.0.0.1:8000")
        decode = add_ready(registry, D, "http://10.0.0.2:8000")
        await until(registry, lambda: registry.readiness().ready)
        registry.set_status(decode, Status.NOT_READY)
        assert registry.readiness().reason == "no usable decode worker (of 1 registered)"
        assert registry.readiness().usable_workers == 1
        registry.set_status(decode, Status.NOT_READY, "10.0.0.2:8000 is already another's")  # not for everybody
        assert registry.readiness().reason == "no usable decode worker (of 1 registered)"
        registry.set_status(decode, Status.NOT_READY, f"{CANNOT_LEARN}: why")
        assert registry.readiness().reason == f"no usable decode worker (of 1 registered; {CANNOT_LEARN}: why)"
        registry.set_status(decode, Status.READY)
        assert registry.readiness().ready
        registry.remove(prefill)
        assert not registry.readiness().ready


class TestPublishing:
    async def test_publications_never_overlap_and_changes_meanwhile_go_together(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        envoy.hold()
        workers = [add_ready(registry, P, "http://10.0.0.0:8000")]
        await envoy.started.wait()
        workers += [add_ready(registry, P, f"http://10.0.0.{number}:8000") for number in range(1, 50)]
        envoy.release()
        await until(registry, lambda: all(worker.usable for worker in workers))
        assert [len(snapshot.prefill) for snapshot in envoy.published] == [1, 50]
        assert not envoy.overlapped

    async def test_what_was_asked_for_too_late_is_not_taken_as_acknowledged(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        envoy.hold()
        early = add_ready(registry, P, "http://10.0.0.1:8000")
        await envoy.started.wait()
        late = add_ready(registry, P, "http://10.0.0.2:8000")
        seen: list[tuple[bool, bool]] = []
        registry.subscribe(lambda _worker, _change: seen.append((early.usable, late.usable)))
        envoy.release()
        await until(registry, lambda: late.usable)
        assert seen == [(True, False), (True, True)]

    async def test_health_alone_is_none_of_envoys_business(self, registry: Registry, envoy: FakeEnvoy) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: worker.usable)
        for status in (Status.NOT_READY, Status.FAILED, Status.READY):
            registry.set_status(worker, status)
        registry.place(worker, "10.0.0.1")
        await asyncio.sleep(0)
        assert len(envoy.published) == 1

    async def test_a_refused_list_is_tried_again_and_named(self, registry: Registry, envoy: FakeEnvoy) -> None:
        envoy.refusal = ValueError("malformed IP address")
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await eventually(lambda: len(envoy.published) >= 3)
        assert not worker.usable
        assert registry.trouble(worker) == "Envoy has not acknowledged its endpoint: malformed IP address"
        envoy.refusal = None
        await until(registry, lambda: worker.usable)

    async def test_endpoints_say_host_and_tls(self, registry: Registry, envoy: FakeEnvoy) -> None:
        secure = registry.add(spec(P, "https://engine.example"))
        registry.place(secure, "2001:db8::1")
        regular = registry.add(spec(Role.REGULAR, "http://10.0.0.9:1"))
        registry.place(regular, "10.0.0.9")
        await until(registry, lambda: secure.endpoint is not None)
        assert envoy.published == [Snapshot(prefill=(Endpoint("2001:db8::1", 443, "engine.example", tls=True),))]
        assert secure.endpoint == "[2001:db8::1]:443"
        assert regular.endpoint is None


class TestMoving:
    async def test_the_old_address_stays_until_the_new_one_is_acknowledged(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        worker = add_ready(registry, P, "http://w:8000", ip="10.0.0.1")
        await until(registry, lambda: worker.usable)
        envoy.hold()
        registry.place(worker, "10.0.0.2")
        await envoy.started.wait()
        assert worker.endpoint == "10.0.0.1:8000"
        assert registry.usable(P, None) == (worker,)
        envoy.release()
        await until(registry, lambda: worker.endpoint == "10.0.0.2:8000")
        await eventually(lambda: envoy.addresses(P) == ["10.0.0.2:8000"])
        assert addresses(envoy.published) == [
            ["10.0.0.1:8000"],
            ["10.0.0.2:8000", "10.0.0.1:8000"],
            ["10.0.0.2:8000"],
        ]

    async def test_requests_under_way_keep_the_old_address(self, registry: Registry, envoy: FakeEnvoy) -> None:
        worker = add_ready(registry, P, "http://w:8000", ip="10.0.0.1")
        await until(registry, lambda: worker.usable)
        worker.load = 1
        registry.place(worker, "10.0.0.2")
        await until(registry, lambda: worker.endpoint == "10.0.0.2:8000")
        other = add_ready(registry, P, "http://10.0.0.3:8000")
        await until(registry, lambda: other.usable)
        assert envoy.addresses(P) == ["10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.1:8000"]
        worker.load = 0
        await eventually(lambda: envoy.addresses(P) == ["10.0.0.2:8000", "10.0.0.3:8000"])

    async def test_there_and_back(self, registry: Registry, envoy: FakeEnvoy) -> None:
        worker = add_ready(registry, P, "http://w:8000", ip="10.0.0.1")
        await until(registry, lambda: worker.usable)
        worker.load = 1
        registry.place(worker, "10.0.0.2")
        await until(registry, lambda: worker.endpoint == "10.0.0.2:8000")
        registry.place(worker, "10.0.0.1")
        await until(registry, lambda: worker.endpoint == "10.0.0.1:8000")
        worker.load = 0
        await eventually(lambda: envoy.addresses(P) == ["10.0.0.1:8000"])
        assert worker.usable

    async def test_a_change_of_mind_before_the_acknowledgement(self, registry: Registry, envoy: FakeEnvoy) -> None:
        worker = add_ready(registry, P, "http://w:8000", ip="10.0.0.1")
        await until(registry, lambda: worker.usable)
        envoy.hold()
        registry.place(worker, "10.0.0.2")
        await envoy.started.wait()
        registry.place(worker, "10.0.0.3")
        envoy.release()
        await until(registry, lambda: worker.endpoint == "10.0.0.3:8000")
        await eventually(lambda: envoy.addresses(P) == ["10.0.0.3:8000"])

    async def test_the_second_at_an_address_is_refused(self, registry: Registry, envoy: FakeEnvoy) -> None:
        first = add_ready(registry, P, "http://a:8000", ip="10.0.0.1")
        second = registry.add(spec(P, "http://b:8000"))
        with pytest.raises(EndpointTakenError, match=r"10\.0\.0\.1:8000 is already the prefill worker http://a:8000"):
            registry.place(second, "10.0.0.1")
        decode = add_ready(registry, D, "http://b:8000", ip="10.0.0.1")
        await until(registry, lambda: first.usable and decode.usable)
        assert second.endpoint is None
        registry.remove(first)
        await until(registry, lambda: registry.get(first.id) is None)
        registry.place(second, "10.0.0.1")
        await until(registry, lambda: second.endpoint == "10.0.0.1:8000")
        assert envoy.acknowledged.prefill == (Endpoint("10.0.0.1", 8000, "b"),)

    async def test_one_that_moves_onto_another_is_nowhere(self, registry: Registry, envoy: FakeEnvoy) -> None:
        add_ready(registry, P, "http://a:8000", ip="10.0.0.1")
        mover = add_ready(registry, P, "http://b:8000", ip="10.0.0.2")
        await until(registry, lambda: mover.usable)
        with pytest.raises(EndpointTakenError):
            registry.place(mover, "10.0.0.1")
        assert not mover.usable
        assert mover not in registry.usable(P, None)
        await eventually(lambda: envoy.addresses(P) == ["10.0.0.1:8000"])

    async def test_a_retired_address_is_free_for_others(self, registry: Registry, envoy: FakeEnvoy) -> None:
        mover = add_ready(registry, P, "http://a:8000", ip="10.0.0.1")
        await until(registry, lambda: mover.usable)
        mover.load = 1
        registry.place(mover, "10.0.0.2")
        await until(registry, lambda: mover.endpoint == "10.0.0.2:8000")
        heir = add_ready(registry, P, "http://b:8000", ip="10.0.0.1")
        await until(registry, lambda: heir.usable)
        assert Endpoint("10.0.0.1", 8000, "b") in envoy.acknowledged.prefill


class TestRemoving:
    async def test_waits_for_requests_then_leaves_envoy_then_is_gone(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: worker.usable)
        worker.load = 2
        registry.remove(worker)
        assert worker.status is Status.DRAINING
        assert registry.usable(P, None) == ()
        await asyncio.sleep(0.01)
        assert envoy.addresses(P) == ["10.0.0.1:8000"]
        assert registry.get(worker.id) is worker
        envoy.hold()
        worker.load = 0
        await envoy.started.wait()
        assert registry.get(worker.id) is worker
        envoy.release()
        await until(registry, lambda: registry.get(worker.id) is None)
        assert envoy.addresses(P) == []
        assert worker.endpoint is None

    async def test_the_wait_is_bounded(self, envoy: FakeEnvoy) -> None:
        registry = Registry(envoy.publish, drain_limit=0.01, drain_poll=0.001)
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: worker.usable)
        worker.load = 1
        registry.remove(worker)
        await until(registry, lambda: not len(registry))
        await registry.close()

    @pytest.mark.parametrize(("settle", "gone"), [(None, True), (0, True), (0.01, True), (1000, False)])
    async def test_it_stays_for_its_own_time_to_settle(
        self,
        registry: Registry,
        settle: float | None,
        gone: bool,  # noqa: FBT001
    ) -> None:
        worker = registry.add(spec(P, "http://10.0.0.1:1", health=HealthOverrides(drain_settle_secs=settle)))
        registry.remove(worker)
        if gone:
            await until(registry, lambda: not len(registry))
        else:
            await asyncio.sleep(0.05)
            assert worker.status is Status.DRAINING
            assert list(registry) == [worker]

    async def test_a_draining_worker_stays_so(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: worker.usable)
        worker.load = 1
        registry.remove(worker)
        registry.remove(worker)
        registry.set_status(worker, Status.READY)
        registry.place(worker, "10.0.0.2")
        assert worker.status is Status.DRAINING
        assert registry.usable(P, None) == ()
        worker.load = 0
        await until(registry, lambda: not len(registry))

    async def test_its_successor_is_used_while_its_requests_end(self, registry: Registry, envoy: FakeEnvoy) -> None:
        former = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: former.usable)
        former.load = 1
        registry.remove(former)
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        assert worker.id != former.id
        with pytest.raises(WorkerExistsError, match=worker.id):
            registry.add(spec(P, "http://10.0.0.1:8000"))
        await until(registry, lambda: worker.usable)
        assert registry.usable(P, None) == (worker,)
        assert list(registry) == [former, worker]
        assert former.endpoint == "10.0.0.1:8000"
        former.load = 0
        await until(registry, lambda: list(registry) == [worker])
        assert worker.usable
        assert {len(snapshot.prefill) for snapshot in envoy.published} == {1}  # Envoy never loses the address
        with pytest.raises(WorkerExistsError):
            registry.add(spec(P, "http://10.0.0.1:8000"))

    async def test_again_and_again_leaves_nothing_behind(self, registry: Registry, envoy: FakeEnvoy) -> None:
        gone = []
        for _ in range(50):
            worker = add_ready(registry, P, "http://10.0.0.1:8000")
            worker.load = 1
            registry.remove(worker)
            gone.append(worker)
        last = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: last.usable)
        for worker in gone:
            worker.load = 0
        await until(registry, lambda: list(registry) == [last])
        assert envoy.addresses(P) == ["10.0.0.1:8000"]
        registry.remove(last)
        await until(registry, lambda: not len(registry))
        assert envoy.addresses(P) == []

    async def test_goes_through_although_envoy_refuses(self, registry: Registry, envoy: FakeEnvoy) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        await until(registry, lambda: worker.usable)
        envoy.refusal = TimeoutError("no acknowledgement")
        registry.remove(worker)
        await until(registry, lambda: not len(registry))

    async def test_one_that_is_gone_ignores_late_news(self, registry: Registry) -> None:
        worker = add_ready(registry, P, "http://10.0.0.1:8000")
        registry.remove(worker)
        await until(registry, lambda: not len(registry))
        registry.set_status(worker, Status.READY)
        registry.describe(worker, Metadata(model_ids=("m",)))
        registry.place(worker, "10.0.0.1")
        registry.remove(worker)
        assert not worker.usable
        assert registry.usable(P, None) == ()


class TestSubscribers:
    async def test_hear_everything_in_order(self, registry: Registry) -> None:
        heard: list[Change] = []
        unsubscribe = registry.subscribe(lambda _worker, change: heard.append(change))
        worker = add_ready(registry, P, "http://10.0.0.1:8000", "m")
        await until(registry, lambda: worker.usable)
        registry.set_status(worker, Status.READY)
        registry.remove(worker)
        await until(registry, lambda: not len(registry))
        assert heard == [
            Change.ADDED,
            Change.IDENTITY,
            Change.STATUS,
            Change.ENDPOINT,
            Change.STATUS,
            Change.REMOVED,
        ]
        unsubscribe()
        registry.add(spec(P, "http://10.0.0.1:8000"))
        assert len(heard) == 6

    async def test_one_that_fails_does_not_harm_the_others(
        self, registry: Registry, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_worker: Worker, _change: Change) -> None:
            raise RuntimeError("subscriber's defect")

        heard: list[Change] = []
        registry.subscribe(broken)
        registry.subscribe(lambda _worker, change: heard.append(change))
        registry.add(spec(P, "http://10.0.0.1:8000"))
        assert heard == [Change.ADDED]
        assert "subscriber's defect" in caplog.text


async def test_closing_leaves_no_task(envoy: FakeEnvoy) -> None:
    before = asyncio.all_tasks()
    registry = Registry(envoy.publish, drain_poll=0.001)
    busy = add_ready(registry, P, "http://10.0.0.1:8000")
    await until(registry, lambda: busy.usable)
    busy.load = 1
    registry.remove(busy)
    moving = add_ready(registry, P, "http://w:8000", ip="10.0.0.2")
    await until(registry, lambda: moving.usable)
    moving.load = 1
    registry.place(moving, "10.0.0.3")
    await until(registry, lambda: moving.endpoint == endpoint("10.0.0.3").address)
    envoy.hold()
    add_ready(registry, D, "http://10.0.0.4:8000")
    await envoy.started.wait()
    await registry.close()
    assert asyncio.all_tasks() == before
