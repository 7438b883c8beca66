"""Misbehaviour on demand: what a mock worker does wrong, for which requests, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

import orjson


class FaultError(ValueError):
    """A description of a fault that cannot be understood."""


class Point(Enum):
    """A moment in an exchange."""

    UPLOAD = "upload"  # the request's head is in, its body is not
    BEFORE_HEAD = "before_head"
    AFTER_HEAD = "after_head"
    MID_BODY = "mid_body"  # after ``after_chunks`` chunks, or in the middle of an answer sent in one piece


class Gate(Protocol):
    """What is waited for until it lets pass: an ``asyncio.Event``, or something that lets pass one by one."""

    async def wait(self) -> object:
        """Return when it is time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong. Times are in seconds; fields left alone change nothing."""

    delay_head: float = 0.0
    delay_first_token: float | None = None
    delay_token: float | None = None
    tokens: int | None = None  # length of the answer, instead of the worker's own
    status: int | None = None  # answered at once, instead of running the request
    body: str | None = None  # with ``status``: the answer's body
    headers: tuple[tuple[str, str], ...] = ()  # with ``status``: added to the answer, e.g. retry-after
    drop: Point | None = None  # the connection is reset there
    hang: Point | None = None  # nothing more is sent from there on
    truncate: bool = False  # the connection is closed in an orderly way at MID_BODY, without the rest of the body
    garbage: bool = False  # the body is not what its content type says
    after_chunks: int = 1  # how much of a stream passes before MID_BODY
    early_head: bool = False  # status 200 and the stream's headers go out before anything is known
    upload_rate: float | None = None  # the request's body is read at this many bytes a second
    until: Gate | None = None  # ends the ``hang``, before every chunk from there on; without one, holds the head

    @property
    def holds_head(self) -> bool:
        """Whether the answer's head comes later than the engine has it."""
        return self.delay_head > 0 or (self.until is not None and self.hang is None)

    @classmethod
    def parse(cls, data: object) -> Fault:
        """From its JSON form: the fields by name, ``headers`` as an object, ``retry_after`` as a short cut."""
        if not isinstance(data, dict):
            raise FaultError("a fault is a JSON object")
        values: dict[str, Any] = dict(data)
        headers = dict(values.pop("headers", None) or {})
        if "retry_after" in values:
            headers["retry-after"] = values.pop("retry_after")
        known = {entry.name for entry in fields(cls)} - {"until"}  # which only a program's own mock can be given
        if unknown := set(values) - known:
            raise FaultError(f"unknown fields: {', '.join(sorted(unknown))}")
        try:
            for name in ("drop", "hang"):
                if values.get(name) is not None:
                    values[name] = Point(values[name])
            return cls(headers=tuple((str(k).lower(), str(v)) for k, v in headers.items()), **values)
        except ValueError as error:
            raise FaultError(str(error)) from None


@dataclass(slots=True)
class Rule:
    """For which requests a fault happens: all conditions that are given must hold."""

    fault: Fault
    path: str | None = None
    body_contains: bytes | None = None
    times: int | None = None  # None: always
    inference_only: bool = True

    @classmethod
    def parse(cls, data: object) -> Rule:
        """From its JSON form: a fault's fields beside ``path``, ``body_contains``, ``times``, ``inference_only``."""
        if not isinstance(data, dict):
            raise FaultError("a rule is a JSON object")
        values: dict[str, Any] = dict(data)
        own = {name: values.pop(name) for name in ("path", "times", "inference_only") if name in values}
        needle = values.pop("body_contains", None)
        return cls(Fault.parse(values), body_contains=None if needle is None else str(needle).encode(), **own)

    def matches(self, path: str, body: bytes, *, inference: bool) -> bool:
        """Whether the rule applies to a request whose body is complete."""
        if self.times == 0 or (self.inference_only and not inference):
            return False
        if self.path is not None and self.path != path:
            return False
        return self.body_contains is None or self.body_contains in body


HEADER = "x-mock-fault"
_ROLES = frozenset({"prefill", "decode", "regular", "aggregated"})


@dataclass(slots=True)
class Faults:
    """The rules of one worker, first match wins; a leg's own header ``x-mock-fault`` comes before them.

    The header is a fault's JSON, or an object from role to such (``{"prefill": {"status": 500}}``), because a gateway
    sends the client's headers to both legs. It may send them with an abort, too, which is not what they are about.
    """

    role: str
    rules: list[Rule] = field(default_factory=list)

    def from_header(self, value: str) -> Fault | None:
        """The fault that the header asks of this worker; raises FaultError."""
        try:
            data = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise FaultError(f"{HEADER}: {error}") from None
        if isinstance(data, dict) and data and _ROLES.issuperset(data):
            data = data.get(self.role)
            if data is None:
                return None
        return Fault.parse(data)

    def on_upload(self, path: str, *, inference: bool) -> Fault | None:
        """The fault that begins before the body is known, if a rule says so."""
        for rule in self.rules:
            fault = rule.fault
            early = fault.upload_rate is not None or Point.UPLOAD in (fault.drop, fault.hang)
            if early and rule.body_contains is None and rule.matches(path, b"", inference=inference):
                return self._use(rule)
        return None

    def on_request(self, path: str, body: bytes, *, inference: bool) -> Fault | None:
        """The fault of a request whose body is complete."""
        for rule in self.rules:
            if rule.matches(path, body, inference=inference):
                return self._use(rule)
        return None

    @staticmethod
    def _use(rule: Rule) -> Fault:
        if rule.times is not None:
            rule.times -= 1
        return rule.fault
