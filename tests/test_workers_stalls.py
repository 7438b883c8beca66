"""Workers that answer nothing: who is asked for a sign of life, when, and what is made of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import orjson
import pytest
from fleet import LONG, SLOW, add_ready, engine, eventually, fleet, spec, until

from extproc.mock import SglangMock, VllmMock
from extproc.workers import rank_life as rank_life_module
from extproc.workers import signs_of_life
from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.endpoints import Health
from extproc.workers.health_state import HealthSettings
from extproc.workers.metadata import Metadata
from extproc.workers.rank_life import RankLife, rank_life
from extproc.workers.signs_of_life import sign_of_life
from extproc.workers.stalls import Stalls
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

P, D = Role.PREFILL, Role.DECODE


class Rig:
    """Workers, a clock, and whom silence led to be asked."""

    def __init__(self, workers: int = 1, after: float = 10.0) -> None:
        self.workers = [Worker(f"w{n}", WorkerUrl("http", "w", n + 1), P) for n in range(workers)]
        for worker in self.workers:
            worker.status = Status.READY
        self.time = 0.0
        self.asked: list[str] = []
        self.answer = asyncio.Event()
        self.answer.set()
        self.stalls = Stalls(self.workers, self._ask, self._ask, after, lambda: self.time)

    async def _ask(self, worker: Worker) -> None:
        self.asked.append(worker.id)
        await self.answer.wait()

    async def look(self, at: float) -> int:
        """How many were asked until now."""
        self.time = at
        self.stalls.look()
        for _ in range(3):
            await asyncio.sleep(0)
        return len(self.asked)


async def test_a_worker_that_answers_nothing_is_asked_less_and_less_often() -> None:
    rig = Rig()
    rig.workers[0].begin()
    asked = [await rig.look(at) for at in range(80)]
    assert [at for at in range(1, 80) if asked[at] > asked[at - 1]] == [10, 30, 70]


async def test_an_answer_or_no_leg_starts_the_time_anew() -> None:
    rig = Rig()
    (worker,) = rig.workers
    assert await rig.look(0) == 0
    turn = worker.begin()
    await rig.look(100)
    worker.answers += 1
    await rig.look(109)
    assert await rig.look(118) == 0
    worker.end(turn)
    await rig.look(119)
    worker.begin()
    assert await rig.look(128) == 0
    assert await rig.look(137) == 0
    assert await rig.look(138) == 1


async def test_one_that_is_out_already_is_not_asked() -> None:
    rig = Rig()
    rig.workers[0].begin()
    rig.workers[0].status = Status.NOT_READY
    assert [await rig.look(at) for at in (0, 100, 200)] == [0, 0, 0]


async def test_no_two_questions_at_once_and_not_too_many_workers() -> None:
    rig = Rig(workers=20)
    rig.answer.clear()
    for worker in rig.workers:
        worker.begin()
    assert [await rig.look(at) for at in (0, 10, 30, 70)] == [0, 16, 16, 16]
    rig.answer.set()
    await rig.look(71)
    assert await rig.look(72) >= 20
    await rig.stalls.stop()


class Told:
    """An engine that gives these answers to GET, the last one for ever, each after a while: time is its own."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._left = list(answers)
        self.asked: list[tuple[str, float]] = []
        self.posted: list[tuple[str, object]] = []
        self.after_post: list[Answer] = []  # what it says from then on
        self.now = 0.0

    async def get(self, path: str, within: float) -> Answer:
        self.asked.append((path, within))
        self.now += within / 8
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def post(self, path: str, body: object, _within: float) -> Answer:
        self.posted.append((path, body))
        if not self.after_post:
            raise NoAnswerError("no answer")
        self._left = list(self.after_post)
        return Answer(200, "", b"")

    async def sign(self, runtime: str, within: float) -> str:
        worker = Worker("w", WorkerUrl("http", "w", 1), D, model_ids=("tiny",), runtime=runtime)
        with patch.object(signs_of_life, "time", SimpleNamespace(monotonic=lambda: self.now)):
            return await sign_of_life(self.get, self.post, worker, within)


def page(running: float, tokens: int, requests: int = 0) -> Answer:
    text = (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:generation_tokens_total{{engine="0"}} {tokens}\n'
        f"http_requests_total {requests}\n"
    )
    return Answer(200, "text/plain", text.encode())


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (Answer(200, "", b""), ""),
        (Answer(404, "", b""), ""),  # it has no such path: it cannot tell
        (Answer(503, "", b""), "GET /health_generate: HTTP 503"),
        (NoAnswerError("no answer within 20 s"), "no answer within 20 s"),
    ],
)
async def test_sglang_generates_a_token(answer: Answer | Exception, missing: str) -> None:
    engine = Told(answer)
    assert await engine.sign("sglang", 20.0) == missing
    assert engine.asked == [("/health_generate", 20.0)]


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([page(3.0, 100), page(3.0, 101)], ""),
        ([page(0.0, 100)], ""),  # idle: what we wait for is elsewhere
        ([page(3.0, 100), page(0.0, 100)], ""),
        ([page(3.0, 100, 1), page(3.0, 100, 2)], "requests run, but none of its figures at /metrics has moved for"),
        ([page(3.0, 100), NoAnswerError("no answer")], "no answer"),
        ([Answer(404, "", b"Not Found")], ""),
        ([Answer(200, "", b"")], ""),  # --disable-log-stats
    ],
)
async def test_vllms_figures_move_while_it_works(answers: list[Answer | Exception], missing: str) -> None:
    found = await Told(*answers).sign("vllm", 0.02)
    assert found.startswith(missing)
    assert bool(found) == bool(missing)
    assert "nudge" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_an_idle_vllm_whose_figures_are_old_steps_for_one_token() -> None:
    idle = Told(page(1.0, 100))  # that one was aborted, and the engine has not stepped since
    idle.after_post = [page(0.0, 101)]
    assert await idle.sign("vllm", 0.05) == ""
    assert idle.posted == [("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})]


SOON = HealthSettings(timeout=LONG, interval=60, stall=0.02, wedge=LONG)


async def test_a_wedged_sglang_worker_is_out_until_it_generates_again() -> None:
    async with engine(generates=503) as server, fleet(SOON) as f:
        worker = f.registry.add(spec(P, server.url))
        await until(f.registry, lambda: worker.usable)
        worker.begin()
        await f.becomes(worker, Status.NOT_READY)
        reason = f.registry.trouble(worker)
        assert reason == "wedged: 1 legs under way, no answer; GET /health_generate: HTTP 503"
        await f.is_said(worker, "still wedged: GET /health_generate: HTTP 503")  # though /health says 200
        server.generates = 200
        await f.becomes(worker, Status.READY)
        seen = server.count("/health_generate")
        worker.end(0)
        f.monitor.look_again(worker)
        health = server.count("/health")
        await eventually(lambda: server.count("/health") > health)
        assert server.count("/health_generate") <= seen + 1


async def test_a_wedged_vllm_worker_is_out_until_its_figures_move() -> None:
    settings = HealthSettings(timeout=0.2, interval=60, stall=0.02, wedge=0.2)
    async with engine(owner="vllm", running=2) as server, fleet(settings) as f:
        worker = f.registry.add(spec(D, server.url, runtime="vllm"))
        await until(f.registry, lambda: worker.usable)
        worker.begin()
        await f.becomes(worker, Status.NOT_READY)
        await f.is_said(worker, "none of its figures at /metrics has moved for 0.2 s")
        server.steps = True
        await f.becomes(worker, Status.READY)


async def test_one_that_is_only_slow_stays() -> None:
    async with engine() as server, fleet(SOON) as f:
        worker = f.registry.add(spec(P, server.url))
        await until(f.registry, lambda: worker.usable)
        worker.begin()
        await eventually(lambda: server.count("/health_generate") >= 2)
        assert worker.usable


async def test_one_that_answers_while_it_is_asked_stays() -> None:
    async with engine(hang_generating=True) as server, fleet(SOON) as f:
        worker = f.registry.add(spec(P, server.url))
        await until(f.registry, lambda: worker.usable)
        worker.begin()
        await eventually(lambda: server.count("/health_generate"))
        worker.answers += 1
        server.generates = 503
        server.proceed.set()
        await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("ask-")])
        assert worker.usable


@pytest.mark.parametrize("settings", [SLOW, HealthSettings(enabled=False, stall=0.001)])
async def test_nobody_is_asked_where_it_is_too_early_or_switched_off(settings: HealthSettings) -> None:
    async with engine() as server, fleet(settings) as f:
        worker = f.registry.add(spec(P, server.url))
        await until(f.registry, lambda: worker.usable)
        worker.begin()
        await asyncio.sleep(0.05)
        assert server.count("/health_generate") == 0


# -- one of several ranks ----------------------------------------------------------------------------------------------


def report(rank: int, at: float) -> Answer:
    """SGLang's of one rank."""
    return Answer(200, "application/json", orjson.dumps({"loads": [{"dp_rank": rank, "timestamp": at}]}))


def figures(own: int, others: int) -> Answer:
    """vLLM's of ranks 0 and 1."""
    lines = (f'vllm:prompt_tokens_total{{engine="{rank}"}} {tokens}' for rank, tokens in ((0, others), (1, own)))
    return Answer(200, "text/plain", "\n".join(lines).encode())


REFUSED, DONE = Answer(400, "", b""), Answer(200, "", b"")


class ToldOfRank(Told):
    """The same, and an answer to what is asked of the rank; None: none comes."""

    nudge: Answer | None = None

    async def post_to(self, path: str, body: object, _within: float, headers: Mapping[str, str]) -> Answer:
        self.posted.append((path, body))
        self.headers = headers
        if self.nudge is None:
            await asyncio.Event().wait()
            raise AssertionError
        return self.nudge

    async def life(self, runtime: str, nudge: Answer | None) -> RankLife:
        self.nudge = nudge
        worker = Worker("w", WorkerUrl("http", "w", 1), D, model_ids=("tiny",), runtime=runtime)
        worker.dp_rank, worker.dp_size = 1, 2
        with patch.object(rank_life_module, "time", SimpleNamespace(monotonic=lambda: self.now)):
            return await rank_life(self.get, self.post_to, worker, 0.02)


@pytest.mark.parametrize(
    ("runtime", "answers", "nudge", "expected"),
    [
        ("sglang", [report(1, 5.0), report(1, 5.1)], None, RankLife.LIVES),
        ("sglang", [report(1, 5.0)], None, RankLife.SILENT),
        ("sglang", [report(1, 5.0)], DONE, RankLife.LIVES),
        ("sglang", [report(1, 5.0)], REFUSED, RankLife.UNKNOWN),
        ("sglang", [report(0, 5.0)], None, RankLife.UNKNOWN),
        ("sglang", [report(1, 0.0)], None, RankLife.UNKNOWN),  # it has never said anything
        ("sglang", [Answer(404, "", b"")], None, RankLife.UNKNOWN),
        ("sglang", [Answer(200, "", b"<html>")], None, RankLife.UNKNOWN),
        ("sglang", [NoAnswerError("before 0.5.13 it waits for all ranks")], None, RankLife.UNKNOWN),
        ("sglang", [report(1, 5.0), NoAnswerError("gone")], None, RankLife.UNKNOWN),
        ("vllm", [figures(7, 1), figures(8, 1)], None, RankLife.LIVES),
        ("vllm", [figures(7, 1), figures(7, 2)], None, RankLife.SILENT),
        ("vllm", [figures(7, 1)], DONE, RankLife.LIVES),
        ("vllm", [figures(7, 1)], REFUSED, RankLife.UNKNOWN),
        ("vllm", [Answer(200, "", b"")], None, RankLife.UNKNOWN),  # --disable-log-stats
    ],
)
async def test_a_rank_is_asked_alone(
    runtime: str, answers: list[Answer | Exception], nudge: Answer | None, expected: RankLife
) -> None:
    assert await ToldOfRank(*answers).life(runtime, nudge) is expected
    assert "nudge" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_the_token_is_asked_of_that_rank() -> None:
    engine = ToldOfRank(report(1, 5.0))
    await engine.life("sglang", None)
    ((path, body),) = engine.posted
    assert path == "/generate"
    assert isinstance(body, dict)
    assert (body["routed_dp_rank"], body["bootstrap_room"] % 2, body["bootstrap_host"]) == (1, 1, "2.2.2.2")
    engine = ToldOfRank(figures(1, 1))
    await engine.life("vllm", None)
    assert engine.posted == [("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})]
    assert engine.headers == {"x-data-parallel-rank": "1"}


RANKED = HealthSettings(timeout=0.2, interval=60, stall=0.02, wedge=0.2)


@pytest.mark.parametrize("make", [SglangMock, VllmMock])
async def test_a_rank_that_hangs_is_out_alone_until_it_goes_on(make: type[SglangMock | VllmMock]) -> None:
    async with make("decode", dp_size=3) as mock, fleet(RANKED, dp_aware=True) as f:
        worker = f.registry.add(spec(D, mock.url))
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 3)
        first, hung, last = worker.ranks
        mock.engine.hang(1)
        turn = hung.begin()
        await until(f.registry, lambda: not hung.usable)
        # On a machine that stops for a while the others seem to be silent, too, and come back.
        await until(f.registry, lambda: f.registry.usable(D, None) == (first, last))
        reason = "wedged: 1 legs under way, no answer; rank 1 has not moved for 0.2 s"
        assert (hung.status, f.registry.trouble(hung)) == (Status.NOT_READY, reason)
        await f.is_not_said(first, "wedged")
        await eventually(lambda: {endpoint.health for endpoint in f.envoy.published[-1].decode} == {Health.HEALTHY})
        hung.end(turn)  # the client has left: no matter
        seen = sum(record.path == "/health" for record in mock.requests)
        await eventually(lambda: sum(record.path == "/health" for record in mock.requests) >= seen + 2)
        assert not hung.usable
        mock.engine.revive(1)
        await until(f.registry, lambda: hung.usable)
        assert "wedged" not in f.registry.trouble(hung)


@pytest.mark.parametrize("make", [SglangMock, VllmMock])
async def test_one_that_is_only_slow_stays_though_others_answer(make: type[SglangMock | VllmMock]) -> None:
    async with make("decode", dp_size=2) as mock, fleet(replace(RANKED, wedge=8.0), dp_aware=True) as f:
        worker = f.registry.add(spec(D, mock.url))
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 2)
        worker.ranks[1].begin()
        asked = "/v1/loads" if make is SglangMock else "/metrics"
        await eventually(lambda: sum(record.path == asked for record in mock.requests) >= 8)
        assert all(entry.usable for entry in worker.ranks)


async def test_when_all_ranks_hang_the_server_is_out() -> None:
    async with SglangMock("decode", dp_size=2) as mock, fleet(RANKED, dp_aware=True) as f:
        worker = f.registry.add(spec(D, mock.url))
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 2)
        mock.engine.hang(0)
        mock.engine.hang(1)
        worker.ranks[1].begin()
        await until(f.registry, lambda: not f.registry.usable(D, None))
        assert f.registry.trouble(worker).startswith("wedged: 1 legs under way, no answer; GET /health_generate")
        mock.engine.revive(0)
        mock.engine.revive(1)
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 2)


async def test_the_one_rank_that_is_left_is_not_out_for_good() -> None:
    """Nobody asks for signs of life of one rank where there are no others."""
    async with fleet(SLOW, dp_aware=True) as f:
        server = add_ready(f.registry, D, "http://10.0.0.1:1", "tiny")
        f.registry.describe(server, Metadata(model_ids=("tiny",), runtime="sglang", dp_size=2))
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 2)
        f.registry.hold(server, "wedged")
        f.registry.describe(server, Metadata(model_ids=("tiny",), runtime="sglang", dp_size=1))
        assert f.registry.usable(D, None) == (server,)


async def test_ranks_that_come_later_are_not_out_with_the_first() -> None:
    async with fleet(SLOW, dp_aware=True) as f:
        server = add_ready(f.registry, D, "http://10.0.0.1:1", "tiny")
        f.registry.describe(server, Metadata(model_ids=("tiny",), runtime="sglang", dp_size=2))
        await until(f.registry, lambda: len(f.registry.usable(D, None)) == 2)
        f.registry.hold(server, "wedged")
        f.registry.describe(server, Metadata(model_ids=("tiny",), runtime="sglang", dp_size=3))
        assert f.registry.usable(D, None) == server.ranks[1:]
        f.registry.set_status(server, Status.NOT_READY, "down")
        f.registry.hold(server, "")
        assert {(entry.status, entry.reason) for entry in server.ranks} == {(Status.NOT_READY, "down")}
