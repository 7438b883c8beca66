"""The shapes of the control API's answers, as ``/openapi.json`` has them; tests compare each answer with its shape."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from extproc.workers.registration_body import Card, Health, HttpPool, Overload, Resilience

_Role = Literal["regular", "prefill", "decode", "encode"]


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetails(_Exact):
    """What went wrong."""

    type: str
    code: str = Field(description="also in the header x-pd-error-code")
    message: str
    param: str | None


class Error(_Exact):
    """An error, as on the inference paths."""

    error: ErrorDetails


class WorkerError(_Exact):
    """An error of /workers, in the peer's shape."""

    error: str
    code: str


class Ready(_Exact):
    """The gateway can serve."""

    status: Literal["ready"]
    healthy_workers: int
    total_workers: int


class NotReady(_Exact):
    """The gateway cannot serve."""

    status: Literal["not ready"]
    reason: str


class Model(_Open):
    """A model, as its worker lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["self_hosted"]


class ModelList(_Exact):
    """Every model, once."""

    object: Literal["list"]
    data: list[Model]


class Load(_Open):
    """What is under way on a worker, or one of its ranks; more where its engine tells it."""

    worker: str
    worker_type: _Role
    dp_rank: int
    gateway_reqs: int = 0
    gateway_prompt_tokens: int = 0
    envoy_reqs: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_total_reqs: int = 0


class LoadSum(_Exact):
    """Over all workers, by our own count and, as far as they say it, their engines'."""

    gateway_reqs: int
    gateway_prompt_tokens: int
    total_running_reqs: int = 0
    total_waiting_reqs: int = 0
    total_reqs: int = 0
    avg_token_usage: float = 0
    avg_throughput: float = 0
    avg_utilization: float = 0


class Loads(_Exact):
    """What is under way."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: LoadSum


class Job(_Exact):
    """What is being done with a worker."""

    job_type: Literal["AddWorker", "UpdateWorker", "RemoveWorker"]
    worker_url: str
    status: Literal["pending", "processing", "failed"]
    message: str | None
    timestamp: int = Field(description="Unix time")


class WorkerInfo(_Exact):
    """A worker: its registration, what it has said of itself, and how it is. What says nothing is left out."""

    id: str
    model_id: str = ""
    url: str
    models: list[Card] = []
    worker_type: _Role
    connection_mode: Literal["http", "grpc"]
    runtime_type: str
    labels: dict[str, str] = {}
    priority: int
    cost: float
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    kv_connector: str = ""
    kv_role: str = ""
    kv_engine_id: str = ""
    dp_base_url: str = Field(default="", description="of a data-parallel rank: the URL of its server")
    dp_rank: int = Field(default=0, description="of a data-parallel rank")
    dp_size: int = Field(default=0, description="of a data-parallel rank: how many its server has")
    max_connection_attempts: int
    load_monitor_interval_secs: float = 0
    health: Health = Health()
    resilience: Resilience = Resilience()
    overload: Overload = Overload()
    kv_block_size: int = 0
    http_pool: HttpPool = HttpPool()
    multimodal_tensor_transport: str = ""
    multimodal_shm_min_bytes: int = 0
    is_healthy: bool
    status: Literal["pending", "ready", "not_ready", "failed", "draining"]
    status_reason: str = ""
    load: int
    http2: bool
    pd_pairing: str = Field(default="", description="of prefill and decode workers")
    job_status: Job | None = Field(default=None, description="of one worker only, while there is a job")


class WorkerStats(_Exact):
    """How many of each role; encode workers are in ``total`` only, as with the peer."""

    prefill_count: int
    decode_count: int
    regular_count: int


class WorkerList(_Exact):
    """Workers."""

    workers: list[WorkerInfo]
    total: int
    stats: WorkerStats


class Accepted(_Exact):
    """It will be done; GET the worker to see whether it is."""

    status: Literal["accepted"]
    worker_id: str
    message: str
    url: str = Field(default="", description="of a new worker")
    location: str = Field(default="", description="of a new worker")
    warnings: list[str] = Field(default=[], description="what was given and changes nothing")


class Unwilling(_Exact):
    """A worker that did not do it."""

    worker: str
    error: str


class _Summary(_Exact):
    status: Literal["success", "partial_success"]
    message: str
    total_http_workers: int
    total_grpc_workers: int
    total_zmq_workers_skipped: int
    total_workers: int
    successful: list[str]
    failed: list[Unwilling]


class Flushed(_Summary):
    """Who has flushed its cache."""

    workers_flushed: int


class ProfileStarted(_Summary):
    """Who has started its profiler."""

    workers_started: int


class ProfileStopped(_Summary):
    """Who has stopped its profiler."""

    workers_stopped: int


class Generated(_Exact):
    """A pair has answered."""

    status: Literal["ok"]
    model: str = ""
    prefill: str
    decode: str
    handoff: str
    kv: str
    attempts: int
    duration_ms: float


class PassedOn(_Open):
    """A worker's own words: they are passed on, less secrets."""


class Anything(_Open):
    """What is passed on to the workers."""


class Document(_Open):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]


class Tokenizer(_Exact):
    """A tokenizer that is there."""

    id: str
    name: str
    source: str
    vocab_size: int


class TokenizerList(_Exact):
    """All that are there."""

    tokenizers: list[Tokenizer]


class TokenizerProgress(_Exact):
    """How a tokenizer is, in the peer's words."""

    id: str
    status: Literal["pending", "processing", "completed", "failed"]
    message: str
    vocab_size: int | None = None


class TokenizerRemoved(_Exact):
    """Whether it was there."""

    success: bool
    message: str
