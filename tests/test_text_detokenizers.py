"""Text of tokens as they come is the text of all of them, whatever the tokenizer, however they are cut."""

from __future__ import annotations

import socket

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from extproc.text.detokenizers import ByPieces, ByWindow
from extproc.text.hf import HfTokenizer, load
from tests.tokenizers_made import CORPUS, KINDS, directory

LOCAL = tuple(kind for kind in KINDS if kind != "suffix")
SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*" ".join(CORPUS).split(), " ", "  ", "\n", "🙂", "👩‍👩‍👧‍👦"]), max_size=12).map(
        " ".join
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A loaded tokenizer of each kind."""
    return {kind: load(directory(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}


def cut(ids, cuts):
    """``ids`` in pieces of the lengths ``cuts``, the last one again and again."""
    at = 0
    for length in [*cuts, *[max(1, cuts[-1] if cuts else 1)] * len(ids)]:
        if at >= len(ids):
            return
        yield ids[at : at + max(1, length)]
        at += max(1, length)


def characters_only(tokenizer, ids):
    """Whether there are no single bytes in it: one that is no character makes those around it none, in the whole."""
    words = [tokenizer.word(number) for number in ids if number < tokenizer.vocab_size]
    return not any(word.startswith("<0x") and int(word[3:5], 16) >= 0x80 for word in words)


def streamed(tokenizer, prompt, ids, cuts=(), **how):
    """What is given out in all, and each piece of it."""
    detokenizer = tokenizer.detokenizer(prompt, **how)
    pieces = [detokenizer.add(some) for some in cut(list(ids), list(cuts))]
    return "".join(pieces) + detokenizer.end(), pieces


@pytest.mark.parametrize("kind", KINDS)
@SLOW
@given(text=_TEXTS, cuts=st.lists(st.integers(1, 4), max_size=5))
def test_the_pieces_of_a_text_are_the_text(made, kind, text, cuts):
    tokenizer: HfTokenizer = made[kind]
    ids = tokenizer.encode(text, special=False)
    whole, pieces = streamed(tokenizer, (), ids, cuts)
    assert whole == tokenizer.decode(ids)
    if kind in ("byte_level", "llama", "gemma"):  # no character is unknown to these
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("kind", KINDS)
@SLOW
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(1, 4), max_size=5))
def test_any_tokens_are_decoded_as_the_whole_is(made, kind, data, skip, cuts):
    tokenizer: HfTokenizer = made[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    assume(characters_only(tokenizer, ids))
    whole, _ = streamed(tokenizer, (), ids, cuts, skip_special=skip)
    assert whole == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", KINDS)
@SLOW
@given(prompt=_TEXTS, answer=_TEXTS, special=st.booleans())
def test_an_answer_goes_on_where_the_prompt_ends(made, kind, prompt, answer, special):
    tokenizer: HfTokenizer = made[kind]
    before = tokenizer.encode(prompt, special=special)
    ids = tokenizer.encode(answer, special=False)
    known = tokenizer.decode(before)
    both = tokenizer.decode([*before, *ids])
    assume(both.startswith(known))
    assert streamed(tokenizer, before, ids)[0] == both[len(known) :]


@pytest.mark.parametrize("kind", LOCAL)
@SLOW
@given(data=st.data())
def test_both_ways_of_detokenising_agree(made, kind, data):
    tokenizer: HfTokenizer = made[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    pieces = tokenizer.detokenizer((), skip_special=False)
    assert isinstance(pieces, ByPieces)
    window = ByWindow(lambda some: tokenizer.decode(some, skip_special=False), ())
    a = "".join(pieces.add([one]) for one in ids) + pieces.end()
    b = "".join(window.add([one]) for one in ids) + window.end()
    assert a == b or "\ufffd" in a


def test_half_a_character_is_never_given_out(made):
    tokenizer: HfTokenizer = made["byte_level"]
    ids = tokenizer.encode("🦜", special=False)
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer(())
    assert [detokenizer.add([one]) for one in ids] == [""] * (len(ids) - 1) + ["🦜"]
    assert detokenizer.end() == ""


def test_a_character_that_stays_half_is_told_at_the_end(made):
    for kind in ("byte_level", "llama"):
        tokenizer: HfTokenizer = made[kind]
        ids = tokenizer.encode("a🦜", special=False)[:-1]
        detokenizer = tokenizer.detokenizer(())
        assert "".join(detokenizer.add([one]) for one in ids) == "a"
        assert set(detokenizer.end()) == {"\ufffd"}
        assert detokenizer.end() == ""


def test_a_character_begun_by_the_prompt_is_finished(made):
    tokenizer: HfTokenizer = made["byte_level"]
    ids = tokenizer.encode("x🦜y", special=False)
    assert len(ids) > 4
    assert streamed(tokenizer, ids[:3], ids[3:])[0] == "🦜y"


def test_the_first_word_has_no_space_but_the_next_ones_do(made):
    for kind in ("llama", "metaspace", "unigram", "wordpiece"):
        tokenizer: HfTokenizer = made[kind]
        ids = tokenizer.encode("lower low", special=False)
        assert streamed(tokenizer, (), ids)[0] == "lower low"
        assert streamed(tokenizer, ids, ids)[0] == " lower low", kind


def test_special_tokens_are_shown_or_not(made):
    tokenizer: HfTokenizer = made["byte_level"]
    ids = [2, *tokenizer.encode("low", special=False), 3, *tokenizer.encode("<tool>", special=False)]
    assert streamed(tokenizer, (), ids, skip_special=True)[0] == "low<tool>"
    assert streamed(tokenizer, (), ids, skip_special=False)[0] == "<|im_start|>low<|im_end|><tool>"


def test_added_tokens_stand_together_where_asked_for(made):
    tokenizer: HfTokenizer = made["wordpiece"]
    ids = [*tokenizer.encode("low", special=False), 2, 3, *tokenizer.encode("new", special=False)]
    assert streamed(tokenizer, (), ids, skip_special=False)[0] == "low <|im_start|> <|im_end|> new"
    joined, _ = streamed(tokenizer, (), ids, skip_special=False, spaces_between=False)
    assert joined == "low <|im_start|><|im_end|> new" == tokenizer.decode(ids, skip_special=False, spaces_between=False)


def test_a_tokenizer_written_in_python_serves_too(tmp_path):
    tokenizer = HfTokenizer(ByT5Tokenizer(), tmp_path)
    text = "low é🦜"
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer(())
    assert isinstance(detokenizer, ByWindow)
    pieces = [detokenizer.add([one]) for one in ids]
    assert ("".join(pieces) + detokenizer.end(), "\ufffd" in "".join(pieces)) == (text, False)
    assert tokenizer.token(ids[0]) == ("l", b"l")
    assert tokenizer.decode([*ids, tokenizer.vocab_size]) == text


def test_loading_asks_no_network(tmp_path, monkeypatch):
    def connect(_socket, address):
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    assert load(directory(tmp_path)).encode("low", special=False)


def test_a_window_does_not_wait_for_ever_for_a_character():
    window = ByWindow(lambda ids: "\ufffd" * len(ids), ())
    assert sum(len(window.add([one])) for one in range(1000)) + len(window.end()) == 1000
    assert len(window._ids) < 100


def test_a_token_has_a_text_and_bytes(made):
    tokenizer: HfTokenizer = made["byte_level"]
    first = tokenizer.encode("🦜", special=False)[0]
    text, data = tokenizer.token(first)
    assert text == "\ufffd"
    assert "🦜".encode().startswith(data)
    assert tokenizer.token(2) == ("<|im_start|>", b"<|im_start|>")
    llama: HfTokenizer = made["llama"]
    assert llama.token(llama.encode("x low", special=False)[-1])[1].endswith(b"w")
    assert tokenizer.token(10**6) == ("", b"")
