"""Legs through the egress listener: their heads, their receivers, and what their failures mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from extproc.apis.table import Api
from extproc.errors import GatewayError
from extproc.exchange.clock import ABORT_SECONDS, Handle
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.handoff.handoff import Plan
from extproc.names import CLUSTER, DESTINATION, LOCAL_REPLY, UPSTREAM
from extproc.transport.interface import Header, Lost
from extproc.workers.endpoints import DECODE_CLUSTER, PREFILL_CLUSTER
from extproc.workers.worker import Role, Worker

_BODY_LIMIT: Final = 1 << 20  # of a worker's error that is passed on
_RETRY_AFTER: Final = 1  # seconds
_EXCERPT: Final = 300  # characters of a worker's error that go into our message
_LOCAL_REPLY: Final = LOCAL_REPLY.encode()
_UPSTREAM: Final = UPSTREAM.encode()
_CLUSTERS: Final = {Role.PREFILL: PREFILL_CLUSTER.encode(), Role.DECODE: DECODE_CLUSTER.encode()}


def leg_headers(
    gateway: Gateway, head: RequestHead, path: bytes, workers: Sequence[Worker], request_id: bytes, size: int
) -> list[Header]:
    """The head of a leg to the first of ``workers`` that accepts a connection (all of one role and API key)."""
    first = workers[0]
    pseudo, fixed = _leg_prefix(first.url.authority, first.role, destinations(workers))
    headers: list[Header] = [
        *pseudo,
        (b":path", path),
        *fixed,
        (b"content-length", b"%d" % size),
        (b"x-request-id", request_id),
    ]
    if first.api_key is not None:
        headers.append((b"authorization", b"Bearer " + first.api_key.encode()))
    elif gateway.api_key is None:
        headers += head.forwarded
        return headers
    # The client's authorization is the gateway's own key, or not for this worker.
    headers += [field for field in head.forwarded if field[0] != b"authorization"]
    return headers


def destinations(workers: Sequence[Worker]) -> str:
    """The endpoints of ``workers`` as Envoy wants them."""
    return workers[0].endpoint or "" if len(workers) == 1 else ",".join([w.endpoint or "" for w in workers])


@lru_cache(4096)  # there are few orders of few workers
def _leg_prefix(authority: str, role: Role, endpoints: str) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """What every leg to these workers has: pseudo headers, and others."""
    return (
        ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", authority.encode())),
        (
            (CLUSTER.encode(), _CLUSTERS[role]),
            (DESTINATION.encode(), endpoints.encode()),
            (b"content-type", b"application/json"),
        ),
    )


def leg_path(api: Api, client_path: str) -> bytes:
    """The worker's path for a request to ``client_path``, with its query."""
    if client_path == api.worker_path:
        return client_path.encode("latin-1")
    _, mark, query = client_path.partition("?")
    return (api.worker_path + mark + query).encode("latin-1")


class WholeAnswer:
    """Receives a leg's answer as a whole: either ``complete`` or ``failed`` is called, once.

    ``is_failure`` looks into the body of a 2xx answer.
    Of a body that is not to be kept whole only a first part is, enough for an error or to see what became of one token.
    """

    __slots__ = (
        "_complete",
        "_failed",
        "_is_failure",
        "_keep",
        "_parts",
        "_role",
        "_size",
        "_worker",
        "headers",
        "status",
    )

    def __init__(
        self,
        role: Role,
        worker: Worker,
        complete: Callable[[WholeAnswer], None],
        failed: Callable[[GatewayError], None],
        *,
        is_failure: Callable[[bytes], bool],
        keep: bool = False,
    ) -> None:
        self._is_failure = is_failure
        self._role = role
        self._worker = worker
        self._complete = complete
        self._failed = failed
        self._keep = keep
        self._parts: list[bytes] = []
        self._size = 0
        self.status = 0
        self.headers: Sequence[Header] = ()

    @property
    def body(self) -> bytes:
        """What was kept of the body."""
        return b"".join(self._parts)

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self.status = status
        self.headers = headers

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        if self._keep or self._size < _BODY_LIMIT:
            self._parts.append(chunk)
            self._size += len(chunk)

    def done(self) -> None:
        """See LegReceiver."""
        if not 200 <= self.status < 300:
            self._failed(failure_of(self._role, self._worker, self.status, self.headers, self.body))
        elif self._is_failure(self.body):
            name = self._role.value
            self._failed(GatewayError(f"{name}_failed", f"{name} worker {self._worker.url} aborted the request"))
        else:
            self._complete(self)

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver."""
        self._failed(loss_of(self._role, self._worker, reason, detail))


class AbortReceiver:
    """Receives the answer to an abort: nobody waits for it, but with it the abort's time limit is over."""

    __slots__ = ("limit",)

    limit: Handle

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""

    def done(self) -> None:
        """See LegReceiver."""
        self.limit.cancel()

    def lost(self, reason: Lost, detail: str) -> None:  # noqa: ARG002 - LegReceiver's signature
        """See LegReceiver."""
        self.limit.cancel()


def failure_of(role: Role, worker: Worker, status: int, headers: Sequence[Header], body: bytes) -> GatewayError:
    """What a leg's complete answer that is not 2xx means for the client."""
    fields = dict(headers)
    name = role.value
    if (flags := fields.get(_LOCAL_REPLY)) is not None:
        return _envoys_word(role, worker, flags)
    retry_after = fields.get(b"retry-after")
    message = f"{name} worker {worker.url} answered {status}"
    if 400 <= status < 500 or (role is Role.DECODE and status >= 500):  # as a direct request's client would hear it
        code = f"{name}_rejected" if status < 500 else f"{name}_failed"
        passed_on = (fields.get(b"content-type", b"application/json"), body)
        return GatewayError(code, message, status=status, retry_after=retry_after, passed_on=passed_on)
    return GatewayError(
        f"{name}_failed",
        f"{message}: {body[:_EXCERPT].decode(errors='replace')}",
        status=status if status in (503, 504) else None,
        retry_after=retry_after,
    )


def loss_of(role: Role, worker: Worker, reason: Lost, detail: str) -> GatewayError:
    """What the loss of a leg on the way means for the client."""
    if reason is Lost.RESET:
        message = f"the connection of {role.value} worker {worker.url} broke before its answer was whole ({detail})"
        return GatewayError(f"{role.value}_connection_lost", message)
    message = f"Envoy's egress listener does not answer ({detail})"
    return GatewayError("egress_unavailable", message, retry_after=_RETRY_AFTER)


def answered_by(workers: Sequence[Worker], headers: Sequence[Header]) -> Worker | None:
    """Which of ``workers`` answered, by the header that Envoy sets; None when no worker did."""
    fields = dict(headers)
    if _LOCAL_REPLY in fields:
        return None
    endpoint = fields.get(_UPSTREAM, b"").decode("latin-1")
    return next((worker for worker in workers if worker.endpoint == endpoint), workers[0])


def refused_before(workers: Sequence[Worker], served: Worker | None) -> Sequence[Worker]:
    """The workers that Envoy tried in vain before ``served``; all of them for None."""
    return workers if served is None else workers[: workers.index(served)]


def send_aborts(gateway: Gateway, head: RequestHead, workers: Sequence[Worker], plan: Plan, request_id: bytes) -> None:
    """Ask ``workers`` to end the legs of ``plan`` at once; closing their connections alone may take seconds to notice.

    A worker that does not have them ignores it.
    """
    for path, body in gateway.handoff.aborts(plan):
        for worker in workers:
            headers = leg_headers(gateway, head, path, (worker,), request_id, len(body))
            receiver = AbortReceiver()
            leg = gateway.egress.send(headers, body, receiver)
            receiver.limit = gateway.clock.after(ABORT_SECONDS, leg.cancel)


def _envoys_word(role: Role, worker: Worker, flags: bytes) -> GatewayError:
    """Translate Envoy's response flags for an answer that no worker gave."""
    found = set(flags.decode("latin-1").split(","))
    name = role.value
    if found & {"UF", "UH", "NC", "NR", "UO"}:
        message = f"{name} worker {worker.url} does not accept connections ({flags.decode('latin-1')})"
        return GatewayError(f"{name}_unreachable", message, retry_after=_RETRY_AFTER)
    if found & {"UT", "SI", "DT", "UMSDR"}:
        return GatewayError(f"{name}_timeout", f"{name} worker {worker.url} did not answer in time")
    message = f"{name} worker {worker.url} closed the connection before it answered ({flags.decode('latin-1')})"
    return GatewayError(f"{name}_connection_lost", message)
