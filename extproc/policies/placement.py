"""Placement: which prefill worker and which decode workers, in order, a request gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

from extproc.errors import GatewayError
from extproc.policies.fail_over import FailOver
from extproc.policies.policy import Policy
from extproc.workers.pairing import may_pair, share_model, why_none
from extproc.workers.worker import Role, Worker

# Envoy tries the hosts of the list in order while they refuse the connection; dataplane's retry policy allows as many.
CANDIDATES: Final = 4
_SHOWN: Final = 256  # characters of a model's name: a client may send any number
_RETRY_AFTER: Final = 1  # seconds; health probes of a worker that is down come about as often
_REMEMBERED: Final = 256  # sets of workers whose partners are remembered; a fleet has a few per model


class Fleet(Protocol):
    """The part of the worker registry that placement needs."""

    def usable(self, role: Role, model: str | None) -> Sequence[Worker]:
        """The workers of ``role`` that may be given a request for ``model`` now."""

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
        self._fail_over = FailOver(CANDIDATES)
        # By identity: the fleet gives the same tuples until something changes. Held, so that no other object can have
        # their identity meanwhile.
        self._alike: dict[tuple[int, int, bool], tuple[object, object, bool]] = {}

    def pair(self, model: str | None, without: Collection[Worker] = (), like: Worker | None = None) -> Pair:
        """A prefill worker and decode workers that it may hand a KV cache to.

        Args:
            model: that both must serve; None for any, but the same.
            without: workers that are not to be chosen.
            like: the prefill worker must hand over as this one does.

        Raises:
            GatewayError: ``model_not_found``, ``no_available_workers`` naming the role that lacks one, or
                ``no_compatible_pd_pair``.
        """
        prefills, decodes = self._candidates(model, without, like)
        if not prefills or not decodes:
            raise self._nobody(model, Role.DECODE if prefills else Role.PREFILL)
        any_model = model is None
        if self._all_alike(prefills, decodes, any_model=any_model):
            return Pair(self._prefill.rank(prefills, 1)[0], self._in_order(self._decode, decodes))
        for prefill in self._prefill.rank(prefills, len(prefills)):
            partners = tuple(decode for decode in decodes if _partners(prefill, decode, any_model=any_model))
            if partners:
                same = decodes if len(partners) == len(decodes) else partners
                ranked = self._decode.rank(same, CANDIDATES)
                return Pair(prefill, self._fail_over.order(ranked, decodes))
        raise _incompatible(prefills, decodes)

    def has_pair(self, model: str | None, without: Collection[Worker], like: Worker) -> bool:
        """Whether :meth:`pair` would find one; no policy is told of the question."""
        prefills, decodes = self._candidates(model, without, like)
        return any(_partners(prefill, decode, any_model=model is None) for prefill in prefills for decode in decodes)

    def _candidates(
        self, model: str | None, without: Collection[Worker], like: Worker | None
    ) -> tuple[Sequence[Worker], Sequence[Worker]]:
        prefills, decodes = self._fleet.usable(Role.PREFILL, model), self._fleet.usable(Role.DECODE, model)
        if like is not None:
            prefills = tuple(prefill for prefill in prefills if prefill.pairing == like.pairing)
        if without:
            prefills = tuple(worker for worker in prefills if worker not in without)
            decodes = tuple(worker for worker in decodes if worker not in without)
        return prefills, decodes

    def _all_alike(self, prefills: Sequence[Worker], decodes: Sequence[Worker], *, any_model: bool) -> bool:
        """Whether each of ``prefills`` may be paired with each of ``decodes``, as in most fleets."""
        key = (id(prefills), id(decodes), any_model)
        known = self._alike.get(key)
        if known is None:
            if len(self._alike) >= _REMEMBERED:
                self._alike.clear()
            alike = all(_partners(prefill, decode, any_model=any_model) for prefill in prefills for decode in decodes)
            known = self._alike[key] = (prefills, decodes, alike)
        return known[2]

    def alike(self, model: str | None, like: Worker, without: Collection[Worker] = ()) -> Sequence[Worker]:
        """Workers in order of preference that may be given what was meant for ``like``; none may be left."""
        found = tuple(
            worker
            for worker in self._fleet.usable(like.role, model)
            if worker.pairing == like.pairing and worker.api_key == like.api_key and worker not in without
        )
        policy = self._decode if like.role is Role.DECODE else self._prefill
        return self._in_order(policy, found) if found else ()

    def decodes(self, model: str | None) -> Sequence[Worker]:
        """Decode workers in order of preference, for a request that one of them answers alone; none may be left."""
        found = self._fleet.usable(Role.DECODE, model)
        return self._in_order(self._decode, found) if found else ()

    def all_decodes(self) -> Sequence[Worker]:
        """Every decode worker that may be given a request now, in no order of preference.

        Of two, one may be the only one that keeps what is asked for.
        """
        return self._fleet.usable(Role.DECODE, None)

    def prefills(self, model: str | None, like: Worker | None = None) -> Sequence[Worker]:
        """Prefill workers in order of preference, for a request that one of them answers alone.

        Args:
            model: that they must serve; None for any.
            like: the first of them, if there is one that must be; the others are of its kind.

        Raises:
            GatewayError: as :meth:`pair`.
        """
        prefills = self._fleet.usable(Role.PREFILL, model)
        if not prefills:
            raise self._nobody(model, Role.PREFILL)
        if like is not None:
            others = tuple(w for w in prefills if w.pairing == like.pairing and w is not like)
            return self._fail_over.order((like, *others[: CANDIDATES - 1]), prefills)
        return self._in_order(self._prefill, prefills)

    def _in_order(self, policy: Policy, candidates: Sequence[Worker]) -> Sequence[Worker]:
        """Whom ``policy`` takes of ``candidates``, and where the same request may go when that one refuses it."""
        return self._fail_over.order(policy.rank(candidates, CANDIDATES), candidates)

    def _nobody(self, model: str | None, role: Role) -> GatewayError:
        # A gateway to which nobody has come yet cannot say what exists.
        if model is not None and len(self._fleet) and not self._fleet.knows_model(model):
            return GatewayError("model_not_found", f"The model `{model[:_SHOWN]}` does not exist", param="model")
        which = f" for model `{model[:_SHOWN]}`" if model is not None else ""
        return GatewayError(
            "no_available_workers", f"No {role.value} worker is available{which}", retry_after=_RETRY_AFTER
        )


def _partners(prefill: Worker, decode: Worker, *, any_model: bool) -> bool:
    return may_pair(prefill, decode) and (not any_model or share_model(prefill, decode))


def _incompatible(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> GatewayError:
    why = why_none(prefills, decodes)
    if why:
        return GatewayError("no_compatible_pd_pair", why[0].upper() + why[1:])
    message = "No prefill worker and decode worker that are available serve the same model"
    return GatewayError("no_available_workers", message, retry_after=_RETRY_AFTER)
