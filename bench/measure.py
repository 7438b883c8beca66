"""One measured window: a number of requests through one system, CPU time before and after, and what proves the work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench import rpc, sglang, vllm
from bench.client import Load, LoadGenerator
from bench.engine import Kind
from bench.prompts import Answer, Prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.fleet import Fleet, Seen
    from bench.systems import Running

_SETTLE = 0.15  # seconds for work that goes on behind the last answer, such as the end of a prefill leg
_START_TIMEOUT = 60.0
_WINDOW_TIMEOUT = 60.0
# A gateway may write the same JSON shorter than the client did (an escape as UTF-8), never half as long.
_LEAST_BODY_SHARE = 0.5


class NotReadyError(Exception):
    """A system did not come to answer; the message says what it answered last."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and how many make a window at each concurrency."""

    name: str
    title: str
    prompt_bytes: int
    answer: Answer
    requests: dict[int, int]
    kind: Kind = Kind.SGLANG

    @property
    def expected(self) -> bytes | Callable[[bytes], str | None]:
        """The body that a right answer has, to the byte; where the gateway makes it, what finds fault with one."""
        if self.kind.is_grpc:
            return rpc.Check(streamed=self.answer.streamed)
        engine = vllm if self.kind is Kind.VLLM else sglang
        return b"".join(engine.stream_events("decode")) if self.answer.streamed else engine.chat_answer("decode")

    @property
    def attempts(self) -> int:
        """How often a request is tried until it is answered."""
        return 2 if self.answer.late else 1

    def prompts(self) -> Prompts:
        """Prepare its request bodies (takes up to seconds)."""
        return Prompts.of_size(self.prompt_bytes, self.answer)


CASES = (
    Case("small", "small chat", 0, Answer.WHOLE, requests={1: 1500, 32: 5000}),
    Case("stream", "200 chunks, paced", 0, Answer.PACED, requests={1: 6, 32: 128}),
    Case("burst", "200 chunks, burst", 0, Answer.BURST, requests={1: 150, 32: 500}),
    Case("32k", "32 KB prompt", 32_000, Answer.WHOLE, requests={1: 1000, 32: 2000}),
    Case("220k", "220 KB prompt", 220_000, Answer.WHOLE, requests={1: 300, 32: 500}),
    Case("1m", "1 MB prompt", 1_000_000, Answer.WHOLE, requests={1: 80, 32: 160}),
    Case("vllm-small", "small chat, NIXL", 0, Answer.WHOLE, requests={1: 1000, 32: 4000}, kind=Kind.VLLM),
    Case("vllm-stream", "200 chunks, NIXL", 0, Answer.PACED, requests={1: 6, 32: 128}, kind=Kind.VLLM),
    Case("vllm-220k", "220 KB, NIXL", 220_000, Answer.WHOLE, requests={1: 200, 32: 400}, kind=Kind.VLLM),
    Case("grpc-small", "small chat, gRPC", 0, Answer.WHOLE, requests={1: 500, 32: 2000}, kind=Kind.SGLANG_GRPC),
    Case("grpc-stream", "200 tokens, gRPC", 0, Answer.PACED, requests={1: 6, 32: 128}, kind=Kind.SGLANG_GRPC),
    Case("vllm-grpc-small", "small, NIXL gRPC", 0, Answer.WHOLE, requests={1: 500, 32: 2000}, kind=Kind.VLLM_GRPC),
    Case("vllm-grpc-stream", "200, NIXL gRPC", 0, Answer.PACED, requests={1: 6, 32: 128}, kind=Kind.VLLM_GRPC),
)
LATE_CASES = (
    Case("late-small", "small, late", 0, Answer.LATE, requests={1: 50, 32: 1000}),
    Case("late-stream", "200 chunks, late", 0, Answer.LATE_PACED, requests={1: 6, 32: 128}),
)


@dataclass(slots=True)
class Window:
    """The result of one window. CPU in seconds by part, idle consumption already taken off."""

    load: Load
    cpu: dict[str, float]
    problems: list[str] = field(default_factory=list)

    @property
    def micros(self) -> dict[str, float]:
        """CPU microseconds per request, by part."""
        return {part: 1e6 * seconds / max(self.load.requests, 1) for part, seconds in self.cpu.items()}


async def measure(
    running: Running,
    fleet: Fleet,
    case: Case,
    prompts: Prompts,
    *,
    concurrency: int,
    requests: int,
    idle: dict[str, float],
) -> Window:
    """Warm up, then measure ``requests`` requests. ``idle``: CPU seconds per second without load, by part."""
    bodies = prompts.bodies()
    generator = await LoadGenerator(running.port, case.expected).open(concurrency)
    try:
        await generator.run(bodies, max(2 * concurrency, requests // 10), _WINDOW_TIMEOUT)
        await asyncio.sleep(_SETTLE)
        seen_before, cpu_before = await fleet.seen(), running.cpu()
        load = await generator.run(bodies, requests, _WINDOW_TIMEOUT)
        await asyncio.sleep(_SETTLE)
        seen_after, cpu_after = await fleet.seen(), running.cpu()
    finally:
        generator.close()
    elapsed = load.wall + _SETTLE
    cpu = {part: max(cpu_after[part] - cpu_before[part] - idle[part] * elapsed, 0.0) for part in cpu_after}
    problems = [f"{number} x {problem}" for problem, number in load.failures.items()]
    # Over gRPC a prompt comes as tokens, of which there is no telling how many bytes of text they were.
    least = requests if case.kind.is_grpc else int(requests * len(next(bodies)) * _LEAST_BODY_SHARE)
    for role, before, after in zip(("prefill", "decode"), seen_before, seen_after, strict=True):
        if running.system.disaggregated or role == "decode":
            handoff = running.system.disaggregated
            problems += missing_work(role, after - before, requests, least, handoff=handoff, attempts=case.attempts)
    return Window(load, cpu, problems)


def missing_work(
    role: str, seen: Seen, requests: int, least_bytes: int, *, handoff: bool, attempts: int = 1
) -> list[str]:
    """What a role's workers should have received in a window and did not.

    Of an attempt whose prefill leg fails the decode leg may have ended before it arrived.
    """
    problems = []
    least_legs = requests if role == "decode" else requests * attempts
    if not least_legs <= seen.legs <= requests * attempts:
        problems.append(f"{seen.legs} {role} legs for {requests} requests")
    if handoff and seen.handoffs != seen.legs:
        problems.append(f"{seen.legs - seen.handoffs} {role} legs without a handoff")
    if seen.body_bytes < least_bytes:
        problems.append(f"{role} legs carried {seen.body_bytes} bytes, less than {least_bytes}")
    return problems


async def until_ready(running: Running, fleet: Fleet) -> None:
    """Send small requests until all are answered rightly and every worker gets its part. Raises NotReadyError."""
    case = next(case for case in CASES if case.kind is fleet.kind)
    prompts = case.prompts()
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT
    first = 0 if running.system.disaggregated else len(fleet.prefill_ports)
    problem = ""
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.2)
        if any(child.ended for child in running.children):
            raise NotReadyError(f"{running.system.name} ended\n{running.children[0].tail()}")
        before = await fleet.legs()
        try:
            generator = await LoadGenerator(running.port, case.expected).open(1)
        except OSError as error:
            problem = str(error)
            continue
        load = await generator.run(prompts.bodies(), 8, limit=5)
        generator.close()
        idle_workers = [a for a, b in list(zip(await fleet.legs(), before, strict=True))[first:] if a == b]
        if not load.failures and not idle_workers:
            running.find_processes()
            return
        problem = f"{dict(load.failures)}, {len(idle_workers)} workers got nothing"
    raise NotReadyError(f"{running.system.name}: {problem}\n{running.children[0].tail()}")


async def idle_rates(systems: list[Running], seconds: float) -> list[dict[str, float]]:
    """CPU seconds per second that each system uses without any request, by part."""
    before = [running.cpu() for running in systems]
    await asyncio.sleep(seconds)
    after = [running.cpu() for running in systems]
    return [{part: (a[part] - b[part]) / seconds for part in a} for a, b in zip(after, before, strict=True)]
