"""Workers that fail while their probes go well: circuit breakers, lost connections, engines that hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product, soon

from extproc.mock import Fault, Point, Rule, SglangMock
from extproc.workers.breaker import BreakerState
from extproc.workers.worker import Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
SETTINGS = {
    "disable_circuit_breaker": False,
    "cb_failure_threshold": 2,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 0.2,
    "worker_transport_failures": 2,
    "worker_stall_secs": 0.1,
    "worker_wedge_secs": 3,  # seconds in which a worker that is well gives a sign of life, however busy the machine is
    "health_check_interval_secs": 0.2,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(**SETTINGS) as product:
        yield product


async def test_a_decode_that_answers_500_is_left_out_and_tried_again(product: Product) -> None:
    bad = product.decodes[0]
    worker = product.worker(bad)
    bad.fail(Fault(status=500))
    for _ in range(6):
        assert (await product.post(PATH, BODY)).status == 200  # another attempt, on the other worker
    await soon(lambda: worker.breaker.state is not BreakerState.CLOSED, "the breaker did not open")
    assert worker.status is Status.READY
    shown = (await product.client.get(f"/workers/{worker.id}")).json
    assert "circuit breaker" in shown["status_reason"]
    assert product.service.registry.circuits.transitions(worker)[BreakerState.OPEN] >= 1
    bad.behave()
    async with asyncio.timeout(60):
        while worker.breaker.state is not BreakerState.CLOSED:
            assert (await product.post(PATH, BODY)).status == 200
    assert product.worker(product.decodes[1]).breaker.state is BreakerState.CLOSED
    assert product.worker(product.prefill).breaker.state is BreakerState.CLOSED


async def test_connections_that_break_take_a_worker_out_though_it_is_well(product: Product) -> None:
    bad = product.decodes[0]
    worker = product.worker(bad)
    bad.fail(Fault(drop=Point.BEFORE_HEAD))
    for _ in range(6):
        assert (await product.post(PATH, BODY)).status == 200
        if worker.status is Status.NOT_READY:
            break
    out = product.service.registry.trouble(worker)
    assert worker.status is Status.NOT_READY or worker.breaker.state is not BreakerState.CLOSED, out
    bad.behave()
    await product.fleet(lambda workers: all(other.sought for other in workers))


async def test_an_engine_that_hangs_is_out_until_it_goes_on(product: Product) -> None:
    bad = product.decodes[0]
    worker = product.worker(bad)
    bad.fail(Fault(hang=Point.BEFORE_HEAD))
    bad.fail(Rule(Fault(hang=Point.BEFORE_HEAD), path="/health_generate", inference_only=False))
    legs = [asyncio.create_task(product.post(PATH, BODY)) for _ in range(2)]
    await product.fleet(lambda _: worker.status is Status.NOT_READY)
    assert product.service.registry.trouble(worker).startswith("wedged: ")
    assert (await product.post(PATH, BODY)).header("x-pd-decode") == product.decodes[1].url
    bad.behave()
    await product.fleet(lambda _: worker.status is Status.READY)
    for leg in legs:
        leg.cancel()
    await asyncio.gather(*legs, return_exceptions=True)


async def test_a_long_prompt_is_no_wedge(product: Product) -> None:
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.BEFORE_HEAD, until=go_on))
    worker = product.worker(product.decodes[0])
    answers = [asyncio.create_task(product.post(PATH, BODY)) for _ in range(2)]
    await soon(lambda: _asked(product.decodes[0]) >= 2, "nobody asked")
    assert worker.status is Status.READY
    go_on.set()
    assert [(await answer).status for answer in answers] == [200, 200]


def _asked(mock: SglangMock) -> int:
    """How often it was asked for a sign of life."""
    return sum(record.path == "/health_generate" for record in mock.requests)
