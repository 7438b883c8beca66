"""Decode workers are told of a Mooncake prefill that restarted under its engine id, before it is used again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fleet import FAST, SLOW, Engine, Fleet, engine, eventually, fleet, spec, until

from extproc.workers import mooncake_refresh
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.no_answer import NoAnswerError
from extproc.workers.registry import Change
from extproc.workers.rpc.channels import StatusError
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
# What the data path gives reason for is done at once.
EAGER = Pace(seek=0.01, confirm=0.005, report=0.0, doubt=0.0)


class Pair(NamedTuple):
    fleet: Fleet
    prefill: Engine
    decode: Engine
    prefill_worker: Worker
    decode_worker: Worker


def add(f: Fleet, server: Engine, role: Role, connector: str = MOONCAKE, **more: Any) -> Worker:
    port = server.bootstrap_port if role is P else None
    return f.registry.add(spec(role, server.url, kv=KvConfig(connector), bootstrap_port=port, **more))


@asynccontextmanager
async def pair(settings: HealthSettings = SLOW, pace: Pace = EAGER, **decode: Any) -> AsyncIterator[Pair]:
    """A Mooncake prefill and a decode worker, both usable."""
    async with (
        engine(owner="vllm", engine_ids={"0": "fixed"}) as prefill_server,
        engine(owner="vllm") as decode_server,
        fleet(settings, pace, token_reuse=False) as f,
    ):
        workers = add(f, prefill_server, P), add(f, decode_server, D, **decode)
        await until(f.registry, lambda: all(worker.usable for worker in workers))
        yield Pair(f, prefill_server, decode_server, *workers)


def told(server: Engine) -> list[str]:
    """The bootstrap servers that a decode was made to ask again."""
    return [body["kv_transfer_params"]["remote_bootstrap_addr"] for _, body in server.posts]


async def restart(p: Pair) -> None:
    """The prefill's server goes, is seen to have gone, and comes back."""
    await p.prefill.stop()
    p.fleet.monitor.report_unreachable(p.prefill_worker)
    await p.fleet.becomes(p.prefill_worker, Status.NOT_READY)
    await p.prefill.start()


async def test_a_decode_is_told_before_the_prefill_is_used_again() -> None:
    async with pair() as p:
        bootstrap = f"http://127.0.0.1:{p.prefill.bootstrap_port}"
        assert p.decode.posts == []
        p.decode.hang_posts = True
        await restart(p)
        await eventually(lambda: p.decode.posts)
        assert p.prefill_worker.status is Status.NOT_READY
        (path, body), params = p.decode.posts[0], p.decode.posts[0][1]["kv_transfer_params"]
        assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "x", -1)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert params["remote_engine_id"].startswith("refresh-")
        assert params["transfer_id"]
        assert params["remote_bootstrap_addr"] == bootstrap


async def test_it_is_used_again_once_it_was_told_and_told_once() -> None:
    async with pair(FAST) as p:
        await restart(p)
        await p.fleet.becomes(p.prefill_worker, Status.READY)
        assert len(told(p.decode)) == 1
        probes = p.prefill.count("/query")
        await eventually(lambda: p.prefill.count("/query") > probes + 3)
        assert len(told(p.decode)) == 1


async def test_each_restart_has_a_name_of_its_own() -> None:
    async with pair(FAST) as p:
        for count in (1, 2):
            p.prefill.starts += 1
            await eventually(lambda: len(p.decode.posts) == count)  # noqa: B023 - awaited here
        engines = {body["kv_transfer_params"]["remote_engine_id"] for _, body in p.decode.posts}
        assert len(engines) == 2  # a decode that knew the engine id would not ask


async def test_a_restart_that_no_probe_saw_is_found_with_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(FAST) as p:
        p.prefill.starts += 1
        await eventually(lambda: told(p.decode))
        assert "restarted under the same engine id" in caplog.text
        assert p.prefill_worker.usable


async def test_a_restart_is_told_whichever_way_it_shows() -> None:
    """What it had computed is lost: requests that wait for it, and what is known of its cache, are seen to."""
    async with pair(FAST) as p:
        told_of: list[Worker] = []
        p.fleet.registry.subscribe(lambda worker, change: change is Change.RESTARTED and told_of.append(worker))
        p.prefill.starts += 1  # under the same engine id
        await eventually(lambda: told_of)
        assert told_of == [p.prefill_worker]
        probes = p.prefill.count("/query")
        await eventually(lambda: p.prefill.count("/query") > probes + 3)
        assert told_of == [p.prefill_worker]
        p.prefill.engine_ids = {"0": "another"}
        await eventually(lambda: len(told_of) > 1)
        assert told_of == [p.prefill_worker] * 2


async def test_a_failure_of_the_data_path_has_it_looked_at() -> None:
    async with pair() as p:
        p.prefill.starts += 1
        p.fleet.monitor.report_failure(p.prefill_worker)
        await eventually(lambda: told(p.decode))


async def test_an_outage_without_a_restart_is_none() -> None:
    async with pair(FAST) as p:
        p.prefill.health = 500
        await p.fleet.becomes(p.prefill_worker, Status.NOT_READY)
        p.prefill.health = 200
        await p.fleet.becomes(p.prefill_worker, Status.READY)
        assert p.decode.posts == []


async def test_a_new_engine_id_needs_no_telling() -> None:
    async with pair(FAST) as p:
        p.prefill.engine_ids = {"0": "another"}
        await restart(p)
        await p.fleet.becomes(p.prefill_worker, Status.READY)
        assert p.prefill_worker.kv_engines == (KvEngine(0, "another"),)
        assert p.decode.posts == []


async def test_a_prefill_that_was_registered_anew_is_known_by_its_engine_id() -> None:
    async with pair() as p:
        p.fleet.registry.remove(p.prefill_worker)
        await until(p.fleet.registry, lambda: len(p.fleet.registry) == 1)
        p.prefill.starts += 1
        again = add(p.fleet, p.prefill, P)
        await until(p.fleet.registry, lambda: again.usable)
        assert len(told(p.decode)) == 1


async def test_every_core_of_a_decode_is_told() -> None:
    async with pair(FAST, labels={"dp_size": "2"}) as p:
        p.prefill.starts += 1
        await eventually(lambda: len(told(p.decode)) == 2)
        ranks = [
            headers.get("x-data-parallel-rank") for path, headers in p.decode.requests if path == "/v1/completions"
        ]
        assert ranks == ["0", "1"]


async def test_other_connectors_are_left_alone() -> None:
    labels = {"pairing_protocol": "ours"}
    async with pair() as p, engine(owner="vllm") as nixl, engine(owner="vllm") as unknown:
        others = add(p.fleet, nixl, D, NIXL, labels=labels), p.fleet.registry.add(spec(D, unknown.url))
        await until(p.fleet.registry, lambda: all(worker.usable for worker in others))
        p.prefill.starts += 1
        p.fleet.monitor.report_failure(p.prefill_worker)
        await eventually(lambda: told(p.decode))
        assert nixl.posts == unknown.posts == []


async def test_one_that_will_not_listen_keeps_nobody_out_and_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(FAST) as p:
        p.decode.refusal = 503
        await restart(p)
        await p.fleet.becomes(p.prefill_worker, Status.READY)
        record = next(record for record in caplog.records if "cannot be told" in record.message)
        assert record.__dict__["worker"] == p.decode.url
        assert record.__dict__["reason"] == "POST /v1/completions: HTTP 503"
        p.decode.refusal = 400
        before = len(p.decode.posts)
        await eventually(lambda: len(p.decode.posts) > before)
        settled = len(p.decode.posts)
        probes = p.decode.count("/health")
        await eventually(lambda: p.decode.count("/health") > probes + 3)
        assert len(p.decode.posts) == settled


async def test_one_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_refresh, "TELL_SECONDS", 1.0)  # in which it comes there, however busy the machine is
    async with pair() as p:
        p.decode.hang_posts = True
        await restart(p)
        await p.fleet.becomes(p.prefill_worker, Status.READY)
        assert len(told(p.decode)) == 1


async def test_a_decode_that_was_away_meanwhile_is_told_before_it_is_used() -> None:
    async with pair(FAST) as p:
        p.decode.health = 500
        await p.fleet.becomes(p.decode_worker, Status.NOT_READY)
        p.prefill.starts += 1
        queries = p.prefill.count("/query")
        await eventually(lambda: p.prefill.count("/query") > queries + 2)
        assert p.decode.posts == []
        p.decode.health = 200
        await p.fleet.becomes(p.decode_worker, Status.READY)
        assert len(told(p.decode)) == 1


async def test_a_bootstrap_server_that_is_silent_once_does_not_cost_the_engine_id() -> None:
    async with pair(FAST, Pace(seek=0.05, doubt=0.0)) as p:
        await p.prefill.stop_bootstrap()
        seen = p.prefill.count("/health")
        await eventually(lambda: p.prefill.count("/health") > seen)
        assert p.prefill_worker.kv_engines == (KvEngine(0, "fixed"),)
        await until(p.fleet.registry, lambda: not p.prefill_worker.kv_engines)
        await p.fleet.is_said(p.prefill_worker, "does not answer")


async def test_few_decodes_are_told_at_once_and_none_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_refresh, "TELL_AT_ONCE", 3)
    async with engine(owner="vllm", hang_posts=True) as server:
        f = Fleet(SLOW)  # its monitor does not run
        prefill = f.registry.add(spec(P, "http://127.0.0.9:1", kv=KvConfig(MOONCAKE)))
        for number in range(10):
            decode = f.registry.add(spec(D, f"http://127.0.0.{number + 1}:{server.port}", kv=KvConfig(MOONCAKE)))
            f.registry.place(decode, decode.url.host)
            f.registry.set_status(decode, Status.READY)
            await until(f.registry, lambda: decode.usable)  # noqa: B023 - awaited here
        refresh = MooncakeRefresh(f.registry, f.client)
        await refresh.found(prefill, {"e": "here"})
        telling = asyncio.create_task(refresh.found(prefill, {"e": "there"}))
        await eventually(lambda: len(server.posts) >= 3)
        await asyncio.sleep(0.02)
        assert len(server.posts) == 3
        telling.cancel()
        await asyncio.wait([telling])
        await f.registry.close()
        await f.client.close()


class Channels:
    """Stands for those of the client: notes what is asked, and fails with ``error``."""

    def __init__(self) -> None:
        self.error: NoAnswerError | None = StatusError("Generate: INVALID_ARGUMENT", "INVALID_ARGUMENT")
        self.asked: list[tuple[Worker, str, Any]] = []

    async def ask(self, worker: Worker, path: str, request: Any, response: Any, **limits: Any) -> bytes:
        assert (response, limits) == (bytes, {"within": mooncake_refresh.TELL_SECONDS, "ip": None})
        self.asked.append((worker, path, request))
        if self.error is not None:
            raise self.error
        return b""


@pytest.mark.parametrize("dp_size", [1, 2])
async def test_a_decode_over_grpc_is_told_by_a_request_that_it_refuses(dp_size: int) -> None:
    f, channels = Fleet(SLOW), Channels()
    prefill = f.registry.add(spec(P, "grpc://127.0.0.9:1", kv=KvConfig(MOONCAKE), runtime="vllm"))
    decode = f.registry.add(spec(D, "grpc://127.0.0.1:2", kv=KvConfig(MOONCAKE), runtime="vllm"))
    decode.labels["dp_size"] = str(dp_size)
    f.registry.set_status(decode, Status.READY)
    refresh = MooncakeRefresh(f.registry, SimpleNamespace(rpc=channels))  # type: ignore[arg-type]
    await refresh.found(prefill, {"e": "here"})
    await refresh.found(prefill, {"e": "there"})
    assert [(worker, path) for worker, path, _ in channels.asked] == [(decode, GENERATE)] * dp_size
    request = channels.asked[0][2]
    params = json.loads(request.kv_transfer_params_json)
    assert params["remote_bootstrap_addr"] == "http://127.0.0.9:8998"
    assert (params["do_remote_prefill"], request.sampling_params.max_tokens) == (True, 0)
    assert request.sampling_params.HasField("max_tokens")
    assert list(request.tokenized.input_ids) == [0]
    await refresh.settle(decode)
    assert len(channels.asked) == dp_size, "told once"


@pytest.mark.parametrize("error", [None, StatusError("", "UNIMPLEMENTED"), NoAnswerError("")])
async def test_a_decode_over_grpc_that_does_not_refuse_is_told_again(error: NoAnswerError | None) -> None:
    f, channels = Fleet(SLOW), Channels()
    prefill = f.registry.add(spec(P, "grpc://127.0.0.9:1", kv=KvConfig(MOONCAKE), runtime="vllm"))
    decode = f.registry.add(spec(D, "grpc://127.0.0.1:2", kv=KvConfig(MOONCAKE), runtime="vllm"))
    refresh = MooncakeRefresh(f.registry, SimpleNamespace(rpc=channels))  # type: ignore[arg-type]
    await refresh.found(prefill, {"e": "here"})
    await refresh.found(prefill, {"e": "there"})
    assert channels.asked == [], "it is not used"
    refused, channels.error = channels.error, error
    await refresh.settle(decode)
    channels.error = refused
    await refresh.settle(decode)
    await refresh.settle(decode)
    assert len(channels.asked) == 2


async def test_not_every_engine_that_ever_was_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_refresh, "_REMEMBERED", 2)
    f = Fleet(SLOW)
    prefill = f.registry.add(spec(P, "http://127.0.0.9:1", kv=KvConfig(MOONCAKE)))
    refresh = MooncakeRefresh(f.registry, f.client)
    for name in ("a", "b", "c"):
        await refresh.found(prefill, {name: 1})
    assert list(refresh._addresses) == ["b", "c"]


def test_the_document_says_how_long_and_how_many() -> None:
    text = (Path(__file__).parent.parent / "docs/behaviour.md").read_text()
    row = f"{mooncake_refresh.TELL_SECONDS:g} s each, {mooncake_refresh.TELL_AT_ONCE} at once"
    assert row in next(line for line in text.splitlines() if line.startswith("| telling a decode worker"))
