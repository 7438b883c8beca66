"""What the gateway refuses by itself: with which status, code and body, and without troubling any worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Reply
from product import PROMPT, Product

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
LIMIT = 1 << 20
INFERENCE = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/messages",
    "/v1/responses",
    "/v1/rerank",
    "/rerank",
    "/v1/messages/count_tokens",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(decodes=1, max_payload_size=LIMIT) as product:
        yield product


def check(product: Product, answer: Reply, status: int, code: str, param: str | None = None) -> None:
    """The peer's error shape, and no worker has seen anything."""
    assert (answer.status, answer.code) == (status, code)
    assert answer.header("content-type") == "application/json"
    error = answer.json["error"]
    assert set(answer.json) == {"error"}
    assert set(error) == {"type", "code", "message", "param"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert not [leg for mock in product.mocks for leg in mock.legs]


# -- bodies -----------------------------------------------------------------------------------------------------------

NOT_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"nonsense",
    b'{"model":"\xff"}',
    b"{} {}",
    b'{"a":1,}',
    b"[" * 5000,
]


@pytest.mark.parametrize("raw", NOT_OBJECTS, ids=range(len(NOT_OBJECTS)))
@pytest.mark.parametrize("path", INFERENCE)
async def test_what_is_not_a_json_object(product: Product, path, raw):
    answer = await product.post(path, raw)
    check(product, answer, 400, "invalid_json")
    assert answer.header("x-request-id")


async def test_a_request_without_a_body(product: Product):
    exchange = await product.client.open(PATH)
    check(product, await exchange.whole(), 400, "invalid_json")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (PATH, {**CHAT, "model": 5}, "model"),
    (PATH, {**CHAT, "stream": "yes"}, "stream"),
    (PATH, {**CHAT, "n": "2"}, "n"),
    (PATH, {**CHAT, "n": 0}, "n"),
    (PATH, {**CHAT, "n": -1}, "n"),
    (PATH, {**CHAT, "n": 1.5}, "n"),
    (PATH, {**CHAT, "n": 129}, "n"),
    (PATH, {**CHAT, "messages": "hello"}, "messages"),
    (PATH, {**CHAT, "messages": {}}, "messages"),
    ("/v1/completions", {"prompt": 5}, "prompt"),
    ("/v1/completions", {"prompt": {}}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/generate", {"text": "a", "sampling_params": {"n": "2"}}, "sampling_params.n"),
    ("/generate", {"text": "a", "input_ids": [1]}, "input_ids"),
    ("/v1/messages", {"messages": 1}, "messages"),
    ("/v1/responses", {"input": True}, "input"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
async def test_a_wrong_type(product: Product, path, body, param):
    check(product, await product.post(path, body), 400, "invalid_type", param)


MISSING = [
    (PATH, {"model": "tiny"}, "messages"),
    (PATH, {"model": "tiny", "messages": None}, "messages"),
    ("/v1/completions", {"model": "tiny"}, "prompt"),
    ("/generate", {"sampling_params": {}}, "text"),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5}, "messages"),
    ("/v1/responses", {"model": "tiny"}, "input"),
    ("/v1/rerank", {"query": "q"}, "documents"),
    ("/rerank", {"documents": ["d"]}, "query"),
    ("/v1/messages/count_tokens", {"model": "tiny"}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), MISSING)
async def test_a_missing_prompt(product: Product, path, body, param):
    check(product, await product.post(path, body), 400, "missing_required_parameter", param)


@pytest.mark.parametrize("key", ["model", "messages", "stream", "n", "bootstrap_room", "rid"])
async def test_a_field_that_decides_and_is_there_twice(product: Product, key):
    raw = json.dumps({**CHAT, key: CHAT.get(key)}).encode()[:-1] + b',"%b":null}' % key.encode()
    check(product, await product.post(PATH, raw), 400, "duplicate_parameter", key)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_model_that_nobody_serves(product: Product, stream, n):
    answer = await product.post(PATH, {**CHAT, "model": "unknown", "stream": stream, "n": n})
    check(product, answer, 404, "model_not_found", "model")
    assert answer.header("x-request-id")


# -- sizes ------------------------------------------------------------------------------------------------------------


def sized(size: int) -> bytes:
    filler = size - len(json.dumps({**CHAT, "padding": ""}))
    return json.dumps({**CHAT, "padding": "x" * filler}).encode()


async def test_a_body_of_the_permitted_size(product: Product):
    assert (await product.post(PATH, sized(LIMIT))).status == 200


async def test_a_body_that_is_too_large(product: Product):
    check(product, await product.post(PATH, sized(LIMIT + 1)), 413, "payload_too_large")


async def test_a_size_that_is_only_announced(product: Product):
    """Whoever waits for leave to send, as curl does with large bodies, need not send."""
    exchange = await product.client.connect()
    headers = [("content-length", str(LIMIT + 1)), ("expect", "100-continue")]
    await exchange.send(product.client.request_head("POST", PATH, headers))
    exchange.sent()
    answer = await exchange.whole()
    check(product, answer, 413, "payload_too_large")
    assert answer.seconds < PROMPT


async def test_a_chunked_upload_that_grows_too_large(product: Product):
    exchange = await product.client.connect()
    await exchange.send(product.client.request_head("POST", PATH, [("transfer-encoding", "chunked")]))
    sent = 0
    while sent <= LIMIT:
        await exchange.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        sent += 0x10000
    check(product, await exchange.whole(), 413, "payload_too_large")  # though the upload has not ended


@pytest.mark.parametrize("announced", [True, False])
async def test_an_http2_upload_that_is_too_large(product: Product, http2: Http2Client, announced):
    length = [("content-length", str(10 * LIMIT))] if announced else []
    stream = http2.open(PATH, length)
    if not announced:
        stream.send(b" " * (LIMIT + 1))
    check(product, await stream.whole(), 413, "payload_too_large")
    assert (await http2.post(PATH, sized(200)).whole()).status == 200  # the connection is as good as before


# -- paths and methods ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", INFERENCE)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_wrong_method(product: Product, path, method):
    exchange = await product.client.open(path, method=method)
    answer = await exchange.whole()
    check(product, answer, 405, "method_not_allowed")
    assert answer.header("allow") == "POST"


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v1/chat/completions/x", "/generate2"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path(product: Product, path, method):
    exchange = await product.client.open(path, CHAT if method == "POST" else None, method=method)
    check(product, await exchange.whole(), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/V1/chat/completions", "//v1/chat/completions", "/x/../v1/chat/completions", "/%761/chat/completions"]
)
async def test_a_path_that_only_looks_like_one(product: Product, path):
    check(product, await product.post(path, CHAT), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/classify", "/v1/audio/transcriptions", "/v1/images/generations"]
)
async def test_what_a_prefill_decode_fleet_does_not_serve(product: Product, path):
    check(product, await product.post(path, {"model": "tiny", "input": "a"}), 501, "not_implemented")


async def test_what_is_not_http(product: Product):
    exchange = await product.client.connect()
    await exchange.send(b"NONSENSE\r\n\r\n")
    assert (await exchange.head()).status == 400
    check_no_legs(product)


@pytest.mark.parametrize("other", ["transfer-encoding: chunked", "content-length: 6"])
async def test_two_lengths_for_one_body(product: Product, other):
    """The classic of request smuggling."""
    exchange = await product.client.connect()
    await exchange.send(
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n{other}\r\n\r\n0\r\n\r\nGET /smuggled".encode()
    )
    assert (await exchange.head()).status == 400
    check_no_legs(product)


def check_no_legs(product: Product) -> None:
    assert not [leg for mock in product.mocks for leg in mock.legs]
