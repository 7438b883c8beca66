"""Whose KV events are followed, where they are, and what is shown of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from fakes import Asked
from fakes import worker as made
from fleet import FakeEnvoy, eventually, spec
from kv_publisher import CLEARED, publishing, stored

from extproc.control.kv_event_metrics import KvEventMetrics
from extproc.control.metrics import Metrics
from extproc.policies.event_prefixes import EventPrefixes
from extproc.workers.kv_event_feed import KvEventFeed
from extproc.workers.kv_event_source import Common, Endpoint, Source, SourceError, labels_of, source_of
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status, Worker

P = Role.PREFILL


# -- where they are ---------------------------------------------------------------------------------------------------


def source(labels: dict[str, str], common: str = "", replay: str = "", **fields: object) -> Source | None:
    one = made(P, 1, labels=labels)
    for name, value in fields.items():
        setattr(one, name, value)
    return source_of(
        one, Common(Endpoint.parse(common) if common else None, Endpoint.parse(replay) if replay else None)
    )


def test_a_worker_says_where_its_events_are() -> None:
    assert source({}) is None
    assert source({"kv_events": "tcp://*:5557"}) == Source("tcp://127.0.0.1:5557")
    assert source({"kv_events": "tcp://0.0.0.0:5557"}) == Source("tcp://127.0.0.1:5557")
    assert source(
        {"kv_events": "tcp://10.0.0.9:1", "kv_events_replay": "tcp://*:2", "kv_events_topic": "kv"}
    ) == Source("tcp://10.0.0.9:1", "tcp://127.0.0.1:2", "kv")


def test_what_holds_for_all_is_for_those_who_say_nothing() -> None:
    assert source({}, "tcp://*:5557", "tcp://*:6557") == Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557")
    assert source({"kv_events": "off"}, "tcp://*:5557") is None
    assert source({"kv_events": "tcp://*:1"}, "tcp://*:5557", "tcp://*:6557") == Source("tcp://127.0.0.1:1")


def test_a_rank_has_ports_of_its_own() -> None:
    assert source({"dp_size": "4"}, "tcp://*:5557", "tcp://*:6557", dp_rank=3) == Source(
        "tcp://127.0.0.1:5560", "tcp://127.0.0.1:6560"
    )
    with pytest.raises(SourceError, match="--dp-aware"):
        source({"dp_size": "4"}, "tcp://*:5557")
    assert source({"dp_size": "²"}, "tcp://*:5557") == source({}, "tcp://*:5557")
    with pytest.raises(SourceError, match="65536"):
        source({}, "tcp://*:65535", dp_rank=1)


def test_an_address_in_brackets() -> None:
    assert Endpoint.parse("tcp://[fd00::1]:5557") == Endpoint("[fd00::1]", 5557)
    assert Endpoint.parse("tcp://[::]:5557") == Endpoint("", 5557)


@pytest.mark.parametrize("text", ["", "5557", "tcp://*", "tcp://*:0", "tcp://*:70000", "ipc:///x", "tcp://*:1/x"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(SourceError):
        Endpoint.parse(text)


def test_what_sglang_says_of_its_own() -> None:
    """As 0.5.23 has it in /server_info: runtime_context.describe_kv_events_publisher."""
    said = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 5558,
    }
    assert labels_of(said) == {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5558"}
    assert labels_of(said | {"topic": "kv"})["kv_events_topic"] == "kv"
    del said["replay_endpoint_port_base"]
    assert labels_of(said) == {"kv_events": "tcp://*:5557"}
    for nothing in (None, {}, "x", said | {"publisher": "null"}, said | {"endpoint_port_base": None}):
        assert labels_of(nothing) == {}


# -- whose are followed -----------------------------------------------------------------------------------------------


class Rig:
    def __init__(self) -> None:
        self.registry = Registry(FakeEnvoy().publish, drain_poll=0.001)
        self.emptied: list[Worker] = []
        self.prefixes = EventPrefixes(1000, self.emptied.append)
        self.feed = KvEventFeed(self.registry, self.prefixes, Common())
        self.metrics = Metrics()
        KvEventMetrics(self.registry, self.feed, self.prefixes, self.metrics)

    async def add(self, port: int, **labels: str) -> Worker:
        worker = self.registry.add(spec(P, f"http://127.0.0.1:{port}", labels=labels))
        self.registry.place(worker, "127.0.0.1")
        self.registry.set_status(worker, Status.READY)
        await eventually(lambda: worker.usable)
        return worker

    def held(self, *workers: Worker) -> dict[Worker, int] | None:
        found = self.prefixes.overlaps(Asked(prompt=json.dumps([*range(8)]).encode()), workers)
        return None if found is None else dict(found)

    def page(self, name: str) -> dict[str, str]:
        lines = (line for line in self.metrics.render().decode().splitlines() if line.startswith(f"{name}{{"))
        return {line.split('worker="')[1].split('"')[0]: line.rpartition(" ")[2] for line in lines}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.feed.start()
    yield rig
    rig.feed.stop()
    await rig.registry.close()


async def test_usable_workers_are_followed_and_others_are_not(rig: Rig) -> None:
    with publishing() as publisher:
        publisher.publish(stored([1], range(4)))
        told, silent = await rig.add(1, **publisher.labels), await rig.add(2)
        await eventually(lambda: rig.held(told, silent) == {told: 4})
        assert rig.page("pd_kv_events_blocks") == {told.name: "1"}
        assert rig.page("pd_kv_events_connected") == rig.page("pd_kv_events_whole") == {told.name: "1"}
        assert rig.page("pd_kv_events_batches_total") == {told.name: "1"}
        rig.registry.set_status(told, Status.NOT_READY, "down")
        assert rig.held(told) is None
        assert rig.feed.stream(told) is None
        rig.registry.set_status(told, Status.READY)
        await eventually(lambda: rig.held(told) == {told: 4})
        rig.registry.remove(told)
        assert rig.held(told) is None
        assert rig.page("pd_kv_events_blocks") == {}


async def test_an_emptied_cache_is_told(rig: Rig) -> None:
    with publishing() as publisher:
        worker = await rig.add(1, **publisher.labels)
        publisher.publish(stored([1], range(4)), CLEARED)
        await eventually(lambda: rig.emptied == [worker])
        assert rig.held(worker) == {worker: 0}


async def test_a_place_that_is_another_is_followed_instead(rig: Rig) -> None:
    with publishing() as one, publishing() as other:
        worker = await rig.add(1, **one.labels)
        other.publish(stored([1, 2], range(8)))
        stream = rig.feed.stream(worker)
        rig.registry.change(worker, spec(P, str(worker.url), labels=other.labels | {"colour": "red"}))
        await eventually(lambda: rig.held(worker) == {worker: 8})
        second = rig.feed.stream(worker)
        assert second is not stream
        rig.registry.change(worker, spec(P, str(worker.url), labels=other.labels))
        assert rig.feed.stream(worker) is second, "what it does not need to know has changed"
        rig.registry.change(worker, spec(P, str(worker.url)))
        assert rig.feed.stream(worker) is None


async def test_what_cannot_be_followed_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "extproc.workers.kv_event_feed")
    worker = await rig.add(1, kv_events="5557")
    rig.registry.change(worker, spec(P, str(worker.url), labels={"kv_events": "5557", "x": "y"}))
    assert rig.feed.stream(worker) is None
    (record,) = [record for record in caplog.records if record.name == "extproc.workers.kv_event_feed"]
    assert "'5557' is not tcp://HOST:PORT" in record.__dict__["reason"]


async def test_nobody_is_followed_after_the_end() -> None:
    rig = Rig()
    rig.feed.start()
    with publishing() as publisher:
        worker = await rig.add(1, **publisher.labels)
        await publisher.subscribed()
        rig.feed.stop()
        assert rig.feed.stream(worker) is None
        await eventually(lambda: not publisher.heard)
        await rig.registry.close()
        await asyncio.sleep(0)
