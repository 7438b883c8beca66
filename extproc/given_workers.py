"""Workers given at start, by flag, variable or YAML file.

Messages are those of ``smg launch`` where it has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import BeforeValidator

from extproc.workers.kv_config import KvConfig, kv_config
from extproc.workers.spec import RUNTIMES
from extproc.workers.worker import Role, WorkerUrl

_KEYS: Final = ("url", "bootstrap_port", "kv_connector", "kv_role", "kv_engine_id", "kv_transfer_config", "runtime")


@dataclass(frozen=True, slots=True)
class GivenWorker:
    """What is said of a worker at start; the rest is learnt from it.

    Attributes:
        url: its base URL.
        bootstrap_port: the port of its bootstrap server, None where it has none or the usual one.
        kv: its KV connector (vLLM).
        runtime: the engine, None: find out.
    """

    url: WorkerUrl
    bootstrap_port: int | None = None
    kv: KvConfig = field(default_factory=KvConfig)
    runtime: str | None = None


def _prefill(value: object) -> object:
    if isinstance(value, str):
        url, *ports = value.split() or [""]
        if len(ports) > 1:
            raise ValueError(f"{value!r}: expected URL [PORT|none]")
        return GivenWorker(WorkerUrl.parse(url), _bootstrap_port(ports[0]) if ports else None)
    return _from_mapping(value, Role.PREFILL, "URL [PORT|none]")


def _decode(value: object) -> object:
    if isinstance(value, str):
        return GivenWorker(WorkerUrl.parse(value))
    return _from_mapping(value, Role.DECODE, "a URL")


def _from_mapping(value: object, role: Role, text: str) -> object:
    if isinstance(value, GivenWorker):
        return value
    if not isinstance(value, Mapping) or "url" not in value or not value.keys() <= set(_KEYS):
        raise ValueError(f"expected {text}, or a mapping with url and some of {', '.join(_KEYS[1:])}")
    port = value.get("bootstrap_port")
    runtime = value.get("runtime")
    if runtime is not None and runtime not in RUNTIMES:
        raise ValueError(f"runtime {runtime}: expected one of {', '.join(RUNTIMES)}")
    said = KvConfig(_text(value, "kv_connector"), _text(value, "kv_role"), _text(value, "kv_engine_id"))
    return GivenWorker(
        WorkerUrl.parse(str(value["url"])),
        None if port is None else _bootstrap_port(str(port)),
        kv_config(role, said, value.get("kv_transfer_config")),
        runtime,
    )


def _text(value: Mapping[str, object], key: str) -> str:
    text = value.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected text")
    return text


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


PrefillWorkers = Annotated[tuple[Annotated[GivenWorker, BeforeValidator(_prefill)], ...], BeforeValidator(items)]
DecodeWorkers = Annotated[tuple[Annotated[GivenWorker, BeforeValidator(_decode)], ...], BeforeValidator(items)]
