"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from extproc.workers.worker import Worker


class Policy(Protocol):
    """Ranks the workers that could serve a request."""

    def rank(self, candidates: Sequence[Worker], limit: int) -> Sequence[Worker]:
        """At most ``limit`` of ``candidates`` (at least one), best first.

        The first is meant to serve; the others are where Envoy may go when it refuses the connection.
        """
