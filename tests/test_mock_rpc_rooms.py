"""The mocks of SGLang's and TokenSpeed's gRPC servers: SGLang's against what was seen (0.5.23, servicer 0.14.1)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from extproc.mock import Outcome, RpcMock
from extproc.mock.engine import Pace
from extproc.mock.generation import Limits, logprob
from extproc.mock.observed import PATIENCE
from extproc.mock.rpc import model
from extproc.mock.sglang.engine import Layout, Patience
from tests.fleet import eventually
from tests.ports import silent_port
from tests.rpc_asks import Answer, abort, ask, channel, dial, to_rooms

BAD, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
GONE = grpc.StatusCode.UNAVAILABLE
IDS = list(range(20, 90))
WORDS = model.written(IDS).ids
SLOW = Pace(token=0.01, tokens=1000)
LARGEST = {"sglang": 2**31 - 1, "tokenspeed": 2**63 - 1}
OPTIONS = {"engine_options": {"patience": Patience(death=0.05, connect=0.5, wait=4.0)}}


class Pair:
    """A prefill and a decode."""

    def __init__(self, prefill: RpcMock, decode: RpcMock) -> None:
        self.prefill, self.decode = prefill, decode
        self._rooms = itertools.count(1)

    def leg(self, ids: Any = IDS, **fields: Any) -> Any:
        return to_rooms(self.prefill, ids, **fields)

    async def both(self, ids: Any = IDS, *, stream: bool = False, **fields: Any) -> tuple[Answer, Answer]:
        fields = {"room": next(self._rooms), **fields}
        return await asyncio.gather(
            ask(self.prefill, self.leg(ids, **fields)), ask(self.decode, self.leg(ids, stream=stream, **fields))
        )


@pytest.fixture(params=["sglang", "tokenspeed"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with (
        RpcMock(request.param, "prefill", **OPTIONS) as prefill,
        RpcMock(request.param, "decode", **OPTIONS) as decode,
    ):
        yield Pair(prefill, decode)


async def _completes(call: Any) -> int:
    """How many sequences a call ends, before it is cancelled."""
    count = 0
    with contextlib.suppress(asyncio.CancelledError):
        async for message in call:
            count += message.HasField("complete")
    return count


only = {name: pytest.mark.parametrize("pair", [name], indirect=True) for name in ("sglang", "tokenspeed")}


class TestTogether:
    async def test_whole(self, pair: Pair) -> None:
        prefill, decode = await pair.both(max_new_tokens=5)
        assert (list(prefill.complete.output_ids), prefill.complete.finish_reason) == (WORDS[:1], "length")
        assert (prefill.complete.prompt_tokens, prefill.complete.completion_tokens) == (70, 1)
        assert list(decode.complete.output_ids) == WORDS[:5]
        assert (decode.complete.finish_reason, decode.complete.completion_tokens) == ("length", 5)
        assert pair.prefill.rooms == 0

    async def test_a_stream_counts_all_so_far_and_its_end_repeats_the_last(self, pair: Pair) -> None:
        _, decode = await pair.both(stream=True, max_new_tokens=5)
        assert decode.streamed == WORDS[:5]
        assert [chunk.completion_tokens for chunk in decode.chunks] == [1, 2, 3, 4, 5]
        assert (list(decode.complete.output_ids), decode.complete.completion_tokens) == (WORDS[4:5], 5)
        assert {message.request_id for message in decode.messages} == {"a"}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("keep", [False, True])
    async def test_what_ends_it(self, pair: Pair, stream: bool, keep: bool) -> None:  # noqa: FBT001
        trims = pair.prefill.facts.engine == "tokenspeed" and not keep
        for count, sampling in ((16, {}), (3, {"stop_token_ids": [WORDS[2]]})):
            _, decode = await pair.both(stream=stream, no_stop_trim=keep, **sampling)
            last = WORDS[count - 1]
            assert (decode.complete.finish_reason, decode.complete.matched_token_id) == ("stop", last)
            shown = decode.streamed if stream else list(decode.complete.output_ids)
            assert shown == (WORDS[: count - 1] if trims else WORDS[:count])
            assert decode.complete.completion_tokens == count
            if stream:
                assert list(decode.complete.output_ids) == ([] if trims else [last])
                assert len(decode.chunks) == (count - 1 if trims else count)
        stop = model.decoded(WORDS[:2])[2:-1]
        _, decode = await pair.both(stream=stream, stop=[stop], no_stop_trim=keep)
        assert decode.complete.matched_stop_str == stop
        assert (decode.streamed or list(decode.complete.output_ids)) == WORDS[:2]

    async def test_nothing_at_all(self, pair: Pair) -> None:
        prefill, decode = await pair.both(stream=True, max_new_tokens=0)
        assert list(prefill.complete.output_ids) == WORDS[:1]
        assert [list(chunk.token_ids) for chunk in decode.chunks] == [[]]
        assert (list(decode.complete.output_ids), decode.complete.finish_reason) == ([], "length")

    async def test_the_largest_room(self, pair: Pair) -> None:
        _, decode = await pair.both(room=LARGEST[pair.prefill.facts.engine], max_new_tokens=2)
        assert list(decode.complete.output_ids) == WORDS[:2]

    async def test_a_room_serves_again(self, pair: Pair) -> None:
        for _ in range(2):
            _, decode = await pair.both(room=9, max_new_tokens=2)
            assert list(decode.complete.output_ids) == WORDS[:2]

    @only["sglang"]
    async def test_logprobs_of_sglang(self, pair: Pair) -> None:
        prefill, decode = await pair.both(stream=True, max_new_tokens=3, top=2, start=0)
        assert [list(chunk.output_logprobs.token_ids) for chunk in decode.chunks] == [[token] for token in WORDS[:3]]
        first = decode.chunks[0].output_logprobs
        assert list(first.token_logprobs) == pytest.approx([logprob(WORDS[0])])
        assert [len(row.token_ids) for row in first.top_logprobs] == [2]
        assert not any(chunk.HasField("input_logprobs") for chunk in decode.chunks)
        rows = prefill.complete.input_logprobs
        assert list(rows.token_ids) == IDS
        assert [row.HasField("value") for row in rows.token_logprobs] == [False] + [True] * 69
        assert [len(row.token_ids) for row in rows.top_logprobs] == [0] + [2] * 69
        (prefill, decode) = await pair.both(max_new_tokens=3, top=0)
        assert not prefill.complete.HasField("input_logprobs")
        assert list(decode.complete.output_logprobs.token_ids) == WORDS[:3]

    @only["tokenspeed"]
    async def test_logprobs_of_tokenspeed(self, pair: Pair) -> None:
        _, decode = await pair.both(stream=True, top=0)
        assert decode.streamed == WORDS[:-1]
        for chunk in decode.chunks:
            assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
            assert [list(row.token_ids) for row in chunk.output_logprobs.top_logprobs] == [[]]
        assert not decode.complete.HasField("output_logprobs")


class TestStrict:
    async def test_a_lone_decode_never_answers(self, pair: Pair) -> None:
        async with channel(pair.decode) as connected:
            call = dial(connected, pair.decode, pair.leg(stream=True))
            await pair.decode.received()
            answer = asyncio.ensure_future(call.read())
            await asyncio.wait([answer], timeout=0.2)
            assert not answer.done()
            call.cancel()
            await asyncio.wait([answer])
        await pair.decode.idle()
        assert pair.decode.legs[0].outcome is Outcome.CLIENT_CLOSED

    async def test_a_lone_prefill_gives_up_in_the_end(self, pair: Pair) -> None:
        answer = await ask(pair.prefill, pair.leg())
        assert answer.code is INTERNAL
        assert "timed out after 4.0s in KVPoll.Bootstrapping" in answer.details

    async def test_a_room_in_use_is_refused(self, pair: Pair) -> None:
        asking = asyncio.ensure_future(ask(pair.prefill, pair.leg(name="first")))
        await pair.prefill.received()
        answer = await ask(pair.prefill, pair.leg(name="second"))
        assert (answer.code, answer.details) == (BAD, "mock: room 5 is in use, by first")
        assert (await ask(pair.decode, pair.leg(name="first"))).code is grpc.StatusCode.OK
        await asking

    async def test_two_prompts_in_one_room_fail_both(self, pair: Pair) -> None:
        answers = await asyncio.gather(ask(pair.prefill, pair.leg()), ask(pair.decode, pair.leg([1, 300])))
        assert [answer.code for answer in answers] == [INTERNAL] * 2
        assert all("different prompts" in answer.details for answer in answers)

    async def test_a_name_in_use_is_refused(self, pair: Pair) -> None:
        asking = asyncio.ensure_future(ask(pair.decode, pair.leg(room=1)))
        await pair.decode.received()
        answer = await ask(pair.decode, pair.leg(room=2))
        assert (answer.code, answer.details) == (BAD, "Duplicate request ID detected: a")
        asking.cancel()
        await asyncio.wait([asking])

    async def test_nobody_at_the_bootstrap_port(self, pair: Pair) -> None:
        with silent_port() as port:
            answer = await ask(pair.decode, pair.leg(port=port))
        assert answer.code is INTERNAL
        assert "Decode handshake failed" in answer.details

    async def test_a_prefill_that_dies(self, pair: Pair) -> None:
        asking = asyncio.ensure_future(ask(pair.decode, pair.leg()))
        await eventually(lambda: pair.prefill.rooms == 1)
        pair.prefill.crash()
        answer = await asking
        assert answer.code is INTERNAL
        assert "Lost connection with prefill instance" in answer.details

    @pytest.mark.parametrize(
        ("ids", "sampling", "message"),
        [
            ([1] * 2043, {}, "Input length (2043 tokens) exceeds the maximum allowed length (2042 tokens)."),
            (IDS, {"temperature": 3}, "mock: a temperature of 3"),
            (IDS, {"max_new_tokens": 2, "min_new_tokens": 3}, "mock: min_new_tokens of 3 above max_new_tokens of 2"),
            (IDS, {"n": 2}, "mock: several samples in one room never answer"),
        ],
    )
    async def test_refused(self, pair: Pair, ids: list[int], sampling: dict[str, Any], message: str) -> None:
        answer = await ask(pair.decode, pair.leg(ids, **sampling))
        assert answer.code is BAD
        assert message in answer.details

    @only["sglang"]
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize(
        "fields",
        [{"room": None}, {"ids": []}, {"ids": [1, 4096]}, {"logit_bias": {"4096": 1.0}}],
        ids=["no room", "no prompt", "an unknown token", "a bias to an unknown token"],
    )
    async def test_what_sglang_does_not_survive(self, pair: Pair, role: str, fields: dict[str, Any]) -> None:
        mock = getattr(pair, role)
        assert (await ask(mock, pair.leg(**fields))).code is GONE
        assert mock.crashed.is_set()

    @only["tokenspeed"]
    @pytest.mark.parametrize("fields", [{"room": None}, {"ids": []}, {"ids": [1, 4096]}])
    async def test_what_tokenspeed_refuses(self, pair: Pair, fields: dict[str, Any]) -> None:
        assert (await ask(pair.decode, pair.leg(**fields))).code is BAD

    @only["sglang"]
    async def test_a_cache_laid_out_otherwise_ends_the_decode(self, pair: Pair) -> None:
        options = {"engine_options": {"layout": Layout(page_size=64)}}
        async with RpcMock("sglang", "decode", **options) as decode:
            assert (await ask(decode, pair.leg())).code is GONE
            assert decode.crashed.is_set()


class TestAborts:
    @only["sglang"]
    async def test_sglang_frees_the_request_and_says_no_more(self, pair: Pair) -> None:
        pair.decode.pace = SLOW
        prefill = asyncio.ensure_future(ask(pair.prefill, pair.leg()))
        async with channel(pair.decode) as connected:
            call = dial(connected, pair.decode, pair.leg(stream=True))
            await anext(aiter(call))
            answer = await abort(pair.decode, "a")
            assert (answer.success, answer.message) == (True, "Request a aborted")
            rest = asyncio.ensure_future(_completes(call))
            await asyncio.wait([rest], timeout=0.3)
            assert not rest.done()
            # Its room and its name can be used by another.
            again = asyncio.ensure_future(ask(pair.prefill, pair.leg()))
            pair.decode.pace = Pace(tokens=3)
            assert (await ask(pair.decode, pair.leg())).complete.finish_reason == "stop"
            await asyncio.gather(prefill, again)
            call.cancel()
            assert await rest == 0
        assert (await abort(pair.decode, "nobody")).success

    @only["tokenspeed"]
    async def test_tokenspeed_ends_the_call(self, pair: Pair) -> None:
        pair.decode.pace = SLOW
        asking = asyncio.ensure_future(pair.both(stream=True, name="n"))
        await pair.decode.recorder.until(lambda: any(leg.first_byte for leg in pair.decode.legs), PATIENCE)
        assert (await abort(pair.decode, "n")).message == "Aborted 1 request(s) for n"
        _, decode = await asking
        assert decode.code is INTERNAL
        assert 0 < len(decode.streamed) < 500
        again = await abort(pair.decode, "n")
        assert (again.success, again.message) == (False, "Request n not found")

    async def test_a_decode_that_leaves_ends_the_prefill(self, pair: Pair) -> None:
        async with channel(pair.decode) as connected:
            call = dial(connected, pair.decode, pair.leg())
            await pair.decode.received()
            await eventually(lambda: pair.prefill.rooms == 1)
            call.cancel()
        await pair.decode.idle()
        await eventually(lambda: pair.prefill.rooms == 0)
        assert (await ask(pair.prefill, pair.leg())).code is INTERNAL


class TestRanks:
    async def test_the_room_chooses_the_prefills_rank(self) -> None:
        async with RpcMock("sglang", "prefill", dp_size=2) as prefill, RpcMock("sglang", "decode") as decode:
            pair = Pair(prefill, decode)
            for room in (4, 7):
                _, answer = await pair.both(room=room, max_new_tokens=2, rank=0)
                assert list(answer.complete.output_ids) == WORDS[:2]
            assert [leg.rank for leg in prefill.legs] == [0, 1]

    async def test_tokenspeed_takes_a_rank_and_the_room_must_agree(self) -> None:
        async with RpcMock("tokenspeed", "prefill", dp_size=2) as prefill, RpcMock("tokenspeed", "decode") as decode:
            pair = Pair(prefill, decode)
            _, answer = await pair.both(room=7, max_new_tokens=2)
            assert list(answer.complete.output_ids) == WORDS[:2]
            leg = pair.leg(room=8, rank=1)
            assert "follow_bootstrap_room conflict" in (await ask(prefill, leg)).details

    async def test_load_is_what_runs(self) -> None:
        async with RpcMock("sglang", dp_size=2) as mock:
            assert mock.facts.loads([0, 2]).loads[1].num_running_reqs == 2


async def test_samples_of_a_regular_worker() -> None:
    async with RpcMock("tokenspeed") as mock:
        answer = await ask(mock, to_rooms(mock, IDS, room=None, stream=True, n=2, max_new_tokens=3, sampling_seed=4))
        for index in range(2):
            wanted = model.written(IDS, Limits(3, seed=4 + index)).ids
            assert [token for chunk in answer.chunks if chunk.index == index for token in chunk.token_ids] == wanted
