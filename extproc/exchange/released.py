"""What Envoy is told of a request that it runs itself: the head of what it sends, and the head of what it answers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.apis.table import Flow
from extproc.exchange import wire
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import RANK, rank_named
from extproc.exchange.record import named, server_timing
from extproc.names import CLUSTER
from extproc.workers.endpoints import PREFILL_CLUSTER
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_NO_AUTHORIZATION: Final = wire.remove_header(b"authorization")
_PREFILL_CLUSTER: Final = wire.set_header(CLUSTER.encode(), PREFILL_CLUSTER.encode())
_JSON: Final = wire.set_header(b"content-type", b"application/json")


def head_reply(
    session: Session,
    head: RequestHead,
    request: InferenceRequest,
    worker: Worker,
    path: bytes,
    body: bytes | None,
    destinations: str,
) -> bytes:
    """The message that releases the head of a request to ``worker``, or to the others of ``destinations``.

    ``body`` None: the request has none, and is sent as the client sent it.
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
    return wire.request_headers_reply(mutation, wire.destination_metadata(destinations), reroute=chosen)


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
