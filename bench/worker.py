"""Fast stand-in engines for the benchmark: SGLang's answers without its checks, in one process of little cost.

A decode worker answers when the prefill leg with the same room has arrived as a whole, as on real engines; a leg
without a room is answered at once.

``python -m bench.worker`` serves prefill and decode workers on free ports and prints them as one JSON line. A stream
comes as an engine sends it: every ``--step-ms`` one decode step hands one token to every running stream, unless the
request wants a burst.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import uvloop

from bench.prompts import MODEL, Answer

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNKS: Final = 200
_MAX_HEAD = 64 * 1024
_EDGE = 512  # where a gateway puts the handoff's fields: in front of the client's fields or behind them


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


def _response(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status, content_type, len(body), body,
    )  # fmt: skip


_ROOM = re.compile(rb'"bootstrap_room":(\d+)')
_NOT_FOUND = _response(b'{"detail":"Not Found"}', b"404 Not Found")
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass(slots=True)
class Counts:
    """What a worker received since its start; the benchmark checks that every request made both of its legs."""

    legs: int = 0
    handoffs: int = 0  # legs that carry a bootstrap_room
    body_bytes: int = 0


class DecodeSteps:
    """The engine's loop: one step per interval, one token per running stream and step."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._streams: dict[Connection, int] = {}
        self._running = False

    def add(self, stream: Connection) -> None:
        self._streams[stream] = 0
        if not self._running:
            self._running = True
            self._schedule(asyncio.get_running_loop().time())

    def drop(self, stream: Connection) -> None:
        self._streams.pop(stream, None)

    def _schedule(self, previous: float) -> None:
        loop = asyncio.get_running_loop()
        due = max(previous + self._interval, loop.time())  # a late step is not made up for
        loop.call_at(due, self._step, due)

    def _step(self, due: float) -> None:
        for stream, position in list(self._streams.items()):
            if stream.write_event(position):
                self._streams[stream] = position + 1
            else:
                del self._streams[stream]
        self._running = bool(self._streams)
        if self._running:
            self._schedule(due)


class Rooms:
    """Where a decode leg waits for the prefill leg of its room."""

    def __init__(self) -> None:
        self._prefilled: set[bytes] = set()
        self._waiting: dict[bytes, Callable[[], None]] = {}

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


@dataclass(slots=True, eq=False)
class Engine:
    """One worker: its role, its prepared answers, its counts."""

    role: str
    steps: dict[Answer, DecodeSteps]
    rooms: Rooms
    counts: Counts = field(default_factory=Counts)
    chat: bytes = b""
    events: list[bytes] = field(default_factory=list)
    answers: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chat = _response(chat_answer(self.role))
        self.events = [b"%x\r\n%s\r\n" % (len(e), e) for e in stream_events(self.role)]
        self.events[-1] += b"0\r\n\r\n"
        self.answers = {path: _response(json.dumps(body).encode()) for path, body in _info(self.role).items()}
        self.answers[b"/health"] = _response(b"", content_type=b"text/plain")

    def get(self, path: bytes) -> bytes:
        """The answer to a GET; the query string does not matter here."""
        path = path.partition(b"?")[0]
        if path == b"/bench/counts":
            return _response(json.dumps(asdict(self.counts)).encode())
        return self.answers.get(path, _NOT_FOUND)


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


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection: content-length and chunked bodies, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport
        self._head = bytearray()  # bytes of an unfinished head
        self._body: Body | None = None
        self._path = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        for steps in self._engine.steps.values():
            steps.drop(self)

    def data_received(self, data: bytes) -> None:
        while data:
            if self._body is None:
                self._head += data
                data = b""
                end = self._head.find(b"\r\n\r\n")
                if end >= 0:
                    data = bytes(self._head[end + 4 :])
                    head = bytes(self._head[:end])
                    self._head.clear()
                    self._start(head)
                elif len(self._head) > _MAX_HEAD:
                    self._transport.abort()
                    return
            if self._body is not None:
                data = self._body.feed(data)
                if self._body.complete:
                    body, self._body = self._body, None
                    self._finish(body)

    def _start(self, head: bytes) -> None:
        line, _, rest = head.partition(b"\r\n")
        method, self._path, _ = line.split(b" ", 2)
        lower = rest.lower()
        if b"\r\nexpect: 100-continue" in b"\r\n" + lower:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if method == b"GET":
            self._transport.write(self._engine.get(self._path))
        else:
            self._body = Body.of(b"\r\n" + lower + b"\r\n")

    def _finish(self, body: Body) -> None:
        if self._path == b"/abort_request":
            self._transport.write(_response(b"{}"))
            return
        counts = self._engine.counts
        counts.legs += 1
        counts.body_bytes += body.size
        ends = (body.first + body.last).replace(b" ", b"")
        room = _ROOM.search(ends)
        if room is None:
            self._answer(ends)
            return
        counts.handoffs += 1
        if self._engine.role == "decode":
            self._engine.rooms.when_prefilled(room[1], partial(self._answer, ends))
        else:
            self._answer(ends)
            self._engine.rooms.prefilled(room[1])

    def _answer(self, ends: bytes) -> None:
        if self._transport.is_closing():
            return
        if b'"stream":true' in ends:
            self._transport.write(_STREAM_HEAD)
            burst = b'"user":"%s"' % Answer.BURST.value.encode() in ends
            self._engine.steps[Answer.BURST if burst else Answer.PACED].add(self)
        elif b'"messages"' in ends:
            self._transport.write(self._engine.chat)
        else:
            self._transport.write(_response(b'{"message":"no messages"}', b"400 Bad Request"))

    def write_event(self, position: int) -> bool:
        """Write the stream's next event; false when it was the last."""
        self._transport.write(self._engine.events[position])
        return position + 1 < len(self._engine.events)


@dataclass(slots=True)
class Body:
    """A request body on its way in: counted, not kept, but for both of its ends."""

    remaining: int  # bytes until the end, or until the end of the current chunk
    chunked: bool
    size: int = 0
    first: bytes = b""
    last: bytes = b""
    complete: bool = False
    _line: bytearray = field(default_factory=bytearray)  # a chunk-size line that is not yet whole
    _ended: bool = False  # the chunk of size 0 has been seen

    @classmethod
    def of(cls, lower_head: bytes) -> Body:
        if b"\r\ntransfer-encoding: chunked\r\n" in lower_head:
            return cls(remaining=0, chunked=True)
        _, found, rest = lower_head.partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0]) if found else 0
        return cls(remaining=length, chunked=False, complete=length == 0)

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to this body; returns what is behind it."""
        if not self.chunked:
            taken, rest = data[: self.remaining], data[self.remaining :]
            self._take(taken)
            self.complete = self.remaining == 0
            return rest
        while data and not self.complete:
            if self.remaining:
                taken, data = data[: self.remaining], data[self.remaining :]
                self._take(taken)
                continue
            data = self._size_line(data)
        return data

    def _size_line(self, data: bytes) -> bytes:
        """Read a chunk-size line, or a trailer. Empty lines are the ends of chunks, and at last of the body."""
        line, newline, rest = data.partition(b"\n")
        self._line += line
        if newline:
            text = bytes(self._line).strip()
            self._line.clear()
            if self._ended:
                self.complete = not text
            elif text:
                self.remaining = int(text.partition(b";")[0], 16)
                self._ended = self.remaining == 0
        return rest

    def _take(self, data: bytes) -> None:
        self.size += len(data)
        self.remaining -= len(data)
        if len(self.first) < _EDGE:
            self.first += data[: _EDGE - len(self.first)]
        self.last = data[-_EDGE:] if len(data) >= _EDGE else (self.last + data)[-_EDGE:]


async def serve(prefill: int, decode: int, step: float) -> dict[str, list[int]]:
    """Start the workers on free loopback ports; returns the ports by role."""
    loop = asyncio.get_running_loop()
    rooms = Rooms()
    ports: dict[str, list[int]] = {"prefill": [], "decode": []}
    for role, number in (("prefill", prefill), ("decode", decode)):
        for _ in range(number):
            engine = Engine(role, {Answer.PACED: DecodeSteps(step), Answer.BURST: DecodeSteps(0)}, rooms)
            server = await loop.create_server(partial(Connection, engine), "127.0.0.1", 0, backlog=1024)
            ports[role].append(server.sockets[0].getsockname()[1])
    return ports


async def _main(options: argparse.Namespace) -> None:
    ports = await serve(options.prefill, options.decode, options.step_ms / 1000)
    print(json.dumps(ports), flush=True)
    # The parent holds the other end of our standard input: when it goes, for whatever reason, so do we.
    await asyncio.to_thread(sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--prefill", type=int, default=2, help="number of prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="number of decode workers")
    parser.add_argument("--step-ms", type=float, default=2.0, help="time between two tokens of a stream")
    uvloop.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
