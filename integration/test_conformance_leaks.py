"""Nothing is left behind: random streams with random ends on random connections, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import TYPE_CHECKING

import pytest
import uvloop
from conformance_rig import PATIENCE, SERVERS, Calls, RawClient, Server, Steered, raw_client

from extproc.transport.grpc_framing import frame
from extproc.transport.methods import PROCESS_PATH

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extproc.transport.interface import Call

STREAMS = 40
CONNECTIONS = 30
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Watched(Calls):
    """Also knows whether the calls' objects are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[Steered] = weakref.WeakSet()
        self.opened = 0
        self.closed = 0

    def process(self, call: Call) -> Steered:
        handler = Steered(call, self)
        self.alive.add(handler)
        self.opened += 1
        closed = handler.closed

        def count() -> None:
            self.closed += 1
            closed()

        handler.closed = count  # type: ignore[method-assign]
        return handler


async def misbehave(client: RawClient, chance: random.Random) -> None:
    """One stream: a few messages, then some end, not always the peer's own."""
    stream = client.open(chance.choice(["/nowhere", *[PROCESS_PATH] * 9]))
    for _ in range(chance.randrange(4)):
        data = chance.choice([frame(b"hello"), frame(bytes(100_000)), frame(b"?"), frame(b"!pause"), b"\0\0\0"])
        try:
            client.data(stream, data)
        except Exception:  # noqa: BLE001 -- the server has ended the stream
            return
        await asyncio.sleep(0)
    end = chance.randrange(6)
    try:
        if end == 0:
            client.h2.reset_stream(stream)
        elif end == 1:
            client.h2.end_stream(stream)
        elif end == 2:
            client.h2.send_data(stream, frame(b"!abort 9 enough"))
        elif end == 3:
            client.h2.send_data(stream, frame(b"!fail received"))
        elif end == 4:
            client.h2.send_data(stream, b"\7garbage")
        client.flush()
    except Exception:  # noqa: BLE001 -- as above
        return


async def connect(path: str, chance: random.Random) -> None:
    async with raw_client(path, {4: chance.choice([0, 65_535, 1 << 20])}) as client:
        for _ in range(STREAMS):
            await misbehave(client, chance)
        if chance.random() < 0.5:  # else the connection breaks in the midst of it
            last = client.open()
            client.data(last, frame(b"?"), end_stream=True)
            await client.ended(last)


async def stress(server: Server, calls: Watched, path: str) -> None:
    chance = random.Random(7)
    await server.start(f"unix:{path}", calls.process)
    try:
        await asyncio.gather(*(connect(path, chance) for _ in range(CONNECTIONS)))
        async with asyncio.timeout(PATIENCE):
            while server.open_calls:  # noqa: ASYNC110 -- a call is gone a little after its handler was told
                await asyncio.sleep(0.01)
        assert calls.closed == calls.opened > STREAMS * CONNECTIONS / 4
    finally:
        await server.drain(1)
    gc.collect()
    assert not calls.alive
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if "extproc" in repr(task.get_coro())]


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("server_type", SERVERS, ids=lambda each: each.__name__)
def test_nothing_is_left_behind(
    server_type: type[Server],
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", "extproc")  # a kept record's traceback keeps the handler that failed
    with asyncio.Runner(loop_factory=loop_factory) as runner:

        async def main() -> None:
            await stress(server_type(), Watched(), str(tmp_path / "s"))

        runner.run(main())
