"""The directory of Envoy's files: gone with its process, or with the next one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.dataplane.own_directory import OwnDirectory

HOLD = """
import sys, time
from extproc.dataplane.own_directory import OwnDirectory
print(OwnDirectory().path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_says_whose_it_is_and_goes(temporary: Path) -> None:
    own = OwnDirectory()
    assert own.path.parent == temporary
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    assert (own.path / "owner").read_text() == f"{os.getpid()}\n"
    own.remove()
    own.remove()
    assert list(temporary.iterdir()) == []


def test_that_of_a_living_process_stays_and_that_of_a_killed_one_goes(temporary: Path) -> None:
    env = {**os.environ, "TMPDIR": str(temporary)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        OwnDirectory().remove()
        assert (theirs / "owner").exists()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    own = OwnDirectory()
    assert list(temporary.iterdir()) == [own.path]
    own.remove()


def test_what_is_not_one_of_ours_stays(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "owner").touch()
    (temporary / "pd-extproc-linklink").symlink_to(temporary / "elsewhere")
    for name in ("pd-extproc-demo-abcdefgh", "pd-extproc-30000", "pd-extproc-notlockd"):
        (temporary / name).mkdir()
    (temporary / "pd-extproc-demo-abcdefgh" / "owner").touch()
    before = sorted(temporary.rglob("*"))
    OwnDirectory().remove()
    assert sorted(temporary.rglob("*")) == before


def test_another_users_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = temporary / "pd-extproc-abcdefgh"
    theirs.mkdir()
    (theirs / "owner").touch()
    monkeypatch.setattr("os.geteuid", lambda: theirs.stat().st_uid + 1)
    OwnDirectory().remove()
    assert theirs.exists()
