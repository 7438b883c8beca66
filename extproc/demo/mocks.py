"""The show with mock workers: what each leg of a request received, and when what happened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

from extproc.demo.asking import Act, Seen, ask, read
from extproc.demo.page import Page
from extproc.demo.stage import Fleet, Stage
from extproc.mock.recorder import Record
from extproc.mock.sglang.worker import SglangMock
from extproc.mock.vllm.worker import VllmMock
from extproc.workers.spec import WorkerSpec

MODEL: Final = "tiny"
TOKENS: Final = 12
PREFILL_SECONDS: Final = 0.04
TOKEN_SECONDS: Final = 0.015
CHAT: Final = "/v1/chat/completions"
_WARM_UP: Final = {"model": MODEL, "messages": [{"role": "user", "content": "Not shown."}], "max_tokens": 2}
_Mock = SglangMock | VllmMock


class Pair(NamedTuple):
    """The two legs of one sequence."""

    prefill: Record
    decode: Record


class MockShow(ABC):
    """Two prefill and two decode mocks."""

    engine: str
    acts: Sequence[Act]
    handed_over: str  # what it means that the prefill has answered

    def __init__(self) -> None:
        self._page = Page()
        self.prefills: list[_Mock] = []
        self.decodes: list[_Mock] = []

    # --- the engine's part ---

    @abstractmethod
    def mock(self, role: str, first_token_delay: float) -> _Mock:
        """A worker."""

    @abstractmethod
    def given(self, mock: Any) -> WorkerSpec:
        """A worker as the gateway is told of it."""

    @abstractmethod
    def port(self, mock: Any) -> str:
        """Where decodes meet a prefill; empty for others."""

    @abstractmethod
    def objection(self, pair: Pair) -> str:
        """What is wrong with how two legs meet; empty: nothing."""

    def answered(self, pair: Pair) -> dict[str, Any]:  # noqa: ARG002 - most answer nothing for the other leg
        """What of the prefill's answer has become part of the decode leg."""
        return {}

    def remark(self, pairs: list[Pair]) -> str:  # noqa: ARG002 - most have none
        """What else there is to see."""
        return ""

    # --- the show ---

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[Fleet]:
        """See Show."""
        async with AsyncExitStack() as stack:
            for role, mocks in (("prefill", self.prefills), ("decode", self.decodes)):
                for _ in range(2):
                    mock = self.mock(role, PREFILL_SECONDS if role == "prefill" else 0.0)
                    mocks.append(await stack.enter_async_context(mock))
            prefill, decode = (tuple(map(self.given, mocks)) for mocks in (self.prefills, self.decodes))
            yield Fleet(prefill, decode)

    async def perform(self, stage: Stage) -> list[str]:
        """See Show."""
        await stage.ready()
        page = self._page
        page.heading(f"Envoy, the ext_proc service and four mock {self.engine} workers are running.")
        prefills = [f"{mock.url}  {self.port(mock)}" for mock in self.prefills]
        page.fleet(stage.url, prefills, [mock.url for mock in self.decodes])
        for _ in self.prefills:  # each pair's first request is a slow one
            await ask(stage.client, stage.url + CHAT, _WARM_UP)
        problems = []
        for act in self.acts:
            for mock in (*self.prefills, *self.decodes):
                mock.clear()
            seen = await ask(stage.client, stage.url + act.path, act.body)
            pairs = self._pairs(act.body, seen)
            problems += [f"{act.title}: {problem}" for problem in self._problems(act, seen, pairs)]
            self._show(act, stage.url, seen, pairs)
        return problems

    def invite(self, stage: Stage) -> None:
        """See Show."""
        self._page.heading("Serving until Ctrl-C. Try:")
        self._page.line(invitation(stage, MODEL))

    def _pairs(self, asked: dict[str, Any], seen: Seen) -> list[Pair]:
        """The legs on the workers that the answer's headers name; of a list of prompts, in its order."""
        prefills = _legs(self.prefills, seen.headers.get("x-pd-prefill"))
        decodes = _legs(self.decodes, seen.headers.get("x-pd-decode"))
        prompt = asked.get("prompt")
        if isinstance(prompt, list):
            for legs in (prefills, decodes):
                legs.sort(key=lambda leg: prompt.index(leg.json["prompt"]))
        return [Pair(*legs) for legs in zip(prefills, decodes, strict=False)]

    def _problems(self, act: Act, seen: Seen, pairs: list[Pair]) -> list[str]:
        prompt = act.body.get("prompt")
        expected = len(prompt) if isinstance(prompt, list) else 1
        if seen.status != 200:
            return [f"status {seen.status}: {seen.text}"]
        if len(pairs) != expected:
            return ["a leg did not arrive at the worker that the answer names"]
        choices = read(seen).choices
        if len(choices) != expected or not all(choice.text for choice in choices):
            return ["a text is missing in the answer"]
        return [problem for pair in pairs if (problem := self.objection(pair))]

    def _show(self, act: Act, url: str, seen: Seen, pairs: list[Pair]) -> None:
        page = self._page
        page.heading(act.title)
        page.request(url + act.path, act.body)
        for number, pair in enumerate(pairs, 1):
            for role, leg in zip(("prefill", "decode"), pair, strict=True):
                where = f"{seen.headers[f'x-pd-{role}']}{leg.path}"
                answered = self.answered(pair) if leg is pair.prefill else {}
                page.leg(_numbered(f"{role} leg", number, pairs), where, leg.json, act.body, answered)
        page.steps(seen.sent, self._steps(seen, pairs))
        page.dim(f"    server-timing: {seen.headers.get('server-timing')}")
        page.line()
        if remark := self.remark(pairs):
            page.line(f"  {remark}")
        choices = read(seen).choices
        for choice in choices:
            page.line(f"  {seen.status}  {choice.text.strip()}")
        if not choices:
            page.line(f"  {seen.status}  {seen.text}")

    def _steps(self, seen: Seen, pairs: list[Pair]) -> list[tuple[float | None, str]]:
        steps: list[tuple[float | None, str]] = []
        for number, pair in enumerate(pairs, 1):
            prefill, decode = (_numbered(role, number, pairs) for role in ("prefill", "decode"))
            steps += [
                (pair.prefill.received, f"{_numbered('prefill leg', number, pairs)} has arrived"),
                (pair.decode.received, f"{_numbered('decode leg', number, pairs)} has arrived"),
                (pair.prefill.ended, f"{prefill} has answered{self.handed_over}"),
                (pair.decode.first_byte, f"{decode} sends its first byte"),
            ]
        events = f"{seen.events} events, " if seen.events else ""
        return [
            *steps,
            (seen.first, "client has the first byte"),
            (seen.last, f"client has the last byte ({events}{len(seen.body)} bytes)"),
        ]


def invitation(stage: Stage, model: str) -> str:
    """What to type next."""
    return f"""\
  curl -N {stage.url}{CHAT} -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  curl -s {stage.url}/workers
  curl -s {stage.metrics_url}
"""


def _legs(mocks: list[_Mock], url: str | None) -> list[Record]:
    return [leg for mock in mocks if mock.url == url for leg in mock.legs]


def _numbered(what: str, number: int, pairs: list[Pair]) -> str:
    return f"{what} {number}" if len(pairs) > 1 else what
