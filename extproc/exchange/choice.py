"""Who serves a request after those who failed it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange.placed import Placed
from extproc.exchange.seats import NOBODY, lone_room, pair_room
from extproc.handoff.handoff import Handoff
from extproc.policies.placement import Pair
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.attempt import Attempt
    from extproc.exchange.gateway import Gateway


class Choice(Protocol):
    """Finds workers for another attempt."""

    def left(self, failed: Collection[Worker]) -> bool:
        """Whether there is anybody but ``failed``."""

    def next(self, failed: Collection[Worker], taken: Collection[Worker] = NOBODY) -> Placed:
        """The workers of the next attempt, but none of ``taken``, for which others wait.

        Raises NoRoomError when they have no room, GatewayError when there are none.
        """

    def begin(self, attempt: Attempt) -> None:
        """Send what the attempt begins with."""


class PairChoice:
    """Other pairs that hand over as the first one does.

    Args:
        gateway, request: for whom.
        like: the first prefill worker.
        handoff: of the first pair.
    """

    def __init__(self, gateway: Gateway, request: InferenceRequest, like: Worker, handoff: Handoff) -> None:
        self._placer = gateway.placer
        self._request = request
        self._like = like
        self._handoff = handoff

    def left(self, failed: Collection[Worker]) -> bool:
        """See Choice."""
        return self._placer.has_pair(self._request, failed, self._like)

    def next(self, failed: Collection[Worker], taken: Collection[Worker] = NOBODY) -> Placed:
        """See Choice."""
        pair = self._placer.pair(self._request, failed, self._like, pair_room(self._request, taken))
        if self._handoff.alone(self._request, pair.prefill) is not None:  # though its like can: no engine id is known
            raise GatewayError("no_available_workers", f"prefill worker {pair.prefill.url} cannot hand over")
        return Placed(pair, self._handoff)

    def begin(self, attempt: Attempt) -> None:
        """See Choice."""
        attempt.send()


class AloneChoice:
    """Other workers for a request that one answers alone.

    Args:
        gateway, request: for whom.
        like: the worker that failed.
        body: what it was sent.
    """

    def __init__(self, gateway: Gateway, request: InferenceRequest, like: Worker, body: bytes) -> None:
        self._gateway = gateway
        self._request = request
        self._like = like
        self._body = body

    def left(self, failed: Collection[Worker]) -> bool:
        """See Choice."""
        return bool(self._gateway.placer.others(self._request, self._like, failed))

    def next(self, failed: Collection[Worker], taken: Collection[Worker] = NOBODY) -> Placed:
        """See Choice."""
        workers = self._gateway.placer.alike(self._request, self._like, failed, room=lone_room(taken))
        if not workers:
            raise GatewayError("no_available_workers", f"No other {self._like.role.value} worker is available")
        return Placed(Pair(workers[0], workers), self._gateway.handoffs.of(workers[0]))

    def begin(self, attempt: Attempt) -> None:
        """See Choice."""
        attempt.send_alone(self._body)
