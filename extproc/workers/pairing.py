"""Which prefill and decode workers can hand a KV cache over to each other, as far as anybody has said.

The parts and the operator's override (label ``pairing_protocol``) are the peer's: both sides have the label: only it is
compared; else runtime and transport are, and a part that one side does not know matches anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from extproc.workers.worker import UNKNOWN, Pairing, Worker


def may_pair(prefill: Worker, decode: Worker) -> bool:
    """Whether nothing is known that keeps ``decode`` from fetching what ``prefill`` has computed."""
    return prefill.pairing == decode.pairing or not mismatch(prefill.pairing, decode.pairing)


def share_model(one: Worker, other: Worker) -> bool:
    """Whether both serve some model; a worker that has not said which serves any."""
    if one.model_ids == other.model_ids or not one.model_ids or not other.model_ids:
        return True
    return not set(one.model_ids).isdisjoint(other.model_ids)


def pairing_key(worker: Worker) -> str:
    """What the control API shows as ``pd_pairing``: runtime, transport and KV layout, which nobody tells over HTTP."""
    runtime, transport, protocol = worker.pairing
    return protocol or f"{runtime}/{transport}/{UNKNOWN}"


@lru_cache(maxsize=1024)
def mismatch(prefill: Pairing, decode: Pairing) -> str:
    """The first part in which the two differ; empty when they may be paired."""
    if prefill.protocol and decode.protocol:
        return "" if prefill.protocol == decode.protocol else "pairing_protocol"
    if prefill.runtime != decode.runtime:
        return "runtime"
    if prefill.transport != decode.transport and UNKNOWN not in (prefill.transport, decode.transport):
        return "transport"
    return ""


def why_none(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> str:
    """Why none of ``prefills`` may be paired with any of ``decodes``, in one line; empty when some may be."""
    parts = {mismatch(prefill.pairing, decode.pairing): None for prefill in prefills for decode in decodes}
    if not parts or "" in parts:
        return ""
    keys = [", ".join(dict.fromkeys(pairing_key(worker) for worker in side)) for side in (prefills, decodes)]
    return (
        "no usable prefill and decode worker share a KV transfer protocol "
        f"(mismatch on {', '.join(parts)}; prefill: {keys[0]}; decode: {keys[1]})"
    )
