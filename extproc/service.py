"""Builds the parts, starts, drains and stops them. Nothing else knows everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from extproc import run_dir
from extproc.admission.room import Rooms
from extproc.admission_settings import gate_settings, leg_settings, tenants
from extproc.control.api import ControlApi
from extproc.control.auth import Access
from extproc.control.discovery_metrics import DiscoveryMetrics
from extproc.control.metrics import Metrics
from extproc.control.metrics_server import MetricsServer
from extproc.control.worker_metrics import WorkerMetrics
from extproc.dataplane.admin import EnvoyAdmin
from extproc.dataplane.ads import AdsServer
from extproc.dataplane.hosts import HostWatch
from extproc.dataplane.process import EnvoyNotFoundError, EnvoyProcess, EnvoyStartError
from extproc.discovery.discovery import Discovery
from extproc.discovery.errors import DiscoveryError
from extproc.egress import egress_of
from extproc.envoy_config import control_target, dataplane_config, egress_target
from extproc.errors import GatewayError
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import Handle
from extproc.exchange.gateway import Gateway, GatewayConfig
from extproc.exchange.rpc import Rpc
from extproc.exchange.session import Session
from extproc.handoff.grpc_table import RpcHandoffs
from extproc.handoff.table import Handoffs
from extproc.lone_decodes import LoneDecodeWarnings
from extproc.observe import Observers, RequestLog, RequestMetrics
from extproc.openness import warn_of_openness
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.event_prefixes import EventPrefixes
from extproc.policies.placement import Placer
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.settings import Destination, GrpcTransport, LegsMode, MooncakeDispatch, Settings
from extproc.texts import TextParts
from extproc.transport.access_logs import AccessLogs
from extproc.transport.grpcio_server import GrpcioProcessServer
from extproc.transport.interface import Call, ProcessServer
from extproc.transport.ngh2_server import Ngh2ProcessServer
from extproc.trying import try_pair
from extproc.values import EGRESS_ENVOY, EVENTS_AUTO, EVENTS_OFF
from extproc.workers.breaker import BreakerSettings
from extproc.workers.client import WorkerClient
from extproc.workers.endpoints import Snapshot
from extproc.workers.envoy_load import EnvoyLoadMonitor
from extproc.workers.health import Monitor
from extproc.workers.health_state import HealthSettings
from extproc.workers.kv_config import KvConfig
from extproc.workers.kv_event_source import Common, Endpoint
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.overload import USAGE, WAITING, OverloadSettings
from extproc.workers.registry import Change, Registry
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, Status, Worker

if TYPE_CHECKING:
    from extproc.workers.kv_event_feed import KvEventFeed

_log: Final = logging.getLogger(__name__)
_LIVENESS_SERVICES: Final = ("", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor")
_GONE: Final = (Status.NOT_READY, Status.FAILED)
_TICK_SECONDS: Final = 1.0
_LAST_WORDS_SECONDS: Final = 2.0  # for what is cut to hear of it, and for Envoy to pass it on


class LoopClock:
    """Monotonic time, and the running event loop's timers (whose own time has milliseconds only, under uvloop)."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self._later = asyncio.get_running_loop().call_later

    def after(self, seconds: float, callback: Callable[[], None]) -> Handle:
        """See Clock."""
        return self._later(seconds, callback)


class Service:
    """One gateway: the sidecar, and Envoy unless it runs elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.started = asyncio.Event()  # everything serves
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ticking: asyncio.Task[None]
        self._settle = False
        self._envoy: EnvoyProcess | None = None
        tls = None if settings.worker_ca_file is None else ssl.create_default_context(cafile=settings.worker_ca_file)
        self._client = WorkerClient(tls)
        self._ads = AdsServer(settings.ads_address)
        self.registry = Registry(
            self._publish,
            drain_limit=settings.worker_drain_timeout_secs,
            pairing=settings.pd_pairing_mode,
            breaker=_breaker(settings),
            overload=_overload(settings),
            dp_aware=settings.dp_aware,
        )
        self._monitor = Monitor(
            self.registry, self._client, settings=_health(settings), token_reuse=settings.token_reuse
        )
        self.text = TextParts(settings, self.registry, self._client)
        source = settings.source(settings.api_key)
        self._discovery = None if source is None else Discovery(self.registry, source)
        self._control = ControlApi(
            self.registry,
            self._client,
            settings.control_address,
            access=Access(settings.api_key, settings.control_plane_api_keys, open=settings.control_plane_open),
            request_id_headers=settings.request_id_headers,
            model_aliases=dict(settings.model_alias),
            try_pair=lambda model, within: try_pair(self.gateway, model, within),
            tokenizers=self.text.library,
            discovery=None if self._discovery is None else self._discovery.state,
        )
        metrics = Metrics()
        WorkerMetrics(self.registry, metrics)
        if self._discovery is not None:
            DiscoveryMetrics(self._discovery.state, metrics)
        request_metrics = RequestMetrics(metrics)
        self._metrics = MetricsServer(metrics, settings.prometheus_host, settings.prometheus_port)
        self._egress = egress_of(settings)
        # What workers hold by their KV events; a policy's exact index (policies.cache_aware.CachedPrefixes).
        self.prefixes = _event_prefixes(settings, self._cache_emptied)
        self.gateway = Gateway(
            _gateway_config(settings),
            self._placer(),
            Handoffs(mooncake_in_turn=settings.mooncake_dispatch is MooncakeDispatch.SEQUENTIAL),
            self._egress,
            LoopClock(),
            Observers(RequestLog(), request_metrics),
            self._monitor.report_unreachable,
            self._monitor.report_failure,
            self._monitor.report_doubt,
        )
        rpc_handoffs = RpcHandoffs(mooncake_in_turn=settings.mooncake_dispatch is MooncakeDispatch.SEQUENTIAL)
        self.gateway.rpc = Rpc(self.text.texts, self.text.endpoints, rpc_handoffs, time.time)
        request_metrics.watch(self.gateway)
        self._kv_events = None if self.prefixes is None else self._event_feed(self.prefixes, metrics)
        self._rooms = Rooms(self.gateway.config.legs.prefill_limit, self.gateway.legs.freed)
        self._access_logs = AccessLogs(self.gateway.progress.received)
        self._server = self._process_server()
        self.registry.subscribe(self._on_change)
        if self.gateway.conditional is not None:
            LoneDecodeWarnings(self.registry, self.gateway.handoffs, _conditions(settings))

    def _process_server(self) -> ProcessServer:
        methods = self._access_logs.methods
        if self._settings.grpc_transport is not GrpcTransport.NGH2:
            return GrpcioProcessServer(others=methods)  # which speaks gRPC only: nothing can be fetched from it
        # An Envoy of somebody else has no way to fetch them: see DataplaneConfig.fetched_answers.
        self.gateway.fetches = self._settings.egress == EGRESS_ENVOY
        return Ngh2ProcessServer(others=methods, answers=self.gateway.fetch)

    def _placer(self) -> Placer:
        settings = self._settings
        tuning, cache = Tuning.of(settings), CacheAwareSettings.of(settings)
        prefill, decode = (
            policy_of(name, tuning, time.monotonic, role, cache, self.prefixes)
            for name, role in ((settings.prefill_policy, Role.PREFILL), (settings.decode_policy, Role.DECODE))
        )
        return Placer(self.registry, prefill, decode)

    @property
    def metrics_port(self) -> int:
        """Where Prometheus connects; known once the service runs."""
        return self._metrics.port

    @property
    def client_address(self) -> tuple[str, int]:
        """Where clients connect; known once Envoy runs."""
        return self._envoy.client_address if self._envoy else (self._settings.host, self._settings.port)

    def stop(self, *, settle: bool = False) -> None:
        """Begin to stop in order; a second call skips what is left of the grace period.

        ``settle``: first say for a while that we are not ready, so that whoever balances load in front can turn away.
        """
        if self._stopping.is_set():
            self._hurry.set()
        self._settle = settle
        self._stopping.set()

    async def run(self) -> int:
        """Serve until :meth:`stop` or Envoy's death; 0, or Envoy's status.

        Raises OSError, EnvoyNotFoundError, EnvoyStartError or DiscoveryError when something cannot be started.
        """
        async with AsyncExitStack() as stack:
            await self._start(stack)
            stack.enter_context(run_dir.announced(self._settings.run_dir, control_target(self._settings)))
            self.started.set()
            return await self._serve()

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        egress = egress_target(settings)
        if self._discovery is not None:
            await self._discovery.prepare()
        others = settings.no_envoy and settings.egress == EGRESS_ENVOY
        foreign = Path(egress) if others and isinstance(egress, str) else None
        stack.enter_context(run_dir.held(settings.run_dir, foreign=foreign))
        stack.push_async_callback(self._client.close)
        stack.push_async_callback(self.text.stop)
        stack.push_async_callback(self.registry.close)
        await self._ads.start()
        stack.push_async_callback(self._ads.stop)
        await self._control.start()
        stack.push_async_callback(self._control.stop)
        try:
            await self._metrics.start()
        except OSError as error:
            where = f"{settings.prometheus_host}:{settings.prometheus_port} (--prometheus-port)"
            why = os.strerror(error.errno) if error.errno else error
            raise OSError(f"metrics cannot be served on {where}: {why}") from None
        stack.push_async_callback(self._metrics.stop)
        await self._server.start(settings.extproc_address, self._session)
        stack.push_async_callback(self._server.drain, 0)
        stack.callback(self._access_logs.end)
        for name in _LIVENESS_SERVICES:
            self._server.set_serving(name, serving=True)
        stack.push_async_callback(self._egress.stop)
        self._egress.start()
        if not settings.no_envoy:
            path = None if settings.envoy_path is None else str(settings.envoy_path)
            self._envoy = EnvoyProcess(dataplane_config(settings), path, settings.log_level.value)
            stack.push_async_callback(self._envoy.stop, 0)
            await self._envoy.start()
        for spec in _given(settings):
            self.registry.add(spec)
        if not len(self.registry) and self._discovery is None:
            _log.info("no workers yet: register them with POST /workers")
        self._monitor.start()
        stack.push_async_callback(self._monitor.stop)
        if not settings.disable_load_monitoring:
            self._monitor_load(stack)
        if self._kv_events is not None:
            self._kv_events.start()
            stack.callback(self._kv_events.stop)
        self._look_at_hosts(stack)
        if self._discovery is not None:
            self._discovery.start()
            stack.push_async_callback(self._discovery.stop)
        self._ticking = asyncio.create_task(self._tick(), name="deadlines")
        stack.callback(self._ticking.cancel)
        warn_of_openness(settings)
        host, port = self.client_address
        _log.info("serving", extra={"address": f"{host}:{port}", "sidecar": settings.extproc_address})

    async def _publish(self, snapshot: Snapshot) -> None:
        """Tell of the workers whoever connects to them: ourselves first, since requests follow Envoy's word."""
        self._egress.publish(snapshot)
        await self._ads.publish(snapshot)

    def _event_feed(self, prefixes: EventPrefixes, metrics: Metrics) -> KvEventFeed:
        """What follows workers' KV events. ZeroMQ is loaded for that only."""
        from extproc.control.kv_event_metrics import KvEventMetrics  # noqa: PLC0415
        from extproc.workers.kv_event_feed import KvEventFeed  # noqa: PLC0415

        settings = self._settings
        common = Common()
        if settings.kv_event_source != EVENTS_AUTO:
            replay = settings.kv_event_replay
            common = Common(
                Endpoint.parse(settings.kv_event_source), None if replay is None else Endpoint.parse(replay)
            )
        feed = KvEventFeed(self.registry, prefixes, common)
        KvEventMetrics(self.registry, feed, prefixes, metrics)
        return feed

    def _monitor_load(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        engines = LoadMonitor(
            self.registry, self._client, settings.load_monitor_interval, told=self._rooms.engine_spoke
        )
        engines.start()
        stack.push_async_callback(engines.stop)
        admin = self._envoy_admin(stack)
        if admin is not None:
            envoy = EnvoyLoadMonitor(
                self.registry, admin.active_requests, settings.load_monitor_interval, told=self._rooms.envoy_spoke
            )
            envoy.start()
            stack.push_async_callback(envoy.stop)

    def _look_at_hosts(self, stack: AsyncExitStack) -> None:
        """Have Envoy's troubles with workers looked at, where its admin interface is known."""
        interval = self._settings.envoy_hosts_interval_secs
        admin = self._envoy_admin(stack) if interval else None
        if admin is not None:
            hosts = HostWatch(admin, self.registry, self._monitor.look_again, interval)
            hosts.start()
            stack.push_async_callback(hosts.stop)

    def _envoy_admin(self, stack: AsyncExitStack) -> EnvoyAdmin | None:
        """Envoy's admin interface, ours or another's; None where nobody has said where it is."""
        if self._envoy is not None:
            return self._envoy.admin
        if self._settings.envoy_admin_address is None:
            return None
        admin = EnvoyAdmin.at(self._settings.envoy_admin_address)
        stack.push_async_callback(admin.close)
        return admin

    def _on_change(self, worker: Worker, change: Change) -> None:
        if change in (Change.ADDED, Change.REMOVED) and self.gateway.rpc is not None:
            self.gateway.rpc.workers = frozenset(each for each in self.registry if each.url.is_grpc)
            self.gateway.rpc.others = frozenset(self.registry) - self.gateway.rpc.workers
        gone = change is Change.RESTARTED or (change is Change.STATUS and worker.status in _GONE)
        if gone and worker.role is Role.PREFILL:
            self.gateway.prefill_lost(worker)
        if gone or change is Change.REMOVED:
            self.gateway.placer.forget(worker)
        if change is Change.REMOVED:
            self._rooms.forget(worker)
        else:
            self._rooms.watch(worker)
        self.gateway.legs.look_soon()

    def _cache_emptied(self, worker: Worker) -> None:
        self.gateway.placer.forget(worker)

    def _session(self, call: Call) -> Session:
        return Session(self.gateway, call)

    async def _tick(self) -> None:
        ready: bool | None = None
        while True:
            self.gateway.expire()
            now_ready = self.registry.readiness().ready and not self.gateway.draining
            if now_ready is not ready:
                ready = now_ready
                self._server.set_serving("readiness", serving=ready)
            await asyncio.sleep(_TICK_SECONDS)

    async def _serve(self) -> int:
        stopping = asyncio.create_task(self._stopping.wait())
        waits: set[asyncio.Task[object]] = {stopping, self._ticking}
        death: asyncio.Task[int] | None = None
        if self._envoy is not None:
            death = asyncio.create_task(self._envoy.wait())
            waits.add(death)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if death is not None and death.done():
            status = death.result()
            stopping.cancel()
            _log.error("Envoy ended by itself with status %d", status)
            return status if status > 0 else 128 - status if status < 0 else 1
        if self._ticking.done():
            _log.error("deadlines are no longer looked at", exc_info=self._ticking.exception())
            stopping.cancel()
            return 1
        await self._drain()
        if death is not None:
            death.cancel()
        return 0

    async def _drain(self) -> None:
        """No new requests; those under way end within the grace period, or sooner at a second signal."""
        grace = self._settings.shutdown_grace_period_secs
        _log.info("stopping", extra={"in_flight": self.gateway.alive, "grace_s": float(grace)})
        self._control.set_draining()
        if self._settle:
            await self._unless_hurried(asyncio.sleep(self._settings.drain_settle_secs))
        self.gateway.drain()
        if self._envoy is not None:
            await self._envoy.begin_draining()
        await self._unless_hurried(self._until_idle(grace))
        if self.gateway.alive:
            _log.warning("ending %d requests that are still under way", self.gateway.alive)
            self.gateway.end_all(GatewayError("draining", "the gateway is stopping", retry_after=1))
            await self._until_idle(_LAST_WORDS_SECONDS)
        if self._envoy is not None:
            await self._envoy.stop(_LAST_WORDS_SECONDS)

    async def _unless_hurried(self, work: Coroutine[None, None, None]) -> None:
        working = asyncio.create_task(work)
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({working, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, hurry):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working

    async def _until_idle(self, limit: float) -> None:
        """Return when no request is under way, or ``limit`` seconds have passed."""
        if self.gateway.alive:
            idle = asyncio.Event()
            self.gateway.on_idle = idle.set
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), limit)


def _spare_the_collector() -> None:
    """Let the garbage collector leave alone what start-up made, and come less often.

    A request leaves no cycles behind, so there is little to find; by default it would still look at some 5 % of the
    sidecar's time (measured).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def run(settings: Settings) -> int:
    """``pd-extproc launch``: serve until SIGTERM, SIGINT or Envoy's death. Returns the exit code."""
    return uvloop.run(_run(settings))


async def _run(settings: Settings) -> int:
    try:
        service = Service(settings)
    except (OSError, ssl.SSLError) as error:
        _log.error("cannot start: --worker-ca-file %s: %s", settings.worker_ca_file, error)
        return 1
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: service.stop(settle=True))
    loop.add_signal_handler(signal.SIGINT, service.stop)
    _spare_the_collector()
    return await startable(service)


async def startable(service: Service) -> int:
    """Run ``service``; 1, with the reason logged, when it cannot be started."""
    try:
        return await service.run()
    except (OSError, EnvoyNotFoundError, EnvoyStartError, DiscoveryError) as error:
        _log.error("cannot start: %s", error)
        return 1


def _given(settings: Settings) -> Iterator[WorkerSpec]:
    """The workers given at start."""
    ids = settings.prefill_kv_engine_id or ("",) * len(settings.prefill)
    for worker, engine_id in zip(settings.prefill, ids, strict=True):
        yield _spec(settings, worker, KvConfig(settings.prefill_kv_connector or "", engine_id=engine_id))
    for worker in settings.decode:
        yield _spec(settings, worker, KvConfig(settings.decode_kv_connector or ""))


def _spec(settings: Settings, worker: WorkerSpec, common: KvConfig) -> WorkerSpec:
    """A worker given at start; ``common`` is for where it says nothing of its own.

    As with the peer, it is trusted with the gateway's own key.
    """
    return replace(
        worker,
        api_key=worker.api_key or settings.api_key,
        kv=worker.kv.or_else(common),
        engine_id_named=worker.engine_id_named or bool(common.engine_id),
    )


def _health(settings: Settings) -> HealthSettings:
    return HealthSettings(
        failure_threshold=settings.health_failure_threshold,
        success_threshold=settings.health_success_threshold,
        timeout=settings.health_check_timeout_secs,
        interval=settings.health_check_interval_secs,
        endpoint=settings.health_check_endpoint,
        enabled=not settings.disable_health_check,
        transport_threshold=settings.worker_transport_failures,
        stall=settings.worker_stall_secs,
        wedge=settings.worker_wedge_secs,
    )


def _breaker(settings: Settings) -> BreakerSettings:
    return BreakerSettings(
        failure_threshold=settings.cb_failure_threshold,
        success_threshold=settings.cb_success_threshold,
        timeout=settings.cb_timeout_duration_secs,
        window=settings.cb_window_duration_secs,
        enabled=not settings.disable_circuit_breaker,
    )


def _event_prefixes(settings: Settings, emptied: Callable[[Worker], None]) -> EventPrefixes | None:
    return None if settings.kv_event_source == EVENTS_OFF else EventPrefixes(settings.kv_event_max_blocks, emptied)


def _conditions(settings: Settings) -> str:
    """The options of conditional disaggregation that are given."""
    given = {
        "--pd-min-prompt-tokens": settings.pd_min_prompt_tokens,
        "--pd-min-uncached-tokens": settings.pd_min_uncached_tokens,
    }
    return ", ".join(flag for flag, tokens in given.items() if tokens)


def _overload(settings: Settings) -> OverloadSettings:
    return OverloadSettings(
        enabled=settings.worker_overload_protection,
        waiting_requests=settings.worker_overload_waiting_requests or WAITING,
        token_usage=settings.worker_overload_token_usage or USAGE,
        shed=settings.worker_overload_shed,
    )


def _gateway_config(settings: Settings) -> GatewayConfig:
    return GatewayConfig(
        request_timeout=settings.request_timeout_secs,
        keep_alive=settings.sse_keepalive_secs,
        relay_streams=settings.relay_grpc_streams,
        max_payload_bytes=settings.max_payload_size,
        request_id_headers=tuple(settings.request_id_headers),
        api_key=settings.api_key,
        response_headers=settings.response_headers,
        trust_client=settings.trust_client_control_fields,
        retry=_retry_policy(settings),
        retry_released=settings.retry_released and settings.mode is LegsMode.GATEWAY,
        kv_missing=settings.kv_missing,
        bootstrap_timeout=settings.pd_bootstrap_timeout_secs,
        min_prompt_tokens=settings.pd_min_prompt_tokens,
        min_uncached_tokens=settings.pd_min_uncached_tokens,
        gate=gate_settings(settings),
        legs=leg_settings(settings),
        tenants=tenants(settings),
        destination_header=settings.destination is not Destination.METADATA,
        destination_metadata=settings.destination is not Destination.HEADER,
        destination_hosts=settings.destination_hosts,
        select_only=settings.mode is LegsMode.SELECT_ONLY,
        model_aliases=dict(settings.model_alias),
    )


def _retry_policy(settings: Settings) -> RetryPolicy:
    return RetryPolicy(
        on_prefill_failure=settings.on_prefill_failure,
        attempts=1 if settings.disable_retries else settings.retry_max_retries,
        initial=settings.retry_initial_backoff_ms / 1000,
        maximum=settings.retry_max_backoff_ms / 1000,
        multiplier=settings.retry_backoff_multiplier,
        jitter=settings.retry_jitter_factor,
    )
