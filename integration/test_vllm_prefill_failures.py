"""A vLLM prefill leg that fails costs the client nothing but time as long as there is another pair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from http_client import Client, Reply
from product import PROMPT
from vllm_product import HANDING, WAYS, Together, VllmProduct, of_all, once, params
from vllm_requests import FEW, KIND, KINDS, LOOSE, answer_of, each_with, parts_of

from extproc.mock import Fault, Outcome, Point
from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

REJECTED = '{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
ABORTED = '{"id":"x","choices":[{"index":0,"finish_reason":"abort","text":""}],"kv_transfer_params":null}'
TRANSIENT: dict[str, Fault] = {
    "408": Fault(status=408),
    "429": Fault(status=429, body=REJECTED),
    "500": Fault(status=500),
    "503": Fault(status=503, headers=(("retry-after", "0"),)),
    "a redirect": Fault(status=307, headers=(("location", "http://10.0.0.1/"),)),
    "reset before its head": Fault(status=200, drop=Point.BEFORE_HEAD),
    "reset after its head": Fault(status=200, drop=Point.AFTER_HEAD),
    "reset in its body": Fault(status=200, drop=Point.MID_BODY),
    "closed in its body": Fault(status=200, truncate=True),
    "aborted": Fault(status=200, body=ABORTED),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HANDING)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param], prefills=2, decodes=2) as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated() -> AsyncIterator[Client]:
    async with VllmMock("aggregated", model="tiny", prompt_tokens_details=False, prefix_caching=False) as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


async def see_second(product: VllmProduct, aggregated: Client, kind: str, answer: Reply) -> None:
    """See that the second pair gave the right answer, and that nothing is left of the first."""
    expected = await aggregated.post(*KINDS[kind])
    assert (answer.status, answer.code) == (200, None), answer.body
    assert answer_of(answer, LOOSE) == answer_of(expected, LOOSE)
    assert answer.header("content-type") == expected.header("content-type")
    assert (answer.header("x-pd-attempts"), answer.header("x-pd-kv")) == ("2", "handed")
    await product.settled()
    (record,) = product.records.all
    assert (record.attempts, record.status, record.code, record.kv) == (2, 200, "", "handed")
    first, second = sorted(product.prefills, key=lambda mock: mock.url == answer.header("x-pd-prefill"))
    assert of_all([first])
    served = next(mock for mock in product.decodes if mock.url == answer.header("x-pd-decode"))
    right = [leg for leg in of_all([served]) if leg.outcome is Outcome.COMPLETED and leg.status == 200]
    assert len(of_all([second])) == parts_of(kind)
    assert [leg.kv for leg in right] == ["transferred"] * parts_of(kind)


@each_with("failure", TRANSIENT, main="503")
async def test_another_pair_answers(product: VllmProduct, aggregated: Client, kind, failure):
    once(product.prefills, replace(TRANSIENT[failure], until=Together(product.prefills, parts_of(kind))))
    once(product.prefills, product.outlasting, times=parts_of(kind) - 1)
    answer = await product.post(*KINDS[kind])
    await see_second(product, aggregated, kind, answer)
    first, second = (of_all([mock]) for mock in product.prefills)
    assert {leg.header("x-request-id") for leg in first} & {leg.header("x-request-id") for leg in second}
    if product.way.handoff == "mooncake":
        assert not {params(leg)["transfer_id"] for leg in first} & {params(leg)["transfer_id"] for leg in second}


@KIND
async def test_another_pair_answers_where_the_first_refuses(product: VllmProduct, aggregated: Client, kind):
    refusing, serving = product.prefills
    await refusing.refuse()
    tried = set()
    for _ in range(2):  # one of the two at least is for the one that refuses: both are, if the fleet changes meanwhile
        answer = await product.post(*KINDS[kind])
        assert (answer.status, answer.header("x-pd-prefill")) == (200, serving.url)
        assert answer_of(answer, LOOSE) == answer_of(await aggregated.post(*KINDS[kind]), LOOSE)
        tried.add(answer.header("x-pd-attempts"))
    assert "2" in tried <= {None, "2"}


@KIND
async def test_another_pair_answers_when_the_first_dies(product: VllmProduct, aggregated: Client, kind):
    """It was at work, and so was the decode with Mooncake."""
    await product.acquaint()
    once(product.prefills, Fault(delay_first_token=60), times=parts_of(kind))
    exchange = await product.client.open(*KINDS[kind])
    dying = await product.busy(product.prefills)
    await dying.received(parts_of(kind))
    dying.crash()
    answer = await exchange.whole()
    await see_second(product, aggregated, kind, answer)


# -- what is not tried again ------------------------------------------------------------------------------------------

REJECTIONS: dict[str, Fault] = {
    "400": Fault(status=400, body=REJECTED),
    "401": Fault(status=401, body="no", headers=(("content-type", "text/plain"),)),
    "404": Fault(status=404, body=REJECTED),
    "422": Fault(status=422, body=REJECTED, headers=(("retry-after", "7"),)),
}


@each_with("rejection", REJECTIONS, main="400")
async def test_a_rejection_is_the_clients(product: VllmProduct, kind, rejection):
    fault = REJECTIONS[rejection]
    once(product.prefills, fault, times=3)
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.code) == (fault.status, "prefill_rejected")
    assert answer.body.decode() == fault.body
    assert answer.header("content-type") == dict(fault.headers).get("content-type", "application/json")
    assert answer.header("retry-after") == dict(fault.headers).get("retry-after")
    assert answer.header("x-pd-attempts") is None
    assert answer.seconds < PROMPT
    await product.settled()
    for leg in of_all(product.decodes):
        assert leg.ended is not None
        assert leg.ended - answer.started < PROMPT
    assert len({leg.header("x-request-id") for leg in of_all(product.prefills)}) <= 3


@pytest.mark.parametrize("kind", ["chat", "chat stream", "list"])
async def test_a_rejection_by_the_engine_itself(product: VllmProduct, aggregated: Client, kind):
    path, body = KINDS[kind]
    body = {**body, "temperature": 3}
    answer, expected = await product.post(path, body), await aggregated.post(path, body)
    assert (answer.status, answer.body) == (expected.status, expected.body) == (400, expected.body)


@FEW
async def test_all_prefills_fail(product: VllmProduct, kind):
    for mock in product.prefills:
        mock.fail(Fault(status=503, headers=(("retry-after", "0"),)))
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.code) == (503, "prefill_failed")
    assert (answer.header("x-pd-attempts"), answer.header("retry-after")) == ("2", "0")
    for mock in product.prefills:
        mock.behave()  # a decode that waits with Mooncake is freed as soon as its prefill takes anything again
    await product.settled()
    (record,) = product.records.all
    assert (record.status, record.code, record.attempts) == (503, "prefill_failed", 2)


@FEW
async def test_a_wait_that_a_worker_asks_for_is_waited(product: VllmProduct, aggregated: Client, kind):
    together = Together(product.prefills, parts_of(kind))
    once(product.prefills, Fault(status=429, headers=(("retry-after", "1"),), until=together))
    once(product.prefills, product.outlasting, times=parts_of(kind) - 1)
    answer = await product.post(*KINDS[kind])
    assert answer.seconds >= 1
    await see_second(product, aggregated, kind, answer)


@pytest.mark.parametrize("kind", ["chat", "chat stream", "list"])
async def test_a_wait_that_is_too_long_is_the_clients(product: VllmProduct, kind):
    long = Fault(status=429, body=REJECTED, headers=(("retry-after", "31"),))
    once(product.prefills, replace(long, until=Together(product.prefills, parts_of(kind))))
    once(product.prefills, product.outlasting, times=parts_of(kind) - 1)
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.code, answer.header("retry-after")) == (429, "prefill_rejected", "31")
    assert answer.body.decode() == REJECTED
    assert answer.seconds < PROMPT
