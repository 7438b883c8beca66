"""What is said of a vLLM worker's KV connector, by fields of our own or by the engine's ``--kv-transfer-config``.

Source: vLLM 0.32, ``config/kv_transfer.py`` and ``kv_connector/v1/multi_connector.py``: a MultiConnector's children are
the list ``kv_connector_extra_config.connectors``, each a KVTransferConfig of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from extproc.workers.worker import MOONCAKE, NIXL, Role

MULTI: Final = "MultiConnector"
KV_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
# The newer name of the same connector.
_SAME_AS: Final = {"NixlPullConnector": NIXL}
_BY_PARAMETERS: Final = (NIXL, MOONCAKE)
_WRONG_WAY: Final = {(Role.PREFILL, "kv_consumer"), (Role.DECODE, "kv_producer")}


class KvConfigError(ValueError):
    """What is said of the connector contradicts itself or cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class KvConfig:
    """A worker's part in KV transfers; empty where nobody has said.

    Attributes:
        connector: the class that moves the cache; never MultiConnector.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        engine_id: the engine's id, before vLLM appends a data-parallel rank.
    """

    connector: str = ""
    role: str = ""
    engine_id: str = ""

    def or_else(self, other: KvConfig) -> KvConfig:
        """These, and ``other``'s where nothing is said here."""
        return KvConfig(self.connector or other.connector, self.role or other.role, self.engine_id or other.engine_id)


def kv_config(role: Role, said: KvConfig, transfer_config: object = None) -> KvConfig:
    """What a registration says of the connector of a worker of ``role``.

    ``said`` are the single fields; ``transfer_config`` is the value of ``--kv-transfer-config``, an object or its text.
    Raises KvConfigError.
    """
    engine = KvConfig() if transfer_config is None else _of_engine(transfer_config)
    connector = said.connector
    if connector == MULTI:
        if not engine.connector:
            raise KvConfigError(
                f"{MULTI} does not say which of its connectors moves the cache: register that one's name, "
                "or give the engine's kv_transfer_config"
            )
        connector = ""
    found = KvConfig(
        _agreed("kv_connector", _SAME_AS.get(connector, connector), engine.connector),
        _agreed("kv_role", said.role, engine.role),
        _agreed("kv_engine_id", said.engine_id, engine.engine_id),
    )
    if found.role and found.role not in KV_ROLES:
        raise KvConfigError(f"kv_role {found.role!r}: expected one of {', '.join(KV_ROLES)}")
    if (role, found.role) in _WRONG_WAY:
        raise KvConfigError(f"registered as {role.value}, but kv_role is {found.role}")
    return found


def _agreed(name: str, said: str, engine: str) -> str:
    if said and engine and said != engine:
        raise KvConfigError(f"{name} is {said}, but kv_transfer_config says {engine}")
    return said or engine


def _of_engine(given: object) -> KvConfig:
    config = _object(given)
    connector = _text(config, "kv_connector")
    if not connector:
        raise KvConfigError("kv_transfer_config has no kv_connector")
    if connector != MULTI:
        return KvConfig(_SAME_AS.get(connector, connector), _text(config, "kv_role"), _text(config, "engine_id"))
    child = _child(config)
    name = _text(child, "kv_connector")
    # The child is told its own role where it has one; only the parent's id is extended by a rank.
    return KvConfig(
        _SAME_AS.get(name, name),
        _text(child, "kv_role") or _text(config, "kv_role"),
        _text(child, "engine_id") or _text(config, "engine_id"),
    )


def _child(config: Mapping[str, object]) -> Mapping[str, object]:
    """The one child whose transfer is steered by a request's ``kv_transfer_params``; without such, the first."""
    extra = config.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    children = [child for child in listed if isinstance(child, Mapping)] if isinstance(listed, Sequence) else []
    names = [_text(child, "kv_connector") for child in children]
    if not children or not all(names):
        raise KvConfigError(
            f"kv_transfer_config: {MULTI} has no kv_connector_extra_config.connectors with a kv_connector each"
        )
    steered = [child for child, name in zip(children, names, strict=True) if _SAME_AS.get(name, name) in _BY_PARAMETERS]
    if len(steered) > 1:
        both = " and ".join(_text(child, "kv_connector") for child in steered)
        raise KvConfigError(
            f"{MULTI} wraps {both}: every child gets the same kv_transfer_params and the engine fails when two of them "
            "return the same key; only one may be moved by request parameters"
        )
    return (steered or children)[0]


def _object(given: object) -> Mapping[str, object]:
    value = given
    if isinstance(given, str):
        try:
            value = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise KvConfigError(f"kv_transfer_config: not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise KvConfigError("kv_transfer_config: expected an object or its JSON text")
    return value


def _text(config: Mapping[str, object], name: str) -> str:
    value = config.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise KvConfigError(f"kv_transfer_config: {name} is not a string")
    return value
