"""What one server is, over time: learnt when it joins, asked again where it did not tell or may be another."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from extproc.workers import bootstrap
from extproc.workers.client import Answer, WorkerClient
from extproc.workers.health_state import Pace
from extproc.workers.identify import doubts, identify, unidentified
from extproc.workers.line import Line
from extproc.workers.metadata import Metadata
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class UnidentifiedError(Exception):
    """It is not known what the worker is, and so it must not be used; the message says why."""


class Identification:
    """Tells the registry what the server of ``worker`` is, and what its bootstrap server says.

    Args:
        worker: the server's entry; of several ranks the first one's.
        line: the way to it.
        token_reuse: see :class:`~extproc.workers.health.Monitor`.

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
        client: WorkerClient,
        line: Line,
        pace: Pace,
        refresh: MooncakeRefresh,
        *,
        token_reuse: bool,
    ) -> None:
        self._worker = worker
        self.spec = registry.spec(worker)
        self._registry = registry
        self._client = client
        self._line = line
        self._pace = pace
        self._refresh = refresh
        self._token_reuse = token_reuse
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
        return "; ".join(filter(None, (*self.spec.idle, self._identity_trouble, self._bootstrap_trouble)))

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

    async def learn(self, within: float) -> None:
        """Ask what is to be asked; each answer must come ``within`` so many seconds.

        Raises:
            UnidentifiedError: see there.
            MismatchError: it is not what it is registered as.
        """
        if not self._identified:
            await self._identify(within)
        if not self._settled or self._may_have_restarted():
            await self._look_at_bootstrap(within)
        await self._refresh.settle(self._worker, self._line.ip)

    async def _identify(self, within: float) -> None:
        """Ask the worker what it is, and again later where it did not tell all of it.

        What is known holds while a worker that has not been out gives no good answer: it may be busy.
        """
        self.tries += 1

        async def get(path: str) -> Answer:
            return await self._line.get(path, within)

        async def post(path: str, body: object, headers: Mapping[str, str] = _NONE) -> Answer:
            return await self._line.post(path, body, within, headers)

        aware = self._registry.dp_aware
        found = await identify(get, post, self.spec, token_reuse=self._token_reuse, dp_aware=aware)
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

    async def _look_at_bootstrap(self, within: float) -> None:
        """Before requests come: a decode that is told a former engine id does not get the cache."""
        self.tries += 1
        self._bootstrap_at = time.monotonic()
        self._restarted = False
        found = await bootstrap.look(
            self._client, self._worker, self.spec.kv.engine_id, ip=self._line.ip or "", within=within
        )
        if self._settled and not found.settled:  # what is known holds until asking again has failed too
            self._settled = False
            return
        unpinned = "" if self._registry.dp_aware else bootstrap.unpinned(found.engines)
        self._settled, self._bootstrap_trouble = found.settled, "; ".join(filter(None, (found.trouble, unpinned)))
        if self.complete:
            self.tries = 0
        await self._refresh.found(self._worker, found.addresses)
        self._registry.set_engines(self._worker, found.engines)
