"""The hand-encoded messages, read back by protobuf's own parser (or, for field 11, compared with its encoding)."""

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingResponse, StreamedBodyResponse
from hypothesis import given
from hypothesis import strategies as st

from extproc.exchange import wire

names = st.from_regex(r"[a-z:][a-z0-9-]{0,40}", fullmatch=True).map(str.encode)
values = st.binary(max_size=300)


@given(st.lists(st.tuples(names, values), max_size=8), st.lists(names, max_size=3))
def test_header_mutations(pairs, removed):
    mutation = b"".join([wire.set_header(*pair) for pair in pairs] + [wire.remove_header(name) for name in removed])
    for message, kind in (
        (wire.request_headers_reply(mutation), "request_headers"),
        (wire.response_headers_reply(mutation), "response_headers"),
    ):
        read = ProcessingResponse.FromString(message)
        assert read.WhichOneof("response") == kind
        change = getattr(read, kind).response.header_mutation
        assert [(o.header.key.encode(), o.header.raw_value) for o in change.set_headers] == pairs
        assert all(o.append_action == o.OVERWRITE_IF_EXISTS_OR_ADD for o in change.set_headers)
        assert [name.encode() for name in change.remove_headers] == removed


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 129, 300, 16_371, 16_372, 16_373, 16_383, 16_384, 20_000_000])
@pytest.mark.parametrize("end", [True, False])
def test_streamed_bodies(size, end):
    body = b"x" * size
    read = ProcessingResponse.FromString(wire.request_body_reply(body, end=end))
    streamed = read.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (body, end)


def test_destinations_are_an_ordered_list_in_envoys_metadata():
    message = wire.request_headers_reply(b"", wire.destination_metadata("10.0.0.1:80,[::1]:8000"))
    metadata = ProcessingResponse.FromString(message).dynamic_metadata
    assert dict(metadata["envoy.lb"]) == {"x-gateway-destination-endpoint": "10.0.0.1:80,[::1]:8000"}


@given(st.integers(200, 599), st.lists(st.tuples(names, values), max_size=5), st.binary(max_size=500))
def test_immediate_replies(status, headers, body):
    reply = ProcessingResponse.FromString(wire.immediate_reply(status, headers, body)).immediate_response
    assert reply.status.code == status
    assert [(o.header.key.encode(), o.header.raw_value) for o in reply.headers.set_headers] == headers
    assert list(reply.headers.remove_headers) == ["x-pd-upstream"]
    assert reply.body == body


def test_trailers_replies():
    assert ProcessingResponse.FromString(wire.response_trailers_reply()).WhichOneof("response") == "response_trailers"


def test_relayed_head():
    head = HttpHeaders()
    for key, value in ((":status", b"200"), ("content-type", b"text/event-stream")):
        head.headers.headers.add(key=key, raw_value=value)
    expected = wire.field(11, wire.field(1, head.SerializeToString()))
    assert wire.relayed_head(200, [(b"content-type", b"text/event-stream")]) == expected


@pytest.mark.parametrize("size", [0, 5, wire.BODY_CHUNK, wire.BODY_CHUNK + 1, 3 * wire.BODY_CHUNK])
@pytest.mark.parametrize("end", [True, False])
def test_relayed_bodies_leave_in_bounded_pieces(size, end):
    body = b"y" * size
    messages = wire.relayed_body(body, end=end)
    pieces = []
    for at, message in enumerate(messages):
        last = end and at == len(messages) - 1
        piece = body[at * wire.BODY_CHUNK : (at + 1) * wire.BODY_CHUNK]
        body_response = StreamedBodyResponse(body=piece, end_of_stream=last).SerializeToString()
        assert message == wire.field(11, wire.field(2, body_response))
        pieces.append(piece)
    assert b"".join(pieces) == body


@pytest.mark.parametrize("size", [0, 5, wire.BODY_CHUNK, wire.BODY_CHUNK + 1, 3 * wire.BODY_CHUNK])
@pytest.mark.parametrize("end", [True, False])
def test_pieces_in_the_place_of_an_answers_body_are_bounded_and_end_once(size, end):
    body = bytes(at % 251 for at in range(size))
    read = [ProcessingResponse.FromString(message) for message in wire.response_body_replies(body, end=end)]
    assert all(message.WhichOneof("response") == "response_body" for message in read)
    pieces = [message.response_body.response.body_mutation.streamed_response for message in read]
    assert b"".join(piece.body for piece in pieces) == body
    assert max(len(piece.body) for piece in pieces) <= wire.BODY_CHUNK
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [end]


@given(st.lists(st.tuples(names, values), max_size=5), st.booleans(), st.booleans())
def test_a_request_may_be_routed_anew(pairs, reroute, placed):
    mutation = b"".join([wire.set_header(*pair) for pair in pairs])
    metadata = wire.destination_metadata("10.0.0.1:80") if placed else b""
    read = ProcessingResponse.FromString(wire.request_headers_reply(mutation, metadata, reroute=reroute))
    common = read.request_headers.response
    assert common.clear_route_cache is reroute
    assert [(o.header.key.encode(), o.header.raw_value) for o in common.header_mutation.set_headers] == pairs
    assert read.HasField("dynamic_metadata") is placed
