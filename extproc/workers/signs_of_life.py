"""Whether an engine that gives no answers still works: what can be asked of it that it does not answer when it hangs.

A server that accepts connections says nothing of its engine. SGLang's ``GET /health_generate`` is answered after the
scheduler's next step, while it computes a long prompt, too (``http_server.py``, ``scheduler.py``:
``maybe_send_health_check_signal``, 0.5.x), and with 503 when there was none for 20 s. vLLM's ``/health`` says only
whether the engine has died (``AsyncLLM.check_health``), and a request of ours would have to queue; but its engine
reports its figures after every step (``EngineCore``, 0.10 and later), so while requests run, one of those on
``/metrics`` moves. Where an engine can tell neither, it counts as well: silence alone is no sign of death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from extproc.workers.client import Answer, NoAnswerError

Get = Callable[[str, float], Awaitable[Answer]]  # path, seconds

_OWN: Final = b"vllm:"  # the engine's figures; others are the HTTP server's
_RUNNING: Final = b"vllm:num_requests_running"
_LOOKS: Final = 4  # at the figures, before the time is over


async def sign_of_life(get: Get, runtime: str, within: float) -> str:
    """Ask an engine for a sign of life; empty when there is one or it cannot be asked, else what is missing.

    Args:
        get: asks the worker; raises NoAnswerError.
        runtime: ``sglang`` or ``vllm``.
        within: seconds to wait for it.
    """
    try:
        if runtime == "vllm":
            return await _figures_move(get, within)
        answer = await get("/health_generate", within)
    except NoAnswerError as error:
        return str(error)
    return f"GET /health_generate: HTTP {answer.status}" if answer.status >= 500 else ""


async def _figures_move(get: Get, within: float) -> str:
    end = time.monotonic() + within
    before = _figures(await get("/metrics", within))
    while _runs(before):
        if (left := end - time.monotonic()) <= 0:
            return f"requests run, but none of its figures at /metrics has moved for {within:g} s"
        await asyncio.sleep(min(left, within / _LOOKS))
        if _figures(await get("/metrics", within)) != before:
            return ""
    return ""


def _figures(answer: Answer) -> list[bytes]:
    lines = answer.body.splitlines() if answer.ok else []
    return [line for line in lines if line.startswith(_OWN)]


def _runs(figures: list[bytes]) -> bool:
    """Whether the engine says that it has something to do."""
    running = (line.rpartition(b" ")[2] for line in figures if line.startswith(_RUNNING))
    return any(value.strip(b"0.") for value in running)
