"""Requests served by gRPC workers, carried by a real Envoy: answers, streams, failures, clients that leave.

Here Envoy runs the calls of streams by itself, as it does where their clients are not kept by comments.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import PATIENCE, Reply
from product import soon
from rpc_engine import Leg, fails, never
from rpc_product import TEXT, RpcProduct

from extproc.mock.vllm.worker import NIXL

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("sglang", "envoy"), ("vllm", "envoy"), ("sglang", "direct"), ("vllm", "direct")],
    ids="-".join,
)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RpcProduct]:
    engine, egress = request.param
    connector = NIXL if engine == "vllm" else ""
    where = tmp_path_factory.mktemp("model") / "tiny"
    options = {"retry_initial_backoff_ms": 10, "sse_keepalive_secs": 0, "egress": egress}
    async with RpcProduct(engine, where, connector=connector, **options) as made:
        yield made


def text_of(reply: Reply) -> str:
    """The text of a streamed chat."""
    chunks = [json.loads(event) for event in reply.events if event != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


async def test_a_whole_answer(product: RpcProduct) -> None:
    reply = await product.post("/v1/chat/completions", CHAT)
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == "tiny"
    prompt = product.prefill.legs[0].prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3  # the prefill's
    assert reply.header("content-length") == str(len(reply.body))
    assert reply.header("content-type") == "application/json"
    assert not [name for name, _ in reply.headers if name.startswith("grpc-") or name == "x-pd-late"]
    assert reply.header("x-pd-decode") in {mock.url for mock in product.decodes}
    assert reply.header("x-pd-prefill") == product.prefill.url
    assert reply.header("x-pd-kv") == "handed"
    await product.records.until(lambda: bool(product.records.all))
    record = product.records.all[0]
    assert (record.status, record.code, record.api) == (200, "", "chat")


async def test_what_the_legs_are(product: RpcProduct) -> None:
    headers = [("authorization", "Bearer theirs"), ("traceparent", "00-1-2-3"), ("cookie", "x" * 4000)]
    await product.post("/v1/chat/completions", CHAT, headers)
    (prefill,) = product.prefill.legs
    (decode,) = [leg for mock in product.decodes for leg in mock.legs]
    assert prefill.prompt == decode.prompt == product.ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert prefill.request.request_id == decode.request.request_id
    for leg in (prefill, decode):
        assert leg.metadata["authorization"] == "Bearer theirs"
        assert leg.metadata["traceparent"] == "00-1-2-3"
        assert not {"cookie", "content-length", "x-pd-cluster", "accept"} & leg.metadata.keys()
    assert prefill.metadata["x-request-id"] == decode.metadata["x-request-id"]


async def test_a_stream(product: RpcProduct) -> None:
    reply = await product.post("/v1/chat/completions", STREAM)
    assert (reply.status, reply.header("content-type")) == (200, "text/event-stream; charset=utf-8")
    assert text_of(reply) == TEXT
    assert reply.events[-1] == "[DONE]"
    usage = json.loads(reply.events[-2])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.usefixtures("product")
async def test_a_stream_over_http2(http2: Http2Client) -> None:
    reply = await http2.post("/v1/chat/completions", STREAM).whole()
    assert (reply.status, text_of(reply), reply.events[-1]) == (200, TEXT, "[DONE]")


async def test_the_first_token_is_not_kept_back(product: RpcProduct) -> None:
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.behave = _first_then(product.answer, go_on)
    exchange = await product.client.open("/v1/chat/completions", STREAM)
    await exchange.until(b'"content":"The')
    go_on.set()
    assert text_of(await exchange.whole()) == TEXT


def _first_then(ids: list[int], go_on: asyncio.Event) -> Any:
    async def behave(leg: Leg) -> None:
        await leg.chunk(ids[:1], 1)
        await go_on.wait()
        await leg.chunk(ids[1:], len(ids))
        await leg.complete(ids[-1:], "stop")

    return behave


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_and_lists_are_one_answer(product: RpcProduct, stream: bool) -> None:  # noqa: FBT001
    body = {"model": "tiny", "prompt": ["one", "two two"], "n": 2, "max_tokens": 50, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = await product.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert len(product.prefill.legs) == 4
    if stream:
        assert reply.events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in reply.events[:-1]]
        texts = dict.fromkeys(range(4), "")
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == dict.fromkeys(range(4), TEXT)
        usage = chunks[-1]["usage"]
    else:
        assert [(c["index"], c["text"]) for c in reply.json["choices"]] == [(i, TEXT) for i in range(4)]
        usage = reply.json["usage"]
    prompts = {tuple(leg.prompt) for leg in product.prefill.legs}
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 4 * len(product.answer)


async def test_a_stop_string_ends_the_engines_work(product: RpcProduct) -> None:
    ids = product.answer[:-1]

    async def behave(leg: Leg) -> None:
        await leg.chunk(ids, len(ids))
        await never(leg)

    for mock in product.decodes:
        mock.behave = behave
    reply = await product.post("/v1/chat/completions", STREAM | {"stop": [" fox"]})
    assert text_of(reply) == "The quick brown"
    assert reply.events[-1] == "[DONE]"
    leg = next(leg for mock in product.decodes for leg in mock.legs)
    async with asyncio.timeout(60):
        await leg.ended.wait()
    await soon(lambda: leg.engine.aborted == [leg.request.request_id], "the engine was not told")


async def test_a_busy_decode_leads_to_another_attempt(product: RpcProduct) -> None:
    first, second = product.decodes
    first.behave = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
    for _ in range(2):
        reply = await product.post("/v1/chat/completions", CHAT)
        assert (reply.status, reply.json["choices"][0]["message"]["content"]) == (200, TEXT)
        assert reply.header("x-pd-decode") == second.url
    await product.records.until(lambda: len(product.records.all) == 2)
    assert any(record.attempts == 2 for record in product.records.all)


async def test_a_busy_decode_leads_to_another_attempt_of_a_stream(product: RpcProduct) -> None:
    first, _ = product.decodes
    first.behave = fails(grpc.StatusCode.INTERNAL, "died")
    for _ in range(2):
        reply = await product.post("/v1/chat/completions", STREAM)
        assert (reply.status, text_of(reply), reply.events[-1]) == (200, TEXT, "[DONE]")
    await product.records.until(lambda: len(product.records.all) == 2)
    assert any(record.attempts == 2 for record in product.records.all)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.CANCELLED, 502),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decodes_error_has_a_status(
    product: RpcProduct,
    code: grpc.StatusCode,
    status: int,
    stream: bool,  # noqa: FBT001
) -> None:
    for mock in product.decodes:
        mock.behave = fails(code, "the engine's words")
    reply = await product.post("/v1/chat/completions", STREAM if stream else CHAT)
    assert reply.status == status, reply.body
    assert reply.code in ("decode_rejected", "decode_failed")
    assert "the engine's words" in reply.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefills_error_ends_the_decode(product: RpcProduct, stream: bool) -> None:  # noqa: FBT001
    product.prefill.behave = fails(grpc.StatusCode.INVALID_ARGUMENT, "prompt too odd")
    for mock in product.decodes:
        mock.behave = never
    reply = await product.post("/v1/chat/completions", STREAM if stream else CHAT)
    assert (reply.status, reply.code) == (400, "prefill_rejected")
    assert "prompt too odd" in reply.json["error"]["message"]


async def test_an_error_behind_the_first_token_is_an_event(product: RpcProduct) -> None:
    ids = product.answer

    async def behave(leg: Leg) -> None:
        await leg.chunk(ids[:2], 2)
        await asyncio.sleep(0.05)
        await leg.context.abort(grpc.StatusCode.INTERNAL, "engine died")

    for mock in product.decodes:
        mock.behave = behave
    reply = await product.post("/v1/chat/completions", STREAM)
    assert reply.status == 200
    assert "engine died" in json.loads(reply.events[-1])["error"]["message"]
    assert "[DONE]" not in reply.events
    await product.records.until(lambda: bool(product.records.all))
    assert product.records.all[-1].code == "decode_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_ends_well_and_has_said_nothing(product: RpcProduct, stream: bool) -> None:  # noqa: FBT001
    async def behave(_leg: Leg) -> None:
        pass

    for mock in product.decodes:
        mock.behave = behave
    async with asyncio.timeout(60):
        reply = await product.post("/v1/chat/completions", STREAM if stream else CHAT)
    assert (reply.status, reply.code) == (502, "decode_bad_reply")


@pytest.mark.parametrize(("stream", "begun"), [(False, False), (True, False), (True, True)])
async def test_a_client_that_leaves(product: RpcProduct, stream: bool, begun: bool) -> None:  # noqa: FBT001
    ids = product.answer

    async def behave(leg: Leg) -> None:
        if begun:
            await leg.chunk(ids[:2], 2)
        await never(leg)

    for mock in product.decodes:
        mock.behave = behave
    exchange = await product.client.open("/v1/chat/completions", STREAM if stream else CHAT)
    arrivals = [asyncio.ensure_future(mock.arrived()) for mock in product.decodes]
    done, waiting = await asyncio.wait(arrivals, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    leg = done.pop().result()
    if begun:
        await exchange.until(b"content")
    exchange.reset()
    async with asyncio.timeout(60):
        await leg.ended.wait()
    await soon(lambda: leg.request.request_id in leg.engine.aborted, "the engine was not told")


async def test_a_client_that_leaves_during_the_prefill(product: RpcProduct) -> None:
    product.prefill.behave = never
    exchange = await product.client.open("/v1/chat/completions", STREAM)
    leg = await product.prefill.arrived()
    exchange.reset()
    async with asyncio.timeout(60):
        await leg.ended.wait()
    await soon(lambda: leg.request.request_id in leg.engine.aborted, "the engine was not told")


async def test_a_field_that_cannot_be_served(product: RpcProduct) -> None:
    reply = await product.post("/v1/chat/completions", CHAT | {"audio": {"voice": "x"}})
    assert reply.status == 400
    assert not product.prefill.legs


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_apis_that_are_not_served_yet(product: RpcProduct, path: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 4}
    reply = await product.post(path, body)
    assert (reply.status, reply.code) == (501, "not_implemented")


async def test_tokens_are_told_here(product: RpcProduct) -> None:
    reply = await product.post("/tokenize", {"model": "tiny", "prompt": "hello there"})
    assert reply.status == 200, reply.body
    assert reply.json["tokens"][1:] == product.ids("hello there")


async def test_health_generate_goes_through_a_pair(product: RpcProduct) -> None:
    reply = await product.client.get("/health_generate")
    assert reply.status == 200, reply.body
    assert reply.json["prefill"] == product.prefill.url


async def test_who_is_ready_and_who_is_healthy(product: RpcProduct) -> None:
    workers = (await product.client.get("/workers")).json["workers"]
    assert all(worker["is_healthy"] for worker in workers)
    assert (await product.client.get("/readiness")).status == 200


async def test_a_decode_whose_server_stops_says_so(product: RpcProduct) -> None:
    ids = product.answer

    async def behave(leg: Leg) -> None:
        await leg.chunk(ids[:2], 2)
        await never(leg)

    for mock in product.decodes:
        mock.behave = behave
    asked = await product.client.open("/v1/chat/completions", STREAM)
    await asked.until(b"content")
    leg = next(leg for mock in product.decodes for leg in mock.legs)
    await leg.engine.stop()
    last = json.loads((await asked.whole()).events[-1])
    assert last["error"]["code"] == "decode_failed"
    await leg.engine.start()
    await product.ready()


async def test_a_crowd_of_which_many_leave(product: RpcProduct) -> None:
    """Whenever they do, nothing is left; and the others have their answers."""
    chance = random.Random(7)

    async def slowly(leg: Leg) -> None:
        for at, token in enumerate(product.answer):
            await asyncio.sleep(chance.random() * 0.01)
            if leg.request.stream:
                await leg.chunk([token], at + 1)
        await leg.complete(product.answer if not leg.request.stream else product.answer[-1:], "stop")

    for mock in product.decodes:
        mock.behave = slowly

    async def one(number: int) -> bool:
        body = STREAM if number % 2 else CHAT
        if number % 5 == 0:
            body = body | {"n": 2}
        exchange = await product.client.open("/v1/chat/completions", body)
        if chance.random() < 0.4:
            await asyncio.sleep(chance.random() * 0.15)
            exchange.reset()
            return True
        reply = await exchange.whole()
        exchange.close()
        return reply.status == 200 and TEXT.split()[-1].encode() in reply.body

    results = await asyncio.gather(*(one(number) for number in range(150)))
    assert all(results)
