"""Envoy's gRPC access logs: streams that it opens when it first has a line, and on which it expects no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.transport.methods import Method, RpcCall

# Source: envoy/service/accesslog/v3/als.proto.
_PATH: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"


class AccessLogs:
    """The access-log service.

    Args:
        receive: is given each serialised ``StreamAccessLogsMessage``.
    """

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._calls: set[RpcCall] = set()

    @property
    def methods(self) -> dict[str, Method]:
        """The service's methods by path."""
        return {_PATH: self._open}

    def end(self) -> None:
        """End the streams that are open, which Envoy never does by itself."""
        for call in list(self._calls):
            call.finish()

    def _open(self, call: RpcCall) -> _Stream:
        self._calls.add(call)
        return _Stream(self._receive, lambda: self._calls.discard(call))


class _Stream:
    """A ``CallHandler``."""

    def __init__(self, receive: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self.received = receive
        self.closed = closed

    def drained(self) -> None:
        """See ``CallHandler``. Nothing is ever sent."""
