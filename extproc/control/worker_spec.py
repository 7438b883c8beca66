"""The body of ``POST /workers``: read strictly, so that a typing error is an answer and not a surprise later."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from extproc.errors import InvalidUrlError
from extproc.workers.spec import HealthOverrides, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl

# Fields of the peer's WorkerSpec that would change what happens, and do not yet.
_NOT_YET = frozenset(
    {
        "kv_connector",
        "kv_role",
        "kv_engine_id",
        "kv_block_size",
        "dp_base_url",
        "dp_rank",
        "dp_size",
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

_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Port = Annotated[int, Field(ge=1, le=65535)]


class SpecError(ValueError):
    """The body is not a worker specification; the message names what is wrong."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Card(BaseModel):
    """A model card; what else it says is kept as it is."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: Annotated[str, Field(min_length=1)]


class _Health(_Strict):
    timeout_secs: _Seconds | None = None
    check_interval_secs: _Seconds | None = None
    success_threshold: _Positive | None = None
    failure_threshold: _Positive | None = None
    disable_health_check: bool | None = None
    drain_settle_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class _Body(_Strict):
    url: str
    worker_type: Literal["prefill", "decode", "regular", "encode"] = "regular"
    connection_mode: Literal["http"] = "http"
    runtime_type: Annotated[
        Literal["unspecified", "sglang"], Field(validation_alias=AliasChoices("runtime_type", "runtime"))
    ] = "unspecified"
    models: list[_Card] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=0, le=2**32 - 1)] = 50
    cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    api_key: Annotated[str, Field(pattern=r"^[\x20-\x7e]+$")] | None = None
    bootstrap_port: _Port | None = None
    max_connection_attempts: _Positive | None = None
    health: _Health = Field(default_factory=_Health)


def parse_worker_spec(body: bytes) -> WorkerSpec:
    """Read a ``POST /workers`` body. Raises SpecError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SpecError(f"JSON syntax error: {error}") from None
    if not isinstance(value, dict):
        raise SpecError("Invalid JSON data: expected an object")
    value = {name: given for name, given in value.items() if given is not None or name not in _NOT_YET}
    later = sorted(_NOT_YET & value.keys())
    if later:
        raise SpecError(f"Invalid JSON data: not supported yet: {', '.join(f'`{name}`' for name in later)}")
    try:
        return _spec(_Body.model_validate(value))
    except ValidationError as error:
        raise SpecError(f"Invalid JSON data: {'; '.join(_problem(item) for item in error.errors())}") from None
    except InvalidUrlError as error:
        raise SpecError(f"Invalid value for field 'url': not a url - {error.reason}") from None


def _spec(body: _Body) -> WorkerSpec:
    role = Role(body.worker_type)
    if role not in (Role.PREFILL, Role.DECODE):
        raise SpecError(
            f"Invalid JSON data: worker_type: `{role.value}` workers are not served here; "
            "expected one of `prefill`, `decode`"
        )
    return WorkerSpec(
        url=WorkerUrl.parse(body.url),
        role=role,
        cards=tuple(card.model_dump() for card in body.models),
        bootstrap_port=body.bootstrap_port,
        api_key=body.api_key,
        priority=body.priority,
        cost=body.cost,
        labels=body.labels,
        runtime=None if body.runtime_type == "unspecified" else body.runtime_type,
        health=HealthOverrides(**body.health.model_dump()),
    )


def _problem(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "missing":
            return f"missing field `{field}`"
        case "extra_forbidden":
            return f"unknown field `{field}`"
        case "literal_error":
            return f"{field}: unknown variant {item['input']!r}, expected one of {item['ctx']['expected']}"
    message = str(item["msg"])
    return f"{field}: {message.removeprefix('Input should be ').replace('a valid', 'expected a valid', 1)}"
