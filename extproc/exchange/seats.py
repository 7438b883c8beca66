"""What a request needs of workers, and who waits for it in the request's place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.admission.priority import Priority
from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.merge.parts import joint_of
from extproc.policies.placement import Placer
from extproc.policies.room import ONE_LEG, NoRoomError, Room
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.admission.legs import Seeker

NOBODY: Final[frozenset[Worker]] = frozenset()
_ONE: Final = (None, 1)  # prompts of a request that is not split


def pair_room(request: InferenceRequest, taken: Collection[Worker] = NOBODY) -> Room:
    """What ``request`` needs of a pair of workers, none of them of ``taken``."""
    if request.samples == 1 and request.prompts in _ONE:  # most requests
        return Room(taken) if taken else ONE_LEG
    return Room(taken, partial(legs_of, request))


def lone_room(taken: Collection[Worker] = NOBODY) -> Room:
    """What a request needs of a worker, none of ``taken``, that answers it alone."""
    return Room(taken) if taken else ONE_LEG


def legs_of(request: InferenceRequest, prefill: Worker) -> int:
    """How many legs of each kind ``request`` is, where ``prefill`` serves it. gRPC workers get one per sequence."""
    if prefill.over_grpc:
        return request.samples * (request.prompts or 1)
    return joint_of(request, prefill.runtime).parts


class Seeking:
    """A Seeker that takes a step with the workers that it finds.

    Args:
        placer, request, legs: for whom, and how many of them.
        priority, need: see Seeker.
        step: finds workers, but none of those that it is given, and goes on with them; raises NoRoomError alone.
        refused: it has waited in vain.
        waited: it waits no more, after so many seconds.
    """

    def __init__(
        self,
        placer: Placer,
        request: InferenceRequest,
        legs: int,
        priority: Priority,
        need: Hashable,
        step: Callable[[Collection[Worker]], None],
        refused: Callable[[GatewayError], None],
        waited: Callable[[float], None],
    ) -> None:
        self._placer = placer
        self._request = request
        self._legs = legs
        self.priority = priority
        self.need = need
        self._step = step
        self.lone = False
        self.refused = refused
        self.waited = waited

    def seek(self, without: Collection[Worker]) -> Role | None:
        """See Seeker."""
        try:
            self._step(without)
        except NoRoomError as none:
            return none.role
        return None

    def claims(self) -> Collection[Worker]:
        """See Seeker."""
        if self._legs == 1:
            return ()
        usable = self._placer.usable
        return (*usable(self._request, Role.PREFILL), *usable(self._request, Role.DECODE))


if TYPE_CHECKING:
    _: type[Seeker] = Seeking
