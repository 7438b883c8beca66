"""A policy that changes what another one chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker


class Wrapper(Policy):
    """Tells ``inner`` whatever it is told."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.learns = inner.learns
        self.holds = inner.holds

    def take_back(self, request: RequestView) -> None:
        """See Policy."""
        self._inner.take_back(request)

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See Policy."""
        self._inner.learn(request, worker)

    def forget(self, worker: Worker) -> None:
        """See Policy."""
        self._inner.forget(worker)

    def held(self, request: RequestView, workers: Sequence[Worker]) -> Mapping[Worker, int]:
        """See Policy."""
        return self._inner.held(request, workers)

    def over(self, notes: dict[object, object]) -> None:
        """See Policy."""
        self._inner.over(notes)
