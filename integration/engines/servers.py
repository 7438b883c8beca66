"""Real engines as child processes: one server, and several that are started together."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 480.0  # a busy machine starts them one at a time
MODEL = "tiny"
# Where setup.sh installed them.
DIRECTORY = Path(os.environ.get("ENGINES_DIR") or Path(__file__).parents[2] / "run/engines").absolute()
MODEL_DIRECTORY = DIRECTORY / "model"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def installed(engine: str) -> bool:
    """Whether setup.sh has installed that engine to its end."""
    return (DIRECTORY / f"ready-{engine}").exists()


def python(engine: str) -> Path:
    """The interpreter of an engine's environment."""
    return DIRECTORY / f"venv-{engine}/bin/python"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on.

    Below those that the kernel gives to connections: an engine takes it only after many seconds.
    """
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port found")


@dataclass(slots=True)
class Server:
    """One engine.

    Attributes:
        name: of its log.
        command: starts it; it listens on ``port`` of 127.0.0.1.
        probe: the path that answers 200 when it is ready.
    """

    name: str
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    probe: str
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
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **ENVIRONMENT, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError when it died or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if not self.running or time.monotonic() > deadline:
                lines = self.log.read_text(errors="replace").splitlines()
                raise RuntimeError("\n".join([f"{self.name} did not start:", *lines[-10:]]))
            time.sleep(0.2)

    def answers(self) -> bool:
        """Whether it says that it is ready."""
        try:
            with urllib.request.urlopen(self.url + self.probe, timeout=5):  # noqa: S310 - our own URL
                return True
        except OSError:
            return False

    @property
    def running(self) -> bool:
        """Whether its main process is there."""
        return self._process is not None and self._process.poll() is None

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


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers and have them ready; stopped at the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()


def serve(*servers: Server) -> None:
    """Run servers until interrupted or terminated, and print where they are."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with running(*servers), contextlib.suppress(KeyboardInterrupt):
        for server in servers:
            print(f"{server.name:20} {server.url}   log {server.log}", flush=True)
        signal.pause()
