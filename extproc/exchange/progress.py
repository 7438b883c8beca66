"""What is known of streamed answers that Envoy passes on without showing them: whether anything of them has come.

For a *watched* answer Envoy writes an access-log line every few seconds while it lasts (access_log.py of the data
plane), which says how much of its body has gone out. It matters only when a prefill worker is lost that sends the KV
cache itself: a decode that has not had it would wait for ever, one that has it must not be disturbed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from extproc.exchange.clock import FIRST_TOKEN_SECONDS, Clock
from extproc.names import PROGRESS_NAMESPACE, WATCHED


class Watch:
    """One answer.

    Args:
        name: by which Envoy knows it.
        clock: time.
        stuck: is called, once, when nothing of the answer will come.
        speaks_early: its first events come before any token.
    """

    __slots__ = ("_before", "_clock", "_since", "_speaks_early", "_stuck", "name")

    def __init__(self, name: str, clock: Clock, stuck: Callable[[], None], *, speaks_early: bool) -> None:
        self.name = name
        self._clock = clock
        self._stuck = stuck
        self._speaks_early = speaks_early
        self._since: float | None = None  # when it became doubtful
        self._before: int | None = None  # bytes that may have come without a token

    def doubt(self) -> None:
        """The prefill worker is gone: see whether the decode has had the cache."""
        if self._since is None:
            self._since = self._clock.now()
            self._before = None if self._speaks_early else 0

    def reported(self, sent: int) -> None:
        """``sent`` bytes of the body have gone out."""
        if self._since is None:
            return
        if self._before is None:
            self._before = sent
        elif sent > self._before:
            self._since = None
        elif self._clock.now() - self._since >= FIRST_TOKEN_SECONDS:
            self._since = None
            self._stuck()


class Progress:
    """All watched answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = random.getrandbits(48)  # not to meet the names of a service that was here before
        self._watches: dict[str, Watch] = {}

    @property
    def watched(self) -> int:
        """How many."""
        return len(self._watches)

    def begin(self, stuck: Callable[[], None], *, speaks_early: bool) -> Watch:
        """Watch another answer; see Watch."""
        self._last += 1
        watch = Watch(f"{self._last:x}", self._clock, stuck, speaks_early=speaks_early)
        self._watches[watch.name] = watch
        return watch

    def end(self, watch: Watch) -> None:
        """It is over."""
        self._watches.pop(watch.name, None)

    def received(self, message: bytes) -> None:
        """Take in access-log lines, a serialised ``StreamAccessLogsMessage``."""
        for line in StreamAccessLogsMessage.FromString(message).http_logs.log_entry:
            common = line.common_properties
            if PROGRESS_NAMESPACE not in common.metadata.filter_metadata:
                continue
            name = common.metadata.filter_metadata[PROGRESS_NAMESPACE].fields[WATCHED].string_value
            if watch := self._watches.get(name):
                watch.reported(line.response.response_body_bytes)
