"""Where a model's tokenizer can be had: a directory, the hub's copy of a model, or the worker that serves it."""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from extproc.text.bundle import Bundle
from extproc.text.files import NAMES, PATTERNS, FilesError, is_directory_of_tokenizer
from extproc.text.hf import quiet_libraries
from extproc.workers.worker import Worker

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

# Asks a worker for its bundle: the bundle's next chunk, until it is whole. Raises NoAnswerError.
Fetch = Callable[[Worker, Bundle], Awaitable[None]]


class Origin(Protocol):
    """One of them. ``str`` of it is for people."""

    def directory(self, executor: Executor) -> AbstractAsyncContextManager[Path]:
        """Where the files are, while the context lasts. Raises FilesError or NoAnswerError."""
        ...


@dataclass(frozen=True, slots=True)
class Named:
    """A path, or the id of a model on the hub.

    Attributes:
        text: what was said.
        hub: it may be fetched from there; else only what has been fetched before is looked at.
    """

    text: str
    hub: bool = False

    def __str__(self) -> str:
        return self.text

    @asynccontextmanager
    async def directory(self, executor: Executor) -> AsyncIterator[Path]:
        """See Origin."""
        found = await asyncio.get_running_loop().run_in_executor(executor, self._look)
        yield await _apart(self._fetch) if found is None else found

    def _look(self) -> Path | None:
        """The directory; None: only the hub can have it."""
        path = Path(self.text).expanduser()
        if path.is_file():
            path = path.parent
        if is_directory_of_tokenizer(path):
            return path
        if not _HUB_ID.fullmatch(self.text) or path.is_dir():
            raise FilesError("no tokenizer files there")
        return None

    def _fetch(self) -> Path:
        quiet_libraries()
        from huggingface_hub import snapshot_download  # noqa: PLC0415 -- not before it is needed

        patterns = [*sorted(NAMES), *PATTERNS]
        try:
            return Path(snapshot_download(self.text, allow_patterns=patterns, local_files_only=not self.hub))
        except Exception as error:  # noqa: BLE001 -- of many libraries
            reason = " ".join(str(error).split())[:300] if self.hub else "not here, and not in the hub's cache"
            raise FilesError(reason) from None


async def _apart(work: Callable[[], Path]) -> Path:
    """Do ``work`` in a thread that nobody waits for at the process's end: a hub may take minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Path] = loop.create_future()

    def done(path: Path | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if path is not None:
            future.set_result(path)
        else:
            future.set_exception(error or FilesError("the hub gave nothing"))

    def run() -> None:
        path, problem = None, None
        try:
            path = work()
        except BaseException as error:  # noqa: BLE001 -- told to who waits
            problem = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done, path, problem)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return await future


@dataclass(frozen=True, slots=True)
class OfWorker:
    """What the worker's ``GetTokenizer`` gives."""

    worker: Worker
    fetch: Fetch

    def __str__(self) -> str:
        return f"{self.worker.name} GetTokenizer"

    @asynccontextmanager
    async def directory(self, executor: Executor) -> AsyncIterator[Path]:
        """See Origin."""
        bundle = Bundle()
        await self.fetch(self.worker, bundle)
        run = asyncio.get_running_loop().run_in_executor
        made = await run(executor, lambda: tempfile.TemporaryDirectory(prefix="pd-extproc-tokenizer-"))
        try:
            path = Path(made.name)
            await run(executor, bundle.unpack, path)
            yield path
        finally:
            await asyncio.shield(run(executor, made.cleanup))
