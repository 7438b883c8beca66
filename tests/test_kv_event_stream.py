"""KV events over real ZeroMQ: order, gaps, replays, other processes, and what is no event at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvloop
import zmq
from fleet import eventually
from kv_publisher import CLEARED, Publisher, publishing, removed, stored

from extproc.workers import kv_event_stream
from extproc.workers.kv_event_source import Source
from extproc.workers.kv_event_stream import Stream
from extproc.workers.kv_events import Cleared, Event, Removed, Stored, decode


class Told:
    """A Sink that remembers: what is known now, whether it is all, and how often it was lost."""

    def __init__(self) -> None:
        self.names: list[int | bytes] = []  # of the events since all was lost
        self.whole = False
        self.lost = 0
        self.renewed = 0

    def apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.names.append(b"cleared")
            else:
                self.names += event.hashes

    def lose(self) -> None:
        self.names, self.whole = [], False
        self.lost += 1

    def restart(self) -> None:
        self.names, self.whole = [], True

    def renew(self) -> None:
        self.renewed += 1


@pytest.fixture
async def context() -> AsyncIterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


@contextmanager
def following(context: zmq.Context[Any], publisher: Publisher, **more: Any) -> Iterator[tuple[Stream, Told]]:
    told = Told()
    source = Source(publisher.endpoint, publisher.replay_endpoint, **more)
    stream = Stream(context, source, told, "w")
    try:
        yield stream, told
    finally:
        stream.close()


class Line:
    """A TCP connection in between, which can be cut, and comes back when it is started again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._own_port = 0
        self._server: asyncio.Server | None = None
        self.open: list[asyncio.StreamWriter] = []

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._own_port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._own_port)
        self._own_port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()

    async def stop(self) -> None:
        self.cut()
        assert self._server is not None
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other = await asyncio.open_connection("127.0.0.1", self._port)
        self.open += [writer, other]
        await asyncio.gather(_pipe(reader, other), _pipe(other_reader, writer), return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def between(publisher: Publisher) -> AsyncIterator[Line]:
    line = Line(publisher.port)
    await line.start()
    try:
        yield line
    finally:
        await line.stop()


def say(publisher: Publisher, number: int, **how: Any) -> None:
    publisher.publish(stored([number], range(4)), **how)


async def test_from_the_beginning_without_a_replay(context: zmq.Context[Any]) -> None:
    with publishing(replay_port=None) as publisher, following(context, publisher) as (stream, told):
        await publisher.subscribed()
        publisher.publish(stored([1, 2], range(8)), removed(1))
        publisher.publish(CLEARED)
        await eventually(lambda: told.names == [1, 2, 1, b"cleared"])
        assert told.whole
        assert stream.connected
        assert (stream.batches, stream.losses) == (2, 0)


async def test_from_the_middle_without_a_replay(context: zmq.Context[Any]) -> None:
    with publishing(replay_port=None) as publisher:
        say(publisher, 1)
        with following(context, publisher) as (_, told):
            await publisher.subscribed()
            say(publisher, 2)
            say(publisher, 3)
            await eventually(lambda: told.names == [2, 3])
            assert not told.whole


async def test_what_was_before_is_replayed(context: zmq.Context[Any]) -> None:
    with publishing() as publisher:
        for number in range(100):
            say(publisher, number)
        with following(context, publisher) as (_, told):
            await eventually(lambda: told.names == [*range(100)])
            await publisher.subscribed()
            say(publisher, 100)
            await eventually(lambda: told.names == [*range(101)])
            assert told.whole
            assert publisher.replays[0] == 0


async def test_an_engine_that_has_said_nothing_yet(context: zmq.Context[Any]) -> None:
    with publishing() as publisher, following(context, publisher) as (_, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        say(publisher, 1)
        await eventually(lambda: told.names == [1])
        assert told.whole


async def test_of_what_was_before_only_the_end_is_kept(context: zmq.Context[Any]) -> None:
    with publishing(keep=3) as publisher:
        for number in range(10):
            say(publisher, number)
        with following(context, publisher) as (_, told):
            await eventually(lambda: told.names == [7, 8, 9])
            assert not told.whole


async def test_while_it_publishes_all_the_time(context: zmq.Context[Any]) -> None:
    """What comes by itself and what is replayed overlap: nothing is missing, nothing twice."""
    with publishing() as publisher, following(context, publisher) as (_, told):
        for number in range(500):
            say(publisher, number)
            if not number % 10:
                await asyncio.sleep(0)
        await publisher.subscribed()
        say(publisher, 500)
        await eventually(lambda: told.names == [*range(501)])
        assert told.whole


async def test_a_gap_is_filled(context: zmq.Context[Any]) -> None:
    with publishing() as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        say(publisher, 0)
        await eventually(lambda: told.names == [0])
        lost = told.lost
        for number in (1, 2):
            say(publisher, number, lost=True)
        for number in (3, 4):
            say(publisher, number)
        await eventually(lambda: told.names == [0, 1, 2, 3, 4])
        assert publisher.replays[-1] == 1
        assert told.whole
        assert (told.lost, stream.losses) == (lost, 0)


async def test_a_gap_that_cannot_be_filled_is_a_loss(context: zmq.Context[Any]) -> None:
    with publishing(replay_port=None) as publisher, following(context, publisher) as (stream, told):
        await publisher.subscribed()
        say(publisher, 0)
        say(publisher, 1, lost=True)
        say(publisher, 2)
        say(publisher, 3)
        await eventually(lambda: told.names == [2, 3])
        assert not told.whole
        assert stream.losses == 1


async def test_a_gap_that_is_not_kept_any_more(context: zmq.Context[Any]) -> None:
    with publishing(keep=2) as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        say(publisher, 0)
        await eventually(lambda: told.names == [0])
        for number in (1, 2, 3):
            say(publisher, number, lost=True)
        say(publisher, 4)
        await eventually(lambda: told.names == [3, 4])
        assert publisher.replays[-2:] == [1, 0]
        assert not told.whole
        assert stream.losses == 1
        say(publisher, 5)
        await eventually(lambda: told.names == [3, 4, 5])


async def test_a_hole_in_what_is_kept(context: zmq.Context[Any]) -> None:
    """vLLM counts a batch on that it could not encode, and keeps nothing of it: it can never be had."""
    with publishing() as publisher:
        say(publisher, 0)
        say(publisher, 1, lost=True, kept=False)
        say(publisher, 2)
        with following(context, publisher) as (stream, told):
            await eventually(lambda: told.names == [2])
            await publisher.subscribed()
            say(publisher, 3, lost=True, kept=False)
            say(publisher, 4)
            say(publisher, 5)
            await eventually(lambda: told.names == [4, 5])
            assert not told.whole
            assert publisher.replays == [0, 3, 0]
            assert stream.losses == 4  # of each hole, and once more of each that was looked for in all that is kept


@pytest.mark.parametrize("replay_port", [0, None])
async def test_an_engine_that_restarts(context: zmq.Context[Any], replay_port: int | None) -> None:
    with publishing(replay_port=replay_port) as first, following(context, first) as (stream, told):
        await first.subscribed()
        for number in range(5):
            say(first, number)
        await eventually(lambda: told.names == [*range(5)])
        first.close()
        await eventually(lambda: not told.names)
        assert not told.whole
        assert not stream.connected
        with publishing(port=first.port, replay_port=first.replay_port) as second:
            await second.subscribed()
            say(second, 70)
            say(second, 71)
            await eventually(lambda: told.names == [70, 71])
            assert told.whole
            assert (told.renewed, stream.losses) == (1, 0)


@pytest.mark.parametrize("replay_port", [0, None])
async def test_a_connection_that_breaks_and_comes_back(context: zmq.Context[Any], replay_port: int | None) -> None:
    """The process is the same: what is replayed is known again, and nobody else need forget anything."""
    with publishing(replay_port=replay_port) as publisher:
        async with between(publisher) as line:
            told = Told()
            source = Source(line.endpoint, publisher.replay_endpoint)
            stream = Stream(context, source, told, "w")
            await publisher.subscribed()
            for number in range(3):
                say(publisher, number)
            await eventually(lambda: told.names == [0, 1, 2])
            line.cut()
            await eventually(lambda: not stream.connected)
            assert (told.names, told.whole) == ([], False)
            await line.start()
            await eventually(lambda: stream.connected and line.open)
            await eventually(lambda: publisher.heard)
            say(publisher, 3)
            await eventually(lambda: told.names == ([3] if replay_port is None else [0, 1, 2, 3]))
            assert told.whole is (replay_port is not None)
            assert told.renewed == 0
            stream.close()


async def test_another_process_whose_connection_was_not_seen_to_end(context: zmq.Context[Any]) -> None:
    """Such as behind a proxy: its numbers begin again."""
    with publishing() as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        for number in range(3):
            say(publisher, number)
        await eventually(lambda: told.names == [0, 1, 2])
        publisher.next = 0
        publisher._buffer.clear()
        say(publisher, 70)
        await eventually(lambda: told.names == [70])
        assert told.whole
        assert (told.renewed, stream.losses) == (1, 1)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"{}", b"\x93\x00\x91\x81\xa4type\xabBlockStored\x00", b"\x91" * 5000]
)
async def test_a_batch_that_cannot_be_read_is_a_loss(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture, payload: bytes
) -> None:
    with publishing() as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        say(publisher, 0)
        publisher.publish(payload=payload)
        say(publisher, 2)
        await eventually(lambda: told.names == [2])
        assert not told.whole
        assert stream.losses == 1
        publisher.publish(payload=payload)
        await eventually(lambda: stream.losses == 2)
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


async def test_a_message_that_could_not_be_dealt_with_is_a_loss(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(payload: bytes) -> list[Event]:
        if payload == b"x":
            raise RuntimeError("a defect")
        return decode(payload)

    monkeypatch.setattr(kv_event_stream, "decode", defect)
    with publishing() as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        for number in range(3):  # ZeroMQ's descriptor tells of them once
            say(publisher, number)
        publisher.publish(payload=b"x")
        say(publisher, 4)
        await eventually(lambda: told.names == [4])
        assert (told.whole, stream.losses) == (False, 1)
    assert "a defect" in caplog.text


@pytest.mark.parametrize("frames", [(b"x",), (b"", b"short", b""), (b"", b"", b"", b"")])
async def test_other_messages_are_not_heeded(context: zmq.Context[Any], frames: tuple[bytes, ...]) -> None:
    with publishing() as publisher, following(context, publisher) as (stream, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        publisher.send(*frames)
        say(publisher, 0)
        await eventually(lambda: told.names == [0])
        assert (told.whole, stream.losses) == (True, 0)


async def test_a_replay_that_does_not_come(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_stream, "REPLAY_SECONDS", 0.05)
    monkeypatch.setattr(kv_event_stream, "AGAIN_SECONDS", 0.1)
    with publishing() as publisher, following(context, publisher) as (_, told):
        publisher.mute = True
        await publisher.subscribed()
        say(publisher, 0, lost=True)
        say(publisher, 1)
        await eventually(lambda: told.names == [1])
        assert not told.whole
        publisher.mute = False
        await eventually(lambda: told.names == [0, 1])
        assert told.whole


async def test_a_replay_that_keeps_nothing(context: zmq.Context[Any]) -> None:
    """It must not be asked again and again."""
    with publishing() as publisher, following(context, publisher) as (_, told):
        await eventually(lambda: told.whole)
        await publisher.subscribed()
        say(publisher, 0, lost=True, kept=False)
        say(publisher, 1, kept=False)
        await eventually(lambda: told.names == [1])
        say(publisher, 2, kept=False)
        await eventually(lambda: told.names == [1, 2])
        assert not told.whole
        assert len(publisher.replays) < 5


async def test_only_its_topic(context: zmq.Context[Any]) -> None:
    with (
        publishing(replay_port=None, topic="kv@tiny") as publisher,
        following(context, publisher, topic="kv@") as (_, told),
        following(context, publisher, topic="other") as (_, deaf),
    ):
        await eventually(lambda: publisher._subscribers == 2)
        say(publisher, 0)
        await eventually(lambda: told.names == [0])
        assert deaf.names == []


async def test_nothing_is_left(context: zmq.Context[Any]) -> None:
    with publishing() as publisher:
        with following(context, publisher) as (_, told):
            publisher.mute = True
            await eventually(lambda: publisher.replays)
        say(publisher, 0)
        lost = told.lost
    await asyncio.sleep(0)
    assert told.lost == lost
    context.term()  # hangs where a socket is open


def test_types() -> None:
    assert {Stored, Removed, Cleared} == set(Event.__args__)


def test_under_uvloop() -> None:
    """As the service runs it."""

    async def follow() -> None:
        context: zmq.Context[Any] = zmq.Context()
        with publishing() as publisher:
            for number in range(200):
                say(publisher, number)
            with following(context, publisher) as (_, told):
                await publisher.subscribed()
                for number in range(200, 400):
                    say(publisher, number)
                await eventually(lambda: told.names == [*range(400)])
                publisher.close()
                await eventually(lambda: not told.names)
        context.destroy(0)

    uvloop.run(follow())
