"""Which course a request takes that gRPC workers serve, and what becomes of one that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange.attempts import Attempts
from extproc.exchange.choice import PairChoice
from extproc.exchange.failures import refuse_unknown
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.exchange.placed import Placed
from extproc.exchange.rpc import RpcRequest
from extproc.exchange.rpc_choice import RpcAloneChoice
from extproc.exchange.rpc_direct import RpcDirectCourse
from extproc.exchange.rpc_relayed import RpcRelayedCourse
from extproc.handoff.grpc import Sequences
from extproc.handoff.handoff import Alone
from extproc.policies.partners import CANDIDATES
from extproc.policies.placement import Pair
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Course, Session


LONG_PROMPT: Final = 4096  # tokens that may take an engine so long that a client, or what is between, gives up waiting


class Cancelling:
    """A Handle."""

    __slots__ = ("cancel",)

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


def rpc_course(session: Session, head: RequestHead, request: InferenceRequest, pair: Pair, rpc: RpcRequest) -> Course:
    """The course on a pair of gRPC workers. Raises GatewayError (400) for what their engine cannot be told."""
    gateway = session.gateway
    rpc.check_size(gateway.config.max_payload_bytes)
    sequences = rpc.sequences(pair.prefill, pair.decodes[0])
    alone = sequences.alone(request, pair.prefill)
    if alone is not None:
        refuse_unknown(gateway, pair.prefill, alone)
        decodes = alone.role is Role.DECODE
        workers = pair.decodes if decodes else gateway.placer.prefills(request, pair.prefill)
        return rpc_alone(session, head, request, workers, rpc, sequences, alone)
    if sequences.in_turn:
        session.keep_room(pair.decodes[0], rpc.count)
    # A client that leaves has Envoy cancel the decode's call at once. Where a decode does not survive that while it
    # receives the cache, the call is ours; and so where Envoy has no way for an answer that is made of its call.
    if rpc.is_single and not sequences.receiving and _runs_call(session, request, rpc):
        return RpcDirectCourse.of_pair(session, head, request, pair, rpc, sequences)
    attempts = Attempts(gateway.config.retry, session.deadline)
    choice = PairChoice(gateway, request, pair.prefill, sequences)
    return RpcRelayedCourse(session, head, request, rpc, Placed(pair, sequences), choice, attempts)


def rpc_alone(
    session: Session,
    head: RequestHead,
    request: InferenceRequest,
    workers: Sequence[Worker],
    rpc: RpcRequest,
    sequences: Sequences,
    alone: Alone,
) -> Course:
    """The course of a request that the first of ``workers`` which can be reached answers alone."""
    gateway, record = session.gateway, session.record
    if rpc.is_single and _runs_call(session, request, rpc):
        return RpcDirectCourse.of_one(session, head, request, workers, rpc, sequences, alone)
    record.kv, record.note = alone.kv.value, alone.why
    choice = RpcAloneChoice(gateway, request, workers[0], sequences)
    attempts = Attempts(gateway.config.retry, session.deadline)
    placed = Placed(Pair(workers[0], workers), sequences)
    return RpcRelayedCourse(session, head, request, rpc, placed, choice, attempts)


def _runs_call(session: Session, request: InferenceRequest, rpc: RpcRequest) -> bool:
    """Whether Envoy is to run the decode's call by itself, and not a leg of ours.

    While a prefill runs, or waits in an engine's queue, nothing comes of it: a stream whose client is kept by comments
    has to be ours. One that Envoy fetches costs less than a call that it runs; as a local reply, as which it may pile
    up with Envoy, it is worth it for prompts that surely take long. And Envoy, whose call breaks, cuts the client's
    answer: it shows nobody that there is something left to say.
    """
    gateway, config = session.gateway, session.gateway.config
    kept = config.keep_alive > 0 and (gateway.fetches or rpc.tokens >= LONG_PROMPT)
    return config.retry_released and not (request.stream and (kept or config.relay_streams))


def but(
    gateway: Gateway, request: InferenceRequest, ranked: Sequence[Worker], excluded: Collection[Worker]
) -> Sequence[Worker]:
    """``ranked`` without those that cannot be given the request; others of their role where none is left.

    Raises GatewayError: there are only such, at least now.
    """
    if not excluded:
        return ranked
    found = [worker for worker in ranked if worker not in excluded]
    if not found:
        others = gateway.placer.usable(request, ranked[0].role)
        found = [worker for worker in others if worker not in excluded][:CANDIDATES]
    if not found:
        raise _not_served(gateway, request) or gateway.placer.nobody(request, ranked[0].role)
    return found


def served_over_grpc(gateway: Gateway, request: InferenceRequest, excluded: Collection[Worker]) -> GatewayError | None:
    """The error for a request that only gRPC workers could be given, if they could; None where there are none.

    None also where there are others that could, which are not usable now: that is another error.
    """
    return _not_served(gateway, request) if excluded and gateway.placer.has_pair(request, (), None) else None


def _not_served(gateway: Gateway, request: InferenceRequest) -> GatewayError | None:
    if gateway.rpc is not None and gateway.rpc.others_serve(request):
        return None
    return GatewayError("not_implemented", f"{request.api.path} is not yet supported over gRPC workers")
