"""Workers that have room for a request's legs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.admission.priority import Priority
from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.merge.parts import joint_of
from extproc.policies.placement import CANDIDATES, Pair, Placer
from extproc.workers.pairing import hand_over_alike
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.admission.legs import Seeker

NOBODY: Final[frozenset[Worker]] = frozenset()
_ONE: Final = (None, 1)  # prompts of a request that is not split


class NoRoomError(Exception):
    """Workers could serve the request, but all have as many legs as they may; of which role, ``role`` says."""

    def __init__(self, role: Role) -> None:
        super().__init__(role.value)
        self.role = role


def pair_with_room(
    placer: Placer,
    request: InferenceRequest,
    taken: Collection[Worker] = NOBODY,
    failed: Collection[Worker] = (),
    like: Worker | None = None,
) -> Pair:
    """A pair that has room for all legs of ``request``.

    Where nobody is limited it costs 0.1 µs more than :meth:`Placer.pair`, where both are and have room 0.4 (measured).

    Args:
        placer, request: for whom.
        taken: workers that have no room for it, because others wait for them.
        failed, like: see :meth:`Placer.pair`.

    Raises:
        NoRoomError: there are pairs, but they have none.
        GatewayError: there are none.
    """
    pair = placer.pair(request, failed, like)
    prefill, decode = pair.prefill, pair.decodes[0]
    most, limit = prefill.limit, decode.limit
    if not taken:
        if most is None and limit is None:
            return pair
        one = request.samples == 1 and request.prompts in _ONE  # most requests; what follows costs a few calls
        if (
            one
            and (most is None or prefill.load + prefill.promised < most)
            and (limit is None or decode.load + decode.promised < limit)
        ):
            return pair
    legs = joint_of(request, prefill.runtime).parts
    if not taken and prefill.has_room(legs) and decode.has_room(legs):
        return pair
    full = {worker for worker in placer.usable(request.model, Role.PREFILL) if not worker.has_room(legs)}
    without = {*taken, *full, *failed}
    if not placer.has_pair(request.model, without, like):
        raise NoRoomError(Role.PREFILL)
    full = {worker for worker in placer.usable(request.model, Role.DECODE) if not worker.has_room(legs)}
    without |= full
    if not placer.has_pair(request.model, without, like):
        raise NoRoomError(Role.DECODE)
    return placer.pair(request, without, like)


def workers_with_room(
    placer: Placer, request: InferenceRequest, ranked: Sequence[Worker], taken: Collection[Worker] = NOBODY
) -> Sequence[Worker]:
    """``ranked``, workers in order of preference that may answer a request alone, the first of them with room.

    Where the first has none, the one of its kind that has the least to do comes before it.

    Raises:
        NoRoomError: none has.
    """
    first = ranked[0]
    if first not in taken and first.has_room():
        return ranked
    others = [
        worker
        for worker in placer.usable(request.model, first.role)
        if worker not in taken and worker.has_room() and hand_over_alike(worker, first)
    ]
    if not others:
        raise NoRoomError(first.role)
    chosen = min(others, key=lambda worker: worker.load)
    return (chosen, *[worker for worker in ranked if worker is not chosen][: CANDIDATES - 1])


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
        self._model = request.model
        self._legs = legs
        self.priority = priority
        self.need = need
        self._step = step
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
        return (*usable(self._model, Role.PREFILL), *usable(self._model, Role.DECODE))


if TYPE_CHECKING:
    _: type[Seeker] = Seeking
