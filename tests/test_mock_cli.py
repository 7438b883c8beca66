"""``pd-extproc mock`` as a program: two of them make a pair."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import zmq

from tests.mock_client import ask, dialling

BODY = {"model": "m", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}


@dataclass
class Program:
    """A running mock; ``bootstrap_port`` of a prefill."""

    process: asyncio.subprocess.Process
    host: str
    port: int
    bootstrap_port: int | None

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


@asynccontextmanager
async def running(*options: str) -> AsyncIterator[Program]:
    command = [sys.executable, "-m", "extproc", "mock", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            words = (await process.stdout.readline()).decode().strip().split()
        url = next(word for word in words if word.startswith("http://")).rstrip(",")
        host, port = url.removeprefix("http://").rsplit(":", 1)
        yield Program(process, host, int(port), int(words[-1]) if "bootstrap" in words else None)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


Start = Callable[..., Awaitable[Program]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(*options: str) -> Program:
            return await stack.enter_async_context(running(*options))

        yield start


async def test_a_pair_of_programs(start: Start) -> None:
    prefill, decode = await asyncio.gather(
        start("--engine", "sglang", "--role", "prefill", "--port", "0", "--bootstrap-port", "0", "--model", "m"),
        start("--role", "decode", "--tokens", "3", "--token-delay-ms", "1"),
    )
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 3}
    chat = "/v1/chat/completions"
    answers = await asyncio.gather(ask(prefill, chat, BODY | room), ask(decode, chat, BODY | room))
    assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [1, 3]
    assert (await ask(prefill, "/v1/models")).json["data"][0]["id"] == "m"
    assert len((await ask(decode, "/_mock/requests")).json) == 1
    assert await prefill.stop() == 0
    assert await decode.stop() == 0


async def test_a_pair_of_vllm_programs(start: Start) -> None:
    prefill, decode = await asyncio.gather(
        start("--engine", "vllm", "--role", "prefill", "--kv-connector", "MooncakeConnector", "--bootstrap-port", "0"),
        start("--engine", "vllm", "--role", "decode", "--kv-connector", "MooncakeConnector", "--lease", "5"),
    )
    bootstrap = f"http://127.0.0.1:{prefill.bootstrap_port}"
    async with aiohttp.ClientSession() as session, session.get(f"{bootstrap}/query") as answer:
        engine_id = (await answer.json())["0"]["engine_id"]
    chat, body = "/v1/chat/completions", {**BODY, "model": "tiny"}
    first = {"do_remote_decode": True, "transfer_id": "t"}
    second = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }
    answers = await asyncio.gather(
        ask(prefill, chat, {**body, "max_tokens": 1, "kv_transfer_params": first}),
        ask(decode, chat, {**body, "kv_transfer_params": second}),
    )
    assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [1, 4]
    assert [entry["kv"] for entry in (await ask(decode, "/_mock/requests")).json] == ["transferred"]
    assert await prefill.stop() == 0
    assert await decode.stop() == 0


async def test_sigterm_lets_requests_finish(start: Start) -> None:
    mock = await start("--first-token-delay-ms", "300")
    async with dialling() as dial:
        call = await dial(mock)
        call.send("POST", "/v1/chat/completions", BODY)
        assert (await ask(mock, "/_mock/received?count=1")).status == 200
        stopping = asyncio.create_task(mock.stop())
        assert (await call.answer()).complete
    assert await stopping == 0


async def test_ends_with_1_as_the_engine_would_have(start: Start) -> None:
    mock = await start("--role", "decode")
    async with dialling() as dial:
        call = await dial(mock)
        call.send("POST", "/v1/chat/completions", {**BODY, "bootstrap_room": 5})
        assert await mock.process.wait() == 1


async def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "extproc", "mock", "--port", str(taken.getsockname()[1])]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"address already in use" in errors.lower()


async def test_a_program_that_publishes_kv_events() -> None:
    command = [sys.executable, "-m", "extproc", "mock", "--engine", "vllm", "--kv-events"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+), KV events tcp://127\.0\.0\.1:\d+, replays (tcp://\S+)$", line)
        assert found is not None, line
        program = Program(process, "127.0.0.1", int(found[1]), None)
        body = {"model": "tiny", "prompt": [*range(3, 40)], "max_tokens": 1}
        assert (await ask(program, "/v1/completions", body)).status == 200
        frames = await asyncio.to_thread(_replayed, found[2])
        assert (frames[2], b"BlockStored" in frames[3]) == (bytes(8), True)
        assert await program.stop() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _replayed(endpoint: str) -> list[bytes]:
    """The first batch that is kept."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        socket.send_multipart([b"", bytes(8)])
        return socket.recv_multipart()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--grpc"], "mock sglang regular ready on grpc://127.0.0.1:"),
        (["--grpc", "--engine", "vllm", "--role", "decode"], "mock vllm decode ready on grpc://127.0.0.1:"),
        (
            ["--engine", "tokenspeed", "--role", "prefill", "--bootstrap-port", "0"],
            "mock tokenspeed prefill ready on grpc://127.0.0.1:",
        ),
    ],
)
async def test_a_grpc_server_as_a_program(options: list[str], line: str) -> None:
    command = [sys.executable, "-m", "extproc", "mock", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        words = (await process.stdout.readline()).decode()
    assert words.startswith(line)
    assert ("bootstrap port" in words) == ("tokenspeed" in words)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
