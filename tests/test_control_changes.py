"""``PUT`` and ``PATCH /workers/{id}``: what they answer, and that a running watch goes by it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from control_rig import Api, running
from fleet import PACE, SLOW, Engine, engine, eventually, fleet, spec, until

from extproc.workers.metadata import Metadata
from extproc.workers.registration import patched, registration
from extproc.workers.registry import Change
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
PREFILL: dict[str, Any] = {"url": "http://10.0.0.1:1", "worker_type": "prefill", "bootstrap_port": 8999}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running() as made:
        yield made


async def added(api: Api, **fields: Any) -> Worker:
    answer = await api.ask("POST", "/workers", json=PREFILL | fields)
    worker = api.registry.get(answer.json["worker_id"])
    assert worker is not None
    return worker


class TestAnswers:
    async def test_a_patch_is_accepted_and_loses_nothing(self, api: Api) -> None:
        given = {
            "labels": {"zone": "a"},
            "api_key": "k",
            "kv_connector": "MooncakeConnector",
            "kv_engine_id": "e",
            "health": {"failure_threshold": 4},
            "resilience": {"cb_failure_threshold": 7},
        }
        worker = await added(api, **given)
        before = (await api.get(f"/workers/{worker.id}")).json
        answer = await api.ask("PATCH", f"/workers/{worker.id}", json={"labels": {"rack": "1"}, "priority": 3})
        assert (answer.status, answer.json) == (
            202,
            {
                "status": "accepted",
                "worker_id": worker.id,
                "message": "Worker update queued for background processing",
                "warnings": ["priority is of no effect: no policy here looks at it"],
            },
        )
        after = (await api.get(f"/workers/{worker.id}")).json
        assert after == before | {"labels": {"zone": "a", "rack": "1"}, "priority": 3}
        assert (worker.api_key, worker.bootstrap_port, worker.kv_engines[0].id) == ("k", 8999, "e")

    async def test_a_patch_repeats_no_warnings_of_what_it_does_not_say(self, api: Api) -> None:
        given = {
            "kv_connector": "MooncakeConnector",
            "bootstrap_port": 8998,
            "cost": 2,
            "resilience": {"max_retries": 1},
        }
        worker = await added(api, **given)

        async def warned(patch: dict[str, object]) -> list[str]:
            answer = (await api.ask("PATCH", f"/workers/{worker.id}", json=patch)).json
            return [warning.partition(" is of no effect")[0] for warning in answer.get("warnings", [])]

        assert await warned({}) == await warned({"labels": {"zone": "a"}}) == []
        assert await warned({"resilience": {"cb_timeout_secs": 1}}) == []
        assert await warned({"resilience": {"max_retries": 2}}) == ["resilience.max_retries"]
        assert await warned({"cost": 2.0, "priority": 1}) == ["priority", "cost"]
        assert await warned({"kv_connector": "NixlConnector"}) == ["bootstrap_port"]  # which it was not before
        assert await warned({"priority": 2}) == ["priority"]
        assert await warned({"labels": {"bootstrap_port": "8999"}}) == ["bootstrap_port"]

    async def test_a_put_replaces_all(self, api: Api) -> None:
        worker = await added(api, labels={"zone": "a"}, api_key="k", health={"failure_threshold": 4}, cost=2)
        answer = await api.ask("PUT", f"/workers/{worker.id}", json=PREFILL | {"bootstrap_port": 9000})
        assert (answer.status, answer.json) == (
            202,
            {
                "status": "accepted",
                "worker_id": worker.id,
                "message": "Worker replacement queued for background processing",
            },
        )
        shown = (await api.get(f"/workers/{worker.id}")).json
        assert (shown["id"], shown["bootstrap_port"], shown["cost"]) == (worker.id, 9000, 1.0)
        assert not {"labels", "health"} & shown.keys()
        assert shown["job_status"]["job_type"] == "UpdateWorker"
        assert worker.api_key is None

    @pytest.mark.parametrize(
        ("body", "error"),
        [
            (PREFILL | {"url": "http://10.0.0.2:1"}, "URL must match: worker ID is at http://10.0.0.1:1, not"),
            (PREFILL | {"worker_type": "decode"}, "`worker_type` cannot change: worker ID is a prefill worker; DELETE"),
            ({"worker_type": "prefill"}, "Invalid JSON data: missing field `url`"),
            (PREFILL | {"zone": 1}, "Invalid JSON data: unknown field `zone`"),
        ],
    )
    async def test_a_put_that_cannot_be(self, api: Api, body: dict[str, Any], error: str) -> None:
        worker = await added(api, api_key="k")
        answer = await api.ask("PUT", f"/workers/{worker.id}", json=body)
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert answer.json["error"].replace(worker.id, "ID").startswith(error)
        assert worker.api_key == "k"

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"priority": "x"}', b'{"url": "http://w:1"}', b'{"kv_role": "x"}'])
    async def test_a_patch_that_cannot_be(self, api: Api, body: bytes) -> None:
        worker = await added(api, api_key="k")
        answer = await api.ask("PATCH", f"/workers/{worker.id}", data=body)
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert worker.api_key == "k"

    @pytest.mark.parametrize("method", ["PUT", "PATCH"])
    async def test_ids_that_are_not(self, api: Api, method: str) -> None:
        assert (await api.ask(method, "/workers/7", json={})).status == 400
        answer = await api.ask(method, f"/workers/{uuid.uuid4()}", json={})
        assert (answer.status, answer.json["code"]) == (404, "WORKER_NOT_FOUND")

    @pytest.mark.parametrize(("method", "body"), [("PUT", PREFILL), ("PATCH", {"priority": 1})])
    async def test_a_worker_that_is_being_removed(self, api: Api, method: str, body: dict[str, Any]) -> None:
        worker = await added(api)
        worker.load = 1
        await api.ask("DELETE", f"/workers/{worker.id}")
        answer = await api.ask(method, f"/workers/{worker.id}", json=body)
        assert (answer.status, answer.json["code"]) == (409, "WORKER_REMOVAL_IN_PROGRESS")
        assert worker.status is Status.DRAINING

    async def test_what_a_duplicate_may_do_instead_is_said(self, api: Api) -> None:
        worker = await added(api)
        answer = await api.ask("POST", "/workers", json=PREFILL)
        assert f"PUT or PATCH /workers/{worker.id}" in answer.json["error"]


def of(server: Engine, **fields: Any) -> WorkerSpec:
    return registration({"url": server.url, "worker_type": "prefill", **fields})


class TestWatch:
    """With probes a minute apart, what is seen at once was not waited for."""

    async def test_a_patched_worker_stays_in_rotation_and_is_asked_anew(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server, api_key="old"))
            await until(made.registry, lambda: worker.usable)
            worker.load = 1
            statuses: list[Status] = []
            made.registry.subscribe(lambda changed, _: statuses.append(changed.status))
            asked = server.count("/v1/models")
            new = patched(made.registry.spec(worker), {"api_key": "new", "labels": {"zone": "b"}})
            made.registry.change(worker, new)
            assert (worker.labels["zone"], worker.labels["version"]) == ("b", "0.5.23")
            assert worker.model_ids == ("tiny",)
            await eventually(lambda: server.count("/v1/models") > asked)
            assert server.requests[-1][1]["authorization"] == "Bearer new"
            assert set(statuses) == {Status.READY}
            assert (worker.usable, worker.load) == (True, 1)

    async def test_a_bootstrap_port_that_changes_is_looked_at(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server))
            await until(made.registry, lambda: worker.usable)
            given = server.bootstrap_port
            assert worker.bootstrap_port == given
            made.registry.change(worker, of(server, bootstrap_port=1))
            assert worker.bootstrap_port == 1
            await made.is_said(worker, "bootstrap port 127.0.0.1:1 does not answer")
            made.registry.change(worker, of(server))
            assert worker.bootstrap_port == given
            await eventually(lambda: made.registry.trouble(worker) == "")

    async def test_other_thresholds_hold_for_the_next_probe(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server))
            await until(made.registry, lambda: worker.usable)
            server.health = 503
            made.registry.change(worker, of(server, health={"failure_threshold": 1, "check_interval_secs": 0.01}))
            await made.becomes(worker, Status.NOT_READY)
            made.registry.change(worker, of(server, health={"disable_health_check": True}))
            await made.becomes(worker, Status.READY)

    async def test_a_change_while_a_probe_is_under_way_is_not_lost(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server))
            await until(made.registry, lambda: worker.usable)
            server.hang = True
            server.asked.clear()
            made.registry.change(worker, of(server, api_key="first"))
            await server.asked.wait()
            made.registry.change(worker, of(server, api_key="second"))
            await server.stop()
            server.hang = False
            await server.start()
            await eventually(
                lambda: any(
                    path == "/model_info" and h.get("authorization") == "Bearer second" for path, h in server.requests
                )
            )
            await made.becomes(worker, Status.READY) if worker.status is not Status.READY else None

    async def test_a_replaced_worker_joins_again_under_its_id(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server, labels={"zone": "a"}))
            await until(made.registry, lambda: worker.usable)
            worker.load = 2
            before = worker.endpoint
            made.registry.replace(worker, of(server, models=[{"id": "mine"}]))
            assert (worker.status, worker.model_ids, worker.labels) == (Status.PENDING, ("mine",), {})
            assert not made.registry.has_joined(worker)
            await made.becomes(worker, Status.READY)
            assert (worker.load, worker.endpoint, worker.model_ids) == (2, before, ("mine",))
            assert worker.labels["version"] == "0.5.23"

    async def test_a_worker_replaced_by_one_that_is_alike_stays_in_rotation(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server, models=[{"id": "mine"}]))
            await until(made.registry, lambda: worker.usable)
            statuses: list[Status] = []
            made.registry.subscribe(lambda changed, _: statuses.append(changed.status))
            asked = server.count("/v1/models")
            other = of(server, models=[{"id": "mine"}], priority=3, health={"failure_threshold": 7})
            made.registry.replace(worker, other)
            await eventually(lambda: server.count("/v1/models") > asked)
            assert (set(statuses), made.registry.spec(worker), worker.priority) == ({Status.READY}, other, 3)
            made.registry.replace(worker, of(server))  # serves another model
            assert worker.status is Status.PENDING
            await made.becomes(worker, Status.READY)  # else the engine ends in the midst of a question

    async def test_one_that_is_out_is_replaced_by_one_that_is_alike_and_begins_anew(self) -> None:
        async with fleet(SLOW, PACE) as made, engine(mode="decode") as server:
            worker = made.registry.add(of(server))
            await made.becomes(worker, Status.FAILED)
            server.mode = "prefill"
            made.registry.replace(worker, of(server))
            assert worker.status is Status.PENDING
            await made.becomes(worker, Status.READY)

    async def test_a_replaced_worker_that_is_now_another_kind_is_kept_out(self) -> None:
        async with fleet(SLOW, PACE) as made, engine() as server:
            worker = made.registry.add(of(server))
            await until(made.registry, lambda: worker.usable)
            server.mode = "decode"
            made.registry.replace(worker, of(server))
            await made.becomes(worker, Status.FAILED)
            assert "disaggregation_mode is decode" in made.registry.trouble(worker)


class TestRegistry:
    async def test_engine_ids_that_were_asked_for_stay(self, api: Api) -> None:
        worker = await added(api, kv_connector="MooncakeConnector")
        told = registration(PREFILL | {"kv_connector": "MooncakeConnector", "kv_engine_id": "x"})
        engines = api.registry.add(
            registration(
                PREFILL | {"url": "http://10.0.0.9:1", "kv_connector": "MooncakeConnector", "kv_engine_id": "t"}
            )
        ).kv_engines
        api.registry.set_engines(worker, engines)
        await api.ask("PATCH", f"/workers/{worker.id}", json={"labels": {"zone": "a"}})
        assert worker.kv_engines == engines
        api.registry.change(worker, told)
        assert worker.kv_engines[0].id == "x"
        await api.ask("PATCH", f"/workers/{worker.id}", json={"dp_size": 2})
        assert [engine.id for engine in worker.kv_engines] == ["x_dp0", "x_dp1"]
        await api.ask("PATCH", f"/workers/{worker.id}", json={"kv_connector": "nixl"})
        assert worker.kv_engines == ()

    async def test_subscribers_are_told(self, api: Api) -> None:
        changes: list[Change] = []
        worker = api.registry.add(spec(D, "http://10.0.0.3:1"))
        api.registry.describe(worker, Metadata(model_ids=("m",), runtime="vllm"))
        api.registry.subscribe(lambda _, change: changes.append(change))
        api.registry.change(worker, spec(D, "http://10.0.0.3:1", labels={"a": "b"}))
        assert changes[-1] is Change.SPEC
        assert (worker.runtime, worker.model_ids, worker.labels) == ("vllm", ("m",), {"a": "b"})
        await asyncio.sleep(0)
