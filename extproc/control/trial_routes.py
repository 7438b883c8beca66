"""``GET /health_generate``: a pair of workers answers a request of two tokens, through the handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple

from aiohttp import web

from extproc.control.replies import fault, reply
from extproc.workers.registry import Registry
from extproc.workers.worker import Role

TRIAL_SECONDS: Final = 20.0  # as long as SGLang waits for a token of its own (HEALTH_CHECK_TIMEOUT)


class Trial(NamedTuple):
    """How a trial request went; texts are empty and numbers 0 where it did not come so far.

    Attributes:
        ok: the client of such a request would have had its answer.
        code, message: of the error, as a client would have been told.
        prefill, decode: who served.
        handoff: between them.
        kv: the prompt's KV cache, as in ``x-pd-kv``.
        attempts: how many pairs were tried.
        seconds: from its beginning to its end.
    """

    ok: bool
    code: str = ""
    message: str = ""
    prefill: str = ""
    decode: str = ""
    handoff: str = ""
    kv: str = ""
    attempts: int = 1
    seconds: float = 0.0


# Has a pair answer a request for the model (None: any), within so many seconds.
Try = Callable[[str | None, float], Coroutine[None, None, Trial]]


async def no_trial(_model: str | None, _within: float) -> Trial:
    """There is no request path."""
    return Trial(ok=False, code="no_available_workers", message="this process has no request path")


class TrialRoutes:
    """The handler; ``try_pair`` makes the request."""

    def __init__(self, registry: Registry, try_pair: Try) -> None:
        self._registry = registry
        self._try = try_pair
        self._running: dict[str | None, asyncio.Task[Trial]] = {}  # by model: whoever asks meanwhile gets its answer

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get("/health_generate", self._generate)]

    async def _generate(self, request: web.Request) -> web.Response:
        model = request.query.get("model") or self._served()
        trial = await asyncio.shield(self._trial(model))
        if not trial.ok:
            return fault(503, "health_generate_failed", f"{trial.code}: {trial.message}"[:2048])
        return reply(
            {
                "status": "ok",
                **({"model": model} if model else {}),
                "prefill": trial.prefill,
                "decode": trial.decode,
                "handoff": trial.handoff,
                "kv": trial.kv,
                "attempts": trial.attempts,
                "duration_ms": round(trial.seconds * 1000, 3),
            }
        )

    def _served(self) -> str | None:
        """A model that both roles serve now, else any that is known."""
        models = self._registry.models()
        served = (m for m in models if all(self._registry.usable(role, m) for role in (Role.PREFILL, Role.DECODE)))
        return next(served, next(iter(models), None))

    def _trial(self, model: str | None) -> asyncio.Task[Trial]:
        """One at a time: many load balancers may ask, and each costs the workers a request."""
        task = self._running.get(model)
        if task is None:
            task = self._running[model] = asyncio.get_running_loop().create_task(
                self._try(model, TRIAL_SECONDS), name="health-generate"
            )
            task.add_done_callback(lambda _: self._running.pop(model, None))
        return task

    async def stop(self, _app: web.Application) -> None:
        """Ask for nothing more."""
        tasks = tuple(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
