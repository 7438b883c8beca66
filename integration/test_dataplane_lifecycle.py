"""A real Envoy as a child: starting, draining, dying, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from dataplane_rig import Rig, answer, leg_headers, never
from standstill import Within

from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.config import STANDALONE, DataplaneConfig
from extproc.dataplane.process import EnvoyProcess, find_envoy


def config(directory: Path) -> DataplaneConfig:
    """A configuration behind which there is no sidecar."""
    return DataplaneConfig(
        extproc=f"unix:{directory}/extproc.sock",
        ads=f"unix:{directory}/ads.sock",
        control=f"unix:{directory}/control.sock",
        egress=f"unix:{directory}/egress.sock",
        client_host="127.0.0.1",
        client_port=0,
        admin_port=0,
        concurrency=2,
    )


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rig = Rig(tmp_path, access_log=True)
    await rig.start()
    yield rig
    await rig.stop()


def leftovers(directory: Path) -> list[Path]:
    """Envoy's configuration directory and its socket."""
    return [*directory.glob("pd-extproc-*"), *directory.glob("egress.sock")]


async def gone(pid: int) -> None:
    """Wait until a process that need not be a child of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(60):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"extproc": "unix:/x/e", "ads": "10.0.0.1:1", "control": "[::1]:2", "client_host": "::", "access_log": True},
        {"ca_file": None, "request_timeout": 1e6, "max_payload_bytes": 2**40},
    ],
)
def test_envoy_accepts_the_configuration(tmp_path: Path, changes: dict[str, object]) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap_yaml(replace(STANDALONE, **changes)))
    subprocess.run([find_envoy(), "--mode", "validate", "-c", str(file)], check=True, capture_output=True)


async def test_nothing_is_left_after_a_stop(tmp_path: Path, rig: Rig) -> None:
    assert len(leftovers(tmp_path)) == 2
    pid = rig.envoy.pid
    await rig.envoy.stop(1)
    await gone(pid)
    assert await rig.envoy.wait() == 0
    assert leftovers(tmp_path) == []
    with pytest.raises(aiohttp.ClientConnectionError):
        await rig.request("GET", "/readiness")


async def test_a_socket_file_of_a_killed_envoy_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "egress.sock"))
    envoy = EnvoyProcess(config(tmp_path))
    await envoy.start()
    assert await envoy.admin.gauge("server.concurrency") == 2
    await envoy.stop(0)


async def test_without_a_sidecar_clients_get_a_proper_answer(tmp_path: Path) -> None:
    envoy = EnvoyProcess(config(tmp_path))
    await envoy.start()
    url = "http://{}:{}".format(*envoy.client_address)
    async with aiohttp.ClientSession() as session:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/readiness")):
            async with session.request(method, url + path, json={}) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "extproc_unavailable"
    await envoy.stop(0)


async def test_the_death_of_envoy_is_noticed(rig: Rig) -> None:
    death = asyncio.create_task(rig.envoy.wait())
    os.kill(rig.envoy.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await death == -signal.SIGKILL


async def test_envoy_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = f"""
import asyncio
from test_dataplane_lifecycle import EnvoyProcess, Path, config

async def main():
    envoy = EnvoyProcess(config(Path({str(tmp_path)!r})))
    await envoy.start()
    print(envoy.pid, flush=True)
    await envoy.wait()

asyncio.run(main())
"""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    envoy = int(await parent.stdout.readline())
    os.kill(envoy, 0)
    parent.kill()
    await parent.wait()
    await gone(envoy)


async def test_draining_lets_requests_under_way_end(rig: Rig) -> None:
    may_answer = asyncio.Event()

    async def behave(request, writer):  # type: ignore[no-untyped-def]
        await may_answer.wait()
        return await answer(b"done")(request, writer)

    slow, quick = await rig.worker(behave), await rig.worker()
    await rig.know(slow.endpoint, quick.endpoint)
    kept_alive = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=kept_alive) as session:
        await session.get(f"{rig.url}/readiness")
        under_way = asyncio.create_task(rig.post(slow.address))
        await slow.arrived.wait()
        stopping = asyncio.create_task(rig.envoy.stop(60))
        await refuses_connections(rig)

        # A client with an open connection is served once more and sent away, and legs go out as before.
        async with session.get(f"{rig.url}/readiness") as response:
            assert (response.status, response.headers["connection"]) == (200, "close")
        assert (await rig.leg(quick.address)).status == 200
        (await rig.egress()).transport.close()
        rig._egress = None
        assert (await rig.leg(quick.address)).status == 200
        assert not stopping.done()

    may_answer.set()
    reply = await under_way
    assert (reply.body, reply.headers["connection"]) == (b"done", "close")
    async with asyncio.timeout(60):
        await stopping
    assert await rig.envoy.wait() == 0


async def refuses_connections(rig: Rig) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(rig.host, rig.port)
                writer.close()
                await writer.wait_closed()
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                continue  # was still waiting to be accepted


async def test_the_grace_period_is_an_end(rig: Rig) -> None:
    worker = await rig.worker(never)
    await rig.know(worker.endpoint)
    under_way = asyncio.create_task(rig.post(worker.address))
    await worker.arrived.wait()
    begin = asyncio.get_running_loop().time()
    await rig.envoy.stop(0.3)
    assert 0.3 <= asyncio.get_running_loop().time() - begin < Within(2)
    with pytest.raises(aiohttp.ClientError):
        await under_way


async def test_a_stop_that_was_cancelled_can_be_repeated(rig: Rig) -> None:
    worker = await rig.worker(never)
    await rig.know(worker.endpoint)
    connection = await rig.egress()
    connection.send(leg_headers(worker.address, b""))
    under_way = asyncio.create_task(rig.post(worker.address))
    await worker.arrived.wait()
    stopping = asyncio.create_task(rig.envoy.stop(60))
    await refuses_connections(rig)
    stopping.cancel()
    await asyncio.wait([stopping])
    await rig.envoy.stop(0)
    assert await rig.envoy.wait() == 0
    with pytest.raises(aiohttp.ClientError):
        await under_way
    connection.streams.clear()


async def test_the_access_log_goes_to_standard_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    envoy = EnvoyProcess(replace(config(tmp_path), access_log=True))
    await envoy.start()
    async with aiohttp.ClientSession() as session:
        await session.get("http://{}:{}/nowhere?a=1".format(*envoy.client_address), headers={"x-request-id": "mine"})
    await envoy.stop(0)
    line = json.loads(capfd.readouterr().out)
    assert {key: line[key] for key in ("request_id", "method", "path", "status", "details", "flags")} == {
        "request_id": "mine",
        "method": "GET",
        "path": "/nowhere?a=1",
        "status": 404,
        "details": "direct_response",
        "flags": "-",
    }
