"""The vLLM mock and NIXL against what the real engine (0.32.0) was seen doing, and what its source says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from extproc.mock import Fault, Outcome, Point, VllmMock
from extproc.mock.observed import PATIENCE
from extproc.workers.vllm_cache import layout_of
from tests.mock_client import Answer, Call, ask, dialling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GENERATE = "/inference/v1/generate"
USER = [{"role": "user", "content": "Say hi to the world"}]
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock-model", "messages": USER, "max_tokens": 5},
    COMPLETIONS: {"model": "mock-model", "prompt": "Once upon", "max_tokens": 5},
    MESSAGES: {"model": "mock-model", "messages": USER, "max_tokens": 5},
    RESPONSES: {"model": "mock-model", "input": "Once upon", "max_output_tokens": 5},
    GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}},
}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
UNREACHABLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "nobody",
    "remote_request_id": "nothing",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
Dial = Callable[[VllmMock], Awaitable[Call]]


def one_token(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of a prefill leg."""
    leg = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    if path == RESPONSES:
        return leg | {"max_output_tokens": 1}
    if path == GENERATE:
        return leg | {"sampling_params": {**leg["sampling_params"], "max_tokens": 1}}
    return leg | {"max_tokens": 1}


class Pair:
    """A prefill and a decode, and an aggregated worker to compare with."""

    def __init__(self, prefill: VllmMock, decode: VllmMock, aggregated: VllmMock) -> None:
        self.prefill = prefill
        self.decode = decode
        self.aggregated = aggregated

    async def params(self, path: str = CHAT, body: dict[str, Any] | None = None, **fields: Any) -> Any:
        """What a prefill leg returns for the decode."""
        leg = one_token(path, {**REQUESTS[path], **(body or {}), **fields})
        answer = await ask(self.prefill, path, leg | {"kv_transfer_params": PREFILL})
        assert answer.status == 200, answer.body
        return answer.json["kv_transfer_params"]

    async def second(self, params: Any, path: str = CHAT, **fields: Any) -> Answer:
        """The decode's answer to a request with these parameters."""
        return await ask(self.decode, path, {**REQUESTS[path], **fields, "kv_transfer_params": params})

    async def both(self, path: str, body: dict[str, Any]) -> Answer:
        """The decode's answer after a prefill."""
        return await ask(self.decode, path, body | {"kv_transfer_params": await self.params(path, body)})

    def kv(self) -> str | None:
        """What became of the decode's latest request."""
        return self.decode.legs[-1].kv


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with (
        VllmMock("prefill") as prefill,
        VllmMock("decode", load_failure_delay=0.01) as decode,
        VllmMock("aggregated") as aggregated,
    ):
        yield Pair(prefill, decode, aggregated)


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    async with dialling() as dial:
        yield dial


def same(answer: Answer) -> str:
    """An answer without what differs from run to run, or tells where its KV cache comes from."""
    text = re.sub(r'"((?:msg|resp|chatcmpl|cmpl|generate-tokens)[_-])[0-9a-f]{16}"', '"ID"', answer.body.decode())
    return re.sub(r'"(created|created_at)":[0-9]+', r'"\1":0', text)


def text_of(answer: Answer) -> str:
    """The text of a chat or completion."""
    choice = answer.json["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def metric(answer: Answer, name: str) -> float:
    """A metric's value."""
    found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", answer.body.decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


# --- the same answers as an aggregated worker ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((path, {}) for path in REQUESTS),
        (CHAT, {"logprobs": True, "top_logprobs": 3}),
        (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT, {"stop": ["e"], "max_tokens": 50}),
        (CHAT, {"max_tokens": None}),
        (CHAT, {"return_token_ids": True}),
        (COMPLETIONS, {"prompt": [5, 6, 7], "return_token_ids": True}),
        (COMPLETIONS, {"logprobs": 2, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"echo": True, "logprobs": 1}),
        (GENERATE, {"output_mode": "text", "sampling_params": {"max_tokens": 5, "logprobs": 1}}),
    ],
)
async def test_decode_answers_like_an_aggregated_worker(
    pair: Pair, path: str, more: dict[str, Any], *, stream: bool
) -> None:
    body = {**REQUESTS[path], **more, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    answer = await pair.both(path, body)
    expected = await ask(pair.aggregated, path, body)
    assert expected.status == 200
    assert same(answer) == same(expected)
    assert list(answer.headers) == list(expected.headers)
    wants_prompt_logprobs = "echo" in more and "logprobs" in more
    assert pair.kv() == ("recomputed" if wants_prompt_logprobs else "transferred")
    assert pair.prefill.pinned == 0


async def test_tokens_in_the_place_of_a_text_give_the_same_text(pair: Pair) -> None:
    tokens = (await ask(pair.prefill, "/tokenize", {"prompt": "Once upon a time"})).json["tokens"]
    texts = [
        text_of(await ask(pair.aggregated, COMPLETIONS, REQUESTS[COMPLETIONS] | {"prompt": prompt}))
        for prompt in ("Once upon a time", tokens, [tokens])
    ]
    assert texts[0] == texts[1] == texts[2]


# --- the prefill leg ---


async def test_parameters_of_a_prefill(pair: Pair) -> None:
    params = await pair.params()
    assert list(params) == [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
        "remote_prefill_cached_tokens",
    ]
    prompt = (await ask(pair.prefill, "/tokenize", {"messages": USER})).json["count"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_engine_id"] == pair.prefill.engine_id
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", pair.prefill.side_channel_port)
    assert params["remote_num_tokens"] == prompt
    assert len(params["remote_block_ids"][0]) == pair.prefill.pinned == 1
    assert pair.prefill.pins == (params["remote_request_id"],)


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_api_returns_parameters(pair: Pair, path: str) -> None:
    assert (await pair.params(path))["do_remote_prefill"] is True


async def test_blocks_stay_pinned_until_the_decode_has_read_them(pair: Pair) -> None:
    params = await pair.params()
    assert metric(await ask(pair.prefill, "/metrics"), "kv_cache_usage_perc") > 0
    assert (await pair.second(params)).status == 200
    await pair.prefill.freed()
    assert metric(await ask(pair.prefill, "/metrics"), "kv_cache_usage_perc") == 0
    metrics = await ask(pair.decode, "/metrics")
    assert metric(metrics, "external_prefix_cache_hits_total") == params["remote_num_tokens"]
    assert metric(metrics, "nixl_bytes_transferred_sum") > 0


async def test_a_lease_ends() -> None:
    async with VllmMock("prefill", lease=0.02) as prefill:
        await ask(prefill, CHAT, one_token(CHAT, REQUESTS[CHAT]) | {"kv_transfer_params": PREFILL})
        await prefill.recorder.until(lambda: prefill.expired == 1, PATIENCE)
        await prefill.freed()


async def test_a_stream_has_no_parameters_but_pins(pair: Pair) -> None:
    body = REQUESTS[CHAT] | {"stream": True, "kv_transfer_params": PREFILL}
    answer = await ask(pair.prefill, CHAT, body)
    assert b"kv_transfer_params" not in answer.body
    assert pair.prefill.pinned


@pytest.mark.parametrize(("old", "returned"), [(False, True), (True, False)])
async def test_end_of_text_as_the_first_token(old: bool, returned: bool) -> None:  # noqa: FBT001
    async with VllmMock("prefill", eos_first="hi", old_engine=old) as prefill:
        answer = await ask(prefill, CHAT, one_token(CHAT, REQUESTS[CHAT]) | {"kv_transfer_params": PREFILL})
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert (answer.json["kv_transfer_params"] is not None) == returned == bool(prefill.pinned)


async def test_ignore_eos_gets_past_it() -> None:
    async with VllmMock("prefill", eos_first="hi", old_engine=True) as prefill:
        body = one_token(CHAT, REQUESTS[CHAT]) | {"kv_transfer_params": PREFILL, "ignore_eos": True}
        answer = await ask(prefill, CHAT, body)
        assert answer.json["kv_transfer_params"] is not None


async def test_a_stop_string_before_the_limit_aborts_in_the_core(pair: Pair) -> None:
    body = {**REQUESTS[CHAT], "max_tokens": 10, "stop": [" "], "kv_transfer_params": PREFILL}
    assert (await ask(pair.prefill, CHAT, body)).json["kv_transfer_params"] is None
    assert (await ask(pair.prefill, CHAT, body | {"max_tokens": 1})).json["kv_transfer_params"] is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_whose_client_leaves_pins_nothing(dial: Dial, *, stream: bool) -> None:
    async with VllmMock("prefill", first_token_delay=30) as prefill:
        call = await dial(prefill)
        call.send("POST", CHAT, REQUESTS[CHAT] | {"kv_transfer_params": PREFILL, "stream": stream})
        await prefill.received()
        await call.close()
        await prefill.idle()
        assert prefill.legs[0].outcome is Outcome.CLIENT_CLOSED
        assert (prefill.pinned, prefill.engine.blocks.usage) == (0, 0)


async def test_several_prompts_or_samples_return_one_set_and_pin_all(pair: Pair) -> None:
    prompts = {"prompt": ["one", "two, longer"]}
    params = await pair.params(COMPLETIONS, prompts)
    assert "-0-" in params["remote_request_id"]
    assert len(pair.prefill.pins) == 2
    params = await pair.params(CHAT, n=2)
    assert params["remote_request_id"].startswith("1_chatcmpl-")
    assert len(pair.prefill.pins) == 4


async def test_cached_tokens_are_the_prefills(pair: Pair) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 100}]}
    first = await pair.params(CHAT, long)
    again = await pair.params(CHAT, long)
    assert (first["remote_prefill_cached_tokens"], again["remote_prefill_cached_tokens"]) == (0, 128)
    for params, expected in ((first, 0), (again, 128)):
        usage = (await pair.second(params, CHAT, **long)).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    async with VllmMock("aggregated", prompt_tokens_details=False) as plain:
        assert (await ask(plain, CHAT, REQUESTS[CHAT])).json["usage"]["prompt_tokens_details"] is None


async def test_a_full_cache_makes_requests_wait(dial: Dial) -> None:
    async with VllmMock("prefill", blocks=2) as prefill, VllmMock("decode") as decode:
        body = one_token(CHAT, REQUESTS[CHAT]) | {"kv_transfer_params": PREFILL}
        answers = [await ask(prefill, CHAT, body) for _ in range(2)]
        call = await dial(prefill)
        call.send("POST", CHAT, body)
        await prefill.received(3)
        assert len(prefill.live) == 1
        params = answers[0].json["kv_transfer_params"]
        assert (await ask(decode, CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params})).status == 200
        assert (await call.answer()).status == 200


# --- the decode leg ---


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"unknown": 1}])
async def test_without_parameters_it_recomputes(pair: Pair, params: Any) -> None:
    assert text_of(await pair.second(params)) == text_of(await ask(pair.aggregated, CHAT, REQUESTS[CHAT]))
    assert pair.kv() == "recomputed"
    assert pair.decode.external_hits == 0


async def test_another_prompts_cache_gives_its_text(pair: Pair) -> None:
    other = {"messages": [{"role": "user", "content": "Something else"}]}
    params = await pair.params(CHAT, other)
    answer = await pair.second(params)
    assert answer.status == 200
    assert text_of(answer) == text_of(await ask(pair.aggregated, CHAT, {**REQUESTS[CHAT], **other}))
    assert pair.kv() == "foreign"


async def test_one_handoff_for_a_list_answers_all_from_the_first(pair: Pair) -> None:
    body = {**REQUESTS[COMPLETIONS], "prompt": ["one", "two, longer", "three"]}
    texts = [choice["text"] for choice in (await pair.both(COMPLETIONS, body)).json["choices"]]
    expected = [choice["text"] for choice in (await ask(pair.aggregated, COMPLETIONS, body)).json["choices"]]
    assert texts == [expected[0]] * 3
    assert len(set(expected)) == 3
    assert pair.kv() == "foreign"


async def test_parameters_may_be_used_twice_but_not_after_the_blocks_are_written_again() -> None:
    async with VllmMock("prefill", blocks=2) as prefill, VllmMock("decode") as decode, VllmMock() as aggregated:
        pair = Pair(prefill, decode, aggregated)
        params = await pair.params()
        right = text_of(await pair.second(params))
        assert text_of(await pair.second(params)) == right
        assert pair.kv() == "transferred"
        for word in ("one", "two"):
            await ask(prefill, COMPLETIONS, REQUESTS[COMPLETIONS] | {"prompt": word})
        assert text_of(await pair.second(params)) != right
        assert pair.kv() == "foreign"


@pytest.mark.parametrize("missing", REMOTE)
async def test_incomplete_parameters_hold_a_request_for_ever(pair: Pair, dial: Dial, missing: str) -> None:
    params = {key: value for key, value in (await pair.params()).items() if key != missing}
    call = await dial(pair.decode)
    call.send("POST", CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params})
    await pair.decode.received()
    assert pair.kv() == "stuck"
    assert metric(await ask(pair.decode, "/metrics"), "num_requests_waiting") == 1
    await call.close()
    await pair.decode.idle()
    assert pair.prefill.pinned


async def test_incomplete_parameters_may_be_recomputed(pair: Pair) -> None:
    async with VllmMock("decode", stuck=False, load_failure_delay=0) as decode:
        answer = await ask(decode, CHAT, REQUESTS[CHAT] | {"kv_transfer_params": {**UNREACHABLE, "remote_port": None}})
        assert answer.status == 500
        params = {key: value for key, value in UNREACHABLE.items() if key != "remote_port"}
        answer = await ask(decode, CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params})
        assert text_of(answer) == text_of(await ask(pair.aggregated, CHAT, REQUESTS[CHAT]))
        assert decode.legs[-1].kv == "recomputed"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("blocks", [None, []])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_remote_prefill_without_blocks_ends_the_process(
    dial: Dial, role: str, blocks: Any, *, stream: bool
) -> None:
    params = UNREACHABLE | {"remote_block_ids": blocks}
    async with VllmMock(role) as mock:
        call = await dial(mock)
        call.send("POST", CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params, "stream": stream})
        await call.ended()
        assert mock.crashed.is_set()
        assert mock.legs[0].outcome is Outcome.CRASHED


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_unreachable_prefill(pair: Pair, path: str) -> None:
    answer = await pair.second(UNREACHABLE, path)
    assert answer.status == 500
    if path == MESSAGES:
        problem = {"type": "InternalServerError", "message": "Internal server error"}
        assert answer.json == {"type": "error", "error": problem}
    else:
        assert answer.json == FAILED
    assert pair.kv() == "failed"


async def test_an_unreachable_prefill_in_a_stream(pair: Pair) -> None:
    answer = await pair.second(UNREACHABLE, stream=True)
    assert answer.status == 200
    assert answer.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.events[1:] == [FAILED, "[DONE]"]
    for path in (COMPLETIONS, GENERATE):
        assert (await pair.second(UNREACHABLE, path, stream=True)).events == [FAILED, "[DONE]"]
    answer = await pair.second(UNREACHABLE, MESSAGES, stream=True)
    assert [event["type"] for event in answer.events] == ["message_start", "error"]
    given = "{'error': {'message': 'In...am': None, 'code': 500}}"
    assert f"model\n  Field required [type=missing, input_value={given}," in answer.events[1]["error"]["message"]
    answer = await pair.second(UNREACHABLE, RESPONSES, stream=True)
    assert [event["type"] for event in answer.events] == ["response.created", "response.in_progress"]
    assert not answer.complete


async def test_an_unreachable_prefill_may_be_recomputed(pair: Pair) -> None:
    async with VllmMock("decode", recompute=True, load_failure_delay=0) as decode:
        answer = await ask(decode, CHAT, REQUESTS[CHAT] | {"kv_transfer_params": UNREACHABLE})
        assert text_of(answer) == text_of(await ask(pair.aggregated, CHAT, REQUESTS[CHAT]))
        assert decode.legs[-1].kv == "recomputed"


async def test_another_engine_id_fails(pair: Pair) -> None:
    params = await pair.params()
    assert (await pair.second({**params, "remote_engine_id": "other"})).status == 500
    assert pair.prefill.pinned


@pytest.mark.parametrize("unlike", [{"version": "0.31.0"}, {"root": "/models/other"}, {"cache_dtype": "fp8"}])
async def test_an_engine_that_is_configured_otherwise_is_not_fetched_from(pair: Pair, unlike: dict[str, Any]) -> None:
    """At once, and P is told nothing."""
    body = REQUESTS[CHAT] | {"kv_transfer_params": await pair.params()}
    async with VllmMock("decode", **unlike) as decode:
        assert (await ask(decode, "/version")).json == {"version": unlike.get("version", "0.32.0")}
        assert (await ask(decode, CHAT, body)).status == 500
        assert pair.prefill.pinned
    async with VllmMock("decode", enforce_handshake_compat=False, **unlike) as decode:
        assert (await ask(decode, CHAT, body)).status == 200
        assert decode.legs[-1].kv == "transferred"


async def test_with_another_block_size_the_text_is_wrong(pair: Pair) -> None:
    body = REQUESTS[CHAT] | {"kv_transfer_params": await pair.params()}
    async with VllmMock("decode", block_size=32) as decode:
        assert (await ask(decode, CHAT, body)).status == 200
        assert decode.legs[-1].kv == "foreign"
        metrics = (await ask(decode, "/metrics")).body
    assert layout_of(metrics) == {"block_size": "32", "kv_cache_dtype": "auto"}


async def test_a_late_read_is_counted(pair: Pair) -> None:
    params = await pair.params()
    for _ in range(2):
        await pair.second(params)
    assert metric(await ask(pair.prefill, "/metrics"), "nixl_num_notifications_after_expiry_total") == 1


async def test_another_request_id_reads_but_frees_nothing(pair: Pair) -> None:
    params = await pair.params()
    assert (await pair.second({**params, "remote_request_id": "with space"})).status == 200
    assert pair.kv() == "transferred"
    assert pair.prefill.pinned


async def test_a_prefill_that_died(pair: Pair) -> None:
    params = await pair.params()
    pair.prefill.crash()
    assert (await pair.second(params)).status == 500
    other = await pair.second(None)
    assert other.status == 200


async def test_decode_parameters_on_a_producer() -> None:
    async with VllmMock("prefill") as first, VllmMock("prefill", load_failure_delay=0) as second:
        body = one_token(CHAT, REQUESTS[CHAT])
        params = (await ask(first, CHAT, body | {"kv_transfer_params": PREFILL})).json["kv_transfer_params"]
        answer = await ask(second, CHAT, body | {"kv_transfer_params": params})
        assert (answer.status, answer.json) == (500, FAILED)


async def test_prompt_logprobs_are_computed_where_they_are_asked_for(pair: Pair) -> None:
    answer = await pair.both(CHAT, REQUESTS[CHAT] | {"prompt_logprobs": 1})
    assert len(answer.json["prompt_logprobs"]) == answer.json["usage"]["prompt_tokens"]
    assert pair.kv() == "recomputed"
    await pair.prefill.freed()
    assert pair.decode.external_hits == 0


# --- refusals and leaving clients free the prefill's blocks ---


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"model": "nope"}, 404),
        (CHAT, {"min_tokens": 9}, 400),
        (COMPLETIONS, {"max_tokens": 0}, 400),
        (MESSAGES, {"model": "nope"}, 404),
        (RESPONSES, {"max_output_tokens": 0}, 400),
    ],
)
async def test_a_refused_decode_frees(pair: Pair, path: str, fields: dict[str, Any], status: int) -> None:
    params = await pair.params(path)
    assert (await pair.second(params, path, **fields)).status == status
    await pair.prefill.freed()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (GENERATE, {"model": "nope"}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"max_tokens": "x"}),
        (MESSAGES, {"max_tokens": 0}),
    ],
)
async def test_refusals_that_free_nothing(pair: Pair, path: str, fields: dict[str, Any]) -> None:
    params = await pair.params(path)
    assert (await pair.second(params, path, **fields)).status in {400, 404}
    assert pair.prefill.pinned


async def test_a_refused_decode_dies_of_incomplete_parameters(pair: Pair, dial: Dial) -> None:
    call = await dial(pair.decode)
    params = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    call.send("POST", CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params, "model": "nope"})
    await call.ended()
    assert pair.decode.crashed.is_set()


async def test_a_decode_whose_client_leaves_frees(pair: Pair, dial: Dial) -> None:
    pair.decode.fail(Fault(delay_token=30))
    params = await pair.params()
    call = await dial(pair.decode)
    call.send("POST", CHAT, REQUESTS[CHAT] | {"kv_transfer_params": params})
    await pair.prefill.freed()
    await call.close()
    await pair.decode.idle()
    assert pair.decode.engine.blocks.usage == 0


async def test_abort_by_id(pair: Pair, dial: Dial) -> None:
    pair.aggregated.fail(Fault(delay_token=30))
    call = await dial(pair.aggregated)
    call.send("POST", CHAT, REQUESTS[CHAT], {"x-request-id": "mine"})
    await pair.aggregated.received()
    ids = {"request_ids": ["chatcmpl-mine"]}
    assert (await ask(pair.aggregated, "/inference/v1/abort_requests", ids)).status == 200
    answer = await call.answer()
    assert answer.json["choices"][0]["finish_reason"] == "abort"


# --- what a text is limited by ---


@pytest.mark.parametrize(
    ("fields", "finish", "stop", "tokens"),
    [
        ({"max_tokens": 3}, "length", None, 3),
        ({"max_tokens": 100}, "stop", None, 16),
        ({"max_tokens": 40, "ignore_eos": True}, "length", None, 40),
        ({"max_tokens": 40, "min_tokens": 30}, "stop", None, 30),
        ({"max_completion_tokens": 2, "max_tokens": 9}, "length", None, 2),
        ({"stop": ["never", " "]}, "stop", " ", 1),
        ({"stop_token_ids": list(range(4096))}, "stop", int, 1),
    ],
)
async def test_what_ends_a_text(pair: Pair, fields: dict[str, Any], finish: str, stop: Any, tokens: int) -> None:
    answer = (await ask(pair.aggregated, CHAT, {**REQUESTS[CHAT], **fields})).json
    choice = answer["choices"][0]
    assert choice["finish_reason"] == finish
    assert isinstance(choice["stop_reason"], int) if stop is int else choice["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] == tokens


async def test_the_budget_is_cut_to_the_context() -> None:
    async with VllmMock("aggregated", max_model_len=20) as small:
        body = REQUESTS[COMPLETIONS] | {"prompt": list(range(5, 20)), "ignore_eos": True, "max_tokens": 20}
        assert (await ask(small, COMPLETIONS, body)).json["usage"]["total_tokens"] == 20
        assert (await ask(small, COMPLETIONS, body | {"max_tokens": 21})).status == 400
        assert (await ask(small, COMPLETIONS, body | {"prompt": list(range(5, 25))})).status == 400


async def test_a_prompt_is_cut_at_its_beginning_and_a_leg_of_one_token_leaves_room_for_it() -> None:
    ids = list(range(5, 45))
    async with VllmMock("aggregated", max_model_len=20) as small:

        async def prompt_tokens(path: str, **fields: Any) -> Any:
            answer = await ask(small, path, REQUESTS[path] | fields)
            assert answer.status == 200, answer.body
            usage = answer.json["usage"]
            return usage["input_tokens" if path == RESPONSES else "prompt_tokens"]

        fit = {"prompt": ids, "truncate_prompt_tokens": -1}
        assert await prompt_tokens(COMPLETIONS, **fit) == 19
        assert await prompt_tokens(COMPLETIONS, **fit, echo=True, max_tokens=0) == 20
        assert await prompt_tokens(COMPLETIONS, prompt=ids, truncate_prompt_tokens="7") == 7
        kept = REQUESTS[COMPLETIONS] | {"prompt": ids, "truncate_prompt_tokens": 7, "return_token_ids": True}
        assert (await ask(small, COMPLETIONS, kept)).json["choices"][0]["prompt_token_ids"] == ids[-7:]
        long = [{"role": "user", "content": "many words " * 20}]
        assert await prompt_tokens(CHAT, messages=long, truncate_prompt_tokens="-1") == 19
        assert await prompt_tokens(RESPONSES, input="many words " * 20, truncation="auto") == 19
        assert (await ask(small, CHAT, REQUESTS[CHAT] | {"messages": long})).status == 400
        for path, fields in [
            (CHAT, {"truncate_prompt_tokens": 21}),
            (COMPLETIONS, {"truncate_prompt_tokens": -2}),
            (RESPONSES, {"truncation": "maybe"}),
            (RESPONSES, {"truncation": None}),  # which the request may say, but not the answer
        ]:
            assert (await ask(small, path, REQUESTS[path] | fields)).status == 400


async def test_samples_differ_and_need_a_temperature(pair: Pair) -> None:
    body = REQUESTS[CHAT] | {"n": 2}
    texts = [choice["message"]["content"] for choice in (await ask(pair.aggregated, CHAT, body)).json["choices"]]
    assert texts[0] != texts[1]
    assert (await ask(pair.aggregated, CHAT, body | {"temperature": 0})).status == 400
    beams = REQUESTS[COMPLETIONS] | {"n": 2, "temperature": 0, "use_beam_search": True}
    assert len((await ask(pair.aggregated, COMPLETIONS, beams)).json["choices"]) == 2
    assert (await ask(pair.aggregated, COMPLETIONS, beams | {"stream": True})).status == 400


async def test_echo_without_an_answer(pair: Pair) -> None:
    body = REQUESTS[COMPLETIONS] | {"max_tokens": 0, "echo": True}
    answer = await ask(pair.aggregated, COMPLETIONS, body)
    assert text_of(answer) == "Once upon"
    assert answer.json["usage"]["completion_tokens"] == 1


# --- ids, kept responses, streams, faults ---


@pytest.mark.parametrize(
    ("path", "fields", "headers", "expected"),
    [
        (CHAT, {}, {"x-request-id": "abc"}, "chatcmpl-abc"),
        (CHAT, {"request_id": "body"}, {}, "chatcmpl-body"),
        (COMPLETIONS, {"request_id": "body"}, {"x-request-id": "abc"}, "cmpl-abc"),
        (MESSAGES, {}, {"x-request-id": "abc"}, "chatcmpl-abc"),
        (RESPONSES, {"request_id": "resp_mine"}, {"x-request-id": "abc"}, "resp_mine"),
        (GENERATE, {"request_id": "body"}, {}, "generate-tokens-body"),
    ],
)
async def test_ids(pair: Pair, path: str, fields: dict[str, Any], headers: dict[str, str], expected: str) -> None:
    answer = (await ask(pair.aggregated, path, {**REQUESTS[path], **fields}, headers=headers)).json
    assert answer.get("id", answer.get("request_id")) == expected


async def test_responses_are_kept_if_wished(pair: Pair) -> None:
    for stream in (False, True):
        body = REQUESTS[RESPONSES] | {"request_id": f"resp_{stream}", "stream": stream}
        await ask(pair.aggregated, RESPONSES, body)
        assert (await ask(pair.aggregated, f"{RESPONSES}/resp_{stream}")).json["status"] == "incomplete"
    cancelled = await ask(pair.aggregated, f"{RESPONSES}/resp_True/cancel", {})
    assert cancelled.json["error"]["message"] == "Cannot cancel a synchronous response."
    follow_up = REQUESTS[RESPONSES] | {"previous_response_id": "resp_True"}
    assert (await ask(pair.aggregated, RESPONSES, follow_up)).status == 200
    assert (await ask(pair.decode, RESPONSES, follow_up)).status == 404
    await ask(pair.aggregated, RESPONSES, REQUESTS[RESPONSES] | {"request_id": "resp_x", "store": False})
    assert (await ask(pair.aggregated, f"{RESPONSES}/resp_x")).status == 404
    async with VllmMock(store=False) as forgetful:
        await ask(forgetful, RESPONSES, REQUESTS[RESPONSES] | {"request_id": "resp_1"})
        assert (await ask(forgetful, f"{RESPONSES}/resp_1")).status == 404


async def test_a_streams_head_does_not_wait_for_its_first_token(dial: Dial) -> None:
    async with VllmMock(first_token_delay=30) as mock:
        call = await dial(mock)
        call.send("POST", CHAT, REQUESTS[CHAT] | {"stream": True})
        assert (await call.head()).status == 200


async def test_a_refused_stream_is_no_stream(pair: Pair) -> None:
    answer = await ask(pair.aggregated, CHAT, REQUESTS[CHAT] | {"stream": True, "min_tokens": 9})
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")


async def test_faults_come_from_the_shared_machinery(pair: Pair, dial: Dial) -> None:
    pair.decode.fail(Fault(status=503, headers=(("retry-after", "1"),)), times=1)
    answer = await pair.second(None)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    pair.decode.fail(Fault(drop=Point.MID_BODY, after_chunks=2), times=1)
    call = await dial(pair.decode)
    call.send("POST", CHAT, REQUESTS[CHAT] | {"stream": True})
    assert not (await call.answer()).complete


async def test_the_record_tells_the_rank_and_the_kv(pair: Pair) -> None:
    body = REQUESTS[CHAT] | {"kv_transfer_params": await pair.params()}
    await ask(pair.decode, CHAT, body, headers={"X-data-parallel-rank": "0"})
    assert pair.decode.legs[-1].header("x-data-parallel-rank") == "0"
    recorded = (await ask(pair.decode, "/_mock/requests")).json
    assert [(entry["rank"], entry["kv"]) for entry in recorded] == [(0, "transferred")]


async def test_many_at_once(pair: Pair) -> None:
    prompts = [f"prompt number {number}" * (number % 7 + 1) for number in range(50)]

    async def text(prompt: str) -> bool:
        body = REQUESTS[COMPLETIONS] | {"prompt": prompt}
        answer, expected = await asyncio.gather(pair.both(COMPLETIONS, body), ask(pair.aggregated, COMPLETIONS, body))
        return text_of(answer) == text_of(expected)

    assert all(await asyncio.gather(*(text(prompt) for prompt in prompts)))
    assert {record.kv for record in pair.decode.legs} == {"transferred"}
    assert pair.prefill.pinned == 0
