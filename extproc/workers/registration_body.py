"""The fields of a registration as JSON has them: what ``POST`` and ``PUT /workers`` read, and ``PATCH``.

``/openapi.json`` is made from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model

from extproc.workers.ranks import MOST_RANKS

_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_Port = Annotated[int, Field(ge=1, le=65535)]
_Count = Annotated[int, Field(ge=0)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Host = Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?)$")]
_Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Status = Annotated[int, Field(ge=400, le=599)]


class Strict(BaseModel):
    """Nothing is converted, and nothing unknown is let pass."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Card(BaseModel):
    """A model card; what else it says is kept as it is."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: _Text


class Health(Strict):
    """Overrides of the ``--health-*`` options for one worker."""

    timeout_secs: _Seconds | None = None
    check_interval_secs: _Seconds | None = None
    success_threshold: _Positive | None = None
    failure_threshold: _Positive | None = None
    disable_health_check: bool | None = None
    drain_settle_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class Resilience(Strict):
    """Overrides of the ``--cb-*`` options for one worker. What is about retries is of no effect."""

    cb_failure_threshold: _Positive | None = None
    cb_success_threshold: _Positive | None = None
    cb_timeout_secs: _Seconds | None = None
    cb_window_secs: _Seconds | None = None
    disable_circuit_breaker: bool | None = None
    capacity_status_codes: list[_Status] | None = Field(
        default=None, description="answers that say that the worker is full, not that it is broken"
    )
    max_retries: _Count | None = None
    initial_backoff_ms: _Count | None = None
    max_backoff_ms: _Count | None = None
    backoff_multiplier: _Amount | None = None
    jitter_factor: _Amount | None = None
    disable_retry: bool | None = None
    retryable_status_codes: list[Annotated[int, Field(ge=100, le=599)]] | None = None


class HttpPool(Strict):
    """The peer's connections to one worker; of no effect."""

    pool_max_idle_per_host: _Count | None = None
    pool_idle_timeout_secs: _Amount | None = None
    timeout_secs: _Amount | None = None
    connect_timeout_secs: _Amount | None = None


class Overload(Strict):
    """When one worker counts as overloaded."""

    waiting_requests: _Positive | None = None
    token_usage: _Share | None = Field(default=None, description="share of the KV cache that is in use")


# For readers of the schema; WorkerUrl.parse says more precisely what is wrong.
_URL = r"^(https?|grpcs?)://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?$"


class Body(Strict):
    """A registration."""

    url: Annotated[str, Field(examples=["http://prefill:8000"], json_schema_extra={"pattern": _URL})]
    worker_type: Annotated[
        Literal["prefill", "decode", "regular", "encode"],
        Field(description="regular and encode workers are looked after, but given no requests"),
    ]
    connection_mode: Annotated[
        Literal["http", "grpc"] | None, Field(description="as the URL's scheme says; another one is refused")
    ] = None
    runtime_type: Annotated[
        Literal["unspecified", "sglang", "vllm", "tokenspeed"],
        Field(validation_alias=AliasChoices("runtime_type", "runtime")),
    ] = "unspecified"
    models: list[Card] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=0, le=2**32 - 1)] = 50
    cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    api_key: Annotated[str, Field(pattern=r"^[\x20-\x7e]+$", description="never in an answer")] | None = None
    bootstrap_host: Annotated[_Host, Field(description="of the bootstrap server, if not the URL's")] | None = None
    bootstrap_port: _Port | None = None
    kv_connector: _Text | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_engine_id: _Text | None = None
    kv_transfer_config: dict[str, Any] | str | None = Field(
        default=None, description="the value of the engine's --kv-transfer-config, as an object or as text"
    )
    dp_size: Annotated[int, Field(ge=1, le=MOST_RANKS, description="data-parallel ranks; as the label")] | None = None
    kv_block_size: (
        Annotated[
            _Positive, Field(description="tokens of a KV cache block, where neither labels nor the engine say it")
        ]
        | None
    ) = None
    max_connection_attempts: _Positive | None = None
    health: Health = Field(default_factory=Health)
    resilience: Resilience = Field(default_factory=Resilience)
    overload: Overload = Field(default_factory=Overload)
    load_monitor_interval_secs: _Seconds | None = None
    http_pool: HttpPool | None = None
    multimodal_tensor_transport: (
        Annotated[Literal["inline", "shm", "auto", "rdma"], Field(description="of no effect")] | None
    ) = None
    multimodal_shm_min_bytes: Annotated[_Count, Field(description="of no effect")] | None = None


# What a worker is known by.
FIXED = ("url", "worker_type")
# Objects whose members a PATCH changes one by one.
MERGED = ("labels", "health", "resilience", "overload", "http_pool")


def _optional() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in Body.model_fields.items():
        if name in FIXED:
            continue
        kind: Any = dict[str, str | None] if name == "labels" else field.annotation
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        alias = field.validation_alias
        fields[name] = (kind | None, Field(default=None, description=field.description, validation_alias=alias))
    return fields


Patch: type[Strict] = create_model(
    "Patch",
    __base__=Strict,
    __doc__="What is to be other; null takes a field back to its default. Labels, health and the like are merged.",
    **_optional(),
)
