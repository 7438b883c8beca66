"""Whether one data-parallel rank works, while others of its server answer.

A server's own signs of life (:mod:`extproc.workers.signs_of_life`) may be those of another rank: SGLang sends its
health checks to the ranks in turn, a prefill's to the first (``data_parallel_controller.py``, 0.5.23,
``dispatch_health_check``), and a vLLM shows figures of all. What is one rank's alone:

* SGLang: the time at which its scheduler last reported its load, ``timestamp`` in ``/v1/loads?dp_rank=``. It does so
  after each step and while it idles, into memory that the HTTP server reads by itself (``managers/load_snapshot.py``,
  pull request 26348). Servers before that ask all ranks, and do not answer while one of them hangs: there nothing can
  be told of one.
* vLLM: its figures at ``/metrics``, which have its number as ``engine``, and move after each step.

An idle rank may have no reason to report. So after half of the time one token is asked of it: SGLang's is named as a
health check, which a busy scheduler drops (``scheduler.py``, ``is_health_check_generate_req``) and an idle one computes
without a handoff, as ``/health_generate`` does (``http_server.py``). (Seen with an SGLang decode 0.5.23 and a vLLM
0.32 of two ranks each, idle, one scheduler of them stopped and continued.)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Final

import orjson

from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.ranks import RANK_HEADER
from extproc.workers.worker import Worker

Get = Callable[[str, float], Awaitable[Answer]]  # path, seconds
Post = Callable[[str, object, float, Mapping[str, str]], Awaitable[Answer]]  # path, body, seconds, headers

_LOOKS: Final = 8  # before the time is over
_NO_TRANSFER: Final = "2.2.2.2"  # sglang srt/disaggregation/utils.py, FAKE_BOOTSTRAP_HOST


class RankLife(Enum):
    """What is known of a rank: it has moved, it has not, or its engine cannot tell."""

    LIVES = "lives"
    SILENT = "silent"
    UNKNOWN = "unknown"


async def rank_life(get: Get, post: Post, rank: Worker, within: float) -> RankLife:
    """Ask the server of ``rank``, an entry of one of several ranks, for a sign of life of that rank alone.

    Args:
        get, post: the way to the server; both raise NoAnswerError.
        rank: which.
        within: seconds to wait for it.
    """
    end = time.monotonic() + within
    nudging: asyncio.Task[int] | None = None
    try:
        before = _report(rank, await get(_path(rank), within))
        while before:
            left = end - time.monotonic()
            if left <= 0:
                return RankLife.SILENT
            if nudging is None and left <= within / 2:
                nudging = asyncio.create_task(_compute_one(post, rank, left), name="nudge")
            await asyncio.sleep(min(left, within / _LOOKS))
            if (now := _report(rank, await get(_path(rank), within))) != before:
                return RankLife.LIVES if now else RankLife.UNKNOWN
            if nudging is not None and nudging.done() and nudging.result():
                return RankLife.LIVES if nudging.result() < 400 else RankLife.UNKNOWN
    except NoAnswerError:
        pass  # which rank it is that does not answer, nobody knows
    finally:
        if nudging is not None:
            nudging.cancel()
            await asyncio.wait((nudging,))
    return RankLife.UNKNOWN


def _path(rank: Worker) -> str:
    return "/metrics" if rank.runtime == "vllm" else f"/v1/loads?dp_rank={rank.dp_rank}&include=core"


def _report(rank: Worker, answer: Answer) -> object:
    """What the rank last reported; falsy when that is not to be had."""
    if not answer.ok:
        return None
    if rank.runtime == "vllm":
        own = b'engine="%d"' % (rank.dp_rank or 0)
        return [line for line in answer.body.splitlines() if line.startswith(b"vllm:") and own in line]
    with suppress(orjson.JSONDecodeError, AttributeError, TypeError):
        for entry in orjson.loads(answer.body).get("loads"):
            if entry.get("dp_rank") == rank.dp_rank:
                return entry.get("timestamp")
    return None


async def _compute_one(post: Post, rank: Worker, within: float) -> int:
    """Have the rank compute one token; the status of the answer, 0 where there is none."""
    if rank.runtime == "vllm":
        path, headers = "/v1/completions", {RANK_HEADER: str(rank.dp_rank)}
        body = {"prompt": "x", "max_tokens": 1} | ({"model": rank.model_ids[0]} if rank.model_ids else {})
    else:
        path, headers = "/generate", {}
        body = {
            "rid": f"HEALTH_CHECK_{secrets.token_hex(16)}",
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "bootstrap_host": _NO_TRANSFER,
            "bootstrap_room": rank.dp_rank,
            "routed_dp_rank": rank.dp_rank,
        }
    try:
        return (await post(path, body, within, headers)).status
    except NoAnswerError:
        return 0
