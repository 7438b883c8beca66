"""The body of ``POST /workers``; an error is worded as the peer words it."""

from __future__ import annotations

import orjson

from extproc.errors import InvalidUrlError
from extproc.workers.registration import FormError, RegistrationError, registration
from extproc.workers.spec import WorkerSpec


class SpecError(ValueError):
    """The body is not a registration; the message names what is wrong."""


def parse_worker_spec(body: bytes) -> WorkerSpec:
    """Read a ``POST /workers`` body. Raises SpecError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SpecError(f"JSON syntax error: {error}") from None
    if not isinstance(value, dict):
        raise SpecError("Invalid JSON data: expected an object")
    try:
        return registration(value)
    except FormError as error:
        raise SpecError(f"Invalid JSON data: {error}") from None
    except InvalidUrlError as error:
        raise SpecError(f"Invalid value for field 'url': not a url - {error.reason}") from None
    except RegistrationError as error:
        raise SpecError(str(error)) from None
