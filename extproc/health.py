"""``pd-extproc health``: whether a gateway, a sidecar or a worker answers, as a container's health check.

It is started every few seconds, so it imports nothing that takes longer than the question: no settings, no HTTP client.
Where the control API is says a file in the run directory (``run_dir.announced``), which is there while all serves.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.run_dir import SERVING

if TYPE_CHECKING:
    import argparse

_RUN_DIR_VARIABLE: Final = "PD_EXTPROC_RUN_DIR"
_LONGEST_STATUS_LINE: Final = 256  # bytes
_PATIENCE_SECONDS: Final = 3.0


class HealthError(Exception):
    """It is not well; the message says what is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="http://HOST:PORT/PATH, well when it answers 200 (default: the gateway)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=os.environ.get(_RUN_DIR_VARIABLE) or None,
        metavar="DIR",
        help=f"that of the gateway on this machine (default: ${_RUN_DIR_VARIABLE})",
    )
    parser.add_argument(
        "--ready", action="store_true", help="well only while requests can be served: workers are there"
    )
    parser.add_argument(
        "--timeout", type=float, default=_PATIENCE_SECONDS, metavar="SECONDS", help="for the answer (default: 3)"
    )


def run(options: argparse.Namespace) -> int:
    """Ask once; 0 when it is well, 1 when not, 2 when nobody said whom to ask."""
    if options.url is None and options.run_dir is None:
        print(f"pd-extproc health: error: give a URL, --run-dir or ${_RUN_DIR_VARIABLE}", file=sys.stderr)
        return 2
    try:
        if options.url is not None:
            ask(*_of_url(options.url), options.timeout)
        else:
            ask(_control(options.run_dir), "/readiness" if options.ready else "/liveness", options.timeout)
    except HealthError as error:
        print(f"pd-extproc health: {error}", file=sys.stderr)
        return 1
    return 0


def ask(address: str, path: str, timeout: float) -> None:
    """GET ``path`` from ``unix:/path`` or ``host:port``. Raises HealthError unless the answer's status is 200."""
    try:
        with _connected(address, timeout) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            line = connection.makefile("rb").readline(_LONGEST_STATUS_LINE)
    except (OSError, ValueError) as error:
        raise HealthError(f"{address} does not answer: {error}") from None
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or rest[:3] != b"200":
        raise HealthError(f"{address}{path} answers {rest.decode('latin-1').strip() or 'nothing'}")


def _connected(address: str, timeout: float) -> socket.socket:
    """Raises OSError; ValueError when the port is none."""
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    try:
        connection.connect(address.removeprefix("unix:"))
    except OSError:
        connection.close()
        raise
    return connection


def _of_url(url: str) -> tuple[str, str]:
    """Address and path. Raises HealthError."""
    scheme, separator, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    if scheme != "http" or not separator or ":" not in address:
        raise HealthError(f"{url} is not http://HOST:PORT/PATH")
    return address, f"{slash or '/'}{path}"


def _control(directory: Path) -> str:
    """Where the control API of the gateway is. Raises HealthError when it does not serve."""
    try:
        return (directory / SERVING).read_text().strip()
    except OSError as error:
        raise HealthError(f"no gateway serves: {directory / SERVING}: {error.strerror}") from None
