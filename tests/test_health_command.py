"""``pd-extproc health``: what it asks, and what it takes for an answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import silent_port

from extproc import run_dir
from extproc.cli import main

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"
UNREADY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class Peer:
    """Answers one connection with given bytes, and keeps what it was asked."""

    def __init__(self, listener: socket.socket, answer: bytes) -> None:
        self.asked = b""
        self._listener = listener
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while b"\r\n\r\n" not in self.asked:
                self.asked += connection.recv(4096)
            connection.sendall(self._answer)

    def join(self) -> bytes:
        self._thread.join()
        return self.asked.split(b"\r\n")[0]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def serving(directory: Path, control: str) -> Path:
    (directory / run_dir.SERVING).write_text(f"{control}\n")
    return directory


@pytest.mark.parametrize(("answer", "code"), [(OK, 0), (UNREADY, 1), (b"200 OK\r\n", 1), (b"", 1)])
@pytest.mark.parametrize(("options", "path"), [([], b"/liveness"), (["--ready"], b"/readiness")])
def test_the_gateway_is_asked_where_its_run_directory_says(
    listener: socket.socket, tmp_path: Path, answer: bytes, code: int, options: list[str], path: bytes
) -> None:
    peer = Peer(listener, answer)
    assert main(["health", "--run-dir", str(serving(tmp_path, address(listener))), *options]) == code
    assert peer.join() == b"GET " + path + b" HTTP/1.1"


def test_a_unix_socket_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control.sock"))
        server.listen()
        peer = Peer(server, OK)
        monkeypatch.setenv("PD_EXTPROC_RUN_DIR", str(serving(tmp_path, f"unix:{tmp_path}/control.sock")))
        assert main(["health"]) == 0
        assert peer.join() == b"GET /liveness HTTP/1.1"


@pytest.mark.parametrize(("path", "asked"), [("/health?x=1", b"/health?x=1"), ("", b"/")])
def test_anything_else_is_asked_by_its_url(listener: socket.socket, path: str, asked: bytes) -> None:
    peer = Peer(listener, OK)
    assert main(["health", f"http://{address(listener)}{path}"]) == 0
    assert peer.join() == b"GET " + asked + b" HTTP/1.1"


def test_nobody_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--run-dir", str(tmp_path)]) == 1
    assert "no gateway serves" in capsys.readouterr().err
    with silent_port() as port:
        assert main(["health", "--run-dir", str(serving(tmp_path, f"127.0.0.1:{port}"))]) == 1
    assert f"127.0.0.1:{port} does not answer" in capsys.readouterr().err
    (tmp_path / "control.sock").touch()
    assert main(["health", "--run-dir", str(serving(tmp_path, f"unix:{tmp_path}/control.sock"))]) == 1


def test_who_says_nothing_is_not_well(listener: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--timeout", "0.1", f"http://{address(listener)}/"]) == 1
    assert "does not answer: timed out" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["https://a:1/x", "a:1/x", "http://a/x", "http://a:b/x"])
def test_a_url_that_cannot_be_asked(url: str) -> None:
    assert main(["health", url]) == 1


def test_whom_to_ask_must_be_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PD_EXTPROC_RUN_DIR", raising=False)
    assert main(["health"]) == 2
    assert "PD_EXTPROC_RUN_DIR" in capsys.readouterr().err


def test_it_is_light() -> None:
    """It runs every few seconds in every container."""
    heavy = "import sys; from extproc.cli import main; main(['health', 'http://127.0.0.1:1/']); "
    heavy += "sys.exit(sorted({'pydantic', 'asyncio', 'http', 'grpc', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def test_what_a_killed_gateway_has_said_goes(tmp_path: Path) -> None:
    serving(tmp_path, "unix:/gone.sock")
    with run_dir.held(tmp_path):
        assert not (tmp_path / run_dir.SERVING).exists()
        with run_dir.announced(tmp_path, "127.0.0.1:1"):
            assert (tmp_path / run_dir.SERVING).read_text() == "127.0.0.1:1\n"
        assert not (tmp_path / run_dir.SERVING).exists()
