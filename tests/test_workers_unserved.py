"""Regular and encode workers: looked after as any other, and given no requests."""

from __future__ import annotations

import pytest
from control_rig import running
from fleet import SLOW, add_ready, engine, eventually, fleet, spec, until

from extproc.workers.metadata import Metadata, MismatchError, check_kind
from extproc.workers.registration import registration
from extproc.workers.worker import Role, Status

P, D = Role.PREFILL, Role.DECODE
UNSERVED = [Role.REGULAR, Role.ENCODE]
WHY = {
    Role.REGULAR: "a prefill/decode gateway gives regular workers no requests",
    Role.ENCODE: "encode workers are given no requests yet",
}


@pytest.mark.parametrize("role", UNSERVED)
async def test_their_whole_life(role: Role, caplog: pytest.LogCaptureFixture) -> None:
    why = WHY[role]
    async with engine(owner="vllm", models=["m"]) as server, running() as api:
        api.monitor.start()
        body = {"url": server.url, "worker_type": role.value}
        answer = await api.ask("POST", "/workers", json=body)
        assert (answer.status, answer.json["warnings"]) == (202, [why])
        assert why in [getattr(record, "reason", "") for record in caplog.records]
        location = answer.headers["location"]
        worker = api.registry.get(answer.json["worker_id"])
        assert worker is not None
        await until(api.registry, lambda: worker.status is Status.READY)
        shown = (await api.get(location)).json
        assert (shown["worker_type"], shown["status"], shown["is_healthy"]) == (role.value, "ready", False)
        assert (shown["status_reason"], shown["runtime_type"], shown["model_id"]) == (why, "vllm", "m")
        assert "pd_pairing" not in shown
        assert "job_status" not in shown
        listed = (await api.get("/workers")).json
        counts = {"prefill_count": 0, "decode_count": 0, "regular_count": int(role is Role.REGULAR)}
        assert (listed["total"], listed["stats"]) == (1, counts)

        assert not worker.usable
        assert api.envoy.published == []

        assert (await api.ask("PATCH", location, json={"labels": {"zone": "a"}, "api_key": "k"})).status == 202
        assert worker.labels["zone"] == "a"
        await eventually(lambda: server.requests[-1][1].get("authorization") == "Bearer k")
        assert (await api.ask("PUT", location, json=body)).status == 202
        await until(api.registry, lambda: worker.status is Status.READY)
        assert ("zone" in worker.labels, api.registry.trouble(worker)) == (False, why)
        assert (await api.ask("POST", "/workers", json=body)).status == 409

        assert (await api.ask("DELETE", location)).status == 202
        await eventually(lambda: len(api.registry) == 0)


async def test_their_failures_are_seen_and_told_instead_of_the_reason() -> None:
    async with engine(owner="vllm") as server, fleet(SLOW) as f:
        spec_ = registration({"url": server.url, "worker_type": "encode", "health": {"failure_threshold": 1}})
        worker = f.registry.add(spec_)
        await until(f.registry, lambda: worker.status is Status.READY)
        server.health = 503
        f.registry.change(worker, spec_)
        await f.becomes(worker, Status.NOT_READY)
        assert f.registry.trouble(worker) == "GET /health: HTTP 503"


@pytest.mark.parametrize("role", UNSERVED)
async def test_they_make_nothing_ready_and_serve_no_model(role: Role) -> None:
    async with running() as api:
        alone = api.registry.add(spec(role, "http://10.0.0.9:1"))
        api.registry.set_status(alone, Status.READY)
        assert (await api.get("/readiness")).status == 503
        assert not api.registry.knows_model("other"), "one that does not say what it serves serves nothing here"
        api.registry.describe(alone, Metadata(model_ids=("mine",), listed=({"id": "mine"}, {"id": "m", "root": "x"})))
        assert not api.registry.knows_model("mine")
        assert (await api.get("/v1/models")).json["error"]["code"] == "no_models_available"
        add_ready(api.registry, P, "http://10.0.0.1:1", "m")
        decode = add_ready(api.registry, D, "http://10.0.0.2:1", "m")
        await until(api.registry, lambda: decode.usable)
        ready = (await api.get("/readiness")).json
        assert ready == {"status": "ready", "healthy_workers": 2, "total_workers": 3}
        models = (await api.get("/v1/models")).json["data"]
        assert [(model["id"], "root" in model) for model in models] == [("m", False)]
        assert (await api.get("/v1/models/mine")).status == 404
        loads = (await api.get("/get_loads")).json["loads"]
        assert [load["worker_type"] for load in loads] == [role.value, "prefill", "decode"]


async def test_they_are_told_to_flush_their_caches() -> None:
    """Where their host is: Envoy does not know of them."""
    async with engine() as regular, engine() as encode, running() as api:
        for role, server in ((Role.REGULAR, regular), (Role.ENCODE, encode)):
            api.registry.place(api.registry.add(spec(role, server.url)), "127.0.0.1")
        answer = await api.ask("POST", "/flush_cache")
        assert [server.posts for server in (regular, encode)] == [[("/flush_cache", None)]] * 2
        # As SGLang's encode server answers, which has no such path.
        assert [failed["error"] for failed in answer.json["failed"]] == [
            "POST /flush_cache: HTTP 404; this engine does not have it"
        ] * 2


@pytest.mark.parametrize("role", UNSERVED)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_server_of_a_pair_is_neither(role: Role, mode: str) -> None:
    with pytest.raises(
        MismatchError, match=f"registered as {role.value}, but the server's disaggregation_mode is {mode}"
    ):
        check_kind(role, "", Metadata(runtime="sglang", disaggregation_mode=mode))


def test_a_server_that_is_not_disaggregated_is_a_regular_one() -> None:
    found = Metadata(runtime="sglang", disaggregation_mode="null")
    check_kind(Role.REGULAR, "", found)
    with pytest.raises(MismatchError, match="registered as encode, but the server is not disaggregated"):
        check_kind(Role.ENCODE, "", found)


@pytest.mark.parametrize(
    ("labels", "said", "key"),
    [
        ({}, {}, "sglang/?/page=16"),
        ({}, {"page_size": "64"}, "sglang/?/page=64"),
        ({"block_size": "32"}, {}, "sglang/?/page=32"),
    ],
)
async def test_a_block_size_is_for_where_nobody_says_it(labels: dict[str, str], said: dict[str, str], key: str) -> None:
    async with running() as api:
        body = {"url": "http://10.0.0.1:1", "worker_type": "prefill", "kv_block_size": 16, "labels": labels}
        worker = api.registry.add(registration(body))
        api.registry.describe(worker, Metadata(labels=said))
        assert worker.pairing.key == key
