"""Workers that come, go, die and return while requests flow. Each test registers its own, under a model of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Reply
from product import PROMPT, Product, soon

from extproc.mock import Fault, Point, SglangMock
from extproc.workers.worker import Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
# Health checks as they are by default, but often.
WATCHFUL = {
    "health_check_interval_secs": 0.1,
    "health_check_timeout_secs": 5,  # which no worker is to need that is well, however busy the machine is
    "health_failure_threshold": 2,
    "health_success_threshold": 2,
    "shutdown_grace_period_secs": 30,
}


def chat(model: str, **fields: object) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(prefills=0, decodes=0, **WATCHFUL) as product:
        yield product


class Fleet:
    """The workers of one test, and requests for them."""

    def __init__(self, product: Product, model: str, prefills: int, decodes: int, host: str) -> None:
        self.product = product
        self.model = model
        self.prefills = [SglangMock("prefill", host=host, model=model) for _ in range(prefills)]
        self.decodes = [SglangMock("decode", host=host, model=model) for _ in range(decodes)]
        self.mocks = [*self.prefills, *self.decodes]

    async def post(self, **fields: object) -> Reply:
        """Ask for a chat completion."""
        return await self.product.post(PATH, chat(self.model, **fields))

    async def ready(self) -> None:
        """Wait until all can be used."""
        urls = {mock.url for mock in self.mocks}
        await self.product.fleet(lambda workers: urls <= {str(worker.url) for worker in workers if worker.usable})

    async def remove(self, mock: SglangMock) -> None:
        """Remove one and wait until it is gone."""
        self.mocks.remove(mock)
        await self.product.remove(mock)


@contextlib.asynccontextmanager
async def fleet(
    product: Product, model: str, prefills: int = 1, decodes: int = 1, host: str = "127.0.0.1", **fields: object
) -> AsyncIterator[Fleet]:
    """Workers that are started, registered with ``fields``, and gone at the end."""
    made = Fleet(product, model, prefills, decodes, host)
    for mock in made.mocks:
        await mock.start()
        await product.add(mock, **fields)
    await made.ready()
    started = list(made.mocks)
    try:
        yield made
    finally:
        for mock in list(made.mocks):
            await made.remove(mock)
        for mock in started:
            await mock.stop()


# -- coming and going -------------------------------------------------------------------------------------------------


async def test_a_gateway_without_workers_says_so_until_there_are_some(product: Product):
    body = chat("tiny")
    answer = await product.post(PATH, body)
    assert (answer.status, answer.code, answer.header("retry-after")) == (503, "no_available_workers", "1")
    readiness = await product.client.get("/readiness")
    assert (readiness.status, readiness.json["status"]) == (503, "not ready")
    assert "prefill" in readiness.json["reason"]
    assert "decode" in readiness.json["reason"]
    assert (await product.client.get("/liveness")).status == 200
    assert (await product.client.get("/v1/models")).status == 503

    async with SglangMock("prefill") as prefill, SglangMock("decode") as decode:
        await product.add(prefill)
        await product.ready()
        answer = await product.post(PATH, body)
        assert (answer.status, answer.code) == (503, "no_available_workers")
        assert "decode" in answer.json["error"]["message"]
        assert (await product.client.get("/readiness")).status == 503

        worker_id = await product.add(decode)
        await product.ready()
        assert (await product.post(PATH, body)).status == 200
        assert (await product.client.get("/readiness")).status == 200
        models = (await product.client.get("/v1/models")).json
        assert [model["id"] for model in models["data"]] == ["tiny"]
        shown = (await product.client.get(f"/workers/{worker_id}")).json
        assert (shown["url"], shown["worker_type"], shown["is_healthy"]) == (decode.url, "decode", True)

        await product.remove(decode)
        assert (await product.client.get(f"/workers/{worker_id}")).status == 404
        assert (await product.post(PATH, body)).code == "no_available_workers"
        await product.remove(prefill)


async def test_no_request_is_lost_while_the_whole_fleet_is_exchanged(product: Product):
    async with fleet(product, "exchanged") as old, _flowing(old) as answers:
        await _more(answers, 50)
        async with fleet(product, "exchanged") as new:
            await _more(answers, 50)
            assert new.prefills[0].legs
            assert new.decodes[0].legs
            for mock in list(old.mocks):
                await old.remove(mock)
            gone = [*old.prefills, *old.decodes]
            seen = sum(len(mock.legs) for mock in gone)
            await _more(answers, 50)
            assert sum(len(mock.legs) for mock in gone) == seen
            for mock in gone:
                old.mocks.append(mock)
                await product.add(mock)
            await old.ready()
            await _more(answers, 20)
    assert {answer.status for answer in answers} == {200}
    assert all(answer.events[-1] == "[DONE]" for answer in answers if answer.body.startswith(b"data:"))


async def test_a_removed_worker_finishes_what_it_has(product: Product):
    async with fleet(product, "finishing", decodes=2) as workers:
        go_on = asyncio.Event()
        for mock in workers.decodes:
            mock.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=30))
        exchange = await product.client.open(PATH, chat("finishing", stream=True))
        await exchange.piece()
        (busy,) = [mock for mock in workers.decodes if mock.legs]
        for mock in workers.decodes:
            mock.behave()
        worker = product.worker(busy)
        assert (await product.client.delete(f"/workers/{worker.id}")).status == 202
        workers.mocks.remove(busy)
        shown = (await product.client.get(f"/workers/{worker.id}")).json
        assert (shown["status"], shown["is_healthy"]) == ("draining", False)
        for _ in range(4):
            await workers.post()
        assert len(busy.legs) == 1
        go_on.set()
        assert (await exchange.whole()).events[-1] == "[DONE]"
        await product.fleet(lambda listed: worker not in listed)


async def test_a_worker_registered_again_serves_while_its_former_requests_end(product: Product):
    async with fleet(product, "again") as workers:
        (mock,) = workers.decodes
        go_on = asyncio.Event()
        mock.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=30), times=1)
        exchange = await product.client.open(PATH, chat("again", stream=True))
        await exchange.piece()
        former = product.worker(mock)
        assert (await product.client.delete(f"/workers/{former.id}")).status == 202
        worker_id = await product.add(mock)
        await product.fleet(lambda listed: any(worker.id == worker_id and worker.usable for worker in listed))
        assert former.load == 1
        assert (await workers.post()).header("x-pd-decode") == mock.url
        go_on.set()
        assert (await exchange.whole()).events[-1] == "[DONE]"
        await product.fleet(lambda listed: former not in listed)


async def test_a_worker_that_is_down_at_start_joins_later():
    async with SglangMock("prefill") as prefill, SglangMock("decode") as late:
        await late.refuse()
        given = {"prefill": [f"{prefill.url} {prefill.bootstrap_port}"], "decode": [late.url]}
        async with Product(prefills=0, decodes=0, wait=False, **given, **WATCHFUL) as product:
            assert (await product.client.get("/readiness")).status == 503
            answer = await product.post(PATH, chat("tiny"))
            assert (answer.status, answer.code) == (503, "no_available_workers")
            await late.accept()
            await product.ready()
            assert (await product.post(PATH, chat("tiny"))).header("x-pd-decode") == late.url


# -- health -----------------------------------------------------------------------------------------------------------


async def test_a_dead_worker_leaves_the_rotation_and_returns(product: Product):
    async with fleet(product, "returning", decodes=2) as workers:
        dead, alive = workers.decodes
        await dead.refuse()
        await product.fleet(lambda _: product.worker(dead).status is not Status.READY)
        shown = (await product.client.get(f"/workers/{product.worker(dead).id}")).json
        assert shown["is_healthy"] is False
        assert "refused" in shown["status_reason"].lower()
        for _ in range(4):
            assert (await workers.post()).header("x-pd-decode") == alive.url
        assert (await product.client.get("/readiness")).status == 200
        await dead.accept()
        await workers.ready()
        for _ in range(2):
            await workers.post()
        assert dead.legs


async def test_the_last_worker_of_a_role_dies(product: Product):
    async with fleet(product, "last") as workers:
        (prefill,) = workers.prefills
        await prefill.refuse()
        await product.fleet(lambda _: not product.worker(prefill).usable)
        answer = await workers.post()
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "no_available_workers", "1")
        readiness = await product.client.get("/readiness")
        assert readiness.status == 503
        assert "prefill" in readiness.json["reason"]
        assert not workers.decodes[0].legs


async def test_one_bad_probe_takes_nobody_out(product: Product):
    async with fleet(product, "steady") as workers:
        (decode,) = workers.decodes
        decode.clear()
        decode.fail(Fault(status=500), path="/health", times=1)
        decode.faults.rules[0].inference_only = False
        await decode.received(3, "/health")
        assert decode.faults.rules[0].times == 0
        assert product.worker(decode).usable


async def test_a_failed_connection_is_looked_into_at_once(product: Product):
    """Not at the next interval, which is a minute away."""
    async with fleet(product, "watched", decodes=2, health={"check_interval_secs": 60}) as workers:
        dead, alive = workers.decodes
        await dead.refuse()
        began = time.monotonic()
        while product.worker(dead).usable:
            assert (await workers.post()).header("x-pd-decode") == alive.url
            assert time.monotonic() - began < 50
            await asyncio.sleep(0.05)


async def test_a_worker_that_is_registered_with_the_wrong_role_is_not_used(product: Product):
    async with fleet(product, "roles") as workers, SglangMock("prefill", model="roles") as wrong:
        await product.add(wrong, worker_type="decode")
        await product.fleet(lambda _: product.worker(wrong).status is Status.FAILED)
        for _ in range(3):
            assert (await workers.post()).header("x-pd-decode") == workers.decodes[0].url
        assert not wrong.legs
        shown = (await product.client.get(f"/workers/{product.worker(wrong).id}")).json
        assert "disaggregation_mode is prefill" in shown["status_reason"]
        await product.remove(wrong)


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_prefill_that_dies_at_work(product: Product, n, stream):
    async with fleet(product, "dying") as workers:
        (prefill,), (decode,) = workers.prefills, workers.decodes
        prefill.fail(Fault(delay_first_token=60))
        exchange = await product.client.open(PATH, chat("dying", n=n, stream=stream))
        await prefill.received(n)
        died = time.time()
        prefill.crash()
        answer = await exchange.whole()
        assert (answer.status, answer.code) == (502, "prefill_connection_lost")
        assert answer.ended - died < PROMPT  # the decode would notice after seconds
        await decode.idle()
        assert max(leg.ended for leg in decode.legs) - died < PROMPT


@pytest.mark.parametrize("n", [1, 2])
async def test_a_decode_that_dies_in_its_answer(product: Product, http2: Http2Client, n):
    async with fleet(product, "dying") as workers:
        (decode,) = workers.decodes
        decode.fail(Fault(delay_token=0.02, tokens=500))
        stream = http2.post(PATH, chat("dying", n=n, stream=True))
        await stream.until(b"data: ")
        decode.crash()
        if n == 1:
            assert b"[DONE]" not in await stream.cut()
        else:
            assert '"decode_connection_lost"' in (await stream.whole()).events[-2]


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
async def test_workers_with_ipv6_addresses(product: Product):
    async with fleet(product, "v6", host="::1") as workers:
        (decode,) = workers.decodes
        for n in (1, 2):
            answer = await workers.post(n=n)
            assert answer.status == 200
            assert answer.header("x-pd-decode") == decode.url == f"http://[::1]:{decode.port}"
        assert {leg.json["bootstrap_host"] for leg in decode.legs} == {"[::1]"}
        assert {leg.header("host") for leg in decode.legs} == {f"[::1]:{decode.port}"}


async def test_workers_with_host_names(product: Product):
    async with SglangMock("prefill", model="named") as prefill, SglangMock("decode", model="named") as decode:
        ids = [
            await product.add(prefill, url=f"http://localhost:{prefill.port}"),
            await product.add(decode, url=f"http://LocalHost:{decode.port}/"),
        ]
        await product.ready()
        for n in (1, 2):
            answer = await product.post(PATH, chat("named", n=n))
            assert answer.status == 200
            assert answer.header("x-pd-prefill") == f"http://localhost:{prefill.port}"
            assert answer.header("x-pd-decode") == f"http://localhost:{decode.port}"
        assert {leg.json["bootstrap_host"] for leg in decode.legs} == {"localhost"}
        assert {leg.header("host") for leg in decode.legs} == {f"localhost:{decode.port}"}
        for worker_id in ids:
            await product.client.delete(f"/workers/{worker_id}")
        await product.fleet(lambda listed: not listed)


# -- models and policies ----------------------------------------------------------------------------------------------


async def test_each_model_has_its_own_workers(product: Product):
    async with fleet(product, "small") as small, fleet(product, "large") as large:
        for workers in (small, large):
            answer = await workers.post()
            assert answer.status == 200
            assert answer.header("x-pd-prefill") == workers.prefills[0].url
            assert answer.header("x-pd-decode") == workers.decodes[0].url
        models = (await product.client.get("/v1/models")).json
        assert {model["id"] for model in models["data"]} == {"small", "large"}
        for _ in range(4):  # of any model, but both legs of the same
            assert (await product.post(PATH, {"messages": chat("")["messages"]})).status == 200
        await large.remove(large.decodes[0])
        answer = await large.post()
        assert (answer.status, answer.code) == (503, "no_available_workers")
        answer = await product.post(PATH, chat("huge"))
        assert (answer.status, answer.code) == (404, "model_not_found")


async def test_round_robin_for_each_role(product: Product):
    async with fleet(product, "round", prefills=3, decodes=2) as workers:
        pairs = []
        for _ in range(6):
            answer = await workers.post()
            pairs.append((answer.header("x-pd-prefill"), answer.header("x-pd-decode")))
        assert len(set(pairs)) == 6
        assert [len(mock.legs) for mock in workers.prefills] == [2, 2, 2]
        assert [len(mock.legs) for mock in workers.decodes] == [3, 3]


# -- inside -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _flowing(workers: Fleet, clients: int = 8) -> AsyncIterator[list[Reply]]:
    """Clients of all kinds that ask again and again until the end; their answers."""
    answers: list[Reply] = []
    stopping = False

    async def ask(number: int) -> None:
        while not stopping:
            answers.append(await workers.post(stream=number % 2 == 0, n=2 if number % 4 == 3 else 1))

    tasks = [asyncio.create_task(ask(number)) for number in range(clients)]
    try:
        yield answers
    finally:
        stopping = True
        await asyncio.gather(*tasks)


async def _more(answers: list[Reply], count: int) -> None:
    target = len(answers) + count
    await soon(lambda: len(answers) >= target, "traffic has come to a halt")
