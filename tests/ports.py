"""Ports on which nobody listens, and that nobody else can take meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of 127.0.0.1; connections to it are refused unless the test itself listens there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the test may
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
