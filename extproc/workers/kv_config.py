"""What is said of a vLLM worker's KV connector, by fields of our own or by the engine's ``--kv-transfer-config``.

Source: vLLM 0.32, ``config/kv_transfer.py`` and ``kv_connector/v1/multi_connector.py``: a MultiConnector's children are
the list ``kv_connector_extra_config.connectors``, each a KVTransferConfig of its own, of which any may be another
MultiConnector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from extproc.workers.connectors import BY_FIELDS, MULTI, WITHOUT_FIELDS, canonical, refusal
from extproc.workers.worker import Role

KV_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
_NOTHING: Final = ("none", "null", "off", "false")
WRONG_WAY: Final = {(Role.PREFILL, "kv_consumer"), (Role.DECODE, "kv_producer")}


class KvConfigError(ValueError):
    """What is said of the connector contradicts itself or cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class KvConfig:
    """A worker's part in KV transfers; empty where nobody has said.

    Attributes:
        connector: the class that moves the cache, by its canonical name; never MultiConnector.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        engine_id: the engine's id, before vLLM appends a data-parallel rank.
        enforces_handshake: NIXL: it fetches from no engine that is configured otherwise (vLLM 0.32, ``nixl/base_worker
            .py``: ``kv_connector_extra_config.enforce_handshake_compat``).
    """

    connector: str = ""
    role: str = ""
    engine_id: str = ""
    enforces_handshake: bool = True

    def or_else(self, other: KvConfig) -> KvConfig:
        """These, and ``other``'s where nothing is said here."""
        return KvConfig(
            self.connector or other.connector,
            self.role or other.role,
            self.engine_id or other.engine_id,
            self.enforces_handshake and other.enforces_handshake,
        )


def kv_config(role: Role, said: KvConfig, transfer_config: object = None) -> KvConfig:
    """What a registration says of the connector of a worker of ``role``.

    ``said`` are the single fields; ``transfer_config`` is the value of ``--kv-transfer-config``, an object or its text.
    Raises KvConfigError.
    """
    if said.connector.strip().lower() in _NOTHING:
        raise KvConfigError(
            f"kv_connector {said.connector!r} is no connector's name: leave it out for an engine that has none"
        )
    connector = canonical(said.connector)
    engine = KvConfig() if transfer_config is None else _of_engine(transfer_config, connector)
    if connector == MULTI:
        if not engine.connector:
            raise KvConfigError(
                f"{MULTI} does not say which of its connectors moves the cache: give that one's name, or the engine's "
                "kv_transfer_config (a field of POST /workers, and of a worker's mapping in the YAML file)"
            )
        connector = ""
    found = KvConfig(
        _agreed("kv_connector", connector, engine.connector),
        _agreed("kv_role", said.role, engine.role),
        _agreed("kv_engine_id", said.engine_id, engine.engine_id),
        engine.enforces_handshake,
    )
    _refuse(found)
    if found.role and found.role not in KV_ROLES:
        raise KvConfigError(f"kv_role {found.role!r}: expected one of {', '.join(KV_ROLES)}")
    if (role, found.role) in WRONG_WAY:
        raise KvConfigError(f"registered as {role.value}, but kv_role is {found.role}")
    return found


def _agreed(name: str, said: str, engine: str) -> str:
    if said and engine and said != engine:
        raise KvConfigError(f"{name} is {said}, but kv_transfer_config says {engine}")
    return said or engine


def _refuse(kv: KvConfig) -> None:
    if reason := refusal(kv.connector):
        raise KvConfigError(reason)


def _of_engine(given: object, said: str) -> KvConfig:
    """Of several connectors the one that moves the cache; ``said`` is the name it was registered with, if any."""
    connectors = _connectors(_object(given))
    for one in connectors:
        _refuse(one)
    by_fields = [one for one in connectors if one.connector in BY_FIELDS]
    if len(by_fields) > 1:
        raise KvConfigError(
            f"{MULTI} wraps {_names(by_fields)}: every child gets the same kv_transfer_params and the engine fails "
            "when two of them return the same key; only one may be moved by request parameters"
        )
    if by_fields:
        return by_fields[0]
    unknown = [one for one in connectors if one.connector not in WITHOUT_FIELDS]
    if unknown and len(connectors) > 1:
        raise KvConfigError(
            f"{MULTI} wraps {_names(connectors)}: what {_names(unknown)} wants of requests is not known; register the "
            "connector that moves the cache by its name alone"
        )
    return next((one for one in connectors if one.connector == said), connectors[0])


def _connectors(config: Mapping[str, object]) -> list[KvConfig]:
    """The connector, or all that a MultiConnector comes down to, in their order; at least one."""
    found = []
    waiting = [(config, KvConfig())]
    while waiting:  # not by recursion: whoever registers chooses the depth
        one, parent = waiting.pop()
        own = KvConfig(
            canonical(_text(one, "kv_connector")), _text(one, "kv_role"), _text(one, "engine_id"), _enforces(one)
        )
        if not own.connector:
            raise KvConfigError("kv_transfer_config has no kv_connector")
        # A child is told its own role and id where it has them.
        own = own.or_else(parent)
        if own.connector == MULTI:
            inherited = KvConfig("", own.role, own.engine_id)
            waiting += [(child, inherited) for child in reversed(_children(one))]
        else:
            found.append(own)
    return found


def _children(multi: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    extra = multi.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    children = listed if isinstance(listed, list | tuple) else ()
    if not children or not all(isinstance(child, Mapping) and _text(child, "kv_connector") for child in children):
        raise KvConfigError(
            f"kv_transfer_config: {MULTI} has no kv_connector_extra_config.connectors with a kv_connector each"
        )
    return children


def _enforces(config: Mapping[str, object]) -> bool:
    extra = config.get("kv_connector_extra_config")
    return not isinstance(extra, Mapping) or extra.get("enforce_handshake_compat", True) is not False


def _names(connectors: Sequence[KvConfig]) -> str:
    return " and ".join(one.connector for one in connectors)


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
