"""Whether an engine that gives no answers still works: what can be asked of it that it does not answer when it hangs.

A server that accepts connections says nothing of its engine. SGLang's ``GET /health_generate`` is answered after the
scheduler's next step, while it computes a long prompt or waits for a decode, too (``http_server.py``, ``scheduler.py``:
``maybe_send_health_check_signal``), and with 503 when there was none for 20 s. vLLM's ``/health`` says only whether the
engine has died (``AsyncLLM.check_health``), and a request of ours would have to queue; but its engine reports its
figures after every step (``EngineCore``), so while requests run, one of those on ``/metrics`` moves. Figures of an
engine that has nothing to do any more are old, and those of a request that was aborted stay; so before an engine is
given up, one token is asked of it: an idle one steps then, whatever becomes of that request. (All of it seen with
SGLang and vLLM 0.32, their schedulers stopped and continued.) Where an engine can tell neither, it counts as well:
silence alone is no sign of death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Final

from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.worker import Worker

Get = Callable[[str, float], Awaitable[Answer]]  # path, seconds
Post = Callable[[str, object, float], Awaitable[Answer]]  # path, body, seconds

_OWN: Final = b"vllm:"  # the engine's figures; others are the HTTP server's
_RUNNING: Final = b"vllm:num_requests_running"
_LOOKS: Final = 8  # at the figures, before the time is over


async def sign_of_life(get: Get, post: Post, worker: Worker, within: float) -> str:
    """Ask a worker's engine for a sign of life; empty when there is one or it cannot be asked, else what is missing.

    Args:
        get, post: the way to it; both raise NoAnswerError.
        worker: which.
        within: seconds to wait for it.
    """
    try:
        if worker.runtime == "vllm":
            return await _figures_move(get, lambda left: _compute_one(post, worker, left), within)
        answer = await get("/health_generate", within)
    except NoAnswerError as error:
        return str(error)
    return f"GET /health_generate: HTTP {answer.status}" if answer.status >= 500 else ""


async def _figures_move(get: Get, nudge: Callable[[float], Coroutine[None, None, None]], within: float) -> str:
    end = time.monotonic() + within
    before = _figures(await get("/metrics", within))
    nudging: asyncio.Task[None] | None = None
    try:
        while _runs(before):
            left = end - time.monotonic()
            if left <= 0:
                return f"requests run, but none of its figures at /metrics has moved for {within:g} s"
            if nudging is None and left <= within / 2:
                nudging = asyncio.create_task(nudge(left), name="nudge")
            await asyncio.sleep(min(left, within / _LOOKS))
            if _figures(await get("/metrics", within)) != before:
                return ""
        return ""
    finally:
        if nudging is not None:
            nudging.cancel()
            await asyncio.wait((nudging,))


async def _compute_one(post: Post, worker: Worker, within: float) -> None:
    """Have the engine step, if it has not forgotten how; its figures will say so."""
    body = {"prompt": "x", "max_tokens": 1} | ({"model": worker.model_ids[0]} if worker.model_ids else {})
    with suppress(NoAnswerError):
        await post("/v1/completions", body, within)


def _figures(answer: Answer) -> list[bytes]:
    lines = answer.body.splitlines() if answer.ok else []
    return [line for line in lines if line.startswith(_OWN)]


def _runs(figures: list[bytes]) -> bool:
    """Whether the engine says that it has something to do."""
    running = (line.rpartition(b" ")[2] for line in figures if line.startswith(_RUNNING))
    return any(value.strip(b"0.") for value in running)
