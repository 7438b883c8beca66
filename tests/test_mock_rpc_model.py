"""What the mock gRPC workers write, and the tokenizer that reads it."""

import io
import json
import zipfile

import pytest
from tokenizers import Tokenizer

from extproc.mock.generation import Limits, Prompt
from extproc.mock.rpc import model
from extproc.mock.rpc.tokenizer import zipped


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(model.files()["tokenizer.json"].decode())


def test_every_token_reads_as_the_tokenizer_says(tokenizer):
    assert tokenizer.get_vocab_size() == model.VOCABULARY
    for number in range(300):
        ids = model.written([number, 7], Limits(max_new_tokens=50, ignore_eos=True)).ids
        assert tokenizer.decode(ids) == model.decoded(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == model.decoded(ids, special=True)


def test_text_comes_back(tokenizer):
    text = "Grüße, 日本 🙂!\n\tbaba bibe"
    ids = tokenizer.encode(text).ids
    assert ids[0] == model.BEGIN
    assert tokenizer.decode(ids) == model.decoded(ids) == text
    assert max(tokenizer.encode(text * 3).ids) < model.VOCABULARY
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False).ids
    assert (chat[0], chat[-1]) == (model.TURN_BEGINS, model.TURN_ENDS)


def test_some_characters_take_several_tokens():
    ids = model.written([1], Limits(max_new_tokens=400, ignore_eos=True)).ids
    alone = [model.decoded([token]) for token in ids]
    assert "\N{REPLACEMENT CHARACTER}" in "".join(alone)
    assert "".join(alone).count("\N{REPLACEMENT CHARACTER}") > model.decoded(ids[:-4]).count(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_the_prompt_decides_what_is_written_and_nothing_else():
    first = model.written([1, 2, 3]).ids
    assert first == model.written([1, 2, 3]).ids != model.written([1, 2, 4]).ids
    assert model.written([1, 2, 3], Limits(seed=1)).ids != first
    prompt = Prompt(ids=(1, 2, 3))
    assert model.write(Prompt(ids=(9,)), Limits(), 16, source=prompt.digest).ids == first


@pytest.mark.parametrize(
    ("limits", "count", "finish"),
    [
        (Limits(), 16, {"type": "stop", "matched": model.END}),
        (Limits(max_new_tokens=3), 3, {"type": "length", "length": 3}),
        (Limits(max_new_tokens=0), 0, {"type": "length", "length": 0}),
        (Limits(max_new_tokens=16), 16, {"type": "length", "length": 16}),
        (Limits(max_new_tokens=40), 16, {"type": "stop", "matched": model.END}),
        (Limits(max_new_tokens=40, ignore_eos=True), 40, {"type": "length", "length": 40}),
        (Limits(max_new_tokens=40, min_tokens=20), 21, {"type": "stop", "matched": model.END}),
    ],
)
def test_lengths(limits, count, finish):
    written = model.written([5, 6], limits)
    assert (len(written.ids), written.finish) == (count, finish)
    assert (written.ids[-1:] == [model.END]) is (finish["type"] == "stop")


def test_stops():
    whole = model.written([5, 6])
    third = whole.ids[2]
    text = model.decoded(whole.ids[2:4])
    stop = text[1:-1]
    assert model.written([5, 6], Limits(stop_token_ids=frozenset({third}))).ids == whole.ids[:3]
    found = model.written([5, 6], Limits(stop=("nowhere", stop)))
    assert (found.ids, found.finish) == (whole.ids[:4], {"type": "stop", "matched": stop})
    later = model.written([5, 6], Limits(stop=(stop,), stop_token_ids=frozenset({third}), min_tokens=5))
    assert later.ids == whole.ids


def test_the_archive_has_what_a_tokenizer_takes():
    with zipfile.ZipFile(io.BytesIO(zipped(model.files()))) as archive:
        assert set(archive.namelist()) == {
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "generation_config.json",
        }
        config = json.loads(archive.read("config.json"))
    assert (config["vocab_size"], config["eos_token_id"]) == (model.VOCABULARY, model.END)
