"""A real SGLang prefill/decode pair, and an aggregated server to compare with, as child processes.

As a program: ``servers.py`` starts all three, prints their addresses and keeps them until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BOOTSTRAP_PORT = 31598
START_SECONDS = 180.0
MODEL = "tiny"
# Where setup.sh installed them.
DIRECTORY = Path(os.environ.get("ENGINES_DIR") or Path(__file__).parents[2] / "run/engines").absolute()

COMMON = (
    *("--host", "127.0.0.1", "--served-model-name", MODEL),
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle"),
)
TRANSFER = ("--disaggregation-transfer-backend", "mooncake")
ENVIRONMENT = {
    "SGLANG_ON_CPU": "on",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
    "HOST_IP": "127.0.0.1",
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def installed() -> bool:
    """Whether setup.sh has run to its end."""
    return (DIRECTORY / "ready").exists()


@dataclass(slots=True)
class Server:
    """One SGLang server. Ports must not be neighbours: it takes some beside its own."""

    name: str
    port: int
    arguments: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What it prints."""
        return DIRECTORY / f"{self.name}.log"

    def start(self) -> None:
        """Start it; it takes about half a minute to be ready."""
        command = [DIRECTORY / "venv/bin/python", "-m", "sglang.launch_server", "--model-path", DIRECTORY / "model"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *COMMON, *self.arguments],
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError when it died or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/model_info", timeout=5):  # noqa: S310 - our own URL
                return
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                lines = self.log.read_text(errors="replace").splitlines()
                raise RuntimeError("\n".join([f"{self.name} did not start:", *lines[-10:]]))
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End all its processes at once."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None


@dataclass(frozen=True, slots=True)
class Engines:
    """The three servers."""

    prefill: Server = field(
        default_factory=lambda: Server(
            "prefill",
            31301,
            ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT), *TRANSFER),
        )
    )
    decode: Server = field(
        default_factory=lambda: Server("decode", 31311, ("--disaggregation-mode", "decode", *TRANSFER))
    )
    aggregated: Server = field(default_factory=lambda: Server("aggregated", 31321))

    @property
    def servers(self) -> tuple[Server, ...]:
        """All of them."""
        return self.prefill, self.decode, self.aggregated


@contextlib.contextmanager
def running() -> Iterator[Engines]:
    """The three servers, ready; stopped at the end."""
    engines = Engines()
    try:
        for server in engines.servers:
            server.start()
        for server in engines.servers:
            server.wait_ready()
        yield engines
    finally:
        for server in engines.servers:
            server.stop()


def main() -> None:
    """Run the servers until interrupted or terminated."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with running() as engines, contextlib.suppress(KeyboardInterrupt):
        for server in engines.servers:
            print(f"{server.name:10} {server.url}   log {server.log}")
        print(f"bootstrap  port {BOOTSTRAP_PORT}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
