"""Tools from PyPI in virtual environments of their own, installed once into a cache folder.

The peer gateway never shares one with ``sglang-router``, whose wheel overwrites its script.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

PEER_VERSION = "1.13.0"


class InstallError(Exception):
    """A tool could not be installed; the message is pip's."""


def cache_folder() -> Path:
    """Where the benchmark keeps what it installs: ``$XDG_CACHE_HOME/pd-extproc-bench``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-extproc-bench"


async def peer() -> str:
    """The path of ``smg``, installing it first where needed. Raises InstallError."""
    return str(await _environment(f"smg-{PEER_VERSION}", f"smg=={PEER_VERSION}") / "bin" / "smg")


async def _environment(name: str, requirement: str) -> Path:
    folder = cache_folder() / name
    done = folder / "installed"
    if not done.exists():
        print(f"installing {requirement} into {folder}", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await _run(sys.executable, "-m", "venv", "--clear", str(folder))
        await _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement)
        done.touch()
    return folder


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise InstallError(f"{' '.join(command)}: {output.decode(errors='replace').strip()[-1000:]}")
