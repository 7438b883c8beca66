"""A worker's registration, by ``POST /workers`` or in the YAML file: read strictly.

So a typing error is an answer and not a surprise later.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from extproc.workers.kv_config import KvConfig, KvConfigError, kv_config
from extproc.workers.ranks import MOST_RANKS
from extproc.workers.spec import HealthOverrides, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl

# Fields of the peer's WorkerSpec that would change what happens, and do not yet.
_NOT_YET = frozenset(
    {
        "kv_block_size",
        "dp_base_url",
        "dp_rank",
        "http_pool",
        "resilience",
        "overload",
        "load_monitor_interval_secs",
        "multimodal_tensor_transport",
        "multimodal_shm_min_bytes",
        "provider",
        "zmq_handshake_address",
    }
)

_OTHER_ROLES = ("regular", "encode")  # the peer's, which serves them

# Labels that mean the field of the same name, as with the peer, for registrars that know labels only.
_LIFTED = ("kv_connector", "kv_role", "kv_engine_id", "bootstrap_port")

_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_Port = Annotated[int, Field(ge=1, le=65535)]


class RegistrationError(ValueError):
    """Such a worker cannot be served; the message says why."""


class FormError(RegistrationError):
    """A field is missing, unknown or of the wrong type; the message names it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Card(BaseModel):
    """A model card; what else it says is kept as it is."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: _Text


class _Health(_Strict):
    timeout_secs: _Seconds | None = None
    check_interval_secs: _Seconds | None = None
    success_threshold: _Positive | None = None
    failure_threshold: _Positive | None = None
    disable_health_check: bool | None = None
    drain_settle_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class _Body(_Strict):
    url: str
    worker_type: Literal["prefill", "decode"]
    connection_mode: Literal["http"] = "http"
    runtime_type: Annotated[
        Literal["unspecified", "sglang", "vllm"], Field(validation_alias=AliasChoices("runtime_type", "runtime"))
    ] = "unspecified"
    models: list[_Card] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=0, le=2**32 - 1)] = 50
    cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    api_key: Annotated[str, Field(pattern=r"^[\x20-\x7e]+$")] | None = None
    bootstrap_port: _Port | None = None
    kv_connector: _Text | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_engine_id: _Text | None = None
    # Ours: the value of the engine's --kv-transfer-config, as an object or as text.
    kv_transfer_config: dict[str, Any] | str | None = None
    dp_size: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None  # the label of this name
    max_connection_attempts: _Positive | None = None
    health: _Health = Field(default_factory=_Health)


def registration(value: Mapping[str, Any]) -> WorkerSpec:
    """What a registration's fields say. Raises InvalidUrlError, FormError, RegistrationError."""
    value = {name: given for name, given in value.items() if given is not None or name not in _NOT_YET}
    role = value.get("worker_type")
    if role in _OTHER_ROLES:
        raise RegistrationError(f"worker_type: `{role}` workers are not served here; expected `prefill` or `decode`")
    if later := sorted(_NOT_YET & value.keys()):
        raise RegistrationError(f"not supported yet: {', '.join(f'`{name}`' for name in later)}")
    try:
        return _spec(_Body.model_validate(_lifted(value)))
    except ValidationError as error:
        raise FormError("; ".join(_problem(item) for item in error.errors())) from None
    except KvConfigError as error:
        raise RegistrationError(str(error)) from None


def _lifted(value: dict[str, Any]) -> dict[str, Any]:
    """The body with what its labels say of fields in the fields; a field of its own wins."""
    labels = value.get("labels")
    if not isinstance(labels, dict):
        return value
    found = {name: labels[name] for name in _LIFTED if isinstance(labels.get(name), str)}
    rest = {name: label for name, label in labels.items() if name not in found}
    port = found.get("bootstrap_port", "")
    if port.isascii() and port.isdigit() and len(port) < 6:
        found["bootstrap_port"] = int(port)
    given = {name: field for name, field in value.items() if field is not None or name not in found}
    return {**found, **given, "labels": rest}


def _spec(body: _Body) -> WorkerSpec:
    role = Role(body.worker_type)
    said = KvConfig(body.kv_connector or "", body.kv_role or "", body.kv_engine_id or "")
    kv = kv_config(role, said, body.kv_transfer_config)
    if kv.connector and body.runtime_type == "sglang":
        raise RegistrationError(f"kv_connector {kv.connector}: SGLang workers have none")
    return WorkerSpec(
        url=WorkerUrl.parse(body.url),
        role=role,
        cards=tuple(card.model_dump() for card in body.models),
        bootstrap_port=body.bootstrap_port,
        api_key=body.api_key,
        priority=body.priority,
        cost=body.cost,
        labels=body.labels if body.dp_size is None else {**body.labels, "dp_size": str(body.dp_size)},
        runtime=None if body.runtime_type == "unspecified" else body.runtime_type,
        kv=kv,
        engine_id_named=bool(said.engine_id),
        health=HealthOverrides(**body.health.model_dump()),
    )


def _problem(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "missing" if field == "worker_type":
            return "missing field `worker_type`: expected `prefill` or `decode`"
        case "missing":
            return f"missing field `{field}`"
        case "extra_forbidden":
            return f"unknown field `{field}`{_nearest(item['loc'])}"
        case "literal_error":
            return f"{field}: unknown variant {item['input']!r}, expected one of {item['ctx']['expected']}"
    message = str(item["msg"])
    return f"{field}: {message.removeprefix('Input should be ').replace('a valid', 'expected a valid', 1)}"


def _nearest(loc: tuple[str | int, ...]) -> str:
    known = [*(_Health if loc[0] == "health" else _Body).model_fields, *_NOT_YET]
    matches = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean `{matches[0]}`?" if matches else ""
