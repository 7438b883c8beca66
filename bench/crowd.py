"""A fleet of a thousand workers that do nothing: how soon all are ready, and what the idle sidecar costs then.

``python -m bench.crowd`` starts one server that stands for all of them, each at a loopback address of its own (Linux
answers at all of 127.0.0.0/8), and ``pd-extproc launch`` without workers; registers them by ``POST /workers``; and says
how long it took until all were usable, what that cost, how long one more takes until Envoy has it, and what share of a
core the sidecar and Envoy use while nobody sends anything. Then every tenth worker goes down and comes back all the
time, if ``--flapping`` says for how long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import uvloop

from bench.child import Child, free_ports
from bench.systems import LOG_LEVEL, Running, find_envoy

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODEL: Final = "tiny"
_SETTLE_SECONDS: Final = 10.0  # between the last worker's arrival and the first look at the idle fleet
_PATIENCE: Final = 300.0
_PHASE: Final = 2.0  # seconds that a flapping worker is up, or down
_FLAPPING: Final = {"check_interval_secs": 1, "failure_threshold": 1, "success_threshold": 1}
_REGISTERING_SECONDS: Final = 30.0  # and all before that, at most: then workers flap, if they are to
_AT_ONCE: Final = 16  # registrations under way
# What real engines say of their load, of one rank; see tests/data/load.
_SAID: Final = Path(__file__).parent.parent / "tests/data/load"
_LOADS: Final = {
    "sglang": (_SAID / "sglang-0.5.23-decode.json").read_bytes(),
    "vllm": (_SAID / "vllm-0.32.0-few-metrics.txt").read_bytes(),
}


@dataclass(frozen=True, slots=True)
class Crowd:
    """``name`` as in the results; it is not measured against others."""

    name: str = "crowd"
    part: str = "sidecar"
    disaggregated: bool = True
    only: frozenset[str] = frozenset()

    async def start(self, *_: object) -> Running:
        """See System; it is started by :func:`main`."""
        raise NotImplementedError


class Worker(asyncio.Protocol):
    """What a gateway asks of a worker, answered at any address: 127.1.x.y are prefill workers, 127.2.x.y decode."""

    def __init__(self, engine: str, flapping_from: float) -> None:
        self._engine = engine
        self._flapping_from = flapping_from
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        method, path, _ = data.split(b" ", 2)
        status, body = self._answer(method, path)
        head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._transport.close()

    def _answer(self, method: bytes, path: bytes) -> tuple[int, bytes]:
        is_prefill = self._transport.get_extra_info("sockname")[0].startswith("127.1.")
        role = "prefill" if is_prefill else "decode"
        answers: dict[bytes, Any] = {
            b"/health": {},
            b"/v1/models": {"object": "list", "data": [{"id": _MODEL, "owned_by": self._engine, "root": _MODEL}]},
        }
        if self._engine == "vllm":
            answers[b"/version"] = {"version": "0.32.0"}
            answers[b"/query"] = {"0": {"engine_id": f"e{self._where}", "worker_addr": {"0": {"0": "tcp://x:1"}}}}
        else:
            answers[b"/server_info"] = {"version": "0.5.23", "tp_size": 1, "disaggregation_mode": role}
            answers[b"/model_info"] = {"is_generation": True, "model_type": "llama"}
        if path.startswith((b"/v1/loads", b"/metrics/")):
            return 200, _LOADS[self._engine]
        if path == b"/health" and self._is_down():
            return 503, b"{}"
        if method == b"POST":
            return 400, b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
        found = answers.get(path)
        return (404, b"{}") if found is None else (200, json.dumps(found).encode())

    def _is_down(self) -> bool:
        """Of ten workers one flaps, each in a phase of its own."""
        number = int(self._where.rpartition(".")[2])
        passed = time.monotonic() - self._flapping_from
        return number % 10 == 0 and passed >= 0 and int((passed + number * 0.037) / _PHASE) % 2 == 0

    @property
    def _where(self) -> str:
        return str(self._transport.get_extra_info("sockname")[0])


async def serve(port: int, engine: str, flapping_from: float) -> None:
    """Be all workers; those that flap do so from a moment of ``time.monotonic()`` on."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Worker(engine, flapping_from),
        "0.0.0.0",
        port,
        backlog=4096,
    )
    await server.serve_forever()


def registrations(number: int, port: int, engine: str, connector: str, *, flapping: bool) -> list[dict[str, object]]:
    """A quarter of them prefill workers; those that are to flap are probed every second."""
    found = []
    for index in range(number):
        prefill = index % 4 == 0
        url = f"http://127.{1 if prefill else 2}.{index // 250}.{1 + index % 250}:{port}"
        body: dict[str, object] = {"url": url, "worker_type": "prefill" if prefill else "decode"}
        if flapping and (1 + index % 250) % 10 == 0:
            body["health"] = _FLAPPING
        if engine == "vllm":
            body |= {"runtime_type": "vllm", "kv_connector": connector}
            if prefill and connector == "MooncakeConnector":
                body["bootstrap_port"] = port
        elif prefill:
            body["bootstrap_port"] = port
        found.append(body)
    return found


class Gateway:
    """The running product, as an operator sees it."""

    def __init__(self, session: aiohttp.ClientSession, port: int, admin: int, running: Running) -> None:
        self._session = session
        self._base = f"http://127.0.0.1:{port}"
        self._admin = f"http://127.0.0.1:{admin}"
        self.running = running

    async def register(self, bodies: Sequence[dict[str, object]]) -> None:
        """Tell it of workers."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(body: dict[str, object]) -> None:
            async with gate, self._session.post(f"{self._base}/workers", json=body) as response:
                assert response.status == 202, await response.text()

        await asyncio.gather(*(one(body) for body in bodies))

    async def until_usable(self, number: int) -> None:
        """Wait until it may give requests to so many."""
        async with asyncio.timeout(_PATIENCE):
            while await self._usable() < number:  # noqa: ASYNC110  # it tells only when asked
                await asyncio.sleep(0.02)

    async def _usable(self) -> int:
        try:
            async with self._session.get(f"{self._base}/readiness") as response:
                return int((await response.json()).get("healthy_workers", 0))
        except aiohttp.ClientError:
            return -1

    async def until_in_envoy(self, number: int) -> None:
        """Wait until Envoy itself says that it has so many hosts."""
        async with asyncio.timeout(_PATIENCE):
            while await self.envoys("membership_total") < number:  # noqa: ASYNC110  # it tells only when asked
                await asyncio.sleep(0.005)

    async def envoys(self, figure: str) -> int:
        """A figure of Envoy's about a role cluster, of both together."""
        query = {"filter": rf"^cluster\.(prefill|decode)\.{figure}$"}
        async with self._session.get(f"{self._admin}/stats", params=query) as response:
            return sum(int(line.rpartition(" ")[2]) for line in (await response.text()).splitlines())

    def memory(self) -> int:
        """Resident MiB of the sidecar."""
        texts = [Path(f"/proc/{pid}/statm").read_text() for pid in self.running.processes["sidecar"]]
        return sum(int(text.split()[1]) for text in texts) * os.sysconf("SC_PAGE_SIZE") >> 20

    async def until_serving(self) -> None:
        """Wait for its first answer."""
        async with asyncio.timeout(_PATIENCE):
            while await self._usable() < 0:  # noqa: ASYNC110  # it tells only when asked
                await asyncio.sleep(0.05)
        self.running.find_processes()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start all, and print what is found."""
    port, admin, metrics, workers = free_ports(4)
    quiet = _SETTLE_SECONDS + options.seconds + _REGISTERING_SECONDS
    server = [
        *(sys.executable, "-m", "bench.crowd", "--serve", str(workers), "--engine", options.engine),
        *("--flapping-from", str(time.monotonic() + quiet if options.flapping else math.inf)),
    ]
    launch: list[str | Path] = [
        sys.executable, "-m", "extproc", "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port),
        "--envoy-path", find_envoy(), "--envoy-concurrency", "1", "--envoy-admin-port", str(admin),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", LOG_LEVEL,
        "--run-dir", str(folder / "run"), "--drain-settle-secs", "0", "--shutdown-grace-period-secs", "0",
        *options.flag,
    ]  # fmt: skip
    all_workers = await Child.start(server, folder / "workers.log")
    running = Running(Crowd(), port, [await Child.start(launch, folder / "gateway.log")])
    try:
        async with aiohttp.ClientSession() as session:
            await _measure(Gateway(session, port, admin, running), options, workers, time.monotonic() + quiet)
    finally:
        await running.stop()
        await all_workers.stop()


async def _measure(gateway: Gateway, options: argparse.Namespace, port: int, flapping_from: float) -> None:
    flapping = bool(options.flapping)
    bodies = registrations(options.workers + 1, port, options.engine, options.connector, flapping=flapping)
    await gateway.until_serving()
    empty = gateway.memory()
    before, start = gateway.running.cpu(), time.monotonic()
    await gateway.register(bodies[:-1])
    registered = time.monotonic() - start
    await gateway.until_usable(options.workers)
    ready, spent = time.monotonic() - start, gateway.running.cpu()
    cost = ", ".join(f"{part} {spent[part] - before[part]:.2f} s" for part in spent)
    print(f"{options.workers} {options.engine} workers: registered in {registered:.2f} s, usable after {ready:.2f} s")
    print(f"  CPU until then: {cost}")
    start = time.monotonic()
    await gateway.register(bodies[-1:])
    await gateway.until_in_envoy(options.workers + 1)
    arrived = time.monotonic() - start
    await gateway.until_usable(options.workers + 1)
    print(f"  one more is in Envoy after {arrived:.3f} s, usable after {time.monotonic() - start:.3f} s")
    print(f"  memory of the sidecar: {empty} MiB without workers, {gateway.memory()} MiB with them")
    await asyncio.sleep(_SETTLE_SECONDS)
    print(f"  idle for {options.seconds} s, of a core: {await _shares(gateway, options.seconds)}")
    if options.flapping:
        await asyncio.sleep(max(0.0, flapping_from - time.monotonic()) + _SETTLE_SECONDS)
        updates = await gateway.envoys("update_success")
        shares = await _shares(gateway, options.flapping)
        rate = (await gateway.envoys("update_success") - updates) / 2 / options.flapping
        print(f"  every tenth up and down for {options.flapping} s, of a core: {shares}; {rate:.1f} updates a second")


async def _shares(gateway: Gateway, seconds: float) -> str:
    """What each part uses of a core during the next ``seconds``."""
    before, start = gateway.running.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    spent, passed = gateway.running.cpu(), time.monotonic() - start
    return ", ".join(f"{part} {100 * (spent[part] - before[part]) / passed:.2f} %" for part in spent)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="bench.crowd", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--connector", default="NixlConnector", help="of vLLM workers")
    parser.add_argument("--seconds", type=int, default=60, help="how long the idle fleet is looked at")
    parser.add_argument("--flapping", type=int, default=0, help="seconds that every tenth goes up and down")
    parser.add_argument("--flag", action="append", default=[], help="for pd-extproc launch; repeatable, --flag=--x=y")
    parser.add_argument("--serve", type=int, help="be the workers, at this port")
    parser.add_argument("--flapping-from", type=float, default=math.inf, help="by time.monotonic(); with --serve")
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.engine, options.flapping_from))
        return
    with tempfile.TemporaryDirectory(prefix="pd-crowd-") as folder:
        uvloop.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
