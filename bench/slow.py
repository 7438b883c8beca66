"""A thousand clients that do not read: what the gateway and Envoy keep for them, and whether others are served.

``python -m bench.slow`` starts ``pd-extproc launch`` in front of gRPC workers that say as much as is taken from them,
and opens ``--readers`` streams over one HTTP/2 connection, none of which is given credit. When the workers are made to
wait, all of them, it says what memory that takes, how much each worker has said for a stream, and how soon another
client has its answer. ``--samples 2`` has each answer made of two sequences, which takes another way through the
gateway (docs/architecture.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import ngh2
import uvloop

from bench.child import Child
from bench.engine import DecodeSteps, Kind
from bench.fleet import Fleet
from bench.prompts import MODEL
from bench.rpc import Meeting, RpcEngine
from bench.systems import Launch
from extproc.mock.rpc.model import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.systems import Running
    from extproc.transport.methods import RpcCall

_TOKENS: Final = 200  # of a message
_MANY: Final = 1000  # tokens: who asks for so many is flooded
_WAITING: Final = 1 << 14  # bytes of a worker's that nobody takes: it says no more
_PACE: Final = 0.02  # seconds between looks at who takes more
_STILL: Final = 5.0  # seconds in which nobody takes anything: all wait
_PATIENCE: Final = 900.0
_BODY: Final = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
_CREDIT: Final = 65_535  # of a stream, before it is given more


class Flood:
    """Decode legs that have more to say for as long as somebody listens."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._legs: dict[Any, RpcCall] = {}
        self.said = 0  # bytes

    def add(self, leg: Any) -> None:
        """One more."""
        self._legs[leg] = leg.call

    def drop(self, leg: Any) -> None:
        """It is over."""
        self._legs.pop(leg, None)

    async def run(self) -> None:
        """Say what is taken, for ever."""
        while True:
            for call in self._legs.values():
                if call.queued < _WAITING:
                    call.send(self._message)
                    self.said += len(self._message)
            await asyncio.sleep(_PACE)


class Steps(DecodeSteps):
    """Those of streams that end; of all streams ``flood`` hears when they are over."""

    def __init__(self, interval: float, flood: Flood) -> None:
        super().__init__(interval)
        self._flood = flood

    def drop(self, stream: Any) -> None:
        super().drop(stream)
        self._flood.drop(stream)


class FloodingEngine(RpcEngine):
    """A decode worker that floods those who ask for many tokens."""

    def __init__(self, flood: Flood, meeting: Meeting) -> None:
        super().__init__(Kind.SGLANG_GRPC, "decode", 0.002, meeting, count())
        self._flood = flood
        self.steps = Steps(0.002, flood)

    def generate(self, leg: Any, data: bytes) -> None:
        """See RpcEngine."""
        request = self._messages.GenerateRequest.FromString(data)
        if request.sampling_params.max_new_tokens >= _MANY:
            room = request.disaggregated_params.bootstrap_room
            self.meeting.when_prefilled(room, partial(self._flood.add, leg))
        else:
            super().generate(leg, data)


class Readers(asyncio.Protocol):
    """One HTTP/2 connection, whose streams get no credit."""

    def __init__(self, port: int, *, read: bool) -> None:
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=read))
        self._authority = b"127.0.0.1:%d" % port
        self._transport: asyncio.Transport
        self.came: dict[int, int] = {}  # bytes of each stream's answer
        self.whole: set[int] = set()
        self.refused: list[int] = []  # statuses
        self.cut: list[int] = []  # why
        self.changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.h2.initiate_connection({ngh2.Setting.INITIAL_WINDOW_SIZE: _CREDIT})
        self.h2.set_local_window_size(1 << 30)
        self.flush()

    def flush(self) -> None:
        """Write what is due."""
        if data := self.h2.data_to_send():
            self._transport.write(data)

    def ask(self, body: dict[str, Any]) -> int:
        """Send a request; its stream."""
        raw = json.dumps(body).encode()
        head = [
            *((b":method", b"POST"), (b":scheme", b"http"), (b":authority", self._authority)),
            *((b":path", b"/v1/chat/completions"), (b"content-length", b"%d" % len(raw))),
            (b"content-type", b"application/json"),
        ]
        stream = self.h2.send_request(head)
        self.h2.send_data(stream, raw, end_stream=True)
        self.came[stream] = 0
        self.flush()
        return stream

    def data_received(self, data: bytes) -> None:
        self.h2.receive_data(data)
        for event in self.h2.events():
            if isinstance(event, ngh2.DataReceived):
                self.came[event.stream_id] += len(event.data)
            elif isinstance(event, ngh2.ResponseReceived) and int(event.headers[0][1]) != 200:
                self.refused.append(int(event.headers[0][1]))
            elif isinstance(event, ngh2.StreamReset):
                self.cut.append(event.error_code)
            if getattr(event, "end_stream", False):
                self.whole.add(event.stream_id)
        self.flush()
        self.changed.set()

    async def until(self, stream: int) -> None:
        """Wait for a whole answer."""
        async with asyncio.timeout(_PATIENCE):
            while stream not in self.whole:
                self.changed.clear()
                await self.changed.wait()

    def close(self) -> None:
        """Leave."""
        self._transport.close()


def memory(pids: Sequence[int]) -> float:
    """Resident MiB of processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def connect(port: int, *, read: bool) -> Readers:
    """A connection to the gateway."""
    _, readers = await asyncio.get_running_loop().create_connection(lambda: Readers(port, read=read), "127.0.0.1", port)
    return readers


async def another(port: int) -> float:
    """How long another client waits for 200 tokens, in seconds."""
    start = time.monotonic()
    client = await connect(port, read=True)
    await client.until(client.ask(_BODY | {"max_tokens": _TOKENS}))
    client.close()
    if client.refused:
        raise RuntimeError(f"the other client was told {client.refused}")
    return time.monotonic() - start


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start all, and print what is found."""
    meeting, numbers = Meeting(), count(1)
    prefill = RpcEngine(Kind.SGLANG_GRPC, "prefill", 0.002, meeting, numbers)
    messages = prefill._messages
    ids = [VOCABULARY - _TOKENS + at for at in range(_TOKENS)]
    chunk = messages.GenerateStreamChunk(token_ids=ids, prompt_tokens=9, completion_tokens=_TOKENS)
    flood = Flood(messages.GenerateResponse(chunk=chunk).SerializeToString())
    decode = FloodingEngine(flood, meeting)
    ports = [await prefill.start()], [await decode.start()]
    launch = Launch(flags=("--max-concurrent-requests", str(2 * options.readers), "--sse-keepalive-secs", "0"))
    running = await launch.start(Fleet(Kind.SGLANG_GRPC, cast("Child", None), *ports, []), folder)
    flooding = asyncio.create_task(flood.run())
    try:
        await _until_serving(running)
        await _measure(running, flood, options)
    finally:
        flooding.cancel()
        await running.stop()
        await prefill.stop()
        await decode.stop()


async def _until_serving(running: Running) -> None:
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                await another(running.port)
            except (OSError, RuntimeError):
                await asyncio.sleep(0.2)
            else:
                running.find_processes()
                return


async def _measure(running: Running, flood: Flood, options: argparse.Namespace) -> None:
    alone = [await another(running.port) for _ in range(10)]
    before = {part: memory(pids) for part, pids in running.processes.items()}
    crowd = await connect(running.port, read=False)
    start = time.monotonic()
    for _ in range(options.readers):
        crowd.ask(_BODY | {"max_tokens": _MANY, "n": options.samples})
        await asyncio.sleep(0)
    said = -1
    async with asyncio.timeout(_PATIENCE):
        while said != flood.said:
            said = flood.said
            await asyncio.sleep(_STILL)
    if crowd.refused or crowd.cut:
        raise RuntimeError(f"{len(crowd.refused)} were refused: {set(crowd.refused)}, {len(crowd.cut)} were cut")
    waited = time.monotonic() - start - _STILL
    print(f"{options.readers} streams of {options.samples} sequences: all workers wait after {waited:.0f} s")
    print(f"  said by the workers for each sequence: {said / options.readers / options.samples / 1024:.0f} KiB")
    print(f"  taken by the clients, of each stream: {sum(crowd.came.values()) / options.readers / 1024:.0f} KiB")
    for part, pids in running.processes.items():
        now = memory(pids)
        each = (now - before[part]) * 1024 / options.readers
        print(f"  {part}: {before[part]:.0f} MiB before, {now:.0f} MiB now, {each:.0f} KiB for each stream")
    meanwhile = [await another(running.port) for _ in range(10)]
    print(f"  200 tokens for another client: {min(alone):.2f} s before, {min(meanwhile):.2f} s now")
    crowd.close()


def main() -> None:
    """Run what the command line asks for."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="bench.slow", description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1)
    with tempfile.TemporaryDirectory(prefix="pd-slow-") as folder:
        uvloop.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
