"""What one server is, over time: learnt when it joins, asked again where it did not tell or may be another."""

from __future__ import annotations

import math
import time

from extproc.workers import bootstrap
from extproc.workers.client import WorkerClient
from extproc.workers.contact import Contact
from extproc.workers.health_state import Pace
from extproc.workers.identify import doubts, unidentified
from extproc.workers.metadata import Metadata
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker


class UnidentifiedError(Exception):
    """It is not known what the worker is, and so it must not be used; the message says why."""


class Identification:
    """Tells the registry what the server of ``worker`` is, and what its bootstrap server says.

    Args:
        worker: the server's entry; of several ranks the first one's.
        contact: the way to it.

    Attributes:
        spec: its registration.
        tries: questions in a row that left something to be learnt.
        identified_at: when it last said what it is, by ``time.monotonic()``.
        trouble: what is wrong although it may be used, for people.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        contact: Contact,
        client: WorkerClient,
        pace: Pace,
        refresh: MooncakeRefresh,
    ) -> None:
        self._worker = worker
        self.spec = registry.spec(worker)
        self._registry = registry
        self._contact = contact
        self._client = client
        self._pace = pace
        self._refresh = refresh
        self.tries = 0
        self.identified_at = -math.inf
        self._identified = False  # it need not be asked
        self._known = False  # what is known of it is of this process, as far as can be seen
        self._doubted = False  # to be asked at the next look
        self._identity_trouble = ""
        self._settled = False  # there is nothing more to learn from its bootstrap server
        self._bootstrap_at = -math.inf
        self._bootstrap_trouble = ""
        self._restarted = False  # it says something else than before

    @property
    def complete(self) -> bool:
        """Asking again soon would not show anything else."""
        return self._identified and self._settled

    @property
    def known(self) -> bool:
        """What is known of it holds."""
        return self._known

    @property
    def trouble(self) -> str:
        """See the class."""
        return "; ".join(
            filter(None, (*self._registry.idle(self._worker), self._identity_trouble, self._bootstrap_trouble))
        )

    def respecified(self) -> None:
        """Go by the registration as it is now, and ask at the next look."""
        self.spec = self._registry.spec(self._worker)
        self._doubted = True

    def doubt(self) -> None:
        """A request failed in a way that a restarted server may explain, or the like: ask at the next look."""
        self._doubted = True

    def restarted(self) -> None:
        """Its bootstrap server says something else than before: ask that at the next look."""
        self._restarted = True

    def forget(self) -> None:
        """Ask it again; what is known holds while it does not answer."""
        self._identified = self._settled = False

    def lose(self) -> None:
        """It may be another process by now: nothing is known until it says what it is."""
        self.forget()
        self._known = False

    def begin(self) -> None:
        """A look begins: whether it is to be asked.

        After a restart that nobody noticed a server may have more ranks; fewer show by a refusal.
        """
        stale = self._registry.dp_aware and time.monotonic() - self.identified_at >= self._pace.ranks
        if self._doubted or stale:
            self._doubted = False
            self.forget()

    async def learn(self, ip: str, within: float) -> None:
        """Ask what is to be asked at ``ip``; each answer must come ``within`` so many seconds.

        Raises:
            UnidentifiedError: see there.
            MismatchError: it is not what it is registered as.
        """
        if not self._identified:
            await self._identify(ip, within)
        if not self._settled or self._may_have_restarted():
            await self._look_at_bootstrap(ip, within)
        await self._refresh.settle(self._worker, ip)

    async def _identify(self, ip: str, within: float) -> None:
        """Ask the worker what it is, and again later where it did not tell all of it.

        What is known holds while a worker that has not been out gives no good answer: it may be busy.
        """
        self.tries += 1
        found = await self._contact.identify(self.spec, ip=ip, within=within)
        known = self._known and bool(self._worker.model_ids)
        if known and found.failed and not found.locked:
            self._identity_trouble = f"does not say again what it is: {'; '.join(found.failed)}"
            return
        self._known = False
        if reason := unidentified(self.spec, found):
            raise UnidentifiedError(reason)
        self._take(found)

    def _take(self, found: Metadata) -> None:
        self._known = True
        self._identified = not found.failed
        self._settled = False
        self.identified_at = time.monotonic()
        if self._identified:
            self.tries = 0
        self._registry.describe(self._worker, found)
        self._identity_trouble = doubts(self._worker, self.spec, found, dp_aware=self._registry.dp_aware)

    def _may_have_restarted(self) -> bool:
        """Unseen, between two probes. Only Mooncake's decode workers hang on it; others fail, which is reported."""
        long_ago = time.monotonic() - self._bootstrap_at >= self._pace.doubt
        return bootstrap.is_mooncake(self._worker) and (self._restarted or long_ago)

    async def _look_at_bootstrap(self, ip: str, within: float) -> None:
        """Before requests come: a decode that is told a former engine id does not get the cache."""
        self.tries += 1
        self._bootstrap_at = time.monotonic()
        self._restarted = False
        engine_id = self._worker.kv_engine_id or self.spec.kv.engine_id
        found = await bootstrap.look(self._client, self._worker, engine_id, ip=ip, within=within)
        if self._settled and not found.settled:  # what is known holds until asking again has failed too
            self._settled = False
            return
        unpinned = "" if self._registry.dp_aware else bootstrap.unpinned(found.engines)
        self._settled, self._bootstrap_trouble = found.settled, "; ".join(filter(None, (found.trouble, unpinned)))
        if self.complete:
            self.tries = 0
        await self._refresh.found(self._worker, found.addresses)
        self._registry.set_engines(self._worker, found.engines)
