"""vLLM's decode workers get a chat's token ids from the prefill, where they take them: they need not tokenise again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from http_client import Client
from vllm_product import WAYS, VllmProduct, params
from vllm_requests import CHAT, ONE, STREAMS, VARIANTS, cases, names, same, streamed

from extproc.mock import Record
from extproc.mock.vllm.engine import Sequence
from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
OPTIONS: dict[str, Any] = {"model": "tiny", "prompt_tokens_details": False, "prefix_caching": False}
CHATS = {name: question for name, question in (ONE | VARIANTS).items() if question[0] == PATH}
OTHERS = {name: question for name, question in ONE.items() if question[0] != PATH}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[VllmProduct]:
    async with VllmProduct() as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated() -> AsyncIterator[Client]:
    async with VllmMock("aggregated", **OPTIONS) as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


@pytest.fixture
def returned(product: VllmProduct, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ``kv_transfer_params`` that the prefill's answers bear."""
    connector = product.prefill.engine.connector
    assert connector is not None
    finished, seen = connector.finished, list[Any]()

    def noting(sequence: Sequence) -> Any:
        seen.append(finished(sequence))
        return seen[-1]

    monkeypatch.setattr(connector, "finished", noting)
    return seen


def see_tokenised_twice(prefill: Record, decode: Record) -> None:
    """See that nobody was asked for token ids, and that none were told."""
    assert "return_token_ids" not in prefill.json
    assert "prompt_token_ids" not in params(decode)
    assert not decode.ids_reused
    assert decode.kv == "transferred"


# -- where they are taken ---------------------------------------------------------------------------------------------


@cases(CHATS)
async def test_a_chats_token_ids_go_along(product: VllmProduct, aggregated: Client, question, stream):
    answer = await same(product, aggregated, question, stream=stream)
    assert names(answer)[:2] == ("nixl", "handed")
    prefill, decode = product.legs
    assert prefill.json["return_token_ids"] is True
    assert "return_token_ids" not in decode.json
    told = (await aggregated.post(PATH, {**question[1], "return_token_ids": True})).json["prompt_token_ids"]
    assert params(decode)["prompt_token_ids"] == told
    assert decode.ids_reused
    assert not prefill.ids_reused


@STREAMS
async def test_all_else_that_the_prefill_returned_goes_along_as_it_is(
    product: VllmProduct, returned: list[Any], stream
):
    path, body = streamed((PATH, CHAT)) if stream else (PATH, CHAT)
    assert (await product.post(path, body)).status == 200
    (given,) = returned
    got = params(product.decode.legs[0])
    assert list(got) == [*given, "prompt_token_ids"]
    assert orjson.dumps(given)[:-1] + b',"prompt_token_ids":[' in product.decode.legs[0].body


@STREAMS
@pytest.mark.parametrize("wish", [True, False, None])
async def test_a_client_gets_them_if_it_asks(product: VllmProduct, aggregated: Client, wish, stream):
    question = (PATH, {**CHAT, "return_token_ids": wish})
    answer = await same(product, aggregated, question, stream=stream)
    prefill, decode = product.legs
    assert decode.ids_reused
    assert prefill.json["return_token_ids"] is True
    assert decode.json["return_token_ids"] is wish
    ids = b'"prompt_token_ids":%b' % orjson.dumps(params(decode)["prompt_token_ids"])
    assert (ids in answer.body) == bool(wish)


# -- where they are not ------------------------------------------------------------------------------------------------


@cases(OTHERS)
async def test_only_a_chats(product: VllmProduct, aggregated: Client, question, stream):
    await same(product, aggregated, question, stream=stream)
    see_tokenised_twice(*product.legs)


@pytest_asyncio.fixture(params=["the first", "a second"], loop_scope="module")
async def with_an_older(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    """A product with a decode worker of an older engine, alone or beside a newer one."""
    alone = request.param == "the first"
    async with VllmProduct(options={"knows_token_ids": False} if alone else {}) as product:
        if alone:
            yield product
            return
        async with VllmMock("decode", **OPTIONS, knows_token_ids=False) as older:
            await product.add(older)
            await product.ready()
            product.decodes.append(older)
            product.mocks.append(older)
            yield product


async def test_no_candidate_may_be_older(with_an_older: VllmProduct, aggregated: Client):
    product = with_an_older
    for _ in range(4):
        await same(product, aggregated, (PATH, CHAT))
        see_tokenised_twice(*product.legs)
        await product.forget()


async def test_an_operator_may_want_none(aggregated: Client):
    async with VllmProduct(token_reuse=False) as product:
        assert _probes(product.decode) == []
        await same(product, aggregated, (PATH, CHAT))
        see_tokenised_twice(*product.legs)


async def test_both_legs_at_once(aggregated: Client):
    async with VllmProduct(way=WAYS["mooncake"]) as product:
        await same(product, aggregated, (PATH, CHAT))
        see_tokenised_twice(*product.legs)


# -- how it is known ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [True, False])
async def test_decode_workers_are_asked_when_they_register(knows):
    async with VllmProduct(options={"knows_token_ids": knows}) as product:
        (probe,) = _probes(product.decode)
        assert probe.status == (400 if knows else 200)
        assert product.decode.legs == []
        assert _probes(product.prefill) == []
        assert product.worker(product.decode).takes_token_ids is knows


def _probes(mock: VllmMock) -> list[Record]:
    return [record for record in mock.requests if record.path == PATH and not record.inference]
