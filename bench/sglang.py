"""SGLang's answers without its checks: both legs come at once and meet in a room.

A decode leg is answered when the prefill leg with the same room has arrived as a whole, as on real engines; a leg
without a room is answered at once. A prefill leg whose request wants it (``Answer.LATE``) fails the first time, a few
milliseconds before the decode of its room would answer.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING

from bench.engine import CHUNKS, Client, DecodeSteps, Engine, response
from bench.prompts import MODEL, Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.request_body import Body

_EDGE = 512  # where a gateway puts the handoff's fields: in front of the client's fields or behind them
_ROOM = re.compile(rb'"bootstrap_room":(\d+)')
_NUMBER = re.compile(rb"Conversation(\d{10})")
_LATE = tuple(b'"user":"%s"' % answer.value.encode() for answer in Answer if answer.late)
_FAILED = response(b'{"error":{"message":"out of memory","code":500}}', b"500 Internal Server Error")


def chat_answer(role: str) -> bytes:
    """The whole non-streamed answer's body. A prefill worker's differs, so that a gateway cannot mix them up."""
    content = " Paris." if role == "decode" else " P"
    answer = {
        "id": "chatcmpl-54b6dbdc", "object": "chat.completion", "created": 1795959022, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content, "reasoning_content": None,
                     "tool_calls": None}, "logprobs": None, "finish_reason": "stop", "matched_stop": None}],
        "usage": {"prompt_tokens": 36, "total_tokens": 39, "completion_tokens": 3, "prompt_tokens_details": None},
    }  # fmt: skip
    return json.dumps(answer).encode()


def stream_events(role: str) -> list[bytes]:
    """The SSE events of a streamed answer: 200 tokens from a decode worker, one from a prefill worker."""
    tokens = CHUNKS if role == "decode" else 1

    def event(choices: list[object], **more: object) -> bytes:
        chunk = {"id": "chatcmpl-75be5ae2", "object": "chat.completion.chunk", "created": 1795959022, "model": MODEL}
        return b"data: " + json.dumps(chunk | {"choices": choices} | more).encode() + b"\n\n"

    def choice(delta: dict[str, str], reason: str | None = None) -> list[object]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]

    usage = {"prompt_tokens": 36, "total_tokens": 36 + tokens, "completion_tokens": tokens}
    return [
        event(choice({"role": "assistant", "content": ""})),
        *(event(choice({"content": f" word{i}"})) for i in range(tokens)),
        event(choice({}, "stop")),
        event([], usage=usage),
        b"data: [DONE]\n\n",
    ]


class Rooms:
    """Where a decode leg waits for the prefill leg of its room; and which requests have failed once."""

    def __init__(self) -> None:
        self._prefilled: set[bytes] = set()
        self._waiting: dict[bytes, Callable[[], None]] = {}
        self._failed: set[bytes] = set()

    def prefilled(self, room: bytes) -> None:
        """The room's prefill leg has arrived."""
        if answer := self._waiting.pop(room, None):
            answer()
        else:
            self._prefilled.add(room)

    def when_prefilled(self, room: bytes, answer: Callable[[], None]) -> None:
        """Call ``answer`` as soon as the room's prefill leg has arrived."""
        if room in self._prefilled:
            self._prefilled.remove(room)
            answer()
        else:
            self._waiting[room] = answer

    def fails(self, request: bytes) -> bool:
        """Whether the prefill of this request fails: the first time, not the second."""
        if request in self._failed:
            self._failed.remove(request)
            return False
        self._failed.add(request)
        return True


class Sglang(Engine):
    """See the module."""

    edge = _EDGE

    def __init__(self, role: str, steps: Mapping[Answer, DecodeSteps], rooms: Rooms) -> None:
        super().__init__(role, steps, chat=chat_answer(role), events=stream_events(role), info=_info(role))
        self._rooms = rooms

    def other(self, path: bytes) -> bytes:
        """See Engine."""
        return response(b"{}") if path == b"/abort_request" else super().other(path)

    def leg(self, client: Client, body: Body) -> None:
        """See Engine."""
        ends = (body.first + body.last).replace(b" ", b"")
        room = _ROOM.search(ends)
        if room is None:
            self.answer(client, ends)
            return
        self.counts.handoffs += 1
        if self.role == "decode":
            self._rooms.when_prefilled(room[1], partial(self.answer, client, ends))
        elif any(mark in ends for mark in _LATE) and self._rooms.fails(_NUMBER.findall(ends)[0]):
            client.write(_FAILED)
        else:
            self.answer(client, ends)
            self._rooms.prefilled(room[1])


def _info(role: str) -> dict[bytes, object]:
    """What gateways ask an SGLang worker when they register and watch it; its limits never hold a request back."""
    card = {"id": MODEL, "object": "model", "created": 1795959021, "owned_by": "sglang", "root": MODEL,
            "parent": None, "max_model_len": 1_048_576}  # fmt: skip
    server = {
        "model_path": MODEL, "tokenizer_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1,
        "pp_size": 1, "disaggregation_mode": role, "disaggregation_bootstrap_port": 8998, "max_total_tokens": 8_388_608,
        "max_running_requests": 4096, "version": "0.5.23", "load_balance_method": "auto", "is_embedding": False,
        "internal_states": [{"load": 0, "effective_max_running_requests_per_dp": 4096, "last_gen_throughput": 100.0,
                             "memory_usage": {"token_capacity": 8_388_608}}],
    }  # fmt: skip
    model = {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True, "preferred_sampling_params": None,
             "weight_version": "default", "has_image_understanding": False, "has_audio_understanding": False,
             "model_type": "llama", "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    load = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "num_total_tokens": 0,
            "max_total_num_tokens": 8_388_608, "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0,
            "utilization": 0.0, "max_running_requests": 4096}  # fmt: skip
    total = {"total_running_reqs": 0, "total_waiting_reqs": 0, "total_reqs": 0, "avg_token_usage": 0.0,
             "avg_throughput": 0.0, "avg_utilization": 0.0}  # fmt: skip
    loads = {"timestamp": "2026-01-01T00:00:00Z", "dp_rank_count": 1, "loads": [load], "aggregate": total}
    return {
        b"/v1/models": {"object": "list", "data": [card]},
        b"/server_info": server, b"/get_server_info": server,
        b"/model_info": model, b"/get_model_info": model,
        b"/v1/loads": loads,
    }  # fmt: skip
