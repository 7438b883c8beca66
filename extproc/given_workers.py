"""Workers given at start, by flag, variable or YAML file.

Messages are those of ``smg launch`` where it has the rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, InstanceOf

from extproc.workers.registration import RegistrationError, registration
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, WorkerUrl


def _prefill(value: object) -> object:
    value = _parsed(value)
    if isinstance(value, str):
        url, *ports = value.split() or [""]
        if len(ports) > 1:
            raise ValueError(f"{value!r}: expected URL [PORT|none]")
        port = _bootstrap_port(ports[0]) if ports else None
        return WorkerSpec(WorkerUrl.parse(url), Role.PREFILL, bootstrap_port=port)
    return _from_mapping(value, Role.PREFILL, "URL [PORT|none]")


def _decode(value: object) -> object:
    value = _parsed(value)
    if isinstance(value, str):
        return WorkerSpec(WorkerUrl.parse(value), Role.DECODE)
    return _from_mapping(value, Role.DECODE, "a URL")


def _parsed(value: object) -> object:
    """A mapping as JSON, for a flag or a variable, as the mapping; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{value!r}: not valid JSON: {error}") from None


def _from_mapping(value: object, role: Role, text: str) -> object:
    if isinstance(value, WorkerSpec):
        return value
    if not isinstance(value, Mapping) or "url" not in value:
        raise ValueError(f"expected {text}, or a mapping with url and other fields of POST /workers")
    port = value.get("bootstrap_port")
    try:
        if value.get("worker_type", role.value) != role.value:
            raise RegistrationError(f"worker_type is {value['worker_type']}, but it is listed as {role.value}")
        said = {"worker_type": role.value} | (
            {"bootstrap_port": _bootstrap_port(port)} if isinstance(port, str) else {}
        )
        return registration({**value, **said})
    except RegistrationError as error:
        raise ValueError(f"{value['url']}: {error}") from None


def _bootstrap_port(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"Invalid bootstrap port: {text}. Must be a number or 'none'")
    if not 1 <= int(text) <= 65535:
        raise ValueError("Port must be between 1 and 65535")
    return int(text)


def items(value: object) -> object:
    """The environment's form of a list: items separated by semicolons."""
    return [item.strip() for item in value.split(";") if item.strip()] if isinstance(value, str) else value


PrefillWorkers = Annotated[
    tuple[Annotated[InstanceOf[WorkerSpec], BeforeValidator(_prefill)], ...], BeforeValidator(items)
]
DecodeWorkers = Annotated[
    tuple[Annotated[InstanceOf[WorkerSpec], BeforeValidator(_decode)], ...], BeforeValidator(items)
]
