"""What differs between the mock engines of the show: how they are started, and how the legs of a request meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from extproc.demo.asking import Act
from extproc.demo.mocks import CHAT, MODEL, TOKEN_SECONDS, TOKENS, MockShow, Pair
from extproc.mock.sglang.worker import SglangMock
from extproc.mock.vllm.nixl import Nixl
from extproc.mock.vllm.worker import MOONCAKE, NIXL, VllmMock
from extproc.workers.kv_config import KvConfig
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, WorkerUrl

if TYPE_CHECKING:
    from extproc.mock.vllm.engine import Sequence
    from extproc.mock.vllm.mooncake import Mooncake

_MESSAGE: Final = [{"role": "user", "content": "What is a prefill worker?"}]
_CHATS: Final = (
    Act("A chat completion", CHAT, {"model": MODEL, "messages": _MESSAGE, "max_tokens": TOKENS}),
    Act("The same, streamed", CHAT, {"model": MODEL, "messages": _MESSAGE, "max_tokens": TOKENS, "stream": True}),
)
_LIST: Final = Act(
    "Two prompts in one request: a pair of legs for each",
    "/v1/completions",
    {"model": MODEL, "prompt": ["What is a prefill worker?", "And a decode worker?"], "max_tokens": TOKENS},
)


class SglangShow(MockShow):
    """SGLang: both legs at once, meeting in a room of the prefill's bootstrap server."""

    engine = "SGLang"
    acts = _CHATS
    handed_over = ", its KV cache is handed over"

    def mock(self, role: str, first_token_delay: float) -> SglangMock:
        """See MockShow."""
        return SglangMock(
            role, model=MODEL, tokens=TOKENS, first_token_delay=first_token_delay, token_delay=TOKEN_SECONDS
        )

    def given(self, mock: SglangMock) -> WorkerSpec:
        """See MockShow."""
        port = mock.bootstrap_port if mock.has_bootstrap else None
        return WorkerSpec(WorkerUrl.parse(mock.url), Role(mock.role), bootstrap_port=port)

    def port(self, mock: SglangMock) -> str:
        """See MockShow."""
        return f"bootstrap port {mock.bootstrap_port}"

    def objection(self, pair: Pair) -> str:
        """See MockShow."""
        rooms = {leg.json["bootstrap_room"] for leg in pair}
        return "the legs were sent to different rooms" if len(rooms) > 1 else ""


class VllmShow(MockShow):
    """vLLM: NIXL's legs one after the other, Mooncake's at once; ``connector`` is the engine's class name."""

    acts = (*_CHATS, _LIST)

    def __init__(self, connector: str) -> None:
        super().__init__()
        self._connector = connector
        self.engine = "vLLM"
        self.handed_over = ": where its KV cache is" if connector == NIXL else ", its KV cache is handed over"

    def mock(self, role: str, first_token_delay: float) -> VllmMock:
        """See MockShow."""
        return _Vllm(
            role,
            connector=self._connector,
            model=MODEL,
            tokens=TOKENS,
            first_token_delay=first_token_delay,
            token_delay=TOKEN_SECONDS,
        )

    def given(self, mock: VllmMock) -> WorkerSpec:
        """See MockShow."""
        port = mock.bootstrap_port if mock.has_bootstrap else None
        kv = KvConfig(self._connector)
        return WorkerSpec(WorkerUrl.parse(mock.url), Role(mock.role), bootstrap_port=port, kv=kv)

    def port(self, mock: VllmMock) -> str:
        """See MockShow."""
        if self._connector == MOONCAKE:
            return f"bootstrap port {mock.bootstrap_port}"
        return f"NIXL port {mock.side_channel_port}"

    def objection(self, pair: Pair) -> str:
        """See MockShow."""
        if pair.decode.kv == "transferred":
            return ""
        return f"the decode worker did not fetch the prefill's KV cache: {pair.decode.kv}"

    def answered(self, pair: Pair) -> dict[str, Any]:
        """See MockShow. What a Mooncake decode is told is the gateway's own."""
        params = pair.decode.json.get("kv_transfer_params") or {}
        name = params.get("remote_request_id")
        answers = [mock.answers[name] for mock in self.prefills if isinstance(mock, _Vllm) and name in mock.answers]
        return {"kv_transfer_params": answers[0]} if answers else {}

    def remark(self, pairs: list[Pair]) -> str:
        """See MockShow."""
        return f"KV cache: {', '.join(str(pair.decode.kv) for pair in pairs)}"


class _Vllm(VllmMock):
    """Remembers the parameters that it has answered, by the request id in them."""

    answers: dict[object, dict[str, Any]]

    def _connect(self) -> Nixl | Mooncake | None:
        connector = super()._connect()
        self.answers = {}
        return _Nixl(self) if isinstance(connector, Nixl) else connector


class _Nixl(Nixl):
    def __init__(self, mock: _Vllm) -> None:
        super().__init__(mock.engine, mock.engine_id)
        self._answers = mock.answers

    def finished(self, sequence: Sequence) -> dict[str, Any] | None:
        params = super().finished(sequence)
        if params is not None:
            self._answers[params["remote_request_id"]] = params
        return params
