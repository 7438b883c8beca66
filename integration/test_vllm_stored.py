"""Responses that a vLLM decode worker keeps: whoever asks for one, or goes on from it, is sent to that worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from http_client import Client, Reply
from vllm_product import HANDING, WAYS, VllmProduct
from vllm_requests import MODEL, OTHER, STREAMS, TEXT, lasting

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
BODY = {**MODEL, "input": TEXT}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HANDING)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param], prefills=1, decodes=2) as product:
        yield product


def id_of(answer: Reply) -> str:
    """The response's id, of an answer or a stream."""
    if answer.body.startswith(b"{"):
        return str(answer.json["id"])
    return answer.body.decode().partition('"id":"')[2].partition('"')[0]


async def made(product: VllmProduct, count: int = 4, **fields: object) -> list[Reply]:
    """So many responses, by more than one worker."""
    answers = [await product.post(PATH, {**BODY, **fields}) for _ in range(count)]
    assert {answer.status for answer in answers} == {200}
    assert {answer.header("x-pd-decode") for answer in answers} == {mock.url for mock in product.decodes}
    return answers


@STREAMS
async def test_a_response_is_found_where_it_was_made(product: VllmProduct, stream):
    for answer in await made(product, stream=stream):
        found = await product.client.get(f"{PATH}/{id_of(answer)}")
        assert found.status == 200
        assert found.json["id"] == id_of(answer)
        assert found.header("x-pd-decode") == answer.header("x-pd-decode")
        if not stream:
            assert lasting(found.json) == lasting(answer.json)


async def test_the_prefill_worker_keeps_none(product: VllmProduct):
    for answer in await made(product):
        assert not product.prefill.store.known(id_of(answer))
    assert {leg.json["store"] for leg in product.prefill.legs} == {False}


async def test_a_query_is_passed_on(product: VllmProduct):
    answer = (await made(product))[0]
    await product.client.get(f"{PATH}/{id_of(answer)}?starting_after=3")
    keeper = next(mock for mock in product.decodes if mock.url == answer.header("x-pd-decode"))
    about_it = [record.target for record in keeper.requests if record.path.startswith(f"{PATH}/")]
    assert about_it == [f"{PATH}/{id_of(answer)}?starting_after=3"]


@pytest.mark.parametrize("body", [None, {}], ids=["no body", "a body"])
async def test_a_response_is_cancelled_where_it_was_made(product: VllmProduct, body):
    for answer in await made(product):
        cancelled = await product.post(f"{PATH}/{id_of(answer)}/cancel", body)
        assert (cancelled.status, cancelled.code) == (400, None)
        assert cancelled.json["error"]["message"] == "Cannot cancel a synchronous response."


async def test_a_worker_says_that_it_deletes_none(product: VllmProduct):
    answer = (await made(product))[0]
    deleted = await product.client.delete(f"{PATH}/{id_of(answer)}")
    assert (deleted.status, deleted.code) == (405, None)
    assert deleted.json == {"detail": "Method Not Allowed"}


@pytest.mark.parametrize("name", ["resp_0123456789abcdef", "mine", "resp_", "x" * 3000])
async def test_a_response_that_nobody_made(product: VllmProduct, name):
    for answer in (await product.client.get(f"{PATH}/{name}"), await product.post(f"{PATH}/{name}/cancel", {})):
        assert (answer.status, answer.code) == (404, "response_not_found")
        assert "not found" in answer.json["error"]["message"]
        assert answer.json["error"]["param"] == "response_id"
    assert not [record for mock in product.mocks for record in mock.requests if record.path.startswith(f"{PATH}/")]


async def test_an_id_of_the_clients_own(product: VllmProduct):
    for number in range(4):
        answer = await product.post(PATH, {**BODY, "request_id": f"mine-{number}"})
        assert id_of(answer) == f"mine-{number}"
    for number in range(4):
        assert (await product.client.get(f"{PATH}/mine-{number}")).status == 200


@STREAMS
async def test_a_response_is_gone_on_from_where_it_was_made(product: VllmProduct, stream):
    for answer in await made(product):
        product.decode.clear()
        before = {"previous_response_id": id_of(answer), "input": OTHER, "stream": stream}
        more = await product.post(PATH, {**BODY, **before})
        assert more.status == 200, more.body
        assert more.header("x-pd-decode") == answer.header("x-pd-decode")
        assert more.header("x-pd-kv") == "recomputed"
        assert (await product.client.get(f"{PATH}/{id_of(more)}")).header("x-pd-decode") == more.header("x-pd-decode")


async def test_an_unknown_response_is_gone_on_from_nowhere(product: VllmProduct):
    answer = await product.post(PATH, {**BODY, "previous_response_id": "resp_nobody"})
    assert answer.status == 404
    assert "resp_nobody" in answer.json["error"]["message"]


async def test_a_response_whose_worker_failed_over_is_found(product: VllmProduct):
    """Its id was made for the worker that refused."""
    refusing, serving = product.decodes
    await refusing.refuse()
    for _ in range(2):
        answer = await product.post(PATH, BODY)
        assert answer.header("x-pd-decode") == serving.url
        found = await product.client.get(f"{PATH}/{id_of(answer)}")
        assert (found.status, found.header("x-pd-decode")) == (200, serving.url)


async def test_a_keeper_that_does_not_answer(product: VllmProduct):
    answer = await product.post(PATH, BODY)
    keeper = next(mock for mock in product.decodes if mock.url == answer.header("x-pd-decode"))
    await keeper.refuse()
    found = await product.client.get(f"{PATH}/{id_of(answer)}")
    assert (found.status, found.code) == (503, "decode_unreachable")


async def test_another_gateway_finds_it_by_its_name(product: VllmProduct):
    """A restarted one remembers nothing."""
    answers = await made(product)
    product.gateway.stored._kept.clear()
    for answer in answers:
        found = await product.client.get(f"{PATH}/{id_of(answer)}")
        assert (found.status, found.header("x-pd-decode")) == (200, answer.header("x-pd-decode"))


async def test_the_key_is_wanted_here_too() -> None:
    """Ids are guessable by those who made one."""
    async with VllmProduct(api_key="secret") as product:
        client: Client = product.client
        assert (await client.get(f"{PATH}/resp_x")).status == 401
        bearer = [("authorization", "Bearer secret")]
        answer = await product.post(PATH, BODY, bearer)
        assert (await client.get(f"{PATH}/{id_of(answer)}", bearer)).status == 200
