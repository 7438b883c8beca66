"""What the stand-in engines have in common: prepared answers, counted legs, and the pace of a stream."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from bench.prompts import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.request_body import Body

CHUNKS: Final = 200  # tokens of a streamed answer
CHAT_PATH: Final = b"/v1/chat/completions"


class Kind(Enum):
    """Whose answers a worker gives, and with them which handoff a case has."""

    SGLANG = "sglang"  # both legs at once, meeting in a room
    VLLM = "vllm"  # NIXL: prefill, then decode with what the prefill answered
    SGLANG_GRPC = "sglang-grpc"  # the same over gRPC: the gateway makes tokens of prompts and text of tokens
    VLLM_GRPC = "vllm-grpc"

    @property
    def is_grpc(self) -> bool:
        """Whether workers take tokens over gRPC instead of JSON over HTTP."""
        return self in (Kind.SGLANG_GRPC, Kind.VLLM_GRPC)


class Client(Protocol):
    """The connection that a leg came on."""

    def write(self, data: bytes) -> None:
        """Send; nothing happens when the connection is gone."""


@dataclass(slots=True)
class Counts:
    """What a worker received since its start; the benchmark checks that every request made both of its legs."""

    legs: int = 0
    handoffs: int = 0  # legs that carry what the engine's handoff wants
    body_bytes: int = 0


class DecodeSteps:
    """The engine's loop: one step per interval, one token per running stream and step."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._streams: dict[Client, tuple[Sequence[bytes], int]] = {}
        self._running = False

    def add(self, stream: Client, events: Sequence[bytes]) -> None:
        """Write one of ``events`` per step from now on."""
        self._streams[stream] = events, 0
        if not self._running:
            self._running = True
            self._schedule(asyncio.get_running_loop().time())

    def drop(self, stream: Client) -> None:
        """Its connection is gone."""
        self._streams.pop(stream, None)

    def _schedule(self, previous: float) -> None:
        loop = asyncio.get_running_loop()
        due = max(previous + self._interval, loop.time())  # a late step is not made up for
        loop.call_at(due, self._step, due)

    def _step(self, due: float) -> None:
        for stream, (events, position) in list(self._streams.items()):
            stream.write(events[position])
            if position + 1 < len(events):
                self._streams[stream] = events, position + 1
            else:
                del self._streams[stream]
        self._running = bool(self._streams)
        if self._running:
            self._schedule(due)


class Engine:
    """One worker. Subclasses say what it tells of itself, and when a leg is answered."""

    edge: int  # bytes of each end of a body that it looks at

    def __init__(
        self,
        role: str,
        steps: Mapping[Answer, DecodeSteps],
        *,
        chat: bytes,
        events: Sequence[bytes],
        info: Mapping[bytes, object],
    ) -> None:
        self.role = role
        self.steps = steps
        self.counts = Counts()
        self._chat = response(chat)
        self._events = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
        self._events[-1] += b"0\r\n\r\n"
        self._answers = {path: response(json.dumps(body).encode()) for path, body in info.items()}
        self._answers[b"/health"] = response(b"", content_type=b"text/plain")

    def get(self, path: bytes) -> bytes:
        """The answer to a GET; the query string does not matter here."""
        path = path.partition(b"?")[0]
        if path == b"/bench/counts":
            return response(json.dumps(asdict(self.counts)).encode())
        return self._answers.get(path, _NOT_FOUND)

    def post(self, client: Client, path: bytes, body: Body) -> None:
        """Answer now or later."""
        if path != CHAT_PATH:
            client.write(self.other(path))
            return
        self.counts.legs += 1
        self.counts.body_bytes += body.size
        self.leg(client, body)

    def other(self, path: bytes) -> bytes:  # noqa: ARG002  # for subclasses
        """The answer to a POST that is no chat."""
        return _NOT_FOUND

    def leg(self, client: Client, body: Body) -> None:
        """Answer a chat now or later."""
        raise NotImplementedError

    def answer(self, client: Client, ends: bytes) -> None:
        """The tokens; ``ends`` is what the engine saw of the body, without spaces."""
        if b'"stream":true' in ends:
            client.write(_STREAM_HEAD)
            burst = b'"user":"%s"' % Answer.BURST.value.encode() in ends
            self.steps[Answer.BURST if burst else Answer.PACED].add(client, self._events)
        elif b'"messages"' in ends:
            client.write(self._chat)
        else:
            client.write(response(b'{"message":"no messages"}', BAD_REQUEST))

    def gone(self, client: Client) -> None:
        """A connection was closed."""
        for steps in self.steps.values():
            steps.drop(client)


def response(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> bytes:
    """A whole HTTP/1.1 answer."""
    return b"HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status, content_type, len(body), body,
    )  # fmt: skip


BAD_REQUEST: Final = b"400 Bad Request"
_NOT_FOUND = response(b'{"detail":"Not Found"}', b"404 Not Found")
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
