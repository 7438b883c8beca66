"""Where the sidecar's microseconds go: samples of its stack under load, scaled to CPU time per request."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.client import LoadGenerator
from bench.fleet import Fleet
from bench.measure import until_ready
from bench.systems import Launch

if TYPE_CHECKING:
    from bench.measure import Case
    from bench.systems import Running

_SHOWN = 60


async def profile(case: Case, concurrency: int, seconds: float) -> str:
    """Sample the sidecar for at least ``seconds`` while it serves ``case``; returns a table of functions."""
    bodies = case.prompts().bodies()
    batch = max(case.requests[concurrency] // 4, concurrency)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-bench-")))
        fleet = await Fleet.start(folder, case.kind)
        stack.push_async_callback(fleet.stop)
        stacks = folder / "stacks"
        running = await replace(Launch(), stacks=stacks).start(fleet, folder)
        stack.push_async_callback(running.stop)
        await until_ready(running, fleet)
        generator = await LoadGenerator(running.port, case.expected).open(concurrency)
        stack.callback(generator.close)
        await generator.run(bodies, batch, limit=30)
        _toggle(running)
        before, requests = running.cpu(), 0
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            load = await generator.run(bodies, batch, limit=30)
            requests += load.requests
            if load.failures:
                raise RuntimeError(f"wrong answers: {dict(load.failures)}")
        after = running.cpu()
        _toggle(running)
        while not stacks.exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.05)
        return table(stacks.read_text(), 1e6 * (after["sidecar"] - before["sidecar"]) / requests)


def _toggle(running: Running) -> None:
    running.children[0].process.send_signal(signal.SIGUSR2)


def table(stacks: str, micros: float) -> str:
    """Own and cumulative µs per request of each function, from collapsed stacks."""
    own: Counter[str] = Counter()
    cumulative: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = frames.split(";")
        own[names[-1]] += int(count)
        cumulative.update(dict.fromkeys(names, int(count)))
    each = micros / (own.total() or 1)
    lines = [
        f"{micros:.1f} µs of CPU per request, {own.total()} samples",
        f"{'own µs':>9}{'with callees':>14}  function",
    ]
    for name, samples in cumulative.most_common(_SHOWN):
        lines.append(f"{each * own[name]:>9.1f}{each * samples:>14.1f}  {name}")
    return "\n".join(lines)
