"""Mock workers as processes of their own, which can be killed, and a steady load on the gateway before them."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from http_client import Client, CutError, Headers
from vllm_requests import LOOSE, Question, answer_of

START = 60.0  # seconds for Python to start on a busy machine


class MockProcess:
    """``pd-extproc mock``, from its start to its end; killed if it is still there then."""

    def __init__(self, engine: str, role: str, *options: str) -> None:
        self.role = role
        self.url = ""
        self.bootstrap_port: int | None = None
        self._command = ("-m", "extproc", "mock", "--engine", engine, "--role", role, "--bootstrap-port", "0", *options)

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._command), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(START):
            line = (await self._process.stdout.readline()).decode()
        where, _, port = line.strip().partition(", bootstrap port ")
        self.url = where.rpartition(" ")[2]
        self.bootstrap_port = int(port) if port else None
        self.client = Client("127.0.0.1", int(self.url.rpartition(":")[2]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL, as the kernel does when memory is short."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def withhold(self, path: str) -> None:
        """Have it begin no answer on ``path`` any more, and wait until a leg is there that waits for one."""
        assert (await self.client.post("/_mock/faults", {"path": path, "delay_first_token": 600})).status == 200
        since = time.time()
        async with asyncio.timeout(START):
            while True:
                live = [leg for leg in await self.requests() if leg["target"] == path and leg["outcome"] == "live"]
                if any(leg["received"] and since < leg["arrived"] for leg in live):
                    return
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Wait until it runs nothing."""
        assert (await self.client.get("/_mock/idle")).status == 200

    async def requests(self) -> list[Any]:
        """What it received."""
        found: list[Any] = (await self.client.get("/_mock/requests")).json
        return found

    async def metric(self, name: str) -> float:
        """One of its metrics."""
        text = (await self.client.get("/metrics")).body.decode()
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


_TOKEN = re.compile(rb'"(?:content|text|delta)"\s*:\s*"[^"]')  # in an event of a stream


class End(NamedTuple):
    """How a request ended.

    ``kind`` is ``right``, ``wrong``, ``error``, ``cut`` after a token or more, or ``hollow``: a stream's head came, and
    no token, but an error event or the end of the connection.
    """

    kind: str
    question: str
    said: str = ""
    attempts: int = 1


class Load:
    """Clients that ask one question after the other, until told to stop."""

    def __init__(self, client: Client, questions: dict[str, Question], expected: dict[str, Any], clients: int) -> None:
        self.ends: list[End] = []
        self._client = client
        self._questions = questions
        self._expected = expected
        self._stopped = False
        self._changed = asyncio.Event()
        names = list(questions)
        self._tasks = [asyncio.create_task(self._ask(names[n:] + names[:n])) for n in range(clients)]

    async def more(self, count: int) -> None:
        """Wait for so many more ends."""
        wanted = len(self.ends) + count
        async with asyncio.timeout(START):
            while len(self.ends) < wanted:
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        """Have every client finish its request."""
        self._stopped = True
        async with asyncio.timeout(START):
            await asyncio.gather(*self._tasks)

    def of(self, *kinds: str) -> list[End]:
        """The ends of these kinds."""
        return [end for end in self.ends if end.kind in kinds]

    async def _ask(self, names: Sequence[str]) -> None:
        number = 0
        while not self._stopped:
            name = names[number % len(names)]
            number += 1
            self.ends.append(await self._one(name))
            self._changed.set()

    async def _one(self, name: str) -> End:
        headers: Headers = ()
        exchange = await self._client.open(*self._questions[name], headers)
        begun = time.monotonic()
        try:
            reply = await exchange.whole()
        except CutError as error:
            kind = _broken(error.received) if exchange.reply.status == 200 else "error"
            return End(kind, name, f"{error} {time.monotonic() - begun:.2f} s")
        finally:
            exchange.close()
        attempts = int(reply.header("x-pd-attempts") or 1)
        if reply.status != 200:
            return End("error", name, f"{reply.status} {reply.body.decode()}", attempts)
        if answer_of(reply, LOOSE) == self._expected[name]:
            return End("right", name, "", attempts)
        said = b'"error"' in reply.body or b'"failed"' in reply.body
        return End(_broken(reply.body) if said else "wrong", name, reply.body.decode(), attempts)


def _broken(body: bytes) -> str:
    return "cut" if _TOKEN.search(body) else "hollow"
