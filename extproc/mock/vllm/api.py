"""How vLLM words answers and errors; the defaults are those of its OpenAI endpoints."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from extproc.mock import api
from extproc.mock.api import DONE, Body, InvalidBodyError, Reply, parse, require_json
from extproc.mock.engine import RequestError
from extproc.mock.generation import Limits, Prompt
from extproc.mock.vllm.engine import INTERNAL_ERROR, Batch, Options, Sequence, new_id

if TYPE_CHECKING:
    from extproc.mock.recorder import Record
    from extproc.mock.vllm import bodies

FINGERPRINT = "vllm-0.32.0-00000000"
_BAD_REQUEST = "BadRequestError"


class RefusedError(RequestError):
    """A request that the engine refuses; ``value`` is part of the message where it is given."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        value: object = None,
        *,
        kind: str = _BAD_REQUEST,
        status: int = 400,
        plain: bool = False,
    ) -> None:
        if param is not None and not plain:
            message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
        super().__init__(message)
        self.param = param
        self.kind = kind
        self.status = status


class Context(NamedTuple):
    """What an endpoint knows besides the body."""

    options: Options
    record: Record

    def base_id(self, given: str | None) -> str:
        """The part of a request's id that the client may choose: the header, else the body's field, else random."""
        return self.record.header("x-request-id") or given or new_id()


class Api(api.Api[Sequence]):
    """How one endpoint words its answers."""

    prompt_head = True
    reads_rank = True  # the header that names a data-parallel rank
    frees_when_refused = True  # the prefill is told to free the blocks of a request that is refused

    def __init__(self, context: Context, body: bodies.Routed) -> None:
        self.context = context
        self.handoff = body.kv_transfer_params
        self.created = int(time.time())
        self.broken = False  # a sequence of a stream has failed

    @property
    def options(self) -> Options:
        """How the engine is set up."""
        return self.context.options

    @property
    def rank(self) -> int | None:
        """The data-parallel rank asked for; what is no number is none."""
        given = self.context.record.header("x-data-parallel-rank") if self.reads_rank else None
        try:
            return None if given is None else int(given)
        except ValueError:
            return None

    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""
        return self.refused(RequestError(message))

    def refused(self, problem: RequestError) -> Reply:
        """The same, where more than the message matters."""
        return refusal(problem)

    def stumble(self, message: str) -> Reply:  # noqa: ARG002 - the engine keeps it to itself
        """Where the engine's front end trips over the request."""
        return Reply.json(500, error(INTERNAL_ERROR, "InternalServerError", 500))

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``."""
        return Reply.json(status, error(message, "InternalServerError", status))

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        status = sequence.failure
        if status is None:
            return self.grown(sequence)
        self.broken = True
        return self.failure(sequence, status)

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        raise NotImplementedError

    def failure(self, sequence: Sequence, status: int) -> bytes:
        """The events for a failure in a stream, whose status is 200 then; with spaces, as there."""
        problem = json.dumps(error(sequence.message, "InternalServerError", status))
        return b"data: " + problem.encode() + b"\n\n"

    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""
        return DONE if self.broken else self.closing(batch) + DONE

    def closing(self, batch: Batch) -> bytes:  # noqa: ARG002 - for those who sum up
        """The events between the last step and ``[DONE]``."""
        return b""

    def sequence(
        self, prompt: Prompt, limits: Limits, external: str, index: int = 0, *, child: int | None = None
    ) -> Sequence:
        """A sequence of this request; ``child``: its number among several of one prompt."""
        rid = f"{external}-{new_id(8)}"
        return Sequence(
            prompt=prompt,
            limits=limits,
            rid=rid if child is None else f"{child}_{rid}",
            external=external,
            index=index,
            ids_in=[token for token, _ in prompt.tokens()],
            handoff=None if self.handoff is None else dict(self.handoff),
            record=self.context.record,
            wanted_rank=self.rank,
        )


# --- pieces of answers ---


def error(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The engine's ``ErrorResponse``."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refusal(problem: RequestError) -> Reply:
    """The answer to a refused request."""
    if isinstance(problem, RefusedError):
        return Reply.json(problem.status, error(str(problem), problem.kind, problem.status, problem.param))
    return Reply.json(400, error(str(problem), _BAD_REQUEST, 400))


def usage(prompt: int, written: int, details: dict[str, Any] | None) -> dict[str, Any]:
    """The ``usage`` object of an answer in one piece."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def short_usage(prompt: int, written: int) -> dict[str, Any]:
    """The ``usage`` object of a stream's chunk."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + written, "completion_tokens": written}


def finish_reason(sequence: Sequence) -> str | None:
    """Why a sequence ended; None: it goes on."""
    return None if sequence.finish is None else str(sequence.finish.get("type"))


def stop_reason(sequence: Sequence) -> str | int | None:
    """The stop string or token that ended a sequence; None for end-of-text."""
    matched = (sequence.finish or {}).get("matched")
    ended_itself = isinstance(matched, int) and matched not in sequence.limits.stop_token_ids
    return None if ended_itself or not isinstance(matched, str | int) else matched


def returned(batch: Batch) -> dict[str, Any] | None:
    """The ``kv_transfer_params`` of an answer: the first prompt's, of several samples the last one's."""
    return batch.sequences[batch.samples - 1].returned


# --- reading bodies ---


def read(kind: type[Body], record: Record) -> Body:
    """The body, which must be declared as JSON; raises InvalidBodyError."""
    require_json(record)
    return parse(kind, record.body, context=True)


def invalid(problem: InvalidBodyError) -> Reply:
    """The answer to a body that is not what the endpoint takes."""
    lines = "".join(f"\n  {_line(entry)}" for entry in problem.errors)
    count = len(problem.errors)
    message = f"{count} validation error{'s' if count > 1 else ''}:{lines}"
    param = None if problem.errors[0]["loc"][0] == "header" else _place(problem.errors[0])
    return Reply.json(400, error(message, "Bad Request", 400, param))


def _place(entry: dict[str, Any]) -> str:
    return ".".join(str(part) for part in entry["loc"])


def _line(entry: dict[str, Any]) -> str:
    if entry["loc"][0] == "header":
        return str(entry["msg"])
    given = entry["input"]
    shown = f"<{type(given).__name__} of {len(given)} items>" if isinstance(given, dict | list) else str(given)
    return str({**entry, "loc": _place(entry), "input": shown})
