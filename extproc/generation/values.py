"""Values of JSON as the engines' own servers take them.

Both servers read bodies with pydantic in its lax mode: a number may come in a string, a whole float is an integer, 1 is
true. What they refuse is refused here, with the field's name; null is as good as nothing.
Source: pydantic's conversion table (docs.pydantic.dev/latest/concepts/conversion_table).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, NoReturn

import orjson

from extproc.errors import GatewayError

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})
LARGEST_ID: Final = 2**31 - 1  # of a token: what all engines' messages can say of one
LARGEST_COUNT: Final = 2**31 - 1


def wrong(name: str, what: str) -> NoReturn:
    """Raise GatewayError: the field ``name`` must be ``what``."""
    raise GatewayError("invalid_type", f"`{name}` must be {what}", param=name)


def refuse(name: str, why: str) -> NoReturn:
    """Raise GatewayError: the field ``name`` is one that gRPC workers cannot be told of."""
    raise GatewayError("unsupported_parameter", f"`{name}`: {why}", param=name)


def integer(value: Any, name: str) -> int:
    """A whole number."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            pass
    wrong(name, "an integer")


def count(value: Any, name: str, least: int = 0, most: int = LARGEST_COUNT) -> int:
    """A whole number of which ``least`` are too few no more, and ``most`` not yet too many."""
    found = integer(value, name)
    if not least <= found <= most:
        wrong(name, f"an integer of at least {least}" if found < least else f"an integer of at most {most}")
    return found


def number(value: Any, name: str) -> float:
    """A finite number."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            wrong(name, "a number")
        if isfinite(found):
            return found
    wrong(name, "a number")


def boolean(value: Any, name: str) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        text = value.lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    wrong(name, "a boolean")


def text(value: Any, name: str) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    wrong(name, "a string")


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A string, or a list of strings."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    wrong(name, "a string or a list of strings")


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """An object."""
    if isinstance(value, dict):
        return value
    wrong(name, "an object")


def objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    wrong(name, "a list of objects")


def json_text(value: Any) -> str:
    """JSON of ``value``; a string is taken to be JSON already."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


class Fields:
    """The members of one JSON object, null ones left out, by the names that a client knows them by.

    Args:
        members: the object.
        within: the name of the member that holds it; empty for the body itself.
    """

    __slots__ = ("_within", "members")

    def __init__(self, members: Mapping[str, Any], within: str = "") -> None:
        self.members = {name: value for name, value in members.items() if value is not None}
        self._within = within

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def name(self, name: str) -> str:
        """How an error message calls the member."""
        return f"{self._within}.{name}" if self._within else name

    def get(self, name: str) -> Any:
        """The member as it is; None where there is none."""
        return self.members.get(name)

    def integer(self, name: str) -> int | None:
        """See :func:`integer`."""
        return None if name not in self.members else integer(self.members[name], self.name(name))

    def count(self, name: str, least: int = 0, most: int = LARGEST_COUNT) -> int | None:
        """See :func:`count`."""
        return None if name not in self.members else count(self.members[name], self.name(name), least, most)

    def number(self, name: str) -> float | None:
        """See :func:`number`."""
        return None if name not in self.members else number(self.members[name], self.name(name))

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """See :func:`boolean`."""
        return default if name not in self.members else boolean(self.members[name], self.name(name))

    def text(self, name: str) -> str | None:
        """See :func:`text`."""
        return None if name not in self.members else text(self.members[name], self.name(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """See :func:`texts`."""
        return () if name not in self.members else texts(self.members[name], self.name(name))

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """See :func:`mapping`."""
        return None if name not in self.members else mapping(self.members[name], self.name(name))

    def objects(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        """See :func:`objects`."""
        return None if name not in self.members else objects(self.members[name], self.name(name))
