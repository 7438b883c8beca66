"""The parts that make text tokens and back, for models that gRPC workers serve, put together for one process."""

from __future__ import annotations

import asyncio
from typing import Final

from extproc.settings import Settings, usable_cores
from extproc.text.bundle import Bundle
from extproc.text.cache import CacheSettings
from extproc.text.endpoints import TextEndpoints
from extproc.text.entry import LibrarySettings
from extproc.text.library import Library
from extproc.text.service import Texts
from extproc.text.threads import Threads
from extproc.workers.client import WorkerClient
from extproc.workers.registry import Change, Registry
from extproc.workers.rpc.services import GET_TOKENIZER, service_of
from extproc.workers.worker import Status, Worker

_BUNDLE_SECONDS: Final = 60.0  # for all of a tokenizer; some have 35 MB
_MOST_THREADS: Final = 8


class TextParts:
    """See the module. Costs nothing while there are no gRPC workers: the libraries are not imported then.

    Args:
        settings: of the operator.
        registry: whose workers' models need tokenizers.
        client: asks workers for theirs.

    Attributes:
        texts: makes prompts tokens.
        endpoints: answers what is asked about that.
        library: has the tokenizers.
    """

    def __init__(self, settings: Settings, registry: Registry, client: WorkerClient) -> None:
        async def fetch(worker: Worker, bundle: Bundle) -> None:
            service = service_of(worker.runtime)
            path, response = service.path(GET_TOKENIZER), service.response(GET_TOKENIZER)
            request = service.request(GET_TOKENIZER)
            async for chunk in client.rpc.gather(worker, path, request, response, within=_BUNDLE_SECONDS):
                bundle.add(chunk.data, chunk.sha256)

        self._registry = registry
        self.library = Library(_library_settings(settings), registry.__iter__, fetch, registry.set_tokenizer)
        # The event loop's own core is no thread's.
        threads = Threads(max(1, min(_MOST_THREADS, usable_cores() - 1)))
        self.texts = Texts(
            self.library, threads, registry.__iter__, trust_templates=settings.trust_request_chat_template
        )
        self.endpoints = TextEndpoints(self.texts, self._runtime_of)
        registry.subscribe(self._on_change)

    async def stop(self) -> None:
        """End everything under way."""
        self.texts.stop()
        await self.library.stop()

    def _on_change(self, worker: Worker, change: Change) -> None:
        if not worker.url.is_grpc:
            return
        self.texts.workers_changed()
        if change is Change.REMOVED:
            self.library.left(worker)
        elif change is Change.IDENTITY or (change is Change.STATUS and worker.status is Status.READY):
            # Not within the change: whoever else is told of it shall know it first.
            asyncio.get_running_loop().call_soon(self.library.look, worker)

    def _runtime_of(self, model: str) -> str:
        return next((w.runtime for w in self._registry if w.url.is_grpc and model in w.model_ids), "vllm")


def _library_settings(settings: Settings) -> LibrarySettings:
    whole, beginnings = settings.tokenizer_cache_enable_l0, settings.tokenizer_cache_enable_l1
    cache = CacheSettings(
        l0_entries=settings.tokenizer_cache_l0_max_entries if whole else 0,
        l0_bytes=settings.tokenizer_cache_l0_max_memory if whole else 0,
        l1_bytes=settings.tokenizer_cache_l1_max_memory if beginnings else 0,
    )
    return LibrarySettings(
        path=settings.tokenizer_path or settings.model_path,
        template=settings.chat_template,
        autoload=not settings.disable_tokenizer_autoload,
        cache=cache,
    )
