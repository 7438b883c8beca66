"""vLLM's answers without its checks, NIXL's way: the decode leg must bring what the prefill leg was answered.

Kept of the engine (0.32, docs/vllm-facts.md): a leg of one token that asks for remote decode is answered with whole
parameters, whose block ids grow with the prompt (16 tokens a block); a decode leg with anything else than a prefill's
parameters is refused, here with 400, which counts as a wrong answer; so are parameters that were used before. A leg
without any is answered as an aggregated server would, and not counted as a handoff. Prompt token ids are given to who
asks for them, and taken with the parameters.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from bench.engine import BAD_REQUEST, CHUNKS, Client, DecodeSteps, Engine, response
from bench.prompts import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.prompts import Answer
    from bench.request_body import Body

_WHOLE = 1 << 30  # of the body is looked at: the parameters of a long prompt are long
_EDGE = 1024  # where the fields are that are looked for in both ends
_BYTES_PER_TOKEN = 4
_TOKENS_PER_BLOCK = 16
_PARAMS = b'"kv_transfer_params"'
_OBJECT = re.compile(rb"\s*:\s*(\{[^{}]*\})")
_ONE_TOKEN = re.compile(rb'"max_(?:completion_)?tokens":1[,}]')
_REQUEST_ID = re.compile(rb'"remote_request_id":"([^"]*)"')
_IDS_REFUSED = (
    b'{"error":{"message":"kv_transfer_params[\'prompt_token_ids\'] must not be empty","type":"BadRequestError"}}'
)


def chat_answer(role: str) -> bytes:
    """The whole non-streamed answer's body; ``kv_transfer_params`` is null."""
    message = {"role": "assistant", "content": " Paris." if role == "decode" else " P", "refusal": None,
               "annotations": None, "audio": None, "function_call": None, "reasoning": None}  # fmt: skip
    answer = {
        "id": "chatcmpl-9811d3c5cfc562be", "object": "chat.completion", "created": 1795976786, "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
                     "token_ids": None, "routed_experts": None}],
        "service_tier": None, "system_fingerprint": "vllm-0.32.0-618f2dbf",
        "usage": {"prompt_tokens": 36, "total_tokens": 39, "completion_tokens": 3, "prompt_tokens_details": None},
        "prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None,
    }  # fmt: skip
    return _compact(answer)


def stream_events(role: str) -> list[bytes]:
    """The SSE events of a streamed answer: 200 tokens from a decode worker, one from a prefill worker."""
    tokens = CHUNKS if role == "decode" else 1

    def event(choices: list[object], **more: object) -> bytes:
        chunk = {"id": "chatcmpl-8a6ef46550c803d2", "object": "chat.completion.chunk", "created": 1795976786,
                 "model": MODEL, "choices": choices}  # fmt: skip
        return b"data: " + _compact(chunk | more) + b"\n\n"

    def choice(delta: dict[str, str], **more: object) -> list[object]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more]

    usage = {"prompt_tokens": 36, "total_tokens": 36 + tokens, "completion_tokens": tokens}
    return [
        event(choice({"role": "assistant", "content": ""}), prompt_token_ids=None),
        *(event(choice({"content": f" word{i}"}, token_ids=None)) for i in range(tokens)),
        event(choice({}, finish_reason="stop", stop_reason=None, token_ids=None)),
        event([], usage=usage),
        b"data: [DONE]\n\n",
    ]


class Handed:
    """The parameters that prefill workers gave out and no decode worker has got yet, by request id."""

    def __init__(self) -> None:
        self._given: dict[bytes, bytes] = {}
        self._numbers = count(1)

    def give(self, tokens: int) -> bytes:
        """The parameters of a new request, as JSON members without the braces."""
        request = b"chatcmpl-%016x-946dfe4f" % next(self._numbers)
        members = (
            b'"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%s]],'
            b'"remote_engine_id":"2655a1f4-0833-4198-9c76-2a44d8d167a9","remote_request_id":"%s",'
            b'"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,'
            b'"remote_num_tokens":%d,"remote_blocks_expiry_time":null,"transfer_mode":"pull",'
            b'"remote_prefill_cached_tokens":0'
        ) % (_numbers(-(-tokens // _TOKENS_PER_BLOCK)), request, tokens)
        self._given[request] = members
        return members

    def takes(self, params: bytes) -> bool:
        """Whether ``params`` (without spaces) has all that was given out under its request id, for the first time."""
        found = _REQUEST_ID.search(params)
        members = self._given.pop(found[1], None) if found else None
        return members is not None and members in params


class Vllm(Engine):
    """See the module."""

    edge = _WHOLE

    def __init__(self, role: str, steps: Mapping[Answer, DecodeSteps], handed: Handed) -> None:
        super().__init__(role, steps, chat=chat_answer(role), events=stream_events(role), info=_info())
        self._handed = handed
        before, _, behind = chat_answer(role).partition(b'"prompt_token_ids":null,"kv_transfer_params":null')
        self._around = before, behind

    def leg(self, client: Client, body: Body) -> None:
        """See Engine."""
        raw = body.first
        ends = (raw[:_EDGE] + raw[-_EDGE:]).replace(b" ", b"")
        params = _params(raw)
        if self.role == "prefill" and b'"do_remote_decode":true' in params:
            client.write(self._prefilled(ends, body.size // _BYTES_PER_TOKEN))
        elif self.role == "decode" and params:
            self._decode(client, ends, params)
        else:
            self.answer(client, ends)

    def _prefilled(self, ends: bytes, tokens: int) -> bytes:
        if not _ONE_TOKEN.search(ends) or b'"stream":true' in ends:
            return response(b'{"error":{"message":"not a leg of one token"}}', BAD_REQUEST)
        self.counts.handoffs += 1
        ids = b"[%s]" % _numbers(tokens) if b'"return_token_ids":true' in ends else b"null"
        before, behind = self._around
        params = self._handed.give(tokens)
        return response(b'%s"prompt_token_ids":%s,"kv_transfer_params":{%s}%s' % (before, ids, params, behind))

    def _decode(self, client: Client, ends: bytes, params: bytes) -> None:
        if b'"prompt_token_ids":[]' in params:  # a gateway that asks whether they are taken
            client.write(response(_IDS_REFUSED, BAD_REQUEST))
        elif self._handed.takes(params):
            self.counts.handoffs += 1
            self.answer(client, ends)
        else:
            client.write(response(b'{"error":{"message":"not a prefill\'s parameters"}}', BAD_REQUEST))


def _params(raw: bytes) -> bytes:
    """The parameters in a body, without spaces; empty where there are none."""
    at = raw.rfind(_PARAMS)
    found = _OBJECT.match(raw, at + len(_PARAMS)) if at >= 0 else None
    return found[1].replace(b" ", b"") if found else b""


@cache  # there are few different lengths
def _numbers(number: int) -> bytes:
    return b",".join(b"%d" % (10_000 + each) for each in range(number))


def _info() -> dict[bytes, object]:
    """What gateways ask a vLLM worker when they register it; nothing tells its role or its connector."""
    card = {"id": MODEL, "object": "model", "created": 1795976785, "owned_by": "vllm", "root": MODEL, "parent": None,
            "max_model_len": 1_048_576, "permission": []}  # fmt: skip
    return {b"/v1/models": {"object": "list", "data": [card]}, b"/version": {"version": "0.32.0"}}


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
