"""Every flow between gRPC workers through a real Envoy, with mocks that are as strict as the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http_client import CutError, Reply
from product import PROMPT, soon
from rpc_strict import FLOWS, RECEIVING, WORDS, StrictProduct

from extproc.mock import Fault, Point, Rule
from extproc.mock.engine import Pace
from extproc.mock.generation import logprob
from extproc.mock.rpc import model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
SLOW = Pace(token=0.01, tokens=1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(FLOWS))
async def running(request: pytest.FixtureRequest) -> AsyncIterator[StrictProduct]:
    async with StrictProduct(request.param, disable_retries=True) as made:
        yield made


def contents(reply: Reply) -> str:
    """The text of a chat, streamed or not."""
    if reply.header("content-type") == "application/json":
        return str(reply.json["choices"][0]["message"]["content"])
    assert reply.events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in reply.events[:-1]]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


both = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])


class TestAnswers:
    @both
    async def test_chat(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        reply = await flow.post(CHAT_PATH, body)
        assert reply.status == 200, reply.body
        ids = flow.chat_ids("hello")
        assert contents(reply) == flow.text(ids, max_new_tokens=12)
        prefill, decode = flow.legs
        assert list(prefill.message.tokenized.input_ids) == list(decode.message.tokenized.input_ids) == ids
        assert decode.message.stream is body.get("stream", False)
        if flow.engine == "vllm":
            assert decode.kv == "transferred"
        said = json.loads(reply.events[-2]) if "stream" in body else reply.json
        usage = said["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 12)

    async def test_it_ends_by_itself(self, flow: StrictProduct) -> None:
        body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
        choice = (await flow.post(CHAT_PATH, body)).json["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", flow.text(flow.chat_ids("hello")))

    @pytest.mark.parametrize(
        ("fields", "limits"),
        [
            ({"max_tokens": 40, "ignore_eos": True}, {"max_new_tokens": 40, "ignore_eos": True}),
            ({"max_tokens": 50, "min_tokens": 40}, {"max_new_tokens": 50, "min_tokens": 40}),
            ({"max_tokens": 1}, {"max_new_tokens": 1}),
        ],
    )
    @both
    async def test_lengths(
        self, flow: StrictProduct, body: dict[str, Any], fields: dict[str, Any], limits: dict[str, Any]
    ) -> None:
        reply = await flow.post(CHAT_PATH, body | fields)
        assert contents(reply) == flow.text(flow.chat_ids("hello"), **limits)

    @both
    async def test_a_stop_string(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        whole = flow.text(flow.chat_ids("hello"))
        stop = whole[20:24]
        reply = await flow.post(CHAT_PATH, body | {"max_tokens": 1000, "ignore_eos": True, "stop": ["nowhere", stop]})
        assert contents(reply) == whole[: whole.index(stop)]

    @both
    async def test_a_stop_token(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        ids = flow.written(flow.chat_ids("hello"))
        reply = await flow.post(CHAT_PATH, body | {"stop_token_ids": [ids[4]]})
        assert contents(reply) == model.decoded(ids[: ids.index(ids[4])])

    @both
    async def test_logprobs(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        reply = await flow.post(CHAT_PATH, body | {"logprobs": True, "top_logprobs": 2})
        ids = flow.written(flow.chat_ids("hello"), max_new_tokens=12)
        said = [json.loads(event) for event in reply.events[:-1]] if "stream" in body else [reply.json]
        found = [
            entry
            for chunk in said
            for choice in chunk["choices"]
            for entry in (choice.get("logprobs") or {"content": []})["content"]
        ]
        assert [entry["logprob"] for entry in found] == pytest.approx([logprob(token) for token in ids])
        assert b"".join(bytes(entry["bytes"]) for entry in found) == b"".join(model.pieces()[token] for token in ids)
        assert {len(entry["top_logprobs"]) for entry in found} == {2}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_lists_and_samples_are_one_pair_each(self, flow: StrictProduct, stream: bool) -> None:  # noqa: FBT001
        prompts = ["def foo(", "Grüße, 日本 🙂"]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 9}
        body |= {"stream": stream, "temperature": 0.7}
        reply = await flow.post(COMPLETIONS_PATH, body)
        assert reply.status == 200, reply.body
        texts: dict[int, str] = {}
        for chunk in [json.loads(event) for event in reply.events[:-1]] if stream else [reply.json]:
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        wanted = [flow.text(flow.ids(prompt), max_new_tokens=9) for prompt in prompts]
        assert texts == {0: wanted[0], 1: wanted[0], 2: wanted[1], 3: wanted[1]}
        assert len(flow.prefill.legs) == 4

    async def test_token_ids_are_taken_as_they_are(self, flow: StrictProduct) -> None:
        body = {"model": "tiny", "prompt": [5, 600, 700], "max_tokens": 9}
        reply = await flow.post(COMPLETIONS_PATH, body)
        assert reply.json["choices"][0]["text"] == flow.text([5, 600, 700], max_new_tokens=9)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_generate(self, flow: StrictProduct, stream: bool) -> None:  # noqa: FBT001
        body = {"text": "def foo(", "sampling_params": {"max_new_tokens": 9}, "stream": stream}
        reply = await flow.post("/generate", body)
        assert reply.status == 200, reply.body
        answer = json.loads(reply.events[-2]) if stream else reply.json
        ids = flow.ids("def foo(")
        assert answer["text"] == flow.text(ids, max_new_tokens=9)
        assert answer["output_ids"] == flow.written(ids, max_new_tokens=9)

    async def test_a_crowd(self, flow: StrictProduct) -> None:
        async def ask(number: int) -> None:
            content = f"{number} " * (number + 1)
            body = STREAM if number % 2 else CHAT
            reply = await flow.post(CHAT_PATH, body | {"messages": [{"role": "user", "content": content}]})
            assert contents(reply) == flow.text(flow.chat_ids(content), max_new_tokens=12)

        await asyncio.gather(*(ask(number) for number in range(40)))

    async def test_a_token_that_is_none(self, flow: StrictProduct) -> None:
        reply = await flow.post(COMPLETIONS_PATH, {"model": "tiny", "prompt": [5, model.VOCABULARY]})
        assert reply.status == 400
        reply = await flow.post(CHAT_PATH, CHAT | {"logit_bias": {str(model.VOCABULARY): 1}})
        assert reply.status == 400
        reply = await flow.post(COMPLETIONS_PATH, {"model": "tiny", "prompt": [5] * (model.CONTEXT + 1)})
        assert (reply.status, reply.code) == (400, "context_length_exceeded")
        assert not [leg for mock in flow.mocks for leg in mock.legs]
        assert not any(mock.crashed.is_set() for mock in flow.mocks)


def fail(mock: Any, fault: Fault) -> None:
    """Have it fail its legs, but not the orders that the gateway gives besides, which may speak of legs."""
    mock.fail(Rule(fault, body_contains=b"\n2chatcmpl-"))  # the first field, of 50 bytes: the leg's name


class TestLeaving:
    @both
    async def test_while_it_is_decoded(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        for mock in flow.decodes:
            mock.pace = SLOW
        exchange = await flow.client.open(CHAT_PATH, body | {"max_tokens": 900})
        await soon(lambda: any(mock.running for mock in flow.decodes), "nothing is decoded")
        if "stream" in body:
            await exchange.until(b'"content":" ')
        exchange.reset()
        # TokenSpeed's decode may be receiving, as long as it shows no token: it is let be for a while.
        within = RECEIVING + PROMPT if flow.engine == "tokenspeed" and "stream" not in body else PROMPT
        await soon(lambda: not any(mock.running for mock in flow.decodes), "it is decoded on", within)

    @both
    async def test_while_it_is_prefilled(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        finishes = flow.flow == "mooncake"  # which frees what its decode waits for
        flow.prefill.pace = Pace(first_token=0.5 if finishes else 30)
        exchange = await flow.client.open(CHAT_PATH, body)
        await soon(lambda: flow.prefill.running > 0, "nothing is prefilled")
        exchange.reset()
        await soon(lambda: flow.prefill.running == 0, "it is prefilled on", 5 if finishes else PROMPT)


class TestFailures:
    @both
    @pytest.mark.parametrize(("status", "answer"), [(400, 400), (429, 429), (503, 503), (500, 500)])
    async def test_of_the_prefill(self, flow: StrictProduct, body: dict[str, Any], status: int, answer: int) -> None:
        fail(flow.prefill, Fault(status=status, body="as told"))
        reply = await flow.post(CHAT_PATH, body)
        assert reply.status == answer
        assert "as told" in reply.json["error"]["message"]

    @both
    async def test_of_the_decode_before_its_answer(self, flow: StrictProduct, body: dict[str, Any]) -> None:
        for mock in flow.decodes:
            fail(mock, Fault(status=503, body="as told"))
        reply = await flow.post(CHAT_PATH, body)
        assert reply.status == 503
        assert "as told" in reply.json["error"]["message"]

    async def test_of_a_stream_that_ends_without_its_end(self, flow: StrictProduct) -> None:
        for mock in flow.decodes:
            fail(mock, Fault(truncate=True, after_chunks=2))
        reply = await flow.post(CHAT_PATH, STREAM)
        assert reply.status == 200
        assert "[DONE]" not in reply.events
        assert "error" in json.loads(reply.events[-1])

    async def test_of_a_stream_whose_connection_breaks_off(self, flow: StrictProduct) -> None:
        """The client is told, unless it is Envoy that runs the call: it breaks off the client's, too.

        With ``--relay-grpc-streams`` it is told in any case: test_product_rpc_fleets.py.
        """
        for mock in flow.decodes:
            mock.pace = Pace(token=0.05)
            fail(mock, Fault(drop=Point.MID_BODY, after_chunks=3))
        try:
            reply = await flow.post(CHAT_PATH, STREAM)
        except CutError as cut:
            assert "[DONE]" not in str(cut)  # noqa: PT017 - it need not be raised
        else:
            assert json.loads(reply.events[-1])["error"]["code"] == "decode_connection_lost"

    @both
    @pytest.mark.parametrize(
        "fault",
        [Fault(drop=Point.BEFORE_HEAD), Fault(truncate=True, after_chunks=0), Fault(garbage=True)],
        ids=["drop", "nothing", "garbage"],
    )
    async def test_of_answers_that_are_none(self, flow: StrictProduct, body: dict[str, Any], fault: Fault) -> None:
        for mock in flow.decodes:
            fail(mock, fault)
        reply = await flow.post(CHAT_PATH, body)
        assert reply.status in (500, 502, 503), reply.body

    async def test_a_prefill_that_breaks_off_ends_the_decode(self, flow: StrictProduct) -> None:
        fail(flow.prefill, Fault(drop=Point.BEFORE_HEAD))
        reply = await flow.post(CHAT_PATH, CHAT)
        # It breaks off when it has sent the cache: a decode that runs beside it may have finished by then.
        beside = [] if flow.flow == "nixl" else [(200, None)]
        assert (reply.status, reply.code) in [(502, "prefill_connection_lost"), *beside], reply.body
        if flow.flow == "nixl":  # nobody has heard where they are
            flow.prefill.expire()


async def test_the_words_of_an_answer_are_enough(flow: StrictProduct) -> None:
    """What the other tests rely on: the model does not stop before they do."""
    assert len(flow.written(flow.chat_ids("hello"))) == WORDS > 12
