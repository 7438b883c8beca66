"""What can be wrong with discovery."""

from __future__ import annotations


class DiscoveryError(Exception):
    """It cannot begin; the message says why."""


class ApiError(Exception):
    """The Kubernetes API says no.

    Attributes:
        status: of HTTP, or of an ERROR event; 0 where what it says is not understood.
        retry_after: seconds that it wants to be left alone.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status
        self.retry_after = retry_after


class GoneError(Exception):
    """410: what happened since then is forgotten, so that all must be listed again."""
