"""Requests that one worker answers alone, and which room they wait for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from extproc.apis.request import InferenceRequest
from extproc.apis.table import RESPONSES, Flow
from extproc.handoff.handoff import Alone
from extproc.policies.room import Room
from extproc.workers.pairing import hand_over_alike
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.gateway import Gateway


class Lone(NamedTuple):
    """Who serves a request alone, in order of preference, and why."""

    workers: Sequence[Worker]
    alone: Alone


def kept_by(gateway: Gateway, request: InferenceRequest) -> Lone | None:
    """Who must serve ``request``, for it goes on from a response that is kept there; None where nobody must."""
    if (
        gateway.config.select_only
        or request.api is not RESPONSES
        or not isinstance(before := request.body.get("previous_response_id"), str)
    ):
        return None
    keeper = gateway.stored.keeper(before, gateway.placer.all_decodes(request.within))
    if keeper is None:
        return None
    alone = gateway.handoffs.of(keeper).alone(request, keeper)
    return None if alone is None else Lone((keeper,), alone)


def without_pair(gateway: Gateway, request: InferenceRequest, room: Room) -> Lone | None:
    """Who serves a request for which no pair has room; None where it needs a pair.

    Raises NoRoomError where it does not, but those that would serve it have no room, either.
    """
    one = _one_alone(gateway, request)
    if one is None:
        return None
    workers = gateway.placer.alike(request, one.workers[0], room=room)
    return Lone(workers, one.alone) if workers else None


def apart_of(gateway: Gateway, request: InferenceRequest) -> Hashable:
    """Whose room a request waits for that may do without a pair: it must not stand behind those that need one.

    None where it needs one, or all of its kind go to a prefill worker alone.
    """
    if request.api.flow is Flow.PREFILL_ONLY:
        return None
    if (kept := kept_by(gateway, request)) is not None:
        return kept.workers[0]
    if gateway.conditional is not None and gateway.conditional.may_be_lone(request):
        return Role.DECODE
    one = _one_alone(gateway, request)
    return None if one is None else one.alone.role


def _one_alone(gateway: Gateway, request: InferenceRequest) -> Lone | None:
    """One of those that would answer ``request`` alone, whatever pair it is given; None where it needs both."""
    if gateway.config.select_only:  # the sidecars see to that
        return None
    placer = gateway.placer
    prefill = next(iter(placer.usable(request, Role.PREFILL)), None)
    alone = None if prefill is None else gateway.handoffs.of(prefill).alone(request, prefill)
    if prefill is None or prefill.over_grpc or alone is None or alone.unknown:  # over gRPC each sequence has a pair
        return None
    if alone.role is Role.PREFILL:
        return Lone((prefill,), alone)
    decodes = placer.usable(request, Role.DECODE)
    like = next((decode for decode in decodes if hand_over_alike(decode, prefill)), None)
    return None if like is None else Lone((like,), alone)
