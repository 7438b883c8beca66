"""The run directory: private, held by one process, empty of sockets afterwards."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extproc import run_dir


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_it_is_made_private_and_removed_with_its_sockets(tmp_path: Path) -> None:
    path = tmp_path / "run" / "pd"
    with run_dir.held(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        bind(path / "extproc.sock")
    assert not path.exists()


def test_it_is_left_clean_after_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "pd"

    def fail() -> None:
        with run_dir.held(path):
            bind(path / "extproc.sock")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not path.exists()


def test_a_directory_that_was_there_keeps_its_mode_and_other_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "notes").touch()
    bind(tmp_path / "stale.sock")
    with run_dir.held(tmp_path):
        assert not (tmp_path / "stale.sock").exists()
        bind(tmp_path / "extproc.sock")
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_foreign_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pd"
    path.mkdir()
    bind(path / "egress.sock")
    bind(path / "stale.sock")
    with run_dir.held(path, foreign=path / "egress.sock"):
        assert [entry.name for entry in path.iterdir()] == ["egress.sock"]
    assert [entry.name for entry in path.iterdir()] == ["egress.sock"]


def test_a_second_holder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with run_dir.held(tmp_path):
        bind(tmp_path / "extproc.sock")
        with pytest.raises(BlockingIOError, match="in use by another pd-extproc"), run_dir.held(tmp_path):
            pass
        assert (tmp_path / "extproc.sock").exists()
    with run_dir.held(tmp_path):
        pass


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    if owner == 0:
        os.chown(tmp_path, 4711, -1)
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"), run_dir.held(tmp_path):
        pass


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"), run_dir.held(tmp_path / "link"):
        pass


def test_those_of_killed_processes_are_removed(tmp_path: Path) -> None:
    gone = _ended()
    stale = tmp_path / f"pd-extproc-pid{gone}-{os.geteuid()}"
    kept = [
        tmp_path / name
        for name in (f"pd-extproc-pid{os.getpid()}", f"pd-extproc-pid{gone}", "pd-extproc-30000", "pd-extproc-pidx")
    ]
    long_ago = time.time() - 3600
    for path in (stale, *kept):
        path.mkdir()
        bind(path / "extproc.sock")
        os.utime(path, (long_ago, long_ago))
    with run_dir.held(kept[1]):  # as a process in another container has it, which cannot be seen from here
        os.utime(kept[1], (long_ago, long_ago))
        with run_dir.held(tmp_path / "pd-extproc-pid1"):
            assert not stale.exists()
            assert all(path.exists() for path in kept)


def test_one_that_is_just_being_made_or_has_more_in_it_is_left_alone(tmp_path: Path) -> None:
    young, used = tmp_path / f"pd-extproc-pid{_ended()}", tmp_path / f"pd-extproc-pid{_ended()}-1"
    for path in (young, used):
        path.mkdir()
    (used / "notes").touch()
    os.utime(used, (0, 0))
    with run_dir.held(tmp_path / "pd-extproc-pid1"):
        assert young.exists()
        assert (used / "notes").exists()


def _ended() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait()
    return process.pid
