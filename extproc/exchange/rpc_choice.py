"""Who serves a request over gRPC after those who failed it."""

from __future__ import annotations

from collections.abc import Collection

from extproc.apis.request import InferenceRequest
from extproc.exchange.choice import AloneChoice
from extproc.exchange.gateway import Gateway
from extproc.exchange.placed import Placed
from extproc.exchange.seats import NOBODY
from extproc.handoff.grpc import Sequences
from extproc.workers.worker import Worker


class RpcAloneChoice(AloneChoice):
    """Other workers for a request that one answers alone.

    Args:
        gateway, request: for whom.
        like: the worker that failed.
        sequences: what each of them is asked for.
    """

    def __init__(self, gateway: Gateway, request: InferenceRequest, like: Worker, sequences: Sequences) -> None:
        super().__init__(gateway, request, like, b"")
        self._sequences = sequences

    def next(self, failed: Collection[Worker], taken: Collection[Worker] = NOBODY) -> Placed:
        """See Choice."""
        return super().next(failed, taken)._replace(handoff=self._sequences)
