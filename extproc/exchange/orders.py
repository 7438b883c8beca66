"""Requests of our own to workers: to end legs, and to free what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.engines.status import http_of
from extproc.errors import GatewayError
from extproc.exchange.answers import UNSEEN, answered_by
from extproc.exchange.clock import ABORT_SECONDS, LEFTOVER_SECONDS, SETTLE_SECONDS, UNPIN_SECONDS, Handle
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import leg_headers
from extproc.exchange.placed import Placed
from extproc.exchange.rpc_failures import Verdict, verdict_of
from extproc.handoff.handoff import Plan
from extproc.transport.interface import Header, Lost
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_NOTHING: Final = b"null"  # for a decode worker to have forgotten: whether it answers is the question
_REFUSED: Final = 400  # what a decode worker says that has done as Handoff.forgets has it
# Seconds until a prefill that turned an order away is asked again; each pause is twice the one before.
_FIRST_WAIT: Final = 1.0
_LAST_WAIT: Final = 60.0


def send_orders(
    gateway: Gateway,
    head: RequestHead,
    recipients: Sequence[Sequence[Worker]],
    orders: Sequence[tuple[bytes, bytes]],
    request_id: bytes,
    limit: float = ABORT_SECONDS,
    then: Callable[[int, Sequence[Header]], None] | None = None,
) -> None:
    """POST each of ``orders`` (path, body) to the first of each of ``recipients`` that accepts a connection.

    Orders to end a leg at once, where closing its connection would take seconds to be noticed, and the like: a worker
    that does not have what is meant ignores them, and no request waits for the answers.

    Args:
        limit: how many seconds each may take.
        then: is told the status and the headers of each answer.
    """
    for path, body in orders:
        for workers in recipients:
            headers = leg_headers(gateway, head, path, workers, request_id, len(body))
            receiver = OrderReceiver(then)
            leg = gateway.egress.send(headers, body, receiver)
            receiver.limit = gateway.clock.after(limit, leg.cancel)


class OrderReceiver:
    """Receives the answer to an order, with which its time limit is over."""

    __slots__ = ("_headers", "_status", "_then", "_verdict", "limit")

    limit: Handle

    def __init__(self, then: Callable[[int, Sequence[Header]], None] | None = None) -> None:
        self._then = then
        self._status = 0
        self._headers: Sequence[Header] = ()
        self._verdict: Verdict | None = None

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._status, self._headers = status, headers

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._verdict = verdict_of(headers)

    def done(self) -> None:
        """See LegReceiver. What a call's status means in HTTP counts as its answer's."""
        self.limit.cancel()
        if self._then is not None:
            verdict = self._verdict or verdict_of(self._headers)
            self._then(http_of(verdict.code) if verdict and verdict.code else self._status, self._headers)

    def lost(self, reason: Lost, detail: str) -> None:  # noqa: ARG002 - LegReceiver's signature
        """See LegReceiver."""
        self.limit.cancel()


def unpin(session: Session, head: RequestHead, placed: Placed, plan: Plan, error: GatewayError) -> None:
    """Free what a decode keeps for a pair of legs of which the prefill's ended with ``error``.

    The prefill is given something to send to the decode that waits for it, once the decode leg has ended. For a decode
    that does not wait, the prefill then keeps one block for a while: to have it freed as well would hurt the prefill
    where the decode did wait (see handoff/mooncake.py), and nobody can tell.
    """
    pair, handoff = placed
    orders = handoff.unpins(plan)
    if not orders or error.fault.code.endswith("_unreachable"):
        return
    session.gateway.clock.after(UNPIN_SECONDS, _Release(session, head, pair.prefill, orders).send)


def settle(
    session: Session, head: RequestHead, placed: Placed, plan: Plan, since: float, *, taken: bool = False
) -> None:
    """Leave nothing of a transfer whose prefill is done, and whose decode leg has ended before it had a good answer.

    A decode worker is told to have the cache freed. Once that is done, the prefill is given something to send, for
    whoever has asked in vain by then; never before, since it would lose what it keeps (see handoff/mooncake.py).

    Args:
        since: when the decode leg began.
        taken: its worker surely has the request, and asks itself when it sees its leg end: one question in vain less.
            It need only be seen to live.
    """
    pair, handoff = placed
    orders = handoff.unpins(plan)
    if not orders:
        return
    gateway, request_id = session.gateway, session.record.request_id
    release = _Release(session, head, pair.prefill, orders)

    def answered(status: int, headers: Sequence[Header]) -> None:
        if status != _REFUSED:
            return
        if taken and answered_by(pair.decodes, headers) is not pair.decodes[0]:  # the one that was asked is gone
            settle(session, head, placed, plan, since)
        else:
            gateway.releases.add(pair.prefill, since, release.send)

    forgets = handoff.forgets(_NOTHING if taken else plan.params)
    ask = partial(send_orders, gateway, head, [pair.decodes], forgets, request_id, then=answered)
    gateway.clock.after(SETTLE_SECONDS, ask)  # not while the decode itself asks: the prefill answers one of the two


class _Release:
    """Gives a prefill worker something to send, in the end also one that has no time for it at first."""

    __slots__ = ("_gateway", "_head", "_orders", "_request_id", "_wait", "_worker")

    def __init__(
        self, session: Session, head: RequestHead, worker: Worker, orders: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self._gateway = session.gateway
        self._head = head
        self._worker = worker
        self._orders = orders
        self._request_id = session.record.request_id
        self._wait = _FIRST_WAIT

    def send(self) -> None:
        """Send it."""
        gateway, recipients, limit = self._gateway, [(self._worker,)], LEFTOVER_SECONDS
        send_orders(gateway, self._head, recipients, self._orders, self._request_id, limit, self._answered)

    def _answered(self, status: int, headers: Sequence[Header]) -> None:
        turned_away = status in UNSEEN and answered_by((self._worker,), headers) is not None
        if turned_away and self._wait < _LAST_WAIT:
            self._gateway.clock.after(self._wait, self.send)
            self._wait *= 2
