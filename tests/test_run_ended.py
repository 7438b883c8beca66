"""A run of the tests that is told to end (SIGTERM, by ``timeout`` and ``make``) puts back what it has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEST = """
import os, signal, time
from pathlib import Path
import pytest

def end():
    os.kill(os.getpid(), signal.SIGTERM)

@pytest.fixture
def change():
    yield
    end()  # once more
    Path("put back").touch()

def test(change):
    end()
    time.sleep(60)
"""


def test_fixtures_end_in_order(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tmp_path, "-p", "conftest", "test_one.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout  # interrupted
    assert (tmp_path / "put back").exists()
