"""The mock of vLLM's gRPC server against what the real one (smg-grpc-servicer 0.14.1, vLLM 0.32) was seen doing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import pytest

from extproc.mock import Outcome, RpcMock
from extproc.mock.engine import Pace
from extproc.mock.generation import Limits, alternatives, logprob
from extproc.mock.observed import PATIENCE
from extproc.mock.rpc import model
from extproc.mock.rpc.engines import MOONCAKE, NIXL
from tests.rpc_asks import ASK, abort, ask, channel, dial, to_vllm

BAD = grpc.StatusCode.INVALID_ARGUMENT
IDS = list(range(20, 90))
WORDS = model.written(IDS).ids
SLOW = Pace(token=0.01, tokens=1000)


@pytest.fixture
async def mock() -> AsyncIterator[RpcMock]:
    async with RpcMock("vllm") as mock:
        yield mock


class Pair:
    """A prefill and a decode."""

    def __init__(self, prefill: RpcMock, decode: RpcMock) -> None:
        self.prefill, self.decode = prefill, decode

    async def prefilled(self, ids: list[int], name: str = "a") -> str:
        leg = to_vllm(ids, name, params=ASK, max_tokens=1, ignore_eos=True)
        answer = await ask(self.prefill, leg)
        return str(answer.complete.kv_transfer_params_json)

    def meeting(self, transfer: str = "xfer-1") -> dict[str, object]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": self.prefill.facts.engine_id,
            "remote_bootstrap_addr": f"http://127.0.0.1:{self.prefill.bootstrap_port}",
        }


@pytest.fixture
async def nixl() -> AsyncIterator[Pair]:
    options = {"load_failure_delay": 0.02}
    async with (
        RpcMock("vllm", "prefill", connector=NIXL) as prefill,
        RpcMock("vllm", "decode", connector=NIXL, engine_options=options) as decode,
    ):
        yield Pair(prefill, decode)


@pytest.fixture
async def mooncake() -> AsyncIterator[Pair]:
    async with (
        RpcMock("vllm", "prefill", connector=MOONCAKE) as prefill,
        RpcMock("vllm", "decode", connector=MOONCAKE) as decode,
    ):
        yield Pair(prefill, decode)


class TestAnswers:
    async def test_whole(self, mock: RpcMock) -> None:
        answer = await ask(mock, to_vllm(IDS))
        assert len(answer.messages) == 1
        found = answer.complete
        assert list(found.output_ids) == WORDS
        assert (found.finish_reason, found.WhichOneof("matched_stop")) == ("stop", None)
        assert (found.prompt_tokens, found.completion_tokens) == (70, 16)

    async def test_a_stream_counts_deltas_and_its_end_repeats_the_last(self, mock: RpcMock) -> None:
        answer = await ask(mock, to_vllm(IDS, stream=True))
        assert answer.streamed == WORDS
        assert {(chunk.prompt_tokens, chunk.completion_tokens) for chunk in answer.chunks} == {(70, 1)}
        assert list(answer.complete.output_ids) == WORDS[-1:] == [model.END]
        assert answer.complete.completion_tokens == 1

    async def test_the_head_comes_with_the_first_token(self, mock: RpcMock) -> None:
        mock.pace = Pace(first_token=0.05)
        async with channel(mock) as connected:
            call = dial(connected, mock, to_vllm(IDS, stream=True))
            heading = asyncio.ensure_future(call.initial_metadata())
            await mock.received()
            assert not heading.done()
            assert await anext(aiter(call)) is not None
            await heading
            (leg,) = mock.legs
            assert leg.head_sent - leg.arrived >= 0.05
            call.cancel()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_ends_it_is_among_the_tokens(self, mock: RpcMock, stream: bool) -> None:  # noqa: FBT001
        third, text = WORDS[2], model.decoded(WORDS[:2])
        by_token = await ask(mock, to_vllm(IDS, stream=stream, stop_token_ids=[third]))
        assert (by_token.complete.finish_reason, by_token.complete.matched_token_id) == ("stop", third)
        by_text = await ask(mock, to_vllm(IDS, stream=stream, stop=[text[2:-1]]))
        assert (by_text.complete.finish_reason, by_text.complete.matched_stop_str) == ("stop", text[2:-1])
        for answer, count in ((by_token, 3), (by_text, 2)):
            assert (answer.streamed or list(answer.complete.output_ids)) == WORDS[:count]

    async def test_samples(self, mock: RpcMock) -> None:
        answer = await ask(mock, to_vllm(IDS, stream=True, temperature=1, n=2, max_tokens=3, seed=4))
        for index in range(2):
            wanted = model.written(IDS, Limits(3, seed=4 + index)).ids
            assert [token for chunk in answer.chunks if chunk.index == index for token in chunk.token_ids] == wanted
        assert sorted(complete.index for complete in answer.completes) == [0, 1]
        whole = await ask(mock, to_vllm(IDS, temperature=1, n=2, max_tokens=3, seed=4))
        assert [list(complete.output_ids) for complete in whole.completes] == [
            model.written(IDS, Limits(3, seed=4 + index)).ids for index in range(2)
        ]

    async def test_logprobs(self, mock: RpcMock) -> None:
        answer = await ask(mock, to_vllm(IDS, max_tokens=2, logprobs=2, prompt_logprobs=1))
        rows = answer.complete.output_logprobs
        assert list(rows.token_ids) == WORDS[:2]
        assert list(rows.token_logprobs) == pytest.approx([logprob(token) for token in WORDS[:2]])
        likely = [other for _, other in alternatives(WORDS[0], 2)]
        assert (likely[0], list(rows.top_logprobs[0].token_ids)) == (WORDS[0], likely)
        prompt = answer.complete.input_logprobs
        assert list(prompt.token_ids) == IDS
        assert [row.HasField("value") for row in prompt.token_logprobs] == [False] + [True] * 69
        assert [len(row.token_ids) for row in prompt.top_logprobs] == [0] + [1] * 69

    async def test_logprobs_of_a_stream_are_deltas_and_the_prompts_come_first(self, mock: RpcMock) -> None:
        answer = await ask(mock, to_vllm(IDS, stream=True, max_tokens=3, logprobs=0, prompt_logprobs=0))
        assert [list(chunk.output_logprobs.token_ids) for chunk in answer.chunks] == [[token] for token in WORDS[:3]]
        assert not any(chunk.output_logprobs.top_logprobs for chunk in answer.chunks)
        assert [chunk.HasField("input_logprobs") for chunk in answer.chunks] == [True, False, False]
        assert list(answer.complete.output_logprobs.token_ids) == WORDS[2:3]

    async def test_cached_tokens_are_those_of_whole_blocks(self, mock: RpcMock) -> None:
        first = await ask(mock, to_vllm(IDS, stream=True, max_tokens=2))
        again = await ask(mock, to_vllm(IDS, stream=True, max_tokens=2))
        assert ({chunk.cached_tokens for chunk in first.chunks}, first.complete.cached_tokens) == ({0}, 0)
        assert ({chunk.cached_tokens for chunk in again.chunks}, again.complete.cached_tokens) == ({64}, 64)


class TestRefusals:
    @pytest.mark.parametrize(
        ("ids", "sampling", "message"),
        [
            ([], {}, "The decoder prompt cannot be empty"),
            ([1, 4096], {}, "Token id 4096 is out of vocabulary"),
            ([1] * 2049, {}, "The decoder prompt (length 2049) is longer than the maximum model length of 2048."),
            ([1] * 2048, {}, "plus the number of requested output tokens"),
            ([1], {"max_tokens": 0}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
            ([1], {"max_tokens": 1, "min_tokens": 3}, "min_tokens must be less than or equal to max_tokens=1, got 3."),
            ([1], {"n": 2}, "n must be 1 when using greedy sampling, got 2."),
            ([1], {"temperature": 3}, "temperature must be in [0, 2], got 3.0."),
            ([1], {"logprobs": 21}, "Requested sample logprobs of 21"),
        ],
    )
    async def test_what_the_engine_does_not_take(self, mock, ids, sampling, message) -> None:
        answer = await ask(mock, to_vllm(ids, **sampling))
        assert (answer.code, answer.messages) == (BAD, [])
        assert message in answer.details

    @pytest.mark.parametrize(
        ("params", "message"),
        [("[]", "kv_transfer_params_json must be a JSON object"), ("{", "Invalid kv_transfer_params_json: Expecting")],
    )
    async def test_params_that_are_no_object(self, mock: RpcMock, params: str, message: str) -> None:
        answer = await ask(mock, to_vllm([1], params=params))
        assert answer.code is BAD
        assert message in answer.details

    async def test_former_params_without_a_port(self, mock: RpcMock) -> None:
        request = to_vllm([1])
        request.kv_transfer_params.remote_host = "10.0.0.1"
        answer = await ask(mock, request)
        assert answer.code is BAD
        assert "remote_port must be in [1, 65535]" in answer.details

    async def test_a_rank_that_is_not_there(self, mock: RpcMock) -> None:
        request = to_vllm([1])
        request.data_parallel_rank = 1
        assert (await ask(mock, request)).code is BAD


class TestAborts:
    async def test_one_that_runs_ends_well_with_what_there_is(self, mock: RpcMock) -> None:
        mock.pace = SLOW
        asking = asyncio.ensure_future(ask(mock, to_vllm(IDS, "gone", stream=True)))
        other = asyncio.ensure_future(ask(mock, to_vllm(IDS, "stays", stream=True, max_tokens=60)))
        await mock.recorder.until(lambda: any(leg.first_byte for leg in mock.legs), PATIENCE)
        await abort(mock, "gone", "unknown")
        answer = await asking
        assert answer.complete.finish_reason == "abort"
        assert 0 < len(answer.streamed) < 60
        assert list(answer.complete.output_ids) == []
        assert (await other).complete.finish_reason == "length"

    async def test_one_whose_client_leaves_is_ended(self, mock: RpcMock) -> None:
        mock.pace = SLOW
        async with channel(mock) as connected:
            call = dial(connected, mock, to_vllm(IDS, stream=True))
            await anext(aiter(call))
            call.cancel()
        await mock.idle()
        assert mock.legs[0].outcome is Outcome.CLIENT_CLOSED

    async def test_one_that_waits_for_a_cache_ends_at_once(self, mooncake: Pair) -> None:
        asking = asyncio.ensure_future(ask(mooncake.decode, to_vllm(IDS, "d", params=mooncake.meeting())))
        await mooncake.prefill.wanted(1)
        await abort(mooncake.decode, "d")
        answer = await asking
        assert (answer.complete.finish_reason, list(answer.complete.output_ids)) == ("abort", [])


class TestNixl:
    async def test_the_blocks_of_a_prefill_are_read_and_freed(self, nixl: Pair) -> None:
        params = await nixl.prefilled(IDS)
        assert json.loads(params)["remote_engine_id"] == nixl.prefill.facts.engine_id
        assert len(nixl.prefill.pins) == 1
        answer = await ask(nixl.decode, to_vllm(IDS, params=params))
        assert list(answer.complete.output_ids) == WORDS
        assert (nixl.decode.fetched, nixl.prefill.pins) == (len(IDS), ())
        assert nixl.decode.legs[0].kv == "transferred"

    async def test_the_former_message_has_the_side_channel(self, nixl: Pair) -> None:
        leg = to_vllm(IDS, params=ASK, max_tokens=1, ignore_eos=True)
        found = (await ask(nixl.prefill, leg)).complete
        params = json.loads(found.kv_transfer_params_json)
        assert found.kv_transfer_params.remote_port == params["remote_port"]

    async def test_a_prefill_that_is_not_asked_gives_nothing(self, nixl: Pair) -> None:
        found = (await ask(nixl.prefill, to_vllm(IDS, max_tokens=1))).complete
        assert not found.HasField("kv_transfer_params_json")
        assert nixl.prefill.pins == ()

    async def test_another_prompts_blocks_give_another_text(self, nixl: Pair) -> None:
        params = await nixl.prefilled([7] * 70)
        answer = await ask(nixl.decode, to_vllm(IDS, params=params, max_tokens=3))
        assert list(answer.complete.output_ids) == model.written([7] * 70, Limits(3)).ids
        assert nixl.decode.legs[0].kv == "foreign"

    async def test_a_wrong_engine_id_fails(self, nixl: Pair) -> None:
        params = json.loads(await nixl.prefilled(IDS)) | {"remote_engine_id": "another"}
        answer = await ask(nixl.decode, to_vllm(IDS, params=params))
        assert (answer.complete.finish_reason, list(answer.complete.output_ids)) == ("error", [])
        assert nixl.decode.legs[0].kv == "failed"

    async def test_without_params_the_decode_computes_the_prompt(self, nixl: Pair) -> None:
        assert list((await ask(nixl.decode, to_vllm(IDS))).complete.output_ids) == WORDS
        assert nixl.decode.legs[0].kv == "recomputed"

    async def test_params_without_blocks_end_the_process(self, nixl: Pair) -> None:
        params = json.loads(await nixl.prefilled(IDS))
        del params["remote_block_ids"]
        answer = await ask(nixl.decode, to_vllm(IDS, params=params))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert nixl.decode.crashed.is_set()

    async def test_a_lease_ends(self) -> None:
        async with RpcMock("vllm", "prefill", connector=NIXL, engine_options={"lease": 0.02}) as prefill:
            await Pair(prefill, prefill).prefilled(IDS)
            await prefill.freed()
            assert prefill.expired == 1

    async def test_a_decode_that_refuses_has_the_blocks_freed(self, nixl: Pair) -> None:
        params = await nixl.prefilled(IDS)
        assert (await ask(nixl.decode, to_vllm([1], params=params, max_tokens=0))).code is BAD
        await nixl.prefill.freed()
        assert nixl.prefill.expired == 0


class TestMooncake:
    @pytest.mark.parametrize("decode_first", [False, True])
    async def test_they_meet_by_their_transfer(self, mooncake: Pair, decode_first: bool) -> None:  # noqa: FBT001
        decode = to_vllm(IDS, stream=True, params=mooncake.meeting())
        prefill = to_vllm(IDS, params={**ASK, "transfer_id": "xfer-1"}, max_tokens=1, ignore_eos=True)
        if decode_first:
            asking = asyncio.ensure_future(ask(mooncake.decode, decode))
            await mooncake.prefill.wanted(1)
            first = (await ask(mooncake.prefill, prefill)).complete
            answer = await asking
        else:
            first = (await ask(mooncake.prefill, prefill)).complete
            assert mooncake.prefill.pins == ("xfer-1",)
            answer = await ask(mooncake.decode, decode)
        assert answer.streamed == WORDS
        assert not first.HasField("kv_transfer_params_json")
        assert (mooncake.prefill.pins, mooncake.decode.fetched) == ((), len(IDS))

    async def test_an_unknown_engine_id_fails(self, mooncake: Pair) -> None:
        params = mooncake.meeting() | {"remote_engine_id": "another"}
        assert (await ask(mooncake.decode, to_vllm(IDS, params=params))).complete.finish_reason == "error"

    async def test_an_unknown_transfer_waits(self, mooncake: Pair) -> None:
        answer = await ask(mooncake.decode, to_vllm(IDS, params=mooncake.meeting("nobody's")), patience=0.3)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED

    async def test_the_other_roles_params_end_the_process(self, mooncake: Pair) -> None:
        answer = await ask(mooncake.prefill, to_vllm(IDS, params=mooncake.meeting()))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert mooncake.prefill.crashed.is_set()

    async def test_of_several_ranks_each_has_its_own_caches(self) -> None:
        async with (
            RpcMock("vllm", "prefill", connector=MOONCAKE, dp_size=2, engine_id="e") as prefill,
            RpcMock("vllm", "decode", connector=MOONCAKE) as decode,
        ):
            pair = Pair(prefill, decode)
            leg = to_vllm(IDS, params={**ASK, "transfer_id": "xfer-1"}, max_tokens=1, ignore_eos=True)
            leg.data_parallel_rank = 1
            await ask(prefill, leg)
            assert prefill.legs[0].rank == 1
            params = pair.meeting() | {"remote_engine_id": "e_dp1"}
            assert list((await ask(decode, to_vllm(IDS, params=params))).complete.output_ids) == WORDS
