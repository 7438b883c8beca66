"""What the end of a gRPC call means for the client, and for whoever watches the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from extproc.engines.status import CONSTRAINT_TRAILER, http_of
from extproc.errors import GatewayError
from extproc.exchange.answers import WholeAnswer
from extproc.exchange.failures import failure_of, says_it_waited, waited_in_vain
from extproc.names import LOCAL_REPLY
from extproc.transport.interface import Header
from extproc.workers.worker import Worker

_UNKNOWN: Final = 2
_STATUS: Final = b"grpc-status"
_MESSAGE: Final = b"grpc-message"
_CONTENT_TYPE: Final = b"content-type"
_GRPC: Final = b"application/grpc"  # or with +proto, and the like, behind it
_SHOWN: Final = 1000  # characters of a worker's words that the client is told
_LOCAL_REPLY: Final = LOCAL_REPLY.encode()


class Verdict(NamedTuple):
    """How a call ended.

    Attributes:
        code: its gRPC status.
        message: what the server says to it.
        constraint: the answer could not be made to fit the request's own constraint.
    """

    code: int
    message: str
    constraint: bool

    def failure(self, worker: Worker) -> GatewayError:
        """What it means for the client that ``worker`` said so; not for status 0.

        There is no body that could be passed on: the client is told the message.
        """
        status = http_of(self.code, constraint=self.constraint)
        name = worker.role.value
        kind = "rejected" if 400 <= status < 500 else "failed"
        message = f"{name} worker {worker.name} answered {self.message or f'gRPC status {self.code}'}"
        if status >= 500 and says_it_waited(self.message.encode()):
            return waited_in_vain(message, status)
        return GatewayError(f"{name}_{kind}", message, status=status, answered=status)


def verdict_of(headers: Sequence[Header]) -> Verdict | None:
    """What a call's trailers say, or a head that is all there is; None where it says nothing."""
    fields = dict(headers)
    status = fields.get(_STATUS)
    if status is None:
        return None
    code = int(status) if status.isdigit() else _UNKNOWN
    message = unquote(fields.get(_MESSAGE, b"").decode("latin-1"))[:_SHOWN]
    return Verdict(code, message, CONSTRAINT_TRAILER in fields)


def cut_short(worker: Worker) -> GatewayError:
    """The error for a call whose answer has no status: it was cut on its way."""
    name = worker.role.value
    message = f"the connection of {name} worker {worker.url} broke before its answer was whole (no gRPC status)"
    return GatewayError(f"{name}_connection_lost", message)


def unsaid(worker: Worker) -> GatewayError:
    """The error for a call that ended well, with a head that is all there is of it."""
    message = f"{worker.role.value} worker {worker.name} ended the call without an answer"
    return GatewayError("decode_bad_reply", message)


def is_strange(status: int, headers: Sequence[Header]) -> bool:
    """Whether a worker's head is none of a gRPC call, though it says that all is well: it is another server's."""
    fields = dict(headers)
    return status == 200 and _LOCAL_REPLY not in fields and not fields.get(_CONTENT_TYPE, b"").startswith(_GRPC)


def stranger(worker: Worker) -> GatewayError:
    """The error for an answer that is no gRPC call's."""
    message = f"{worker.role.value} worker {worker.name} answered, but not as a gRPC server does"
    return GatewayError("decode_bad_reply", message)


def refusal_of(worker: Worker, status: int, headers: Sequence[Header]) -> GatewayError | None:
    """What a head means that is no call's answer, or all of it and an error; None for any other.

    Such are Envoy's own answers, and those of a server that speaks no gRPC.
    """
    if status != 200 or _LOCAL_REPLY in dict(headers):
        return failure_of(worker, status, headers, b"", answers_client=True)
    if is_strange(status, headers):
        return stranger(worker)
    verdict = verdict_of(headers)
    return None if verdict is None or verdict.code == 0 else verdict.failure(worker)


class RpcAnswer(WholeAnswer):
    """The same of a gRPC call: what is kept of its body are messages with their prefixes."""

    __slots__ = ("_verdict",)

    def __init__(
        self,
        worker: Worker,
        complete: Callable[[WholeAnswer], None],
        failed: Callable[[GatewayError], None],
        *,
        is_failure: Callable[[bytes], bool],
        answers_client: bool,
        keep: bool = False,  # noqa: ARG002 - it has the counts of tokens, and is kept
    ) -> None:
        super().__init__(worker, complete, failed, is_failure=is_failure, answers_client=answers_client, keep=True)
        self._verdict: Verdict | None = None

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver. What another server answers may have no end."""
        super().head(status, headers)
        if is_strange(status, headers):
            self._failed(stranger(self._worker))

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._verdict = verdict_of(headers)

    def done(self) -> None:
        """See LegReceiver."""
        error = refusal_of(self._worker, self.status, self.headers)
        verdict = self._verdict or verdict_of(self.headers)
        if error is not None:
            self._failed(error)
        elif verdict is None:
            self._failed(cut_short(self._worker))
        elif verdict.code:
            self._failed(verdict.failure(self._worker))
        else:
            self._answered_well()
