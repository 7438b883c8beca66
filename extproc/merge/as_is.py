"""An answer that needs no merging, though it passes through here: a second attempt's, after the first was released."""

from __future__ import annotations

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError


class AsIs:
    """A JoinedAnswer of one decode leg, byte for byte; one that is not streamed is kept until it is whole."""

    content_type = b""  # the worker's
    needs_prefill = False

    def __init__(self, request: InferenceRequest) -> None:
        self._streams = request.stream
        self._kept = bytearray()
        self.complete = False

    def prefill_done(self, part: int, body: bytes) -> bytes:  # noqa: ARG002 - JoinedAnswer's signature
        """See JoinedAnswer."""
        return b""

    def decode_data(self, part: int, chunk: bytes) -> bytes:  # noqa: ARG002 - JoinedAnswer's signature
        """See JoinedAnswer."""
        if self._streams:
            return chunk
        self._kept += chunk
        return b""

    def decode_done(self, part: int) -> bytes:  # noqa: ARG002 - JoinedAnswer's signature
        """See JoinedAnswer."""
        self.complete = True
        return bytes(self._kept)

    def fail(self, error: GatewayError) -> bytes:  # noqa: ARG002 - JoinedAnswer's signature
        """See JoinedAnswer. What the API's streams say of errors is not known here: the answer is to be cut."""
        self.complete = True
        return b""
