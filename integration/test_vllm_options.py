"""What the operator may say about failures of vLLM pairs: --on-prefill-failure, --disable-retries, --kv-missing."""

from __future__ import annotations

import pytest
from product import PROMPT
from vllm_product import WAYS, Together, VllmProduct, of_all, once
from vllm_requests import CHAT, COMPLETION, OTHER, TEXT, names

from extproc.mock import Fault, Point

CHATS = ("/v1/chat/completions", CHAT)
STREAM = ("/v1/chat/completions", {**CHAT, "stream": True})
LIST = ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER]})
LOGPROBS = ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1})
KINDS = {"chat": CHATS, "chat stream": STREAM, "list": LIST, "logprobs": LOGPROBS}
WAY = pytest.mark.parametrize("way", ["nixl", "mooncake", "mooncake in turn"])
FAILURES = {
    "500": (Fault(status=500), 502, "prefill_failed"),
    "503": (Fault(status=503, headers=(("retry-after", "7"),)), 503, "prefill_failed"),
    "reset": (Fault(status=200, drop=Point.BEFORE_HEAD), 502, "prefill_connection_lost"),
}


@WAY
@pytest.mark.parametrize(
    ("prefills", "settings"),
    [(1, {}), (2, {"on_prefill_failure": "fail"}), (2, {"disable_retries": True})],
    ids=["no other", "fail", "no retries"],
)
async def test_a_failure_is_told_at_once(way, prefills, settings):
    async with VllmProduct(prefills, 2, way=WAYS[way], **settings) as product:
        for kind in KINDS.values():
            for fault, status, code in FAILURES.values():
                siblings = 1 if kind is LIST else 0
                once(product.prefills, fault, times=1)
                once(product.prefills, Fault(delay_first_token=2 * PROMPT), times=siblings)
                answer = await product.post(*kind)
                assert (answer.status, answer.code) == (status, code)
                assert answer.header("x-pd-attempts") is None
                assert answer.header("retry-after") == dict(fault.headers).get("retry-after")
                assert answer.seconds < PROMPT  # which the sibling is not
                await product.settled()
                await product.forget()


async def test_the_decode_may_do_without_the_prefill():
    async with VllmProduct(2, 1, on_prefill_failure="decode-only") as product:
        for kind in KINDS.values():
            siblings = 1 if kind is LIST else 0
            once(product.prefills, Fault(status=500, until=Together(product.prefills, 1 + siblings)))
            once(product.prefills, product.outlasting, times=siblings)
            answer = await product.post(*kind)
            assert answer.status == 200, answer.body
            assert names(answer)[1] == "recomputed"
            await product.settled()
            assert {leg.kv for leg in of_all(product.decodes)} == {"recomputed"}
            assert all(record.note for record in product.records.all)
            await product.forget()
        once(product.prefills, Fault(status=400, body="no"))
        assert (await product.post(*CHATS)).code == "prefill_rejected"  # nor would the decode have it


NO_PARAMS = Fault(status=200, body='{"id":"x","object":"x","choices":[],"kv_transfer_params":null}', delay_head=0.05)


async def test_a_missing_kv_cache_may_be_computed():
    async with VllmProduct(1, 1) as product:
        for kind in (CHATS, STREAM):
            product.prefill.fail(NO_PARAMS)
            answer = await product.post(*kind)
            assert (answer.status, names(answer)[1]) == (200, "recomputed")
            await product.settled()
            assert product.decode.legs[0].kv == "recomputed"
            assert product.records.all[0].note
            await product.forget()


async def test_a_missing_kv_cache_may_be_a_failure():
    async with VllmProduct(2, 1, kv_missing="fail") as product:
        for kind in (CHATS, STREAM, LIST):
            once(product.prefills, NO_PARAMS, times=2)
            answer = await product.post(*kind)
            assert (answer.status, answer.code) == (502, "kv_missing")
            await product.settled()
            assert not of_all(product.decodes)
            await product.forget()


async def test_an_old_engine_hands_over_although_the_first_token_is_the_last():
    """It returns no parameters for a stop; so the prefill leg is told not to stop."""
    options = {"old_engine": True, "eos_first": "fox"}
    async with VllmProduct(1, 1, options=options) as product:
        answer = await product.post(*CHATS)
        assert (answer.status, names(answer)[1]) == (200, "handed")
        assert product.decode.legs[0].kv == "transferred"
        messages = ("/v1/messages", {**CHAT, "max_tokens": 9})  # has no word for that
        answer = await product.post(*messages)
        assert (answer.status, names(answer)[1]) == (200, "recomputed")
        await product.settled()
