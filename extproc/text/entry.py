"""One model's tokenizer in the library, and what the operator says of all of them."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import Enum

from extproc.text.cache import CacheSettings, EncodeCache
from extproc.text.hf import HfTokenizer


class State(Enum):
    """How a tokenizer is; the values are those of ``/v1/tokenizers/{id}/status``."""

    PENDING = "pending"
    LOADING = "processing"
    READY = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What the operator says.

    Attributes:
        path: a path or hub id; None where it says none.
        template: a chat template's file, or the name of one of the model's.
        autoload: tokenizers are looked for; else only what is added by hand is there.
        cache: what each tokenizer remembers.
    """

    path: str | None = None
    template: str | None = None
    autoload: bool = True
    cache: CacheSettings = field(default_factory=CacheSettings)


@dataclass(frozen=True, slots=True)
class Ready:
    """A model's tokenizer that is there. A request keeps the one that it began with.

    Attributes:
        name: the model.
        tokenizer: of it.
        encoder: the same, with what it remembers.
        mark: tells one tokenizer from another.
    """

    name: str
    tokenizer: HfTokenizer
    encoder: EncodeCache
    mark: str


@dataclass(slots=True, eq=False)
class Entry:
    """One model's tokenizer.

    Attributes:
        id: a name that never changes.
        name: the model.
        given: where the operator says that it is; None: it is looked for.
        template: a chat template of its own.
        source: where it came from, for people.
        state, reason: how it is, and why it could not be loaded.
        ready: what there is, None while there is nothing.
    """

    name: str
    given: str | None = None
    template: str | None = None
    source: str = ""
    state: State = State.PENDING
    reason: str = ""
    ready: Ready | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    looked: float = 0.0
    failures: int = 0
    again: bool = False
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
