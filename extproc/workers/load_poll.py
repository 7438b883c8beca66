"""Asking every worker how loaded its engine is: where it says it, how often, and until when an answer counts.

One question per base URL, also where several workers share one (ranks of data parallelism). Measured: a question costs
the sidecar 0.15 to 0.3 ms of CPU, several at once (:mod:`extproc.workers.rounds`). The fleet's questions are bounded,
at MOST_PER_SECOND, and so at 1 to 2 % of a core: beyond that times the interval workers, each is asked less often.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from urllib.parse import quote

from extproc.workers.client import NoAnswerError, WorkerClient
from extproc.workers.endings import Endings
from extproc.workers.load import EngineLoad, RankLoad, limit_in, of_get_load, of_v1_loads, with_limit
from extproc.workers.load_metrics import METRIC_NAMES, of_metrics
from extproc.workers.registry import Change, Registry
from extproc.workers.rounds import Rounds
from extproc.workers.rpc.channels import UnimplementedError
from extproc.workers.rpc.loads import GET_LOADS, ask_loads
from extproc.workers.worker import Worker

_RANDOM: Final = secrets.SystemRandom()
_logger = logging.getLogger(__name__)

INTERVAL: Final = 10.0  # seconds between two questions; the peer's default
LIMIT: Final = 5.0  # seconds that an answer may take
MOST_PER_SECOND: Final = 50  # questions to the whole fleet
CONCURRENCY: Final = 32  # questions under way at once
STALE: Final = 3  # intervals after which an answer counts no more
SILENT: Final = 6  # intervals until a worker that says nothing of its load is asked again
SOONER: Final = 10  # an overloaded worker is asked so many times as often, for its queue may empty in no time
LARGEST: Final = 1 << 20  # bytes of an answer: of a vLLM's metrics, 70 ranks; to read them takes 3 ms
_JITTER: Final = 0.1
_ABSENT: Final = (404, 405, 501)


class Source(Enum):
    """Where an engine may say how loaded it is. The value is the path.

    A vLLM writes its whole page of metrics, 50 KB and more, however few are wanted, but for what comes behind
    ``/metrics``: there the page is prometheus_client's own, which takes names (vLLM 0.32
    ``entrypoints/serve/instrumentator/metrics.py``, prometheus_client ``asgi.py``), and has 2 KB. It is empty where the
    figures of several API server processes are put together.
    """

    LOADS = "/v1/loads?include=core,disagg,queues,memory"
    GET_LOAD = "/get_load"
    FEW_METRICS = "/metrics/?" + "&".join(f"{quote('name[]')}={quote(name)}" for name in METRIC_NAMES)
    METRICS = "/metrics"
    RPC = GET_LOADS  # of a gRPC server; the name of the method

    def read(self, body: bytes) -> list[RankLoad] | None:
        """What the answer says; None: nothing."""
        return _READ[self](body)


_READ: Final[dict[Source, Callable[[bytes], list[RankLoad] | None]]] = {
    Source.LOADS: of_v1_loads,
    Source.GET_LOAD: of_get_load,
    Source.FEW_METRICS: of_metrics,
    Source.METRICS: of_metrics,
}


_OF_VLLM: Final = (Source.FEW_METRICS, Source.METRICS)
_OF_SGLANG: Final = (Source.LOADS, Source.GET_LOAD, *_OF_VLLM)


def sources_of(worker: Worker) -> Sequence[Source]:
    """Where to ask an engine, in this order until one answers. One that was not identified counts as SGLang."""
    if worker.url.is_grpc:
        return (Source.RPC,)
    return _OF_VLLM if worker.runtime == "vllm" else _OF_SGLANG


def is_asked(worker: Worker) -> bool:
    """Whether it is of interest how loaded the worker is: it is used."""
    return worker.works


class _FailedError(Exception):
    """The worker answers with an error; the message says which."""


@dataclass(slots=True, eq=False)
class _Target:
    """One base URL."""

    workers: list[Worker] = field(default_factory=list)  # those that are usable
    sources: list[Source] = field(default_factory=list)  # not tried in vain yet; empty: all are
    said: tuple[float, Sequence[RankLoad]] | None = None  # when by time.monotonic(), and what; None: too long ago
    trouble: str = ""  # why nothing is known, as the log has it
    task: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None


class LoadMonitor:
    """Keeps ``engine_load`` of the registry's usable workers up to date, from :meth:`start` to :meth:`stop`.

    ``interval`` (seconds) is what lies between two questions to one worker, unless its registration says otherwise or
    the fleet is too large for it.
    A worker that is not used has no load, unless gRPC is why, and neither has one whose last answer is older than STALE
    intervals.
    ``told`` is called with a worker of which something new is known, or nothing any more.
    """

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        interval: float = INTERVAL,
        told: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._interval = interval
        self._told = told
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._rounds = Rounds()
        self._targets: dict[str, _Target] = {}
        self._endings = Endings()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin asking. Needs a running event loop."""
        self._unsubscribe = self._registry.subscribe(self._changed)
        for worker in self._registry:
            self._look_at(worker)

    async def stop(self) -> None:
        """Stop asking; returns when no question is under way."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for target in tuple(self._targets.values()):
            for worker in tuple(target.workers):
                self._drop(worker)
        await self._endings.wait()

    def _period(self, target: _Target) -> float:
        """Seconds between two questions to a base URL; of several workers' own intervals the shortest counts."""
        own = [self._registry.spec(worker).load_monitor_interval_secs for worker in target.workers]
        wanted = min((seconds for seconds in own if seconds is not None), default=self._interval)
        return max(wanted, len(self._targets) / MOST_PER_SECOND)

    def _pause(self, target: _Target) -> float:
        """Seconds until the next question to a base URL."""
        period = self._period(target)
        if not target.sources:
            return period * SILENT
        if any(worker.overloaded for worker in target.workers):
            return max(period / SOONER, len(self._targets) / MOST_PER_SECOND)
        return period

    # -- which workers --------------------------------------------------------------------------------------------

    def _changed(self, worker: Worker, change: Change) -> None:
        self._look_at(worker)
        target = self._targets.get(str(worker.url))
        if change is Change.IDENTITY and target is not None:
            target.sources = list(sources_of(worker))  # it may be another engine now
            if worker in target.workers:
                self._tell(target, worker)  # it may stand for another rank

    def _look_at(self, worker: Worker) -> None:
        target = self._targets.get(str(worker.url))
        asked = target is not None and worker in target.workers
        if is_asked(worker) and not asked:
            self._add(worker)
        elif asked and not is_asked(worker):
            self._drop(worker)

    def _add(self, worker: Worker) -> None:
        target = self._targets.setdefault(str(worker.url), _Target())
        target.workers.append(worker)
        self._tell(target, worker)
        if target.task is None:
            target.sources = list(sources_of(worker))
            asking = self._ask_on(target)
            target.task = asyncio.get_running_loop().create_task(asking, name=f"load-{worker.id}")

    def _drop(self, worker: Worker) -> None:
        target = self._targets[str(worker.url)]
        target.workers.remove(worker)
        self._set(worker, None)
        if target.workers:
            return
        del self._targets[str(worker.url)]
        if target.expiry is not None:
            target.expiry.cancel()
        if target.task is not None:
            self._endings.cancel(target.task)

    # -- asking one -----------------------------------------------------------------------------------------------

    async def _ask_on(self, target: _Target) -> None:
        """Ask until cancelled. A fleet that comes at once is spread over the period; few workers are asked at once."""
        await self._rounds.sleep(_RANDOM.uniform(0, len(self._targets) / MOST_PER_SECOND))
        while True:
            try:
                async with self._gate:
                    await self._ask(target)
            except Exception:
                _logger.exception("asking for a load failed; going on", extra={"worker": target.workers[0].name})
            await self._rounds.sleep(jittered(self._pause(target)))

    async def _ask(self, target: _Target) -> None:
        worker = target.workers[0]
        sources = target.sources = target.sources or list(sources_of(worker))
        while sources:
            source = sources[0]
            try:
                found = await self._answer(worker, source)
            except _FailedError as error:
                _say(target, str(error))
                return
            except NoAnswerError as error:
                _logger.debug("no load", extra={"worker": worker.name, "reason": str(error)})
                return
            if found is not None:
                self._take(target, found)
                return
            with suppress(ValueError):  # the engine was identified anew meanwhile
                sources.remove(source)
        if target.sources is sources:
            _say(target, "it says it nowhere")

    async def _answer(self, worker: Worker, source: Source) -> list[RankLoad] | None:
        """What the engine says there; None: it does not say it there. Raises _FailedError, NoAnswerError."""
        if source is Source.RPC:
            try:
                return await ask_loads(self._client.rpc, worker, within=LIMIT)
            except UnimplementedError:
                return None
        answer = await self._client.get_often(worker, source.value, within=LIMIT, most=LARGEST)
        if not answer.ok and answer.status not in _ABSENT:
            raise _FailedError(f"GET {source.value.partition('?')[0]}: HTTP {answer.status}")
        return source.read(answer.body) if answer.ok else None

    def _take(self, target: _Target, found: Sequence[RankLoad]) -> None:
        """Tell the workers what was said of them."""
        if target.expiry is not None:
            target.expiry.cancel()
        target.said = time.monotonic(), found
        for worker in target.workers:
            self._tell(target, worker)
        target.trouble = ""
        target.expiry = asyncio.get_running_loop().call_later(STALE * self._period(target), self._expire, target)

    def _tell(self, target: _Target, worker: Worker) -> None:
        """Tell a worker what was said of it, if anything."""
        at, found = target.said or (0.0, ())
        load = EngineLoad(at, with_limit(found, limit_in(worker.labels))) if found else None
        worker.load_then, worker.tokens_then = worker.load, worker.tokens
        self._set(worker, load if load is None or worker.dp_rank is None else load.of_rank(worker.dp_rank))

    def _expire(self, target: _Target) -> None:
        """What was said is too old."""
        target.said = None
        for worker in target.workers:
            self._set(worker, None)

    def _set(self, worker: Worker, load: EngineLoad | None) -> None:
        worker.engine_load = load
        self._registry.overloads.judge(worker)
        self._told(worker)


def jittered(seconds: float) -> float:
    """About so long, so that many are not asked in step, or one by many."""
    return seconds * (1 + _RANDOM.uniform(-_JITTER, _JITTER))


def _say(target: _Target, trouble: str) -> None:
    """Log why the worker's load is not known, once."""
    if trouble != target.trouble:
        target.trouble = trouble
        extra = {"worker": target.workers[0].name, "reason": trouble}
        _logger.info("how loaded the engine is, is not known", extra=extra)
