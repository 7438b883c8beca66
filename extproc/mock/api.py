"""How endpoints that run the model word an engine's answers: one ``Api`` object per request; and reading bodies."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from extproc.mock.engine import AnySequence, Batch, RequestError
from extproc.mock.exchange import JSON, TEXT

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


class Api(ABC, Generic[AnySequence]):
    """How one endpoint words its answers."""

    early_head: ClassVar[bool] = False  # a stream's head is sent before anything is known
    prompt_head: ClassVar[bool] = False  # a stream's head is sent as soon as the engine has taken the request in
    stream_headers: ClassVar[tuple[tuple[str, str], ...]] = ()
    stops_at_failure: ClassVar[bool] = True  # one sequence's failure ends the stream of all

    # --- in one piece ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def stream(self) -> bool:
        """Whether a stream is asked for."""

    def objection(self) -> Reply | None:
        """What the engine refuses before anything else, also in a stream."""
        return None

    @abstractmethod
    def batch(self) -> Batch[AnySequence]:
        """The sequences asked for; raises RequestError, InternalError."""

    @abstractmethod
    def answer(self, batch: Batch[AnySequence]) -> bytes:
        """The whole answer."""

    @abstractmethod
    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""

    def refused(self, problem: RequestError) -> Reply:
        """The same, where more than the message matters."""
        return self.refusal(str(problem))

    @abstractmethod
    def stumble(self, message: str) -> Reply:
        """Where the engine's front end trips over the request."""

    @abstractmethod
    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``."""

    # --- as a stream -----------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The events that go out with an early head."""
        return b""

    @abstractmethod
    def step(self, sequence: AnySequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed; InternalError breaks the stream off."""

    @abstractmethod
    def end(self, batch: Batch[AnySequence]) -> bytes:
        """The events after the last step."""

    def refusal_events(self, message: str) -> bytes:
        """Where the engine refuses after an early head."""
        raise NotImplementedError


# --- pieces of answers ---


def event(data: object) -> bytes:
    """One event of a stream, without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One event of a stream, named after its ``type``."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


# --- reading bodies ---


class InvalidBodyError(Exception):
    """A body that is not what the endpoint takes; ``errors`` are pydantic's, their ``loc`` beginning with ``body``."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(str(errors))
        self.errors = errors


def parse(kind: type[Body], data: bytes, *, context: bool = False) -> Body:
    """The body as ``kind``; raises InvalidBodyError, whose errors have pydantic's ``ctx`` if ``context``."""
    if not data:
        raise InvalidBodyError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return kind.model_validate(orjson.loads(data))
    except orjson.JSONDecodeError:
        problem = _json_problem(data)
        found = {
            "type": "json_invalid",
            "loc": ("body", problem.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": problem.msg},
        }
        raise InvalidBodyError([found]) from None
    except ValidationError as problem:
        details = problem.errors(include_url=False, include_context=context)
        raise InvalidBodyError([{**entry, "loc": ("body", *entry["loc"])} for entry in details]) from None


def _json_problem(data: bytes) -> json.JSONDecodeError:
    """What is wrong with a text that is no JSON, in the words of the parser that FastAPI uses."""
    try:
        json.loads(data)
    except json.JSONDecodeError as problem:
        return problem
    except UnicodeDecodeError:
        pass
    return json.JSONDecodeError("JSON decode error", "", 0)


def require_json(record: Record) -> None:
    """Raise InvalidBodyError for a body that is not declared as JSON."""
    if (record.header("content-type") or "").lower().partition(";")[0] != JSON:
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise InvalidBodyError([{"loc": ["header", "content-type"], "msg": message, "type": "value_error"}])
