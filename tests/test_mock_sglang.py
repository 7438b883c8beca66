"""The SGLang mock against what the real engine (0.5.23) was seen doing."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest

from extproc.mock import Fault, Outcome, SglangMock
from extproc.mock.sglang.engine import FAKE_HOST, LARGEST_ROOM, Layout
from extproc.mock.sglang.rendezvous import Prefills, TransferError
from tests.mock_client import Answer, Call, ask, dialling
from tests.ports import silent_port

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
USER = [{"role": "user", "content": "Say hi to the world"}]
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": USER, "max_tokens": 5},
    COMPLETIONS: {"model": "tiny", "prompt": "Once upon", "max_tokens": 5},
    "/generate": {"text": "Once upon", "sampling_params": {"max_new_tokens": 5}},
    MESSAGES: {"model": "tiny", "messages": USER, "max_tokens": 5},
    RESPONSES: {"model": "tiny", "input": "Once upon", "max_output_tokens": 5},
}
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."
Dial = Callable[[SglangMock], Awaitable[Call]]


class Pair:
    """A prefill and a decode, and an aggregated worker to compare with."""

    def __init__(self, prefill: SglangMock, decode: SglangMock, regular: SglangMock) -> None:
        self.prefill = prefill
        self.decode = decode
        self.regular = regular
        self._rooms = iter(range(1, LARGEST_ROOM))

    def room(self, number: int | None = None) -> dict[str, Any]:
        """The fields that lead both legs into one room, a new one unless named."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": next(self._rooms) if number is None else number,
        }

    async def both(self, path: str, body: dict[str, Any], **fields: Any) -> tuple[Answer, Answer]:
        """Prefill's and decode's answers to one body."""
        full = {**body, **self.room(), **fields}
        return await asyncio.gather(ask(self.prefill, path, full), ask(self.decode, path, full))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    patience = {"death_delay": 0.05, "connect_timeout": 0.5}
    async with (
        SglangMock("prefill") as prefill,
        SglangMock("decode", **patience) as decode,  # type: ignore[arg-type]
        SglangMock("regular") as regular,
    ):
        yield Pair(prefill, decode, regular)


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    async with dialling() as dial:
        yield dial


def same(answer: Answer) -> str:
    """An answer without what differs from run to run."""
    text = re.sub(r'"((?:msg|resp)_)?[0-9a-f]{32}"', '"ID"', answer.body.decode())
    return re.sub(r'"(created|created_at|e2e_latency|response_sent_to_client_ts)":[0-9.e-]+', r'"\1":0', text)


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
        (CHAT, {"input_ids": [5, 6, 7]}),
        (COMPLETIONS, {"prompt": ["one", "two, longer"], "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"prompt": [5, 6, 7]}),
        (COMPLETIONS, {"prompt": [[5, 6, 7], [8]], "logprobs": 2}),
        (COMPLETIONS, {"echo": True}),
        ("/generate", {"text": ["one", "two, longer"]}),
        ("/generate", {"text": None, "input_ids": [[5, 6, 7], [8]]}),
        ("/generate", {"text": None, "input_ids": [5, 6, 7], "return_logprob": True, "top_logprobs_num": 2}),
    ],
)
async def test_decode_answers_like_an_aggregated_worker(
    pair: Pair, path: str, more: dict[str, Any], *, stream: bool
) -> None:
    body = {**REQUESTS[path], **more, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    prefill, decode = await pair.both(path, body)
    expected = await ask(pair.regular, path, body)
    assert expected.status == 200
    assert decode.status == 200
    assert sorted(same(decode).split("\n\n")) == sorted(same(expected).split("\n\n"))
    assert decode.headers.keys() == expected.headers.keys()
    assert prefill.status == 200
    assert prefill.complete


async def test_prefill_writes_one_token(pair: Pair) -> None:
    prefill, decode = await pair.both("/generate", REQUESTS["/generate"])
    assert prefill.json["output_ids"] == decode.json["output_ids"][:1]
    assert prefill.json["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    prefill, decode = await pair.both("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}})
    assert (len(prefill.json["output_ids"]), decode.json["output_ids"]) == (1, [])


async def test_each_leg_knows_its_own_part_of_the_logprobs(pair: Pair) -> None:
    options = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}
    body = {**REQUESTS["/generate"], **options, "return_text_in_logprobs": True}
    prefill, decode = (answer.json["meta_info"] for answer in await pair.both("/generate", body))
    whole = (await ask(pair.regular, "/generate", body)).json["meta_info"]
    for field in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert decode[field] == []
        assert prefill[field] == whole[field]
        assert len(whole[field]) == whole["prompt_tokens"] - 1
    assert whole["input_token_logprobs"][0][0] is None
    assert whole["input_top_logprobs"][0] is None
    for field in ("output_token_logprobs", "output_top_logprobs"):
        assert decode[field] == whole[field]
        assert prefill[field] == whole[field][:1]
    assert decode["output_token_ids_logprobs"] == [None, *whole["output_token_ids_logprobs"][1:]]
    assert prefill["output_token_ids_logprobs"] == whole["output_token_ids_logprobs"][:1]


async def test_echoed_logprobs_lack_the_prompt_on_decode(pair: Pair) -> None:
    body = {**REQUESTS[COMPLETIONS], "echo": True, "logprobs": 1}
    prefill, decode = await pair.both(COMPLETIONS, body)
    whole = (await ask(pair.regular, COMPLETIONS, body)).json["choices"][0]
    mine, first = decode.json["choices"][0], prefill.json["choices"][0]
    assert mine["text"] == whole["text"]
    assert len(mine["logprobs"]["tokens"]) == 5
    assert first["logprobs"]["tokens"][:-1] + mine["logprobs"]["tokens"] == whole["logprobs"]["tokens"]


# --- limits of a text ---


async def test_text_depends_on_prompt_and_seed_alone(pair: Pair) -> None:
    async def text(**fields: Any) -> str:
        answer = await ask(pair.regular, CHAT, {**REQUESTS[CHAT], **fields})
        return str(answer.json["choices"][0]["message"]["content"])

    assert await text() == await text()
    assert await text(seed=1) != await text(seed=2)
    assert await text(seed=1, temperature=0) == await text(seed=2, temperature=0)
    assert await text(messages=[{"role": "user", "content": "else"}]) != await text()


@pytest.mark.parametrize(
    ("fields", "finish", "matched", "tokens"),
    [
        ({"max_tokens": 3}, "length", None, 3),
        ({"max_tokens": 100}, "stop", 2, 16),
        ({"max_tokens": 40, "ignore_eos": True}, "length", None, 40),
        ({"max_completion_tokens": 2, "max_tokens": 9}, "length", None, 2),
    ],
)
async def test_what_ends_a_text(pair: Pair, fields: dict[str, Any], finish: str, matched: Any, tokens: int) -> None:
    answer = (await ask(pair.regular, CHAT, {**REQUESTS[CHAT], **fields})).json
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == (finish, matched)
    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(pair: Pair, *, stream: bool) -> None:
    whole = (await ask(pair.regular, CHAT, {**REQUESTS[CHAT], "max_tokens": 15})).json["choices"][0]
    text = whole["message"]["content"]
    stop = text[12:16]
    body = {**REQUESTS[CHAT], "max_tokens": 15, "stop": ["never", stop], "stream": stream}
    answer = await ask(pair.regular, CHAT, body)
    if stream:
        choices = [event["choices"][0] for event in answer.events[:-1]]
        got, last = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]
    else:
        last = answer.json["choices"][0]
        got = last["message"]["content"]
    assert got == text[: text.index(stop)]
    assert (last["finish_reason"], last["matched_stop"]) == ("stop", stop)


async def test_samples(pair: Pair) -> None:
    body = {**REQUESTS[COMPLETIONS], "prompt": ["one", "two"], "n": 2, "seed": 4}
    answer = (await ask(pair.regular, COMPLETIONS, body)).json
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 20
    one = (await ask(pair.regular, COMPLETIONS, {**REQUESTS[COMPLETIONS], "prompt": "two", "seed": 5})).json
    assert one["choices"][0]["text"] == texts[3]


# --- the two legs ---


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_leg_waits_for_the_other(pair: Pair, dial: Dial, first: str) -> None:
    early, late = (pair.prefill, pair.decode) if first == "prefill" else (pair.decode, pair.prefill)
    body = {**REQUESTS[CHAT], **pair.room()}
    call = await dial(early)
    call.send("POST", CHAT, body)
    (record,) = await early.received(1)
    assert (await pair.both(CHAT, REQUESTS[CHAT]))[1].status == 200  # others are not held up
    assert record.head_sent is None
    assert (await ask(late, CHAT, body)).status == 200
    assert (await call.answer()).status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_room_is_needed(pair: Pair, role: str) -> None:
    mock = getattr(pair, role)
    for path, body in REQUESTS.items():
        answer = await ask(mock, path, body)
        assert answer.status == 400
        assert NO_ROOM in answer.body.decode()
        stream = await ask(mock, path, {**body, "stream": True})
        assert stream.status == 200
        assert stream.complete
        assert NO_ROOM in stream.body.decode()
    assert (await ask(mock, CHAT, {**REQUESTS[CHAT], "rid": "r"})).json == {
        "object": "error",
        "message": f"{NO_ROOM} req.rid='r'",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    stream = await ask(mock, CHAT, {**REQUESTS[CHAT], "rid": "r", "stream": True})
    assert stream.events[0]["error"]["type"] == "BAD_REQUEST"


@pytest.mark.parametrize(
    ("path", "early"),
    [(CHAT, False), (COMPLETIONS, False), ("/generate", True), (MESSAGES, True), (RESPONSES, True)],
)
async def test_which_streams_send_their_head_early(pair: Pair, dial: Dial, path: str, *, early: bool) -> None:
    body = {**REQUESTS[path], **pair.room(), "stream": True}
    call = await dial(pair.decode)
    call.send("POST", path, body)
    (record,) = await pair.decode.received(1)
    if early:
        assert (await call.head()).status == 200
    assert (record.head_sent is not None) is early
    await ask(pair.prefill, path, body)
    await pair.decode.idle()
    assert record.outcome is Outcome.COMPLETED


async def test_lists_of_rooms_and_one_room_for_a_list(pair: Pair) -> None:
    body = {"prompt": ["one", "two", "three"], "max_tokens": 3}
    expected = [choice["text"] for choice in (await ask(pair.regular, COMPLETIONS, body)).json["choices"]]
    for rooms in ([31, 5, 77], 100):
        hosts: Any = ["127.0.0.1"] * 3 if isinstance(rooms, list) else "127.0.0.1"
        ports: Any = [pair.prefill.bootstrap_port] * 3 if isinstance(rooms, list) else pair.prefill.bootstrap_port
        fields = {"bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms}
        _, decode = await pair.both(COMPLETIONS, body, **fields)
        assert [choice["text"] for choice in decode.json["choices"]] == expected
    # the legs may spread their rooms differently: from one room, room + i is derived
    spread = {"bootstrap_room": [200, 201, 202]}
    answers = await asyncio.gather(
        ask(pair.prefill, COMPLETIONS, {**body, **pair.room(200)}),
        ask(pair.decode, COMPLETIONS, {**body, **pair.room(200), **spread}),
    )
    assert [answer.status for answer in answers] == [200, 200]


@pytest.mark.parametrize("field", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
async def test_too_short_lists(pair: Pair, field: str) -> None:
    fields = pair.room()
    fields[field] = [fields[field]]
    answer = await ask(pair.decode, COMPLETIONS, {"prompt": ["a", "b"], **fields})
    assert answer.status == 500
    assert answer.json["message"] == "Internal server error: list index out of range"
    answer = await ask(pair.decode, "/generate", {"text": ["a", "b"], **fields})
    assert (answer.status, answer.body) == (500, b"Internal Server Error")


async def test_a_room_is_free_again_after_use(pair: Pair) -> None:
    for _ in range(3):
        answers = await pair.both(CHAT, REQUESTS[CHAT], bootstrap_room=77)
        assert [answer.status for answer in answers] == [200, 200]
    assert pair.prefill.engine.bootstrap.rooms == {}


async def test_fake_host_needs_no_other_leg(pair: Pair) -> None:
    body = {**REQUESTS[CHAT], "bootstrap_host": FAKE_HOST, "bootstrap_room": 0}
    for mock in (pair.prefill, pair.decode):
        assert (await ask(mock, CHAT, body)).status == 200


async def test_legs_with_different_prompts_fail(pair: Pair) -> None:
    room = pair.room()
    other = {**REQUESTS[CHAT], "messages": [{"role": "user", "content": "else"}]}
    answers = await asyncio.gather(
        ask(pair.prefill, CHAT, {**REQUESTS[CHAT], **room}), ask(pair.decode, CHAT, {**other, **room})
    )
    assert [answer.status for answer in answers] == [500, 500]
    assert all("different prompts" in answer.json["message"] for answer in answers)


async def test_several_samples_in_one_request_never_end_on_decode(pair: Pair, dial: Dial) -> None:
    body = {**REQUESTS[CHAT], **pair.room(), "n": 2, "stream": True}
    call = await dial(pair.decode)
    call.send("POST", CHAT, body)
    await pair.decode.received(1)
    prefill = await ask(pair.prefill, CHAT, body)
    assert (prefill.status, prefill.complete) == (200, True)
    await call.head()
    await call.reader.readuntil(b"\n\n")  # one sample comes
    await pair.prefill.idle()
    assert pair.decode.live
    await call.close()
    await pair.decode.idle()
    assert pair.decode.engine.live == {}


async def test_two_decode_legs_in_one_room(pair: Pair, dial: Dial) -> None:
    body = {**REQUESTS[CHAT], **pair.room()}
    first, second = await dial(pair.decode), await dial(pair.decode)
    first.send("POST", CHAT, body)
    await pair.decode.received(1)
    second.send("POST", CHAT, body)
    await pair.decode.received(2)
    assert (await ask(pair.prefill, CHAT, body)).status == 200
    assert (await second.answer()).status == 200
    assert pair.decode.legs[0].outcome is Outcome.LIVE


# --- what the engine's process does not survive ---


@pytest.mark.parametrize(
    "fields", [{"bootstrap_host": None}, {"bootstrap_host": ["127.0.0.1"]}, {"bootstrap_room": [5]}]
)
async def test_decode_dies_of(pair: Pair, dial: Dial, fields: dict[str, Any]) -> None:
    call = await dial(pair.decode)
    call.send("POST", CHAT, {**REQUESTS[CHAT], **pair.room(), **fields})
    assert await call.ended() == b""
    assert pair.decode.crashed.is_set()


async def test_prefill_dies_of_a_room_beyond_64_bits_when_the_legs_meet(pair: Pair, dial: Dial) -> None:
    for number in (LARGEST_ROOM, LARGEST_ROOM + 1):
        body = {**REQUESTS[CHAT], **pair.room(number)}
        prefill, decode = await dial(pair.prefill), await dial(pair.decode)
        prefill.send("POST", CHAT, body)
        decode.send("POST", CHAT, body)
        if number == LARGEST_ROOM:
            assert (await prefill.answer()).status == 200
            assert (await decode.answer()).status == 200
    assert await prefill.ended() == b""
    assert pair.prefill.crashed.is_set()
    answer = await decode.answer()
    assert answer.status == 500
    assert "Lost connection with prefill instance" in answer.json["message"]


async def test_room_zero_is_lost_on_decode_and_kills_it_the_second_time(pair: Pair, dial: Dial) -> None:
    body = {**REQUESTS[CHAT], **pair.room(0)}
    call = await dial(pair.decode)
    call.send("POST", CHAT, body)
    assert (await ask(pair.prefill, CHAT, body)).status == 200
    assert pair.decode.live
    second = await dial(pair.decode)
    second.send("POST", CHAT, body)
    assert await second.ended() == b""
    assert pair.decode.crashed.is_set()


async def test_negative_room(pair: Pair) -> None:
    prefill, decode = await pair.both(CHAT, REQUESTS[CHAT], bootstrap_room=-5)
    assert prefill.status == 200
    assert decode.status == 500
    assert decode.json["message"] == "Metadata corruption detected - bootstrap_room mismatch"


# --- one leg fails ---


async def test_dead_prefill_shows_at_decode_after_a_while(pair: Pair, dial: Dial) -> None:
    call = await dial(pair.decode)
    call.send("POST", CHAT, {**REQUESTS[CHAT], **pair.room(), "rid": "r"})
    await pair.decode.received(1)
    await ask(pair.prefill, CHAT, {**REQUESTS[CHAT], **pair.room(), "bootstrap_host": FAKE_HOST})
    await _connected(pair)
    pair.prefill.crash()
    answer = await call.answer()
    assert answer.status == 500
    assert answer.json["type"] == "500"
    assert answer.json["message"].startswith("Decode transfer failed for request rank=0 decode_req.req.rid='r'")
    assert "Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:" in answer.json["message"]


async def _connected(pair: Pair) -> None:
    """Wait until the decode's leg has arrived in a room of the prefill."""
    async with asyncio.timeout(60):
        while not any(room.decode for room in pair.prefill.engine.bootstrap.rooms.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_dead_decode_connects_to_nobody(pair: Pair) -> None:
    await pair.both(CHAT, REQUESTS[CHAT])
    assert len(pair.prefill.engine.bootstrap.peers) == 1
    pair.decode.crash()
    with pytest.raises(TransferError):  # a leg of a batch may ask after the end, before it is told of it
        await pair.decode.engine.prefills.peer(("127.0.0.1", pair.prefill.bootstrap_port))
    async with asyncio.timeout(60):
        while pair.prefill.engine.bootstrap.peers:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_at_the_bootstrap_port(pair: Pair, *, stream: bool) -> None:
    with silent_port() as port:
        body = {**REQUESTS["/generate"], **pair.room(), "bootstrap_port": port, "stream": stream}
        answer = await ask(pair.decode, "/generate", body)
    if stream:
        finish = answer.events[0]["meta_info"]["finish_reason"]
        assert (answer.status, finish["type"], finish["status_code"]) == (200, "abort", 500)
        message = finish["message"]
    else:
        assert (answer.status, answer.json["code"]) == (500, 500)
        message = answer.json["message"]
    assert message.startswith("Decode handshake failed for request rank=0")


async def test_a_leg_gives_up_in_the_end() -> None:
    async with SglangMock("prefill", wait_timeout=0.05) as prefill:
        body = {**REQUESTS[CHAT], "bootstrap_host": "127.0.0.1", "bootstrap_room": 5}
        answer = await ask(prefill, CHAT, body)
        assert answer.status == 500
        assert "timed out after 0.1s" in answer.json["message"]
        assert prefill.engine.bootstrap.rooms == {}


@pytest.mark.parametrize(
    ("path", "status", "stream_shows"),
    [
        (CHAT, 500, '"type": "INTERNAL_SERVER_ERROR"'),
        (COMPLETIONS, 500, '"type": "INTERNAL_SERVER_ERROR"'),
        ("/generate", 500, '"status_code":500'),
        (MESSAGES, 500, "event: error"),
        (RESPONSES, 400, "event: response.failed"),
    ],
)
async def test_how_a_failed_leg_looks(pair: Pair, path: str, status: int, stream_shows: str) -> None:
    body = {**REQUESTS[path], **pair.room(-5)}
    prefill, decode = await asyncio.gather(ask(pair.prefill, path, body), ask(pair.decode, path, body))
    assert (prefill.status, decode.status) == (200, status)
    body = {**body, "stream": True, "bootstrap_room": -6}
    _, decode = await asyncio.gather(ask(pair.prefill, path, body), ask(pair.decode, path, body))
    assert (decode.status, decode.complete) == (200, True)
    assert stream_shows in decode.body.decode()


# --- aborts and disconnects ---


async def test_abort_of_a_waiting_decode_fails_the_prefill_that_comes_later(pair: Pair, dial: Dial) -> None:
    body = {**REQUESTS[CHAT], **pair.room(), "rid": "r1"}
    call = await dial(pair.decode)
    call.send("POST", CHAT, body)
    await pair.decode.received(1)
    await _connected(pair)
    assert (await ask(pair.decode, "/abort_request", {"rid": "r1"})).status == 200
    answer = await call.answer()
    assert answer.status == 500
    assert answer.json["message"].startswith("Decode transfer failed for request rank=0 decode_req.req.rid='r1'")
    assert answer.json["message"].endswith("Aborted by AbortReq.")
    await _dropped(pair)
    late = await ask(pair.prefill, CHAT, body)
    assert late.status == 500
    assert late.json["message"].endswith("Failed due to an unknown reason from another rank")
    assert (await pair.both(CHAT, REQUESTS[CHAT], bootstrap_room=body["bootstrap_room"]))[1].status == 200


async def _dropped(pair: Pair) -> None:
    async with asyncio.timeout(60):
        while not pair.prefill.engine.bootstrap.dropped:  # noqa: ASYNC110 - happens in the mock's event loop callback
            await asyncio.sleep(0)


async def test_abort_of_a_waiting_prefill_leaves_the_decode_waiting(pair: Pair, dial: Dial) -> None:
    body = {**REQUESTS[CHAT], **pair.room(), "rid": "r1"}
    prefill, decode = await dial(pair.prefill), await dial(pair.decode)
    prefill.send("POST", CHAT, body)
    await pair.prefill.received(1)
    await ask(pair.prefill, "/abort_request", {"rid": "r1"})
    answer = await prefill.answer()
    assert answer.status == 500
    assert answer.json["message"].startswith("Prefill bootstrap failed for request rank=0 req.rid='r1'")
    decode.send("POST", CHAT, body)
    await pair.decode.received(1)
    await _connected(pair)
    assert pair.decode.live
    assert (await ask(pair.prefill, CHAT, body)).status == 200
    assert (await decode.answer()).status == 200


async def test_abort_during_the_prefill(pair: Pair, dial: Dial) -> None:
    pair.prefill.fail(Fault(delay_first_token=60))
    for aborted in (pair.prefill, pair.decode):
        body = {**REQUESTS[CHAT], **pair.room(), "rid": "r1"}
        prefill, decode = await dial(pair.prefill), await dial(pair.decode)
        prefill.send("POST", CHAT, body)
        decode.send("POST", CHAT, body)
        await _connected(pair)
        await ask(aborted, "/abort_request", {"rid": "r1"})
        if aborted is pair.prefill:
            assert (await prefill.answer()).status == 500
            assert pair.decode.live  # nobody tells it
            await decode.close()
            await pair.decode.idle()
        else:
            assert (await decode.answer()).status == 500
            await prefill.close()
            await pair.prefill.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_of_a_running_request_keeps_what_was_written(pair: Pair, dial: Dial, *, stream: bool) -> None:
    pair.regular.fail(Fault(delay_token=0.02, tokens=1000))
    call = await dial(pair.regular)
    call.send("POST", CHAT, {**REQUESTS[CHAT], "max_tokens": 900, "rid": "run", "stream": stream})
    await pair.regular.received(1)
    await asyncio.sleep(0.1)
    await ask(pair.regular, "/abort_request", {"rid": "run"})
    answer = await call.answer()
    choice = answer.events[-2]["choices"][0] if stream else answer.json["choices"][0]
    assert (answer.status, choice["finish_reason"]) == (200, "abort")
    if not stream:
        assert 0 < answer.json["usage"]["completion_tokens"] < 900


async def test_which_requests_an_abort_ends(pair: Pair, dial: Dial) -> None:
    pair.regular.fail(Fault(delay_first_token=60))
    calls = {}
    for name, body in {
        "a": {"text": "x", "rid": "a"},
        "ab": {"text": "x", "rid": "ab"},
        "b": {"text": ["x", "y"], "rid": "b"},
        "c": {"text": "x", "rid": "c"},
    }.items():
        calls[name] = await dial(pair.regular)
        calls[name].send("POST", "/generate", body)
    await pair.regular.received(4)
    assert set(pair.regular.engine.live) == {"a", "ab", "b_0", "b_1", "c"}
    for rid in ("b", "x", "", None):  # not the id of a live request
        assert (await ask(pair.regular, "/abort_request", {"rid": rid})).status == 200
    assert len(pair.regular.live) == 4
    await ask(pair.regular, "/abort_request", {"rid": "a"})  # and all whose ids begin so
    for name in ("a", "ab"):
        assert (await calls[name].answer()).json["meta_info"]["finish_reason"]["type"] == "abort"
    assert set(pair.regular.engine.live) == {"b_0", "b_1", "c"}
    await ask(pair.regular, "/abort_request", {"abort_all": True})
    await pair.regular.idle()
    assert (await ask(pair.regular, "/abort_request")).status == 405
    assert (await ask(pair.regular, "/abort_request", b"")).status == 400


async def test_a_client_that_leaves_frees_id_and_room(pair: Pair, dial: Dial) -> None:
    for mock in (pair.decode, pair.prefill):
        body = {**REQUESTS[CHAT], **pair.room(), "rid": "r1"}
        call = await dial(mock)
        call.send("POST", CHAT, body)
        await mock.received(1)
        assert (await ask(mock, CHAT, {**body, **pair.room()})).json["message"] == "Duplicate request ID detected: r1"
        await call.close()
        await mock.idle()
        assert mock.engine.live == {}
        mock.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_silence_is_noticed_late(dial: Dial, *, stream: bool) -> None:
    async with SglangMock("prefill", disconnect_delay=60) as prefill:
        body = {**REQUESTS[CHAT], "bootstrap_host": "127.0.0.1", "bootstrap_room": 5, "rid": "r1", "stream": stream}
        call = await dial(prefill)
        call.send("POST", CHAT, body)
        await prefill.received(1)
        await call.close()
        await prefill.idle()
        assert prefill.legs[0].outcome is Outcome.CLIENT_CLOSED
        assert (await ask(prefill, CHAT, body)).json["message"] == "Duplicate request ID detected: r1"
        await ask(prefill, "/abort_request", {"rid": "r1"})
        await asyncio.sleep(0)
        assert prefill.engine.live == {}
        assert prefill.engine.bootstrap.rooms == {}


async def test_the_engine_notices_in_the_end(dial: Dial) -> None:
    async with SglangMock("regular", disconnect_delay=0.5, first_token_delay=60) as mock:
        call = await dial(mock)
        call.send("POST", CHAT, REQUESTS[CHAT])
        await mock.received(1)
        await call.close()
        await mock.idle()
        assert mock.engine.live
        async with asyncio.timeout(60):
            while mock.engine.live:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)


async def test_disconnect_delay_changes_no_answer() -> None:
    async with SglangMock("regular", disconnect_delay=60) as mock:
        for stream in (False, True):
            assert (await ask(mock, CHAT, {**REQUESTS[CHAT], "stream": stream})).complete
            answer = await ask(mock, COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
            assert (answer.status, answer.complete) == (200, True)
        assert mock.engine.live == {}


async def test_duplicate_ids_in_a_stream(pair: Pair, dial: Dial) -> None:
    pair.regular.fail(Fault(delay_first_token=60), times=1)
    call = await dial(pair.regular)
    call.send("POST", "/generate", {"text": "x", "rid": "r"})
    await pair.regular.received(1)
    chat = await ask(pair.regular, CHAT, {**REQUESTS[CHAT], "rid": "r", "stream": True})
    assert chat.status == 400
    native = await ask(pair.regular, "/generate", {"text": "x", "rid": "r", "stream": True})
    assert native.status == 200
    problem = {"message": "Duplicate request ID detected: r", "type": "invalid_request_error"}
    assert native.events == [{"error": {**problem, "code": 400, "retryable": False}}, "[DONE]"]


# --- what is refused ---


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, b"{bad", 400, "JSON decode error"),
        (CHAT, b"", 400, "Field required"),
        (CHAT, {"model": "tiny"}, 400, "'loc': ('body', 'messages'), 'msg': 'Field required'"),
        (CHAT, {"messages": "x"}, 400, "Input should be a valid list"),
        (CHAT, {"messages": []}, 400, "Messages cannot be empty."),
        (CHAT, {"messages": USER, "n": "x"}, 400, "'int_parsing', 'loc': ('body', 'n')"),
        (
            CHAT,
            {"messages": USER, "temperature": -1},
            400,
            "must be a non-negative finite number, got -1.0.",
        ),
        (CHAT, {"messages": USER, "max_tokens": -1}, 400, "max_new_tokens must be at least 0, got -1."),
        (CHAT, {"messages": USER, "bootstrap_host": 5}, 400, "2 validation errors"),
        (CHAT, {"messages": USER, "bootstrap_room": 1.5}, 400, "fractional part"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600_000}]}, 400, "is longer than the model's context"),
        (COMPLETIONS, {}, 400, "'loc': ('body', 'prompt')"),
        (COMPLETIONS, {"prompt": ""}, 400, "Prompt cannot be empty"),
        (COMPLETIONS, {"prompt": []}, 400, "Prompt cannot be empty"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, 400, "validation errors"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be positive"),
        ("/generate", {}, 400, "Either text, input_ids or input_embeds should be provided."),
        ("/generate", {"input_ids": []}, 400, "input_ids cannot be empty."),
        ("/generate", {"text": ["a", "b"], "rid": ["x"]}, 400, "rids length mismatch with the batch_size"),
        (
            "/generate",
            {"text": ["a", "b"], "rid": ["x", "x"]},
            400,
            "Duplicate request IDs detected within",
        ),
        ("/generate", {"text": "a", "rid": ["x"]}, 500, "Internal Server Error"),
        ("/generate", {"text": "a", "rid": 5}, 400, "2 validation errors"),
        ("/generate", {"text": "a", "routed_dp_rank": 3}, 400, "routed_dp_rank=3 out of range [0, 1)"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"zzz": 1}, "stream": True},
            400,
            "unknown field `zzz`",
        ),
        (MESSAGES, {"model": "tiny", "messages": USER}, 400, '"message":"max_tokens: Field required"'),
        (MESSAGES, {"model": "tiny", "max_tokens": 3}, 400, '"message":"messages: Field required"'),
        (RESPONSES, {"model": "tiny"}, 400, '"type":"Bad Request"'),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "Query cannot be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, 400, "should be larger than 0"),
        ("/v1/embeddings", {"input": "x"}, 404, "Not Found"),
        ("/rerank", {"query": "a", "documents": ["a"]}, 404, "Not Found"),
    ],
)
async def test_refusals(pair: Pair, path: str, body: Any, status: int, message: str) -> None:
    answer = await ask(pair.regular, path, body)
    assert answer.status == status
    assert message in answer.body.decode()
    assert not pair.regular.engine.live


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "unknown": {"field": 1}}),
        (CHAT, {"messages": USER, "max_tokens": "7"}),
        (CHAT, {"messages": USER, "model": "another"}),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}),
        ("/generate", {"text": "", "model": "x"}),
        ("/generate", {"text": "a", "input_ids": [1]}),
        ("/generate", {"text": []}),
    ],
)
async def test_what_is_tolerated(pair: Pair, path: str, body: Any) -> None:
    assert (await ask(pair.regular, path, body)).status == 200


async def test_content_type_and_method(pair: Pair) -> None:
    plain = {"content-type": "text/plain"}
    answer = await ask(pair.regular, CHAT, REQUESTS[CHAT], headers=plain)
    assert answer.status == 400
    assert "Only 'application/json' is allowed" in answer.json["message"]
    assert (await ask(pair.regular, "/generate", {"text": "x"}, headers=plain)).status == 200
    answer = await ask(pair.regular, CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert (await ask(pair.regular, CHAT, REQUESTS[CHAT], "PUT")).status == 405
    assert (await ask(pair.regular, "/version")).status == 404


# --- the rest ---


async def test_what_the_engine_tells_about_itself(pair: Pair) -> None:
    (card,) = (await ask(pair.prefill, "/v1/models")).json["data"]
    assert (card["id"], card["owned_by"]) == ("tiny", "sglang")
    assert (await ask(pair.prefill, "/v1/models/tiny")).json["id"] == "tiny"
    missing = await ask(pair.prefill, "/v1/models/x")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
    for role, mock in {"prefill": pair.prefill, "decode": pair.decode, "null": pair.regular}.items():
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            assert (await ask(mock, path)).json["disaggregation_mode"] == role
    told = (await ask(pair.prefill, "/server_info")).json
    assert told["disaggregation_bootstrap_port"] == pair.prefill.bootstrap_port
    assert told["version"] == "0.5.23"
    for path in ("/health", "/health_generate", "/ready", "/ping", "/flush_cache", "/metrics"):
        assert (await ask(pair.prefill, path)).status == 200
    assert (await ask(pair.prefill, "/get_load")).status == 404
    assert (await ask(pair.prefill, "/")).json == "SGLang is running"


async def test_the_layout_of_the_cache_is_told() -> None:
    layout = Layout(page_size=64, attention_backend="fa3", disaggregation_transfer_backend="nixl")
    async with SglangMock("prefill", layout=layout) as mock:
        told = (await ask(mock, "/server_info")).json
    assert {name: told[name] for name in asdict(layout)} == asdict(layout)


@pytest.mark.parametrize("unlike", [{"page_size": 64}, {"kv_cache_dtype": "fp8_e4m3"}])
async def test_a_decode_dies_of_a_prefill_whose_cache_is_another(dial: Dial, unlike: dict[str, Any]) -> None:
    """Its scheduler does not survive the difference (0.5.23, disaggregation/common/conn.py)."""
    async with SglangMock("prefill", layout=Layout(**unlike)) as prefill, SglangMock("decode") as decode:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 7}
        call = await dial(decode)
        call.send("POST", "/generate", {"text": "a", **room})
        assert await call.ended() == b""
        assert decode.crashed.is_set()
        assert not prefill.crashed.is_set()


async def test_what_the_engine_does_not_compare_is_no_harm() -> None:
    layout = Layout(attention_backend="fa3", dtype="bfloat16")
    async with SglangMock("prefill", layout=layout) as prefill, SglangMock("decode") as decode:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 7}
        answers = await asyncio.gather(*(ask(mock, "/generate", {"text": "a", **room}) for mock in (prefill, decode)))
    assert [answer.status for answer in answers] == [200, 200]


async def test_loads(pair: Pair, dial: Dial) -> None:
    call = await dial(pair.decode)
    call.send("POST", CHAT, {**REQUESTS[CHAT], **pair.room()})
    await pair.decode.received(1)
    (load,) = (await ask(pair.decode, "/v1/loads")).json["loads"]
    assert (load["num_running_reqs"], load["disaggregation"]["mode"]) == (1, "decode")
    (core,) = (await ask(pair.decode, "/v1/loads?include=core")).json["loads"]
    assert "queues" not in core


async def test_count_tokens_and_rerank(pair: Pair) -> None:
    body = {"model": "tiny", "messages": USER}
    count = (await ask(pair.prefill, "/v1/messages/count_tokens", body)).json
    chat = await ask(pair.regular, MESSAGES, {**body, "max_tokens": 1})
    assert count == {"input_tokens": chat.json["usage"]["input_tokens"]}
    ranked = (await ask(pair.prefill, "/v1/rerank", {"query": "q", "documents": ["a", "b", "c"], "top_n": 2})).json
    assert len(ranked) == 2
    assert ranked[0]["score"] >= ranked[1]["score"]
    assert {"a", "b", "c"} > {entry["document"] for entry in ranked}


async def test_the_bootstrap_port_has_a_health_check(pair: Pair) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.prefill.bootstrap_port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await writer.wait_closed()


async def test_answers_look_like_uvicorn(pair: Pair) -> None:
    answer = await ask(pair.regular, CHAT, REQUESTS[CHAT])
    assert list(answer.headers) == ["date", "server", "content-length", "content-type", "vary"]
    assert answer.headers["server"] == "uvicorn"
    stream = await ask(pair.regular, CHAT, {**REQUESTS[CHAT], "stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.events[0]["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    assert stream.body.endswith(b"data: [DONE]\n\n")
    assert json.loads(stream.chunks[0].removeprefix(b"data: ").split(b"\n")[0])["object"] == "chat.completion.chunk"


async def test_a_prefill_that_nobody_waits_for_any_more_may_be_out_of_reach() -> None:
    loop, unheard = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    prefills = Prefills("1 auto", death_delay=1, connect_patience=0.05)
    asking = asyncio.create_task(prefills.peer(("127.0.0.1", 1)))
    await asyncio.sleep(0)
    tasks = {asking, *prefills._peers.values()}
    asking.cancel()
    del asking
    await asyncio.wait(tasks)
    tasks.clear()
    gc.collect()
    assert unheard == []
