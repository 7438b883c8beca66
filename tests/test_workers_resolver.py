"""From host names to addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from fleet import eventually

from extproc.workers.resolver import ResolveError, Resolver, choose, literal


class Dns:
    """A name server under the test's control."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []
        self.open = 0
        self.most_open = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def lookup(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.gate.wait()
        finally:
            self.open -= 1
        if self.error is not None:
            raise self.error
        return self.addresses


@pytest.mark.parametrize(
    ("addresses", "current", "avoid", "expected"),
    [
        (["10.0.0.2", "10.0.0.1"], None, False, "10.0.0.1"),
        (["10.0.0.10", "10.0.0.9"], None, False, "10.0.0.9"),  # by value, not by text
        (["::1", "127.0.0.1"], None, False, "127.0.0.1"),
        (["2001:db8::2", "2001:db8::1"], None, False, "2001:db8::1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.2", False, "10.0.0.2"),
        (["10.0.0.1", "10.0.0.3"], "10.0.0.2", False, "10.0.0.1"),
        (["10.0.0.1", "10.0.0.2", "::1"], "10.0.0.2", True, "::1"),
        (["10.0.0.1", "10.0.0.2", "::1"], "::1", True, "10.0.0.1"),
        (["10.0.0.1"], "10.0.0.1", True, "10.0.0.1"),
        (["10.0.0.1", "10.0.0.1"], "10.0.0.1", True, "10.0.0.1"),
    ],
)
def test_choice(addresses: list[str], current: str | None, avoid: bool, expected: str) -> None:  # noqa: FBT001 - a table
    assert choose(addresses, current, avoid=avoid) == expected
    assert choose(list(reversed(addresses)), current, avoid=avoid) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("engine", None),
        ("127.1", None),
        ("fe80::1%eth0", None),
    ],
)
def test_literals(host: str, expected: str | None) -> None:
    assert literal(host) == expected


async def test_a_literal_asks_nobody() -> None:
    dns = Dns()
    assert await Resolver(dns.lookup).resolve("2001:DB8::1", 1) == "2001:db8::1"
    assert dns.asked == []


async def test_a_name_is_looked_up() -> None:
    dns = Dns("10.0.0.2", "10.0.0.1", "fe80::1%2")
    resolver = Resolver(dns.lookup)
    assert await resolver.resolve("engine", 8000) == "10.0.0.1"
    assert await resolver.resolve("engine", 8000, "10.0.0.2") == "10.0.0.2"
    assert await resolver.resolve("engine", 8000, "10.0.0.2", avoid=True) == "10.0.0.1"
    assert dns.asked == [("engine", 8000)] * 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot resolve engine: Name or service not known"),
        (UnicodeError("label too long"), "cannot resolve engine: label too long"),
    ],
)
async def test_a_failure_says_why(error: Exception, message: str) -> None:
    dns = Dns()
    dns.error = error
    with pytest.raises(ResolveError, match=message):
        await Resolver(dns.lookup).resolve("engine", 1)


async def test_no_usable_address_is_a_failure() -> None:
    with pytest.raises(ResolveError, match="it has no address"):
        await Resolver(Dns("fe80::1%2").lookup).resolve("engine", 1)


async def test_a_silent_name_server_is_a_failure() -> None:
    dns = Dns("10.0.0.1")
    dns.gate.clear()
    with pytest.raises(ResolveError, match=r"no answer within 0\.01 s"):
        await Resolver(dns.lookup, timeout=0.01).resolve("engine", 1)


async def test_look_ups_at_once_are_bounded() -> None:
    dns = Dns("10.0.0.1")
    dns.gate.clear()
    resolver = Resolver(dns.lookup, concurrency=3)
    tasks = [asyncio.create_task(resolver.resolve(f"engine-{number}", 1)) for number in range(10)]
    await eventually(lambda: len(dns.asked) == 3)
    dns.gate.set()
    assert await asyncio.gather(*tasks) == ["10.0.0.1"] * 10
    assert dns.most_open == 3


async def test_the_systems_resolver() -> None:
    assert await Resolver().resolve("localhost", 80) in ("127.0.0.1", "::1")
    with pytest.raises(ResolveError, match=r"cannot resolve nowhere\.invalid"):
        await Resolver().resolve("nowhere.invalid", 80)
