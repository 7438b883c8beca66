"""Found workers in the registry: registered, changed, replaced and removed, and those of others left alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fleet import LONG, FakeEnvoy, add_ready, eventually, spec, until

from extproc.discovery.protocol import NoProtocolError, protocol_of
from extproc.discovery.registrar import Registrar
from extproc.discovery.state import DiscoveryState
from extproc.discovery.wanted import Key, Wanted, by_key
from extproc.mock import SglangMock
from extproc.workers.changes import Change
from extproc.workers.metadata import Metadata
from extproc.workers.registration import patched, registration
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status, Worker

P = "http://10.0.0.1:8000"
D = "http://10.0.0.2:8000"


def found(url: str = P, role: str = "prefill", owner: str = "a", *, known: bool = True, **more: Any) -> Wanted:
    return Wanted(
        registration({"url": url, "worker_type": role, **more}), f"ns/{owner}", owner=owner, protocol_known=known
    )


class Asked:
    """Stands for :func:`protocol_of`: answers when it is told what."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[str | Exception] = asyncio.Queue()
        self.times = 0

    async def __call__(self, *_: object) -> str:
        self.times += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Rig:
    def __init__(self) -> None:
        self.registry = Registry(FakeEnvoy().publish, drain_poll=0.001)
        self.state = DiscoveryState("kubernetes")
        self.asked = Asked()
        self.registrar = Registrar(self.registry, self.state, self.asked)

    def want(self, *wanted: Wanted) -> None:
        self.registrar.want(by_key(wanted))

    @property
    def there(self) -> list[str]:
        """Who may be given requests, or might."""
        return [str(worker.url) for worker in self.registry if worker.status is not Status.DRAINING]

    @property
    def worker(self) -> Worker:
        (worker,) = (each for each in self.registry if each.status is not Status.DRAINING)
        return worker


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.registrar.close()
    await made.registry.close()


async def test_who_is_found_is_registered_and_who_is_gone_is_drained(rig: Rig) -> None:
    rig.want(found(), found(D, "decode"))
    assert rig.there == [P, D]
    before = list(rig.registry)
    rig.want(found(), found(D, "decode"))
    assert list(rig.registry) == before
    before[0].begin()
    rig.want(found(D, "decode"))
    assert rig.there == [D]
    assert before[0].status is Status.DRAINING, "its request goes on"
    before[0].end(0)
    await until(rig.registry, lambda: before[0] not in rig.registry)
    assert rig.state.changes == {"added": 2, "removed": 1}


async def test_another_pod_at_the_same_address_is_another_worker(rig: Rig) -> None:
    rig.want(found())
    former = rig.worker
    former.begin()
    rig.want(found(owner="b"))
    assert former.status is Status.DRAINING
    assert rig.worker is not former
    assert rig.worker.status is Status.PENDING
    former.end(0)
    await until(rig.registry, lambda: former not in rig.registry)
    assert rig.there == [P]


async def test_what_a_pod_says_anew_is_a_registration_anew(rig: Rig) -> None:
    rig.want(found(bootstrap_port=1))
    worker = rig.worker
    rig.want(found(bootstrap_port=2))
    assert rig.worker is worker
    assert worker.bootstrap_port == 2
    assert rig.state.changes == {"added": 1, "changed": 1}


async def test_of_several_ranks_all_are_changed(rig: Rig) -> None:
    registry = Registry(FakeEnvoy().publish, dp_aware=True)
    registrar = Registrar(registry, rig.state)
    registrar.want(by_key([found(bootstrap_port=1)]))
    registry.describe(next(iter(registry)), Metadata(model_ids=("m",), dp_size=2))
    registrar.want(by_key([found(bootstrap_port=2)]))
    assert [worker.bootstrap_port for worker in registry] == [2, 2]
    registrar.want({})
    assert {worker.status for worker in registry} == {Status.DRAINING}
    await registry.close()


async def test_workers_of_others_are_left_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    others = [add_ready(rig.registry, Role.PREFILL, P, "m"), add_ready(rig.registry, Role.DECODE, "http://d:1", "m")]
    with caplog.at_level(logging.INFO):
        rig.want(found(bootstrap_port=1))
        rig.want(found(bootstrap_port=2))
        rig.want(found(owner="b"))
        rig.want()
    assert list(rig.registry) == others
    assert [worker.status for worker in others] == [Status.READY] * 2
    assert others[0].bootstrap_port is None
    assert caplog.text.count("somebody else registered") == 2, "of each pod once"


async def test_a_pod_stays_away_when_the_worker_of_others_at_its_url_is_deleted(rig: Rig) -> None:
    by_hand = add_ready(rig.registry, Role.PREFILL, P, "m")
    rig.want(found())
    rig.registry.remove(by_hand)
    rig.want(found(bootstrap_port=1))
    assert rig.there == []
    rig.want(found(owner="b"))
    assert rig.there == [P]


async def test_who_is_removed_by_hand_stays_away_until_the_pod_is_another(rig: Rig) -> None:
    rig.want(found())
    rig.registry.remove(rig.worker)
    rig.want(found(bootstrap_port=7))
    rig.want(found())
    assert rig.there == []
    by_hand = rig.registry.add(spec(Role.PREFILL, P))
    rig.want()
    assert rig.there == [P], "it is another one's now"
    rig.registry.remove(by_hand)
    rig.want(found(owner="b"))
    assert rig.there == [P]


async def test_what_is_changed_by_hand_stays_until_the_pod_says_something_else(rig: Rig) -> None:
    rig.want(found(bootstrap_port=1, models=[{"id": "m"}]))
    worker = rig.worker
    rig.registry.change(worker, patched(rig.registry.spec(worker), {"labels": {"zone": "z"}}))
    rig.want(found(bootstrap_port=1, models=[{"id": "m"}]))
    assert worker.labels["zone"] == "z"
    rig.want(found(bootstrap_port=2, models=[{"id": "m"}]))
    assert (worker.labels, worker.bootstrap_port) == ({}, 2)


async def test_a_worker_whose_pod_is_not_ready_waits_where_it_is(rig: Rig) -> None:
    rig.want(replace(found(), ready=False))
    assert rig.there == [], "it has never been ready"
    rig.want(found())
    worker = rig.worker
    rig.registry.place(worker, "10.0.0.1")
    rig.registry.set_status(worker, Status.READY)
    await until(rig.registry, lambda: worker.usable)
    worker.begin()
    told: list[Change] = []
    rig.registry.subscribe(lambda _, change: told.append(change))
    rig.want(replace(found(), ready=False))
    assert (worker.status, worker.usable, worker.works) == (Status.READY, False, True)
    assert rig.registry.usable(Role.PREFILL, None) == ()
    assert rig.registry.healthy(Role.PREFILL) == (worker,)
    assert rig.registry.trouble(worker) == "its pod is not ready"
    assert "its pod is not ready" in rig.registry.readiness().reason
    rig.want(replace(found(), ready=False))
    rig.want(found())
    assert rig.registry.usable(Role.PREFILL, None) == (worker,)
    assert told == [Change.CORDON] * 2, "nothing that is known of it was dropped"
    assert rig.state.changes == {"added": 1}
    rig.want(replace(found(owner="b"), ready=False))
    assert rig.there == [], "that is another pod"
    worker.end(0)


async def test_of_several_ranks_all_wait(rig: Rig) -> None:
    registry = Registry(FakeEnvoy().publish, dp_aware=True)
    registrar = Registrar(registry, rig.state)
    registrar.want(by_key([found()]))
    registrar.want(by_key([replace(found(), ready=False)]))
    registry.describe(next(iter(registry)), Metadata(model_ids=("m",), dp_size=2))
    assert [bool(worker.cordoned) for worker in registry] == [True, True]
    registrar.want(by_key([found()]))
    assert [bool(worker.cordoned) for worker in registry] == [False, False]
    await registry.close()


async def test_a_pod_that_is_no_longer_ready_when_its_server_answers(rig: Rig) -> None:
    rig.want(found(known=False))
    await eventually(lambda: rig.asked.times)
    rig.want(replace(found(known=False), ready=False))
    rig.asked.answers.put_nowait("http")
    await until(rig.registry, lambda: rig.there)
    assert rig.worker.cordoned == "its pod is not ready"


# --- protocols ---


async def test_a_server_is_asked_which_protocol_it_speaks(rig: Rig) -> None:
    rig.want(found(known=False))
    assert (rig.there, rig.state.waiting) == ([], 1)
    rig.asked.answers.put_nowait("grpc")
    await until(rig.registry, lambda: rig.there)
    assert rig.there == ["grpc://10.0.0.1:8000"]
    await eventually(lambda: not rig.state.waiting)
    rig.want(found(known=False, bootstrap_port=5))  # the same server: it is not asked again
    assert (rig.there, rig.worker.bootstrap_port, rig.asked.times) == (["grpc://10.0.0.1:8000"], 5, 1)
    rig.want(found(known=False, owner="b"))
    assert rig.there == []
    rig.asked.answers.put_nowait("http")
    await until(rig.registry, lambda: rig.there)
    assert rig.there == [P]


async def test_who_does_not_answer_is_asked_again(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.discovery.registrar._FIRST_PAUSE", 0.001)
    for answer in (NoProtocolError("Connection refused"), NoProtocolError("Connection refused"), "http"):
        rig.asked.answers.put_nowait(answer)
    rig.want(found(known=False))
    await until(rig.registry, lambda: rig.there)
    assert rig.asked.times == 3
    assert caplog.text.count("does not answer yet") == 1


async def test_who_goes_while_it_is_asked_is_not_registered(rig: Rig) -> None:
    rig.want(found(known=False))
    await eventually(lambda: rig.asked.times)
    rig.want()
    rig.asked.answers.put_nowait("http")
    await eventually(lambda: not rig.state.waiting)
    assert rig.there == []
    assert Key(Role.PREFILL, "10.0.0.1:8000") not in rig.registrar._entries


async def test_what_changes_while_it_is_asked_counts(rig: Rig) -> None:
    rig.want(found(known=False, bootstrap_port=1))
    await eventually(lambda: rig.asked.times)
    rig.want(found(known=False, bootstrap_port=2))
    rig.asked.answers.put_nowait("http")
    await until(rig.registry, lambda: rig.there)
    assert rig.worker.bootstrap_port == 2


async def test_an_http_server() -> None:
    async with SglangMock("decode") as mock:
        assert await protocol_of("127.0.0.1", mock.port, LONG) == "http"


async def test_a_grpc_server() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await protocol_of("127.0.0.1", port, LONG) == "grpc"
    finally:
        await server.stop(0)


async def _serve(answer: bytes | None) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        if answer is None:
            await reader.read()  # says nothing until the other side leaves
        else:
            writer.write(answer)
        writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9\r\n", None])
async def test_a_server_of_something_else(answer: bytes | None) -> None:
    async with await _serve(answer) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NoProtocolError, match="neither over HTTP nor over gRPC"):
            await protocol_of("127.0.0.1", port, LONG if answer is not None else 0.05)


async def test_no_server() -> None:
    async with await _serve(b"") as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(NoProtocolError, match="Connect"):
        await protocol_of("127.0.0.1", port, LONG)


# --- models ---


async def test_a_model_named_by_the_pod_is_served_besides_the_engines() -> None:
    registry = Registry(FakeEnvoy().publish)
    named = registration({"url": P, "worker_type": "prefill", "models": [{"id": "ours"}]})
    worker = registry.add(replace(named, engine_models_too=True))
    registry.describe(worker, Metadata(model_ids=("theirs", "ours")))
    assert worker.model_ids == ("ours", "theirs")
    registry.change(worker, patched(registry.spec(worker), {"labels": {"a": "b"}}))
    assert worker.model_ids == ("ours", "theirs")
    registry.change(worker, patched(registry.spec(worker), {"models": [{"id": "only"}]}))
    assert worker.model_ids == ("only",)
    await registry.close()
