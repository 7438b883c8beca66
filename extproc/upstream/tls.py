"""TLS to https and grpcs workers."""

from __future__ import annotations

import ssl
from pathlib import Path


class WorkerTls:
    """Verifies workers by the certificate authorities in ``ca_file``, or the system's; made when the first needs it.

    Raises OSError or ssl.SSLError where a given file cannot be read.
    """

    def __init__(self, ca_file: Path | None) -> None:
        self._ca_file = ca_file
        self._contexts: dict[bool, ssl.SSLContext] = {}
        if ca_file is not None:
            self.context(grpc=False)

    def context(self, *, grpc: bool) -> ssl.SSLContext:
        """For HTTP/1.1, or for HTTP/2, which is asked for by its name."""
        found = self._contexts.get(grpc)
        if found is None:
            found = ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))
            found.set_alpn_protocols(["h2"] if grpc else ["http/1.1"])
            self._contexts[grpc] = found
        return found
