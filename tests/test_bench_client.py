"""The benchmark's load generator against its stand-in workers, and against servers that answer wrongly."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bench import worker
from bench.client import LoadGenerator, dechunk, verify
from bench.fleet import Seen
from bench.measure import CASES, missing_work
from bench.prompts import Answer, Prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CHAT = worker.chat_answer("decode")
STREAM = b"".join(worker.stream_events("decode"))


@asynccontextmanager
async def engine(role: str = "decode", rooms: worker.Rooms | None = None) -> AsyncIterator[tuple[worker.Engine, int]]:
    one = worker.Engine(
        role, {Answer.PACED: worker.DecodeSteps(0.0001), Answer.BURST: worker.DecodeSteps(0)}, rooms or worker.Rooms()
    )
    server = await asyncio.get_running_loop().create_server(partial(worker.Connection, one), "127.0.0.1", 0)
    async with server:
        yield one, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def canned(answer: bytes) -> AsyncIterator[int]:
    """A server that answers every read with the same bytes, and closes if they are none."""

    class Canned(asyncio.Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.transport = transport

        def data_received(self, _data: bytes) -> None:
            if answer:
                self.transport.write(answer)
            else:
                self.transport.close()

    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_every_case_is_answered_as_expected_and_counted(case):
    async with engine() as (one, port):
        generator = await LoadGenerator(port, case.expected).open(3)
        load = await generator.run(case.prompts().bodies(), 7, limit=20)
        generator.close()
    assert not load.failures
    assert load.requests == len(load.first_bytes) == one.counts.legs == 7
    assert one.counts.body_bytes > 7 * case.prompt_bytes
    assert one.counts.handoffs == 0
    assert all(0 < first <= whole for first, whole in zip(load.first_bytes, load.latencies, strict=True))


class WatchedRooms(worker.Rooms):
    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def when_prefilled(self, room: bytes, answer: Callable[[], None]) -> None:
        super().when_prefilled(room, answer)
        self.came.set()


@pytest.mark.parametrize("prefill_first", [True, False])
async def test_a_decode_leg_is_answered_when_its_prefill_leg_has_come(prefill_first):
    rooms = WatchedRooms()
    body = b'{"messages":[],"bootstrap_room":77}'
    async with engine("prefill", rooms) as (prefill, prefill_port), engine("decode", rooms) as (decode, decode_port):
        first = await LoadGenerator(prefill_port, worker.chat_answer("prefill")).open(1)
        second = await LoadGenerator(decode_port, CHAT).open(1)
        if prefill_first:
            assert (await first.run(iter([body]), 1, limit=5)).requests == 1
            answered = await second.run(iter([body]), 1, limit=5)
        else:
            waiting = asyncio.ensure_future(second.run(iter([body]), 1, limit=5))
            await rooms.came.wait()
            assert (await first.run(iter([body]), 1, limit=5)).requests == 1
            answered = await waiting
        first.close()
        second.close()
    assert answered.requests == prefill.counts.handoffs == decode.counts.handoffs == 1


async def test_a_decode_leg_whose_prefill_leg_does_not_come_is_not_answered():
    async with engine() as (one, port):
        generator = await LoadGenerator(port, CHAT).open(1)
        load = await generator.run(iter([b'{"messages":[],"bootstrap_room":77}']), 1, limit=0.1)
    assert one.counts.handoffs == 1
    assert load.failures == {"not answered": 1}


async def test_a_prefill_answer_is_a_wrong_answer():
    async with engine("prefill") as (_, port):
        generator = await LoadGenerator(port, CHAT).open(1)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 2, limit=5)
        generator.close()
    assert load.requests == 0
    assert load.failures.total() == 2
    assert next(iter(load.failures)).startswith("body differs")


async def test_a_closed_connection_fails_its_request_and_leaves_the_rest_unanswered():
    async with canned(b"") as port:
        generator = await LoadGenerator(port, CHAT).open(2)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 5, limit=5)
    assert load.failures == {"connection closed before the answer was complete": 2, "not answered": 3}


async def test_a_silent_server_ends_at_the_limit():
    async with canned(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab") as port:
        generator = await LoadGenerator(port, CHAT).open(2)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 9, limit=0.05)
    assert load.requests == 0
    assert load.failures.total() == 9


@pytest.mark.parametrize("piece", [1, 2, 5, 1000])
async def test_answers_may_come_in_any_pieces(piece):
    """Whole heads, split heads, a last chunk in splinters: the generator sees one answer each time."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nHello\r\n7\r\n, world\r\n0\r\n\r\n"
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nHello, world"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for whole in (chunked, sized, chunked):
            await reader.readuntil(b'"}')
            for start in range(0, len(whole), piece):
                writer.write(whole[start : start + piece])
                await asyncio.sleep(0)  # a write of its own
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        generator = await LoadGenerator(server.sockets[0].getsockname()[1], b"Hello, world").open(1)
        load = await generator.run(iter([b'{"a":"b"}'] * 3), 3, limit=5)
        generator.close()
    assert load.requests == 3
    assert not load.failures


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno", "status 503: no"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", "body differs: 2 bytes that end in b'no', not 3"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyesX\r\n0\r\n\r\n", "bad chunked body"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", None),
    ],
)
def test_verify_names_what_is_wrong(answer, problem):
    found = verify(answer, b"yes")
    assert found is problem is None or found.startswith(problem)


@pytest.mark.parametrize(
    "broken", [b"", b"3\r\nyes", b"3\r\nyes\r\n", b"x\r\n\r\n", b"0\r\n\r\nmore", b"5\r\nyes\r\n0\r\n\r\n"]
)
def test_dechunk_refuses_broken_framing(broken):
    with pytest.raises(ValueError, match=r"not found|base 16|chunk"):
        dechunk(broken)


@pytest.mark.parametrize("ending", [b"1\r\n}\r\n0\r\n\r\n", b"1;x=y\r\n}\r\n0\r\nt: v\r\n\r\n"])
@pytest.mark.parametrize("piece", [1, 3, 10_000])
def test_the_worker_reads_chunked_bodies_in_any_pieces(ending, piece):
    text = b'{"bootstrap_room":1,' + b"x" * 700
    data = b"%x\r\n%s\r\n" % (len(text), text) + ending + b"NEXT"
    body = worker.Body.of(b"\r\ntransfer-encoding: chunked\r\n")
    rest = b""
    for start in range(0, len(data), piece):
        rest = body.feed(data[start : start + piece]) if not body.complete else rest + data[start : start + piece]
    assert body.complete
    assert body.size == len(text) + 1
    assert body.first == text[:512]
    assert body.last.endswith(b"xxx}")
    assert rest == b"NEXT"


def test_missing_work_is_noticed():
    whole = Seen(legs=10, handoffs=10, body_bytes=5000)
    assert missing_work("decode", whole, 10, 5000, handoff=True) == []
    assert len(missing_work("decode", Seen(9, 8, 4000), 10, 5000, handoff=True)) == 3
    assert missing_work("decode", Seen(10, 0, 5000), 10, 5000, handoff=False) == []
