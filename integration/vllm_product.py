"""The whole product with mock vLLM workers, and what their tests ask of it."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED as FIRST
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from product import Product, soon

from extproc.exchange.clock import UNPIN_SECONDS
from extproc.mock import Fault, Point, Record
from extproc.mock.faults import Rule
from extproc.mock.generation import Prompt
from extproc.mock.vllm.worker import MOONCAKE, NIXL, VllmMock
from extproc.workers.worker import Worker


class Way(NamedTuple):
    """How KV caches get from prefill to decode workers: the engines' connector, what the gateway does, and settings.

    ``kv`` is what the gateway says of a cache that got across, as far as it knows.
    """

    connector: str
    handoff: str
    settings: dict[str, object]
    in_turn: bool = True
    kv: str = "handed"


WAYS = {
    "nixl": Way(NIXL, "nixl", {}),
    "mooncake": Way(MOONCAKE, "mooncake", {}, in_turn=False),
    "mooncake in turn": Way(MOONCAKE, "mooncake", {"mooncake_dispatch": "sequential"}),
    "passthrough": Way("", "passthrough", {}, kv="unknown"),
}
# The prompt of the gateway's orders to a prefill to have something to send.
_SETTLING = Prompt(ids=tuple(token for token, _ in Prompt("x").tokens())).digest
HANDING = [name for name in WAYS if name != "passthrough"]


class VllmProduct(Product):
    """One gateway with vLLM workers that hand over by ``way``; ``options`` are the mocks', ``settings`` as in Product.

    The mocks know no prefix cache and say nothing of cached tokens unless told to, so that their answers depend on
    nothing but the request.
    """

    prefills: list[VllmMock]  # type: ignore[assignment]
    decodes: list[VllmMock]  # type: ignore[assignment]
    mocks: list[VllmMock]  # type: ignore[assignment]

    def __init__(
        self,
        prefills: int = 1,
        decodes: int = 1,
        *,
        way: Way = WAYS["nixl"],
        options: dict[str, Any] | None = None,
        wait: bool = True,
        **settings: Any,
    ) -> None:
        self.way = way
        self._options = {"model": "tiny", "prompt_tokens_details": False, "prefix_caching": False, **(options or {})}
        super().__init__(prefills, decodes, wait=wait, **{**way.settings, **settings})

    @property
    def prefill(self) -> VllmMock:
        """The (first) prefill worker."""
        return self.prefills[0]

    @property
    def outlasting(self) -> Fault:
        """A prefill leg that is under way when a sibling has failed.

        It is cancelled. One that is just done then keeps its blocks for the lease, and nobody can help it. Where both
        legs go out at once it is let finish.
        """
        return Fault(delay_first_token=60 if self.way.in_turn else 0.2)

    @property
    def decode(self) -> VllmMock:
        """The (first) decode worker."""
        return self.decodes[0]

    def _mock(self, role: str) -> VllmMock:  # type: ignore[override]
        return VllmMock(role, connector=self.way.connector, **self._options)

    def _start_option(self, mock: VllmMock) -> object:  # type: ignore[override]
        return {"url": mock.url, **self._registration(mock)}

    def _registration(self, mock: VllmMock) -> dict[str, object]:  # type: ignore[override]
        fields: dict[str, object] = {"kv_connector": self.way.connector} if self.way.connector else {}
        if mock.has_bootstrap:
            fields["bootstrap_port"] = mock.bootstrap_port
        return fields

    async def restart(self, mock: VllmMock, **options: Any) -> VllmMock:
        """Start a worker that has died again, on its ports; the gateway takes it for the same one."""
        same = {"side_channel_port": mock.side_channel_port, "engine_id": mock.engine_id}
        again = VllmMock(
            mock.role,
            connector=mock.connector_name,
            port=mock.port,
            bootstrap_port=mock.bootstrap_port,
            **{**same, **self._options, **options},
        )
        await self._stack.enter_async_context(again)
        for mocks in (self.prefills, self.decodes, self.mocks):
            mocks[:] = [again if one is mock else one for one in mocks]
        return again

    async def busy(self, mocks: Sequence[VllmMock]) -> VllmMock:
        """Wait until one of these workers has got a leg; that one."""
        waits = [asyncio.create_task(mock.arrived()) for mock in mocks]
        done, _ = await asyncio.wait(waits, return_when=FIRST)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()  # or it has waited in vain
        return next(mock for mock in mocks if mock.legs)

    async def acquaint(self) -> None:
        """Have every decode know the way to every prefill: one that does not, notices that a prefill is dead."""
        for decode in self.decodes:
            for prefill in self.prefills:
                await decode.meet(prefill)

    async def forget(self) -> None:
        """See Product; what a test has left broken that failed, others shall not fail by."""
        dead = [mock for mock in self.mocks if mock.crashed.is_set()]
        if dead:  # what the gateway and decodes yet have to say to it must not reach the one that takes its place
            await asyncio.sleep(2 * UNPIN_SECONDS)
            await soon(lambda: not self.service._egress.open_legs, "legs are left")
            await soon(lambda: not any(mock.searching for mock in self.mocks), "a decode asks for the way")
        for mock in dead:
            await self.restart(mock)
        await super().forget()
        for mock in self.mocks:
            mock.engine.pins.clear()
        await self.fleet(self._know_the_way)

    def _know_the_way(self, workers: list[Worker]) -> bool:
        """Whether every prefill's engine id is known: without it, as after a restart, requests are not its."""
        asked = {mock.url for mock in self.prefills if mock.has_bootstrap}
        return all(worker.usable and worker.kv_engines for worker in workers if str(worker.url) in asked)

    async def settled(self) -> None:
        """See Product; no KV cache may be kept for a decode that will not come."""
        await self.records.until(lambda: self.gateway.alive == 0)
        await soon(lambda: self.load == {}, "a leg counts on a worker")  # prefills that are let finish
        await super().settled()
        assert not self.gateway.late

    async def _nobody_waits(self) -> None:
        for mock in self.mocks:
            await soon(lambda mock=mock: not kept(mock), f"{mock.role} keeps blocks of {mock.pins}")
            await soon(lambda mock=mock: not kept(mock) and not mock.engine.blocks.usage, f"{mock.role} keeps blocks")
            await soon(lambda mock=mock: not mock.asked_for, f"{mock.role} is asked in vain for {mock.asked_for}")


class Together:
    """Holds a fault (``until``) until one of the workers has so many legs under way: a list's, which are on one."""

    def __init__(self, mocks: Sequence[VllmMock], legs: int) -> None:
        self._mocks = mocks
        self._legs = legs

    async def wait(self) -> None:
        """See extproc.mock.faults.Gate."""
        await soon(self._are_there, "a leg does not come")

    def _are_there(self) -> bool:
        return any(sum(bool(leg.received) for leg in mock.live) >= self._legs for mock in self._mocks)


def kept(mock: VllmMock) -> Sequence[str]:
    """The transfers for which a prefill keeps blocks, but for those of what a decode might still have asked for.

    Those, one block each, are freed, as their lease would do.
    """
    pins = mock.engine.pins
    for key in mock.pins:
        if pins.digest(key) == _SETTLING:
            pins.release(key)
    return mock.pins


def of_all(mocks: Iterable[VllmMock]) -> list[Record]:
    """The legs that some workers got, orders to free blocks not counted."""
    return [leg for mock in mocks for leg in mock.legs if not leg.body.startswith(b'{"prompt":"x"')]


def once(mocks: Iterable[VllmMock], fault: Fault, times: int = 1) -> None:
    """Let whichever of the workers gets the next leg misbehave, ``times`` times in all; orders to free blocks aside."""
    early = Point.UPLOAD in (fault.drop, fault.hang)  # nothing is known of the body then
    rule = Rule(fault, times=times, body_contains=None if early else b'"model"')
    for mock in mocks:
        mock.fail(rule)


def params(leg: Record) -> Any:
    """The ``kv_transfer_params`` of a leg; None where there are none."""
    return leg.json.get("kv_transfer_params")
