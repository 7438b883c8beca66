"""The health service's hand-written messages, against the real ones; the service itself is in the conformance suite."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.transport.grpc_framing import Status
from extproc.transport.health import HealthStatuses

CHECK, LIST = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"


class RecordedCall:
    """An ``RpcCall`` in memory."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.status: int | None = None
        self.queued = 0

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def finish(self) -> None:
        self.status = Status.OK

    def abort(self, code: int, detail: str) -> None:  # noqa: ARG002
        self.status = code

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def ask(statuses: HealthStatuses, path: str, *messages: bytes) -> RecordedCall:
    call = RecordedCall()
    handler = statuses.methods[path](call)
    for message in messages:
        handler.received(message)
    return call


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_name_is_understood(service: str) -> None:
    statuses = HealthStatuses()
    statuses.set_serving(service, serving=False)
    call = ask(statuses, CHECK, health_pb2.HealthCheckRequest(service=service).SerializeToString())
    (answer,) = call.sent
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert call.status == Status.OK


@settings(deadline=None)
@given(st.lists(st.text(max_size=200), max_size=5, unique=True))
def test_the_list_can_be_read_whatever_the_names(services: list[str]) -> None:
    statuses = HealthStatuses()
    for service in services:
        statuses.set_serving(service, serving=False)
    (answer,) = ask(statuses, LIST, b"").sent
    assert set(health_pb2.HealthListResponse.FromString(answer).statuses) >= set(services)


def test_unknown_fields_are_passed_over() -> None:
    message = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x0a\x08liveness" + b"\x25" + bytes(4) + b"\x2a\x02hi"
    assert ask(HealthStatuses(), CHECK, message).status == Status.OK


@pytest.mark.parametrize("message", [b"\x0a", b"\x0a\x05ab", b"\x80", b"\x0b", b"\x0a\x01\xff", b"\x08", b"\xff" * 20])
def test_what_is_no_request_is_internal(message: bytes) -> None:
    assert ask(HealthStatuses(), CHECK, message).status == Status.INTERNAL


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_do_harm(message: bytes) -> None:
    assert ask(HealthStatuses(), CHECK, message).status in {Status.OK, Status.NOT_FOUND, Status.INTERNAL}


def test_a_second_request_message_is_internal() -> None:
    assert ask(HealthStatuses(), CHECK, b"", b"").status == Status.INTERNAL
