"""What the soak asks: random requests of every API, what goes wrong with each, and how it may therefore end.

Nothing here does anything: a seed and a number make a :class:`Visit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any, Final, NamedTuple

from http_client import PATIENCE

BODY_LIMIT: Final = 1_000_000  # bytes; the gateway's, in this test
REQUEST_SECONDS: Final = 20.0  # the gateway's request timeout, in this test: no busy machine takes so long
_BIG: Final = 1 << 16
_ANSWERED_BY_ENVOY: Final = ("/v1/embeddings", "/nowhere")


# -- ends -------------------------------------------------------------------------------------------------------------


class Kind(Enum):
    """How a request ended for its client."""

    RIGHT = "right"  # with the answer that one aggregated server gives
    ERROR = "error"  # a status other than 200
    EVENT = "event"  # a stream that told an error and then ended as always
    CUT = "cut"  # the connection ended before the answer did
    LATE = "late"  # the client's deadline passed, and it left
    LEFT = "left"  # the client left because it wanted to
    WRONG = "wrong"  # none of these


class End(NamedTuple):
    """An end, with status and code where it is an error."""

    kind: Kind
    status: int = 0
    code: str | None = None


RIGHT: Final = End(Kind.RIGHT)
CUT: Final = End(Kind.CUT)
LATE: Final = End(Kind.LATE)
Ends = frozenset[End]


class Way(Enum):
    """How the gateway serves a request."""

    ALONE = "alone"  # one prefill worker answers
    DIRECT = "direct"  # Envoy runs the decode leg
    EARLY = "early"  # the same, and the stream's head is out before its first token
    WHOLE = "whole"  # the answer is merged
    STREAM = "stream"  # the answer is merged as it comes


@dataclass(frozen=True, slots=True)
class Question:
    """A request that a worker would answer."""

    path: str
    body: dict[str, Any]
    way: Way
    wants_prefill: bool = False  # the prefill's answer is a part of the answer

    @property
    def relayed(self) -> bool:
        """The answer passes through the service."""
        return self.way in (Way.WHOLE, Way.STREAM)

    @property
    def stream(self) -> bool:
        """The answer is a stream of events."""
        return bool(self.body.get("stream"))

    def told(self, status: int, code: str) -> Ends:
        """The ends of a failure that comes before the first token."""
        ends = {End(Kind.ERROR, status, code)}
        return frozenset(ends | {CUT} if self.way is Way.EARLY else ends)

    def broken(self, code: str, status: int = 502) -> Ends:
        """The ends of a failure that comes in the midst of the answer, or just before."""
        ends = {End(Kind.ERROR, status, code)}
        if self.way is Way.STREAM:
            ends.add(End(Kind.EVENT, 0, code))
        elif self.way is not Way.WHOLE:
            ends.add(CUT)
        return frozenset(ends)


# -- questions --------------------------------------------------------------------------------------------------------


def _question(chance: Random, number: int) -> Question:
    path = chance.choices(list(_MAKERS), [weight for weight, _ in _MAKERS.values()])[0]
    text = f"{number} {' '.join(chance.choices(_WORDS, k=chance.randrange(1, 20)))}"
    big = chance.random() < 0.1
    if big and chance.random() < 0.5:
        text += " x" * (_BIG // 2)
    body = _MAKERS[path][1](chance, text)
    if big and len(text) < _BIG:
        body["padding"] = "x" * _BIG
    if path.startswith("/v1/messages") or chance.random() < 0.7:
        body["model"] = "tiny"
    if path in _ALONE:
        return Question(path, body, Way.ALONE)
    if chance.random() < 0.5:
        body["stream"] = True
        if path in _OPENAI and chance.random() < 0.5:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": chance.random() < 0.3}
    if path in _NAMED and chance.random() < 0.1:
        body["rid"] = f"mine-{number}"
    samples = body.get("n") or body.get("sampling_params", {}).get("n") or 1
    logprobs = body.get("logprob_start_len", -1) >= 0 or bool(body.get("echo") and body.get("logprobs"))
    stream = "stream" in body
    if samples > 1 or logprobs:
        return Question(path, body, Way.STREAM if stream else Way.WHOLE, logprobs)
    return Question(path, body, Way.EARLY if stream and path not in _OPENAI else Way.DIRECT)


def _samples(chance: Random, seed: str = "seed") -> dict[str, int]:
    """How many samples; with a seed where there are several, without which they would be alike behind the gateway."""
    count = chance.choices((1, 2, 3), (75, 15, 10))[0]
    return {"n": count, seed: chance.randrange(1000)} if count > 1 else {}


def _chat(chance: Random, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": chance.randrange(1, 20)}
    if chance.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2}
    return body | _samples(chance)


def _completions(chance: Random, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": _prompts(chance, text), "max_tokens": chance.randrange(1, 20)}
    if len(text) < 1000 and chance.random() < 0.4:
        body |= {"echo": chance.random() < 0.6, "logprobs": chance.randrange(1, 3)}
    return body | _samples(chance)


def _generate(chance: Random, text: str) -> dict[str, Any]:
    prompts = _prompts(chance, text)
    of_text = isinstance(prompts, str) or isinstance(prompts[0], str)
    body: dict[str, Any] = {"text" if of_text else "input_ids": prompts}
    body["sampling_params"] = {"max_new_tokens": chance.randrange(1, 20), **_samples(chance, "sampling_seed")}
    if len(text) < 1000 and chance.random() < 0.4:
        body |= {"return_logprob": True, "logprob_start_len": chance.choice((-1, 0, 2))}
    return body


def _prompts(chance: Random, text: str) -> Any:
    ids = [len(word) * 50 + place for place, word in enumerate(text[:200].split())]
    return chance.choice((text, text, [text, "and another"], [text, "b", "c"], [text], ids, [ids, [7, 8, 9]]))


def _messages(chance: Random, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": chance.randrange(1, 20)}


def _responses(chance: Random, text: str) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": chance.randrange(1, 20)}


def _rerank(_: Random, text: str) -> dict[str, Any]:
    return {"query": text, "documents": ["a", "b"]}


def _count(_: Random, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


_WORDS: Final = ("quick", "brown", "fox", "\N{FOX FACE}", "jumps", "over", "the", "lazy", '"dog"', "caf\u00e9", "a\\b")
_MAKERS: Final[dict[str, tuple[int, Callable[[Random, str], dict[str, Any]]]]] = {
    "/v1/chat/completions": (30, _chat),
    "/v1/completions": (25, _completions),
    "/generate": (25, _generate),
    "/v1/messages": (7, _messages),
    "/v1/responses": (7, _responses),
    "/v1/rerank": (2, _rerank),
    "/rerank": (2, _rerank),
    "/v1/messages/count_tokens": (2, _count),
}
_ALONE: Final = ("/v1/rerank", "/rerank", "/v1/messages/count_tokens")
_OPENAI: Final = ("/v1/chat/completions", "/v1/completions")
_NAMED: Final = (*_OPENAI, "/generate")


# -- troubles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of one worker (in the mock's JSON form), and the ends that it explains."""

    fault: dict[str, Any]
    ends: Ends


_UNHARMED: Final = frozenset({RIGHT})
_HANGS: Final = frozenset({LATE})


def _passed_on(status: int, role: str) -> Ends:
    """A worker's refusal: as Envoy passes it on, or as we do, where it was tried again or the answer is relayed."""
    code = f"{role}_rejected" if status < 500 else f"{role}_failed"
    return frozenset({End(Kind.ERROR, status), End(Kind.ERROR, status, code)})


def _prefill(chance: Random, question: Question) -> Trouble:
    lost = "prefill_connection_lost"
    match chance.choice(("slow", "slow", "refusal", "break", "late break", "upload", "hang", "late hang", "garbage")):
        case "refusal":
            status = chance.choice((400, 422, 429, 500, 503, 504))
            fault = {"status": status, "delay_head": chance.choice((0, 0, 0.02, 0.1))}
            if question.way is Way.ALONE:
                return Trouble(fault, _passed_on(status, "prefill"))
            if status < 500:
                return Trouble(fault, question.told(status, "prefill_rejected"))
            return Trouble(fault, question.told(502 if status == 500 else status, "prefill_failed"))
        case "break" if question.way is not Way.ALONE:
            return Trouble({"status": 200, **_break(chance)}, question.told(502, lost))
        case "break" | "late break":  # the latter after the KV cache was handed over
            ends = question.broken(lost)
            spared = question.way is not Way.ALONE and not question.wants_prefill
            return Trouble(_break(chance), ends | _UNHARMED if spared else ends)
        case "upload":
            return Trouble({"drop": "upload"}, question.told(502, lost))
        case "hang":
            return Trouble(_hang(chance), _HANGS)
        case "late hang":
            spared = question.way is not Way.ALONE and not question.wants_prefill
            points = ("before_head", "after_head", "mid_body")
            return Trouble({"hang": chance.choice(points)}, _UNHARMED if spared else _HANGS)
        case "garbage" if question.way is not Way.ALONE:
            ends = question.broken("decode_bad_reply") if question.wants_prefill else _UNHARMED
            return Trouble({"garbage": True}, ends)
        case _:
            return Trouble(_slow(chance), _UNHARMED)


def _decode(chance: Random, question: Question) -> Trouble:
    # What is merged as it comes may be whole although its leg is not: it may break between its last event and its end.
    lost = "decode_connection_lost"
    match chance.choice(("slow", "slow", "refusal", "break", "late break", "upload", "hang", "late hang", "garbage")):
        case "refusal":
            status = chance.choice((400, 422, 429, 500, 503, 504))
            return Trouble({"status": status}, _passed_on(status, "decode"))
        case "break":
            return Trouble({"status": 200, **_break(chance)}, question.broken(lost))
        case "late break":
            fault = {**_break(chance), "delay_token": chance.choice((0, 0.005))}
            ends = question.broken(lost)
            return Trouble(fault, ends | _UNHARMED if question.way is Way.STREAM else ends)
        case "upload":
            return Trouble({"drop": "upload"}, frozenset({End(Kind.ERROR, 502, lost)}))
        case "hang":
            return Trouble(_hang(chance), _HANGS)
        case "late hang":
            fault = {"hang": chance.choice(("before_head", "after_head", "mid_body"))}
            ends = _HANGS | _UNHARMED if question.way is Way.STREAM else _HANGS
            return Trouble({**fault, "after_chunks": chance.randrange(1, 4)}, ends)
        case "garbage" if question.relayed:
            return Trouble({"garbage": True}, question.broken("decode_bad_reply"))
        case _:
            return Trouble(_slow(chance), _UNHARMED)


def _slow(chance: Random) -> dict[str, Any]:
    return chance.choice(
        (
            {"delay_head": chance.uniform(0, 0.15)},
            {"delay_first_token": chance.uniform(0, 0.15)},
            {"delay_token": chance.uniform(0, 0.02)},
            {"upload_rate": 1_000_000.0},
        )
    )


def _break(chance: Random) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"truncate": True, "after_chunks": chance.randrange(1, 5)}
    return {"drop": chance.choice(("before_head", "after_head", "mid_body")), "after_chunks": chance.randrange(1, 5)}


def _hang(chance: Random) -> dict[str, Any]:
    """Before the engine has seen the request."""
    point = chance.choice(("upload", "before_head", "after_head"))
    return {"hang": point} if point == "upload" else {"hang": point, "status": 200}


def _together(question: Question, troubles: Iterable[Trouble]) -> Ends:
    """The ends that several troubles explain."""
    found = [trouble.ends for trouble in troubles]
    harmful = [ends for ends in found if RIGHT not in ends]
    ends = frozenset().union(*found) if found else _UNHARMED
    if harmful:
        ends -= _UNHARMED
    if len(harmful) > 1:  # what one of them lets out of the answer is told of by the other
        for code in {end.code for end in ends if end.code}:
            ends |= question.broken(code) - {End(Kind.ERROR, 502, code)}
    return ends


# -- visits -----------------------------------------------------------------------------------------------------------


class Moment(Enum):
    """When a client leaves."""

    UPLOAD = "upload"
    SILENCE = "silence"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Leave:
    """A client's leaving, ``after`` so many seconds (in an upload: that share of it; in an answer: so many pieces)."""

    moment: Moment
    after: float
    reset: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """One request as it is made, and how it may end."""

    number: int
    method: str
    path: str
    raw: bytes
    headers: tuple[tuple[str, str], ...]
    ends: Ends
    question: Question | None = None  # None: nothing that a worker would answer
    leave: Leave | None = None
    patience: float = PATIENCE  # seconds
    pieces: int = 1  # in which the body goes out
    chunked: bool = False

    @property
    def recorded(self) -> bool:
        """The service sees it."""
        return self.method == "POST" and self.path not in _ANSWERED_BY_ENVOY


def visit(seed: int, number: int, *, patient: bool) -> Visit:
    """The visit of this number. Who is ``patient`` may wait until the gateway gives up."""
    chance = Random(f"{seed}/{number}")
    if chance.random() < 0.05:
        return _bad(chance, number)
    question = _question(chance, number)
    troubles: dict[str, Trouble] = {}
    if chance.random() < 0.2:
        troubles["prefill"] = _prefill(chance, question)
    if question.way is not Way.ALONE and chance.random() < 0.2:
        troubles["decode"] = _decode(chance, question)
    headers = ()
    if troubles:
        headers = (("x-mock-fault", json.dumps({role: trouble.fault for role, trouble in troubles.items()})),)
    made = Visit(
        number=number,
        method="POST",
        path=question.path,
        raw=json.dumps(question.body).encode(),
        headers=headers,
        ends=_together(question, troubles.values()),
        question=question,
        pieces=chance.choice((1, 1, 1, 2, 4)),
        chunked=chance.random() < 0.2,
    )
    if LATE in made.ends:
        return _hanging(chance, made, question, patient=patient)
    if chance.random() < 0.12:
        return replace(made, leave=_leave(chance))
    return made


def _hanging(chance: Random, made: Visit, question: Question, *, patient: bool) -> Visit:
    """A client that gives up soon, or one that waits for the gateway to give up."""
    if chance.random() < 0.95 or not patient:
        return replace(made, patience=chance.uniform(0.05, 0.4))
    ends = made.ends - {LATE} | question.broken("request_timeout", 504)
    return replace(made, ends=ends)


def _leave(chance: Random) -> Leave:
    moment = chance.choice(list(Moment))
    after = {
        Moment.UPLOAD: chance.random(),
        Moment.SILENCE: chance.choice((0, chance.uniform(0, 0.01), chance.uniform(0, 0.1))),
        Moment.ANSWER: chance.randrange(1, 6),
    }[moment]
    return Leave(moment, after, reset=chance.random() < 0.5)


def _bad(chance: Random, number: int) -> Visit:
    """A request that cannot be served."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    refusals: list[tuple[str, str, object, int, str | None]] = [
        ("POST", "/v1/chat/completions", b"", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt":', 400, "invalid_json"),
        ("POST", "/generate", b"[1]", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt":"a","prompt":"b"}', 400, "duplicate_parameter"),
        ("POST", "/v1/messages", {"model": "tiny"}, 400, "missing_required_parameter"),
        ("POST", "/v1/chat/completions", {**chat, "n": "two"}, 400, "invalid_type"),
        ("POST", "/v1/chat/completions", {**chat, "stream": 1}, 400, "invalid_type"),
        ("POST", "/v1/chat/completions", {**chat, "model": "huge"}, 404, "model_not_found"),
        ("POST", "/v1/chat/completions", {**chat, "padding": "x" * BODY_LIMIT}, 413, "payload_too_large"),
        ("POST", "/v1/chat/completions", {**chat, "messages": []}, 400, "prefill_rejected"),
        ("POST", "/v1/chat/completions", {**chat, "messages": [], "n": 2}, 400, "prefill_rejected"),
        ("GET", "/v1/chat/completions", None, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", {"input": "a"}, 501, "not_implemented"),
        ("POST", "/nowhere", {}, 404, "not_found"),
    ]
    method, path, body, status, code = chance.choice(refusals)
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    ends = {End(Kind.ERROR, status, code)}
    if code == "prefill_rejected":  # both workers refuse it, and either may be the first
        ends |= {End(Kind.ERROR, status, None), End(Kind.ERROR, status, "decode_rejected")}
        question = Question(path, dict(chat), Way.WHOLE if b'"n"' in raw else Way.DIRECT)
        return Visit(number, method, path, raw, (), frozenset(ends), question)
    return Visit(number, method, path, raw, (), frozenset(ends))
