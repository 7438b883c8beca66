"""What Envoy is told of a request that it runs itself: the head of what it sends, and the head of what it answers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.apis.table import Flow
from extproc.exchange import wire
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import RANK, TO_GRPC, cluster_of, rank_named
from extproc.exchange.record import named, server_timing
from extproc.names import CLUSTER
from extproc.workers.endpoints import PREFILL_CLUSTER
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_NO_AUTHORIZATION: Final = wire.remove_header(b"authorization")
_PREFILL_CLUSTER: Final = wire.set_header(CLUSTER.encode(), PREFILL_CLUSTER.encode())
_CALL: Final = wire.set_header(b"content-type", b"application/grpc") + wire.set_header(b"te", b"trailers")
_SET_FOR_CALLS: Final = frozenset({"content-type", "te", "x-request-id", "x-forwarded-for", "x-forwarded-proto"})
_JSON: Final = wire.set_header(b"content-type", b"application/json")


def head_reply(
    session: Session,
    head: RequestHead,
    request: InferenceRequest,
    worker: Worker,
    path: bytes,
    body: bytes | None,
    destinations: str,
    more: bytes = b"",
) -> bytes:
    """The message that releases the head of a request to ``worker``, or to the others of ``destinations``.

    ``body`` None: the request has none, and is sent as the client sent it. ``more``: of the header mutation.
    """
    fields = head.fields
    mutation = b"" if body is None else wire.set_header(b"content-length", b"%d" % len(body))
    leg_id = session.record.leg_id
    if fields.get("x-request-id") != leg_id:
        mutation += wire.set_header(b"x-request-id", leg_id)
    if request.api.worker_path != request.api.path:
        mutation += wire.set_header(b":path", path)
    if worker.api_key is not None:
        mutation += wire.set_header(b"authorization", b"Bearer " + worker.api_key.encode())
    elif session.gateway.api_key is not None:
        mutation += _NO_AUTHORIZATION  # it is the gateway's own key
    if body is not None and not fields.get("content-type", b"").startswith(b"application/json"):
        mutation += _JSON
    rank = b"" if worker.dp_rank is None else rank_named(worker)
    if rank:
        mutation += wire.set_header(RANK, rank)
    for name in head.withheld:
        if name != RANK or not rank:  # a client's is overwritten
            mutation += wire.remove_header(name)
    chosen = worker.role is Role.PREFILL and request.api.flow is Flow.PAIR
    if chosen:
        mutation += _PREFILL_CLUSTER
    to, metadata = _addressed(session, destinations)
    return wire.request_headers_reply(mutation + more + to, metadata, reroute=chosen)


def call_reply(session: Session, head: RequestHead, worker: Worker, path: bytes, destinations: str) -> bytes:
    """The message that releases the head of a request as that of a gRPC call of ``worker``.

    Of the client's headers the worker is shown what leg_heads.TO_GRPC names, as it is of the other legs.
    """
    mutation = _CALL + wire.set_header(b":path", path) + wire.set_header(b"x-request-id", session.record.leg_id)
    mutation += wire.set_header(CLUSTER.encode(), cluster_of(worker))
    kept = worker.api_key is None and session.gateway.api_key is None
    if worker.api_key is not None:
        mutation += wire.set_header(b"authorization", b"Bearer " + worker.api_key.encode())
    for name in head.fields:
        if name in _SET_FOR_CALLS or name[0] == ":" or (name == "authorization" and (kept or worker.api_key)):
            continue
        encoded = name.encode("latin-1")
        if encoded not in TO_GRPC:
            mutation += wire.remove_header(encoded)
    to, metadata = _addressed(session, destinations)
    return wire.request_headers_reply(mutation + to, metadata, reroute=True)


def _addressed(session: Session, destinations: str) -> tuple[bytes, bytes]:
    """How Envoy is told of ``destinations``: a part of the header mutation, and metadata.

    What a client has sent under the header's name is removed, too; Envoy does that first.
    """
    config = session.gateway.config
    header = wire.destination_header(destinations) if config.destination_header else b""
    return header, wire.destination_metadata(destinations) if config.destination_metadata else b""


def answer_mutation(session: Session) -> bytes:
    """What becomes of the head of the answer on its way to the client."""
    record = session.record
    mutation = wire.set_header(b"x-request-id", record.request_id) + wire.REMOVE_UPSTREAM
    if session.gateway.config.response_headers:
        mutation += wire.set_header(b"server-timing", server_timing(record))
        mutation += _names(record.prefill, record.decode, record.handoff, record.kv, record.attempts)
    return mutation


@lru_cache(4096)  # there are few pairs
def _names(prefill: str, decode: str, handoff: str, kv: str, attempts: int) -> bytes:
    """The header mutation that names who serves."""
    return b"".join([wire.set_header(*pair) for pair in named(prefill, decode, handoff, kv, attempts)])
