"""Engines over gRPC whose ``Generate`` the tests play: each leg does what its worker is told to.

They meet nobody and compute nothing; what is checked is how the gateway carries legs to them. The strict ones are
extproc/mock/rpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from extproc.mock.rpc.server import RpcServer

PARAMS = (
    '{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [1, 2], "remote_engine_id": "e",'
    ' "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}'
)


class Leg:
    """One ``Generate`` that came."""

    def __init__(self, engine: RpcEngine, request: Any, context: Any) -> None:
        self.engine = engine
        self.request = request
        self.context = context
        self.metadata = dict(context.invocation_metadata())
        self.written = 0  # messages that gRPC has taken
        self.ended = asyncio.Event()
        self.cancelled = False  # by the other side, or aborted by name

    @property
    def prompt(self) -> list[int]:
        return list(self.request.tokenized.input_ids)

    async def chunk(self, ids: Sequence[int], so_far: int) -> None:
        """Some tokens of a stream; ``so_far`` with them."""
        facts = self.engine.facts
        pb = facts.messages()
        own = len(ids) if facts.engine == "vllm" else so_far  # vLLM counts each message's
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": own}
        self.written += 1
        await self.context.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **counts)))

    async def complete(self, ids: Sequence[int], finish: str = "length", cached: int = 0, params: str = "") -> None:
        """The end of the sequence."""
        facts = self.engine.facts
        pb = facts.messages()
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(ids), "cached_tokens": cached}
        own = {"kv_transfer_params_json": params} if params and facts.engine == "vllm" else {}
        end = pb.GenerateComplete(output_ids=ids, finish_reason=finish, **counts, **own)
        await self.context.write(pb.GenerateResponse(complete=end))


Behave = Callable[[Leg], Awaitable[None]]


async def never(_: Leg) -> None:
    """Say nothing."""
    await asyncio.Event().wait()


def fails(code: grpc.StatusCode, message: str = "no") -> Behave:
    """An error before the first message."""

    async def behave(leg: Leg) -> None:
        await leg.context.abort(code, message)

    return behave


def prefills(cached: int = 0) -> Behave:
    """A prefill leg that does well."""

    async def behave(leg: Leg) -> None:
        await leg.complete([5], cached=cached, params=PARAMS)

    return behave


def decodes(ids: Sequence[int], finish: str = "stop", go_on: asyncio.Event | None = None) -> Behave:
    """A decode leg that answers with these tokens, streamed one by one; ``go_on`` is waited for behind the first."""

    async def behave(leg: Leg) -> None:
        if leg.request.stream:
            for at, token in enumerate(ids):
                await leg.chunk([token], at + 1)
                if at == 0 and go_on is not None:
                    await go_on.wait()
            await leg.complete(ids[-1:], finish)
        else:
            await leg.complete(ids, finish)

    return behave


class RpcEngine(RpcServer):
    """See the module."""

    def __init__(self, engine: str, role: str, tokenizer: Path, **options: Any) -> None:
        super().__init__(engine, role, tokenizer=tokenizer, **options)
        self.default: Behave = never
        self.behave: Behave = never
        self.legs: list[Leg] = []
        self.aborted: list[str] = []
        self._arrivals: asyncio.Queue[Leg] = asyncio.Queue()

    def forget(self) -> None:
        """Behave, and forget what was asked so far."""
        self.behave = self.default
        self.legs.clear()
        self.aborted.clear()
        self._arrivals = asyncio.Queue()

    async def arrived(self) -> Leg:
        """The next leg that has come."""
        async with asyncio.timeout(60):
            return await self._arrivals.get()

    def _handlers(self) -> tuple[Any, ...]:
        messages = self.facts.messages()
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate,
                request_deserializer=messages.GenerateRequest.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            ),
            "Abort": grpc.unary_unary_rpc_method_handler(
                self._abort,
                request_deserializer=messages.AbortRequest.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            ),
        }
        return (grpc.method_handlers_generic_handler(self.facts.service, methods), *super()._handlers())

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        leg = Leg(self, request, context)
        self.legs.append(leg)
        self._arrivals.put_nowait(leg)
        working = asyncio.ensure_future(self.behave(leg))
        try:
            await working
        except asyncio.CancelledError:
            leg.cancelled = True
            working.cancel()
            raise
        finally:
            leg.ended.set()
        return
        yield  # what makes it a generator

    async def _abort(self, request: Any, context: Any) -> Any:  # noqa: ARG002 - gRPC's signature
        one = getattr(request, "request_id", "")
        self.aborted += [one] if one else list(request.request_ids)
        return self.facts.messages().AbortResponse()
