"""How loaded an engine says it is over gRPC: its ``GetLoadsResponse``, read into what is kept.

A field that is not set and one that is 0 look the same. So a limit of 0 is not known, nor are figures that an engine's
server never fills in; the counts of an engine that is idle are 0 and believed. vLLM's server says zeros, too, as long
as it has no statistics (``--disable-log-stats``).
"""

from __future__ import annotations

from typing import Any, Final

from extproc.workers.figures import amount, count
from extproc.workers.load import RankLoad
from extproc.workers.rpc.channels import Channels
from extproc.workers.rpc.services import GET_LOADS, VLLM, Service, service_of
from extproc.workers.worker import Worker

# What is asked for; vLLM's server knows no sections, TokenSpeed's has not all of these and leaves out the rest.
__all__ = ["GET_LOADS", "ask_loads", "of_loads"]

SECTIONS: Final = ("core", "disagg", "queues", "memory")
_PREFILL_QUEUES: Final = ("prefill_prealloc_queue_reqs", "prefill_inflight_queue_reqs")
_DECODE_QUEUES: Final = ("decode_prealloc_queue_reqs", "decode_transfer_queue_reqs", "decode_retracted_queue_reqs")


async def ask_loads(channels: Channels, worker: Worker, *, within: float) -> list[RankLoad]:
    """Ask the server of a worker that was identified; raises as :meth:`Channels.ask`."""
    service = service_of(worker.runtime)
    request = service.request(GET_LOADS)
    request.include.extend(SECTIONS)
    answer = await channels.ask(worker, service.path(GET_LOADS), request, service.response(GET_LOADS), within=within)
    return of_loads(service, answer)


def of_loads(service: Service, answer: Any) -> list[RankLoad]:
    """Read an answer: an entry for each rank that has reported; none when none has."""
    return [_of_rank(service, load) for load in answer.loads]


def _of_rank(service: Service, load: Any) -> RankLoad:
    fields = load.DESCRIPTOR.fields_by_name
    disagg = load.disaggregation if "disaggregation" in fields and load.HasField("disaggregation") else None
    mode = disagg.mode if disagg is not None else ""
    scheduler = service is not VLLM  # vLLM's scheduler does not tell its tokens and utilisation
    return RankLoad(
        rank=load.dp_rank,
        running=count(load.num_running_reqs),
        waiting=count(load.num_waiting_reqs),
        waiting_tokens=count(load.num_waiting_uncached_tokens),
        used_tokens=count(load.num_used_tokens) if scheduler else None,
        max_tokens=count(load.max_total_num_tokens) or None,
        kv_usage=amount(load.token_usage),
        max_running=count(load.max_running_requests) or None,
        throughput=amount(load.gen_throughput),
        cache_hit_rate=amount(load.cache_hit_rate),
        utilization=amount(load.utilization) if scheduler else None,
        prefill_queue=_sum(disagg, _PREFILL_QUEUES) if mode == "prefill" else None,
        decode_queue=_sum(disagg, _DECODE_QUEUES) if mode == "decode" else None,
        # Zero until there was a transfer.
        transfer_ms=(amount(disagg.kv_transfer_latency_ms) or None) if disagg is not None else None,
        transfer_gb_s=(amount(disagg.kv_transfer_speed_gb_s) or None) if disagg is not None else None,
    )


def _sum(section: Any, names: tuple[str, ...]) -> int | None:
    return count(sum(getattr(section, name) for name in names))
