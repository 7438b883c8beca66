"""What the status of a gRPC call means in HTTP, as long as no byte of an answer has gone out.

As the peer has it (smg, routers/grpc/utils/tonic_ext.rs), but for CANCELLED: that is nothing the client did wrong,
since a client that is gone hears nothing; the worker gave the call up. What engines say: smg-grpc-servicer 0.14.1
turns an engine's 400, 404, 408, 429, 503, 504 into INVALID_ARGUMENT, NOT_FOUND, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED,
UNAVAILABLE, DEADLINE_EXCEEDED and all else into INTERNAL (``engine_status.py``), and names with FAILED_PRECONDITION and
a trailer an answer that could not be made to fit the request's own constraint.
"""

from __future__ import annotations

from typing import Final

_INTERNAL: Final = 500
_HTTP: Final = {
    1: 502,  # CANCELLED
    2: 500,  # UNKNOWN: an exception that the server did not expect
    3: 400,  # INVALID_ARGUMENT
    4: 504,  # DEADLINE_EXCEEDED
    5: 404,  # NOT_FOUND
    6: 409,  # ALREADY_EXISTS
    7: 403,  # PERMISSION_DENIED
    8: 429,  # RESOURCE_EXHAUSTED
    9: 400,  # FAILED_PRECONDITION
    10: 409,  # ABORTED
    11: 400,  # OUT_OF_RANGE
    12: 501,  # UNIMPLEMENTED
    13: 500,  # INTERNAL
    14: 503,  # UNAVAILABLE
    15: 500,  # DATA_LOSS
    16: 401,  # UNAUTHENTICATED
}
# A trailer of this name says that the engine could not go on under the request's grammar: the same request would fail
# in the same way, and the worker is well.
CONSTRAINT_TRAILER: Final = b"smg-constraint-failed"
CONSTRAINT_FAILED: Final = 422  # the peer's


def http_of(code: int, *, constraint: bool = False) -> int:
    """The HTTP status for a call that ended with the gRPC status ``code``, not 0.

    Args:
        constraint: its trailers have CONSTRAINT_TRAILER.
    """
    return CONSTRAINT_FAILED if constraint else _HTTP.get(code, _INTERNAL)
