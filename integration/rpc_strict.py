"""The whole product with strict mock gRPC workers: their tokenizer it has from them, and what they write is known."""

from __future__ import annotations

from typing import Any

from product import Product, soon
from rpc_product import nothing_left
from tokenizers import Tokenizer

from extproc.handoff.grpc_vllm import ANY_TOKEN
from extproc.mock import RpcMock
from extproc.mock.generation import Limits, Prompt
from extproc.mock.rpc import model
from extproc.mock.rpc.engines import MOONCAKE, NIXL

FLOWS = {
    "sglang": ("sglang", ""),
    "nixl": ("vllm", NIXL),
    "mooncake": ("vllm", MOONCAKE),
    "tokenspeed": ("tokenspeed", ""),
}
RECEIVING = 0.5
WORDS = 30  # of an answer that nothing limits
_ORDERED = Prompt(ids=(ANY_TOKEN,)).digest  # the prompt of the gateway's own calls


class StrictMock(RpcMock):
    """A worker whose ``legs`` are clients' alone.

    Of a transfer that has failed the gateway leaves nothing by calls of its own (exchange/orders.py), which it makes
    when it suits the engines: seconds after the request, when another test may have begun. Of what a decode might still
    have asked for, and has not, the prefill keeps a block for its lease: so its ``pins`` are without those.
    """

    @property
    def legs(self) -> list[Any]:
        return [leg for leg in super().legs if not leg.message.request_id.startswith("order-")]  # type: ignore[attr-defined]

    @property
    def pins(self) -> tuple[str, ...]:
        """See RpcMock. Those of the gateway's calls are freed, as their lease would do."""
        pins = self._vllm.pins
        for key in pins.keys:
            if pins.digest(key) == _ORDERED:
                pins.release(key)
        return pins.keys


class StrictProduct(Product):
    """One flow's workers; ``flow`` is a key of FLOWS."""

    def __init__(self, flow: str, *, dp_size: int = 1, **settings: Any) -> None:
        self.flow = flow
        self.engine, self._connector = FLOWS[flow]
        self._dp_size = dp_size
        self._tokenizer = Tokenizer.from_str(model.files()["tokenizer.json"].decode())
        super().__init__(1, 2, **settings)

    # -- what its workers are -------------------------------------------------------------------------------------

    def _mock(self, role: str) -> RpcMock:  # type: ignore[override]
        return self.mock(role)

    def mock(self, role: str, **options: Any) -> RpcMock:
        """A worker of the flow, not started."""
        given = {"connector": self._connector, "dp_size": self._dp_size, "tokens": WORDS, **options}
        return StrictMock(self.engine, role, **given)

    def _start_option(self, mock: Any) -> object:
        return f"{mock.url} {mock.bootstrap_port}" if mock.has_bootstrap else mock.url

    def _registration(self, mock: Any) -> dict[str, object]:
        return {"bootstrap_port": mock.bootstrap_port} if mock.has_bootstrap else {}

    # -- what they write ------------------------------------------------------------------------------------------

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """A text's tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def chat_ids(self, content: str) -> list[int]:
        """The tokens of a conversation of one message."""
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        return self.ids(text, special=False)

    def written(self, ids: list[int], **limits: Any) -> list[int]:
        """The tokens that a decode writes, the end of text among them."""
        return model.written(ids, Limits(**limits), WORDS).ids

    def text(self, ids: list[int], **limits: Any) -> str:
        """How they read; half a character that is left at the end, as the engine's own server has it."""
        text = model.decoded(self.written(ids, **limits))
        return text.rstrip("\N{REPLACEMENT CHARACTER}") if self.engine == "vllm" else text

    # -- between tests --------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        await super().ready()
        texts = self.service.text.texts
        await soon(lambda: texts.of("tiny") is not None, "the tokenizer is not loaded")
        if self.engine == "tokenspeed":  # how long a decode that nobody wants is let be: seconds are too long here
            assert self.gateway.rpc is not None
            self.gateway.rpc.handoffs.of(self.worker(self.prefill)).receiving = RECEIVING  # type: ignore[misc]

    async def forget(self) -> None:
        for mock in self.mocks:
            mock.behave()
            mock.clear()
            mock.calls.clear()  # type: ignore[attr-defined]
        self.records.all.clear()

    async def settled(self) -> None:
        """Nothing is left of any request: here, on the workers, and between them."""
        await nothing_left(self)
        for mock in self.mocks:
            await mock.idle()
            await soon(lambda mock=mock: mock.running == 0, f"{mock.role} still runs requests")
        if self.engine == "vllm":
            await soon(lambda: not self.prefill.pins, f"blocks are kept: {self.prefill.pins}")  # type: ignore[attr-defined]
        else:
            await soon(lambda: self.prefill.rooms == 0, "a leg waits in a room")  # type: ignore[attr-defined]
