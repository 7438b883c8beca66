"""With tokenizers of all kinds: the answer's text is the tokens' text, and log probabilities fit to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers_made import KINDS, directory
from transcode_rig import asked_of, complete, prefill_of, reply, stream_of

from extproc.engines.table import engine_of
from extproc.text import hf
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

PROMPT = "The quick brown fox jumps"
TEXTS = [" over the lazy dog, again", "naïve café 日本語 🙂👩‍👩‍👧‍👦", "def f(x):\n    return x"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> hf.HfTokenizer:
    where: Path = tmp_path_factory.mktemp("model") / request.param
    return hf.load(directory(where, request.param))


def transcoder_of(tokenizer: hf.HfTokenizer, prompt: Prepared, **fields: object) -> Transcoder:
    asked = asked_of("/v1/completions", {"prompt": prompt.text, **fields})
    transcoder = Transcoder(asked, prompt, tokenizer, engine_of("vllm"), id="an-id", model="m", created=0)
    transcoder.prefilled(prefill_of(prompt.ids, logprobs=True))
    return transcoder


def answered(tokenizer: hf.HfTokenizer, text: str) -> tuple[Prepared, list[int]]:
    """A prompt and the tokens of an answer that goes on with ``text``."""
    prompt = tuple(tokenizer.encode(PROMPT, special=True))
    return Prepared(PROMPT, prompt), tokenizer.encode(text, special=False)


@pytest.mark.parametrize("text", TEXTS)
def test_a_streams_text_is_that_of_the_body(tokenizer: hf.HfTokenizer, text: str) -> None:
    prompt, tokens = answered(tokenizer, text)
    body = json.loads((made := transcoder_of(tokenizer, prompt)).feed(reply([complete(tokens)])) + made.end(0))
    made = transcoder_of(tokenizer, prompt, stream=True)
    messages = stream_of([[token] for token in tokens])
    out = b"".join(made.feed(reply([message])) for message in messages)
    said = [json.loads(event[6:])["choices"][0]["text"] for event in out.decode().split("\n\n") if event]
    assert "".join(said) == body["choices"][0]["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_stand_where_their_offsets_say(tokenizer: hf.HfTokenizer, text: str) -> None:
    prompt, tokens = answered(tokenizer, text)
    made = transcoder_of(tokenizer, prompt, echo=True, logprobs=0)
    choice = json.loads(made.feed(reply([complete(tokens, alternatives=0)])) + made.end(0))["choices"][0]
    assert choice["text"].startswith(PROMPT)
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(prompt.ids) + len(tokens)
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][len(prompt.ids)] == len(PROMPT)
    for number, token, offset in zip((*prompt.ids, *tokens), told["tokens"], told["text_offset"], strict=True):
        # The last token of characters that are spread over several is shown as all of them.
        if (
            token.strip()
            and "\ufffd" not in tokenizer.token(number)[0]
            and token.strip() not in tokenizer.special_texts
        ):
            assert choice["text"][offset:].lstrip(" ").startswith(token.strip().lstrip("#")), (token, offset)
