"""Stop strings: found wherever the text is cut; nothing else is held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.text.stops import StopFinder

_LETTERS = st.text(alphabet="ab\nc", max_size=12)


def naive(text, stops, include):
    """What is given out, and the match, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=_LETTERS, stops=st.lists(_LETTERS, max_size=4), include=st.booleans(), cuts=st.lists(st.integers(1, 4)))
def test_it_finds_what_is_there_however_the_text_is_cut(text, stops, include, cuts):
    finder, given_out, at = StopFinder(stops, include=include), "", 0
    for length in [*cuts, *[1] * len(text)]:
        given_out += finder.add(text[at : at + length])
        at += length
        if finder.matched is None and at <= len(text):  # what is held back may yet become a stop string
            held = text[:at][len(given_out) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
            longest = max((n for stop in stops for n in range(len(stop)) if text[:at].endswith(stop[:n])), default=0)
            assert len(held) == longest
    given_out += finder.end()
    assert (given_out, finder.matched) == naive(text, stops, include)


def test_text_is_given_out_again_when_it_was_no_stop_string():
    finder = StopFinder(["</answer>"])
    assert [finder.add(text) for text in ("a <", "/ans", "x")] == ["a ", "", "</ansx"]
    assert finder.add("</answer") == ""
    assert finder.end() == "</answer"
    assert finder.matched is None


def test_nothing_follows_a_match():
    finder = StopFinder(["END", "STOP"])
    assert finder.add("one ST") == "one "
    assert finder.add("OP two END") == ""
    assert finder.matched == "STOP"
    assert finder.add("more") == finder.end() == ""


def test_the_stop_string_can_be_shown():
    finder = StopFinder(["\n\n"], include=True)
    assert finder.add("a\n") == "a"
    assert finder.add("\nb") == "\n\n"
    assert finder.matched == "\n\n"


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_all_passes(stops):
    finder = StopFinder(stops)
    assert finder.add("any") == "any"
    assert finder.matched is None


def test_a_long_list_is_searched_at_once():
    stops = [f"<{number:05}>" for number in range(2000)]
    finder = StopFinder(stops)
    assert finder.add("x" * 10_000 + "<0190") == "x" * 10_000
    assert finder.add("0>") == ""
    assert finder.matched == "<01900>"


def test_the_worst_text_costs_no_more_for_each_character():
    finder = StopFinder(["a" * 2000 + "b"])
    given_out = "".join(finder.add("a") for _ in range(20_000))
    assert given_out + finder.end() == "a" * 20_000
