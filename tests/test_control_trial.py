"""``GET /health_generate``: what it says of a trial, and that many who ask at once cost one."""

from __future__ import annotations

import asyncio

from aiohttp.test_utils import make_mocked_request
from control_rig import running
from fleet import add_ready, until

from extproc.control.trial_routes import Trial, TrialRoutes
from extproc.workers.worker import Role

GOOD = Trial(
    ok=True, prefill="http://p:1", decode="http://d:1", handoff="nixl", kv="handed", attempts=2, seconds=0.0125
)


class Tries:
    """Stands for the request path: answers when it is let."""

    def __init__(self, answer: Trial, *, held: bool = False) -> None:
        self.asked: list[str | None] = []
        self.begun = asyncio.Event()
        self.let = asyncio.Event()
        self.cancelled = False
        self._answer = answer
        if not held:
            self.let.set()

    async def __call__(self, model: str | None, _within: float) -> Trial:
        self.asked.append(model)
        self.begun.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return self._answer


async def test_a_pair_that_answered() -> None:
    tries = Tries(GOOD)
    async with running(try_pair=tries) as api:
        for at, role in enumerate((Role.PREFILL, Role.DECODE)):
            add_ready(api.registry, role, f"http://10.0.0.{at}:1", "b", "a")
        answer = await api.get("/health_generate")
        assert (answer.status, answer.json) == (
            200,
            {
                "status": "ok",
                "model": "b",
                "prefill": "http://p:1",
                "decode": "http://d:1",
                "handoff": "nixl",
                "kv": "handed",
                "attempts": 2,
                "duration_ms": 12.5,
            },
        )
        await api.get("/health_generate?model=a")
    assert tries.asked == ["b", "a"]


async def test_the_model_is_one_that_both_roles_serve() -> None:
    tries = Tries(GOOD)
    async with running(try_pair=tries) as api:
        workers = [
            add_ready(api.registry, Role.PREFILL, "http://10.0.0.1:1", "alone", "both"),
            add_ready(api.registry, Role.DECODE, "http://10.0.0.2:1", "both"),
        ]
        await until(api.registry, lambda: all(worker.usable for worker in workers))
        await api.get("/health_generate")
    assert tries.asked == ["both"]


async def test_without_a_model_any_is_asked_for() -> None:
    tries = Tries(GOOD)
    async with running(try_pair=tries) as api:
        assert "model" not in (await api.get("/health_generate")).json
    assert tries.asked == [None]


async def test_none_that_did() -> None:
    failed = Trial(ok=False, code="prefill_failed", message="prefill worker http://p:1 answered 500")
    async with running(try_pair=Tries(failed)) as api:
        answer = await api.get("/health_generate")
        assert (answer.status, answer.json["error"]["code"]) == (503, "health_generate_failed")
        assert answer.json["error"]["message"] == "prefill_failed: prefill worker http://p:1 answered 500"
    async with running() as api:
        assert (await api.get("/health_generate")).status == 503


async def test_who_asks_meanwhile_gets_the_same_answer() -> None:
    tries = Tries(GOOD, held=True)
    async with running() as api:
        (route,) = TrialRoutes(api.registry, tries).routes()
        paths = [*["/health_generate"] * 5, "/health_generate?model=other"]
        asking = [asyncio.ensure_future(route.handler(make_mocked_request("GET", path))) for path in paths]
        await asyncio.sleep(0)
        tries.let.set()
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 6
        assert tries.asked == [None, "other"]
        await route.handler(make_mocked_request("GET", "/health_generate"))
    assert len(tries.asked) == 3


async def test_one_under_way_ends_with_the_gateway() -> None:
    tries = Tries(GOOD, held=True)
    async with running(try_pair=tries) as api:
        asking = asyncio.create_task(api.get("/health_generate"))
        await tries.begun.wait()
        asking.cancel()
    assert tries.cancelled
