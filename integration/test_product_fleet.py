"""Workers that come, go, die and return while requests flow; each test has a product of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_client import Reply
from product import PROMPT, Product, soon

from extproc.mock import Fault, SglangMock
from extproc.workers.worker import Status

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}
# Health checks as they are by default, but often.
WATCHFUL = {
    "health_check_interval_secs": 0.1,
    "health_check_timeout_secs": 0.5,
    "health_failure_threshold": 2,
    "health_success_threshold": 2,
}


class Traffic:
    """Clients that ask again and again until told to stop."""

    def __init__(self, product: Product, clients: int = 8) -> None:
        self.answers: list[Reply] = []
        self._product = product
        self._clients = clients
        self._stopping = False

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[Traffic]:
        tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        try:
            yield self
        finally:
            self._stopping = True
            await asyncio.gather(*tasks)

    async def more(self, count: int) -> None:
        """Wait for so many more answers."""
        target = len(self.answers) + count
        await soon(lambda: len(self.answers) >= target, "traffic has come to a halt")

    async def _client(self, number: int) -> None:
        while not self._stopping:
            body = {**CHAT, "stream": number % 2 == 0, "n": 2 if number % 4 == 3 else 1}
            self.answers.append(await self._product.post(PATH, body))


async def test_a_gateway_without_workers_says_so_until_there_are_some():
    async with (
        Product(prefills=0, decodes=0) as product,
        SglangMock("prefill") as prefill,
        SglangMock("decode") as decode,
    ):
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "no_available_workers", "1")
        readiness = await product.client.get("/readiness")
        assert (readiness.status, readiness.json["status"]) == (503, "not ready")
        assert "prefill" in readiness.json["reason"]
        assert "decode" in readiness.json["reason"]
        assert (await product.client.get("/liveness")).status == 200
        assert (await product.client.get("/v1/models")).status == 503

        await product.add(prefill)
        await product.ready()
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code) == (503, "no_available_workers")
        assert "decode" in answer.json["error"]["message"]
        assert (await product.client.get("/readiness")).status == 503

        worker_id = await product.add(decode)
        await product.ready()
        assert (await product.post(PATH, CHAT)).status == 200
        assert (await product.client.get("/readiness")).status == 200
        models = (await product.client.get("/v1/models")).json
        assert [model["id"] for model in models["data"]] == ["tiny"]
        shown = (await product.client.get(f"/workers/{worker_id}")).json
        assert (shown["url"], shown["worker_type"], shown["is_healthy"]) == (decode.url, "decode", True)

        await product.remove(decode)
        assert (await product.client.get(f"/workers/{worker_id}")).status == 404
        assert (await product.post(PATH, CHAT)).code == "no_available_workers"


async def test_no_request_is_lost_while_the_whole_fleet_is_exchanged():
    async with (
        Product(decodes=1) as product,
        SglangMock("prefill") as new_prefill,
        SglangMock("decode") as new_decode,
        Traffic(product).flowing() as traffic,
    ):
        old_prefill, old_decode = product.prefill, product.decode
        await traffic.more(50)
        await product.add(new_decode)
        await product.ready()
        await traffic.more(50)
        assert new_decode.legs
        await product.remove(old_decode)
        await product.add(new_prefill)
        await product.ready()
        await product.remove(old_prefill)
        seen = len(old_prefill.legs) + len(old_decode.legs)
        await traffic.more(50)
        assert len(old_prefill.legs) + len(old_decode.legs) == seen
    assert {answer.status for answer in traffic.answers} == {200}
    assert all(answer.events[-1] == "[DONE]" for answer in traffic.answers if answer.body.startswith(b"data:"))


async def test_a_removed_worker_finishes_what_it_has():
    async with Product(decodes=2, shutdown_grace_period_secs=30) as product:
        for mock in product.decodes:
            mock.fail(Fault(delay_token=0.02, tokens=30))
        exchange = await product.client.open(PATH, STREAM)
        await exchange.piece()
        (busy,) = [mock for mock in product.decodes if mock.legs]
        worker = product.worker(busy)
        assert (await product.client.delete(f"/workers/{worker.id}")).status == 202
        shown = (await product.client.get(f"/workers/{worker.id}")).json
        assert (shown["status"], shown["is_healthy"]) == ("draining", False)
        for _ in range(4):
            await product.post(PATH, CHAT)
        assert len(busy.legs) == 1
        assert (await exchange.whole()).events[-1] == "[DONE]"
        await product.fleet(lambda workers: worker not in workers)


async def test_a_worker_that_is_down_at_start_joins_later():
    async with SglangMock("decode") as late:
        await late.refuse()
        async with Product(decodes=0, decode=[late.url], wait=False, **WATCHFUL) as product:
            assert (await product.client.get("/readiness")).status == 503
            answer = await product.post(PATH, CHAT)
            assert (answer.status, answer.code) == (503, "no_available_workers")
            await late.accept()
            await product.ready()
            assert (await product.post(PATH, CHAT)).header("x-pd-decode") == late.url


async def test_a_dead_worker_leaves_the_rotation_and_returns():
    async with Product(decodes=2, **WATCHFUL) as product:
        dead, alive = product.decodes
        await dead.refuse()
        await product.fleet(lambda _: product.worker(dead).status is not Status.READY)
        shown = (await product.client.get(f"/workers/{product.worker(dead).id}")).json
        assert shown["is_healthy"] is False
        assert "refused" in shown["status_reason"].lower()
        for _ in range(4):
            assert (await product.post(PATH, CHAT)).header("x-pd-decode") == alive.url
        assert (await product.client.get("/readiness")).status == 200
        await dead.accept()
        await product.ready()
        for _ in range(2):
            await product.post(PATH, CHAT)
        assert dead.legs


async def test_the_last_worker_of_a_role_dies():
    async with Product(decodes=1, **WATCHFUL) as product:
        await product.prefill.refuse()
        await product.fleet(lambda _: not product.worker(product.prefill).usable)
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "no_available_workers", "1")
        readiness = await product.client.get("/readiness")
        assert readiness.status == 503
        assert "prefill" in readiness.json["reason"]
        assert not product.decode.legs


async def test_one_bad_probe_takes_nobody_out():
    async with Product(decodes=1, **WATCHFUL) as product:
        product.decode.clear()
        product.decode.fail(Fault(status=500), path="/health", times=1)
        product.decode.faults.rules[0].inference_only = False
        await product.decode.received(3, "/health")
        assert product.decode.faults.rules[0].times == 0
        assert product.worker(product.decode).usable


async def test_a_failed_connection_is_looked_into_at_once():
    """Not at the next interval, which is a minute away."""
    async with Product(decodes=2, health_failure_threshold=2) as product:
        dead, alive = product.decodes
        await dead.refuse()
        began = time.monotonic()
        while product.worker(dead).usable:
            assert (await product.post(PATH, CHAT)).header("x-pd-decode") == alive.url
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.05)


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [CHAT, STREAM, {**CHAT, "n": 2}, {**STREAM, "n": 2}])
async def test_a_prefill_that_dies_at_work(body):
    async with Product(decodes=1) as product:
        product.prefill.fail(Fault(delay_first_token=60))
        exchange = await product.client.open(PATH, body)
        await product.prefill.received(body.get("n", 1))
        died = time.time()
        product.prefill.crash()
        answer = await exchange.whole()
        assert (answer.status, answer.code) == (502, "prefill_connection_lost")
        assert answer.ended - died < PROMPT  # the decode would notice after seconds
        await product.decode.idle()
        assert max(leg.ended for leg in product.decode.legs) - died < PROMPT


@pytest.mark.parametrize("n", [1, 2])
async def test_a_decode_that_dies_in_its_answer(n):
    async with Product(decodes=1) as product:
        product.decode.fail(Fault(delay_token=0.02, tokens=500))
        exchange = await product.client.open(PATH, {**STREAM, "n": n})
        await exchange.until(b"data: ")
        product.decode.crash()
        if n == 1:
            assert b"[DONE]" not in await exchange.cut()
        else:
            assert '"decode_connection_lost"' in (await exchange.whole()).events[-2]
        await soon(lambda: product.gateway.alive == 0, "the request goes on")
        assert product.load == {}


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
async def test_workers_with_ipv6_addresses():
    async with (
        Product(prefills=0, decodes=0) as product,
        SglangMock("prefill", host="::1") as prefill,
        SglangMock("decode", host="::1") as decode,
    ):
        await product.add(prefill)
        await product.add(decode)
        await product.ready()
        for n in (1, 2):
            answer = await product.post(PATH, {**CHAT, "n": n})
            assert answer.status == 200
            assert answer.header("x-pd-decode") == decode.url == f"http://[::1]:{decode.port}"
        assert {leg.json["bootstrap_host"] for leg in decode.legs} == {"[::1]"}
        assert {leg.header("host") for leg in decode.legs} == {f"[::1]:{decode.port}"}


async def test_workers_with_host_names():
    async with (
        Product(prefills=0, decodes=0) as product,
        SglangMock("prefill") as prefill,
        SglangMock("decode") as decode,
    ):
        await product.add(prefill, url=f"http://localhost:{prefill.port}")
        await product.add(decode, url=f"http://LocalHost:{decode.port}/")
        await product.ready()
        for n in (1, 2):
            answer = await product.post(PATH, {**CHAT, "n": n})
            assert answer.status == 200
            assert answer.header("x-pd-prefill") == f"http://localhost:{prefill.port}"
            assert answer.header("x-pd-decode") == f"http://localhost:{decode.port}"
        assert {leg.json["bootstrap_host"] for leg in decode.legs} == {"localhost"}
        assert {leg.header("host") for leg in decode.legs} == {f"localhost:{decode.port}"}


# -- models and policies ----------------------------------------------------------------------------------------------


async def test_each_model_has_its_own_workers():
    async with (
        Product(decodes=1) as product,
        SglangMock("prefill", model="large") as prefill,
        SglangMock("decode", model="large") as decode,
    ):
        await product.add(prefill)
        await product.add(decode)
        await product.ready()
        for model, legs in (("tiny", (product.prefill, product.decode)), ("large", (prefill, decode))):
            answer = await product.post(PATH, {**CHAT, "model": model})
            assert answer.status == 200
            assert (answer.header("x-pd-prefill"), answer.header("x-pd-decode")) == tuple(mock.url for mock in legs)
        models = (await product.client.get("/v1/models")).json
        assert {model["id"] for model in models["data"]} == {"tiny", "large"}
        await product.remove(decode)
        answer = await product.post(PATH, {**CHAT, "model": "large"})
        assert (answer.status, answer.code) == (503, "no_available_workers")
        answer = await product.post(PATH, {**CHAT, "model": "huge"})
        assert (answer.status, answer.code) == (404, "model_not_found")


async def test_round_robin_for_each_role():
    async with Product(prefills=3, decodes=2) as product:
        pairs = []
        for _ in range(6):
            answer = await product.post(PATH, CHAT)
            pairs.append((answer.header("x-pd-prefill"), answer.header("x-pd-decode")))
        assert len(set(pairs)) == 6
        assert [len(mock.legs) for mock in product.prefills] == [2, 2, 2]
        assert [len(mock.legs) for mock in product.decodes] == [3, 3]


async def test_a_pair_that_is_registered_with_the_wrong_roles_is_not_used():
    async with Product(prefills=1, decodes=1) as product, SglangMock("prefill") as wrong:
        await product.add(wrong, worker_type="decode")
        await product.fleet(lambda workers: any(worker.status is Status.FAILED for worker in workers))
        for _ in range(3):
            assert (await product.post(PATH, CHAT)).header("x-pd-decode") == product.decode.url
        assert not wrong.legs
        listed = (await product.client.get("/workers")).json["workers"]
        (shown,) = [entry for entry in listed if entry["url"] == wrong.url]
        assert "disaggregation_mode is prefill" in shown["status_reason"]
