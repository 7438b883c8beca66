"""Whatever happens to a request, in any order that Envoy and workers can do it: nothing is left, or said twice."""

import gc

import pytest
from collector import no_collector
from fakes import LateCall, Rig, mooncake, mutated, nixl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.exchange.attempt import Attempt
from extproc.exchange.attempts import KvMissing, OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import ABANDONED, LEFTOVER_SECONDS, SECOND_CALL_SECONDS
from extproc.exchange.direct import DirectCourse
from extproc.exchange.prefill_leg import PrefillLeg
from extproc.exchange.relayed import RelayedCourse
from extproc.transport.interface import Lost

CHAT = "/v1/chat/completions"
MESSAGES = {"model": "tiny", "messages": []}
REQUESTS = [
    (CHAT, MESSAGES),
    (CHAT, MESSAGES | {"stream": True}),
    (CHAT, MESSAGES | {"n": 2, "stream": True}),
    (CHAT, MESSAGES | {"max_tokens": 1}),
    ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]}),
    ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "stream": True}),
    ("/v1/responses", {"model": "tiny", "input": "a"}),
]
FLEETS = {
    "nixl": lambda **config: Rig(*nixl(prefills=(1, 2, 3)), **config),
    "mooncake": lambda **config: Rig(*mooncake(prefills=(1, 2, 3)), **config),
    "mooncake in turn": lambda **config: Rig(*mooncake(), mooncake_in_turn=True, **config),
    "sglang": Rig,
}
GOOD = (
    b'{"id":"x","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"a",'
    b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":1}}'
)
ANSWERS = [
    (200, GOOD, ()),
    (200, GOOD, ()),
    (200, b"{}", ()),
    (200, b'{"finish_reason":"abort"}', ()),
    (400, b"no", ()),
    (429, b"", [(b"retry-after", b"1")]),
    (500, b"kaputt", ()),
    (503, b"", [(b"x-pd-local-reply", b"UF")]),
    (503, b"", [(b"x-pd-local-reply", b"UC")]),
]
HEADS = [
    (200, [("x-pd-upstream", "127.0.0.1:11")]),
    (200, [("x-pd-upstream", "127.0.0.1:12")]),
    (400, [("x-pd-upstream", "127.0.0.1:12")]),
    (503, [("x-pd-upstream", "127.0.0.1:11")]),
    (503, [("x-pd-error-code", "decode_unreachable")]),
    (502, [("x-pd-error-code", "decode_connection_lost")]),
]
PIECES = [b"data: ", GOOD, b"\n\n", b"data: [DONE]\n\n", b""]

which = st.integers(0, 7)
moments = st.sampled_from([0.03, 0.06, 0.2, 1.1, 3.0, 21.0])
ANSWERED = st.tuples(st.just("answer"), which, st.sampled_from(ANSWERS))
STEPS = st.lists(
    st.one_of(
        ANSWERED,
        ANSWERED,
        st.tuples(st.just("begin"), which),
        st.tuples(st.just("piece"), which, st.sampled_from(PIECES)),
        st.tuples(st.just("end"), which),
        st.tuples(st.just("lose"), which, st.sampled_from(Lost)),
        st.tuples(st.just("decode_head"), st.sampled_from(HEADS)),
        st.tuples(st.just("decode_head"), st.sampled_from(HEADS)),
        st.tuples(st.just("open_second")),
        st.tuples(st.just("pass_time"), moments),
        st.tuples(st.just("pass_time"), moments),
        st.tuples(st.just("close_first")),
        st.tuples(st.just("close_second")),
        st.tuples(st.just("expire"), st.sampled_from([1.0, 5.0, 1800.0])),
        st.tuples(st.just("stop")),
        st.tuples(st.just("lose_worker"), which),
    ),
    min_size=6,  # hypothesis likes short lists, and short histories show nothing
    max_size=30,
)


class World:
    """One request, with what Envoy and the workers may do next."""

    def __init__(self, rig, path, body, *, eager):
        self.rig = rig
        self.eager = eager  # Envoy opens a second call as soon as it may
        self.client = rig.post(path, body)
        self.begun = set()  # legs whose head was sent
        self.said = []  # kinds of messages on the first call
        self.opening = None  # what a second call may be opened for
        self.second = None
        self.first_open = True
        self.second_open = False
        self.headed = False  # Envoy has shown us the decode's head
        self.listen()

    def listen(self):
        """Look at what was said; nothing may follow an end."""
        for message in self.client.call.take():
            kind = "streamed" if isinstance(message, bytes) else message.WhichOneof("response")
            before = self.said[-1] if self.said else ""
            assert before != "immediate_response"
            if kind == "response_headers":
                assert self.headed
                assert "response_headers" not in self.said
            if kind == "streamed":
                assert before in ("", "streamed")
            self.said.append(kind)
            if kind in ("response_headers", "immediate_response") and "x-pd-late" in mutated(message):
                self.opening = message
        if self.second_open:
            self.second.answer()
            if self.second.call.aborted:
                self.close_second()
        if self.first_open and (aborted := self.client.call.aborted):
            assert aborted[1] == ABANDONED
            self.close_first()

    def step(self, what, *how):
        getattr(self, what)(*how)
        self.listen()
        if self.eager:
            self.open_second()

    def _leg(self, which, *, begun=None):
        legs = [leg for leg in self.rig.egress.legs if leg.out and (begun is None or (leg in self.begun) is begun)]
        return legs[which % len(legs)] if legs else None

    def answer(self, which, how):
        if leg := self._leg(which, begun=False):
            leg.answer(*how)

    def begin(self, which):
        if leg := self._leg(which, begun=False):
            self.begun.add(leg)
            leg.receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:12")])

    def piece(self, which, chunk):
        if leg := self._leg(which, begun=True):
            leg.receiver.data(chunk)

    def end(self, which):
        if leg := self._leg(which, begun=True):
            leg.receiver.done()

    def lose(self, which, why):
        if leg := self._leg(which):
            leg.receiver.lost(why, "")

    def decode_head(self, how):
        if self.first_open and "request_headers" in self.said and not self.headed:
            self.headed = True
            self.client.decode_head(*how)

    def open_second(self):
        if self.opening is not None and self.second is None:
            self.second = LateCall(self.rig, self.opening)
            self.second_open = True

    def close_first(self):
        if self.first_open:
            self.first_open = False
            self.client.close()

    def close_second(self):
        if self.second_open:
            self.second_open = False
            self.second.close()

    def pass_time(self, seconds):
        self.rig.clock.advance(seconds)

    def expire(self, seconds):
        self.rig.clock.time += seconds
        self.rig.gateway.expire()

    def stop(self):
        self.rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))

    def lose_worker(self, which):
        self.rig.workers[which % len(self.rig.workers)].endpoint = None


@pytest.fixture
def uncollected():
    with no_collector():
        yield


def in_memory():
    """What is of requests. (A session stays with the call that a test looks at.)"""
    kinds = Attempt | DirectCourse | PrefillLeg | RelayedCourse
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.usefixtures("uncollected")
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    fleet=st.sampled_from(sorted(FLEETS)),
    request=st.sampled_from(REQUESTS),
    policy=st.sampled_from(OnPrefillFailure),
    missing=st.sampled_from(KvMissing),
    steps=STEPS,
    eager=st.booleans(),
    last=st.sampled_from([("close_first", "close_second"), ("close_second", "close_first")]),
)
def test_nothing_is_left_and_nothing_is_said_twice(fleet, request, policy, missing, steps, eager, last):
    retry = RetryPolicy(policy, attempts=3, jitter=0)
    rig = FLEETS[fleet](retry=retry, kv_missing=missing)
    world = World(rig, *request, eager=eager)
    for step in steps:
        world.step(*step)
    for close in last:
        getattr(world, close)()
    # A second call that does not come; linger; legs that are let finish.
    for seconds in (SECOND_CALL_SECONDS, 1, LEFTOVER_SECONDS):
        rig.clock.advance(seconds)
    world.listen()
    rig.assert_nothing_is_left()
    assert all(w.load == 0 for w in rig.workers)
    (record,) = rig.records
    assert record.code != "internal_error"
    for leg in rig.egress.legs:
        leg.receiver = None  # it is kept for tests to look at
    assert not in_memory()
