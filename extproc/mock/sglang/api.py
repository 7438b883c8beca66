"""How SGLang words answers and errors; the defaults are those of its OpenAI endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from extproc.mock import api
from extproc.mock.api import Body, InvalidBodyError, Reply, parse, require_json
from extproc.mock.sglang.engine import Batch, Mode, Sequence

if TYPE_CHECKING:
    from extproc.mock.recorder import Record


class Api(api.Api[Sequence]):
    """How one endpoint words its answers."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

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


# --- pieces of answers ---


def error(message: str, kind: str, status: int) -> dict[str, Any]:
    """The engine's ``ErrorResponse``."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


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


def parse_v1(kind: type[Body], record: Record) -> Body:
    """The body of a ``/v1`` endpoint, which must be declared as JSON; raises InvalidBodyError."""
    require_json(record)
    return parse(kind, record.body)


def in_full(problem: InvalidBodyError) -> str:
    """What is wrong with a body, as FastAPI words it, but for the source lines."""
    errors = problem.errors
    lines = "".join(f"\n  {entry}" for entry in errors)
    return f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:{lines} {errors}"


def in_short(problem: InvalidBodyError) -> str:
    """What is wrong with a body, as the Anthropic endpoints word it."""
    parts = []
    for entry in problem.errors:
        where = ".".join(str(part) for part in entry["loc"] if part != "body")
        parts.append(f"{where}: {entry['msg']}" if where else str(entry["msg"]))
    return "; ".join(parts)
