"""``pd-extproc launch`` as a process: signals, deaths, ports, files; and the other commands as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from http_client import Client, CutError, Exchange
from processes import Gateway, Programs, children_of, free_port, is_alive, run
from product import soon

from extproc.dataplane.process import find_envoy
from extproc.mock import Fault, Point, SglangMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
AT_ONCE = ("--drain-settle-secs", "0")
PORTS = ("--port", "--envoy-admin-port", "--prometheus-port")
STOPPING = {
    "sigterm": AT_ONCE,
    "settling": ("--drain-settle-secs", "60"),
    "SIGTERM": AT_ONCE,
    "SIGINT": AT_ONCE,
    "envoy": (),
    "envoy-late": AT_ONCE,
    "killed": (),
}
DEMOS = {
    "demo": (),
    "demo vllm": ("--engine", "vllm"),
    "demo mooncake": ("--engine", "vllm", "--kv-connector", "mooncake"),
}
NO_PORTS = ("--port", "0", "--envoy-admin-port", "0", "--prometheus-port", "0")


class Workers:
    """One prefill and one decode worker, and the options that name them."""

    def __init__(self, prefill: SglangMock, decode: SglangMock) -> None:
        self.prefill = prefill
        self.decode = decode
        self.options = ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Workers]:
    async with SglangMock("prefill") as prefill, SglangMock("decode") as decode:
        yield Workers(prefill, decode)


@pytest_asyncio.fixture(loop_scope="module")
async def workers(both: Workers) -> AsyncIterator[Workers]:
    """Both, behaving and with nothing remembered."""
    for mock in (both.prefill, both.decode):
        mock.behave()
        await mock.idle()
        mock.clear()
    yield both


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def programs(both: Workers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Programs]:
    """What the tests need, in their order. Sockets want short paths."""
    directory = tmp_path_factory.mktemp("pd")
    launch = ["launch", "--pd-disaggregation", "--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", *NO_PORTS]
    grace = [*AT_ONCE, "--shutdown-grace-period-secs", "1", "--log-level", "error"]
    programs = Programs()
    programs.prepare_gateway("configured", configured(directory / "configured", both))
    for name, options in STOPPING.items():
        programs.prepare_gateway(name, Gateway(directory / name, *both.options, *options))
    programs.prepare_gateway("grace", Gateway(directory / "grace", *both.options, *grace, port=free_port()))
    holders = []
    for flag in PORTS:
        holders.append(socket.create_server(("127.0.0.1", 0)))
        taken = str(holders[-1].getsockname()[1])
        programs.prepare_run(flag, *launch, "--run-dir", str(directory / flag), flag, taken)
    missing = ["--run-dir", str(directory / "missing"), "--envoy-path", "/nonexistent/envoy"]
    programs.prepare_run("missing", *launch, *missing)
    for name, options in DEMOS.items():
        programs.prepare_run(name, "demo", "--once", "--port", "0", *options)
    printed = ["--pd-disaggregation", "--decode", "http://127.0.0.1:1", "--run-dir", "/tmp/pd", "--access-log"]
    programs.prepare_run("envoy-config", "envoy-config", *printed)
    yield programs
    await programs.close()
    for holder in holders:
        holder.close()
    # What no test has asked for was killed, perhaps in the middle of its start.
    left = {entry.name for entry in directory.iterdir()} & programs.asked_for - {"configured", "killed"}
    assert not left, "run directories are left"


def configured(directory: Path, workers: Workers) -> Gateway:
    """A gateway whose options come from a file, the environment and flags, and that says all it can."""
    file = directory.with_suffix(".yaml")
    file.write_text(
        f"prefill: ['{workers.prefill.url} {workers.prefill.bootstrap_port}']\n"
        f"decode: ['{workers.decode.url}']\n"
        "response_headers: false\n"
        "log_level: error\n"
        "request_id_headers: [x-my-id]\n"
    )
    env = {"PD_EXTPROC_RESPONSE_HEADERS": "true", "PD_EXTPROC_API_KEY": "from-env", "PD_EXTPROC_LOG_LEVEL": "debug"}
    return Gateway(directory, "--config", str(file), "--api-key", "from-flag", env=env)


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that does not exist yet, with a path short enough for a socket's."""
    return tmp_path_factory.mktemp("run") / "pd"


# -- serving ----------------------------------------------------------------------------------------------------------

KEY = ("authorization", "Bearer from-flag")


async def test_flags_win_over_the_environment_and_that_over_the_file(programs: Programs, workers: Workers):
    gateway = await programs.gateway("configured")
    await gateway.until_ready()
    assert (await gateway.client.post(PATH, CHAT, [("authorization", "Bearer from-env")])).status == 401
    answer = await gateway.client.post(PATH, CHAT, [KEY, ("x-my-id", "mine")])
    assert answer.status == 200
    assert answer.header("x-request-id") == "mine"  # the file's
    assert answer.header("x-pd-handoff") == "sglang"  # the environment's
    assert answer.header("x-pd-decode") == workers.decode.url
    assert any(line.get("level") == "debug" for line in gateway.logs)
    assert "from-flag" not in str(gateway.logs)


async def test_one_log_line_per_request(programs: Programs, workers: Workers):
    gateway = await programs.gateway("configured")
    await gateway.client.post(PATH, CHAT, [KEY, ("x-my-id", "to be found")])
    await gateway.client.post(PATH, CHAT, [KEY, ("x-my-id", "found")])
    line = await gateway.said("request", request_id="found")
    expected = {"level": "info", "api": "chat", "model": "tiny", "handoff": "sglang", "status": 200}
    assert expected.items() <= line.items()
    assert (line["prefill"], line["decode"]) == (workers.prefill.url, workers.decode.url)
    assert line["outcome"] == "answered"
    assert 0 < line["route_ms"] < line["total_ms"]


async def test_metrics(programs: Programs, workers: Workers):
    gateway = await programs.gateway("configured")
    workers.prefill.fail(Fault(status=500))
    await gateway.client.post(PATH, CHAT, [KEY, ("x-my-id", "counted")])
    await gateway.said("request", request_id="counted")  # both are done when a request is over
    client = Client("127.0.0.1", gateway.metrics_port)
    page = (await client.get("/metrics")).body.decode()
    await client.close()
    assert (
        'pd_requests_total{api="chat",handoff="sglang",status="502",code="prefill_failed",outcome="failed"} 1' in page
    )
    assert "pd_requests_in_flight 0" in page
    assert "pd_rooms_live 0" in page
    assert f'pd_worker_up{{role="decode",worker="{workers.decode.url}"}} 1' in page


@pytest.mark.usefixtures("workers")
async def test_a_run_directory_that_is_in_use(programs: Programs):
    gateway = await programs.gateway("configured")
    options = [*NO_PORTS, "--host", "127.0.0.1", "--run-dir", str(gateway.run_dir)]
    status, _, error = await run("launch", "--pd-disaggregation", *options)
    assert status == 1
    assert f"{gateway.run_dir} is in use by another pd-extproc" in error
    assert "Traceback" not in error
    assert (await gateway.client.post(PATH, CHAT, [KEY])).status == 200


# -- stopping ---------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_a_stream_finish_and_takes_nothing_new(programs: Programs, workers: Workers):
    go_on = asyncio.Event()
    workers.decode.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=20))
    gateway = await programs.gateway("sigterm")
    waiting = await gateway.client.connect()  # an idle connection from before
    exchange = await _streaming(gateway)
    gateway.signal(signal.SIGTERM)
    await gateway.said("stopping")
    await _refused(gateway.client, waiting)
    go_on.set()
    assert (await exchange.whole()).events[-1] == "[DONE]"
    assert await gateway.ended() == 0
    assert _is_gone(gateway.run_dir)
    with pytest.raises(ConnectionRefusedError):
        await gateway.client.connect()
    assert len(workers.prefill.legs) == 1


@pytest.mark.usefixtures("workers")
async def test_settling_is_saying_not_ready_and_serving(programs: Programs):
    gateway = await programs.gateway("settling")
    await gateway.until_ready()
    gateway.signal(signal.SIGTERM)
    await gateway.said("stopping")
    readiness = await gateway.client.get("/readiness")
    assert (readiness.status, readiness.json["reason"]) == (503, "draining")
    assert (await gateway.client.get("/liveness")).status == 200
    assert (await gateway.client.post(PATH, CHAT)).status == 200
    gateway.signal(signal.SIGTERM)  # settled enough
    assert await gateway.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait(programs: Programs, workers: Workers, number):
    workers.decode.fail(Fault(delay_token=0.05, tokens=2000))
    gateway = await programs.gateway(number.name)
    exchange = await _streaming(gateway)
    gateway.signal(number)
    await gateway.said("stopping")
    await exchange.piece()  # it goes on
    began = time.monotonic()
    gateway.signal(number)
    assert b"[DONE]" not in await exchange.cut()
    assert await gateway.ended() == 0
    assert time.monotonic() - began < 60  # the stream would go on for 100 s
    assert _is_gone(gateway.run_dir)


async def test_the_grace_period_ends(programs: Programs, workers: Workers):
    workers.decode.fail(Fault(delay_token=0.05, tokens=2000))
    gateway = await programs.gateway("grace")
    exchange = await _streaming(gateway)
    began = time.monotonic()
    gateway.signal(signal.SIGTERM)
    await exchange.cut()
    assert await gateway.ended() == 0
    assert 0.9 < time.monotonic() - began < 60  # likewise


# -- deaths -----------------------------------------------------------------------------------------------------------


async def test_envoys_death_is_passed_on(programs: Programs):
    gateway = await programs.gateway("envoy")
    os.kill(gateway.envoy, signal.SIGKILL)
    assert await gateway.ended() == 128 + signal.SIGKILL
    assert _is_gone(gateway.run_dir)
    assert any("Envoy ended by itself" in line["message"] for line in gateway.logs)


async def test_envoys_death_in_the_middle_of_stopping(programs: Programs, workers: Workers):
    workers.decode.fail(Fault(delay_token=0.05, tokens=2000))
    gateway = await programs.gateway("envoy-late")
    exchange = await _streaming(gateway)
    gateway.signal(signal.SIGTERM)
    await gateway.said("stopping")
    os.kill(gateway.envoy, signal.SIGKILL)
    await exchange.cut()
    await gateway.ended()  # there is nothing to wait for any more
    assert _is_gone(gateway.run_dir)


async def test_a_killed_gateway_takes_envoy_along_and_its_successor_can_start(programs: Programs, workers: Workers):
    gateway = await programs.gateway("killed")
    envoy = gateway.envoy
    gateway.signal(signal.SIGKILL)
    assert await gateway.ended() == -signal.SIGKILL
    assert not is_alive(envoy)
    assert _sockets(gateway.run_dir)  # nobody was left to remove them
    async with Gateway(gateway.run_dir, *workers.options, "--log-level", "warn", port=free_port()) as successor:
        await successor.until_ready()
        assert (await successor.client.post(PATH, CHAT)).status == 200
        successor.signal(signal.SIGINT)
        assert await successor.ended() == 0
        assert not _sockets(gateway.run_dir)


# -- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", PORTS)
async def test_a_port_that_is_taken(programs: Programs, flag):
    status, _, error = await programs.result(flag)
    assert status == 1
    assert "cannot start" in error
    assert re.search(rf"on 127\.0\.0\.1:\d+ \({flag}\): Address already in use$", error, re.MULTILINE)
    assert "Traceback" not in error


async def test_an_envoy_that_does_not_exist(programs: Programs):
    status, _, error = await programs.result("missing")
    assert status == 1
    assert "/nonexistent/envoy" in error
    assert "Traceback" not in error


async def test_workers_as_programs(run_dir: Path):
    """What a user would do by hand: three programs, and a request."""
    ports = [free_port() for _ in range(3)]
    prefill = _mock("--role", "prefill", "--port", str(ports[0]), "--bootstrap-port", str(ports[1]))
    decode = _mock("--role", "decode", "--port", str(ports[2]))
    try:
        urls = ["--prefill", f"http://127.0.0.1:{ports[0]}", str(ports[1]), "--decode", f"http://127.0.0.1:{ports[2]}"]
        async with Gateway(run_dir, *urls) as gateway:
            await gateway.until_ready()
            assert (await gateway.client.post(PATH, CHAT)).json["choices"][0]["message"]["content"]
            gateway.signal(signal.SIGINT)
            assert await gateway.ended() == 0
    finally:
        for process in (prefill, decode):
            process.terminate()
            assert process.wait(60) == 0


# -- the other commands -----------------------------------------------------------------------------------------------


async def test_envoy_takes_the_printed_configuration(programs: Programs, tmp_path: Path):
    status, configuration, error = await programs.result("envoy-config")
    assert (status, error) == (0, "")
    file = tmp_path / "envoy.yaml"
    file.write_text(configuration)
    command = [find_envoy(), "--mode", "validate", "-c", str(file), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


async def test_the_version():
    status, out, _ = await run("--version")
    assert status == 0
    assert out.startswith("pd-extproc ")
    script = Path(sys.executable).with_name("pd-extproc")
    process = await asyncio.create_subprocess_exec(script, "--version", stdout=subprocess.PIPE)
    assert (await process.communicate())[0].decode() == out


@pytest.mark.parametrize("name", DEMOS)
async def test_the_demo_shows_and_ends(programs: Programs, name: str):
    status, out, error = await programs.result(name)
    assert (status, error) == (0, ""), out + error
    assert "prefill" in out
    assert "decode" in out


@pytest.mark.parametrize("name", ["demo vllm", "demo mooncake"])
async def test_the_demo_shows_how_vllm_hands_over(programs: Programs, name: str):
    _, out, _ = await programs.result(name)
    assert out.count("~ max_tokens         1\n") == 4  # of each prefill leg: two chats, two prompts of a list
    assert out.count('"do_remote_prefill":true') == (8 if name == "demo vllm" else 4)  # NIXL's prefills answer it, too
    assert out.count("KV cache: transferred") == 3


async def test_the_demo_shows_the_order_of_nixls_legs(programs: Programs):
    _, out, _ = await programs.result("demo vllm")
    steps = [line.split(" ms  ")[1] for line in out.splitlines() if " ms  " in line]
    assert steps.index("prefill has answered: where its KV cache is") < steps.index("decode leg has arrived")


async def test_the_demo_ends_quietly_when_nobody_reads_any_more():
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo", "--port", "0"), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    try:
        assert await asyncio.to_thread(os.read, reading, 100)
        started = children_of(process.pid)
        assert started
    finally:
        os.close(reading)
    _, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, error.decode()) == (141, "")
    await soon(lambda: not any(map(is_alive, started)), "processes are left")


# -- inside -----------------------------------------------------------------------------------------------------------


async def _streaming(gateway: Gateway) -> Exchange:
    """A stream that has begun."""
    await gateway.until_ready()
    exchange = await gateway.client.open(PATH, {**CHAT, "stream": True})
    await exchange.until(b"data: ")
    return exchange


async def _refused(client: Client, waiting: Exchange) -> None:
    """Wait until new connections are refused; then a connection from before gets no request through either."""
    async with asyncio.timeout(60):
        while True:
            try:
                (await client.connect()).close()
            except (ConnectionRefusedError, ConnectionResetError):  # reset: it was queued when the listener closed
                break
            await asyncio.sleep(0.01)
    body = json.dumps(CHAT).encode()
    try:
        await waiting.send(client.request_head("POST", PATH, [("content-length", str(len(body)))]) + body)
        answer = await waiting.whole()
    except (CutError, ConnectionError):
        return
    assert (answer.status, answer.code) == (503, "draining")


def _mock(*options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "extproc", "mock", *options], stdout=subprocess.DEVNULL)


def _is_gone(directory: Path) -> bool:
    return not directory.exists()


def _sockets(directory: Path) -> list[Path]:
    return list(directory.glob("*.sock"))
