"""Requests as real ones are: conversations that grow, agents with long tools, documents asked about once, bursts.

Everything comes from one seed. A conversation is made whole; its turns are beginnings of it, closed by brackets.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import accumulate

BLOCK = 64  # tokens; an engine's 16 would only make the simulation slower
_TURN_END = b"}]"
_ID = 7  # bytes of a token id and the comma before it: all have six digits
_USUAL = [100_000] * (BLOCK - 4)


def ids_of(block: int) -> list[int]:
    """The token ids of a block, by what it is called: the first four tell blocks apart."""
    return [*(100_000 + (block >> shift & 0xFFFF) for shift in (0, 16, 32, 48)), *_USUAL]


@dataclass(slots=True)
class Turn:
    """One request: the first ``end`` bytes of its conversation. ``at``: when it is sent at the earliest, in seconds."""

    at: float
    end: int
    output: int  # tokens


@dataclass(slots=True)
class Conversation:
    """A client's requests, one after the other's answer.

    Attributes:
        context: what stands beside the messages and before them in the model's prompt, such as tools.
        text: the JSON of the messages.
        bytes_per_token: of this text; what no gateway knows.
        key: its own, such as clients send in a header.
        blocks: the chain of the blocks' identities, which begins with those of ``context``.
    """

    kind: str
    context: bytes
    text: bytes
    turns: list[Turn]
    bytes_per_token: float
    key: bytes = b""
    blocks: list[int] = field(default_factory=list)
    _ids: bytes = b""

    def __post_init__(self) -> None:
        whole = self.context + self.text
        step = int(BLOCK * self.bytes_per_token)
        number = 0
        for start in range(0, len(whole) - step + 1, step):
            number = hash((number, whole[start : start + step]))
            self.blocks.append(number)

    def prompt(self, turn: Turn) -> bytes:
        """As it stands in the body."""
        return self.text[: turn.end] + _TURN_END

    def tokens(self, turn: Turn) -> int:
        """Of the prompt."""
        return max(1, int((len(self.context) + turn.end) / self.bytes_per_token))

    def token_ids(self, count: int) -> bytes:
        """The first ``count`` tokens of it all, those of ``context`` among them, as JSON."""
        if not self._ids:
            self._ids = b"".join(_text_of(block) for block in self.blocks)
        return b"[" + self._ids[1 : _ID * count] + b"]"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What comes, and to what.

    Attributes:
        shares: of conversations, by kind.
        rate: conversations that begin per second, all workers together.
        seconds: how long they begin.
        workers, cache: how many there are, and how many tokens each keeps.
        burst: for ten seconds of each minute so many times as many begin.
        restart: one of the workers is another process from then on, in seconds; None: never.
    """

    name: str
    title: str
    shares: dict[str, float]
    rate: float
    seconds: float = 600.0
    workers: int = 8
    cache: int = 400_000
    tenants: int = 60
    burst: float = 1.0
    restart: float | None = None


SCENARIOS = (
    Scenario("chat", "conversations of many tenants", {"chat": 1}, rate=8.0, seconds=400),
    Scenario("agents", "agents with tools, long contexts", {"agent": 1}, rate=1.0, seconds=300, tenants=12),
    Scenario("once", "documents asked about once", {"once": 1}, rate=6.0, seconds=300),
    Scenario("hot", "one tenant's long instructions, one turn", {"hot": 1}, rate=60.0, seconds=120, tenants=1),
    Scenario(
        "mixed", "all of these, in bursts; one worker restarts",
        {"chat": 0.72, "agent": 0.06, "once": 0.22}, rate=5.5, burst=2.2, seconds=400, restart=200,
    ),
    Scenario(
        "large", "the same on 64 workers", {"chat": 0.72, "agent": 0.06, "once": 0.22},
        rate=44.0, seconds=120, workers=64, tenants=400, burst=2.2,
    ),
)  # fmt: skip


def _text_of(block: int) -> bytes:
    return b",%d,%d,%d,%d" % (*ids_of(block)[:4],) + b",100000" * len(_USUAL)


class _Words:
    """Text of any size, all of it different."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool = "".join(
            rng.choice(("", " ", " ", ", ", ". ")) + "".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9)))
            for _ in range(40_000)
        )

    def text(self, size: int) -> str:
        """``size`` characters."""
        pieces = []
        while size > 0:
            start = self._rng.randrange(len(self._pool) - 64)
            length = min(size, self._rng.randint(200, 4000), len(self._pool) - start)
            pieces.append(self._pool[start : start + length])
            size -= length
        return "".join(pieces)


def _message(role: str, text: str) -> str:
    return json.dumps({"role": role, "content": text})


class _Maker:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.rng = random.Random(f"{seed} {scenario.name}")
        self.scenario = scenario
        self.words = _Words(self.rng)
        count = scenario.tenants
        self.weights = list(accumulate(1 / (rank + 1) ** 1.1 for rank in range(count)))  # Zipf
        self.instructions = [self.words.text(self._size(1500, 0.9)) for _ in range(count)]
        self.tools = [self.words.text(self._size(24_000, 0.5)) for _ in range(count)]
        self.ratios = [self.rng.uniform(3.0, 4.6) for _ in range(count)]
        self.shared = "You are a helpful assistant."

    def _size(self, median: float, spread: float) -> int:
        return int(median * self.rng.lognormvariate(0, spread))

    def _tenant(self) -> int:
        return self.rng.choices(range(self.scenario.tenants), cum_weights=self.weights)[0]

    def make(self, kind: str, start: float) -> Conversation:
        rng, tenant = self.rng, self._tenant()
        if kind == "once":
            return self._grown(kind, start, tenant, b"", self.shared, 1, self._size(28_000, 0.7), 0, 1, 200)
        if kind == "hot":
            return self._grown(kind, start, tenant, b"", self.tools[0], 1, self._size(1200, 0.8), 0, 1, 150)
        if kind == "chat":
            turns = min(1 + int(rng.expovariate(1 / 5)), 40)
            first = self._size(20_000, 0.5) if rng.random() < 0.15 else self._size(400, 1.0)  # some bring a document
            return self._grown(kind, start, tenant, b"", self.instructions[tenant], turns, first, 350, 25.0, 350)
        tools = b'[{"type":"function","function":' + json.dumps(self.tools[tenant]).encode()
        turns = min(3 + int(rng.expovariate(1 / 14)), 60)
        return self._grown(kind, start, tenant, tools, self.instructions[tenant], turns, 2500, 3500, 3.0, 120)

    def _grown(
        self, kind: str, start: float, tenant: int, context: bytes, system: str,
        turns: int, first: int, later: int, think: float, output: int,
    ) -> Conversation:  # fmt: skip
        rng = self.rng
        ratio = self.ratios[tenant]
        parts = "[" + _message("system", system)
        made: list[Turn] = []
        at = start
        for number in range(turns):
            parts += ", " + _message("user", self.words.text(first if number == 0 else self._size(later, 0.9)))
            tokens = max(1, int(output * rng.lognormvariate(0, 0.6)))
            made.append(Turn(at, len(parts) - 1, tokens))
            parts += ", " + _message("assistant", self.words.text(int(tokens * ratio)))
            at += tokens * 0.025 + rng.expovariate(1 / think)
        return Conversation(kind, context, parts[: made[-1].end + 1].encode(), made, ratio, b"%x" % rng.getrandbits(64))


def conversations(scenario: Scenario, seed: int) -> list[Conversation]:
    """All of a scenario, in the order in which they begin."""
    maker = _Maker(scenario, seed)
    rng = maker.rng
    found: list[Conversation] = []
    kinds, weights = list(scenario.shares), list(scenario.shares.values())
    # The mean rate is as said, whatever the bursts.
    calm = scenario.rate / (1 + (scenario.burst - 1) / 6)
    at = 0.0
    while True:
        rate = calm * (scenario.burst if at % 60 < 10 else 1)
        at += rng.expovariate(rate)
        if at > scenario.seconds:
            return found
        found.append(maker.make(rng.choices(kinds, weights)[0], at))
