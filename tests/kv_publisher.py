"""The mock engines' publisher of KV events, and the events that it publishes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from extproc.mock.kv_events import Publisher, batch

__all__ = ["CLEARED", "Publisher", "batch", "publishing", "removed", "stored"]


def stored(
    hashes: Sequence[int | bytes], tokens: Sequence[int], parent: int | bytes | None = None, size: int = 4, **more: Any
) -> dict[str, Any]:
    """A BlockStored as it is in a batch."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    """A BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


@contextlib.contextmanager
def publishing(**options: Any) -> Iterator[Publisher]:
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        publisher.close()
