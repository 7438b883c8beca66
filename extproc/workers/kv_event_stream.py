"""One worker's KV cache events over ZeroMQ: in order, without gaps, or with the word that something is missing.

Batches are numbered from 0 in every engine process. What is missing is asked for again where the engine keeps some
(``replay_endpoint``); where it cannot be had, nothing that was known holds any more, for a block may have left the
cache. A connection that was lost may have been another process's: after it, too, all begins anew.

==========================  ========================================================================================
connected                   with a replay endpoint: forget all and ask for all; else wait for what comes: if that is
                            number 0, all that ever happened follows
the next number             applied
a number that was had       left out right after a replay, which overlaps with what comes by itself; else the process
                            is another one: forget all
a gap                       ask for what is missing; without a replay endpoint, or when it is not there any more either:
                            forget all
a replay from 0 on, or of   all that ever happened in the cache: what is known of it is whole
nothing at all
a replay that does not come as if there were no replay endpoint, for AGAIN_SECONDS
what cannot be read         a gap that no replay fills: forget all
disconnected                forget all
==========================  ========================================================================================

Everything happens on the event loop's thread; ZeroMQ's own does the connecting and receiving.
Source: vllm 0.32 distributed/kv_events.py (ZmqEventPublisher), examples/online_serving/kv_events_subscriber.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from extproc.workers.kv_event_source import Source
from extproc.workers.kv_events import Event, GarbageError, decode

REPLAY_SECONDS: Final = 5.0  # that a replay may pause
AGAIN_SECONDS: Final = 30.0  # until one is asked for again after one that did not come
LARGEST: Final = 16 << 20  # bytes of a message
MOST_WAITING: Final = 10_000  # messages that are kept while a replay is under way; as many as engines keep
_AT_ONCE: Final = 64  # messages that are dealt with before others have their turn
_FRAMES: Final = 3
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_RECONNECT_MS: Final = 100
_MOST_RECONNECT_MS: Final = 5000

_logger = logging.getLogger(__name__)
_Message = tuple[int, bytes]  # number, payload


class Sink(Protocol):
    """Is told what happens in one worker's cache."""

    def apply(self, events: Sequence[Event]) -> None:
        """These, after what was told before."""

    def lose(self) -> None:
        """Something is missing: what was told before does not hold."""

    def restart(self) -> None:
        """What follows is all that has ever happened in the cache."""

    def renew(self) -> None:
        """It is the cache of another process, which began empty."""


class Stream:
    """See the module. Begins at once, on the running loop, and goes on until :meth:`close`. Raises ZMQError.

    Attributes:
        batches: applied.
        losses: how often something was missing that could not be had again; connections that were lost do not count.
        connected: there is a connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: Source, sink: Sink, name: str) -> None:
        self._context = context
        self._source = source
        self._sink = sink
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._last: int | None = None  # the number of the batch that was applied last
        self._highest = -1  # the highest number of the process as it was known last
        self._overlap = -1  # up to here a replay has told what may yet come by itself
        self._waiting: deque[_Message] | None = None  # what comes while a replay is under way
        self._replay: zmq.Socket[bytes] | None = None
        self._next_replayed = 0  # the number with which the replay goes on
        self._timer: asyncio.TimerHandle | None = None
        self._mute = False  # replays do not come
        self._garbled = False  # it was said that something could not be read
        self._closed = False
        self.batches = 0
        self.losses = 0
        self.connected = False
        self._socket = self._made(zmq.SUB, RECONNECT_IVL=_RECONNECT_MS, RECONNECT_IVL_MAX=_MOST_RECONNECT_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        # A connection's end is to be known before what the next one brings.
        look = self._reader(self._monitor, self._on_monitor)
        self._watch(self._monitor, look)
        self._watch(self._socket, self._reader(self._socket, self._on_message, before=look))
        try:
            self._socket.connect(source.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Hear no more."""
        self._closed = True
        self._end_replay()
        self._loop.remove_reader(self._monitor.fileno())
        self._loop.remove_reader(self._socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    # -- sockets --------------------------------------------------------------------------------------------------

    def _made(self, kind: int, **options: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        common = {"LINGER": 0, "IPV6": 1, "MAXMSGSIZE": LARGEST, "TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 30}
        for option, value in {**common, **options}.items():
            socket.setsockopt(getattr(zmq, option), value)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], ready: Callable[[], None]) -> None:
        self._loop.add_reader(socket.fileno(), ready)
        self._loop.call_soon(ready)

    def _reader(
        self,
        socket: zmq.Socket[bytes],
        heard: Callable[[Sequence[bytes]], None],
        before: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """What calls ``heard`` with every message of ``socket``, and ``before`` that another socket's reader.

        The descriptor tells of changes only: it is read until nothing is left, with turns for others between.
        """

        def ready() -> None:
            before()
            for _ in range(_AT_ONCE):
                if socket.closed or self._closed:
                    return
                try:
                    message = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                try:
                    heard(message)
                except Exception:  # the descriptor would not tell of what is left: nothing more would ever be heard
                    _logger.exception("KV events: a message could not be dealt with", extra=self._extra())
                    self._lose("a message that could not be dealt with")
            self._loop.call_soon(ready)

        return ready

    # -- what comes by itself -------------------------------------------------------------------------------------

    def _on_monitor(self, frames: Sequence[bytes]) -> None:
        self.connected = parse_monitor_message(list(frames))["event"] == zmq.EVENT_CONNECTED
        _logger.info("KV events: %s", "connected" if self.connected else "disconnected", extra=self._extra())
        if not self.connected:
            self._end_replay()
            self._forget()
        elif self._source.replay:
            self._begin_anew()

    def _on_message(self, frames: Sequence[bytes]) -> None:
        if len(frames) != _FRAMES or len(frames[1]) != _NUMBER_BYTES:
            self._say_garbled("not topic, number and batch")
            return
        self._receive((int.from_bytes(frames[1], "big"), frames[2]))

    def _receive(self, message: _Message) -> None:
        waiting = self._waiting
        if waiting is None:
            self._take(message)
            return
        if len(waiting) >= MOST_WAITING:  # what follows leaves a gap then, which is seen
            waiting.clear()
        waiting.append(message)

    def _take(self, message: _Message) -> None:
        number, last = message[0], self._last
        if last is None:
            if number == 0:
                self._sink.restart()
            self._note_highest(number)
            self._apply(message)
        elif number == last + 1:
            self._note_highest(number)
            self._apply(message)
        elif number > last:
            if self._source.replay and not self._mute:
                self._ask(last + 1, deque([message]))
            else:
                self._lose("a gap")
                self._take(message)
        elif number > self._overlap:
            self._lose("another process")
            self._begin_anew(deque([message]))

    def _note_highest(self, number: int) -> None:
        """So many batches has the process published: fewer than before, if it is another one."""
        if number < self._highest:
            _logger.info("KV events: another process", extra=self._extra())
            self._sink.renew()
        self._highest = number

    def _apply(self, message: _Message) -> None:
        number, payload = message
        self._last = number
        try:
            events = decode(payload)
        except GarbageError as error:
            self._say_garbled(str(error))
            self._lose("a batch that cannot be read")
            self._last = number
            return
        self.batches += 1
        self._sink.apply(events)

    # -- what is asked for again ----------------------------------------------------------------------------------

    def _begin_anew(self, waiting: deque[_Message] | None = None) -> None:
        """Ask for all there is, before what is ``waiting``."""
        self._forget()
        waiting = deque() if waiting is None else waiting
        if self._source.replay and not self._mute:
            self._ask(0, waiting)
        else:
            self._go_on(waiting)

    def _ask(self, number: int, waiting: deque[_Message]) -> None:
        """Ask for what was published from ``number`` on, before what is ``waiting``."""
        self._end_replay()
        self._waiting = waiting
        self._next_replayed = number
        replay = self._replay = self._made(zmq.DEALER)
        replay.connect(self._source.replay)
        replay.send_multipart([b"", number.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)
        self._watch(replay, self._reader(replay, self._on_replay))
        self._be_patient()

    def _on_replay(self, frames: Sequence[bytes]) -> None:
        if len(frames) != _FRAMES + 1 or len(frames[2]) != _NUMBER_BYTES:
            self._say_garbled("a replay of something else")
            return
        self._be_patient()
        last = self._last
        if frames[2] == _END:
            self._replay_done()
            return
        number = int.from_bytes(frames[2], "big")
        if last is None:
            if number == 0:
                self._sink.restart()
        elif number != last + 1:
            if self._next_replayed:
                self._gone()
                return
            # All that is kept was asked for: asked once more, it would have the same hole.
            self._lose("a hole in what is kept")
        self._apply((number, frames[3]))

    def _replay_done(self) -> None:
        start, waiting = self._next_replayed, self._waiting
        nothing = self._last in (None, start - 1)
        if nothing and start:
            self._gone()
            return
        if nothing and waiting and waiting[0][0]:  # it keeps nothing, against what it has published
            self._replay_missing()
            return
        if nothing:  # it has published nothing yet
            self._sink.restart()
            self._last = -1
        self._overlap = -1 if self._last is None else self._last
        self._note_highest(self._overlap)
        self._go_on(self._end_replay())

    def _gone(self) -> None:
        """What is missing is not kept any more: there is only what still is."""
        self._lose("a gap that is not kept any more")
        self._begin_anew(self._end_replay())

    def _go_on(self, waiting: deque[_Message]) -> None:
        """With what came in the meantime; a gap in it may begin another replay."""
        for message in waiting:
            self._receive(message)

    def _be_patient(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(REPLAY_SECONDS, self._replay_missing)

    def _replay_missing(self) -> None:
        _logger.warning("KV events: no replay from %s", self._source.replay, extra=self._extra())
        waiting = self._end_replay()
        self._mute = True
        self._forget()
        self._go_on(waiting)
        self._timer = self._loop.call_later(AGAIN_SECONDS, self._hope_again)

    def _hope_again(self) -> None:
        self._mute = False
        self._begin_anew()

    def _end_replay(self) -> deque[_Message]:
        """End the replay under way, if there is one; what has been waiting for its end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._mute = False
        waiting, self._waiting = self._waiting or deque(), None
        if self._replay is not None:
            self._loop.remove_reader(self._replay.fileno())
            self._replay.close()
            self._replay = None
        return waiting

    # -- what is missing ------------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        self.losses += 1
        _logger.info("KV events: lost some", extra=self._extra() | {"reason": why})
        self._forget()

    def _forget(self) -> None:
        self._last, self._overlap = None, -1
        self._sink.lose()

    def _say_garbled(self, reason: str) -> None:
        if not self._garbled:
            self._garbled = True
            _logger.warning("KV events: something else came", extra=self._extra() | {"reason": reason})

    def _extra(self) -> dict[str, object]:
        return {"worker": self._name, "endpoint": self._source.endpoint}
