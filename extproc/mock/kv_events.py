"""Publishes KV cache events over ZeroMQ as an engine does, with its sequence numbers and its replays.

What is published can also be lost on its way, or not be kept for replays. Source: vllm 0.32 distributed/kv_events.py,
ZmqEventPublisher.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

_END: Final = (-1).to_bytes(8, "big", signed=True)
_BIND_SECONDS: Final = 5.0  # that the former holder of a port may take to leave


def batch(*events: Any, rank: int = 0) -> bytes:
    """A batch's payload."""
    return msgspec.msgpack.encode([time.time(), list(events), rank])


class Publisher:
    """Publishes on ``port`` of 127.0.0.1, and answers replays on ``replay_port``; 0: any free one, None: it does not.

    ``keep``: batches in its replay buffer. Begins at once, on the running event loop. Raises ZMQError for a port that
    is taken.
    """

    def __init__(self, port: int = 0, replay_port: int | None = 0, *, keep: int = 10_000, topic: str = "") -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that tells of subscriptions
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.port = _bound(self._pub, port)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_port: int | None = None
        self.mute = False  # it does not answer replays
        self.replays: list[int] = []  # the numbers from which they were asked for
        if replay_port is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self.replay_port = _bound(self._replay, replay_port)
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.next = 0
        self._loop = asyncio.get_running_loop()
        self._subscribers = 0
        self._subscribed = asyncio.Event()
        self._looks: list[Callable[[], None]] = []
        for socket, heard in ((self._pub, self._on_subscription), (self._replay, self._on_replay)):
            if socket is not None:
                self._watch(socket, heard)

    def _watch(self, socket: zmq.Socket[bytes], heard: Callable[[list[bytes]], None]) -> None:
        def ready() -> None:
            while not socket.closed:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                heard(frames)

        self._loop.add_reader(socket.fileno(), ready)
        self._looks.append(ready)
        self._loop.call_soon(ready)

    def _look(self) -> None:
        """Sending may hide that something can be read."""
        for ready in self._looks:
            ready()

    @property
    def endpoint(self) -> str:
        """Where it publishes."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Where it answers replays; empty: nowhere."""
        return "" if self.replay_port is None else f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def heard(self) -> bool:
        """Whether somebody hears what is published."""
        return self._subscribers > 0

    @property
    def labels(self) -> dict[str, str]:
        """Those of its worker."""
        found = {"kv_events": f"tcp://*:{self.port}"}
        if self.replay_port is not None:
            found["kv_events_replay"] = f"tcp://*:{self.replay_port}"
        return found

    def publish(self, *events: Any, payload: bytes | None = None, lost: bool = False, kept: bool = True) -> None:
        """A batch; ``lost``: on its way, ``kept``: for replays."""
        body = batch(*events) if payload is None else payload
        number = self.next.to_bytes(8, "big")
        if not lost:
            self._pub.send_multipart([self._topic, number, body])
        if kept:
            self._buffer.append((self.next, body))
        self.next += 1
        self._look()

    def send(self, *frames: bytes) -> None:
        """Anything."""
        self._pub.send_multipart(list(frames))
        self._look()

    async def subscribed(self) -> None:
        """Wait until somebody hears what is published."""
        async with asyncio.timeout(20):
            await self._subscribed.wait()

    def close(self) -> None:
        """Publish no more."""
        for socket in (self._pub, self._replay):
            if socket is not None and not socket.closed:
                self._loop.remove_reader(socket.fileno())
                socket.close(0)
        self._context.destroy(0)

    def _on_subscription(self, frames: list[bytes]) -> None:
        self._subscribers += 1 if frames[0][:1] == b"\x01" else -1
        if self._subscribers:
            self._subscribed.set()
        else:
            self._subscribed.clear()

    def _on_replay(self, frames: list[bytes]) -> None:
        client, empty, start = frames
        assert empty == b""
        first = int.from_bytes(start, "big")
        self.replays.append(first)
        assert self._replay is not None
        if self.mute:
            return
        for number, payload in self._buffer:
            if number >= first:
                self._replay.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", b"", _END, b""])


def _bound(socket: zmq.Socket[bytes], port: int) -> int:
    socket.setsockopt(zmq.LINGER, 0)
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # the former holder of the port is on its way out
        else:
            return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
