"""What the transport's conformance tests stand on: an Envoy with one ext_proc filter and an egress listener.

The configuration is the smallest that shows the transport to Envoy, not the product's. The filter's server and the
worker behind Envoy live in the test's process; Envoy finds them by socket files, so they may come and go.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from extproc.dataplane.process import find_envoy

if TYPE_CHECKING:
    from collections.abc import Iterator

_READY_SECONDS = 60
_HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = {
    "name": "router",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
}
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
_EXT_PROC = {
    "name": "ext_proc",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "ext_proc"}, "timeout": "0s"},
        "allow_content_length_header": True,
        "message_timeout": "10s",  # of the answer to response headers; the default of 200 ms is short for a busy test
        "status_on_error": {"code": 503},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
    },
}
_HEALTH_CHECK = {
    "timeout": "1s",
    "interval": "0.05s",
    "no_traffic_interval": "0.05s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {"service_name": "readiness"},
}


class TransportEnvoy:
    """A running Envoy and the socket files it meets us at, all in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ext_proc = folder / "ext_proc.sock"
        self.worker = folder / "worker.sock"
        self.egress = folder / "egress.sock"
        self.watched = folder / "watched.sock"  # probed by Envoy's gRPC health check of "readiness"
        self.port = 0  # of the client listener
        self._admin = ""

    def run(self) -> Iterator[TransportEnvoy]:
        """Start Envoy, yield, stop it."""
        config = self.folder / "envoy.json"
        config.write_text(json.dumps(self._config()))
        log = self.folder / "envoy.log"
        admin_file = self.folder / "admin.txt"
        command = [find_envoy(), "-c", config, "--disable-hot-restart", "--concurrency", "1"]
        command += ["--log-path", log, "-l", "warning", "--admin-address-path", admin_file]
        with subprocess.Popen([str(each) for each in command]) as process:
            try:
                self._admin = self._wait_for_admin(admin_file)
                self.port = self._listener_port()
                yield self
            finally:
                process.terminate()

    async def until_statistic(self, name: str, value: int) -> None:
        """Wait until a counter or gauge has ``value``; Envoy offers nothing better than to ask again."""
        async with asyncio.timeout(_READY_SECONDS):
            while await asyncio.to_thread(self.statistic, name) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def statistic(self, name: str) -> int:
        """A counter's or gauge's value."""
        found = json.loads(self._get(f"/stats?format=json&filter=^{name.replace('.', '[.]')}$"))["stats"]
        return int(found[0]["value"]) if found else 0

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._admin}{path}", timeout=5) as answer:
            return bytes(answer.read())

    def _wait_for_admin(self, file: Path) -> str:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            try:
                self._admin = file.read_text().strip()
                if self._admin and self._get("/ready") == b"LIVE\n":
                    return self._admin
            except OSError:
                pass
            time.sleep(0.02)  # Envoy offers nothing to wait on
        raise AssertionError((self.folder / "envoy.log").read_text())

    def _listener_port(self) -> int:
        listeners = json.loads(self._get("/listeners?format=json"))["listener_statuses"]
        return next(
            int(each["local_address"]["socket_address"]["port_value"])
            for each in listeners
            if each["name"] == "clients"
        )

    def _config(self) -> dict[str, object]:
        clients = _listener("clients", {"socket_address": {"address": "127.0.0.1", "port_value": 0}}, [_EXT_PROC])
        egress = _listener("egress", {"pipe": {"path": str(self.egress)}}, [])
        return {
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
            "static_resources": {
                "listeners": [clients, egress],
                "clusters": [
                    _cluster("ext_proc", self.ext_proc, _HTTP2),
                    _cluster("worker", self.worker, {}),
                    {**_cluster("watched", self.watched, _HTTP2), "health_checks": [_HEALTH_CHECK]},
                ],
            },
        }


def _listener(name: str, address: dict[str, object], filters: list[dict[str, object]]) -> dict[str, object]:
    manager = {
        "@type": _HCM,
        "stat_prefix": name,
        "codec_type": "AUTO",
        "http2_protocol_options": {"max_concurrent_streams": 100},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "worker", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [*filters, _ROUTER],
    }
    return {
        "name": name,
        "address": address,
        "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
    }


def _cluster(name: str, path: Path, options: dict[str, object]) -> dict[str, object]:
    limits = {"max_connections": 100_000, "max_requests": 100_000, "max_pending_requests": 100_000}
    return {
        "name": name,
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": options,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(path)}}}}]}],
        },
    }


class Worker:
    """An HTTP server behind Envoy; the path says what it does, ``release`` lets it go on where it waits."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.waiting = asyncio.Event()
        self.left = asyncio.Event()  # a request ended before its answer did
        self._runner: web.AppRunner | None = None

    async def start(self, path: Path | None) -> int:
        """Listen at ``path``, or on a port of 127.0.0.1; which, or 0."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/sha", self._sha)
        app.router.add_post("/slow", self._slow)
        app.router.add_post("/stream", self._stream)
        app.router.add_post("/hang", self._hang)
        app.router.add_post("/big", self._big)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        if path is not None:
            await web.UnixSite(self._runner, str(path), backlog=1024).start()
            return 0
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        assert self._runner is not None
        self.release.set()
        await self._runner.cleanup()

    async def _sha(self, request: web.Request) -> web.Response:
        """What came, hashed."""
        return web.Response(text=hashlib.sha256(await request.read()).hexdigest())

    async def _slow(self, request: web.Request) -> web.Response:
        """As /sha, but the body is read only after ``release``."""
        await self._wait()
        return await self._sha(request)

    async def _big(self, request: web.Request) -> web.Response:
        """As many bytes as the body says."""
        return web.Response(body=bytes(int(await request.read())))

    async def _hang(self, request: web.Request) -> web.Response:
        """Answer nothing until ``release``."""
        await request.read()
        await self._wait()
        return web.Response()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """The head and one piece of the answer; the rest after ``release``."""
        await request.read()
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"first")
        await self._wait()
        await answer.write(b"last")
        return answer

    async def _wait(self) -> None:
        self.waiting.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
