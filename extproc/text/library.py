"""The tokenizers of the models that gRPC workers serve: found, loaded off the event loop, loaded anew when they change.

A model's tokenizer comes from the first of these that has one: what the operator added under its name
(``POST /v1/tokenizers``); ``--tokenizer-path`` or ``--model-path``; the paths that its workers report, where they are
directories here; a worker's ``GetTokenizer``. It is looked for when a worker of the model is identified or has come
back, and again after a while if it could not be had. Whether it is another then is told by the files' contents.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from extproc.text.cache import EncodeCache
from extproc.text.entry import Entry, LibrarySettings, Ready, State
from extproc.text.files import FilesError, files_of, fingerprint
from extproc.text.hf import HfTokenizer, load
from extproc.text.origin import Fetch, Named, OfWorker, Origin
from extproc.workers.no_answer import NoAnswerError
from extproc.workers.worker import Worker

RETRY_SECONDS: Final = (5.0, 15.0, 60.0)  # after a failure; the last one again and again
LOOK_AGAIN_SECONDS: Final = 10.0  # between two looks at a tokenizer that is there
KEPT_SECONDS: Final = 300.0  # a tokenizer without workers
_THREADS: Final = 4  # for what may wait for a disk or a hub
_MOST_ASKED: Final = 3  # workers that are asked for a bundle, one after the other

_logger = logging.getLogger(__name__)


class Library:
    """See the module.

    Args:
        settings: of the operator.
        workers: all that are registered.
        fetch: asks a worker for its bundle.
        told: is told of a model's name, and why its tokenizer is not there; "" when it is.
        loads: makes a tokenizer of a directory.
    """

    def __init__(
        self,
        settings: LibrarySettings,
        workers: Callable[[], Iterable[Worker]],
        fetch: Fetch,
        told: Callable[[str, str], None] = lambda _model, _reason: None,
        loads: Callable[..., HfTokenizer] = load,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._fetch = fetch
        self._told = told
        self._loads = loads
        self._entries: dict[str, Entry] = {}
        self._loaded: WeakValueDictionary[tuple[str, str | None, str], HfTokenizer] = WeakValueDictionary()
        self._executor: ThreadPoolExecutor | None = None
        self._loading = asyncio.Lock()  # one after the other: it takes memory, and the interpreter lock

    # -- what is asked --------------------------------------------------------------------------------------------

    def get(self, model: str | None) -> Entry | None:
        """The entry of a model; None asks for the first one that is there."""
        if model is not None:
            return self._entries.get(model)
        return next((entry for entry in self._entries.values() if entry.ready is not None), None)

    def find(self, name: str) -> Entry | None:
        """The entry with this id or name."""
        return next((entry for entry in self if entry.id == name), None) or self._entries.get(name)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, in order of their making."""
        return iter(tuple(self._entries.values()))

    def missing(self, model: str) -> str:
        """Why the model has no tokenizer; empty when it has one."""
        entry = self._entries.get(model)
        if entry is None:
            return "" if self._settings.autoload else "--disable-tokenizer-autoload, and none was added"
        if entry.ready is not None:
            return ""
        return entry.reason or "it is being loaded"

    # -- what becomes of workers ----------------------------------------------------------------------------------

    def look(self, worker: Worker) -> None:
        """A gRPC worker was identified, or came back: its models need tokenizers, and theirs may be others."""
        for model in worker.model_ids:
            entry = self._entries.get(model)
            if entry is None:
                if not self._settings.autoload:
                    self._told(model, self.missing(model))
                    continue
                entry = self._entries[model] = Entry(model)
            self._told(model, self.missing(model))
            if entry.given is None:
                self._soon(entry)

    def left(self, worker: Worker) -> None:
        """A gRPC worker is gone; its models' tokenizers go too if nobody comes for them."""
        loop = asyncio.get_running_loop()
        for model in worker.model_ids:
            if not self._of(model):
                loop.call_later(KEPT_SECONDS, self._forget, model)

    # -- what an operator does ------------------------------------------------------------------------------------

    def add(self, name: str, source: str, template: str | None = None) -> Entry:
        """Load what is at ``source``, a path or hub id, for the model ``name``. Raises KeyError if it has one."""
        former = self._entries.get(name)
        if former is not None:
            if former.state is State.READY or (former.given is not None and former.state is not State.FAILED):
                raise KeyError(former.id)
            self._cancel(former)
        entry = self._entries[name] = Entry(name, given=source, template=template, source=source)
        self._begin(entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget a tokenizer. One that workers need is looked for again, as if it had never been there."""
        self._cancel(entry)
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        for worker in self._of(entry.name):
            self.look(worker)

    async def stop(self) -> None:
        """End everything under way; threads end what they do."""
        tasks = [entry.task for entry in self if entry.task is not None]
        for entry in self:
            self._cancel(entry)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _of(self, model: str) -> list[Worker]:
        return [worker for worker in self._workers() if worker.url.is_grpc and model in worker.model_ids]

    def _forget(self, model: str) -> None:
        entry = self._entries.get(model)
        if entry is not None and entry.given is None and not self._of(model):
            self._cancel(entry)
            del self._entries[model]

    def _cancel(self, entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None:
            entry.task.cancel()

    def _soon(self, entry: Entry) -> None:
        """Look for the tokenizer now; for one that is there, not more often than every few seconds."""
        if entry.task is not None:
            entry.again = entry.ready is not None  # what is under way for the first time is for all that come meanwhile
            return
        wait = entry.looked + LOOK_AGAIN_SECONDS - time.monotonic()
        if entry.ready is None or wait <= 0:
            self._begin(entry)
        elif entry.timer is None:
            entry.timer = asyncio.get_running_loop().call_later(wait, self._begin, entry)

    def _begin(self, entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if entry.task is None:
            entry.task = asyncio.get_running_loop().create_task(self._settle(entry), name=f"tokenizer-{entry.name}")

    async def _settle(self, entry: Entry) -> None:
        try:
            if entry.ready is None:
                entry.state = State.LOADING
            await self._load(entry)
            entry.failures, entry.reason, entry.state = 0, "", State.READY
        except FilesError as error:
            self._failed(entry, str(error))
        except Exception:
            _logger.exception("a tokenizer cannot be loaded", extra={"model": entry.name})
            self._failed(entry, "the gateway failed; its log says why")
        finally:
            entry.task = None
            entry.looked = time.monotonic()
        self._told(entry.name, self.missing(entry.name))
        if entry.again:
            entry.again = False
            self._soon(entry)

    def _failed(self, entry: Entry, reason: str) -> None:
        """Say so, once. One that there is stays; one that there is not is looked for again after a while."""
        news, entry.reason = reason != entry.reason, reason
        if news:
            what = "no tokenizer" if entry.ready is None else "the tokenizer cannot be looked at"
            _logger.warning(what, extra={"model": entry.name, "reason": reason})
        wait = RETRY_SECONDS[min(entry.failures, len(RETRY_SECONDS) - 1)]
        entry.failures += 1
        if entry.ready is None:
            entry.state = State.FAILED
            entry.timer = asyncio.get_running_loop().call_later(wait, self._retry, entry)

    def _retry(self, entry: Entry) -> None:
        entry.timer = None
        if entry.given is not None or self._of(entry.name):
            self._begin(entry)

    async def _load(self, entry: Entry) -> None:
        """Find the tokenizer; what is the same as before stays. Raises FilesError with all reasons."""
        reasons = []
        for origin in self._origins(entry):
            try:
                async with origin.directory(self._threads()) as directory:
                    await self._load_from(entry, directory, str(origin))
            except (FilesError, NoAnswerError) as error:
                reasons.append(f"{origin}: {error}")
            else:
                return
        raise FilesError("; ".join(reasons) or "no worker says where it is")

    async def _load_from(self, entry: Entry, directory: Path, source: str) -> None:
        run = asyncio.get_running_loop().run_in_executor
        mark = await run(self._threads(), lambda: fingerprint(files_of(directory)))
        if entry.ready is not None and entry.ready.mark == mark:
            return
        async with self._loading:
            await self._make(entry, directory, source, mark)

    async def _make(self, entry: Entry, directory: Path, source: str, mark: str) -> None:
        run = asyncio.get_running_loop().run_in_executor
        template = entry.template or self._settings.template
        runtime = next((worker.runtime for worker in self._of(entry.name)), "vllm")
        loaded = self._loaded.get((mark, template, runtime))
        begun = time.monotonic()
        if loaded is None:
            loaded = await run(self._threads(), lambda: self._loads(directory, template=template, runtime=runtime))
            self._loaded[mark, template, runtime] = loaded
        encoder = await run(self._threads(), self._encoder_of, loaded)
        changed = entry.ready is not None
        entry.ready, entry.source = Ready(entry.name, loaded, encoder, mark), source
        self._told(entry.name, "")
        facts: dict[str, Any] = {"model": entry.name, "source": source, "vocab_size": loaded.vocab_size}
        _logger.info(
            "the tokenizer is another" if changed else "tokenizer loaded",
            extra=facts | {"seconds": round(time.monotonic() - begun, 3)},
        )
        if not loaded.has_template:
            _logger.warning("the model has no chat template; --chat-template gives it one", extra={"model": entry.name})

    def _encoder_of(self, loaded: HfTokenizer) -> EncodeCache:
        def encode(text: str, special: bool) -> list[int]:  # noqa: FBT001 -- see Encode
            return loaded.encode(text, special=special)

        return EncodeCache(encode, loaded.special_texts, self._settings.cache)

    def _origins(self, entry: Entry) -> Iterator[Origin]:
        if entry.given is not None:
            yield Named(entry.given, hub=True)
            return
        workers = sorted(self._of(entry.name), key=lambda worker: not worker.usable)
        reported = dict.fromkeys(
            path
            for name in ("tokenizer_path", "model_path")
            for worker in workers
            if (path := worker.labels.get(name, ""))
        )
        given = self._settings.path
        if given is not None and self._is_meant(given, entry.name, reported):
            yield Named(given, hub=True)
            reported.pop(given, None)
        for path in reported:
            yield Named(path)
        servers = {worker.server.id: worker.server for worker in workers if worker.ip is not None}
        for worker in tuple(servers.values())[:_MOST_ASKED]:
            yield OfWorker(worker, self._fetch)

    def _is_meant(self, given: str, model: str, reported: Iterable[str]) -> bool:
        """Whether the path that the operator gave is this model's: its name says so, or there is no other model."""
        if any(_last(given) == _last(name) for name in (model, *reported)):
            return True
        return {entry.name for entry in self if entry.given is None} <= {model}

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizers")
        return self._executor


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
