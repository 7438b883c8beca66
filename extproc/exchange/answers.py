"""What legs answer: whole, or only the head of it where Envoy runs the leg; and who answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from extproc.apis.request import InferenceRequest
from extproc.errors import CATALOGUE, GatewayError
from extproc.exchange.failures import failure_of, loss_of, was_connected
from extproc.exchange.headers import HeaderValue
from extproc.names import ERROR_CODE, LOCAL_REPLY, UPSTREAM
from extproc.policies.placement import Placer
from extproc.transport.interface import Header, Lost
from extproc.workers.worker import Worker

_BODY_LIMIT: Final = 1 << 20  # of a worker's error that is passed on
_LOCAL_REPLY: Final = LOCAL_REPLY.encode()
_UPSTREAM: Final = UPSTREAM.encode()
# What vLLM (0.32), or what stands before it, says without having looked at a request. (For others it asks, or may.)
UNSEEN: Final = frozenset({429, 503})


class AnswerHead(NamedTuple):
    """The head of a released leg's answer, as Envoy shows it.

    Attributes:
        status: the answer's.
        code: of the error that Envoy made up itself, None for a worker's answer.
        upstream: "ip:port" of who answered.
        retry_after: the header of this name.
    """

    status: int
    code: str | None
    upstream: str | None
    retry_after: bytes | None

    @classmethod
    def of(cls, headers: Iterable[HeaderValue]) -> AnswerHead:
        """Read what matters of ``headers``."""
        status = 0
        code = upstream = retry_after = None
        for header in headers:
            name = header.key
            if name == ":status":
                status = int(header.raw_value)
            elif name == UPSTREAM:
                upstream = header.raw_value.decode("latin-1")
            elif name == ERROR_CODE:
                code = header.raw_value.decode("latin-1")
            elif name == "retry-after":
                retry_after = header.raw_value
        return cls(status, code, upstream, retry_after)

    def error(self, worker: Worker) -> GatewayError:
        """What an answer with an error status means, whose body is not known here."""
        if self.code is not None and self.code in CATALOGUE:
            message = f"{worker.role.value} worker {worker.url} did not answer"
            return GatewayError(self.code, message, status=self.status)
        headers = [] if self.retry_after is None else [(b"retry-after", self.retry_after)]
        return failure_of(worker, self.status, headers, b"", answers_client=True)


class WholeAnswer:
    """Receives a leg's answer as a whole: either ``complete`` or ``failed`` is called, once.

    ``is_failure`` looks into the body of a 2xx answer. ``answers_client``: an error of the worker's is passed on.
    Of a body that is not to be kept whole only a first part is, enough for an error or to see what became of one token.
    """

    __slots__ = (
        "_answers_client",
        "_complete",
        "_failed",
        "_is_failure",
        "_keep",
        "_parts",
        "_size",
        "_worker",
        "headers",
        "status",
    )

    def __init__(
        self,
        worker: Worker,
        complete: Callable[[WholeAnswer], None],
        failed: Callable[[GatewayError], None],
        *,
        is_failure: Callable[[bytes], bool],
        answers_client: bool,
        keep: bool = False,
    ) -> None:
        self._is_failure = is_failure
        self._answers_client = answers_client
        self._worker = worker
        self._complete = complete
        self._failed = failed
        self._keep = keep
        self._parts: list[bytes] = []
        self._size = 0
        self.status = 0
        self.headers: Sequence[Header] = ()

    @property
    def body(self) -> bytes:
        """What was kept of the body."""
        return b"".join(self._parts)

    @property
    def begun(self) -> bool:
        """Something of a good answer's body has come."""
        return 200 <= self.status < 300 and bool(self._parts)

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self.status = status
        self.headers = headers

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        if self._keep or self._size < _BODY_LIMIT:
            self._parts.append(chunk)
            self._size += len(chunk)

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver. HTTP's say nothing that matters."""

    def done(self) -> None:
        """See LegReceiver."""
        if not 200 <= self.status < 300:
            worker, answers = self._worker, self._answers_client
            self._failed(failure_of(worker, self.status, self.headers, self.body, answers_client=answers))
        else:
            self._answered_well()

    def _answered_well(self) -> None:
        """The status says so; look at the body."""
        if self._is_failure(self.body):
            name = self._worker.role.value
            message = f"{name} worker {self._worker.url} aborted the request"
            self._failed(GatewayError(f"{name}_failed", message, answered=self.status))
        else:
            self._complete(self)

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver."""
        self._failed(loss_of(self._worker, reason, detail))


def answered_by(workers: Sequence[Worker], headers: Sequence[Header]) -> Worker | None:
    """Which of ``workers`` answered, by the header that Envoy sets; None when no worker did."""
    fields = dict(headers)
    if _LOCAL_REPLY in fields:
        return None
    endpoint = fields.get(_UPSTREAM, b"").decode("latin-1")
    return next((worker for worker in workers if worker.endpoint == endpoint), workers[0])


def broke_at(workers: Sequence[Worker], headers: Sequence[Header]) -> Worker | None:
    """Which of ``workers`` had the leg when its connection broke, by Envoy's own answer; None where it is no such."""
    fields = dict(headers)
    flags = fields.get(_LOCAL_REPLY)
    if flags is None or not was_connected(flags):
        return None
    endpoint = fields.get(_UPSTREAM, b"").decode("latin-1")
    return next((worker for worker in workers if worker.endpoint == endpoint), None)


def never_fetched(code: str, status: int, *, early: bool) -> bool:
    """Whether a decode that failed has surely not asked its prefill for the KV cache, for whatever purpose.

    Args:
        code: of the error that Envoy made up; empty for a worker's answer.
        status: a worker's.
        early: the worker sends the answer's head before it looks for a cache.
    """
    if not code:
        return status in UNSEEN
    return code.endswith("_unreachable") or (early and code.endswith("_connection_lost"))


def tellable(
    placer: Placer, request: InferenceRequest, workers: Sequence[Worker], failed: Worker | None, *, unreachable: bool
) -> Sequence[Worker]:
    """Decode workers that can have a prefill free what it holds, in the order in which to ask them.

    Args:
        placer: knows others.
        request: what they were to serve.
        workers: where the decode leg went, or may have gone.
        failed: who of them has it, and failed; comes last.
        unreachable: none of them accepts a connection.
    """
    if unreachable:
        return placer.others(request, workers[0], workers, partner=True)
    return workers if failed is None else (*(other for other in workers if other is not failed), failed)


def refused_before(workers: Sequence[Worker], served: Worker | None) -> Sequence[Worker]:
    """The workers that Envoy tried in vain before ``served``; all of them for None."""
    return workers if served is None else workers[: workers.index(served)]
