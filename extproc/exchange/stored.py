"""Which decode worker keeps which stored response, so that whoever asks for one again is sent there.

The Responses API keeps answers on the worker that made them. Names of responses that the gateway makes say which worker
that is meant to be, so that any gateway of the fleet, and one that was restarted, can tell; where it was another one in
the end, or the client chose the name, this gateway remembers. They are kept by a server, whichever of its data-parallel
ranks computed them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from extproc.apis.request import InferenceRequest
from extproc.apis.table import RESPONSES
from extproc.workers.worker import Worker

PREFIX: Final = "resp_"
_DIGITS: Final = 24  # hexadecimal ones, at the end of a request id of ours
_TAG: Final = 8  # hexadecimal digits that stand for a worker
_REMEMBERED: Final = 100_000  # some 40 MB if all are as long as they may be
_LONGEST: Final = 256  # bytes of a name that can be asked for


class StoredResponses:
    """See the module."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}  # name of the response -> URL of the worker, oldest first

    def name(self, worker: Worker, request_id: bytes = b"") -> str:
        """A new name for a response that ``worker`` is to make, to be known by ``request_id`` if that is ours."""
        return f"{PREFIX}{_tag(worker.base_url)}{request_id[-_DIGITS:].decode() or f'{random.getrandbits(96):024x}'}"

    def made(self, name: str, worker: Worker) -> None:
        """``worker`` made the response of this name. Nothing is kept of one that cannot be asked for."""
        self._kept.pop(name, None)  # of another worker, perhaps
        if not _can_be_asked_for(name) or _named_after(name) == _tag(worker.base_url):
            return
        self._kept[name] = worker.base_url
        if len(self._kept) > _REMEMBERED:
            del self._kept[next(iter(self._kept))]

    def keeper(self, name: str, workers: Iterable[Worker]) -> Worker | None:
        """Which of ``workers`` keeps the response of this name; None when nobody can tell."""
        if not _can_be_asked_for(name):
            return None
        known = self._kept.get(name)
        tag = _named_after(name)
        for worker in workers:
            if (worker.base_url == known) if known is not None else (_tag(worker.base_url) == tag):
                return worker
        return None


def naming(
    stored: StoredResponses, request: InferenceRequest, worker: Worker, request_id: bytes
) -> tuple[str, Mapping[str, bytes]]:
    """The name under which ``worker`` may keep its answer to ``request``, and what the legs' bodies say of it.

    Empty for what is never kept. A name that the client chose is left as it is; of ``request_id`` that is empty.
    """
    if request.api is not RESPONSES:
        return "", {}
    given = request.body.get("request_id") if "request_id" in request.body else None
    if isinstance(given, str):
        return given, {}
    name = stored.name(worker, request_id)
    return name, {"request_id": b'"%b"' % name.encode()}


@lru_cache(4096)
def _tag(worker: str) -> str:
    return blake2b(worker.encode(), digest_size=_TAG // 2).hexdigest()


def _can_be_asked_for(name: str) -> bool:
    """Clients choose names, and memory is limited."""
    return len(name) <= _LONGEST and (name.isascii() or len(name.encode()) <= _LONGEST)


def _named_after(name: str) -> str:
    return name.removeprefix(PREFIX)[:_TAG] if name.startswith(PREFIX) else ""
