"""Placement: which prefill worker and which decode workers, in order, a request gets.

Pairs are chosen, never two workers by themselves: the prefill worker by its policy among those that have a partner,
then the decode workers by theirs among its partners.

Where workers say where they are (:mod:`extproc.workers.topology`), the partners nearest to the prefill worker come
first, and equally near ones by the policy. Nearness decides only as long as it hurts nobody: when the nearer worker has
more than twice the requests under way of the farther one, and two more, the farther one is taken. So a worker near
which there is no prefill worker gets its work as soon as there is some to spare, and a busy neighbourhood is helped
out. The prefill worker itself is chosen without regard to nearness: else those far from every decode worker would stand
idle.

Workers that are overloaded (:mod:`extproc.workers.overload`) are not among the candidates as long as a pair can be made
without them. Where it cannot, the least loaded of their role is chosen (:mod:`extproc.policies.crowded`). That all
others have as many legs as they may is no reason to choose an overloaded one: a request waits for those.

A request may name the endpoints among which its workers must be. It is placed as if there were no others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from extproc.errors import GatewayError
from extproc.policies.crowded import LeastCrowded
from extproc.policies.fail_over import FailOver
from extproc.policies.least import turned
from extproc.policies.partners import CANDIDATES, nearest, ranked
from extproc.policies.policy import Policy, RequestView
from extproc.policies.room import NoRoomError, Room
from extproc.workers.pairing import hand_over_alike, of_one_model, why_none
from extproc.workers.pairs import Pairs
from extproc.workers.worker import Role, Worker

_log: Final = logging.getLogger(__name__)
_SHOWN: Final = 256  # characters of a model's name: a client may send any number
_NAMED: Final = " among the endpoints that the gateway names (x-gateway-destination-endpoint-subset)"
_RETRY_AFTER: Final = 1  # seconds; health probes of a worker that is down come about as often


class Candidates(Protocol):
    """Workers among which a request is placed."""

    def usable(self, role: Role, model: str | None) -> Sequence[Worker]:
        """The workers of ``role`` that may be given a request for ``model`` now."""

    def with_overloaded(self, role: Role, model: str | None) -> Sequence[Worker]:
        """Those, and the overloaded ones, unless requests are turned away rather than given to them."""

    def sheds(self, role: Role, model: str | None) -> bool:
        """Whether there are none only because all are overloaded."""

    def healthy(self, role: Role) -> Sequence[Worker]:
        """All workers of ``role`` that may be asked something, whatever advises against giving them requests."""

    def pairs(self, model: str | None) -> Pairs:
        """Which usable workers may be paired for ``model``; the same object until something changes."""


class Fleet(Candidates, Protocol):
    """The part of the worker registry that placement needs."""

    def within(self, endpoints: frozenset[str]) -> Candidates:
        """Those that have one of ``endpoints``, as if there were no others."""

    def __len__(self) -> int:
        """How many workers are registered."""

    def knows_model(self, model: str) -> bool:
        """Whether any registered worker, in whatever state, serves ``model``."""


class Pair(NamedTuple):
    """Who serves a request: one prefill worker, and decode workers in order of preference."""

    prefill: Worker
    decodes: Sequence[Worker]


class Placer:
    """Applies one policy per role to the fleet."""

    def __init__(self, fleet: Fleet, prefill: Policy, decode: Policy) -> None:
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode
        self._crowded = LeastCrowded()
        self._fail_over = FailOver(CANDIDATES)
        self._holders = [policy for policy in (prefill, decode) if policy.holds]

    def pair(
        self,
        request: RequestView,
        without: Collection[Worker] = (),
        like: Worker | None = None,
        room: Room | None = None,
    ) -> Pair:
        """A prefill worker and decode workers that it may hand a KV cache to.

        Where nobody is limited, ``room`` costs 0.1 µs (measured).

        Args:
            request: names the model that both must serve; none for any, but the same. And where both must be.
            without: workers that are not to be chosen.
            like: the prefill worker must hand over as this one does.
            room: what the prefill worker and the first decode worker must have; None: nothing.

        Raises:
            NoRoomError: there are pairs, but they have no room.
            GatewayError: ``model_not_found``, ``no_available_workers`` naming the role that lacks one,
                ``no_compatible_pd_pair``, or ``worker_overload_protection_shed``.
        """
        pairs = self._pairs(request, without, like)
        prefills = _prefills(pairs, without, like)
        if not prefills:
            raise self._no_pair(pairs, request, without, like)
        policy = self._crowded if pairs.prefills_crowded else self._prefill
        prefill = policy.rank(prefills, 1, request)[0]
        if room is not None and not _fits(room, prefill):
            fits = room.on if room.legs is None else partial(_fits, room)
            others = policy.pass_over(prefills, 1, request, fits)
            if not others:
                raise NoRoomError(Role.PREFILL)
            prefill = others[0]
        pair = self._pair_of(prefill, pairs, without, request, room)
        if pair is None:
            assert room is not None
            policy.take_back(request)
            return self._pair_with_room(pairs, prefills, without, request, room)
        return pair

    def has_pair(self, request: RequestView, without: Collection[Worker], like: Worker | None) -> bool:
        """Whether :meth:`pair` would find one; no policy is told of the question."""
        return _has_pair(self._pairs(request, without, like), without, like)

    def usable(self, request: RequestView, role: Role) -> Sequence[Worker]:
        """Whoever of ``role`` :meth:`pair` and the like might choose for ``request``, overloaded or not."""
        return self._among(request.within).with_overloaded(role, request.model)

    def alike(
        self, request: RequestView, like: Worker, without: Collection[Worker] = (), *, room: Room | None = None
    ) -> Sequence[Worker]:
        """Workers in order of preference that may be given what was meant for ``like``; none may be left.

        Args:
            request: for whom.
            like, without: as for :meth:`pair`.
            room: what the first of them must have; NoRoomError is raised where none has it.
        """
        found = self._alike(request, like, without)
        if not found:
            return ()
        return self._fail_over.order(self._ranked_alone(found, request, room), (found,), lasting=False)

    def others(
        self, request: RequestView, like: Worker, without: Collection[Worker] = (), *, partner: bool = False
    ) -> Sequence[Worker]:
        """Some of those, in no order of preference: no policy hears of it, so that ``request`` stays where it is.

        ``partner``: they must also have the same partners, for it is about a KV cache that one of those has.
        """
        found = self._alike(request, like, without, partner=partner)
        return self._fail_over.order(turned(found), (found,), lasting=False)[:CANDIDATES] if found else ()

    def decodes(
        self,
        request: RequestView,
        among: Callable[[Sequence[Worker]], Sequence[Worker]] | None = None,
        room: Room | None = None,
    ) -> Sequence[Worker]:
        """Decode workers in order of preference, for a request that one of them answers alone; none may be left.

        Args:
            request: for whom.
            among: tells those of a set that can.
            room: as for :meth:`alike`.
        """
        found = self._among(request.within).usable(Role.DECODE, request.model)
        if among is not None:
            found = among(found)
        return self._in_order(found, request, room) if found else ()

    def all_decodes(self, within: frozenset[str] | None) -> Sequence[Worker]:
        """Every decode worker ``within`` these endpoints that may be asked something now, in no order of preference.

        Of two, one may be the only one that keeps what is asked for.
        """
        return self._among(within).healthy(Role.DECODE)

    def prefills(self, request: RequestView, like: Worker | None = None, room: Room | None = None) -> Sequence[Worker]:
        """Prefill workers in order of preference, for a request that one of them answers alone.

        Args:
            request: names the model that they must serve, none for any, and where they must be.
            like: the first of them, if there is one that must be; the others are of its kind.
            room: as for :meth:`alike`, where nobody must be the first.

        Raises:
            NoRoomError, GatewayError: as :meth:`pair`.
        """
        candidates = self._among(request.within)
        prefills = candidates.usable(Role.PREFILL, request.model)
        if not prefills:
            if candidates.sheds(Role.PREFILL, request.model):
                raise _shed(Role.PREFILL)
            raise self.nobody(request, Role.PREFILL)
        if like is not None:
            others = tuple(worker for worker in prefills if worker is not like and hand_over_alike(worker, like))
            return self._fail_over.order((like, *others[: CANDIDATES - 1]), (prefills,))
        return self._in_order(prefills, request, room)

    def answered(self, request: RequestView, worker: Worker) -> None:
        """A leg of ``request`` on ``worker`` was answered as it should be."""
        policy = self._decode if worker.role is Role.DECODE else self._prefill
        if policy.learns:
            try:
                policy.learn(request, worker)
            except Exception:  # noqa: BLE001 - what is learnt is advice: the answer is as good without
                _log.exception("the policy could not learn from an answer of %s", worker.name)

    def held(self, request: RequestView, decodes: Sequence[Worker]) -> Mapping[Worker, int]:
        """About how many tokens of the prompt decode workers' KV caches are known to hold; none of others."""
        return self._decode.held(request, decodes)

    def spared(self, request: RequestView, role: Role) -> None:
        """Of the pair chosen for ``request`` the worker of ``role`` gets no leg after all."""
        (self._decode if role is Role.DECODE else self._prefill).over(request.notes)

    def over(self, notes: dict[object, object]) -> None:
        """The request with these notes (RequestView) is over."""
        for policy in self._holders:
            policy.over(notes)

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone, or may be another process: what it had is lost."""
        self._prefill.forget(worker)
        self._decode.forget(worker)

    def nobody(self, request: RequestView, role: Role) -> GatewayError:
        """The error where there is no worker of ``role`` for ``request``."""
        model = request.model
        # A gateway to which nobody has come yet cannot say what exists.
        if model is not None and len(self._fleet) and not self._fleet.knows_model(model):
            return GatewayError("model_not_found", f"The model `{model[:_SHOWN]}` does not exist", param="model")
        which = f" for model `{model[:_SHOWN]}`" if model is not None else ""
        message = f"No {role.value} worker is available{which}{_among(request)}"
        return GatewayError("no_available_workers", message, retry_after=_RETRY_AFTER)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _among(self, within: frozenset[str] | None) -> Candidates:
        return self._fleet if within is None else self._fleet.within(within)

    def _alike(
        self, request: RequestView, like: Worker, without: Collection[Worker], *, partner: bool = False
    ) -> tuple[Worker, ...]:
        candidates = self._among(request.within)
        for workers in (candidates.usable, candidates.with_overloaded):
            found = tuple(
                worker
                for worker in workers(like.role, request.model)
                if hand_over_alike(worker, like)
                and worker.api_key == like.api_key
                and worker not in without
                and (not partner or worker.pairing == like.pairing)
            )
            if found:
                return found
        return ()

    def _policy(self, role: Role, candidates: Sequence[Worker]) -> Policy:
        """Who ranks ``candidates``, which are all overloaded or none."""
        if candidates[0].overloaded:
            return self._crowded
        return self._decode if role is Role.DECODE else self._prefill

    def _in_order(self, candidates: Sequence[Worker], request: RequestView, room: Room | None) -> Sequence[Worker]:
        """Whom the policy takes of ``candidates``, and where the same request may go when that one refuses it."""
        return self._fail_over.order(_of_one_kind(self._ranked_alone(candidates, request, room)), (candidates,))

    def _ranked_alone(self, candidates: Sequence[Worker], request: RequestView, room: Room | None) -> Sequence[Worker]:
        """``candidates``, of which one answers the request, as the policy of their role has them."""
        policy = self._policy(candidates[0].role, candidates)
        ranked = policy.rank(candidates, CANDIDATES, request)
        if room is None or room.on(ranked[0]):
            return ranked
        ranked = policy.pass_over(candidates, CANDIDATES, request, room.on)
        if not ranked:
            raise NoRoomError(candidates[0].role)
        return ranked

    def _pairs(self, request: RequestView, without: Collection[Worker], like: Worker | None) -> Pairs:
        """Those with the fewest overloaded workers among which there is one."""
        pairs = self._among(request.within).pairs(request.model)
        if pairs.wider is None or _has_pair(pairs, without, like):
            return pairs
        return pairs.wider()

    def _pair_of(
        self, prefill: Worker, pairs: Pairs, without: Collection[Worker], request: RequestView, room: Room | None
    ) -> Pair | None:
        """``prefill`` and its partners; None where those have no room."""
        tiers = pairs.tiers(prefill)
        policy = self._crowded if pairs.decodes_crowded else self._decode
        legs = 1 if room is None or room.legs is None else room.legs(prefill)
        if len(tiers) > 1:
            found = nearest(policy, tiers, without, request, room, legs)
        else:
            found = ranked(policy, tiers[0], without, request, room, legs)
        return Pair(prefill, self._fail_over.order(found, tiers, without)) if found else None

    def _pair_with_room(
        self,
        pairs: Pairs,
        prefills: Sequence[Worker],
        without: Collection[Worker],
        request: RequestView,
        room: Room,
    ) -> Pair:
        """The same where not everybody has room: of those who have, with a partner that has. Raises NoRoomError."""
        full: dict[int, set[Worker]] = {}
        fit: list[Worker] = []
        lacks = Role.PREFILL
        for prefill in prefills:
            legs = 1 if room.legs is None else room.legs(prefill)
            if not room.on(prefill, legs):
                continue
            lacks = Role.DECODE
            if legs not in full:
                full[legs] = {*without, *[w for w in pairs.usable_decodes if not room.on(w, legs)]}
            if _has_partner(pairs, prefill, full[legs]):
                fit.append(prefill)
        if not fit:
            raise NoRoomError(lacks)
        policy = self._crowded if pairs.prefills_crowded else self._prefill
        pair = self._pair_of(policy.rank(tuple(fit), 1, request)[0], pairs, without, request, room)
        assert pair is not None
        return pair

    def _no_pair(
        self, pairs: Pairs, request: RequestView, without: Collection[Worker], like: Worker | None
    ) -> GatewayError:
        if pairs.sheds:
            return _shed(Role.DECODE if pairs.usable_prefills else Role.PREFILL)
        prefills = [
            worker
            for worker in pairs.usable_prefills
            if worker not in without and (like is None or hand_over_alike(worker, like))
        ]
        decodes = [worker for worker in pairs.usable_decodes if worker not in without]
        if not prefills or not decodes:
            return self.nobody(request, Role.DECODE if prefills else Role.PREFILL)
        candidates = of_one_model(prefills, decodes)
        if why := why_none(candidates, pairs.mode):
            return GatewayError("no_compatible_pd_pair", why + _among(request))
        message = f"No prefill worker and decode worker that are available{_among(request)} serve the same model"
        return GatewayError("no_available_workers", message, retry_after=_RETRY_AFTER)


def _among(request: RequestView) -> str:
    """What to say of workers that ``request`` may not have, where it may not have all."""
    return "" if request.within is None else _NAMED


def _shed(role: Role) -> GatewayError:
    message = f"All {role.value} workers that could take the request are overloaded"
    return GatewayError("worker_overload_protection_shed", message, retry_after=_RETRY_AFTER)


def _fits(room: Room, prefill: Worker) -> bool:
    return room.on(prefill, 1 if room.legs is None else room.legs(prefill))


def _prefills(pairs: Pairs, without: Collection[Worker], like: Worker | None) -> Sequence[Worker]:
    """The prefill workers that have a partner left."""
    prefills = pairs.prefills if like is None else pairs.like(like)
    if without:
        # As a set of its own: the turn of the whole one is the next request's, not this one's second.
        served: dict[int, bool] = {}  # by identity of the partners, which most have in common
        left = []
        for worker in prefills:
            if worker in without:
                continue
            tiers = pairs.tiers(worker)
            if id(tiers) not in served:
                served[id(tiers)] = _has_partner(pairs, worker, without)
            if served[id(tiers)]:
                left.append(worker)
        return tuple(left)
    return prefills


def _has_pair(pairs: Pairs, without: Collection[Worker], like: Worker | None) -> bool:
    prefills = pairs.prefills if like is None else pairs.like(like)
    return any(_has_partner(pairs, prefill, without) for prefill in prefills if prefill not in without)


def _has_partner(pairs: Pairs, prefill: Worker, without: Collection[Worker]) -> bool:
    """Whether ``prefill`` has a partner but ``without``."""
    return any(decode not in without for tier in pairs.tiers(prefill) for decode in tier)


def _of_one_kind(ranked: Sequence[Worker]) -> Sequence[Worker]:
    """Those that can be sent what the first one is sent."""
    first = ranked[0]
    for worker in ranked:
        if not hand_over_alike(worker, first):
            return [worker for worker in ranked if hand_over_alike(worker, first)]
    return ranked
