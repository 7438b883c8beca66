"""The event splitter: whatever the cuts and line ends, the same events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.merge.sse import Event, EventSplitter

PATIENT = settings(deadline=None, max_examples=50)  # machines that run this may be busy
LINE_ENDS = [b"\n", b"\r\n", b"\r"]
LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])).map(str.encode)
DATA = st.lists(LINES, min_size=1, max_size=3).map(b"\n".join)
NAMES = st.sampled_from([b"", b"event: ping\n", b": comment\n", b"id: 7\n: c\n"])
EVENTS = st.lists(st.builds(Event, DATA, NAMES), max_size=6)


def pieces(whole: bytes, cuts: list[int]) -> list[bytes]:
    """``whole`` cut at ``cuts`` (taken modulo its length)."""
    places = sorted({cut % (len(whole) + 1) for cut in cuts} | {0, len(whole)})
    return [whole[start:end] for start, end in pairwise(places)]


def split(chunks: list[bytes]) -> list[Event]:
    splitter = EventSplitter()
    return [event for chunk in chunks for event in splitter.feed(chunk)] + splitter.finish()


@PATIENT
@given(EVENTS, st.sampled_from(LINE_ENDS), st.lists(st.integers(min_value=0), max_size=20))
def test_any_cut_and_line_end_gives_the_same_events(events: list[Event], end: bytes, cuts: list[int]) -> None:
    wire = b"".join(event.framed() for event in events).replace(b"\n", end)
    assert split(pieces(wire, cuts)) == events


@PATIENT
@given(EVENTS)
def test_a_byte_at_a_time(events: list[Event]) -> None:
    wire = b"".join(event.framed() for event in events).replace(b"\n", b"\r\n")
    assert split([wire[at : at + 1] for at in range(len(wire))]) == events


@pytest.mark.parametrize(
    ("wire", "events"),
    [
        (b"data:x\n\n", [Event(b"x")]),
        (b"data:  x\n\n", [Event(b" x")]),
        (b"data\n\n", [Event(b"")]),
        (b"data: a\ndata: b\n\n", [Event(b"a\nb")]),
        (b": ping\n\ndata: x\n\n", [Event(None, b": ping\n"), Event(b"x")]),
        (b"\n\n\ndata: x\n\n\n\n", [Event(b"x")]),
        (b"data: x\r\r\ndata: y\r\n\r\n", [Event(b"x"), Event(b"y")]),
        (b"data: x\n\ndata: [DONE]", [Event(b"x"), Event(b"[DONE]")]),
        (b"event: a\r\ndata: x\r\nid: 1\r\n\r\n", [Event(b"x", b"event: a\nid: 1\n")]),
    ],
)
def test_forms(wire: bytes, events: list[Event]) -> None:
    assert split([wire]) == events


def test_an_event_comes_out_with_the_byte_that_completes_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\n") == []
    assert splitter.feed(b"\nda") == [Event(b"x")]
    assert splitter.feed(b"ta: y\r\n\r") == [Event(b"y")]
    assert splitter.feed(b"\n") == []
    assert splitter.finish() == []
