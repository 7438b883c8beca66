"""Worker ids."""

from __future__ import annotations

import secrets
import time
import uuid


def new_worker_id() -> str:
    """A UUID of version 7 (RFC 9562 §5.7): sorts by time of registration, as the peer's ids do."""
    milliseconds = time.time_ns() // 1_000_000
    random = secrets.randbits(74)
    value = (milliseconds & (1 << 48) - 1) << 80 | 7 << 76 | (random >> 62) << 64 | 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=value))
