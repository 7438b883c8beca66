"""What each leg receives: the client's bytes and headers, the handoff's fields, and nothing that steers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from product import Product

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LARGEST_ROOM = 2**63 - 1
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
END_TO_END = [
    ("authorization", "Bearer client-key"),
    ("traceparent", TRACEPARENT),
    ("tracestate", "vendor=value"),
    ("x-correlation-id", "corr-1"),
    ("x-tenant", "caf\u00e9"),
    ("accept-language", "de"),
    ("cookie", "a=1; b=2"),
    ("user-agent", "tests/1"),
]
# What a client could steer with: us, Envoy, the engine (SGLang's header overrides), or the connection.
STEERING = [
    ("x-gateway-destination-endpoint", "10.0.0.1:1"),
    ("x-pd-cluster", "prefill"),
    ("x-pd-prefill", "http://10.0.0.1:1"),
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-retry-on", "5xx"),
    ("x-envoy-original-path", "/elsewhere"),
    ("x-override-bootstrap-host", "10.0.0.1"),
    ("x-data-parallel-rank", "7"),
    ("te", "trailers"),
    ("keep-alive", "timeout=5"),
    ("proxy-authorization", "Basic eDp5"),
    ("upgrade", "h2c"),
]
DIRECT = ("/v1/chat/completions", CHAT)
RELAYED = ("/v1/chat/completions", {**CHAT, "n": 2})
ALONE = ("/v1/rerank", {"query": "q", "documents": ["a"]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product() as product:
        yield product


# -- bodies -----------------------------------------------------------------------------------------------------------

ODD_BODIES = {
    "integers of 64 bits and more": b'{"prompt":"a","seed":9223372036854775807,"extra":[18446744073709551617]}',
    "unicode and its escapes": '{"model":"tiny","prompt":"\\u00e9 é \\ud83e\\udd8a 🦊 \\/ \\u0000 \\"}"}'.encode(),
    "blanks and line ends": b'\r\n{ "prompt" : "a" ,\n\t"model":"tiny" }',
    "order of keys": b'{"zeta":1,"prompt":"a","alpha":{"b":1,"a":2},"model":"tiny"}',
    "unknown keys twice": b'{"extra":1,"prompt":"a","extra":2,"model":"tiny","extra":{"prompt":"b"}}',
    "numbers as they are written": b'{"prompt":"a","temperature":1.0e0,"top_p":0.10,"model":"tiny","extra":-0.0}',
    "explicit nulls": b'{"prompt":"a","stop":null,"model":"tiny","seed":null,"logprobs":null}',
    "no model": b'{"prompt":"a"}',
    "braces in strings": b'{"model":"tiny","prompt":"}{][\\\\","extra":"\\"}"}',
}


@pytest.mark.parametrize("raw", ODD_BODIES.values(), ids=ODD_BODIES)
async def test_both_legs_get_the_clients_bytes_and_the_handoffs_fields(product: Product, raw):
    answer = await product.post("/v1/completions", raw)
    assert answer.status == 200
    prefill, decode = product.legs
    fields = decode.json
    added = b'"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%d,"rid":"%s"' % (
        product.prefill.bootstrap_port,
        fields["bootstrap_room"],
        fields["rid"].encode(),
    )
    assert decode.body.rstrip() == raw.rstrip()[:-1] + b"," + added + b"}"
    assert prefill.body == decode.body
    assert 0 <= fields["bootstrap_room"] <= LARGEST_ROOM


async def test_a_streams_prefill_leg_does_not_stream(product: Product):
    raw = b'{"seed":9007199254740993,"stream":true , "prompt":"\\u0061","stream_options":{"include_usage":true}}'
    answer = await product.post("/v1/completions", raw)
    assert answer.events[-1] == "[DONE]"
    prefill, decode = product.legs
    assert decode.body.startswith(raw[:-1])
    assert prefill.body.startswith(b'{"seed":9007199254740993,"stream":false,"prompt":"\\u0061","bootstrap_')
    assert "stream_options" not in prefill.json


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3], [4]]}),
        ("/generate", {"text": ["a", "b", "c"]}),
        ("/generate", {"input_ids": [[1, 2], [3], [4]], "rid": ["x", "y", "z"]}),
    ],
)
async def test_a_list_of_prompts_has_lists_of_equal_length(product: Product, path, prompts):
    assert (await product.post(path, {"model": "tiny", **prompts})).status == 200
    prefill, decode = product.legs
    fields = decode.json
    assert fields["bootstrap_host"] == ["127.0.0.1"] * 3
    assert fields["bootstrap_port"] == [product.prefill.bootstrap_port] * 3
    rooms = fields["bootstrap_room"]
    assert len(set(rooms)) == 3
    assert all(0 <= room <= LARGEST_ROOM for room in rooms)
    assert prefill.body == decode.body
    if "rid" in prompts:
        assert fields["rid"] == prompts["rid"]


@pytest.mark.parametrize("prompt", [[1, 2, 3], "abc"], ids=["token ids", "text"])
async def test_one_prompt_has_one_room(product: Product, prompt):
    assert (await product.post("/v1/completions", {"model": "tiny", "prompt": prompt})).status == 200
    prefill, decode = product.legs
    assert isinstance(decode.json["bootstrap_room"], int)
    assert prefill.body == decode.body


async def test_every_request_has_a_room_of_its_own(product: Product):
    for _ in range(8):
        await product.post(*DIRECT)
    rooms = [leg.json["bootstrap_room"] for leg in product.prefill.legs]
    assert len(set(rooms)) == 8


async def test_samples_are_pairs_of_their_own(product: Product):
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 3, "seed": 2**63 - 2, "rid": "mine"}
    assert (await product.post("/v1/completions", body)).status == 200
    prefills = product.prefill.legs
    decodes = [leg for mock in product.decodes for leg in mock.legs]
    assert len(prefills) == len(decodes) == 3
    by_rid = {leg.json["rid"]: leg.json for leg in decodes}
    assert set(by_rid) == {"mine_0", "mine_1", "mine_2"}
    assert [by_rid[f"mine_{sample}"]["seed"] for sample in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {leg.json["n"] for leg in decodes} == {1}
    rooms = [room for fields in by_rid.values() for room in fields["bootstrap_room"]]
    assert len(set(rooms)) == 6
    assert {leg.json["rid"]: leg.body for leg in prefills} == {leg.json["rid"]: leg.body for leg in decodes}


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        (*DIRECT, "rid"),
        ("/v1/completions", {"prompt": "a"}, "rid"),
        ("/generate", {"text": "a"}, "rid"),
        ("/v1/responses", {"model": "tiny", "input": "a"}, "request_id"),
    ],
)
async def test_the_request_is_ours_by_name(product: Product, path, body, key):
    answer = await product.post(path, body)
    prefill, decode = product.legs
    name = decode.json[key]
    assert prefill.json[key] == name
    assert name in (answer.json.get("id"), answer.json.get("meta_info", {}).get("id"))
    await product.post(path, body)
    assert product.prefill.legs[1].json[key] != name


async def test_a_clients_own_name_is_kept(product: Product):
    answer = await product.post("/v1/chat/completions", {**CHAT, "rid": "mine"})
    assert answer.json["id"] == "mine"
    assert [leg.json["rid"] for leg in product.legs] == ["mine", "mine"]


async def test_a_client_does_not_steer_the_handoff(product: Product):
    steering = {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": 5,
        "bootstrap_pair_key": "x",
        "routed_dp_rank": 3,
        "data_parallel_rank": 3,
        "disagg_prefill_dp_rank": 3,
        "kv_transfer_params": {"remote_host": "10.0.0.1"},
    }
    answer = await product.post("/v1/chat/completions", {**steering, **CHAT})
    assert answer.status == 200
    for leg in product.legs:
        assert set(leg.json) == {*CHAT, "bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
        assert leg.json["bootstrap_host"] == "127.0.0.1"
        assert leg.json["bootstrap_port"] == product.prefill.bootstrap_port


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "worker_path", "body"),
    [
        ("/v1/rerank", "/v1/rerank", ALONE[1]),
        ("/rerank", "/v1/rerank", ALONE[1]),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens", CHAT),
    ],
)
async def test_one_prefill_worker_answers_alone(product: Product, path, worker_path, body):
    raw = json.dumps(body).encode()
    answer = await product.post(path, raw)
    assert [leg for mock in product.decodes for leg in mock.legs] == []
    (leg,) = product.prefill.legs
    assert (leg.path, leg.body) == (worker_path, raw)
    assert answer.status == leg.status
    assert answer.header("x-pd-prefill") == product.prefill.url
    assert answer.header("x-pd-decode") is None
    assert answer.header("x-pd-handoff") is None


@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED, ("/rerank", ALONE[1])], ids=["direct", "relayed", "alone"])
async def test_the_query_reaches_every_leg(product: Product, path, body):
    query = "a=%2Fb&c=d?e&f"
    await product.post(f"{path}?{query}", body)
    legs = [leg for mock in product.mocks for leg in mock.legs]
    assert {leg.query for leg in legs} == {query}
    assert {leg.path for leg in legs} == {"/v1/rerank" if path == "/rerank" else path}


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED, ALONE], ids=["direct", "relayed", "alone"])
async def test_end_to_end_headers_reach_every_leg(product: Product, path, body):
    await product.post(path, body, headers=END_TO_END)
    for leg in _all_legs(product):
        for name, value in END_TO_END:
            assert [given for key, given in leg.headers if key == name] == [value], name


@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED, ALONE], ids=["direct", "relayed", "alone"])
async def test_steering_and_connection_headers_reach_no_leg(product: Product, path, body):
    # Envoy answers 503 or 404 here if any of them takes effect
    answer = await product.post(path, body, headers=[*STEERING, ("connection", "keep-alive")])
    assert answer.code is None
    for leg in _all_legs(product):
        names = {name for name, _ in leg.headers}
        assert names.isdisjoint({name for name, _ in STEERING} | {"connection"})
        assert not [name for name in names if name.startswith(("x-pd-", "x-envoy-", "x-gateway-"))]


@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED, ALONE], ids=["direct", "relayed", "alone"])
async def test_legs_have_the_workers_host_and_an_exact_length(product: Product, path, body):
    await product.post(path, body, headers=[("content-type", "text/plain")])
    for mock in product.mocks:
        for leg in mock.legs:
            assert leg.header("host") == f"127.0.0.1:{mock.port}"
            assert leg.header("content-length") == str(len(leg.body))
            assert leg.header("transfer-encoding") is None
            assert leg.header("content-type") == "application/json"


async def test_the_prefill_leg_asks_for_no_compression(product: Product):
    await product.post(*DIRECT, headers=[("accept-encoding", "gzip")])
    prefill, decode = product.legs
    assert prefill.header("accept-encoding") is None
    assert decode.header("accept-encoding") == "gzip"


MADE = [
    ("/v1/chat/completions", CHAT, "chatcmpl-"),
    ("/v1/completions", {"prompt": "a"}, "cmpl-"),
    ("/generate", {"text": "a"}, "gnt-"),
    ("/v1/messages", {**CHAT, "max_tokens": 3}, "msg_"),
    ("/v1/responses", {"input": "a"}, "resp-"),
    ("/v1/rerank", ALONE[1], "req-"),
    ("/v1/chat/completions", {**CHAT, "n": 2}, "chatcmpl-"),
]


@pytest.mark.parametrize(("path", "body", "prefix"), MADE)
async def test_a_request_id_is_made_sent_and_returned(product: Product, path, body, prefix):
    answer = await product.post(path, body)
    made = answer.header("x-request-id")
    assert made is not None
    assert made.startswith(prefix)
    assert len(made) == len(prefix) + 24
    assert {leg.header("x-request-id") for leg in _all_legs(product)} == {made}
    assert [value for name, value in answer.headers if name == "x-request-id"] == [made]


@pytest.mark.parametrize("name", ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"])
@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED, ALONE], ids=["direct", "relayed", "alone"])
async def test_a_clients_request_id_is_kept(product: Product, path, body, name):
    answer = await product.post(path, body, headers=[(name, "client~1")])
    assert answer.header("x-request-id") == "client~1"
    for leg in _all_legs(product):
        assert [value for key, value in leg.headers if key == "x-request-id"] == ["client~1"]
        assert leg.header(name) == "client~1"


@pytest.mark.parametrize("bad", ["with blank", "x" * 129, "caf\u00e9"])
async def test_an_unusable_request_id_is_replaced(product: Product, bad):
    answer = await product.post(*DIRECT, headers=[("x-request-id", bad)])
    made = answer.header("x-request-id")
    assert made is not None
    assert made.startswith("chatcmpl-")
    assert {leg.header("x-request-id") for leg in product.legs} == {made}


@pytest.mark.parametrize(("path", "body"), [DIRECT, RELAYED], ids=["direct", "relayed"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_what_happened(product: Product, path, body, stream):
    answer = await product.post(path, {**body, "stream": stream})
    (decode,) = {mock.url for mock in product.decodes if mock.legs}
    assert answer.header("x-pd-prefill") == product.prefill.url
    assert answer.header("x-pd-decode") == decode
    assert answer.header("x-pd-handoff") == "sglang"
    timing = answer.header("server-timing") or ""
    assert timing.startswith("route;dur=")
    assert "decode;dur=" in timing
    assert not [name for name, _ in answer.headers if name in ("x-pd-upstream", "x-pd-cluster", "x-pd-local-reply")]
    assert not [name for name, _ in answer.headers if name.startswith("x-envoy-")]


async def test_the_log_record_says_the_same(product: Product):
    await product.post(*DIRECT, headers=[("x-request-id", "mine")])
    await product.settled()
    (record,) = product.records.all
    prefill, decode = product.legs
    assert (record.request_id, record.api, record.model, record.status) == (b"mine", "chat", "tiny", 200)
    assert (record.prefill, record.handoff, record.code) == (product.prefill.url, "sglang", "")
    assert decode in [leg for mock in product.decodes if mock.url == record.decode for leg in mock.legs]
    assert record.started <= record.sent <= record.headed <= record.ended
    assert prefill.status == 200


async def test_connections_to_workers_are_kept_and_reused(product: Product):
    async def ask() -> None:
        """And wait until both legs are over: until then they have their connections."""
        await product.post(*DIRECT)
        await product.settled()

    await ask()
    await ask()  # the other decode worker's turn
    before = await _connections(product)
    for _ in range(10):
        await ask()
    assert await _connections(product) == before


def _all_legs(product: Product) -> list[Any]:
    legs = [leg for mock in product.mocks for leg in mock.legs]
    assert legs
    return legs


async def _connections(product: Product) -> int:
    """How many connections Envoy has ever made to workers."""
    admin = product.envoy.admin
    return sum([await admin.gauge(f"cluster.{cluster}.upstream_cx_total") for cluster in ("prefill", "decode")])
