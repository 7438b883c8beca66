"""Requests of our own to workers: to end legs, and to free what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from extproc.errors import GatewayError
from extproc.exchange.clock import ABORT_SECONDS, UNPIN_SECONDS, Handle
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import leg_headers
from extproc.exchange.placed import Placed
from extproc.handoff.handoff import Plan
from extproc.transport.interface import Header, Lost
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session


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


def unpin(session: Session, head: RequestHead, placed: Placed, plan: Plan, error: GatewayError) -> None:
    """Free what a decode and its prefill keep for a pair of legs of which the prefill's ended with ``error``.

    First the prefill is given something to send to the decode that waits for it, once the decode leg has ended; then,
    for a decode that did not wait, a decode has the prefill free that.
    """
    pair, handoff = placed
    orders = handoff.unpins(plan)
    if not orders or error.fault.code.endswith("_unreachable"):
        return
    gateway, request_id = session.gateway, session.record.request_id
    send, after = partial(send_orders, gateway, head, request_id=request_id), gateway.clock.after
    after(UNPIN_SECONDS, lambda: send([(pair.prefill,)], orders, more=plan.prefill_headers))
    after(2 * UNPIN_SECONDS, lambda: send([pair.decodes], handoff.forgets(plan.params)))
