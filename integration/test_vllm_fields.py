"""A client's word on KV transfers never reaches a vLLM worker; the prefill's word reaches the decode untouched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from vllm_product import WAYS, VllmProduct, params
from vllm_requests import CHAT, COMPLETION, DECODE_ALONE, IDS, LISTS, MODEL, ONE, OTHER, PREFILL_ALONE, STREAMS, names

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Either would end the decode's process.
DEADLY = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "mine", "remote_host": "10.0.0.1"}
GIVEN = {
    "kv_transfer_params": DEADLY,
    "ec_transfer_params": {"x": 1},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_room": 5,
    "data_parallel_rank": 3,
}
ALL = (
    ONE | {f"list of {k}": q for k, q in LISTS.items()} | DECODE_ALONE | {f"{k} 1": q for k, q in PREFILL_ALONE.items()}
)
ALL = {name: question for name, question in ALL.items() if "prompt_logprobs" not in question[1]}
# Spaces, an order, a number and a key that nobody expects.
RETURNED = (
    '{ "do_remote_prefill" : true,"new_key":[1.50, {"a":null}],"do_remote_decode":false, "remote_block_ids":[[7]],'
    '"remote_engine_id":"e","remote_request_id":"r", "remote_host":"127.0.0.1","remote_port":1e0 }'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param]) as product:
        yield product


def said(product: VllmProduct) -> str:
    """Everything that the workers' engines were told."""
    return "".join(record.body.decode() for mock in product.mocks for record in mock.requests)


@STREAMS
@pytest.mark.parametrize("question", ALL.values(), ids=ALL)
async def test_a_clients_word_on_transfers_goes_nowhere(product: VllmProduct, question, stream):
    path, body = question
    answer = await product.post(path, {**body, **GIVEN, "stream": stream})
    assert answer.status == 200, answer.body
    await product.settled()
    assert not any(mock.crashed.is_set() for mock in product.mocks)
    told = said(product)
    assert "10.0.0.1" not in told
    assert "mine" not in told
    for leg in (leg for mock in product.mocks for leg in mock.legs):
        assert not GIVEN.keys() - {"kv_transfer_params"} & leg.json.keys()


@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("place", ["vllm_xargs", "extra_args"])
async def test_where_it_hides_it_is_refused(product: VllmProduct, place, key):
    hidden = {key: DEADLY}
    path, body = ONE["generate"] if place == "extra_args" else ONE["chat"]
    if place == "extra_args":
        body = {**body, "sampling_params": {"max_tokens": 3, "extra_args": hidden}}
    else:
        body = {**body, "vllm_xargs": hidden}
    answer = await product.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.code
    assert not [leg for mock in product.mocks for leg in mock.legs]


@pytest.mark.parametrize("key", ["kv_transfer_params", "prompt", "stream", "n"])
async def test_what_is_said_twice_is_refused(product: VllmProduct, key):
    value = json.dumps(COMPLETION.get(key, 1))
    body = json.dumps({**COMPLETION, "n": 1})[:-1] + f', "{key}": {value}, "{key}": {value}}}'
    answer = await product.client.post("/v1/completions", body.encode())
    assert (answer.status, answer.code) == (400, "duplicate_parameter")


async def test_other_extra_arguments_are_passed_on(product: VllmProduct):
    await product.post("/v1/chat/completions", {**CHAT, "vllm_xargs": {"mine": 1}})
    assert [leg.json["vllm_xargs"] for leg in product.legs] == [{"mine": 1}] * 2


# -- what the prefill says --------------------------------------------------------------------------------------------


@STREAMS
@pytest.mark.parametrize("question", ONE.values(), ids=ONE)
async def test_returned_parameters_are_relayed_byte_for_byte(product: VllmProduct, question, stream):
    if product.way.handoff == "mooncake":
        pytest.skip("a prefill with Mooncake returns no parameters")
    product.prefill.fail(Fault(status=200, body=f'{{"id":"x", "kv_transfer_params": {RETURNED}}}'))
    product.decode.fail(Fault(status=200, body="{}"))
    path, body = question
    answer = await product.post(path, {**body, "stream": stream})
    assert (answer.status, names(answer)[1]) == (200, "handed")
    _, decode = product.legs
    assert decode.body.count(b'"kv_transfer_params":' + RETURNED.encode()) == 1


RETURNS = {
    "none": "null",
    "empty": "{}",
    "no blocks": '{"do_remote_prefill":true,"remote_engine_id":"e","remote_request_id":"r"}',
    "empty blocks": RETURNED.replace("[[7]]", "[]"),
    "no request": RETURNED.replace('"r"', "null"),
    "not an object": '["do_remote_prefill"]',
}


@pytest.mark.parametrize("returned", RETURNS.values(), ids=RETURNS)
async def test_parameters_that_would_kill_the_decode_are_not(product: VllmProduct, returned):
    if product.way.handoff != "nixl":
        pytest.skip("with NIXL alone the gateway reads the parameters")
    product.prefill.fail(Fault(status=200, body=f'{{"id":"x","kv_transfer_params":{returned}}}'))
    answer = await product.post("/v1/chat/completions", CHAT)
    assert (answer.status, names(answer)[1]) == (200, "recomputed")
    decode = product.legs[1]
    assert (decode.kv, not params(decode)) == ("recomputed", True)
    assert not product.decode.crashed.is_set()
    await product.settled()
    (record,) = product.records.all
    assert record.note


async def test_the_prefill_leg_computes_what_the_decode_answers(product: VllmProduct):
    """Fields that make the prompt stay in both legs."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    extra = {"tools": tools, "chat_template_kwargs": {"x": 1}, "add_generation_prompt": False, "cache_salt": "s"}
    await product.post("/v1/chat/completions", {**CHAT, **extra})
    for leg in product.legs:
        assert {key: leg.json[key] for key in extra} == extra
    if product.way.handoff != "passthrough":
        assert product.legs[1].kv == "transferred"


async def test_prompts_as_token_ids_stay_token_ids(product: VllmProduct):
    await product.post("/v1/completions", {**MODEL, "prompt": IDS, "max_tokens": 2, "suffix": None, "x": OTHER})
    assert [leg.json["prompt"] for leg in product.legs] == [IDS] * 2
