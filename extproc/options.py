"""How a field of the settings is shown to an operator, and what its default may be computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import Field


class Group(Enum):
    """The headings of ``pd-extproc launch --help``, in order."""

    WORKERS = "Workers"
    DISCOVERY = "Finding workers"
    POLICIES = "Choice of workers"
    STICKY = "Sessions"
    TUNING = "Single policies"
    TEXT = "Text, of gRPC workers"
    CLIENTS = "Clients"
    HEALTH = "Health of workers"
    LOAD = "Load of workers"
    ADMISSION = "Admission"
    FAILURES = "Failures"
    LIFECYCLE = "Shutdown"
    ENVOY = "Envoy"
    ADDRESSES = "Between Envoy and the sidecar (unix:/path or host:port)"
    OBSERVABILITY = "Observability"


@dataclass(frozen=True, slots=True)
class Option:
    """How a field looks in ``--help``. ``default``: words for a default that is computed."""

    group: Group
    help: str
    metavar: str | None = None
    default: str | None = None


def from_settings_before(default: Callable[[dict[str, Any]], object]) -> Any:
    """A default computed from the fields declared further up, which are valid by then."""
    return Field(default_factory=default, validate_default=True)
