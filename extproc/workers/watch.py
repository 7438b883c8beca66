"""The loop over one worker: resolve its name, probe it, ask what it is, rest."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time

from extproc.workers import ranks
from extproc.workers.addresses import EndpointTakenError
from extproc.workers.client import NoAnswerError, UnreachableError, WorkerClient
from extproc.workers.contact import Contact
from extproc.workers.health_state import HealthSettings, HealthState, Pace
from extproc.workers.identification import Identification, UnidentifiedError
from extproc.workers.metadata import MismatchError
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.rank_life import RankLife
from extproc.workers.registry import Registry
from extproc.workers.resolver import ResolveError, Resolver, literal
from extproc.workers.rounds import Rounds
from extproc.workers.wedged_ranks import WedgedRanks
from extproc.workers.worker import Status, Worker

_RANDOM = secrets.SystemRandom()
_logger = logging.getLogger(__name__)


class Watch:
    """Tells the registry where one server is, how it is and what it is. ``gate`` bounds looks under way at once.

    Args:
        worker: the server's entry; of several ranks the first one's.
        contact: asks it.
        client: asks what is beside it.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        contact: Contact,
        client: WorkerClient,
        resolver: Resolver,
        settings: HealthSettings,
        pace: Pace,
        gate: asyncio.Semaphore,
        refresh: MooncakeRefresh,
        rounds: Rounds,
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._contact = contact
        self._resolver = resolver
        self._settings = settings
        self._pace = pace
        self._gate = gate
        self._rounds = rounds
        self._identity = Identification(worker, registry, contact, client, pace, refresh)
        self._wedged_ranks = WedgedRanks(worker, registry, self._life_of)
        self._state = HealthState(settings)
        self._wake = asyncio.Event()
        # Where it is.
        self._ip: str | None = None
        self._lookup_trouble = ""
        self._taken = ""
        self._resolve_at = 0.0
        # How it is.
        self._probe_at = 0.0
        self._probed_at = -math.inf
        self._refused = False  # the last probe found no connection
        self._reported = False  # the data path complained while a probe was under way
        self._anew = False  # the registration changed, perhaps while a probe was under way
        self._refusals = 0  # of connections of requests, in a row
        self._answers = 0  # what the worker had answered at the last of them
        self._rank_tries = 0  # to find that a rank works again
        self._wedged = False  # it gave no sign of life; its health alone does not bring it back
        self._suspected = False  # it is out for what requests met with; no probe has found fault with it since
        self._warned = ""

    async def run(self) -> None:
        """Look, rest, look again, until cancelled."""
        while True:
            try:
                if time.monotonic() >= self._resolve_at:
                    await self._locate()
                if time.monotonic() >= self._probe_at:
                    await self._look()
            except Exception:
                _logger.exception("watching a worker failed; going on", extra={"worker": str(self._worker.url)})
                self._resolve_at = self._probe_at = time.monotonic() + self._pace.seek
            await self._rest(min(self._resolve_at, self._probe_at) - time.monotonic())

    def respecified(self, settings: HealthSettings) -> None:
        """Go by the worker's registration as it is now, and by ``settings``; look at once. How it is, stays."""
        self._identity.respecified()
        self._settings = settings
        self._state.settings = settings
        self._anew = True
        self._probe_at = time.monotonic()
        self._wake.set()

    def report_unreachable(self) -> None:
        """A request found no connection: bring the next probe of a READY worker forward, as close as ``Pace`` allows.

        After a few of these in a row, with no answer to a request and no good probe between, it is not waited for.
        """
        if self._settings.enabled:
            self._count_refusal()
            self._bring_forward()

    def report_failure(self) -> None:
        """Likewise, and ask a worker that has not just said what it is: it may have been restarted."""
        self._count_refusal()
        self.report_doubt()

    def report_doubt(self) -> None:
        """The same, of a worker that answers."""
        if time.monotonic() - self._identity.identified_at >= self._pace.doubt:
            self._identity.doubt()
            self._bring_forward()
        elif self._settings.enabled:
            self._bring_forward()

    def report_restart(self) -> None:
        """Its bootstrap server says something else than before: look at the worker, and at that, before long."""
        self._identity.restarted()
        self._bring_forward()

    def look_again(self) -> None:
        """Somebody else has seen trouble: bring the next probe forward."""
        if self._settings.enabled:
            self._bring_forward()

    def spare(self) -> None:
        """Use the worker again if only requests spoke against it, and they have nowhere else to go any more."""
        if self._suspected and not self._has_others():
            self._suspected = False
            self._state.spared()
            self._probe_at = time.monotonic()
            self._wake.set()
            self._registry.set_status(
                self._worker, self._state.status, "requests lost connections, but no other is left"
            )

    async def ask_for_life(self) -> None:
        """No leg is answered: ask the engine for a sign of life, and take the worker out if there is none."""
        if not self._settings.enabled or self._ip is None or self._state.status is not Status.READY:
            return
        answers = ranks.answers(self._worker)
        missing = await self._contact.sign_of_life(ip=self._ip, within=self._settings.wedge)
        if missing and self._worker.ranks and await self._wedged_ranks.any_lives(self._settings.wedge):
            return  # it met one that hangs; which of them do is asked of each
        if missing and ranks.answers(self._worker) == answers and self._state.status is Status.READY:
            self._wedged = True
            self._drop(f"wedged: {ranks.load(self._worker)} legs under way, no answer; {missing}")

    async def ask_rank_for_life(self, rank: Worker) -> None:
        """No leg of one of several ranks is answered: the same for it alone."""
        if self._settings.enabled and self._ip is not None and self._state.status is Status.READY:
            await self._wedged_ranks.look_at(rank, self._settings.wedge)
            if self._wedged_ranks.any_held:
                self._bring_forward()

    def _count_refusal(self) -> None:
        answers = ranks.answers(self._worker)
        if answers != self._answers:
            self._answers, self._refusals = answers, 0
        self._refusals += 1
        settings = self._settings
        reached = 0 < settings.transport_threshold <= self._refusals
        if settings.enabled and reached and self._state.status is Status.READY and self._has_others():
            self._suspected = True
            self._drop(f"{self._refusals} requests in a row found no connection, or lost it")

    def _has_others(self) -> bool:
        """Whether requests for all its models have somewhere else to go: that the last is down, a probe must show."""
        server, role = self._worker.server, self._worker.role
        return all(
            any(other.server is not server for other in self._registry.usable(role, model))
            for model in self._worker.model_ids or (None,)
        )

    def _drop(self, reason: str) -> None:
        """Take a READY worker out at once; from now on it is probed as any that is out."""
        self._bring_forward()
        self._refusals = 0
        self._identity.lose()  # it may come back as another
        self._identity.doubt()
        self._state.dropped()
        self._registry.set_status(self._worker, self._state.status, reason)

    def _bring_forward(self) -> None:
        if self._state.status is Status.READY:
            self._reported = True
            self._probe_at = min(self._probe_at, self._probed_at + self._pace.report)
            self._wake.set()

    async def _locate(self) -> None:
        url, before = self._worker.url, self._ip
        self._lookup_trouble = self._taken = ""
        try:
            rejected = self._refused and self._state.status is not Status.READY
            self._ip = await self._resolver.resolve(url.host, url.port, before, avoid=rejected)
            self._registry.place(self._worker, self._ip)
        except ResolveError as error:
            self._lookup_trouble = f"{error}; keeping {before}" if before else str(error)
        except EndpointTakenError as error:
            self._taken = str(error)
        if self._ip != before:
            self._identity.lose()
            self._probe_at = time.monotonic()
        fixed = literal(url.host) is not None and not self._taken
        self._resolve_at = math.inf if fixed else time.monotonic() + self._jittered(self._pace.resolve)

    async def _look(self) -> None:
        async with self._gate:
            self._reported = self._anew = False
            self._identity.begin()
            reason = await self._examine()
        self._registry.set_status(self._worker, self._state.status, reason)
        await self._let_ranks_in()
        self._probed_at = time.monotonic()
        self._probe_at = self._probed_at + self._jittered(self._pause())
        if self._refused or self._taken or self._ip is None:
            self._resolve_at = min(self._resolve_at, self._probe_at)

    async def _examine(self) -> str:
        """Move the state on by one result; what is wrong, if anything, is returned."""
        if self._taken:
            self._state.unfit()
            return self._taken
        if self._ip is None:
            self._state.failed()
            return self._lookup_trouble
        try:
            if self._settings.enabled:
                await self._probe()
            self._refused = False
            self._refusals = 0
            await self._identity.learn(self._ip, self._settings.timeout)
        except NoAnswerError as error:
            self._suspected, self._refused = False, isinstance(error, UnreachableError)
            self._identity.forget()
            if self._state.failed() is not Status.READY:
                self._identity.lose()  # it may come back as another
            return str(error)
        except UnidentifiedError as error:
            self._suspected = False
            self._state.withheld()
            return str(error)
        except MismatchError as error:
            self._suspected = False
            self._identity.lose()
            self._state.unfit()
            return str(error)
        if self._state.succeeded() is not Status.READY:
            return self._worker.reason  # until enough probes were good
        self._wedged = self._suspected = False
        own = self._identity.trouble
        self._warn(own)
        return "; ".join(filter(None, (self._lookup_trouble, own)))

    async def _probe(self) -> None:
        assert self._ip is not None
        contact, within = self._contact, self._settings.timeout
        await contact.probe(self._settings.endpoint, ip=self._ip, within=within)
        if self._wedged and (missing := await contact.sign_of_life(ip=self._ip, within=within)):
            raise NoAnswerError(f"still wedged: {missing}")

    def _warn(self, trouble: str) -> None:
        """Log what is wrong with a worker that is usable all the same, once."""
        if trouble and trouble != self._warned:
            _logger.warning(trouble, extra={"worker": str(self._worker.url)})
        self._warned = trouble

    async def _life_of(self, rank: Worker, within: float) -> RankLife:
        if self._ip is None:
            return RankLife.UNKNOWN
        return await self._contact.life_of(rank, ip=self._ip, within=within)

    async def _let_ranks_in(self) -> None:
        """After each good probe those that hang are asked for a sign of life, less and less often."""
        if self._wedged_ranks.any_held and self._state.status is Status.READY and not self._state.failures:
            self._rank_tries += 1
            await self._wedged_ranks.let_in(self._settings.timeout)
        if not self._wedged_ranks.any_held:
            self._rank_tries = 0

    def _pause(self) -> float:
        """Seconds until the next look."""
        settings, pace, state = self._settings, self._pace, self._state
        if self._anew:
            return 0.0
        if state.status is not Status.READY:
            return self._backoff(max(state.failures, 0 if self._identity.known else self._identity.tries))
        if self._reported:
            return pace.report
        if state.failures:
            return min(settings.interval, pace.confirm if self._refused else pace.seek)
        if not self._identity.complete:
            return self._backoff(self._identity.tries)
        if self._wedged_ranks.any_held:
            return self._backoff(self._rank_tries)
        return settings.interval if settings.enabled else math.inf

    def _backoff(self, tries: int) -> float:
        return min(self._settings.interval, self._pace.seek * self._pace.seek_growth ** min(tries, 64))

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + _RANDOM.uniform(-self._pace.jitter, self._pace.jitter))

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        if seconds > 0:
            cancel = None if seconds == math.inf else self._rounds.call_later(seconds, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if cancel is not None:
                    cancel()
