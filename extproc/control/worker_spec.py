"""Bodies of ``/workers``; an error is worded as the peer words it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from extproc.errors import InvalidUrlError
from extproc.workers.registration import FormError, RegistrationError, patched, registration
from extproc.workers.spec import WorkerSpec

_DEEPEST: Final = 64  # levels; a serialiser that shows what was kept must be able to


class SpecError(ValueError):
    """The body is not a registration; the message names what is wrong."""


def parse_worker_spec(body: bytes) -> WorkerSpec:
    """Read a ``POST`` or ``PUT /workers`` body. Raises SpecError."""
    return _read(body, registration)


def parse_worker_patch(body: bytes, spec: WorkerSpec) -> WorkerSpec:
    """Read a ``PATCH /workers/{id}`` body, for a worker registered as ``spec``. Raises SpecError."""
    return _read(body, lambda value: patched(spec, value))


def fields_of(body: bytes) -> list[str]:
    """The names in a body that was read without an error, for the log."""
    return sorted(orjson.loads(body))


def members_of(body: bytes) -> set[str]:
    """The same, for warnings: of objects the members, as in ``health.timeout_secs``; labels may stand for fields."""
    found = set()
    for name, value in orjson.loads(body).items():
        inside = "" if name == "labels" else f"{name}."
        found |= {inside + member for member in value} if isinstance(value, dict) else {name}
    return found


def _read(body: bytes, reader: Callable[[Mapping[str, Any]], WorkerSpec]) -> WorkerSpec:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SpecError(f"JSON syntax error: {error}") from None
    if not isinstance(value, dict):
        raise SpecError("Invalid JSON data: expected an object")
    if _is_deep(value):
        raise SpecError(f"Invalid JSON data: nested deeper than {_DEEPEST} levels")
    try:
        return reader(value)
    except FormError as error:
        raise SpecError(f"Invalid JSON data: {error}") from None
    except InvalidUrlError as error:
        raise SpecError(f"Invalid value for field 'url': not a url - {error.reason}") from None
    except RegistrationError as error:
        raise SpecError(str(error)) from None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return False
    return True


def _items(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
