"""A process in which grpcio works can start others."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio
import extproc
import grpc.aio
import uvloop

async def call(port):
    while True:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary("/a/b")(b"")
            except grpc.aio.AioRpcError:
                pass

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = [asyncio.create_task(call(port)) for _ in range(4)]
    for _ in range(300):
        process = await asyncio.create_subprocess_exec("true")
        print(await process.wait())
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    await server.stop(0)

uvloop.run(main())
"""


def test_none_of_them_crashes_before_it_is_another_program() -> None:
    """With grpcio's fork handlers one of twenty did."""
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)
    assert made.stdout.split() == ["0"] * 300
