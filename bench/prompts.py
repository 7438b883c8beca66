"""Request bodies: chats of a given size, realistic text inside, no two of them with the same beginning."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "bench-model"
_VARIANTS = 16  # different texts of one size; beyond that only a request's beginning differs
_LARGEST_TURN = 16_000  # characters in one message of a long conversation
_SENTENCES = 500  # different ones in a text
_ASIDE_SHARE = 0.2  # of the sentences
_MARK = "0000000000"  # replaced by the request's number, right at the start of the first message
_SYSTEM = "Conversation " + _MARK + ". You are a careful assistant; answer from the documents below, briefly."
_QUESTION = "What is the capital of France? Answer in one word."

# Common English words with rough frequencies by position (Zipf), plus what real prompts carry: quotes, code, escapes.
_WORDS = (  # noqa: SIM905  # reads better than a hundred quoted words
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no she other its may these what "
    "them than some him time into only do such my new about out also two any up first could our then most see me work "
    "after said your very between made many over like those did now even well where must people through how same "
    "being because another system number part under against world used back around request however service government "
    "general during available including information important different something development public question answer "
    "document customer account payment network server memory function return error message session prefill decode "
    "token"
).split(" ")
_ASIDES = (
    ' "quoted, as people do" ',
    "\n\n",
    "\n- a point in a list: ",
    "\n```python\ndef total(items):\n    return sum(item.price for item in items)  # \\ kept\n```\n",
    " \u2014 na\u00efve caf\u00e9, \u00fcber \u201cclever\u201d \u2026 ",
    " \u4f60\u597d\uff0c\u4e16\u754c ",
    " \U0001f600 ",
    "\tC:\\temp\\report.txt\t",
)


class Answer(Enum):
    """How a worker shall answer; the request's ``user`` field, which every gateway passes on, carries it."""

    WHOLE = "whole"
    PACED = "paced"  # a stream at the engine's pace: one token per decode step
    BURST = "burst"  # a stream as fast as the worker writes, one token per write
    LATE = "late"  # whole, after its first prefill leg has failed
    LATE_PACED = "late-paced"  # the same as a stream

    @property
    def streamed(self) -> bool:
        """Whether it comes as events."""
        return self in (Answer.PACED, Answer.BURST, Answer.LATE_PACED)

    @property
    def late(self) -> bool:
        """Whether it takes two attempts."""
        return self in (Answer.LATE, Answer.LATE_PACED)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Bodies of one case, cheap to produce: a prepared text whose number is set per request."""

    templates: tuple[tuple[bytes, bytes], ...]  # what stands before and behind the number

    @classmethod
    def of_size(cls, size: int, answer: Answer) -> Prompts:
        """Prepare bodies of about ``size`` bytes (within a few per cent; a small chat if 0)."""
        templates = []
        for variant in range(_VARIANTS if size else 1):
            before, _, behind = _body(size, random.Random(variant), answer, escape=variant % 2 == 0).partition(
                _MARK.encode()
            )
            templates.append((before, behind))
        return cls(tuple(templates))

    def bodies(self) -> Iterator[bytes]:
        """Endless bodies; every one begins differently within its first hundred bytes, so no prefix cache hits."""
        for number in count(random.randrange(10**9)):
            before, behind = self.templates[number % len(self.templates)]
            yield b"%s%010d%s" % (before, number, behind)


def _body(size: int, rng: random.Random, answer: Answer, *, escape: bool) -> bytes:
    messages = [{"role": "system", "content": _SYSTEM}]
    role = "user"
    left = size
    sentences = _sentences(rng)
    while left > 0:
        turn = _text(min(left, _LARGEST_TURN), rng, sentences)
        messages.append({"role": role, "content": turn})
        left -= len(json.dumps(turn, ensure_ascii=escape).encode())
        role = "assistant" if role == "user" else "user"
    if role == "assistant":
        messages.append({"role": "assistant", "content": "Noted."})
    messages.append({"role": "user", "content": _QUESTION})
    body = {"model": MODEL, "messages": messages, "max_tokens": 256, "temperature": 0.0, "user": answer.value}
    if answer.streamed:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body, ensure_ascii=escape, separators=(",", ":")).encode()


def _text(size: int, rng: random.Random, sentences: list[str]) -> str:
    pieces: list[str] = []
    length = 0
    while length < size:
        pieces.append(rng.choice(sentences))
        length += len(pieces[-1])
    return "".join(pieces)


def _sentences(rng: random.Random) -> list[str]:
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(_WORDS))))
    made = []
    for _ in range(_SENTENCES):
        words = rng.choices(_WORDS, cum_weights=weights, k=rng.randint(5, 24))
        aside = rng.choice(_ASIDES) if rng.random() < _ASIDE_SHARE else ""
        made.append(" ".join(words).capitalize() + ". " + aside)
    return made
