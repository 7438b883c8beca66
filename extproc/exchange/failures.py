"""What the failures of legs mean for the client, and for whoever watches the workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from extproc.errors import GatewayError
from extproc.exchange.attempts import KvMissing
from extproc.exchange.gateway import Gateway
from extproc.handoff.handoff import Alone
from extproc.names import LOCAL_REPLY
from extproc.policies.placement import Pair
from extproc.transport.interface import Header, Lost
from extproc.workers.worker import Worker

_RETRY_AFTER: Final = 1  # seconds
_SHOWN_ROOMS: Final = 4
_EXCERPT: Final = 300  # characters of a worker's error that go into our message
_LOCAL_REPLY: Final = LOCAL_REPLY.encode()
# What stands behind the leg's name in a code.
_FAULTS: Final = ("failed", "unreachable", "connection_lost", "timeout")
_NO_CONNECTION: Final = frozenset({"UF", "UH", "NC", "NR", "UO"})  # of Envoy's response flags
_APART: Final = "pd_bootstrap_timeout"
# By a leg that has waited in vain for the other one: SGLang (0.5.23, ``disaggregation/common/conn.py``).
_WAITED: Final = re.compile(rb"timed out after [0-9.]+s in KVPoll\.|Timed out waiting for prefill completion")
# By a server that restarted with fewer ranks, in the words of SGLang (0.5.23) and vLLM (0.32).
_NO_SUCH_RANK: Final = re.compile(rb"routed_dp_rank=\d+ out of range|data_parallel_rank \d+ is out of range")


def failure_of(
    worker: Worker, status: int, headers: Sequence[Header], body: bytes, *, answers_client: bool
) -> GatewayError:
    """What a leg's complete answer that is not 2xx means for the client, for whom this leg's answer is or is not."""
    fields = dict(headers)
    name = worker.role.value
    if (flags := fields.get(_LOCAL_REPLY)) is not None:
        return _envoys_word(worker, flags)
    retry_after = fields.get(b"retry-after")
    message = f"{name} worker {worker.name} answered {status}"
    if status == 400 and worker.dp_rank is not None and _NO_SUCH_RANK.search(body):  # our mistake, not the client's
        return GatewayError(f"{name}_failed", f"{message}: there is no such rank any more")
    if status >= 500 and _WAITED.search(body):
        return waited_in_vain(f"{message}: {body[:_EXCERPT].decode(errors='replace')}", status)
    if 400 <= status < 500 or (answers_client and status >= 500):  # as a direct request's client would hear it
        code = f"{name}_rejected" if status < 500 else f"{name}_failed"
        passed_on = (fields.get(b"content-type", b"application/json"), body)
        return GatewayError(code, message, status=status, retry_after=retry_after, passed_on=passed_on, answered=status)
    return GatewayError(
        f"{name}_failed",
        f"{message}: {body[:_EXCERPT].decode(errors='replace')}",
        status=status if status in (503, 504) else None,
        retry_after=retry_after,
        answered=status,
    )


def was_connected(flags: bytes) -> bool:
    """Whether Envoy had a connection to a worker when it answered by itself, with these response flags."""
    return not set(flags.decode("latin-1").split(",")) & _NO_CONNECTION


def loss_of(worker: Worker, reason: Lost, detail: str) -> GatewayError:
    """What the loss of a leg on the way means for the client."""
    if reason is Lost.RESET:
        name = worker.role.value
        message = f"the connection of {name} worker {worker.url} broke before its answer was whole ({detail})"
        return GatewayError(f"{name}_connection_lost", message)
    message = f"the way to the workers does not answer ({detail})"
    return GatewayError("egress_unavailable", message, retry_after=_RETRY_AFTER)


def waited_in_vain(message: str, answered: int = 0) -> GatewayError:
    """The error for legs that have not met in time."""
    return GatewayError(_APART, message, answered=answered)


def says_it_waited(message: bytes) -> bool:
    """Whether an engine says that it has waited in vain for the other leg."""
    return _WAITED.search(message) is not None


def apart(pair: Pair, rooms: Sequence[int], error: GatewayError) -> GatewayError:
    """``error``, with the names of all that should have met where it is one of legs that have not."""
    if error.fault.code != _APART:
        return error
    where = f"room {', '.join(map(str, rooms[:_SHOWN_ROOMS]))}" if rooms else "a room"
    names = f"prefill worker {pair.prefill.name} and decode worker {pair.decodes[0].name}"
    return waited_in_vain(f"{names} have not met in {where}: {error.message}", error.answered)


def gone(prefill: Worker) -> GatewayError:
    """The error for a prefill worker that is found gone while a decode waits for what it was to send."""
    return GatewayError("prefill_connection_lost", f"prefill worker {prefill.url} is gone before its cache was fetched")


def kv_missing(prefill: Worker | None) -> GatewayError:
    """The error for a prefill whose answer does not say where the KV cache is."""
    name = "" if prefill is None else f" {prefill.url}"
    return GatewayError("kv_missing", f"prefill worker{name} answered without usable kv_transfer_params")


def refuse_unknown(gateway: Gateway, prefill: Worker, alone: Alone) -> None:
    """Raises GatewayError where the operator wants no request to do without a handoff for want of what it needs."""
    if alone.unknown and gateway.config.kv_missing is KvMissing.FAIL:
        raise GatewayError("kv_missing", f"prefill worker {prefill.url} cannot hand over: {alone.why}")


def charge(workers: Sequence[Worker], error: GatewayError, turn: int, partner: Worker | None = None) -> None:
    """Have the circuit breakers of ``workers`` count the failure of a leg.

    A 4xx is the client's fault and says nothing of a worker. What says that it is busy (429, 503) is counted apart,
    what was no worker's fault not at all. It must be the leg's own failure: what the other leg of its pair has brought
    about is charged to that one's worker.

    Args:
        workers: where the leg was, or was tried.
        error: what became of it.
        turn: what the first of them gave for it.
        partner: the prefill worker of a decode leg. Where that is out, a decode's 5xx means that it could not fetch the
            KV cache (seen with vLLM and SGLang), which is not its fault.
    """
    _, _, kind = error.fault.code.partition("_")
    if kind == "failed" and partner is not None and not partner.works:
        kind = ""
    for worker in workers:
        if error.answered:
            worker.answers += 1
        if error.answered in worker.breaker.settings.capacity:
            worker.breaker.pushbacks += 1
        elif kind in _FAULTS:
            worker.breaker.failed(turn)
        turn = 0


def refused(gateway: Gateway, workers: Sequence[Worker], turn: int) -> None:
    """``workers`` refused the connection, and Envoy went on to the next one; ``turn`` as for :func:`charge`."""
    for worker in workers:
        worker.breaker.failed(turn)
        gateway.report_unreachable(worker)
        turn = 0


def report(gateway: Gateway, workers: Sequence[Worker], error: GatewayError) -> None:
    """Tell whoever watches ``workers`` of the failure of a leg on them, where that may be their own."""
    code = error.fault.code
    for worker in workers:
        if code.endswith("_unreachable"):
            gateway.report_unreachable(worker)
        elif code.endswith("_connection_lost"):
            gateway.report_failure(worker)
        elif _may_have_other_ranks(worker, error):
            gateway.report_doubt(worker)


def _may_have_other_ranks(worker: Worker, error: GatewayError) -> bool:
    """Whether a refusal may be of the rank, which a body that is not seen here would say."""
    return worker.dp_rank is not None and (error.status == 400 or error.fault.code.endswith("_failed"))


def _envoys_word(worker: Worker, flags: bytes) -> GatewayError:
    """Translate Envoy's response flags for an answer that no worker gave."""
    found = set(flags.decode("latin-1").split(","))
    name = worker.role.value
    if found & _NO_CONNECTION:
        message = f"{name} worker {worker.url} does not accept connections ({flags.decode('latin-1')})"
        return GatewayError(f"{name}_unreachable", message, retry_after=_RETRY_AFTER)
    if found & {"UT", "SI", "DT", "UMSDR"}:
        return GatewayError(f"{name}_timeout", f"{name} worker {worker.url} did not answer in time")
    message = f"{name} worker {worker.url} closed the connection before it answered ({flags.decode('latin-1')})"
    return GatewayError(f"{name}_connection_lost", message)
