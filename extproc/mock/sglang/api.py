"""What all endpoints that run the model have in common: one object per request that words the engine's answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from extproc.mock.exchange import JSON, TEXT
from extproc.mock.sglang.engine import Batch, Mode, Sequence

if TYPE_CHECKING:
    from extproc.mock.recorder import Record

Body = TypeVar("Body", bound=BaseModel)
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in one piece."""

    status: int
    body: bytes
    content_type: str = JSON

    @classmethod
    def json(cls, status: int, data: object) -> Reply:
        """An answer in JSON."""
        return cls(status, orjson.dumps(data))


STUMBLE = Reply(500, b"Internal Server Error", TEXT)


class Api(ABC):
    """How one endpoint words its answers. The defaults are those of the OpenAI endpoints."""

    early_head: ClassVar[bool] = False  # a stream's head is sent before anything is known
    stream_headers: ClassVar[tuple[tuple[str, str], ...]] = ()
    stops_at_failure: ClassVar[bool] = True  # one sequence's failure ends the stream of all

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    # --- in one piece ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def stream(self) -> bool:
        """Whether a stream is asked for."""

    def objection(self) -> Reply | None:
        """What the engine refuses before anything else, also in a stream."""
        return None

    @abstractmethod
    def batch(self) -> Batch:
        """The sequences asked for; raises RequestError, InternalError."""

    @abstractmethod
    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""

    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""
        return Reply.json(400, error(message, "BadRequestError", 400))

    def stumble(self, message: str) -> Reply:
        """Where the engine's front end trips over the request."""
        return Reply.json(500, error(f"Internal server error: {message}", "InternalServerError", 500))

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``."""
        if status == 400:
            return self.refusal(message)
        return Reply.json(status, error(message, str(status), status))

    # --- as a stream -----------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The events that go out with an early head."""
        return b""

    @abstractmethod
    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""

    @abstractmethod
    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""

    def refusal_events(self, message: str) -> bytes:
        """Where the engine refuses after an early head."""
        raise NotImplementedError


# --- pieces of answers ---


def error(message: str, kind: str, status: int) -> dict[str, Any]:
    """The engine's ``ErrorResponse``."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def event(data: object) -> bytes:
    """One event of a stream, without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One event of a stream, named after its ``type``."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def failure_event(sequence: Sequence, status: int) -> bytes:
    """How the OpenAI endpoints tell of a failure in a stream, whose status is 200 then; with spaces, as there."""
    problem = json.dumps({"error": error(sequence.message, HTTPStatus(status).name, status)})
    return b"data: " + problem.encode() + b"\n\n"


def usage(sequences: Iterable[Sequence], samples: int = 1) -> dict[str, Any]:
    """The ``usage`` object over all sequences; a prompt counts once, whatever its samples."""
    prompt = written = 0
    for place, sequence in enumerate(sequences):
        written += sequence.written
        if place % samples == 0:
            prompt += sequence.prompt.length
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def weight_versions(sequence: Sequence) -> list[dict[str, Any]]:
    """Which weights wrote which tokens."""
    return [{"version": "default", "start": 0, "end": sequence.written}]


def metadata(batch: Batch) -> dict[str, Any]:
    """The ``metadata`` object of the OpenAI endpoints."""
    return {"weight_version": "default", "weight_versions": weight_versions(batch.sequences[0])}


# --- reading bodies ---


class InvalidBodyError(Exception):
    """A body that is not what the endpoint takes; ``errors`` are pydantic's, their ``loc`` beginning with ``body``."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(str(errors))
        self.errors = errors

    def __str__(self) -> str:
        """As FastAPI words it, but for the source lines."""
        lines = "".join(f"\n  {entry}" for entry in self.errors)
        return f"{len(self.errors)} validation error{'s' if len(self.errors) > 1 else ''}:{lines} {self.errors}"

    @property
    def digest(self) -> str:
        """As the Anthropic endpoints word it."""
        parts = []
        for entry in self.errors:
            where = ".".join(str(part) for part in entry["loc"] if part != "body")
            parts.append(f"{where}: {entry['msg']}" if where else str(entry["msg"]))
        return "; ".join(parts)


def parse(kind: type[Body], data: bytes) -> Body:
    """The body as ``kind``; raises InvalidBodyError."""
    if not data:
        raise InvalidBodyError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return kind.model_validate(orjson.loads(data))
    except orjson.JSONDecodeError as problem:
        context = {"error": problem.msg}
        found = {
            "type": "json_invalid",
            "loc": ("body", problem.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": context,
        }
        raise InvalidBodyError([found]) from None
    except ValidationError as problem:
        details = problem.errors(include_url=False, include_context=False)
        raise InvalidBodyError([{**entry, "loc": ("body", *entry["loc"])} for entry in details]) from None


def parse_v1(kind: type[Body], record: Record) -> Body:
    """The body of a ``/v1`` endpoint, which must be declared as JSON; raises InvalidBodyError."""
    if (record.header("content-type") or "").lower().partition(";")[0] != JSON:
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise InvalidBodyError([{"loc": ["header", "content-type"], "msg": message, "type": "value_error"}])
    return parse(kind, record.body)
