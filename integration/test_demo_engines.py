"""``pd-extproc demo --engine vllm-cpu`` by the project's recipe for servers, with mock workers in vLLM's place."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from processes import PATIENCE, is_alive
from product import soon

RECIPE = Path(__file__).parent / "engines"
SHOW = """
import sys
from pathlib import Path
import uvloop
from extproc.demo import stage
from extproc.demo.real import RealShow
show = RealShow(Path(sys.argv[1]), Path(sys.argv[2]))
sys.exit(uvloop.run(stage.give(show, 0, once="--once" in sys.argv)))
"""
# Where setup.sh puts vLLM's interpreter: makes the recipe's command line and environment a mock worker's.
INTERPRETER = """#!{python}
import json, os, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
config = json.loads(options.get("--kv-transfer-config", "{{}}"))
role = {{"kv_producer": "prefill", "kv_consumer": "decode"}}.get(config.get("kv_role"), "aggregated")
with open(os.path.join({directory!r}, role + ".pid"), "w") as file:
    file.write(str(os.getpid()))
trouble = {trouble!r}
if trouble == "dies" and role == "decode":
    sys.exit("no memory for " + role)
if trouble == "hangs":
    time.sleep(600)
command = ["-m", "extproc", "mock", "--engine", "vllm", "--role", role, "--port", options["--port"]]
command += ["--model", options["--served-model-name"]]
if config:
    command += ["--kv-connector", config["kv_connector"]]
    command += ["--side-channel-port", os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]]
if trouble == "differs" and role == "aggregated":
    command += ["--max-model-len", "40"]
os.execv(sys.executable, [sys.executable, *command])
"""


class Demo:
    """The show as a program. ``pids``: of the servers that it has started."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self._process = process
        self._directory = directory

    @property
    def pids(self) -> list[int]:
        return [int(text) for file in self._directory.glob("*.pid") if (text := file.read_text())]

    async def printed(self, text: str) -> None:
        """Wait until a line with this text is printed."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while text not in (line := (await self._process.stdout.readline()).decode()):
                assert line, f"{text!r} was not printed"

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def ended(self) -> tuple[int | None, str, str]:
        """Status, standard output and standard error."""
        async with asyncio.timeout(PATIENCE):
            out, error = await self._process.communicate()
        return self._process.returncode, out.decode(), error.decode()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The project's recipe; only that nothing is installed."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    for name in ("servers.py", "vllm_servers.py"):
        shutil.copy(RECIPE / name, recipe)
    return recipe


def prepare(recipe: Path, setup: str, trouble: str = "") -> Path:
    """Make ``setup.sh`` run some commands and "install" the mock; the directory where it will."""
    directory = recipe.parent / "engines"
    interpreter = recipe / "interpreter"
    interpreter.write_text(INTERPRETER.format(python=sys.executable, directory=str(directory), trouble=trouble))
    interpreter.chmod(0o755)
    script = recipe / "setup.sh"
    made = f'mkdir -p "$1/venv-vllm/bin" && cp {interpreter} "$1/venv-vllm/bin/python" && touch "$1/ready-$2"\n'
    script.write_text(f"#!/usr/bin/env bash\nset -e\n{setup}\n{made}")
    script.chmod(0o755)
    return directory


@asynccontextmanager
async def demo(recipe: Path, directory: Path, *options: str) -> AsyncIterator[Demo]:
    """The show, started; killed if it has not ended. No server may be left."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SHOW, recipe, directory, *options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("PD_EXTPROC_")},
    )
    running = Demo(process, directory)
    try:
        yield running
        assert not [pid for pid in running.pids if is_alive(pid)]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for pid in filter(is_alive, running.pids):
            os.kill(pid, signal.SIGKILL)


async def test_it_installs_shows_and_ends(recipe: Path):
    directory = prepare(recipe, "echo installing")
    async with demo(recipe, directory, "--once") as running:
        status, out, error = await running.ended()
        assert (status, error) == (0, ""), out + error
        assert out.index("Installing vLLM") < out.index("Starting three vLLM servers")
        assert out.count("The answers are equal.") == 3
        assert out.count("x-pd-kv") == 3
        counters = [line.split() for line in out.splitlines() if line.startswith("  vllm:")]
        assert len(counters) == 3
        assert all(int(after) > int(before) for _, before, after in counters)
        assert len(running.pids) == 3


async def test_ctrl_c_ends_it_after_the_show(recipe: Path):
    directory = prepare(recipe, "")
    async with demo(recipe, directory) as running:
        await running.printed("Serving until Ctrl-C")
        assert [is_alive(pid) for pid in running.pids] == [True] * 3
        running.interrupt()
        assert (await running.ended())[0] == 0


async def test_ctrl_c_while_the_servers_start(recipe: Path):
    directory = prepare(recipe, "", trouble="hangs")
    async with demo(recipe, directory) as running:
        await running.printed("Starting three vLLM servers")
        await soon(lambda: len(running.pids) == 3, "the servers are not started")
        running.interrupt()
        assert (await running.ended())[0] == 130


async def test_ctrl_c_during_the_installation(recipe: Path):
    directory = prepare(recipe, f"echo $$ >{recipe.parent}/setup.pid; sleep 600 & wait")
    async with demo(recipe, directory, "--once") as running:
        await running.printed("Installing vLLM")
        pid = recipe.parent / "setup.pid"
        await soon(lambda: pid.exists() and bool(pid.read_text()), "setup.sh does not run")
        running.interrupt()
        assert (await running.ended())[0] == 130
        assert not is_alive(int(pid.read_text()))
        assert not (directory / "ready-vllm").exists()


async def test_a_server_that_dies_is_told_with_its_last_words(recipe: Path):
    directory = prepare(recipe, "", trouble="dies")
    async with demo(recipe, directory) as running:
        status, _, error = await running.ended()
        assert status == 1
        assert error.startswith("wrong: vllm-nixl-decode has ended by itself\n")
        assert "  no memory for decode\n" in error


async def test_an_installation_that_fails_is_told_with_its_last_words(recipe: Path):
    directory = prepare(recipe, "echo no such package; exit 3")
    async with demo(recipe, directory) as running:
        status, _, error = await running.ended()
        assert status == 1
        assert "setup.sh ended with 3" in error
        assert "  no such package\n" in error


async def test_answers_that_differ_are_a_failure(recipe: Path):
    directory = prepare(recipe, "", trouble="differs")
    async with demo(recipe, directory, "--once") as running:
        status, out, error = await running.ended()
        assert status == 1
        assert "THE ANSWERS DIFFER." in out
        assert "the answers differ" in error
