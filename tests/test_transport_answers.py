"""Answers that the peer fetches: no faster than it gives credit, and those that stall disturb nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import ngh2
import pytest

from extproc.transport.interface import ANSWER_PATH, Answer, Call, CallHandler
from extproc.transport.ngh2_answer import ANSWER_HIGH_WATER, ANSWER_LOW_WATER
from extproc.transport.ngh2_server import Ngh2ProcessServer

WINDOW = 1 << 14


class Giver:
    """An AnswerHandler, and what it was told."""

    def __init__(self, answer: Answer, woken: asyncio.Event) -> None:
        self.answer = answer
        self.drains = self.closes = 0
        self._woken = woken

    def drained(self) -> None:
        self.drains += 1
        self._woken.set()

    def closed(self) -> None:
        self.closes += 1
        self._woken.set()


class Givers:
    """Answers everything, but for what is not there."""

    def __init__(self) -> None:
        self.all: list[Giver] = []
        self.woken = asyncio.Event()

    def answer(self, path: bytes, answer: Answer) -> Giver | None:
        if path.endswith(b"missing"):
            return None
        if path.endswith(b"broken"):
            raise RuntimeError
        giver = Giver(answer, self.woken)
        self.all.append(giver)
        self.woken.set()
        return giver


class Reader(asyncio.Protocol):
    """A peer that gives credit when it is told to."""

    def __init__(self, woken: asyncio.Event) -> None:
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self._woken = woken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.h2.initiate_connection({ngh2.Setting.INITIAL_WINDOW_SIZE: WINDOW})
        self.h2.set_local_window_size(1 << 30)
        self.flush()

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def ask(self, name: bytes) -> int:
        pseudo = ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", ANSWER_PATH + name))
        stream = self.h2.send_request(pseudo, end_stream=True)
        self.bodies[stream] = b""
        self.flush()
        return stream

    def read(self, stream: int, size: int) -> None:
        self.h2.acknowledge_received_data(size, stream)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.h2.receive_data(data)
        for event in self.h2.events():
            if isinstance(event, ngh2.ResponseReceived):
                self.statuses[event.stream_id] = int(event.headers[0][1])
            elif isinstance(event, ngh2.DataReceived):
                self.bodies[event.stream_id] += event.data
            if getattr(event, "end_stream", False):
                self.ended.add(event.stream_id)
        self.flush()
        self._woken.set()


def no_call(_: Call) -> CallHandler:
    raise AssertionError


class Rig:
    def __init__(self, givers: Givers, reader: Reader, server: Ngh2ProcessServer) -> None:
        self.givers, self.reader, self.server = givers, reader, server

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.givers.woken.clear()
                await self.givers.woken.wait()

    async def asked(self, name: bytes = b"x") -> tuple[int, Giver]:
        count = len(self.givers.all)
        stream = self.reader.ask(name)
        await self.until(lambda: len(self.givers.all) > count)
        return stream, self.givers.all[-1]

    async def came(self, stream: int, size: int) -> None:
        await self.until(lambda: len(self.reader.bodies[stream]) == size)

    async def round_trip(self) -> None:
        """What was sent before has come."""
        stream = self.reader.ask(b"missing")
        await self.until(lambda: stream in self.reader.ended)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    givers = Givers()
    server = Ngh2ProcessServer(answers=givers.answer)
    await server.start(f"unix:{tmp_path}/s", no_call)
    _, reader = await asyncio.get_running_loop().create_unix_connection(lambda: Reader(givers.woken), f"{tmp_path}/s")
    yield Rig(givers, reader, server)
    reader.transport.close()
    await server.drain(0)


async def test_an_answer(rig: Rig) -> None:
    stream, giver = await rig.asked()
    giver.answer.head(201, [(b"content-type", b"text/plain")])
    giver.answer.body(b"one ", end=False)
    giver.answer.body(b"two", end=True)
    await rig.until(lambda: stream in rig.reader.ended and giver.closes)
    assert (rig.reader.statuses[stream], rig.reader.bodies[stream]) == (201, b"one two")
    assert (giver.drains, giver.closes) == (0, 1)
    giver.answer.body(b"more", end=True)  # over: no harm
    assert giver.answer.queued == 0
    assert rig.server.open_calls == 0


@pytest.mark.parametrize("name", [b"missing", b"broken"])
async def test_what_nobody_answers_is_not_found(rig: Rig, name: bytes) -> None:
    stream = rig.reader.ask(name)
    await rig.until(lambda: stream in rig.reader.ended)
    assert rig.reader.statuses[stream] == 404
    assert rig.server.open_calls == 0


async def test_who_reads_slowly_has_the_giver_told_when_little_is_left(rig: Rig) -> None:
    stream, giver = await rig.asked()
    giver.answer.head(200, [])
    size = WINDOW + ANSWER_HIGH_WATER + 1
    giver.answer.body(bytes(size), end=False)
    read = 0
    while giver.drains == 0:
        await rig.came(stream, min(read + WINDOW, size))
        await rig.round_trip()
        came = len(rig.reader.bodies[stream])
        assert (giver.drains == 0) == (size - came > ANSWER_LOW_WATER)
        assert giver.answer.queued == size - came
        rig.reader.read(stream, came - read)
        read = came
    giver.answer.body(b"end", end=True)
    await rig.until(lambda: stream in rig.reader.ended)
    assert giver.drains == 1


async def test_a_burst_that_leaves_at_once_is_told_as_well(rig: Rig) -> None:
    stream, giver = await rig.asked()
    giver.answer.head(200, [])
    for at in (1, 2):
        rig.reader.h2.set_local_window_size(1 << 20, stream_id=stream)
        rig.reader.flush()
        await rig.round_trip()
        giver.answer.body(bytes(2 * ANSWER_HIGH_WATER), end=False)
        await rig.came(stream, at * 2 * ANSWER_HIGH_WATER)
        assert giver.drains == at


async def test_those_that_stall_are_not_looked_at_for_others(rig: Rig) -> None:
    stalled = [(await rig.asked())[1] for _ in range(20)]
    for giver in stalled:
        giver.answer.head(200, [])
        giver.answer.body(bytes(WINDOW + ANSWER_HIGH_WATER + 1), end=False)
    await rig.round_trip()
    (connection,) = rig.server._connections
    assert not connection._watched
    stream, giver = await rig.asked()
    giver.answer.head(200, [])
    giver.answer.body(b"quick", end=True)
    await rig.until(lambda: stream in rig.reader.ended)
    assert not any(giver.drains for giver in stalled)


async def test_a_reader_that_leaves(rig: Rig) -> None:
    stream, giver = await rig.asked()
    giver.answer.head(200, [])
    giver.answer.body(bytes(WINDOW + ANSWER_HIGH_WATER + 1), end=False)
    rig.reader.h2.reset_stream(stream)
    rig.reader.flush()
    await rig.until(lambda: giver.closes)
    giver.answer.body(b"x", end=False)
    assert (giver.closes, giver.drains, rig.server.open_calls) == (1, 0, 0)


async def test_a_connection_that_breaks(rig: Rig) -> None:
    givers = [(await rig.asked())[1] for _ in range(3)]
    rig.reader.transport.abort()
    await rig.until(lambda: all(giver.closes for giver in givers))
    assert [giver.closes for giver in givers] == [1, 1, 1]
