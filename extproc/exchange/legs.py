"""Legs through the egress listener: their heads, their receivers, and what their failures mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.apis.table import Api
from extproc.errors import CATALOGUE, GatewayError
from extproc.exchange.clock import ABORT_SECONDS, LEFTOVER_SECONDS, UNPIN_SECONDS, Handle
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import HeaderValue, RequestHead
from extproc.handoff.handoff import Handoff, Plan
from extproc.names import CLUSTER, DESTINATION, ERROR_CODE, LOCAL_REPLY, UPSTREAM
from extproc.policies.placement import Pair
from extproc.transport.interface import Header, Leg, Lost
from extproc.workers.endpoints import DECODE_CLUSTER, PREFILL_CLUSTER
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

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


class AnswerHead(NamedTuple):
    """The head of a released leg's answer, as Envoy shows it.

    Attributes:
        status: the answer's.
        code: of the error that Envoy made up itself, None for a worker's answer.
        upstream: "ip:port" of who answered.
        retry_after: the header of this name.
    """

    status: int
    code: str | None
    upstream: str | None
    retry_after: bytes | None

    @classmethod
    def of(cls, headers: Iterable[HeaderValue]) -> AnswerHead:
        """Read what matters of ``headers``."""
        status = 0
        code = upstream = retry_after = None
        for header in headers:
            name = header.key
            if name == ":status":
                status = int(header.raw_value)
            elif name == UPSTREAM:
                upstream = header.raw_value.decode("latin-1")
            elif name == ERROR_CODE:
                code = header.raw_value.decode("latin-1")
            elif name == "retry-after":
                retry_after = header.raw_value
        return cls(status, code, upstream, retry_after)

    def error(self, worker: Worker) -> GatewayError:
        """What an answer with an error status means, whose body is not known here."""
        if self.code is not None and self.code in CATALOGUE:
            return GatewayError(self.code, f"decode worker {worker.url} did not answer", status=self.status)
        headers = [] if self.retry_after is None else [(b"retry-after", self.retry_after)]
        return failure_of(Role.DECODE, worker, self.status, headers, b"")


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


class OrderReceiver:
    """Receives the answer to an order: nobody waits for it, but with it the order's time limit is over."""

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


class Leftover:
    """A prefill leg that is let finish although nobody wants its answer any more, because the engines do.

    It counts on its worker as long as it is out; not for ever, though.
    """

    __slots__ = ("_leg", "_limit", "_worker", "plan")

    def __init__(self, gateway: Gateway, leg: Leg, worker: Worker, plan: Plan) -> None:
        self.plan = plan  # for the decode that may still wait, should the leg fail
        self._leg = leg
        self._worker = worker
        self._limit = gateway.clock.after(LEFTOVER_SECONDS, self._give_up)

    def over(self) -> None:
        """The leg has ended by itself."""
        self._limit.cancel()
        self._worker.load -= 1

    def _give_up(self) -> None:
        self._leg.cancel()
        self._worker.load -= 1


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


def send_orders(
    gateway: Gateway,
    head: RequestHead,
    recipients: Sequence[Sequence[Worker]],
    orders: Sequence[tuple[bytes, bytes]],
    request_id: bytes,
    more: Sequence[Header] = (),
) -> None:
    """POST each of ``orders`` (path, body) to the first of each of ``recipients`` that accepts a connection.

    Orders to end a leg at once, where closing its connection would take seconds to be noticed, and the like: a worker
    that does not have what is meant ignores them, and nobody waits for the answers.
    """
    for path, body in orders:
        for workers in recipients:
            headers = leg_headers(gateway, head, path, workers, request_id, len(body))
            headers += more
            receiver = OrderReceiver()
            leg = gateway.egress.send(headers, body, receiver)
            receiver.limit = gateway.clock.after(ABORT_SECONDS, leg.cancel)


def unpin(session: Session, head: RequestHead, pair: Pair, handoff: Handoff, plan: Plan, error: GatewayError) -> None:
    """Free what a decode and its prefill keep for a pair of legs of which the prefill's ended with ``error``.

    First the prefill is given something to send to the decode that waits for it, once the decode leg has ended; then,
    for a decode that did not wait, a decode has the prefill free that.
    """
    orders = handoff.unpins(plan)
    if not orders or error.fault.code.endswith("_unreachable"):
        return
    gateway, request_id = session.gateway, session.record.request_id
    send, after = partial(send_orders, gateway, head, request_id=request_id), gateway.clock.after
    after(UNPIN_SECONDS, lambda: send([(pair.prefill,)], orders, more=plan.prefill_headers))
    after(2 * UNPIN_SECONDS, lambda: send([pair.decodes], handoff.forgets(plan.params)))


def report(gateway: Gateway, workers: Sequence[Worker], error: GatewayError) -> None:
    """Tell whoever watches ``workers`` of the failure of a leg on them, where that may be their own."""
    code = error.fault.code
    for worker in workers:
        if code.endswith("_unreachable"):
            gateway.report_unreachable(worker)
        elif code.endswith("_connection_lost"):
            gateway.report_failure(worker)


def gone(prefill: Worker) -> GatewayError:
    """The error for a prefill worker that is found gone while a decode waits for what it was to send."""
    return GatewayError("prefill_connection_lost", f"prefill worker {prefill.url} is gone before its cache was fetched")


def kv_missing(prefill: Worker | None) -> GatewayError:
    """The error for a prefill whose answer does not say where the KV cache is."""
    name = "" if prefill is None else f" {prefill.url}"
    return GatewayError("kv_missing", f"prefill worker{name} answered without usable kv_transfer_params")


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
