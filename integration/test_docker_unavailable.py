"""Where a Docker engine cannot be had, its tests are skipped with the reason, and nothing is left of it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker_engine
import pytest
from docker_engine import Engine, UnavailableError

ENDS = "echo no rights here >&2; exit 1"
# As dockerd does: it listens, looks whether it can be an engine here, and ends.
LISTENS = """
import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[-1].removeprefix("unix://"))
listener.listen()
print("no rights here", flush=True)
while listener.accept()[0].close() or {stays}:
    pass
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One that is not started, and needs no privileges for that."""
    monkeypatch.setattr(docker_engine, "_NAMESPACES", ("unshare", "--fork", "--kill-child"))
    with tempfile.TemporaryDirectory(prefix="pd-docker-") as directory:
        yield Engine(Path(directory))


def _script(*, stays: bool) -> str:
    return f"exec {sys.executable} -c '{LISTENS.format(stays=stays)}' \"$@\""


@pytest.mark.parametrize("script", [ENDS, _script(stays=False)], ids=["at once", "while it is asked"])
def test_an_engine_that_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(docker_engine, "_START", script)
    with pytest.raises(UnavailableError, match="dockerd does not start: no rights here"):
        engine.start()
    engine.stop()
    assert engine._process is not None
    assert engine._process.returncode is not None


def test_an_engine_that_does_not_end_is_killed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "_START", _script(stays=True))
    monkeypatch.setattr(docker_engine, "_STOP_SECONDS", 5)

    def waited(engine: Engine) -> bool:
        if engine._last_words():
            raise UnavailableError("long enough")
        return False

    monkeypatch.setattr(Engine, "_answers", waited)
    with pytest.raises(UnavailableError, match="long enough"):
        engine.start()
    assert engine._process is not None
    (child,) = docker_engine._children(engine._process.pid)
    engine.stop()
    assert not Path(f"/proc/{child}").exists()
    assert engine._process.returncode is not None


def test_a_program_that_does_not_end_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    run = docker_engine._run
    monkeypatch.setattr(docker_engine, "_run", lambda *command: run(*command, timeout=0.1))
    with pytest.raises(UnavailableError, match="timed out"):
        docker_engine._tried("sleep", "60")
