"""Fast stand-in engines for the benchmark, in one process of little cost.

``python -m bench.worker`` serves prefill and decode workers on free ports and prints them as one JSON line. They answer
as ``--engine`` does (sglang.py, vllm.py; rpc.py), without its checks and its thinking time. A stream comes as an engine
sends it: every ``--step-ms`` one decode step hands one token to every running stream, unless the request wants a burst.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from bench import rpc
from bench.engine import DecodeSteps, Engine, Kind
from bench.prompts import Answer
from bench.request_body import Body
from bench.sglang import Rooms, Sglang
from bench.vllm import Handed, Vllm

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_HEAD = 64 * 1024


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection: content-length and chunked bodies, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport
        self._head = bytearray()  # bytes of an unfinished head
        self._body: Body | None = None
        self._path = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        self._engine.gone(self)

    def data_received(self, data: bytes) -> None:
        while data:
            if self._body is None:
                self._head += data
                data = b""
                end = self._head.find(b"\r\n\r\n")
                if end >= 0:
                    data = bytes(self._head[end + 4 :])
                    head = bytes(self._head[:end])
                    self._head.clear()
                    self._start(head)
                elif len(self._head) > _MAX_HEAD:
                    self._transport.abort()
                    return
            if self._body is not None:
                data = self._body.feed(data)
                if self._body.complete:
                    body, self._body = self._body, None
                    self._engine.post(self, self._path, body)

    def write(self, data: bytes) -> None:
        """Send; nothing happens when the connection is gone."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def _start(self, head: bytes) -> None:
        line, _, rest = head.partition(b"\r\n")
        method, self._path, _ = line.split(b" ", 2)
        lower = rest.lower()
        if b"\r\nexpect: 100-continue" in b"\r\n" + lower:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if method == b"GET":
            self._transport.write(self._engine.get(self._path))
        else:
            self._body = Body.of(b"\r\n" + lower + b"\r\n", self._engine.edge)


async def serve(kind: Kind, prefill: int, decode: int, step: float) -> dict[str, list[int]]:
    """Start the workers on free loopback ports; returns the ports by role."""
    loop = asyncio.get_running_loop()
    new: Callable[[str, dict[Answer, DecodeSteps]], Engine]
    new = partial(Vllm, handed=Handed()) if kind is Kind.VLLM else partial(Sglang, rooms=Rooms())
    ports: dict[str, list[int]] = {"prefill": [], "decode": []}
    for role, number in (("prefill", prefill), ("decode", decode)):
        for _ in range(number):
            engine = new(role, {Answer.PACED: DecodeSteps(step), Answer.BURST: DecodeSteps(0)})
            server = await loop.create_server(partial(Connection, engine), "127.0.0.1", 0, backlog=1024)
            ports[role].append(server.sockets[0].getsockname()[1])
    return ports


async def _main(options: argparse.Namespace) -> None:
    kind = Kind(options.engine)
    ports = await (rpc.serve if kind.is_grpc else serve)(kind, options.prefill, options.decode, options.step_ms / 1000)
    print(json.dumps(ports), flush=True)
    # The parent holds the other end of our standard input: when it goes, for whatever reason, so do we.
    await asyncio.to_thread(sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--engine", default="sglang", choices=[kind.value for kind in Kind], help="whose answers")
    parser.add_argument("--prefill", type=int, default=2, help="number of prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="number of decode workers")
    parser.add_argument("--step-ms", type=float, default=2.0, help="time between two tokens of a stream")
    uvloop.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
