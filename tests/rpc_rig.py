"""What surrounds an exchange with gRPC workers: as fakes.py has it, with calls, and tokens that are characters."""

from __future__ import annotations

import struct

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpTrailers
from fakes import Heard, LateCall, Rig, mutated, worker
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as tokenspeed
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from extproc.exchange.rpc import Rpc
from extproc.handoff.grpc_table import RpcHandoffs
from extproc.text.tokenizer import Prepared
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, WorkerUrl

MESSAGES = {"sglang": sglang, "vllm": vllm, "tokenspeed": tokenspeed}
OK = [(b"grpc-status", b"0"), (b"grpc-message", b"")]


def frame(message) -> bytes:
    raw = message.SerializeToString()
    return struct.pack(">BI", 0, len(raw)) + raw


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


class Letters:
    """A tokenizer of a token per character; 0 is the end."""

    eos_ids = frozenset({0})
    vocab_size = 0x110000
    context = None
    is_byte_level = False

    def encode(self, text, *, special):  # noqa: ARG002
        return ids(text)

    def decode(self, tokens, *, skip_special=True, spaces_between=True):  # noqa: ARG002
        return "".join(chr(token) for token in tokens if token)

    def token(self, token):
        return chr(token), chr(token).encode()

    def detokenizer(self, prompt_ids, *, skip_special=True, spaces_between=True):  # noqa: ARG002
        return _Detokenizer()


class _Detokenizer:
    def add(self, tokens):
        return "".join(chr(token) for token in tokens if token)

    def end(self):
        return ""


class Texts:
    """Tokenises at once, or when a test says so."""

    def __init__(self):
        self.later = False
        self.gone = False
        self.tokenizer = Letters()
        self.asked = []  # for which models prompts were made tokens
        self.error = None
        self.waiting = []  # what is to be called
        self.cancelled = 0
        self.working = []  # the same, of what goes on in threads

    def of(self, model):  # noqa: ARG002
        return None if self.gone else self.tokenizer

    def run(self, work, size, then):  # noqa: ARG002
        """In a thread whose work takes until a test says that it is done."""

        def step():
            work()
            then(None)

        self.working.append(step)

        def cancel():
            self.working.remove(step)

        return cancel

    def prepare(self, asked, then):
        self.asked.append(asked.model)
        prompts = asked.prompts or ("".join(str(message["content"]) for message in asked.chat.messages),)
        made = self.error or tuple(
            Prepared(prompt, tuple(self.tokenizer.encode(prompt, special=False)))
            if isinstance(prompt, str)
            else Prepared("", prompt)
            for prompt in prompts
        )
        if not self.later:
            then(made)
            return lambda: None
        step = lambda: then(made)  # noqa: E731
        self.waiting.append(step)

        def cancel():
            if step in self.waiting:
                self.waiting.remove(step)
                self.cancelled += 1

        return cancel


def rpc_worker(role: Role, port: int, runtime: str = "sglang", **fields):
    made = worker(role, port, runtime=runtime, **fields)
    made.url = WorkerUrl("grpc", "127.0.0.1", port)
    made.__post_init__()
    return made


def fleet(runtime: str, connector: str = NIXL):
    own = {"kv_connector": connector} if runtime == "vllm" else {}
    roles = [(Role.PREFILL, 1), (Role.PREFILL, 2), (Role.DECODE, 11), (Role.DECODE, 12)]
    made = [rpc_worker(role, port, runtime, **own) for role, port in roles]
    for each in made if connector == MOONCAKE else ():
        each.kv_engines, each.bootstrap_port = (KvEngine(0, f"engine-{each.url.port}"),), 8998
    return made


class RpcRig(Rig):
    """Two prefill and two decode workers of one engine, over gRPC."""

    def __init__(self, runtime: str = "sglang", *others, connector: str = NIXL, **config) -> None:
        self.runtime = runtime
        super().__init__(*fleet(runtime, connector), *others, **config)
        self.texts = Texts()
        rpc = self.gateway.rpc = Rpc(self.texts, None, RpcHandoffs(), lambda: 1_700_000_000.0)
        rpc.workers = frozenset(each for each in self.workers if each.url.is_grpc)
        rpc.others = frozenset(self.workers) - rpc.workers

    def listen(self) -> None:
        """Have the breakers remember."""
        for each in self.workers:
            each.breaker = Heard()

    # -- what workers say -----------------------------------------------------------------------------------------

    def chunk(self, text: str, so_far: int = 0) -> bytes:
        counts = {"prompt_tokens": 4, "completion_tokens": so_far or len(text)}
        pb = MESSAGES[self.runtime]
        return frame(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids(text), **counts)))

    def complete(self, text: str, finish: str = "stop", cached: int = 0, params: str = "") -> bytes:
        pb = MESSAGES[self.runtime]
        counts = {"prompt_tokens": 4, "completion_tokens": len(text), "cached_tokens": cached}
        own = {"kv_transfer_params_json": params} if params else {}
        end = pb.GenerateComplete(output_ids=ids(text), finish_reason=finish, **counts, **own)
        return frame(pb.GenerateResponse(complete=end))

    def request(self, body: bytes):
        """A leg's message."""
        assert body[:1] == b"\0"
        assert len(body) == 5 + int.from_bytes(body[1:5])
        return MESSAGES[self.runtime].GenerateRequest.FromString(body[5:])

    def answered(self, leg, *messages: bytes, trailers=OK) -> None:
        """A leg's call ends with these messages."""
        for step in (
            lambda: leg.receiver.head(200, [(b"content-type", b"application/grpc")]),
            *[lambda message=message: leg.receiver.data(message) for message in messages],
            lambda: leg.receiver.trailers(list(trailers)),
            leg.receiver.done,
        ):
            if leg.out:
                step()

    def refused(self, leg, code: int, message: bytes = b"no") -> None:
        """A leg's call ends with its head, which says why."""
        head = [(b"content-type", b"application/grpc"), (b"grpc-status", b"%d" % code), (b"grpc-message", message)]
        leg.receiver.head(200, head)
        if leg.out:
            leg.receiver.done()

    # -- legs and orders ------------------------------------------------------------------------------------------

    @property
    def prefills(self):
        return self.egress.out_at("prefill_grpc")

    @property
    def decodes(self):
        return self.egress.out_at("decode_grpc")

    def aborted(self, cluster: str) -> list[str]:
        """The names of what was aborted by calls of our own."""
        pb = MESSAGES[self.runtime]
        found = []
        for leg in self.egress.orders:
            if leg.path.endswith("/Abort") and leg.cluster == cluster:
                asked = pb.AbortRequest.FromString(leg.body[5:])
                found += list(asked.request_ids) if self.runtime == "vllm" else [asked.request_id]
        return found

    def assert_nothing_is_left(self) -> None:
        super().assert_nothing_is_left()
        assert self.gateway.rpc.handoffs.live == 0


class Answer:
    """Envoy's side of the second call about a gRPC call's answer, and the client's."""

    def __init__(self, rig: RpcRig, client, found=()) -> None:
        (marked,) = client.call.take()
        self.late = LateCall(rig, marked, [("content-type", "application/grpc"), *found])
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False

    def feed(self, *messages: bytes) -> None:
        for message in messages:
            self.late.session.received(_request(response_body=HttpBody(body=message)))
        self._take()

    def end_of_body(self) -> None:
        """The call's answer ends without trailers."""
        self.late.session.received(_request(response_body=HttpBody(end_of_stream=True)))
        self._take()

    def trailers(self, code: int = 0, message: str = "") -> None:
        pairs = [("grpc-status", str(code)), ("grpc-message", message)]
        headers = HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])
        self.late.session.received(_request(response_trailers=HttpTrailers(trailers=headers)))
        self._take()

    def close(self) -> None:
        self.late.session.closed()

    def _take(self) -> None:
        for message in self.late.call.take():
            kind = message.WhichOneof("response")
            assert not self.ended
            if kind == "response_headers":
                assert not self.status
                self.headers = mutated(message)
                self.status = int(self.headers[":status"])
            elif kind == "response_body":
                streamed = message.response_body.response.body_mutation.streamed_response
                assert self.status, "the head comes first"
                self.body += streamed.body
                self.ended = streamed.end_of_stream
            else:
                assert kind == "response_trailers"
                removed = message.response_trailers.header_mutation.remove_headers
                assert list(removed) == ["grpc-status", "grpc-message"]
                self.ended = True

    def look(self) -> None:
        """See what was said without being asked."""
        self._take()


def _request(**fields) -> bytes:
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest  # noqa: PLC0415

    return ProcessingRequest(**fields).SerializeToString()
