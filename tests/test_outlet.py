"""The ways of an answer that is made here: Envoy's local reply, a second call's, and what Envoy fetches."""

import pytest
from fakes import Fetched, LateCall, Rig, mutated, rejection
from test_relayed import CHAT, PATH, chat_answer, delta, legs, relayed

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import SECOND_CALL_SECONDS
from extproc.exchange.outlet import LateReply, LocalReply
from extproc.names import CLUSTER
from extproc.transport.interface import ANSWER_PATH, Lost

ERROR = GatewayError("prefill_failed", "kaputt", retry_after=7)
HEAD = [(b"content-type", b"text/plain"), (b"x-request-id", b"r")]


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def client(rig):
    client = rig.open()
    client.head("/v1/chat/completions")
    return client


class Late:
    """A LateReply that is not opened yet, and whether it was lost."""

    def __init__(self, client):
        self.lost = 0
        self.drained = 0
        self.client = client
        self.reply = LateReply(client.session, self._lose, self._drain)

    def _lose(self):
        self.lost += 1

    def _drain(self):
        self.drained += 1

    def opened(self, *, asked=False, found=()):
        self.reply.open(ERROR, asked=asked)
        return self.client.late(found)


def test_a_local_reply_is_a_head_and_pieces(client):
    outlet = LocalReply(client.session)
    outlet.head(200, HEAD)
    outlet.body(b"a" * (wire.BODY_CHUNK + 1), end=False)
    outlet.body(b"", end=True)
    head, body, ended = relayed(client)
    assert (head[":status"], head["content-type"]) == ("200", "text/plain")
    assert (len(body), ended) == (wire.BODY_CHUNK + 1, True)


def test_a_local_replys_error_is_envoys_immediate_answer(client):
    LocalReply(client.session).reject(ERROR)
    assert rejection(client)[0] == 502


def test_what_waits_for_the_client_is_counted_on_the_call_in_use(client):
    client.call.queued = 7
    assert LocalReply(client.session).queued == 7
    late = Late(client)
    assert late.reply.queued == 0  # it has no call
    late.opened().call.queued = 9
    assert late.reply.queued == 9


def test_a_late_head_replaces_all_that_the_second_call_found(client):
    second = Late(client)
    call = second.opened(found=[("server", "uvicorn"), ("content-length", "3")])
    second.reply.head(201, HEAD)
    second.reply.body(b"yes", end=True)
    headers, body, ended = call.answer()  # which looks at what was removed
    assert headers == {":status": "201", "content-type": "text/plain", "x-request-id": "r"}
    assert (body, ended) == (b"yes", True)


def test_a_late_head_waits_for_its_first_piece(client):
    late = Late(client)
    call = late.opened()
    late.reply.head(200, HEAD)
    assert call.call.sent == []
    late.reply.body(b"", end=True)
    headers, body, ended = call.answer()
    assert (headers[":status"], body, ended) == ("200", b"", True)


def test_pieces_are_bounded_and_only_the_last_one_ends(client):
    late = Late(client)
    call = late.opened()
    late.reply.head(200, HEAD)
    late.reply.body(b"x" * (2 * wire.BODY_CHUNK), end=False)
    late.reply.body(b"y" * (wire.BODY_CHUNK + 5), end=True)
    messages = call.call.take()
    sizes = [len(m.response_body.response.body_mutation.streamed_response.body) for m in messages[1:]]
    ends = [m.response_body.response.body_mutation.streamed_response.end_of_stream for m in messages[1:]]
    assert sizes == [wire.BODY_CHUNK, wire.BODY_CHUNK, wire.BODY_CHUNK, 5]
    assert ends == [False, False, False, True]


def test_what_was_said_before_the_second_call_is_said_in_order(client):
    late = Late(client)
    late.reply.open(ERROR, asked=False)
    late.reply.head(200, HEAD)
    for piece in (b"a", b"b"):
        late.reply.body(piece, end=False)
    call = client.late()
    late.reply.body(b"c", end=True)
    headers, body, ended = call.answer()
    assert (headers[":status"], body, ended) == ("200", b"abc", True)


def test_an_error_takes_the_place_of_what_was_not_said_yet(client):
    late = Late(client)
    late.reply.open(ERROR, asked=False)
    late.reply.head(200, HEAD)
    late.reply.body(b"half of it", end=False)
    late.reply.reject(GatewayError("decode_timeout", "slow"))
    headers, body, ended = client.late().answer()
    assert (headers[":status"], headers["x-pd-error-code"]) == ("504", "decode_timeout")
    assert b"half" not in body
    assert ended


def test_an_error_after_the_head_cuts(client):
    late = Late(client)
    call = late.opened()
    late.reply.head(200, HEAD)
    late.reply.body(b"half of it", end=False)
    late.reply.reject(ERROR)
    assert call.call.aborted == (13, "kaputt")


def test_names_can_be_switched_off_in_late_errors_too():
    rig = Rig(response_headers=False)
    client = rig.open()
    client.head("/v1/chat/completions")
    client.session.record.prefill = "http://p"
    late = Late(client)
    call = late.opened()
    late.reply.reject(ERROR)
    assert set(call.answer()[0]) == {":status", "content-type", "x-pd-error-code", "retry-after", "x-request-id"}


@pytest.mark.parametrize("asked", [False, True])
def test_a_second_call_that_does_not_come_is_lost_once(rig, client, asked):
    late = Late(client)
    late.reply.open(ERROR, asked=asked)
    rig.clock.advance(SECOND_CALL_SECONDS - 0.1)
    assert late.lost == 0
    rig.clock.advance(0.2)
    assert late.lost == 1
    assert rig.gateway.late == {}
    late.reply.closed()
    assert late.lost == 1
    late.reply.head(200, HEAD)  # what a leg still says
    late.reply.body(b"x", end=True)


def test_a_second_call_that_came_may_take_its_time(rig, client):
    late = Late(client)
    call = late.opened()
    rig.clock.advance(100)
    assert late.lost == 0
    call.close()
    assert late.lost == 1
    assert rig.gateway.late == {}


def test_a_second_call_that_was_drained_says_so(client):
    late = Late(client)
    late.opened().session.drained()
    assert late.drained == 1


def test_only_one_call_can_be_the_second(rig, client):
    """Not a third one with the same name after the second is over."""
    late = Late(client)
    call = late.opened()
    call.close()
    assert LateCall(rig, call.opening).call.aborted is not None


def test_the_second_call_has_no_deadline_of_its_own(rig, client):
    alive = rig.gateway.alive
    Late(client).opened()
    assert rig.gateway.alive == alive


@pytest.fixture
def stream(rig):
    """A relayed stream of two samples, whose answer Envoy may fetch, and its decode legs."""
    rig.gateway.fetches = True
    given = [("authorization", "Bearer x"), ("cookie", "y"), ("x-forwarded-proto", "http")]
    client = rig.post(PATH, CHAT | {"stream": True}, headers=given)
    prefills, decodes = legs(rig)
    for leg in prefills:
        leg.answer()
    for leg in decodes:
        leg.receiver.head(200, [(b"content-type", b"text/event-stream"), (b"x-engine", b"e")])
    return client, decodes


def fetched_from(client):
    """The path at which Envoy is told to fetch the answer."""
    head, body = client.call.take()
    common = head.request_headers.response
    assert mutated(head)[CLUSTER] == "answers"
    assert set(common.header_mutation.remove_headers) == {"authorization", "cookie"}  # what Envoy needs is left
    assert common.clear_route_cache
    streamed = body.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"", True)
    path = mutated(head)[":path"].encode()
    assert path.startswith(ANSWER_PATH)
    return path


@pytest.mark.parametrize("soon", [False, True])
def test_envoy_fetches_a_stream(rig, stream, soon):
    client, decodes = stream
    path, answer = fetched_from(client), Fetched()
    reply = rig.gateway.fetch(path, answer) if soon else None
    assert answer.headers is None
    decodes[0].receiver.data(delta("a"))
    decodes[1].receiver.data(delta("b"))
    reply = reply or rig.gateway.fetch(path, answer)
    assert rig.gateway.fetch(path, Fetched()) is None
    assert (answer.headers[":status"], answer.headers["x-engine"]) == ("200", "e")
    assert answer.said.count(b"data: ") == 2
    client.decode_head()
    (head,) = client.call.take()
    ours = {"x-pd-prefill", "x-pd-decode", "x-pd-handoff"}
    assert ours <= set(mutated(head))  # Envoy takes them away of what it fetches
    assert not ours & set(answer.headers)
    reply.closed()
    client.close()
    assert [leg.cancelled for leg in decodes] == [True, True]
    rig.assert_nothing_is_left()


def test_a_fetched_answer_that_is_not_read_makes_the_workers_wait(rig, stream):
    client, decodes = stream
    assert [leg.trickles for leg in decodes] == [True, True]
    decodes[0].receiver.data(delta("a" * (1 << 16)))
    assert [leg.paused for leg in decodes] == [True, True]  # nobody has asked for it yet
    answer = Fetched()
    reply = rig.gateway.fetch(fetched_from(client), answer)
    assert [leg.paused for leg in decodes] == [False, False]
    answer.queued = 1 << 17
    decodes[1].receiver.data(delta("b"))
    assert [leg.paused for leg in decodes] == [True, True]
    reply.drained()
    assert [leg.paused for leg in decodes] == [False, False]
    client.close()
    rig.assert_nothing_is_left()


def test_an_answer_that_nobody_fetched_is_forgotten(rig, stream):
    client, decodes = stream
    path = fetched_from(client)
    decodes[0].receiver.data(delta("a"))
    client.close()
    assert rig.gateway.fetch(path, Fetched()) is None
    rig.assert_nothing_is_left()


def test_an_error_before_the_first_piece_is_envoys_immediate_answer(rig, stream):
    client, _ = stream
    rig.gateway.fetch(fetched_from(client), Fetched())
    client.session.end(GatewayError("request_timeout", "late"))
    assert rejection(client)[0] == 504
    client.close()
    rig.assert_nothing_is_left()


def test_an_error_after_it_ends_what_is_fetched(rig, stream):
    client, decodes = stream
    decodes[0].receiver.data(delta("a"))
    answer = Fetched()
    rig.gateway.fetch(fetched_from(client), answer)
    decodes[0].receiver.lost(Lost.RESET, "gone")
    assert b'"error"' in answer.said
    assert answer.ended
    client.close()
    rig.assert_nothing_is_left()


def test_what_does_not_stream_is_a_local_reply(rig):
    rig.gateway.fetches = True
    client = rig.post(PATH, CHAT)
    prefills, decodes = legs(rig)
    for leg in prefills:
        leg.answer()
    for leg in decodes:
        leg.answer(body=chat_answer("a"))
    assert relayed(client)[0][":status"] == "200"
    client.close()
    assert not any(leg.trickles for leg in decodes)
    rig.assert_nothing_is_left()
