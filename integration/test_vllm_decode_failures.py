"""A vLLM decode leg that fails before it answers: another worker takes the handoff, or another pair the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Client
from product import soon
from vllm_product import HANDING, WAYS, Together, VllmProduct, of_all, once, params
from vllm_requests import FEW, KIND, KINDS, LOOSE, answer_of, each_with, parts_of

from extproc.mock import Fault, Outcome, Point
from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUSY = '{"error":{"message":"busy","type":"x","param":null,"code":503}}'
TRANSIENT: dict[str, Fault] = {
    "429": Fault(status=429, body=BUSY),
    "500": Fault(status=500, body=BUSY),
    "503": Fault(status=503, body=BUSY, headers=(("retry-after", "0"),)),
    "reset before its head": Fault(drop=Point.BEFORE_HEAD),
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


def one_fails(product: VllmProduct, kind: str, fault: Fault) -> None:
    """Let a decode leg fail when its siblings have come, which have not begun to answer; each would free its cache."""
    siblings = parts_of(kind) - 1
    once(product.decodes, replace(fault, until=Together(product.decodes, parts_of(kind))))
    once(product.decodes, Fault(delay_head=60), times=siblings)


# -- before the answer ------------------------------------------------------------------------------------------------


@KIND
async def test_another_decode_takes_the_same_handoff(product: VllmProduct, aggregated: Client, kind):
    refusing, serving = product.decodes
    await refusing.refuse()
    for _ in range(2):  # one of the two is for the one that refuses
        answer = await product.post(*KINDS[kind])
        assert (answer.status, answer.header("x-pd-decode")) == (200, serving.url)
        assert answer_of(answer, LOOSE) == answer_of(await aggregated.post(*KINDS[kind]), LOOSE)
        assert (answer.header("x-pd-attempts"), answer.header("x-pd-kv")) == (None, "handed")
    assert {leg.kv for leg in of_all(product.decodes)} == {"transferred"}
    assert len(of_all(product.prefills)) == len(of_all(product.decodes))


@each_with("failure", TRANSIENT, main="503")
async def test_another_pair_answers(product: VllmProduct, aggregated: Client, kind, failure):
    one_fails(product, kind, TRANSIENT[failure])
    parts = parts_of(kind)
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.code) == (200, None), answer.body
    assert answer_of(answer, LOOSE) == answer_of(await aggregated.post(*KINDS[kind]), LOOSE)
    assert (answer.header("x-pd-attempts"), answer.header("x-pd-kv")) == ("2", "handed")
    await product.settled()
    failed, served = sorted(product.decodes, key=lambda mock: mock.url == answer.header("x-pd-decode"))
    done = [leg for leg in of_all([served]) if leg.outcome is Outcome.COMPLETED and leg.status == 200]
    assert [leg.kv for leg in done] == ["transferred"] * parts
    assert of_all([failed])
    key = "transfer_id" if product.way.handoff == "mooncake" else "remote_request_id"
    assert not {params(leg)[key] for leg in of_all([failed])} & {params(leg)[key] for leg in done}
    (record,) = product.records.all
    assert (record.status, record.code, record.attempts) == (200, "", 2)


@FEW
async def test_all_decodes_say_that_they_are_busy(product: VllmProduct, kind):
    for _ in range(2):
        one_fails(product, kind, Fault(status=503, body=BUSY, headers=(("retry-after", "0"),)))
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.body.decode()) == (503, BUSY)
    assert answer.header("x-pd-attempts") == "2"
    assert answer.header("retry-after") == "0"


@pytest.mark.parametrize("kind", ["chat", "chat stream", "messages", "list"])
async def test_a_rejection_is_the_clients(product: VllmProduct, kind):
    one_fails(product, kind, Fault(status=400, body=BUSY))
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.body.decode()) == (400, BUSY)
    assert answer.header("x-pd-attempts") is None
    await product.settled()  # the prefill keeps nothing


@pytest.mark.parametrize("kind", ["chat", "chat stream", "responses", "list"])
async def test_no_decode_accepts_connections(product: VllmProduct, kind):
    for mock in product.decodes:
        await mock.refuse()
    answer = await product.post(*KINDS[kind])
    assert (answer.status, answer.code) == (503, "decode_unreachable")
    await product.records.until(lambda: product.gateway.alive == 0)
    for mock in product.prefills:
        mock.engine.pins.clear()  # nobody can tell the prefill: its lease would end


@pytest.mark.parametrize("kind", ["chat", "messages", "list"])
async def test_a_decode_that_dies_at_work(product: VllmProduct, aggregated: Client, kind):
    once(product.decodes, Fault(delay_first_token=0, delay_token=60), times=parts_of(kind))
    exchange = await product.client.open(*KINDS[kind])
    dying = await product.busy(product.decodes)
    await dying.received(parts_of(kind))
    await soon(lambda: all(leg.kv == "transferred" for leg in dying.live), "the cache is not across")
    dying.crash()
    answer = await exchange.whole()
    await product.restart(dying)
    assert answer.status == 200, answer.body
    assert answer_of(answer, LOOSE) == answer_of(await aggregated.post(*KINDS[kind]), LOOSE)
    assert answer.header("x-pd-attempts") == "2"


# -- in the answer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("stream") and not kind.startswith("list")])
async def test_an_answer_that_has_begun_is_cut(product: VllmProduct, http2: Http2Client, kind):
    once(product.decodes, Fault(drop=Point.MID_BODY, after_chunks=2, delay_token=0.1))
    stream = http2.post(*KINDS[kind])
    assert await stream.cut()
    await product.settled()
    assert len(of_all(product.decodes)) == 1
    (record,) = product.records.all
    assert (record.status, record.attempts) == (200, 1)


async def test_a_merged_stream_that_has_begun_gets_an_error(product: VllmProduct):
    once(product.decodes, Fault(drop=Point.MID_BODY, after_chunks=2), times=3)
    answer = await product.post(*KINDS["list stream"])
    assert answer.status == 200
    *_, error, done = answer.events
    assert '"decode_connection_lost"' in error
    assert done == "[DONE]"
