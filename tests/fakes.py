"""In-memory stand-ins for what surrounds an exchange: Envoy's call, the egress, the clock, the fleet."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from envoy.config.core.v3.base_pb2 import HeaderMap, Metadata
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

from extproc.exchange.gateway import Gateway, GatewayConfig
from extproc.exchange.orders import OrderReceiver
from extproc.exchange.session import Session
from extproc.handoff.table import Handoffs
from extproc.names import PROGRESS_NAMESPACE, WATCHED
from extproc.policies.placement import Placer
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.breaker import Breaker, BreakerSettings
from extproc.workers.pairing import PairingMode
from extproc.workers.pairs import Pairs
from extproc.workers.ranks import form
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Status, Worker, WorkerUrl


def worker(role: Role, port: int, **fields) -> Worker:
    fields.setdefault("model_ids", ("tiny",))
    made = Worker(f"{role.value}-{port}", WorkerUrl("http", "127.0.0.1", port), role, **fields)
    made.status = Status.READY
    made.endpoint = f"127.0.0.1:{port}"
    return made


def ranks(role: Role, port: int, size: int, **fields) -> list[Worker]:
    """The entries of one server's data-parallel ranks."""
    made = [worker(role, port, **fields) for _ in range(size)]
    form(made)
    for entry in made:
        entry.id = f"{entry.id}@{entry.dp_rank}"
    return made


def nixl(prefills=(1, 2), decodes=(11, 12)) -> list[Worker]:
    """vLLM workers with NIXL, by their ports."""
    roles = [*((Role.PREFILL, port) for port in prefills), *((Role.DECODE, port) for port in decodes)]
    return [worker(role, port, runtime="vllm", kv_connector=NIXL) for role, port in roles]


def mooncake(prefills=(1, 2), decodes=(11, 12)) -> list[Worker]:
    """vLLM workers with Mooncake; the prefill at port 1 has the engine id "engine-1"."""
    made = [
        worker(
            Role.PREFILL,
            port,
            runtime="vllm",
            kv_connector=MOONCAKE,
            kv_engines=(KvEngine(0, f"engine-{port}"),),
            bootstrap_port=8000 + port,
        )
        for port in prefills
    ]
    return made + [worker(Role.DECODE, port, runtime="vllm", kv_connector=MOONCAKE) for port in decodes]


@dataclass
class Asked:
    """A policies.policy.RequestView of what a test says."""

    model: str | None = "tiny"
    fields: dict[str, bytes] = field(default_factory=dict)
    prompt: bytes = b'"a prompt"'
    context: bytes = b""
    tokens: int | None = None  # None: as of a body of text with nothing but the prompt
    notes: dict = field(default_factory=dict)
    rid: str = ""
    within: frozenset[str] | None = None

    def prompt_tokens(self) -> int:
        return max(1, (len(self.context) + len(self.prompt)) // 4) if self.tokens is None else self.tokens

    def prompt_bytes(self, most=None) -> bytes:
        return self.prompt[:most]

    def own_id(self) -> str:
        return self.rid

    def prompt_context(self) -> bytes:
        return self.context


class FakeFleet:
    def __init__(self, *workers: Worker, mode: PairingMode = PairingMode.LENIENT) -> None:
        self.workers = list(workers)
        self.mode = mode
        self._known = {}
        self._within = {}

    def within(self, endpoints):
        """As the registry does, but what is remembered grows."""
        named = [w for w in self.workers if w.endpoint in endpoints]
        known = self._within.get(endpoints)
        if known is None or known.workers != named:
            known = self._within[endpoints] = FakeFleet(*named, mode=self.mode)
        return known

    def usable(self, role, model):
        return tuple(w for w in self.workers if w.role is role and w.usable and (model is None or model in w.model_ids))

    with_overloaded = usable

    def sheds(self, role, model):  # noqa: ARG002
        return False

    def healthy(self, role):
        return tuple(w for w in self.workers if w.role is role and w.usable)

    def __len__(self):
        return len(self.workers)

    def knows_model(self, model):
        return any(model in w.model_ids for w in self.workers)

    def pairs(self, model):
        """As the registry does: made anew only when something has changed, which here nobody tells."""
        sides = tuple(self.usable(role, model) for role in (Role.PREFILL, Role.DECODE))
        needs = tuple((w.pairing, w.model_ids, w.place, w.runtime, w.kv_connector) for side in sides for w in side)
        known = self._known.get(model)
        if known is None or known[:2] != (sides, needs):
            known = self._known[model] = (sides, needs, Pairs(*sides, self.mode, any_model=model is None))
        return known[2]


@dataclass
class FakeCall:
    sent: list[bytes] = field(default_factory=list)
    aborted: tuple[int, str] | None = None
    queued: int = 0
    paused: bool = False

    def send(self, message):
        self.sent.append(message)

    def abort(self, code, detail):
        self.aborted = (code, detail)

    def pause(self):
        assert not self.paused
        self.paused = True

    def resume(self):
        assert self.paused
        self.paused = False

    def take(self):
        """The messages sent since the last look; relayed ones (field 11, unknown to xds-protos) stay bytes."""
        sent, self.sent = self.sent, []
        return [message if message[0] == 0x5A else ProcessingResponse.FromString(message) for message in sent]


class FakeLeg:
    def __init__(self, headers, body, receiver):
        self.headers = headers
        self.body = body
        self.receiver = _Heard(self, receiver)
        self.is_order = isinstance(receiver, OrderReceiver)
        self.cancelled = False
        self.over = False  # its answer is complete, or lost
        self.paused = False
        self.trickles = False

    @property
    def out(self):
        return not self.cancelled and not self.over

    def cancel(self):
        self.cancelled = True

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def trickle(self):
        self.trickles = True

    @property
    def path(self):
        return dict(self.headers)[b":path"].decode()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def destination(self):
        return dict(self.headers)[b"x-gateway-destination-endpoint"].decode()

    @property
    def cluster(self):
        return dict(self.headers)[b"x-pd-cluster"].decode()

    def answer(self, status=200, body=b"{}", headers=()):
        assert not self.cancelled, "an answer to a cancelled leg is never delivered"
        for step in (
            lambda: self.receiver.head(status, [(b"content-type", b"application/json"), *headers]),
            lambda: self.receiver.data(body),
            self.receiver.done,
        ):
            if not self.cancelled:
                step()


class _Heard:
    """A leg's receiver, which hears nothing more once the leg was cancelled or is over."""

    def __init__(self, leg, receiver):
        self._leg = leg
        self._receiver = receiver

    def head(self, status, headers):
        assert self._leg.out
        self._receiver.head(status, headers)

    def data(self, chunk):
        assert self._leg.out
        self._receiver.data(chunk)

    def trailers(self, headers):
        assert self._leg.out
        self._receiver.trailers(headers)

    def done(self):
        assert self._leg.out
        self._leg.over = True
        self._receiver.done()

    def lost(self, reason, detail):
        assert self._leg.out
        self._leg.over = True
        self._receiver.lost(reason, detail)


class FakeEgress:
    def __init__(self):
        self.legs = []

    def send(self, headers, body, receiver):
        pseudo = [name.startswith(b":") for name, _ in headers]
        assert pseudo == sorted(pseudo, reverse=True), "HTTP/2 wants pseudo headers first"
        assert len({name for name, _ in headers if name.startswith(b":")}) == sum(pseudo) == 4
        leg = FakeLeg(list(headers), body, receiver)
        self.legs.append(leg)
        return leg

    def open(self, path=None):
        return [leg for leg in self.legs if not leg.cancelled and (path is None or leg.path == path)]

    @property
    def out(self):
        """The legs that are out, orders not among them."""
        return [leg for leg in self.legs if leg.out and not leg.is_order]

    def out_at(self, cluster):
        return [leg for leg in self.out if leg.cluster == cluster]

    @property
    def orders(self):
        return [leg for leg in self.legs if leg.is_order]

    @property
    def aborts(self):
        """What was aborted in which role, once each: (cluster, rid)."""
        return list(dict.fromkeys((leg.cluster, leg.json["rid"]) for leg in self.legs if leg.path == "/abort_request"))

    def aborts_at(self, endpoint):
        """The rids aborted on one worker."""
        return [leg.json["rid"] for leg in self.legs if leg.path == "/abort_request" and leg.destination == endpoint]


class FakeClock:
    def __init__(self):
        self.time = 100.0
        self.scheduled = []

    def now(self):
        return self.time

    def after(self, seconds, callback):
        handle = _Handle(self.time + seconds, callback)
        self.scheduled.append(handle)
        return handle

    def advance(self, seconds):
        end = self.time + seconds
        while due := [h for h in self.scheduled if h.when <= end]:
            first = min(due, key=lambda h: h.when)
            self.scheduled.remove(first)
            self.time = max(self.time, first.when)
            if not first.cancelled:
                first.callback()
        self.time = end


@dataclass
class _Handle:
    when: float
    callback: object
    cancelled: bool = False

    def cancel(self):
        self.cancelled = True


class Records(list):
    def finished(self, record):
        self.append(record)


class Rig:
    """A gateway with two prefill and two decode workers, and whatever has happened around it."""

    def __init__(self, *workers: Worker, mooncake_in_turn: bool = False, **config) -> None:
        self.workers = workers or (
            worker(Role.PREFILL, 1, bootstrap_port=8998),
            worker(Role.PREFILL, 2, bootstrap_port=8999),
            worker(Role.DECODE, 11),
            worker(Role.DECODE, 12),
        )
        self.fleet = FakeFleet(*self.workers)
        self.egress = FakeEgress()
        self.clock = FakeClock()
        self.records = Records()
        self.unreachable = []
        self.failing = []
        self.doubted = []
        placer = Placer(self.fleet, RoundRobinPolicy(), RoundRobinPolicy())
        config = GatewayConfig(**config)
        self.gateway = Gateway(
            config,
            placer,
            Handoffs(mooncake_in_turn=mooncake_in_turn),
            self.egress,
            self.clock,
            self.records,
            self.unreachable.append,
            self.failing.append,
            self.doubted.append,
        )
        for each in self.workers:
            each.freed = self.gateway.legs.freed

    def open(self) -> Client:
        return Client(self)

    def post(self, path: str, body, *, headers=(), chunk: int | None = None, context=None) -> Client:
        client = self.open()
        client.head(path, headers=headers, context=context)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = chunk or max(1, len(raw))
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        for piece in pieces[:-1]:
            client.body(piece)
        client.body(pieces[-1], end=True)
        return client

    def assert_nothing_is_left(self) -> None:
        assert self.gateway.alive == 0
        assert self.gateway.handoffs.live == 0
        assert self.gateway.late == {}
        assert self.gateway.fetched == {}
        assert self.gateway.progress.watched == 0
        assert self.egress.out == []
        assert {w.id: (w.load, w.tokens) for w in self.workers if w.load or w.tokens} == {}
        assert {w.id: w.promised for w in self.workers if w.promised} == {}
        assert (self.gateway.gate.in_flight, self.gateway.gate.queued) == (0, 0)
        assert not self.gateway.legs.waiting
        assert not any(self.gateway.legs.queued.values())
        assert {w.id: w.breaker.trials for w in self.workers if w.breaker.trials} == {}

    def report(self, name: str, sent: int) -> None:
        """Envoy says how much of a watched answer has gone out."""
        message = StreamAccessLogsMessage()
        line = message.http_logs.log_entry.add()
        line.common_properties.metadata.filter_metadata[PROGRESS_NAMESPACE].update({WATCHED: name})
        line.response.response_body_bytes = sent
        self.gateway.progress.received(message.SerializeToString())


class Client:
    """Envoy's side of one call."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.call = FakeCall()
        self.session = Session(rig.gateway, self.call)

    def tell(self, **fields) -> None:
        self.session.received(ProcessingRequest(**fields).SerializeToString())

    def head(self, path, *, method="POST", headers=(), end=False, context=None) -> None:
        pairs = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "gateway"), *headers]
        self.tell(request_headers=_http_headers(pairs, end=end), metadata_context=context)

    def body(self, chunk: bytes, *, end=False) -> None:
        self.tell(request_body=HttpBody(body=chunk, end_of_stream=end))

    def decode_head(self, status=200, headers=(), *, end=False) -> None:
        self.tell(response_headers=_http_headers([(":status", str(status)), *headers], end=end))

    def close(self) -> None:
        self.session.closed()

    def late(self, found=()) -> LateCall:
        """The second call, that Envoy opens for the answer it was given on this one."""
        (message,) = self.call.take()
        return LateCall(self.rig, message, found)


class Fetched:
    """An Answer, and what was said in it."""

    def __init__(self):
        self.headers = None
        self.said = b""
        self.ended = False
        self.queued = 0

    @property
    def stalled(self):
        return self.queued > 1 << 16

    def head(self, status, headers):
        self.headers = {":status": str(status)} | {name.decode(): value.decode() for name, value in headers}

    def body(self, chunk, *, end):
        assert self.headers is not None
        assert not self.ended
        self.said += chunk
        self.ended = end


class LateCall:
    """Envoy's side of the second call about an answer that was given it with ``x-pd-late``.

    Args:
        opening: what was said on the first call.
        found: headers of the answer, besides those of ``opening``.
    """

    def __init__(self, rig: Rig, opening, found=()) -> None:
        self.opening = opening
        headers = mutated(opening)
        assert headers["x-pd-late"]
        self.found = headers | dict(found)
        self.call = FakeCall()
        self.session = Session(rig.gateway, self.call)
        pairs = [(":status", "503"), *self.found.items()]
        self.session.received(ProcessingRequest(response_headers=_http_headers(pairs, end=False)).SerializeToString())

    def close(self) -> None:
        self.session.closed()

    def answer(self):
        """(headers, body, whether it has ended) of what was said so far; the head must come first, and once."""
        headers, body, ended = {}, b"", False
        for message in self.call.take():
            assert not ended
            if message.WhichOneof("response") == "response_headers":
                assert not headers
                assert not body
                headers = mutated(message)
                removed = set(message.response_headers.response.header_mutation.remove_headers)
                assert removed == set(self.found), "whatever was found must go"
            else:
                streamed = message.response_body.response.body_mutation.streamed_response
                body += streamed.body
                ended = streamed.end_of_stream
        return headers, body, ended


def _http_headers(pairs, *, end):
    header_map = HeaderMap()
    for key, value in pairs:
        header_map.headers.add(key=key, raw_value=value.encode())
    return HttpHeaders(headers=header_map, end_of_stream=end)


def hint(*ports, said=None) -> Metadata:
    """What Envoy says with a request that may only go to the workers at ``ports``; ``said``: in another form."""
    context = Metadata()
    named = [f"127.0.0.1:{port}" for port in ports] if said is None else said
    context.filter_metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint-subset": named})
    return context


def mutated(response) -> dict[str, str]:
    """The headers that a request_headers, response_headers or immediate_response message sets."""
    kind = response.WhichOneof("response")
    part = getattr(response, kind)
    mutation = part.headers if kind == "immediate_response" else part.response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def released(client):
    """The decode body that Envoy was given, with the headers and destinations."""
    head, body = client.call.take()
    streamed = body.request_body.response.body_mutation.streamed_response
    assert streamed.end_of_stream
    destinations = head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"].split(",")
    return streamed.body, mutated(head), destinations


def rejection(client):
    """(status, headers, body) of the only thing that was said since the last look: an error."""
    (message,) = client.call.take()
    reply = message.immediate_response
    return reply.status.code, mutated(message), reply.body


class Heard(Breaker):
    """A breaker that remembers what it is told: ``s`` and ``f``."""

    __slots__ = ("outcomes",)

    def __init__(self):
        super().__init__(BreakerSettings(failure_threshold=1))
        self.outcomes = ""
        self.wary = True  # or it would not be told of successes

    def succeeded(self, turn):  # noqa: ARG002 - a Breaker's
        self.outcomes += "s"

    def failed(self, turn):  # noqa: ARG002 - a Breaker's
        self.outcomes += "f"
