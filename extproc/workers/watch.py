"""The loop over one worker: resolve its name, probe it, ask what it is, rest."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from contextlib import suppress

from extproc.workers import bootstrap, ranks
from extproc.workers.addresses import EndpointTakenError
from extproc.workers.client import NoAnswerError, UnreachableError, WorkerClient
from extproc.workers.contact import Contact
from extproc.workers.health_state import HealthSettings, HealthState, Pace
from extproc.workers.identify import doubts
from extproc.workers.metadata import MetadataError, MismatchError
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.registry import Registry
from extproc.workers.resolver import ResolveError, Resolver, literal
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
    ) -> None:
        self._worker = worker
        self._spec = registry.spec(worker)
        self._registry = registry
        self._contact = contact
        self._client = client
        self._resolver = resolver
        self._settings = settings
        self._pace = pace
        self._gate = gate
        self._refresh = refresh
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
        self._wedged = False  # it gave no sign of life; its health alone does not bring it back
        # What it is.
        self._identified = False
        self._identified_at = -math.inf
        self._doubted = False  # a request to it failed in a way that a restarted server may explain
        self._identity_trouble = ""
        self._identity_tries = 0
        self._settled = False  # there is nothing more to learn from its bootstrap server
        self._bootstrap_at = -math.inf
        self._bootstrap_trouble = ""
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
        self._spec = self._registry.spec(self._worker)
        self._settings = settings
        self._state.settings = settings
        self._doubted = self._anew = True  # at the next look it is asked what it is
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
        if time.monotonic() - self._identified_at >= self._pace.doubt:
            self._doubted = True
            self._bring_forward()
        elif self._settings.enabled:
            self._bring_forward()

    def look_again(self) -> None:
        """Somebody else has seen trouble: bring the next probe forward."""
        if self._settings.enabled:
            self._bring_forward()

    async def ask_for_life(self) -> None:
        """No leg is answered: ask the engine for a sign of life, and take the worker out if there is none."""
        if not self._settings.enabled or self._ip is None or self._state.status is not Status.READY:
            return
        answers = ranks.answers(self._worker)
        missing = await self._contact.sign_of_life(ip=self._ip, within=self._settings.wedge)
        if missing and ranks.answers(self._worker) == answers and self._state.status is Status.READY:
            self._wedged = True
            self._drop(f"wedged: {ranks.load(self._worker)} legs under way, no answer; {missing}")

    def _count_refusal(self) -> None:
        answers = ranks.answers(self._worker)
        if answers != self._answers:
            self._answers, self._refusals = answers, 0
        self._refusals += 1
        settings = self._settings
        reached = 0 < settings.transport_threshold <= self._refusals
        if settings.enabled and reached and self._state.status is Status.READY and self._has_others():
            self._doubted = True  # it may come back as another
            self._drop(f"{self._refusals} requests in a row found no connection, or lost it")

    def _has_others(self) -> bool:
        """Whether requests have somewhere else to go: that the last of a role is down, a probe must show."""
        worker = self._worker
        return any(other is not worker for other in self._registry.usable(worker.role, None))

    def _drop(self, reason: str) -> None:
        """Take a READY worker out at once; from now on it is probed as any that is out."""
        self._bring_forward()
        self._refusals = 0
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
            self._forget()
            self._probe_at = time.monotonic()
        fixed = literal(url.host) is not None and not self._taken
        self._resolve_at = math.inf if fixed else time.monotonic() + self._jittered(self._pace.resolve)

    async def _look(self) -> None:
        async with self._gate:
            self._reported = self._anew = False
            if self._doubted or self._is_to_be_asked_again():
                self._doubted = False
                self._forget()
            reason = await self._examine()
        self._registry.set_status(self._worker, self._state.status, reason)
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
            if not self._identified:
                await self._identify()
            if not self._settled or self._may_have_restarted():
                await self._look_at_bootstrap()
            await self._refresh.settle(self._worker, self._ip)
        except NoAnswerError as error:
            self._refused = isinstance(error, UnreachableError)
            self._forget()  # it may come back as another
            self._state.failed()
            return str(error)
        except MismatchError as error:
            self._state.unfit()
            return str(error)
        if self._state.succeeded() is not Status.READY:
            return self._worker.reason  # until enough probes were good
        self._wedged = False
        own = "; ".join(filter(None, (*self._spec.idle, self._identity_trouble, self._bootstrap_trouble)))
        self._warn(own if self._identified else "")
        return "; ".join(filter(None, (self._lookup_trouble, own)))

    async def _probe(self) -> None:
        assert self._ip is not None
        contact, within = self._contact, self._settings.timeout
        await contact.probe(self._settings.endpoint, ip=self._ip, within=within)
        if self._wedged and (missing := await contact.sign_of_life(ip=self._ip, within=within)):
            raise NoAnswerError(f"still wedged: {missing}")

    def _forget(self) -> None:
        self._identified = self._settled = False

    async def _identify(self) -> None:
        """Ask the worker what it is. One that does not say serves anything, and is asked again."""
        assert self._ip is not None
        self._identity_tries += 1
        try:
            found = await self._contact.identify(self._spec, ip=self._ip, within=self._settings.timeout)
        except MetadataError as error:
            self._identity_trouble = f"cannot learn what it serves: {error}"
            return
        self._identified = True
        self._settled = False
        self._identified_at = time.monotonic()
        self._identity_tries = 0
        self._registry.describe(self._worker, found)
        self._identity_trouble = doubts(self._worker, self._spec, found, dp_aware=self._registry.dp_aware)

    def _is_to_be_asked_again(self) -> bool:
        """After a restart that nobody noticed a server may have more ranks; fewer show by a refusal."""
        return self._registry.dp_aware and time.monotonic() - self._identified_at >= self._pace.ranks

    def _may_have_restarted(self) -> bool:
        """Unseen, between two probes. Only Mooncake's decode workers hang on it; others fail, which is reported."""
        return bootstrap.is_mooncake(self._worker) and time.monotonic() - self._bootstrap_at >= self._pace.doubt

    async def _look_at_bootstrap(self) -> None:
        """Before requests come: a decode that is told a former engine id does not get the cache."""
        self._identity_tries += 1
        self._bootstrap_at = time.monotonic()
        engine_id = self._worker.kv_engine_id or self._spec.kv.engine_id
        found = await bootstrap.look(
            self._client, self._worker, engine_id, ip=self._ip or "", within=self._settings.timeout
        )
        if self._settled and not found.settled:  # what is known holds until asking again has failed too
            self._settled = False
            return
        unpinned = "" if self._registry.dp_aware else bootstrap.unpinned(found.engines)
        self._settled, self._bootstrap_trouble = found.settled, "; ".join(filter(None, (found.trouble, unpinned)))
        if self._identified and self._settled:
            self._identity_tries = 0
        await self._refresh.found(self._worker, found.addresses)
        self._registry.set_engines(self._worker, found.engines)

    def _warn(self, trouble: str) -> None:
        """Log what is wrong with a worker that is usable all the same, once."""
        if trouble and trouble != self._warned:
            _logger.warning(trouble, extra={"worker": str(self._worker.url)})
        self._warned = trouble

    def _pause(self) -> float:
        """Seconds until the next look."""
        settings, pace, state = self._settings, self._pace, self._state
        if self._anew:
            return 0.0
        if state.status is not Status.READY:
            return self._backoff(state.failures)
        if self._reported:
            return pace.report
        if state.failures:
            return min(settings.interval, pace.confirm if self._refused else pace.seek)
        if not self._identified or not self._settled:
            return self._backoff(self._identity_tries)
        if bootstrap.is_mooncake(self._worker):
            return min(settings.interval, pace.restart)
        return settings.interval if settings.enabled else math.inf

    def _backoff(self, tries: int) -> float:
        return min(self._settings.interval, self._pace.seek * self._pace.seek_growth ** min(tries, 64))

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + _RANDOM.uniform(-self._pace.jitter, self._pace.jitter))

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if seconds == math.inf else seconds):
                    await self._wake.wait()
