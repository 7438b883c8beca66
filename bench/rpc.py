"""gRPC engines' answers without their checks: SGLang's legs meet in a room, vLLM's decode brings what a prefill said.

The text is the same for every request, so that the answers, in which each gateway words the rest its own way, can be
compared by it. The tokenizer is that of the mocks (``extproc/mock/rpc/model.py``).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from bench.engine import CHUNKS, Counts, DecodeSteps, Kind
from bench.prompts import MODEL
from extproc.mock.rpc.engines import NIXL, Facts
from extproc.mock.rpc.model import END, VOCABULARY, decoded, files
from extproc.mock.rpc.tokenizer import chunks, zipped
from extproc.transport.grpc_framing import Status
from extproc.transport.methods import Method, RequestHandler, RpcCall
from extproc.transport.ngh2_server import Ngh2ProcessServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WORDS: Final = tuple(range(VOCABULARY - CHUNKS + 1, VOCABULARY))
_WHOLE: Final = (*_WORDS[:2], END)
_STREAMED: Final = (*_WORDS, END)
_PROMPT_TOKENS: Final = 36
_MANY: Final = 4096  # requests at a time: never too many
_ROOM: Final = 1 << 23  # tokens of cache: always enough
_NO_PARAMS: Final = ""


class Check:
    """Whether an answer has the text and the count of tokens that the worker sent. ``check(body)``: what is wrong."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        ids = _STREAMED if streamed else _WHOLE
        self._tokens = len(ids)
        self._text = decoded(ids)

    def __call__(self, body: bytes) -> str | None:
        """None: it is right."""
        try:
            text, usage = (_of_stream if self._streamed else _of_whole)(body)
        except (ValueError, LookupError, TypeError) as error:
            return f"no answer: {error!r} in {body[-200:]!r}"
        if text != self._text:
            return f"{len(text)} characters that end in {text[-40:]!r}, not {len(self._text)}"
        if usage["completion_tokens"] != self._tokens:
            return f"{usage['completion_tokens']} tokens are counted, not {self._tokens}"
        return None


def _of_whole(body: bytes) -> tuple[str, dict[str, int]]:
    answer = json.loads(body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def _of_stream(body: bytes) -> tuple[str, dict[str, int]]:
    *events, done, end = body.split(b"\n\n")
    if (done, end) != (b"data: [DONE]", b""):
        raise ValueError("no [DONE]")
    text, usage = [], None
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        usage = chunk.get("usage") or usage
    if usage is None:
        raise ValueError("no usage")
    return "".join(text), usage


class Meeting:
    """Where a decode waits for the prefill with the same name; a name meets once."""

    def __init__(self) -> None:
        self._there: set[object] = set()
        self._waiting: dict[object, Callable[[], None]] = {}

    def prefilled(self, name: object) -> None:
        """The prefill is there."""
        if then := self._waiting.pop(name, None):
            then()
        else:
            self._there.add(name)

    def has(self, name: object) -> bool:
        """Whether it has been there, for the first time that this is asked."""
        found = name in self._there
        self._there.discard(name)
        return found

    def when_prefilled(self, name: object, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as the prefill is there."""
        if self.has(name):
            then()
        else:
            self._waiting[name] = then


class RpcEngine:
    """One worker.

    Args:
        kind: whose.
        role: ``prefill`` or ``decode``.
        step: seconds between two tokens of a stream.
        meeting: all workers' own.
        numbers: of prefills.
    """

    def __init__(self, kind: Kind, role: str, step: float, meeting: Meeting, numbers: Iterable[int]) -> None:
        self.role = role
        self.is_vllm = kind is Kind.VLLM_GRPC
        self.counts = Counts()
        self.steps = DecodeSteps(step)
        self.meeting = meeting
        self._numbers = iter(numbers)
        self._server: Ngh2ProcessServer | None = None
        self._facts = _facts(self.is_vllm, role)
        self._messages = self._facts.messages()
        tokens = (_STREAMED, _WHOLE) if role == "decode" else (_STREAMED[:1], _WHOLE[:1])
        self._stream, self._whole = [self._answer(*each) for each in zip(tokens, (True, False), strict=True)]

    async def start(self) -> int:
        """Listen on a free port, which is returned."""
        facts, service = self._facts, self._facts.service
        if self.is_vllm:
            health = self._messages.HealthCheckResponse(healthy=True, message="Health")
        else:
            health = self._messages.HealthCheckResponse(healthy=True)
        server_info, loads = facts.server_info(), facts.loads()
        if not self.is_vllm:
            server_info.max_total_num_tokens = _ROOM
        tokenizer = [chunk.SerializeToString() for chunk in chunks(zipped(files()))]
        told = {
            "HealthCheck": [health.SerializeToString()],
            "GetModelInfo": [facts.model_info().SerializeToString()],
            "GetServerInfo": [server_info.SerializeToString()],
            "GetLoads": [loads.SerializeToString()],
            "Abort": [b""],
            "GetTokenizer": tokenizer,
        }
        methods: dict[str, Method] = {f"/{service}/{name}": partial(_Told, answers) for name, answers in told.items()}
        methods[f"/{service}/Generate"] = partial(_Generate, self)
        server = self._server = Ngh2ProcessServer(others=methods)
        await server.start("127.0.0.1:0", partial(_Told, []))
        for name in ("", service):
            server.set_serving(name, serving=True)
        return int(server.address.rpartition(":")[2])

    async def stop(self) -> None:
        """End, whatever is under way."""
        if self._server is not None:
            await self._server.drain(0)

    def generate(self, leg: _Generate, data: bytes) -> None:
        """Answer a leg now or later."""
        request = self._messages.GenerateRequest.FromString(data)
        self.counts.legs += 1
        self.counts.body_bytes += len(request.tokenized.input_ids)
        answer = self._stream if request.stream else self._whole
        if self.is_vllm:
            self._vllm(leg, request, answer)
        elif not request.HasField("disaggregated_params"):
            leg.call.abort(Status.INTERNAL, "no room")
        else:
            room = request.disaggregated_params.bootstrap_room
            self.counts.handoffs += 1
            if self.role == "prefill":
                leg.say(answer)
                self.meeting.prefilled(room)
            else:
                self.meeting.when_prefilled(room, partial(leg.tell, answer))

    def _vllm(self, leg: _Generate, request: Any, answer: Sequence[bytes]) -> None:
        params = json.loads(request.kv_transfer_params_json or "null")
        if self.role == "prefill":
            if not params or params.get("do_remote_decode") is not True or request.sampling_params.max_tokens != 1:
                leg.call.abort(Status.INTERNAL, "not a leg of one token")
                return
            self.counts.handoffs += 1
            given = _params(next(self._numbers))
            self.meeting.prefilled(json.dumps(given, sort_keys=True))
            complete = self._message(_STREAMED[:1], params=json.dumps(given))
            leg.say([*answer[:-1], complete])
        elif params is None or not self.meeting.has(json.dumps(params, sort_keys=True)):
            leg.call.abort(Status.INTERNAL, "not a prefill's parameters")
        else:
            self.counts.handoffs += 1
            leg.tell(answer)

    def _answer(self, ids: Sequence[int], streamed: bool) -> list[bytes]:  # noqa: FBT001
        if not streamed:
            return [self._message(ids)]
        messages = self._messages
        made = []
        for number, token in enumerate(ids, start=1):
            chunk = messages.GenerateStreamChunk(
                token_ids=[token], prompt_tokens=_PROMPT_TOKENS, completion_tokens=1 if self.is_vllm else number
            )
            made.append(messages.GenerateResponse(chunk=chunk).SerializeToString())
        return [*made, self._message(ids[-1:], counted=1 if self.is_vllm else len(ids))]

    def _message(self, ids: Sequence[int], *, counted: int = 0, params: str = _NO_PARAMS) -> bytes:
        messages = self._messages
        complete = messages.GenerateComplete(
            output_ids=ids,
            finish_reason="stop" if ids[-1] == END else "length",
            prompt_tokens=_PROMPT_TOKENS,
            completion_tokens=counted or len(ids),
        )
        if params:
            complete.kv_transfer_params_json = params
        if ids[-1] == END and not self.is_vllm:
            complete.matched_token_id = END
        made: bytes = messages.GenerateResponse(complete=complete).SerializeToString()
        return made


class _Told(RequestHandler):
    """A call with prepared answers."""

    def __init__(self, answers: Sequence[bytes], call: RpcCall) -> None:
        super().__init__(call)
        self._answers = answers

    def answer(self, request: bytes) -> None:  # noqa: ARG002
        for each in self._answers:
            self.call.send(each)
        self.call.finish()


class _Generate(RequestHandler):
    """One leg; also the Client of the engine's steps."""

    def __init__(self, engine: RpcEngine, call: RpcCall) -> None:
        super().__init__(call)
        self._engine = engine
        self._left = 0

    def answer(self, request: bytes) -> None:
        self._engine.generate(self, request)

    def say(self, messages: Sequence[bytes]) -> None:
        """Answer at once."""
        for message in messages:
            self.call.send(message)
        self.call.finish()

    def tell(self, messages: Sequence[bytes]) -> None:
        """Answer at the engine's pace."""
        if len(messages) == 1:
            self.say(messages)
        else:
            self._left = len(messages)
            self._engine.steps.add(self, messages)

    def write(self, data: bytes) -> None:
        """See Client."""
        self.call.send(data)
        self._left -= 1
        if not self._left:
            self.call.finish()

    def closed(self) -> None:
        self._engine.steps.drop(self)


def _facts(is_vllm: bool, role: str) -> Facts:  # noqa: FBT001
    if is_vllm:
        return Facts("vllm", role, MODEL, NIXL, f"engine-{role}")
    more = {"max_running_requests": _MANY}
    return Facts("sglang", role, MODEL, bootstrap_port=8998 if role == "prefill" else 0, more=more)


def _params(number: int) -> dict[str, object]:
    """As NIXL's prefill gives them."""
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[10_000 + i for i in range(3)]],
        "remote_engine_id": "2655a1f4-0833-4198-9c76-2a44d8d167a9", "remote_request_id": f"r-{number:016x}",
        "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": _PROMPT_TOKENS,
    }  # fmt: skip


async def serve(kind: Kind, prefill: int, decode: int, step: float) -> dict[str, list[int]]:
    """Start the workers on free loopback ports; returns the ports by role, and those that tell the counts."""
    meeting, numbers = Meeting(), count(1)
    ports: dict[str, list[int]] = {"prefill": [], "decode": [], "counts": []}
    for role, number in (("prefill", prefill), ("decode", decode)):
        for _ in range(number):
            engine = RpcEngine(kind, role, step, meeting, numbers)
            ports[role].append(await engine.start())
            ports["counts"].append(await _serve_counts(engine.counts))
    return ports


async def _serve_counts(counts: Counts) -> int:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(asdict(counts)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    _SERVERS.append(server)
    port: int = server.sockets[0].getsockname()[1]
    return port


_SERVERS: Final[list[asyncio.Server]] = []  # for as long as the process
