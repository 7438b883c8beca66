"""``grpc.health.v1.Health`` for any server of this package: the statuses, and handlers for Check, List and Watch.

Source: https://github.com/grpc/grpc/blob/master/doc/health-checking.md. The messages are two fields in all, so they
are written by hand instead of carrying a second copy of their descriptors.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from extproc.transport.grpc_framing import Status
from extproc.transport.methods import RequestHandler

if TYPE_CHECKING:
    from extproc.transport.methods import Method, RpcCall

LIVENESS = "liveness"
READINESS = "readiness"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"

# Protobuf wire types; the fixed-size ones with their sizes.
_VARINT, _LEN = 0, 2
_FIXED = {1: 8, 5: 4}


class ServingStatus(IntEnum):
    """``HealthCheckResponse.ServingStatus``."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class HealthStatuses:
    """What each service answers, and who watches it.

    A server that answers at all is alive and serves the protocol; it is ready when it is told so.
    """

    def __init__(self) -> None:
        self._statuses = {
            "": ServingStatus.SERVING,
            LIVENESS: ServingStatus.SERVING,
            EXT_PROC: ServingStatus.SERVING,
            READINESS: ServingStatus.NOT_SERVING,
        }
        self._watchers: dict[_Watch, str] = {}

    @property
    def methods(self) -> dict[str, Method]:
        """The health service's methods by path."""
        return {
            "/grpc.health.v1.Health/Check": lambda call: _Check(self, call),
            "/grpc.health.v1.Health/List": lambda call: _List(self, call),
            "/grpc.health.v1.Health/Watch": lambda call: _Watch(self, call),
        }

    def set_serving(self, service: str, serving: bool) -> None:  # noqa: FBT001 -- as in ProcessServer
        """Change (or add) a service's status; watchers of it are told if it changed."""
        status = ServingStatus.SERVING if serving else ServingStatus.NOT_SERVING
        if self._statuses.get(service) is status:
            return
        self._statuses[service] = status
        for watcher, watched in list(self._watchers.items()):
            if watched == service:
                watcher.tell(status)

    def drain(self) -> None:
        """Every service but ``liveness`` stops serving and all watchers are sent away."""
        for service in self._statuses:
            if service != LIVENESS:
                self.set_serving(service, serving=False)
        for watcher in list(self._watchers):
            watcher.leave()

    def status(self, service: str) -> ServingStatus:
        """The status of ``service``, SERVICE_UNKNOWN for one nobody named."""
        return self._statuses.get(service, ServingStatus.SERVICE_UNKNOWN)

    def watch(self, watcher: _Watch, service: str) -> None:
        """Tell ``watcher`` of every change of ``service`` from now on."""
        self._watchers[watcher] = service

    def unwatch(self, watcher: _Watch) -> None:
        """Forget ``watcher``."""
        self._watchers.pop(watcher, None)

    def listing(self) -> bytes:
        """A serialised ``HealthListResponse``: all named services."""
        return b"".join(
            _field(1, _field(1, service.encode()) + _field(2, _response(status)))
            for service, status in self._statuses.items()
        )


class _Handler(RequestHandler):
    def __init__(self, statuses: HealthStatuses, call: RpcCall) -> None:
        super().__init__(call)
        self._statuses = statuses

    def _service(self, message: bytes) -> str | None:
        """The service asked for; None after the call was ended because the message cannot be read."""
        try:
            return _requested_service(message)
        except ValueError as error:
            self.call.abort(Status.INTERNAL, f"HealthCheckRequest: {error}")
            return None


class _Check(_Handler):
    def answer(self, request: bytes) -> None:
        if (service := self._service(request)) is None:
            return
        status = self._statuses.status(service)
        if status is ServingStatus.SERVICE_UNKNOWN:
            self.call.abort(Status.NOT_FOUND, "unknown service")
            return
        self.call.send(_response(status))
        self.call.finish()


class _List(_Handler):
    def answer(self, request: bytes) -> None:  # noqa: ARG002 -- HealthListRequest is empty
        self.call.send(self._statuses.listing())
        self.call.finish()


class _Watch(_Handler):
    def answer(self, request: bytes) -> None:
        if (service := self._service(request)) is None:
            return
        self._statuses.watch(self, service)
        self.tell(self._statuses.status(service))

    def tell(self, status: ServingStatus) -> None:
        self.call.send(_response(status))

    def leave(self) -> None:
        self._statuses.unwatch(self)
        self.call.abort(Status.UNAVAILABLE, "the server is shutting down")

    def closed(self) -> None:
        self._statuses.unwatch(self)


def _response(status: ServingStatus) -> bytes:
    """A serialised ``HealthCheckResponse``."""
    return bytes((0x08, status))


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes((number << 3 | _LEN,)) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _requested_service(message: bytes) -> str:
    """``HealthCheckRequest.service`` (field 1); raises ValueError when the message is not protobuf."""
    service = b""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        if tag & 7 == _LEN:
            size, position = _read_varint(message, position)
        elif tag & 7 in _FIXED:
            size = _FIXED[tag & 7]
        elif tag & 7 == _VARINT:
            _, position = _read_varint(message, position)
            continue
        else:
            raise ValueError(f"wire type {tag & 7}")
        if position + size > len(message):
            raise ValueError("the message is truncated")
        if tag == 1 << 3 | _LEN:
            service = message[position : position + size]
        position += size
    return service.decode()


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The varint at ``position`` and where it ends."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("the message is truncated")
