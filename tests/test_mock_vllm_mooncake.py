"""The vLLM mock and Mooncake: two legs that meet by a transfer id (0.32, its connector's source)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from extproc.mock import VllmMock
from extproc.mock.observed import PATIENCE
from extproc.mock.vllm.worker import MOONCAKE
from tests.mock_client import Answer, Call, ask, dialling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi to the world"}], "max_tokens": 5}
Dial = Callable[[VllmMock], Awaitable[Call]]


class Pair:
    """A prefill and a decode."""

    def __init__(self, prefill: VllmMock, decode: VllmMock) -> None:
        self.prefill = prefill
        self.decode = decode

    async def first(self, transfer: str = "t1", body: dict[str, Any] = BODY, path: str = CHAT, **fields: Any) -> Answer:
        """The prefill leg."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return await ask(self.prefill, path, {**body, "max_tokens": 1, "kv_transfer_params": params, **fields})

    def params(self, transfer: str = "t1", **fields: Any) -> dict[str, Any]:
        """The decode leg's parameters."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.prefill.engine_id,
            "remote_bootstrap_addr": self.prefill.bootstrap_url,
            "transfer_id": transfer,
            **fields,
        }

    async def second(self, params: Any, body: dict[str, Any] = BODY, path: str = CHAT, **fields: Any) -> Answer:
        """The decode leg."""
        return await ask(self.decode, path, {**body, "kv_transfer_params": params, **fields})


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with (
        VllmMock("prefill", connector=MOONCAKE, engine_id="eng-p") as prefill,
        VllmMock("decode", connector=MOONCAKE) as decode,
    ):
        yield Pair(prefill, decode)


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    async with dialling() as dial:
        yield dial


def texts(answer: Answer) -> list[str]:
    """The texts of a chat or completion."""
    return [
        choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer.json["choices"]
    ]


async def aggregated(body: dict[str, Any] = BODY, path: str = CHAT) -> list[str]:
    """What an aggregated worker says."""
    async with VllmMock("aggregated") as mock:
        return texts(await ask(mock, path, body))


async def test_the_bootstrap_server(pair: Pair) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{pair.prefill.bootstrap_url}/query") as answer:
            address = f"tcp://127.0.0.1:{pair.prefill.side_channel_port}"
            assert await answer.json() == {"0": {"engine_id": "eng-p", "worker_addr": {"0": {"0": address}}}}
        async with session.get(pair.prefill.bootstrap_url) as answer:
            assert answer.status == 404


async def test_the_prefill_answers_at_once_and_without_parameters(pair: Pair) -> None:
    answer = await pair.first()
    assert answer.status == 200
    assert answer.json["kv_transfer_params"] is None
    assert pair.prefill.pins == ("t1",)
    assert pair.prefill.pinned == 1
    assert texts(await pair.second(pair.params())) == await aggregated()
    assert pair.decode.legs[0].kv == "transferred"
    await pair.prefill.freed()


async def test_the_decode_may_come_first(pair: Pair) -> None:
    second = asyncio.create_task(pair.second(pair.params()))
    await pair.decode.received()
    await pair.first()
    assert texts(await second) == await aggregated()
    assert pair.prefill.pinned == 0
    assert pair.decode.external_hits > 0


async def test_the_bootstrap_is_asked_once(pair: Pair) -> None:
    for transfer in ("t1", "t2", "t3"):
        await asyncio.gather(pair.first(transfer), pair.second(pair.params(transfer)))
    assert pair.prefill.bootstrap_queries == 1
    assert [record.kv for record in pair.decode.legs] == ["transferred"] * 3


async def test_another_prompt_in_the_transfer_gives_its_text(pair: Pair) -> None:
    other = BODY | {"messages": [{"role": "user", "content": "Something else"}]}
    await pair.first(body=other)
    assert texts(await pair.second(pair.params())) == await aggregated(other)
    assert pair.decode.legs[0].kv == "foreign"


async def test_one_transfer_for_a_list_answers_all_alike(pair: Pair) -> None:
    body: dict[str, Any] = {"prompt": ["one", "two, longer"], "max_tokens": 5}
    await pair.first(body=body, path=COMPLETIONS)
    found = texts(await pair.second(pair.params(), body, COMPLETIONS))
    expected = await aggregated(body, COMPLETIONS)
    assert found == [expected[1]] * 2
    assert pair.decode.legs[0].kv == "foreign"


@pytest.mark.parametrize(
    "fields", [{"remote_engine_id": "unknown"}, {"remote_bootstrap_addr": "http://127.0.0.1:1"}], ids=["id", "address"]
)
async def test_an_unknown_engine_fails(pair: Pair, fields: dict[str, str]) -> None:
    await pair.first()
    answer = await pair.second(pair.params(**{"remote_engine_id": "unknown", **fields}))
    assert answer.status == 500
    assert answer.json["error"]["message"] == "Internal server error"
    assert pair.decode.legs[0].kv == "failed"
    assert pair.prefill.pinned


async def test_legs_that_do_not_meet_give_up() -> None:
    async with (
        VllmMock("prefill", connector=MOONCAKE, lease=0.05) as prefill,
        VllmMock("decode", connector=MOONCAKE) as decode,
    ):
        pair = Pair(prefill, decode)
        assert (await pair.second(pair.params("alone"))).status == 500
        await pair.first("lonely")
        await prefill.recorder.until(lambda: prefill.expired == 1, PATIENCE)
        await prefill.freed()
        assert (await pair.second(pair.params("lonely"))).status == 500


async def test_end_of_text_leaves_the_decode_alone() -> None:
    async with (
        VllmMock("prefill", connector=MOONCAKE, lease=0.05, eos_first="hi") as prefill,
        VllmMock("decode", connector=MOONCAKE) as decode,
    ):
        pair = Pair(prefill, decode)
        first, second = await asyncio.gather(pair.first(), pair.second(pair.params()))
        assert first.json["choices"][0]["finish_reason"] == "stop"
        assert (prefill.pinned, second.status) == (0, 500)


async def test_a_transfer_is_served_once(pair: Pair, dial: Dial) -> None:
    await pair.first()
    assert (await pair.second(pair.params())).status == 200
    call = await dial(pair.decode)
    call.send("POST", CHAT, BODY | {"kv_transfer_params": pair.params()})
    await pair.decode.received(2)
    assert pair.decode.legs[1].kv is None
    assert len(pair.decode.live) == 1


async def test_a_prefill_without_a_transfer_id_keeps_nothing(pair: Pair) -> None:
    answer = await ask(pair.prefill, CHAT, BODY | {"kv_transfer_params": {"do_remote_decode": True}})
    assert answer.status == 200
    assert pair.prefill.pinned == 0


async def test_a_decode_without_a_transfer_id_waits_for_ever(pair: Pair, dial: Dial) -> None:
    params = pair.params()
    del params["transfer_id"]
    call = await dial(pair.decode)
    call.send("POST", CHAT, BODY | {"kv_transfer_params": params})
    await pair.decode.received()
    assert pair.decode.legs[0].kv == "stuck"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
async def test_a_decode_without_parameters_recomputes(pair: Pair, params: Any) -> None:
    assert texts(await pair.second(params)) == await aggregated()
    assert pair.decode.legs[0].kv == "recomputed"


@pytest.mark.parametrize(
    ("role", "params"),
    [("prefill", {"do_remote_prefill": True}), ("decode", {"do_remote_decode": True, "transfer_id": "t"})],
)
async def test_the_other_roles_parameters_end_the_process(dial: Dial, role: str, params: dict[str, Any]) -> None:
    async with VllmMock(role, connector=MOONCAKE) as mock:
        call = await dial(mock)
        call.send("POST", CHAT, BODY | {"kv_transfer_params": params})
        await call.ended()
        assert mock.crashed.is_set()


async def test_a_refused_decode_frees(pair: Pair) -> None:
    await pair.first()
    assert (await pair.second(pair.params(), model="nope")).status == 404
    await pair.prefill.freed()


async def test_a_decode_whose_client_leaves_frees(pair: Pair, dial: Dial) -> None:
    call = await dial(pair.decode)
    call.send("POST", CHAT, BODY | {"kv_transfer_params": pair.params()})
    await pair.decode.received()
    await call.close()
    await pair.decode.idle()
    await pair.first()
    await pair.prefill.freed()


async def test_prompt_logprobs_free_without_a_transfer(pair: Pair) -> None:
    await pair.first()
    assert (await pair.second(pair.params(), prompt_logprobs=1)).status == 200
    assert pair.decode.legs[0].kv == "recomputed"
    await pair.prefill.freed()


async def test_a_prefill_that_died_and_was_never_met(pair: Pair) -> None:
    pair.prefill.crash()
    assert (await pair.second(pair.params())).status == 500
    assert pair.decode.legs[0].kv == "failed"


@pytest.mark.parametrize("met", ["before", "now"])
async def test_a_prefill_that_dies_after_they_have_met_is_waited_for(pair: Pair, dial: Dial, met: str) -> None:
    """Seen with the engine: more than 90 s."""
    call = await dial(pair.decode)
    if met == "before":
        await asyncio.gather(pair.first("t0"), pair.second(pair.params("t0")))
        pair.prefill.crash()
        pair.decode.clear()
        call.send("POST", CHAT, BODY | {"kv_transfer_params": pair.params()})
        await pair.decode.received()
    else:
        call.send("POST", CHAT, BODY | {"kv_transfer_params": pair.params()})
        await pair.prefill.wanted()
        pair.prefill.crash()
    with pytest.raises(TimeoutError):
        await pair.decode.recorder.until(lambda: not pair.decode.live, 0.4)  # longer than who never met it waits
    await call.close()
    await pair.decode.idle()
    assert pair.decode.engine.blocks.usage == 0


async def test_a_decode_that_died_wants_nothing(pair: Pair, dial: Dial) -> None:
    call = await dial(pair.decode)
    call.send("POST", CHAT, BODY | {"kv_transfer_params": pair.params()})
    await pair.prefill.wanted()
    pair.decode.crash()
    await pair.prefill.wanted(0)


async def test_twenty_that_ask_in_vain_are_all_that_a_prefill_attends_to(pair: Pair) -> None:
    """Seen with the engine: then no decode gets anything, until the prefill gives one up."""
    vain = [await pair.second(pair.params(f"vain-{number}"), model="nope") for number in range(19)]
    assert {answer.status for answer in vain} == {404}
    await pair.prefill.wanted(19)
    assert (await asyncio.gather(pair.first("t0"), pair.second(pair.params("t0"))))[1].status == 200
    await pair.second(pair.params("vain-19"), model="nope")
    await pair.prefill.wanted(20)
    _, waiting = await pair.first("t1"), asyncio.create_task(pair.second(pair.params("t1")))
    await pair.prefill.wanted(21)
    assert not waiting.done()
    await pair.first("vain-7")
    assert (await waiting).status == 200
    await pair.prefill.wanted(19)


async def test_nothing_is_left_of_a_mock_that_was_stopped() -> None:
    before = asyncio.all_tasks()
    async with VllmMock("prefill", connector=MOONCAKE) as prefill, VllmMock("decode", connector=MOONCAKE) as decode:
        pair = Pair(prefill, decode)
        assert (await pair.second(pair.params(), model="nope")).status == 404  # which is fetched in vain
        await prefill.wanted()
        await decode.stop()
        await prefill.wanted(0)
    assert asyncio.all_tasks() == before
