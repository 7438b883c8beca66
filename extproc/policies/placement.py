"""Placement: which prefill worker and which decode workers, in order, a request gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from extproc.errors import GatewayError
from extproc.policies.policy import Policy
from extproc.workers.worker import Role, Worker

# Envoy tries the hosts of the list in order while they refuse the connection; dataplane's retry policy allows as many.
CANDIDATES: Final = 4
_SHOWN: Final = 256  # characters of a model's name: a client may send any number
_RETRY_AFTER: Final = 1  # seconds; health probes of a worker that is down come about as often


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

    def pair(self, model: str | None) -> Pair:
        """A prefill worker and its decode workers.

        Raises:
            GatewayError: ``model_not_found``, or ``no_available_workers`` naming the role that lacks one.
        """
        prefills = self._fleet.usable(Role.PREFILL, model)
        decodes = self._fleet.usable(Role.DECODE, model)
        if not prefills or not decodes:
            raise self._nobody(model, Role.DECODE if prefills else Role.PREFILL)
        if model is None:
            return self._pair_of_one_model(prefills, decodes)
        return Pair(self._prefill.rank(prefills, 1)[0], _of_one_key(self._decode.rank(decodes, CANDIDATES)))

    def _pair_of_one_model(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> Pair:
        """A pair for a request that names no model: any will do, but both legs must be of the same."""
        for prefill in self._prefill.rank(prefills, len(prefills)):
            partners = [decode for decode in decodes if _share_model(prefill, decode)]
            if partners:
                same = decodes if len(partners) == len(decodes) else partners
                return Pair(prefill, _of_one_key(self._decode.rank(same, CANDIDATES)))
        raise GatewayError(
            "no_available_workers",
            "No prefill worker and decode worker that are available serve the same model",
            retry_after=_RETRY_AFTER,
        )

    def prefills(self, model: str | None) -> Sequence[Worker]:
        """Prefill workers in order of preference, for a request that one of them answers alone.

        Raises:
            GatewayError: as :meth:`pair`.
        """
        prefills = self._fleet.usable(Role.PREFILL, model)
        if not prefills:
            raise self._nobody(model, Role.PREFILL)
        return _of_one_key(self._prefill.rank(prefills, CANDIDATES))

    def _nobody(self, model: str | None, role: Role) -> GatewayError:
        # A gateway to which nobody has come yet cannot say what exists.
        if model is not None and len(self._fleet) and not self._fleet.knows_model(model):
            return GatewayError("model_not_found", f"The model `{model[:_SHOWN]}` does not exist", param="model")
        which = f" for model `{model[:_SHOWN]}`" if model is not None else ""
        return GatewayError(
            "no_available_workers", f"No {role.value} worker is available{which}", retry_after=_RETRY_AFTER
        )


def _share_model(one: Worker, other: Worker) -> bool:
    """Whether both serve some model; a worker that has not said which serves any."""
    if one.model_ids == other.model_ids or not one.model_ids or not other.model_ids:
        return True
    return not set(one.model_ids).isdisjoint(other.model_ids)


def _of_one_key(ranked: Sequence[Worker]) -> Sequence[Worker]:
    """Those that take the first one's API key: a request bears one, and may fail over only where it is known."""
    key = ranked[0].api_key
    for worker in ranked:
        if worker.api_key != key:
            return [worker for worker in ranked if worker.api_key == key]
    return ranked
