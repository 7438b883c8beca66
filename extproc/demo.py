"""``pd-extproc demo``: the whole product with mock workers, and what it does with two requests, step by step."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import uvloop

from extproc import logs
from extproc.logs import LogLevel
from extproc.mock.recorder import Record
from extproc.mock.sglang.worker import SglangMock
from extproc.service import Service, startable
from extproc.settings import GivenWorker, Settings
from extproc.workers.worker import WorkerUrl

_PATH: Final = "/v1/chat/completions"
_READY_SECONDS: Final = 30
_OURS: Final = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")
_TOKENS: Final = 12
_PREFILL_SECONDS: Final = 0.04
_TOKEN_SECONDS: Final = 0.015


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--once", action="store_true", help="end after the show; exit code 0 when all went well")
    parser.add_argument("--port", type=int, default=30000, help="port for clients; 0: any free one (default: 30000)")


def run(namespace: argparse.Namespace) -> int:
    """Show; returns 0 when everything was as it should be, else 1."""
    if not 0 <= namespace.port <= 65535:
        print(f"pd-extproc demo: error: --port {namespace.port}: Port must be between 1 and 65535", file=sys.stderr)
        return 2
    return uvloop.run(_Demo(namespace.port, once=namespace.once).run())


@dataclass(slots=True)
class _Seen:
    """What a client saw of one request. Times are ``time.time()`` seconds."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)  # aiohttp's: names in any case
    sent: float = 0.0
    head: float = 0.0
    first: float = 0.0
    last: float = 0.0
    body: bytes = b""
    events: int = 0


class _Demo:
    def __init__(self, port: int, *, once: bool) -> None:
        self._port = port
        self._once = once
        self._problems: list[str] = []
        self._page = _Page()

    async def run(self) -> int:
        logs.configure(LogLevel.WARN)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(self._mock(role)) for role in ("prefill",) * 2 + ("decode",) * 2]
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-extproc-demo-")))
            service = Service(self._settings(workers, directory / "run"))
            serving = asyncio.create_task(startable(service))
            try:
                await self._show(service, serving, workers, stopped)
            finally:
                service.stop()
                code = await serving
        for problem in self._problems:
            print(f"wrong: {problem}", file=sys.stderr)
        return 1 if self._problems else code

    def _mock(self, role: str) -> SglangMock:
        delay = _PREFILL_SECONDS if role == "prefill" else 0.0
        return SglangMock(role=role, tokens=_TOKENS, first_token_delay=delay, token_delay=_TOKEN_SECONDS)

    def _settings(self, workers: list[SglangMock], run_dir: Path) -> Settings:
        return Settings(
            pd_disaggregation=True,
            prefill=tuple(GivenWorker(WorkerUrl.parse(w.url), w.bootstrap_port) for w in workers[:2]),
            decode=tuple(GivenWorker(WorkerUrl.parse(w.url)) for w in workers[2:]),
            host="127.0.0.1",
            port=self._port,
            envoy_admin_port=0,
            prometheus_host="127.0.0.1",
            prometheus_port=0,
            run_dir=run_dir,
            shutdown_grace_period_secs=5,
        )

    async def _show(
        self, service: Service, serving: asyncio.Task[int], workers: list[SglangMock], stopped: asyncio.Event
    ) -> None:
        async with aiohttp.ClientSession() as client:
            if not await self._ready(service, serving, client, stopped):
                return
            host, port = service.client_address
            url = f"http://{host}:{port}"
            self._page.fleet(url, workers)
            message = [{"role": "user", "content": "What is a prefill worker?"}]
            for title, body in (
                ("A chat completion", {"model": "tiny", "messages": message, "max_tokens": _TOKENS}),
                ("The same, streamed", {"model": "tiny", "messages": message, "max_tokens": _TOKENS, "stream": True}),
            ):
                seen = await _request(client, url + _PATH, body)
                self._check(title, seen, workers)
                self._page.request(title, url + _PATH, body, seen, *_legs(workers, seen))
            if self._problems or self._once:
                return
            self._page.invitation(url, service.metrics_port)
            logs.configure(LogLevel.INFO)
            await asyncio.wait({asyncio.create_task(stopped.wait()), serving}, return_when=asyncio.FIRST_COMPLETED)

    async def _ready(
        self, service: Service, serving: asyncio.Task[int], client: aiohttp.ClientSession, stopped: asyncio.Event
    ) -> bool:
        waits = [asyncio.create_task(service.started.wait()), asyncio.create_task(stopped.wait())]
        await asyncio.wait({*waits, serving}, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if serving.done() or stopped.is_set():
            return False
        host, port = service.client_address
        reason = ""
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline and not stopped.is_set():
            try:
                async with client.get(f"http://{host}:{port}/readiness") as answer:
                    if answer.status == 200:
                        return True
                    reason = await answer.text()
            except aiohttp.ClientError as error:
                reason = str(error)
            await asyncio.sleep(0.05)
        if not stopped.is_set():
            self._problems.append(f"not ready: {reason}")
        return False

    def _check(self, title: str, seen: _Seen, workers: list[SglangMock]) -> None:
        prefill, decode = _legs(workers, seen)
        wrong = self._problems.append
        if seen.status != 200:
            wrong(f"{title}: status {seen.status}: {seen.body.decode(errors='replace')}")
        elif prefill is None or decode is None:
            wrong(f"{title}: a leg did not arrive at the worker that the answer names")
        elif prefill.json["bootstrap_room"] != decode.json["bootstrap_room"]:
            wrong(f"{title}: the legs were sent to different rooms")
        elif not _text(seen):
            wrong(f"{title}: the answer is empty")


async def _request(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> _Seen:
    seen = _Seen(sent=time.time())
    async with client.post(url, json=body) as answer:
        seen.head = time.time()
        seen.status, seen.headers = answer.status, answer.headers
        async for chunk in answer.content.iter_any():
            seen.first = seen.first or time.time()
            seen.last = time.time()
            seen.body += chunk
            seen.events += chunk.count(b"data: ")
    return seen


def _legs(workers: list[SglangMock], seen: _Seen) -> tuple[Record | None, Record | None]:
    """The newest leg on each worker that the answer's headers name."""

    def newest(url: str | None) -> Record | None:
        return next((w.legs[-1] for w in workers if w.url == url and w.legs), None)

    return newest(seen.headers.get("x-pd-prefill")), newest(seen.headers.get("x-pd-decode"))


def _text(seen: _Seen) -> str:
    if not seen.headers.get("Content-Type", "").startswith("text/event-stream"):
        content = orjson.loads(seen.body)["choices"][0]["message"]["content"]
        return str(content)
    if not seen.body.rstrip().endswith(b"data: [DONE]"):
        return ""
    events = [orjson.loads(line[6:]) for line in seen.body.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


class _Page:
    """Plain terminal output; bold and dim where the terminal can."""

    def __init__(self) -> None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._bold, self._dim, self._plain = ("\033[1m", "\033[2m", "\033[0m") if colour else ("", "", "")
        self._width = min(shutil.get_terminal_size((100, 24)).columns, 120)

    def fleet(self, url: str, workers: list[SglangMock]) -> None:
        prefills = [f"prefill  {w.url}  bootstrap port {w.bootstrap_port}" for w in workers[:2]]
        decodes = [f"decode   {w.url}" for w in workers[2:]]
        direct = f"  client ───► Envoy {url} ───► "
        egress = "             pd-extproc ───► Envoy's egress ───► "
        print(f"\n{self._bold}Envoy, the ext_proc service and four mock SGLang workers are running.{self._plain}\n")
        print(f"{direct}{decodes[0]}\n{'│ ▲':>18}{decodes[1]:>{len(direct) - 18 + len(decodes[1])}}")
        print(f"{'ext_proc │ │':>18}\n{'▼ │':>18}")
        print(f"{egress}{prefills[0]}\n{' ' * len(egress)}{prefills[1]}")

    def request(
        self, title: str, url: str, body: dict[str, Any], seen: _Seen, prefill: Record | None, decode: Record | None
    ) -> None:
        print(f"\n{self._bold}{title}{self._plain}\n")
        print(f"  POST {url}")
        print(f"  {orjson.dumps(body).decode()}\n")
        if prefill is None or decode is None:
            print(f"  {seen.status} {seen.body.decode(errors='replace')}")
            return
        self._leg("prefill leg", seen.headers["x-pd-prefill"], prefill, body)
        self._leg("decode leg", seen.headers["x-pd-decode"], decode, body)
        self._steps(seen, prefill, decode)
        print(f"\n  {seen.status}  {_text(seen).strip()}")

    def _leg(self, name: str, url: str, record: Record, asked: dict[str, Any]) -> None:
        print(f"  {self._bold}{name:<12}{self._plain} {url}{record.path}")
        for key, value in record.json.items():
            mark = " " if key in asked and asked[key] == value else "~" if key in asked else "+"
            text = f"    {mark} {key:<16} {orjson.dumps(value).decode()}"
            print(text if mark != " " else f"{self._dim}{text}{self._plain}")
        print()

    def _steps(self, seen: _Seen, prefill: Record, decode: Record) -> None:
        events = f"{seen.events} events, " if seen.events else ""
        steps = [
            (prefill.received, "prefill leg has arrived"),
            (decode.received, "decode leg has arrived"),
            (prefill.ended, "prefill has answered, its KV cache is handed over"),
            (decode.first_byte, "decode sends its first byte"),
            (seen.first, "client has the first byte"),
            (seen.last, f"client has the last byte ({events}{len(seen.body)} bytes)"),
        ]
        print(f"  {self._bold}steps{self._plain}\n         0.0 ms  request sent")
        for when, what in sorted((when, what) for when, what in steps if when):
            print(f"    {(when - seen.sent) * 1000:>8.1f} ms  {what}")
        print(f"{self._dim}    server-timing: {seen.headers.get('server-timing')}{self._plain}")

    def invitation(self, url: str, metrics_port: int) -> None:
        print(
            f"""
{self._bold}Serving until Ctrl-C. Try:{self._plain}

  curl -N {url}{_PATH} -H 'content-type: application/json' \\
    -d '{{"model": "tiny", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  curl -s {url}/workers
  curl -s http://127.0.0.1:{metrics_port}/metrics
"""
        )
