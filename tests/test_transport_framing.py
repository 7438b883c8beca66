"""gRPC framing: any way of cutting a byte stream gives the same messages; malformed prefixes are named errors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.transport.grpc_framing import FramingError, Reassembly, Status, check_prefix, frame, status_trailers


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in pieces, none of them empty."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]


def reassembly(max_message: int = 1000) -> Reassembly:
    return Reassembly(max_message, None)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(min_value=0), max_size=12))
def test_messages_survive_any_cutting(messages: list[bytes], places: list[int]) -> None:
    subject = reassembly()
    got: list[bytes] = []
    for piece in cut(b"".join(frame(message) for message in messages), places):
        got.extend(subject.feed(piece))
    assert got == messages
    assert subject.empty


@settings(deadline=None)
@given(st.binary(max_size=40), st.binary(min_size=1, max_size=40), st.data())
def test_a_message_without_its_end_is_held(first: bytes, second: bytes, data: st.DataObject) -> None:
    whole = frame(first) + frame(second)
    size = data.draw(st.integers(min_value=len(frame(first)) + 1, max_value=len(whole) - 1))
    subject = reassembly()
    assert list(subject.feed(whole[:size])) == [first]
    assert not subject.empty
    assert list(subject.feed(whole[size:])) == [second]
    assert subject.empty


def test_messages_before_a_malformed_one_are_delivered() -> None:
    messages = reassembly().feed(frame(b"one") + frame(b"two") + b"\7\0\0\0\0")
    assert [next(messages), next(messages)] == [b"one", b"two"]
    with pytest.raises(FramingError):
        next(messages)


def test_the_bound_is_inclusive() -> None:
    assert list(reassembly(max_message=10).feed(frame(bytes(10)))) == [bytes(10)]
    with pytest.raises(FramingError) as caught:
        list(reassembly(max_message=10).feed(frame(bytes(11))[:5]))  # known from the prefix, before any of it came
    assert caught.value.code is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("flag", "encoding", "code"),
    [
        (1, None, Status.INTERNAL),
        (1, b"identity", Status.INTERNAL),
        (1, b"gzip", Status.UNIMPLEMENTED),
        (2, None, Status.INTERNAL),
        (255, b"gzip", Status.INTERNAL),
    ],
)
def test_flags_that_are_refused(flag: int, encoding: bytes | None, code: Status) -> None:
    with pytest.raises(FramingError) as caught:
        check_prefix(flag, 3, 1000, encoding)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("detail", "encoded"),
    [
        ("plain text: 'a' (b) ~", b"plain text: 'a' (b) ~"),
        ("100 %", b"100 %25"),
        ("Ärger\n", b"%C3%84rger%0A"),
    ],
)
def test_details_are_percent_encoded(detail: str, encoded: bytes) -> None:
    assert status_trailers(13, detail) == ((b"grpc-status", b"13"), (b"grpc-message", encoded))


def test_no_detail_no_header() -> None:
    assert status_trailers(0, "") == ((b"grpc-status", b"0"),)
