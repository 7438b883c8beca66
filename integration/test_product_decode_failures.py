"""A decode leg that fails: another worker takes over where none has seen the request yet, else the client is told what
the worker said, the prefill leg is ended, and nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import CutError, Reply
from product import PROMPT, Product, names_of, soon

from extproc.mock import Fault, Outcome, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {"text": "hello", "return_logprob": True, "logprob_start_len": 0}
DIRECT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "list": ("/v1/completions", {"prompt": ["a", "b"]}),
    "generate stream": ("/generate", {"text": "a", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 5}),
}
RELAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "samples stream": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    "logprobs": ("/generate", LOGPROBS),
    "logprobs stream": ("/generate", {**LOGPROBS, "stream": True}),
}
ALL = DIRECT | RELAYED
STREAMS = [kind for kind in ALL if kind.endswith("stream")]
WHOLE = [kind for kind in ALL if kind not in STREAMS]
JSON_ERROR = '{"object":"error","message":"busy","type":"x","code":429}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(prefills=2, decodes=2, disable_retries=True) as product:
        yield product


# -- fail-over --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
async def test_another_decode_worker_takes_over(product: Product, kind):
    dead, alive = product.decodes
    await dead.refuse()
    before = await _refusals(product)
    for _ in range(2):  # one of two requests is for the dead worker first
        answer = await product.post(*ALL[kind])
        assert answer.status == 200
        assert answer.code is None
        assert answer.header("x-pd-decode") == alive.url
    assert await _refusals(product) > before
    assert {mock.url for mock in product.decodes if mock.legs} == {alive.url}
    by_room = {json.dumps(leg.json["bootstrap_room"]): leg for mock in product.prefills for leg in mock.legs}
    for leg in alive.legs:
        partner = by_room[json.dumps(leg.json["bootstrap_room"])]
        assert partner.json == {**leg.json, **({"stream": False} if "stream" in leg.json else {})}
    await product.settled()
    assert {record.decode for record in product.records.all} == {alive.url}


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("size", [100, 20_000_000])
async def test_the_body_reaches_the_other_worker_unharmed(product: Product, http2: Http2Client, size, trailers):
    dead, alive = product.decodes
    await dead.refuse()
    body = json.dumps({**CHAT, "padding": "x" * size}).encode()
    for _ in range(2):
        stream = http2.open("/v1/chat/completions", [("content-type", "application/json")])
        stream.send(body, end=not trailers)
        if trailers:
            stream.trailers([("x-checksum", "1")])
        assert (await stream.whole()).status == 200
    assert len(alive.legs) == 2
    for leg in alive.legs:
        assert leg.body.startswith(body[:-1])
        assert leg.header("content-length") == str(len(leg.body))


@pytest.mark.parametrize("kind", ALL)
async def test_no_decode_worker_accepts_connections(product: Product, kind):
    for mock in product.decodes:
        await mock.refuse()
    answer = await product.post(*ALL[kind])
    assert (answer.status, answer.code) == (503, "decode_unreachable")
    assert answer.header("retry-after") == "1"
    assert answer.header("x-request-id")
    assert answer.seconds < PROMPT
    await _prefills_end(product, answer)


# -- what the worker says ---------------------------------------------------------------------------------------------

SAID = {
    "400": Fault(status=400, body=JSON_ERROR),
    "401": Fault(status=401, body="who?", headers=(("content-type", "text/plain"), ("www-authenticate", "Bearer"))),
    "413": Fault(status=413, body=JSON_ERROR),
    "422": Fault(status=422, body=JSON_ERROR),
    "429": Fault(status=429, body=JSON_ERROR, headers=(("retry-after", "13"), ("x-ratelimit-limit", "5"))),
    "500": Fault(status=500, body=JSON_ERROR),
    "503": Fault(status=503, body="", headers=(("retry-after", "Fri, 31 Dec 2027 23:59:59 GMT"),)),
    "504": Fault(status=504, body=JSON_ERROR),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("kind", ALL)
async def test_what_the_worker_says_reaches_the_client_unchanged(product: Product, kind, said):
    fault = SAID[said]
    for mock in product.decodes:
        mock.fail(fault)
    answer = await product.post(*ALL[kind])
    assert answer.status == fault.status
    headers = {"content-type": "application/json"} | dict(fault.headers)
    assert answer.header("retry-after") == headers.get("retry-after")
    assert answer.body.decode() == fault.body
    if fault.body:  # Envoy names no type for a body that it sends itself and that is empty
        assert answer.header("content-type") == headers["content-type"]
    if kind in DIRECT:
        assert answer.code is None
        assert {name: answer.header(name) for name in headers} == headers
    await _prefills_end(product, answer)
    await product.settled()
    assert product.records.all[0].status == fault.status


@pytest.mark.parametrize("kind", ["samples", "samples stream"])
async def test_one_samples_refusal_ends_all(product: Product, kind):
    for mock in product.decodes:
        mock.fail(Fault(status=429, body=JSON_ERROR), times=1)
        mock.fail(Fault(delay_head=60))
    answer = await product.post(*ALL[kind])
    assert (answer.status, answer.code, answer.body.decode()) == (429, "decode_rejected", JSON_ERROR)
    assert answer.seconds < PROMPT
    await _prefills_end(product, answer)


# -- broken connections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
async def test_a_decode_that_breaks_before_its_head(product: Product, kind):
    answer = await _failed(product, kind, Fault(status=200, drop=Point.BEFORE_HEAD))
    assert (answer.status, answer.code) == (502, "decode_connection_lost")
    assert answer.seconds < PROMPT
    await _prefills_end(product, answer)
    legs = [leg for mock in product.decodes for leg in mock.legs]
    assert len(legs) == len([leg for mock in product.prefills for leg in mock.legs]), "a leg was sent twice"


@pytest.mark.parametrize("fault", [Fault(drop=Point.MID_BODY), Fault(truncate=True)], ids=["reset", "closed"])
@pytest.mark.parametrize("kind", [kind for kind in DIRECT if kind in STREAMS])
async def test_a_direct_stream_that_breaks_is_cut(product: Product, http2: Http2Client, kind, fault):
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(replace(fault, hang=Point.MID_BODY, until=go_on, after_chunks=4))
    stream = http2.post(*ALL[kind])
    while stream.reply.body.count(b"data: ") < 4:
        await stream.progress()
    go_on.set()
    received = await stream.cut()
    assert stream.reply.status == 200
    assert received.count(b"data: ") >= 4
    assert b"[DONE]" not in received


@pytest.mark.parametrize("fault", [Fault(drop=Point.MID_BODY), Fault(truncate=True)], ids=["reset", "closed"])
@pytest.mark.parametrize("kind", [kind for kind in DIRECT if kind in WHOLE])
async def test_a_direct_answer_that_breaks_never_looks_complete(product: Product, http2: Http2Client, kind, fault):
    """An error where Envoy sees the break before it has sent the head, else a cut."""
    for mock in product.decodes:
        mock.fail(fault)
    stream = http2.post(*ALL[kind])
    try:
        answer = await stream.whole()
    except CutError:
        assert stream.reply.status in (0, 200)
    else:
        assert (answer.status, answer.code) == (502, "decode_connection_lost")


@pytest.mark.parametrize("fault", [Fault(drop=Point.MID_BODY), Fault(truncate=True)], ids=["reset", "closed"])
@pytest.mark.parametrize("kind", [kind for kind in RELAYED if kind in WHOLE])
async def test_a_relayed_answer_that_breaks_is_an_error(product: Product, kind, fault):
    for mock in product.decodes:
        mock.fail(fault)
    answer = await product.post(*ALL[kind])
    assert (answer.status, answer.code) == (502, "decode_connection_lost")
    assert answer.seconds < PROMPT


@pytest.mark.parametrize("fault", [Fault(drop=Point.MID_BODY), Fault(truncate=True)], ids=["reset", "closed"])
@pytest.mark.parametrize("kind", [kind for kind in RELAYED if kind in STREAMS])
async def test_a_relayed_stream_that_breaks_gets_an_error_event(product: Product, kind, fault):
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(replace(fault, hang=Point.MID_BODY, until=go_on, after_chunks=4))
    exchange = await product.client.open(*ALL[kind])
    await exchange.until(b"data: ")
    go_on.set()
    answer = await exchange.whole()
    assert answer.status == 200
    *told, error, done = answer.events
    assert told
    assert '"decode_connection_lost"' in error
    assert done == "[DONE]"
    await product.settled()
    assert product.records.all[0].code == "decode_connection_lost"


@pytest.mark.parametrize("kind", RELAYED)
async def test_a_relayed_answer_that_makes_no_sense_is_an_error(product: Product, kind):
    for mock in product.decodes:
        mock.fail(Fault(garbage=True))
    answer = await product.post(*ALL[kind])
    assert b'"decode_bad_reply"' in answer.body
    assert answer.status in ((200, 502) if kind in STREAMS else (502,))  # a stream may have begun by then


async def test_no_leg_is_sent_twice_to_a_worker(product: Product):
    """Envoy's retries are for connections that never came about; a request that reached a worker may have begun."""
    for mock in product.decodes:
        mock.fail(Fault(status=200, drop=Point.BEFORE_HEAD), times=1)
    answers = [await product.post(*ALL["chat"]) for _ in range(4)]
    assert sorted(answer.status for answer in answers) == [200, 200, 502, 502]
    rooms = [leg.json["bootstrap_room"] for mock in product.decodes for leg in mock.legs]
    assert len(set(rooms)) == len(rooms) == 4


# -- the prefill's part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "messages"])
async def test_the_prefill_leg_is_ended_by_name(product: Product, kind):
    answer = await _failed(product, kind, Fault(status=500))
    named = set()
    aborts = []
    for mock in product.prefills:
        here = [name for leg in mock.legs for name in names_of(leg)]
        named |= set(here)
        aborts += await mock.received(len(here), "/abort_request")
    assert {abort.json["rid"] for abort in aborts} == named
    await _prefills_end(product, answer)


async def test_a_clients_own_name_is_not_used_to_end_legs(product: Product):
    """It may be another request's as well."""
    answer = await _failed(product, "chat", Fault(status=500), rid="mine")
    await _prefills_end(product, answer)
    (leg,) = [leg for mock in product.prefills for leg in mock.legs]
    assert leg.outcome is Outcome.CLIENT_CLOSED
    assert not [record for mock in product.mocks for record in mock.requests if record.path == "/abort_request"]


async def _failed(product: Product, kind: str, fault: Fault, **more: object) -> Reply:
    """The answer to a request whose decode fails when all legs have come; its time counts from then."""
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(replace(fault, hang=Point.BEFORE_HEAD, until=go_on))
    path, body = ALL[kind]
    exchange = await product.client.open(path, body | more)
    legs = 2 * body.get("n", 1)
    await soon(lambda: sum(leg.received is not None for mock in product.mocks for leg in mock.legs) == legs, "no legs")
    go_on.set()
    exchange.sent()
    return await exchange.whole()


async def _prefills_end(product: Product, answer: Reply) -> None:
    """See every prefill leg end, and no later than promptly after the client heard."""
    for mock in product.prefills:
        await mock.idle()
        for leg in mock.legs:
            assert leg.ended - answer.ended < PROMPT


async def _refusals(product: Product) -> int:
    return await product.envoy.admin.gauge("cluster.decode.upstream_cx_connect_fail")


# -- one prefill worker alone -----------------------------------------------------------------------------------------

ALONE = ("/v1/messages/count_tokens", CHAT)


async def test_another_prefill_worker_takes_over_what_one_answers_alone(product: Product):
    dead, alive = product.prefills
    await dead.refuse()
    for _ in range(2):
        answer = await product.post(*ALONE)
        assert answer.status == 200
        assert answer.header("x-pd-prefill") == alive.url
    assert len(alive.legs) == 2
    await alive.refuse()
    answer = await product.post(*ALONE)
    assert (answer.status, answer.code, answer.header("retry-after")) == (503, "prefill_unreachable", "1")


async def test_what_a_prefill_worker_says_alone_reaches_the_client_unchanged(product: Product):
    for mock in product.prefills:
        mock.fail(SAID["429"])
    answer = await product.post(*ALONE)
    assert (answer.status, answer.code, answer.body.decode()) == (429, None, JSON_ERROR)
    assert (answer.header("retry-after"), answer.header("x-ratelimit-limit")) == ("13", "5")


async def test_a_prefill_worker_alone_that_breaks(product: Product):
    for mock in product.prefills:
        mock.fail(Fault(status=200, drop=Point.BEFORE_HEAD))
    answer = await product.post(*ALONE)
    assert (answer.status, answer.code) == (502, "prefill_connection_lost")
    assert sum(len(mock.legs) for mock in product.prefills) == 1


async def test_a_client_leaves_a_prefill_worker_alone(product: Product):
    for mock in product.prefills:
        mock.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchange = await product.client.open(*ALONE)
    await soon(lambda: any(leg.received for mock in product.prefills for leg in mock.legs), "it never came")
    left = exchange.close()
    for mock in product.prefills:
        await mock.idle()
    (leg,) = [leg for mock in product.prefills for leg in mock.legs]
    assert leg.ended - left < PROMPT
