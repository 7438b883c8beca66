"""The two ways of an answer that is made here: Envoy's local reply, and a second call's."""

import pytest
from fakes import LateCall, Rig, rejection
from test_relayed import relayed

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import SECOND_CALL_SECONDS
from extproc.exchange.outlet import LateReply, LocalReply

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
