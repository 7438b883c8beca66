"""How an engine's gRPC server words its answers: one ``Api`` object per ``Generate``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Any, ClassVar, Final, Generic

import grpc  # type: ignore[import-untyped]

from extproc.mock.engine import AnySequence, Batch
from extproc.mock.generation import alternatives, logprob
from extproc.mock.rpc.model import VOCABULARY

_CODES: Final[dict[int, Any]] = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}


def code_of(status: int) -> Any:
    """The gRPC status by its number, or for an engine's HTTP status (smg-grpc-servicer, ``engine_status.py``)."""
    return _BY_NUMBER.get(status) or _CODES.get(status, grpc.StatusCode.INTERNAL)


class Api(ABC, Generic[AnySequence]):
    """The answer to one ``Generate``.

    Attributes:
        ends_when_aborted: an ``Abort`` ends the stream, at once. Otherwise it ends the work alone, and nothing more
            comes.
    """

    ends_when_aborted: ClassVar[bool]

    @property
    @abstractmethod
    def stream(self) -> bool:
        """Whether a stream is asked for."""

    @abstractmethod
    def batch(self) -> Batch[AnySequence]:
        """The sequences asked for; raises RequestError, CrashError."""

    @abstractmethod
    def chunk(self, sequence: AnySequence, told: int) -> Any | None:
        """The message for the tokens from ``told`` on; None: none is sent."""

    @abstractmethod
    def complete(self, sequence: AnySequence, told: int) -> Any:
        """The last message of a sequence: in a stream the tokens from ``told`` on, else all of them (``told`` is 0)."""

    def goes_on(self, sequence: AnySequence) -> bool:  # noqa: ARG002 - for engines that do
        """Whether an aborted sequence is in what its engine brings to an end all the same."""
        return False

    def failed(self, sequence: AnySequence) -> tuple[Any, str] | None:
        """The status and message that end the call because of a sequence; None: none, the sequence goes on or ends."""
        status = sequence.failure
        return None if status is None else (code_of(status), sequence.message)

    def rejected(self) -> None:
        """The request is refused, has failed, or its client has left, before the engine gave out a token."""


# --- what messages have in common ---


def values(ids: list[int]) -> list[float]:
    """The log probability of each token."""
    return [logprob(token) for token in ids]


def rows(message: Any, ids: list[int], top: int) -> list[Any]:
    """``TopLogProbs`` of each position: the token itself in front."""
    made = []
    for token in ids:
        likely = alternatives(token, top)
        made.append(message(values=[value for value, _ in likely], token_ids=[other for _, other in likely]))
    return made


def unknown(ids: list[int]) -> int | None:
    """The first token id that is not in the vocabulary."""
    return next((token for token in ids if token >= VOCABULARY), None)


def finish_reason(sequence: AnySequence) -> str:
    """``finish_reason`` as the servers say it."""
    return str((sequence.finish or {}).get("type", "stop"))


def matched_stop(sequence: AnySequence) -> dict[str, Any]:
    """The field of ``matched_stop`` that applies."""
    matched = (sequence.finish or {}).get("matched")
    if matched is None:
        return {}
    return {"matched_token_id" if isinstance(matched, int) else "matched_stop_str": matched}
