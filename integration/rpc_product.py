"""The whole product with gRPC workers, whose legs the tests play, and a real tokenizer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from product import Product, soon
from rpc_engine import RpcEngine, decodes, prefills

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tokenizers_made import CHATML, directory, tokenizer

TEXT = "The quick brown fox jumps over the lazy dog"
_EOS = 1  # of tokenizers_made


async def nothing_left(product: Product) -> None:
    """Wait until the gateway has nothing of any request over gRPC any more."""
    await product.records.until(lambda: product.gateway.alive == 0)
    assert product.gateway.rpc is not None
    await soon(lambda: product.load == {}, f"legs count: {product.load}")
    assert product.gateway.rpc.handoffs.live == 0
    assert not any(worker.tokens for worker in product.service.registry), "prompt tokens count on"
    assert not product.gateway.late
    await soon(lambda: not product.service._egress.open_legs, "legs are left")


class RpcProduct(Product):
    """One engine's workers; ``connector`` for vLLM's."""

    def __init__(
        self, engine: str, tokenizer_at: Path, *, prefills: int = 1, decodes: int = 2, connector: str = "", **more: Any
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._tokenizer_at = directory(tokenizer_at, template=CHATML)
        self._tokenizer = tokenizer("byte_level")
        super().__init__(prefills, decodes, **{"tokenizer_path": str(tokenizer_at)} | more)

    def ids(self, text: str) -> list[int]:
        """A text's tokens, without special ones."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def answer(self) -> list[int]:
        """What decodes say unless told otherwise: TEXT, and the end."""
        return [*self.ids(TEXT), _EOS]

    def _mock(self, role: str) -> RpcEngine:  # type: ignore[override]
        made = RpcEngine(self._engine, role, self._tokenizer_at, connector=self._connector)
        made.default = made.behave = prefills(cached=3) if role == "prefill" else decodes(self.answer)
        return made

    def _start_option(self, mock: Any) -> object:
        return mock.url

    def _registration(self, mock: Any) -> dict[str, object]:  # noqa: ARG002
        return {}

    async def _nobody_waits(self) -> None:
        """There is no room that anybody could wait in."""

    async def ready(self) -> None:
        await super().ready()
        await self.tokenizers()

    async def tokenizers(self) -> None:
        """Wait until prompts can be made tokens."""
        texts = self.service.text.texts
        await soon(lambda: texts.of("tiny") is not None, "the tokenizer is not loaded")

    async def forget(self) -> None:
        for mock in self.mocks:
            mock.forget()  # type: ignore[attr-defined]
        self.records.all.clear()

    async def settled(self) -> None:
        """Nothing is left of any request: here, and on the workers."""
        await nothing_left(self)
        for mock in self.mocks:
            for leg in mock.legs:  # type: ignore[attr-defined]
                async with asyncio.timeout(60):
                    await leg.ended.wait()
