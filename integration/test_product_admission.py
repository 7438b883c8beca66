"""More than the gateway takes at once, through a real Envoy: order, slots, and whoever leaves or dies meanwhile.

Judged by counts and order, never by a clock.
"""

from __future__ import annotations

import asyncio
import json
from statistics import median
from typing import Any

import pytest
from http_client import Exchange, Reply
from product import Product, held, soon
from standstill import Within
from vllm_product import VllmProduct

from extproc.exchange.record import Record
from extproc.mock import Fault, SglangMock
from extproc.workers.worker import Role

pytestmark = pytest.mark.asyncio

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LEGS = 2  # of each prefill worker
AT_ONCE = 4


async def opened(product: Product, number: int, body: object = CHAT) -> Exchange:
    """A request whose head has come to the service, so that the next one comes after it."""
    name = f"r{number}".encode()

    def has_come() -> bool:
        under_way = [getattr(mortal, "record", None) for mortal in product.gateway._alive]
        return any(record.request_id == name for record in (*under_way, *product.records.all) if record is not None)

    exchange = await product.client.open(PATH, body, [("x-request-id", f"r{number}")])
    await soon(has_come, "it never came")
    return exchange


def queued(product: Product) -> int:
    return product.gateway.gate.queued + sum(product.gateway.legs.queued.values())


async def until_queued(product: Product, count: int) -> None:
    await soon(lambda: queued(product) == count, "they do not wait")


async def answers(exchanges: list[Exchange]) -> list[Reply]:
    found = await asyncio.gather(*(exchange.whole() for exchange in exchanges))
    for exchange in exchanges:
        exchange.close()
    return found


def sent_in_order(records: list[Record]) -> list[str]:
    return [record.request_id.decode() for record in sorted(records, key=lambda record: record.sent)]


class Peak:
    """The most that was under way, looked at whenever a request is over and all the time between."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.slots = self.legs = 0
        self._task = asyncio.create_task(self._look(), name="peak")

    async def _look(self) -> None:
        while True:
            registry = self._product.service.registry
            self.slots = max(self.slots, self._product.gateway.gate.in_flight)
            self.legs = max([self.legs, *(worker.load for worker in registry if worker.role is Role.PREFILL)])
            await asyncio.sleep(0)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


@pytest.mark.parametrize("engines", [Product, VllmProduct])
@pytest.mark.parametrize("where", ["gate", "prefill"])
async def test_a_storm_of_ten_times_what_fits(engines: type[Product], where: str):
    settings: dict[str, Any] = (
        {"max_concurrent_requests": AT_ONCE, "queue_size": 200}
        if where == "gate"
        else {"prefill_max_inflight_requests_per_worker": LEGS, "prefill_queue_size": 200}
    )
    count = 10 * AT_ONCE
    async with engines(prefills=2, decodes=2, **settings) as product:
        for mock in product.prefills:
            mock.fail(Fault(delay_first_token=0.1))
        peak = Peak(product)
        with held(product.prefills):
            exchanges = [await opened(product, number) for number in range(count)]
            await until_queued(product, count - AT_ONCE)
        replies = await answers(exchanges)
        await product.settled()
        await peak.end()
        assert [reply.status for reply in replies] == [200] * count
        assert sent_in_order(product.records.all) == [f"r{number}" for number in range(count)]
        assert sum(record.queued > 0 for record in product.records.all) == count - AT_ONCE
        assert peak.slots <= AT_ONCE or where == "prefill"
        assert peak.legs <= (LEGS if where == "prefill" else AT_ONCE)
        assert (product.gateway.gate.in_flight, queued(product)) == (0, 0)
        # What was admitted is served as if nobody waited: a worker never had more than it may.
        assert all(record.code == "" and record.attempts == 1 for record in product.records.all)


@pytest.mark.parametrize("engines", [Product, VllmProduct])
@pytest.mark.parametrize("where", ["gate", "prefill"])
async def test_a_storm_in_which_every_third_client_leaves_while_it_waits(engines: type[Product], where: str):
    settings: dict[str, Any] = (
        {"max_concurrent_requests": AT_ONCE, "queue_size": 200}
        if where == "gate"
        else {"prefill_max_inflight_requests_per_worker": LEGS, "prefill_queue_size": 200}
    )
    count = 10 * AT_ONCE
    async with engines(prefills=2, decodes=2, **settings) as product:
        for mock in product.prefills:
            mock.fail(Fault(delay_first_token=0.1))
        peak = Peak(product)
        stay, left = [], set()

        async def come(numbers: range) -> None:
            for number in numbers:
                exchange = await opened(product, number)
                if number % 3 == 2 and queued(product):
                    exchange.reset()
                    left.add(f"r{number}")
                else:
                    stay.append(exchange)

        with held(product.prefills):
            await come(range(count // 2))
        assert left
        await come(range(count // 2, count))  # while others are let in
        replies = await answers(stay)
        await product.settled()
        await peak.end()
        assert [reply.status for reply in replies] == [200] * len(stay)
        served = [record for record in product.records.all if record.status]
        assert len(served) == len(stay)
        order = sent_in_order(served)
        assert order == sorted(order, key=lambda name: int(name[1:]))
        # Some may have been let in before it was seen that they have left; none of those that had not, has a leg. A leg
        # that ends at once may never get to its worker.
        gone = [record for record in product.records.all if not record.status]
        assert {record.request_id.decode() for record in gone} == left
        legs = sum(len(mock.legs) for mock in product.prefills)
        assert len(served) <= legs <= len(served) + sum(record.sent > 0 for record in gone)
        assert peak.slots <= AT_ONCE or where == "prefill"
        assert peak.legs <= (LEGS if where == "prefill" else AT_ONCE)
        assert (product.gateway.gate.in_flight, queued(product), product.load) == (0, 0, {})
        # Who is let in last is served as fast as who was let in first.
        served.sort(key=lambda record: record.sent)
        took = [record.ended - record.sent for record in served]
        early, late = median(took[: len(took) // 2]), median(took[len(took) // 2 :])
        assert late < Within(3 * early + 0.1)


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "gate": ({"max_concurrent_requests": 1, "queue_size": 1}, 429, "admission_queue_full"),
    "gate, too long": (
        {"max_concurrent_requests": 1, "queue_timeout_secs": 0.2, "queue_size": 50},
        503,
        "admission_queue_timeout",
    ),
    "rate": ({"rate_limit_tokens_per_second": 1, "queue_size": 0}, 429, "rate_limit_exceeded"),
    "prefill": (
        {"prefill_max_inflight_requests_per_worker": 1, "prefill_queue_size": 1},
        429,
        "pd_prefill_queue_full",
    ),
    "prefill, too long": (
        {"prefill_max_inflight_requests_per_worker": 1, "prefill_queue_timeout_secs": 0.2},
        503,
        "pd_prefill_queue_timeout",
    ),
    "decode": ({"pd_admission_wait_secs": 0}, 503, "worker_overload_protection_shed"),
    "decode, too long": ({"pd_admission_wait_secs": 0.2}, 503, "worker_overload_protection_shed"),
}


@pytest.mark.parametrize("engines", [Product, VllmProduct])
@pytest.mark.parametrize("which", REFUSALS)
async def test_every_refusal_says_when_to_come_again(engines: type[Product], which: str):
    settings, status, code = REFUSALS[which]
    async with engines(disable_load_monitoring=True, **settings) as product:
        if which.startswith("decode"):
            for mock in product.decodes:
                product.worker(mock).limit = 1
        with held(product.prefills):
            exchanges = [await opened(product, number) for number in range(10)]
            await product.records.until(lambda: bool(product.records.all))  # one that was turned away
        replies = await answers(exchanges)
        refused = [reply for reply in replies if reply.status != 200]
        assert refused
        assert len(refused) < len(replies)
        for reply in refused:
            assert (reply.status, reply.header("x-pd-error-code")) == (status, code)
            assert 1 <= int(reply.header("retry-after") or 0) <= 60
            assert json.loads(reply.body)["error"]["code"] == code
        await product.settled()
        assert (product.gateway.gate.in_flight, queued(product), product.load) == (0, 0, {})


@pytest.mark.parametrize("engines", [Product, VllmProduct])
async def test_an_urgent_request_takes_the_place_of_one_that_has_no_answer_yet(engines: type[Product]):
    bulk, urgent = [("x-smg-priority", "bulk")], [("x-smg-priority", "interactive")]
    async with engines(max_concurrent_requests=1, priority_scheduler_enabled=True) as product:
        product.prefill.fail(Fault(delay_first_token=60), times=1)
        first = await product.client.open(PATH, CHAT, bulk)
        await product.prefill.received(1)
        second = await product.client.open(PATH, CHAT, urgent)
        (preempted,) = await answers([first])
        assert (preempted.status, preempted.header("x-pd-error-code")) == (503, "scheduler_preempted")
        assert (preempted.header("x-smg-preempted"), preempted.header("retry-after")) == ("true", "1")
        (served,) = await answers([second])
        assert served.status == 200
        await product.settled()
        assert product.gateway.gate.in_flight == 0
        assert [record.code for record in product.records.all] == ["scheduler_preempted", ""]


async def test_clients_that_leave_while_they_wait():
    async with Product(max_concurrent_requests=1) as product:
        product.prefill.fail(Fault(delay_first_token=60))
        first = await opened(product, 0)
        small = await opened(product, 1)
        large = await opened(product, 2, {**CHAT, "padding": "x" * 300_000})
        huge = await product.client.connect()
        size = 30_000_000
        head = product.client.request_head("POST", PATH, [("content-length", str(size))])
        sending = asyncio.create_task(huge.send(head + b"x" * size))
        await until_queued(product, 3)
        waiting = [mortal for mortal in product.gateway._alive if getattr(mortal, "_waiter", None) is not None]
        await soon(lambda: any(session._paused for session in waiting), "the huge one is not held back")
        await asyncio.sleep(0.3)  # in which all would have come, were it not for that
        assert not sending.done()
        assert max(session._size for session in waiting) < 4 << 20
        for exchange in (small, large, huge):
            exchange.reset()
        await asyncio.gather(sending, return_exceptions=True)
        # Envoy reads nothing of the huge one's connection any more, and so does not see that it has ended.
        await soon(lambda: queued(product) == 1, "they still wait")
        assert product.gateway.alive == 2
        first.close()
        await product.settled()
        assert {record.status for record in product.records.all} == {0}
        assert len(product.prefill.legs) == 1


async def test_a_large_body_that_waited_comes_whole():
    async with Product(max_concurrent_requests=1) as product:
        product.prefill.fail(Fault(delay_first_token=60))
        first = await opened(product, 0)
        body = json.dumps({**CHAT, "padding": "x" * 20_000_000}).encode()
        waiting = asyncio.create_task(product.client.post(PATH, body))
        await until_queued(product, 1)
        product.prefill.behave()
        first.close()
        answer = await waiting
        assert answer.status == 200
        assert product.prefill.legs[-1].body.startswith(body[:-1])
        await product.settled()


async def test_one_too_many_is_told_so_before_it_has_sent_its_body():
    async with Product(max_concurrent_requests=1, queue_size=0) as product:
        product.prefill.fail(Fault(delay_first_token=60))
        first = await opened(product, 0)
        second = await product.client.connect()
        await second.send(product.client.request_head("POST", PATH, [("content-length", "1000000")]))
        reply = await second.head()
        assert (reply.status, reply.header("x-pd-error-code")) == (429, "admission_queue_full")
        assert int(reply.header("retry-after") or 0) >= 1
        assert (await product.client.get("/liveness")).status == 200
        assert (await product.client.get("/readiness")).status == 200
        first.close()
        second.close()
        await product.settled()


@pytest.mark.parametrize("engines", [Product, VllmProduct])
@pytest.mark.parametrize("where", ["gate", "prefill", "decode"])
async def test_a_gateway_that_stops_turns_those_away_that_wait(engines: type[Product], where: str):
    limits: dict[str, dict[str, Any]] = {
        "gate": {"max_concurrent_requests": 1},
        "prefill": {"prefill_max_inflight_requests_per_worker": 1},
        "decode": {"disable_load_monitoring": True, "decodes": 1},
    }
    settings = limits[where]
    async with engines(shutdown_grace_period_secs=60, **settings) as product:
        if where == "decode":
            product.worker(product.decode).limit = 1
        with held(product.prefills):
            first, *others = [await opened(product, number) for number in range(4)]
            await until_queued(product, 3)
            product.service.stop(settle=True)
            for reply in await answers(others):
                assert (reply.status, reply.header("x-pd-error-code")) == (503, "draining")
                assert reply.header("retry-after") == "1"
        (served,) = await answers([first])
        assert served.status == 200
        assert len(product.prefill.legs) == 1


async def test_a_prefill_that_dies_while_others_wait():
    async with Product(prefills=2, prefill_max_inflight_requests_per_worker=1) as product:
        for mock in product.prefills:
            mock.fail(Fault(delay_first_token=0.05))
        with held(product.prefills):
            exchanges = [await opened(product, number) for number in range(12)]
            await until_queued(product, 10)
            await product.prefills[0].refuse()
        replies = await answers(exchanges)
        assert [reply.status for reply in replies] == [200] * 12
        await product.records.until(lambda: product.gateway.alive == 0)
        assert (product.load, queued(product)) == ({}, 0)
        await product.prefills[0].accept()


async def test_a_decode_is_given_no_more_than_its_engine_runs():
    async with Product(decodes=1, load_monitor_interval=0.05) as product:
        worker = product.worker(product.decode)
        await soon(lambda: worker.limit is not None, "the engine does not say how many it runs")
        assert worker.limit == worker.engine_load.max_running


async def test_requests_wait_for_a_decode_that_runs_as_many_as_it_can():
    async with Product(decodes=0, disable_load_monitoring=True) as product, SglangMock("decode") as decode:
        await product.add(decode, labels={"max_running_requests": "1"})
        await product.ready()
        with held([decode]):
            exchanges = [await opened(product, number) for number in range(8)]
            await until_queued(product, 7)
            worker = product.worker(decode)
            assert (worker.limit, worker.load) == (1, 1)
            assert product.gateway.legs.queued[Role.DECODE] == 7
        replies = await answers(exchanges)
        assert [reply.status for reply in replies] == [200] * 8
        await product.records.until(lambda: product.gateway.alive == 0)
        assert sent_in_order(product.records.all) == [f"r{number}" for number in range(8)]
        assert (product.load, queued(product)) == ({}, 0)
