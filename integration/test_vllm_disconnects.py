"""A client of a vLLM pair that leaves, at any moment: the legs end at once, and no worker keeps blocks for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from http_client import Exchange
from product import PROMPT, soon
from vllm_product import HANDING, WAYS, Together, VllmProduct, kept, of_all, once
from vllm_requests import FEW, KIND, KINDS, parts_of

from extproc.exchange.clock import TAKEN_SECONDS
from extproc.mock import Fault, Outcome, Point, Record

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEAVE: dict[str, Callable[[Exchange], float]] = {"close": Exchange.close, "reset": Exchange.reset}
LEAVES = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HANDING)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param], prefills=2, decodes=2) as product:
        yield product


def see_prompt_ends(legs: list[Record], left: float) -> None:
    """See that the legs ended within the project's bound after the client left."""
    assert legs
    for leg in legs:
        assert leg.ended is not None
        assert leg.ended - left < PROMPT


@LEAVES
@KIND
async def test_while_the_prefill_works(product: VllmProduct, kind, leave):
    """With Mooncake the prefill is let finish, or the decode would keep its blocks; only the decode leg is ended."""
    once(product.prefills, Fault(delay_first_token=60 if product.way.in_turn else 0.4), times=3)
    exchange = await product.client.open(*KINDS[kind])
    prefill = await product.busy(product.prefills)
    await prefill.received(parts_of(kind))
    if not product.way.in_turn:
        decode = await product.busy(product.decodes)
        await decode.received(parts_of(kind))  # what its engine has been told of, it frees
    left = leave(exchange)
    await product.settled()
    if product.way.in_turn:
        see_prompt_ends(of_all(product.prefills), left)
        assert {leg.outcome for leg in of_all(product.prefills)} == {Outcome.CLIENT_CLOSED}
        assert not of_all(product.decodes)
    else:
        see_prompt_ends(of_all(product.decodes), left)
        assert {leg.outcome for leg in of_all(product.prefills)} == {Outcome.COMPLETED}


@LEAVES
@FEW
async def test_as_the_prefill_ends(product: VllmProduct, kind, leave):
    """What is done, and whose answer does not get out, nobody can name: that stays for the engine's own time, alone."""
    if not product.way.in_turn:
        pytest.skip("such a prefill is let finish")
    once(product.prefills, Fault(delay_head=60), times=parts_of(kind))
    exchange = await product.client.open(*KINDS[kind])
    prefill = await product.busy(product.prefills)
    await soon(lambda: len(prefill.pins) == parts_of(kind), "the prefill was never done")
    left = leave(exchange)
    await product.records.until(lambda: product.gateway.alive == 0)
    await soon(lambda: all(leg.ended is not None for leg in of_all(product.prefills)), "the prefill leg goes on")
    see_prompt_ends(of_all(product.prefills), left)
    assert len(prefill.pins) == parts_of(kind)
    prefill.engine.pins.clear()  # as its lease does
    await product.settled()
    assert not any(mock.legs for mock in product.decodes)


@LEAVES
@FEW
async def test_between_the_legs(product: VllmProduct, kind, leave):
    """The prefill's answer is out, and pins blocks; the decode worker has yet to see the request."""
    if not product.way.in_turn:
        pytest.skip("both legs go out at once")
    once(product.decodes, Fault(hang=Point.UPLOAD), times=parts_of(kind))
    exchange = await product.client.open(*KINDS[kind])
    decode = await product.busy(product.decodes)
    await decode.arrived(parts_of(kind))
    assert sum(len(kept(mock)) for mock in product.prefills) == parts_of(kind)
    left = leave(exchange)
    await product.settled()  # nothing is pinned any more
    see_prompt_ends(of_all(product.decodes), left)


@LEAVES
@FEW
async def test_while_the_decode_is_silent(product: VllmProduct, kind, leave):
    once(product.decodes, Fault(delay_head=60), times=3)
    exchange = await product.client.open(*KINDS[kind])
    decode = await product.busy(product.decodes)
    await decode.received(parts_of(kind))
    left = leave(exchange)
    await product.settled()
    see_prompt_ends(of_all(product.decodes), left)
    assert {leg.outcome for leg in of_all(product.decodes)} <= {Outcome.CLIENT_CLOSED}


async def test_many_that_leave_at_work_are_in_nobodys_way(product: VllmProduct):
    """With Mooncake each has its decode ask once more; a prefill that has 20 such questions serves nobody else."""
    once(product.decodes, Fault(delay_token=60), times=60)
    exchanges = [await product.client.open(*KINDS["chat"]) for _ in range(60)]
    await soon(lambda: len(works := of_all(product.decodes)) == 60 and all(leg.kv for leg in works), "not at work")
    for mock in product.mocks:
        mock.behave()
    await asyncio.sleep(TAKEN_SECONDS)  # for the gateway to be sure of that
    for exchange in exchanges:
        exchange.close()
    answer = await product.post(*KINDS["chat"])
    assert (answer.status, answer.header("x-pd-kv")) == (200, "handed")
    await product.settled()


@LEAVES
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("stream")])
async def test_in_a_stream_that_flows(product: VllmProduct, kind, leave):
    once(product.decodes, Fault(delay_token=0.01, tokens=5000), times=3)
    path, body = KINDS[kind]
    exchange = await product.client.open(path, {**body, "max_tokens": 5000})
    for _ in range(3):
        await exchange.piece()
    left = leave(exchange)
    await product.settled()
    see_prompt_ends(of_all(product.decodes), left)
    assert product.records.all[0].status == 200


@LEAVES
@FEW
async def test_in_a_pause_between_two_attempts(product: VllmProduct, kind, leave):
    together = Together(product.prefills, parts_of(kind))
    once(product.prefills, Fault(status=503, headers=(("retry-after", "20"),), until=together))
    once(product.prefills, product.outlasting, times=parts_of(kind) - 1)
    exchange = await product.client.open(*KINDS[kind])
    prefill = await product.busy(product.prefills)
    await prefill.idle()
    decodes = {mock.url for mock in product.decodes}  # a stream's first leg may stay until its late answer ends
    await soon(lambda: product.load.keys() <= decodes, "the first attempt counts on")
    assert product.gateway.alive == 1
    leave(exchange)
    await product.settled()
    assert len({mock.url for mock in product.prefills if of_all([mock])}) == 1
    assert product.records.all[0].attempts == 1


@LEAVES
@pytest.mark.parametrize("kind", ["chat", "chat stream", "messages stream", "list stream"])
async def test_during_a_late_answer(product: VllmProduct, kind, leave):
    """The second attempt after the decode leg was released is answered over a second call."""
    parts = parts_of(kind)
    busy = Fault(status=503, headers=(("retry-after", "0"),), until=Together(product.decodes, parts))
    once(product.decodes, busy)
    once(product.decodes, Fault(delay_head=60), times=2 * parts - 1)
    exchange = await product.client.open(*KINDS[kind])
    await soon(lambda: len({leg.outcome for leg in of_all(product.decodes)}) == 2, "there was no second attempt")
    await soon(lambda: len([m for m in product.decodes if m.live and m.live[0].received]) == 1, "it came to nobody")
    left = leave(exchange)
    await product.settled()
    see_prompt_ends([leg for leg in of_all(product.decodes) if leg.outcome is Outcome.CLIENT_CLOSED], left)


@LEAVES
async def test_in_a_late_stream_that_flows(product: VllmProduct, leave):
    once(product.decodes, Fault(status=503, headers=(("retry-after", "0"),)))
    once(product.decodes, Fault(delay_token=0.01, tokens=5000))
    path, body = KINDS["chat stream"]
    exchange = await product.client.open(path, {**body, "max_tokens": 5000})
    for _ in range(3):
        await exchange.piece()
    assert exchange.reply.header("x-pd-attempts") == "2"
    left = leave(exchange)
    await product.settled()
    see_prompt_ends([leg for leg in of_all(product.decodes) if leg.status != 503], left)


@pytest.mark.parametrize("count", [40])
async def test_many_at_once(product: VllmProduct, count):
    # Where they are let finish, not before the last request has come, however busy the machine is.
    once(product.prefills, Fault(delay_first_token=60 if product.way.in_turn else 3), times=1000)
    kinds = list(KINDS)
    exchanges = [await product.client.open(*KINDS[kinds[number % len(kinds)]]) for number in range(count)]
    await soon(lambda: product.gateway.alive == count, "not all requests came")
    if not product.way.in_turn:  # a decode frees what its engine has been told of
        legs = sum(parts_of(kinds[number % len(kinds)]) for number in range(count))
        await soon(lambda: sum(bool(leg.received) for leg in of_all(product.decodes)) == legs, "not all legs came")
    for number, exchange in enumerate(exchanges):
        LEAVE["reset" if number % 2 else "close"](exchange)
    await product.settled()
    assert len(product.records.all) == count
