"""Keys of the control API: whose they are, and what they open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

API_KEY_ID: Final = "api-key"  # what ``--api-key`` is called in the log
_FORM: Final = "id:name:admin|user:key"


class KeyRole(Enum):
    """What a key is good for."""

    ADMIN = "admin"  # everything
    USER = "user"  # reading


@dataclass(frozen=True, slots=True)
class ControlKey:
    """One key, of which only the hash is kept.

    Attributes:
        id: names it in the log.
        name: whose it is, for people.
        role: what it is good for.
        digest: SHA-256 of the key.
    """

    id: str
    name: str
    role: KeyRole
    digest: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> ControlKey:
        """Read ``id:name:role:key``; the key may have colons. Raises ValueError, whose message has no part of it."""
        parts = text.split(":", 3)
        if len(parts) != 4:
            raise ValueError(f"Must be {_FORM}")
        key_id, name, role, key = parts
        if not key_id or not key_id.isprintable() or not name.isprintable():
            raise ValueError(f"Must be {_FORM}, with an id")
        if role not in (KeyRole.ADMIN.value, KeyRole.USER.value):
            raise ValueError(f"Must be {_FORM}: the third part of key {key_id!r} is neither admin nor user")
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ValueError(f"The key of {key_id!r} must be visible ASCII characters")
        return cls(key_id, name, KeyRole(role), _hashed(key.encode()))


def of_api_key(api_key: str) -> ControlKey:
    """The gateway's ``--api-key`` as a key of the control API."""
    return ControlKey(API_KEY_ID, "", KeyRole.ADMIN, _hashed(api_key.encode()))


def key_of(authorization: str, keys: Sequence[ControlKey]) -> ControlKey | None:
    """The key that an ``Authorization: Bearer`` header bears; how long it takes does not tell which, or how nearly."""
    scheme, _, given = authorization.partition(" ")
    digest = _hashed(given.strip().encode("utf-8", "surrogateescape"))
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found if scheme.lower() == "bearer" else None


def _hashed(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
