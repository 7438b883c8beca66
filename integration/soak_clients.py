"""The soak's clients: each makes one visit after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from http_client import CutError, Reply
from soak_lines import Line, Talk
from soak_requests import CUT, LATE, RIGHT, End, Kind, Leave, Moment, Visit

# What no two answers have in common.
_PASSING = {"id", "created", "created_at", "completed_at", "item_id", "e2e_latency", "response_sent_to_client_ts"}
_END = b"data: [DONE]\n\n"
_RETRY_AFTER = 0.4  # seconds


@dataclass(slots=True)
class Seen:
    """A visit as its client saw it."""

    visit: Visit
    end: End
    reply: Reply
    began: float = 0.0
    ended: float = 0.0
    request_id: bytes = b""
    wrong: str = ""  # what is, for people

    def __str__(self) -> str:
        visit, question = self.visit, self.visit.question
        asked = {} if question is None else {key: _short(value) for key, value in question.body.items()}
        expected = [(end.kind.value, end.status, end.code) for end in visit.ends]
        return (
            f"visit {visit.number} after {self.ended - self.began:.3f} s: {self.end} {self.wrong}\n"
            f"  {visit.method} {visit.path} {asked or visit.raw[:80]!r} {visit.headers} {visit.leave}\n"
            f"  {question.way.value if question else 'bad'}, expected {expected}; {self.reply.status} "
            f"{self.reply.headers} {self.reply.body[-300:]!r}"
        )


class Visitor:
    """Makes visits to the gateway, and asks an aggregated server for what the answer should have been."""

    def __init__(self, gateway: Line, aggregated: Line, name: str) -> None:
        self._gateway = gateway
        self._aggregated = aggregated
        self._name = name

    async def close(self) -> None:
        """Leave."""
        await self._gateway.close()
        await self._aggregated.close()

    async def make(self, visit: Visit) -> Seen:
        """Make a visit, and say how it ended."""
        request_id = f"{self._name}-{visit.number}"
        began = time.time()
        end, reply = await self._end(visit, request_id)
        seen = Seen(visit, end, reply, began, time.time(), request_id.encode())
        if end.kind in (Kind.CUT, Kind.LATE, Kind.LEFT) or reply.header("connection") == "close":
            await self._gateway.leave(reset=visit.leave is not None and visit.leave.reset)
        await self._judge(seen)
        return seen

    async def _end(self, visit: Visit, request_id: str) -> tuple[End, Reply]:
        leave = visit.leave
        share = leave.after if leave is not None and leave.moment is Moment.UPLOAD else 1.0
        reply = Reply(0, [])
        try:
            async with asyncio.timeout(visit.patience):
                talk = await self._gateway.talk(visit, [("x-request-id", request_id), *visit.headers], share)
                reply = talk.reply
                if leave is not None and await _leaves(talk, leave):
                    return End(Kind.LEFT), reply
                await talk.whole()
        except TimeoutError:
            return LATE, reply
        except CutError:
            return CUT, reply
        if reply.status != 200:
            return End(Kind.ERROR, reply.status, reply.code), reply
        code = _told_error(reply.body) if visit.question is not None and visit.question.relayed else None
        if code is None:
            return RIGHT, reply
        return End(Kind.EVENT if reply.body.endswith(_END) else Kind.WRONG, 0, code), reply

    async def _judge(self, seen: Seen) -> None:
        """Compare what has come with what an aggregated server says."""
        question, reply = seen.visit.question, seen.reply
        made_up = any('"garbage"' in value or '"status"' in value for _, value in seen.visit.headers)
        if question is None or reply.status != 200 or (made_up and seen.end != RIGHT):
            return
        whole = seen.end == RIGHT
        if not (whole or (question.stream and reply.body)):
            return
        expected = await self._expected(seen.visit)
        if reply.header("content-type") != expected.header("content-type"):
            seen.wrong = "another content type than the aggregated server's"
        elif question.stream:
            seen.wrong = _differing(_told(reply.body), _told(expected.body), whole=whole)
        elif _lasting(reply.json) != _lasting(expected.json):
            seen.wrong = f"not what the aggregated server answers: {expected.body[-300:]!r}"
        if seen.wrong:
            seen.end = End(Kind.WRONG)

    async def _expected(self, visit: Visit) -> Reply:
        path = "/v1/rerank" if visit.path == "/rerank" else visit.path
        talk = await self._aggregated.talk(replace(visit, path=path), [])
        reply = await talk.whole()
        assert reply.status == 200, (visit, reply.body)
        return reply


async def _leaves(talk: Talk, leave: Leave) -> bool:
    """Do what is to be done before a client leaves; False when the answer is complete by then."""
    if leave.moment is Moment.UPLOAD:
        await asyncio.sleep(0.001)
        return True
    if leave.moment is Moment.ANSWER:
        for _ in range(int(leave.after)):
            if not await talk.piece():
                return False
        return True
    try:
        async with asyncio.timeout(leave.after):
            await talk.whole()
    except TimeoutError:
        return True
    return False


def _told_error(body: bytes) -> str | None:
    """The code of the gateway's error in a stream."""
    at = body.rfind(b'data: {"error":')
    if at < 0:
        return None
    return str(json.loads(body[at + 6 :].partition(b"\n\n")[0])["error"]["code"])


def _told(body: bytes) -> dict[int | None, list[str]]:
    """What the whole events of a stream say of each choice, and, under None, of all; choices may be interleaved."""
    streams: defaultdict[int | None, list[str]] = defaultdict(list)
    for event in body[: body.rfind(b"\n\n")].decode().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        if not data.startswith("{"):
            streams[None].append(event)
            continue
        chunk = json.loads(data)
        index = chunk["choices"][0]["index"] if chunk.get("choices") else chunk.get("index")
        streams[index].append(name + json.dumps(_lasting(chunk), sort_keys=True))
    return streams


def _differing(told: dict[int | None, list[str]], expected: dict[int | None, list[str]], *, whole: bool) -> str:
    """Where a stream is not the expected one, or, if it is not whole, not the beginning of it."""
    for index, all_events in told.items():
        events = all_events if whole else [event for event in all_events if not _ends_early(event)]
        known = expected.get(index, [])
        if events != (known if whole else known[: len(events)]):
            return f"choice {index} is {events[-2:]}, expected {known[-2:]}"
    if whole and told.keys() != expected.keys():
        return f"choices {set(told)}, expected {set(expected)}"
    return ""


def _ends_early(event: str) -> bool:
    return event == "data: [DONE]" or '"error": {' in event


def _lasting(value: Any) -> Any:
    """A JSON value without what no two answers have in common."""
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in _PASSING}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> Any:
    return f"{value[:20]}… ({len(value)})" if isinstance(value, str) and len(value) > 100 else value


@dataclass(slots=True)
class Book:
    """What is kept of many visits."""

    ends: Counter[str] = field(default_factory=Counter)
    told: dict[bytes, tuple[int, str | None]] = field(default_factory=dict)  # status and code, by request id
    odd: list[Seen] = field(default_factory=list)  # ends that the visit's own troubles do not explain

    def add(self, seen: Seen) -> None:
        """Take down a visit."""
        visit, end = seen.visit, seen.end
        self.ends[end.kind.value] += 1
        if end.kind is not Kind.LEFT and end not in visit.ends:
            self.odd.append(seen)
        if visit.recorded and end.kind in (Kind.RIGHT, Kind.ERROR, Kind.EVENT):
            self.told[seen.request_id] = (seen.reply.status, end.code)
            # Where a worker breaks right after its head, Envoy answers by itself, past our filters: without an id.
            if seen.reply.header("x-request-id") not in (seen.request_id.decode(), None):
                seen.wrong += " with the id of another request"
                self.odd.append(seen)


async def crowd(visitors: Sequence[Visitor], visits: Iterator[Visit]) -> Book:
    """Have so many visitors at once make all visits."""
    book = Book()

    async def each(visitor: Visitor) -> None:
        try:
            for visit in visits:
                seen = await visitor.make(visit)
                book.add(seen)
                if seen.end.status == 503 and seen.end not in visit.ends:
                    await asyncio.sleep(_RETRY_AFTER)  # or all visits would be made to a worker that refuses at once
        finally:
            await visitor.close()

    async with asyncio.TaskGroup() as tasks:
        for visitor in visitors:
            tasks.create_task(each(visitor))
    return book
