"""Requests of our own to workers: to end legs, and to free what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.errors import GatewayError
from extproc.exchange.clock import ABORT_SECONDS, LEFTOVER_SECONDS, SETTLE_SECONDS, UNPIN_SECONDS, Handle
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import leg_headers
from extproc.exchange.placed import Placed
from extproc.handoff.handoff import Plan
from extproc.transport.interface import Header, Lost
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_NOTHING: Final = b"null"  # for a decode worker to have forgotten: whether it answers is the question
_REFUSED: Final = 400  # what a decode worker says that has done as Handoff.forgets has it


def send_orders(
    gateway: Gateway,
    head: RequestHead,
    recipients: Sequence[Sequence[Worker]],
    orders: Sequence[tuple[bytes, bytes]],
    request_id: bytes,
    more: Sequence[Header] = (),
    limit: float = ABORT_SECONDS,
    then: Callable[[int], None] | None = None,
) -> None:
    """POST each of ``orders`` (path, body) to the first of each of ``recipients`` that accepts a connection.

    Orders to end a leg at once, where closing its connection would take seconds to be noticed, and the like: a worker
    that does not have what is meant ignores them, and nobody waits for the answers.

    Args:
        more: headers that they have besides a leg's.
        limit: how many seconds each may take.
        then: is told the status of each that is answered.
    """
    for path, body in orders:
        for workers in recipients:
            headers = leg_headers(gateway, head, path, workers, request_id, len(body))
            headers += more
            receiver = OrderReceiver(then)
            leg = gateway.egress.send(headers, body, receiver)
            receiver.limit = gateway.clock.after(limit, leg.cancel)


class OrderReceiver:
    """Receives the answer to an order: nobody waits for it, but with it the order's time limit is over."""

    __slots__ = ("_status", "_then", "limit")

    limit: Handle

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then
        self._status = 0

    def head(self, status: int, headers: Sequence[Header]) -> None:  # noqa: ARG002 - LegReceiver's signature
        """See LegReceiver."""
        self._status = status

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""

    def done(self) -> None:
        """See LegReceiver."""
        self.limit.cancel()
        if self._then is not None:
            self._then(self._status)

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
    session.gateway.clock.after(UNPIN_SECONDS, _Release(session, head, pair.prefill, orders, plan).send)


def settle(session: Session, head: RequestHead, placed: Placed, plan: Plan, *, taken: bool) -> None:
    """Leave nothing of a transfer whose decode leg was ended before its answer, when its prefill was done, or nearly.

    A decode worker is told to have the cache freed. Once that is done, the prefill is given something to send, for
    whoever has asked in vain by then (see handoff/mooncake.py); never before, since a prefill that is given something
    new for a transfer loses what it keeps for it.

    Args:
        taken: the decode surely has the request, and asks itself when it sees its leg end: one question in vain less,
            of which a prefill attends to 20 at a time. It need only be seen to live.
    """
    pair, handoff = placed
    orders = handoff.unpins(plan)
    if not orders:
        return
    gateway, request_id = session.gateway, session.record.request_id
    forgets = handoff.forgets(_NOTHING if taken else plan.params)
    release = _Release(session, head, pair.prefill, orders, plan)

    def done(status: int) -> None:
        if status == _REFUSED:
            gateway.clock.after(SETTLE_SECONDS, release.send)

    ask = partial(send_orders, gateway, head, [pair.decodes], forgets, request_id, then=done)
    gateway.clock.after(UNPIN_SECONDS, ask)


class _Release:
    """Gives a prefill worker something to send, in the end also one that has no time for it at first."""

    __slots__ = ("_gateway", "_head", "_more", "_orders", "_request_id", "_wait", "_worker")

    def __init__(
        self, session: Session, head: RequestHead, worker: Worker, orders: Sequence[tuple[bytes, bytes]], plan: Plan
    ) -> None:
        self._gateway = session.gateway
        self._head = head
        self._worker = worker
        self._orders = orders
        self._more = plan.prefill_headers
        self._request_id = session.record.request_id
        self._wait = SETTLE_SECONDS

    def send(self) -> None:
        """Send it."""
        recipients = [(self._worker,)]
        send_orders(
            *(self._gateway, self._head, recipients, self._orders, self._request_id, self._more),
            limit=LEFTOVER_SECONDS,
            then=self._answered,
        )

    def _answered(self, status: int) -> None:
        if (status == 429 or status >= 500) and self._wait < LEFTOVER_SECONDS:
            self._gateway.clock.after(self._wait, self.send)
            self._wait *= 2
