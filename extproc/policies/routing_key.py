"""What says that requests belong together: a client's routing key.

A header, of several the first that is there; else, for sticky sessions, the request's own id in its body (SGLang's
``rid``), of which turns and retries of a conversation are told by ``_t3`` and ``_r1`` at its end. Source: the peer's
``--routing-key-headers`` and ``--routing-key-override``. It takes no key longer than 128 bytes; here its hash counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from extproc.policies.policy import RequestView

_LONGEST: Final = 128  # bytes that are kept of a key
_TURN: Final = re.compile(r"(?:_[tr]\d+)+\Z")


class RoutingKeys:
    """Reads them. ``headers``: lower-case names. ``lineage``: where none is there, by the request's own id."""

    def __init__(self, headers: Sequence[str], *, lineage: bool = False) -> None:
        self._headers = headers
        self._lineage = lineage

    def of(self, request: RequestView) -> bytes | None:
        """The routing key of ``request``; None when it has none."""
        fields = request.fields
        for name in self._headers:
            value = fields.get(name)
            if value:
                return short(value)
        if self._lineage and (name := _TURN.sub("", request.own_id())):
            return short(name.encode())
        return None


def short(key: bytes) -> bytes:
    """The same, or what stands for it where it is long."""
    return key if len(key) <= _LONGEST else blake2b(key).digest()
