"""The KV cache of one process: blocks that requests take, that stay pinned for a decode, and that are written again."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PREFIXES = 100_000  # cached prefixes that are remembered


class Blocks:
    """``count`` blocks of ``size`` tokens. Whose prompt a block was last written for is kept after it is given back."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free = deque(range(1, count + 1))
        self._written: dict[int, int] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._prefixes: dict[int, None] = {}
        self.tell: Callable[..., None] | None = None  # is told what comes into the prefix cache and leaves it

    @property
    def usage(self) -> float:
        """The share in use, 0 to 1."""
        return 1 - len(self._free) / self.count

    def needed(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return min(-(-tokens // self.size), self.count)

    async def take(self, tokens: int, digest: int) -> list[int]:
        """Blocks for ``tokens`` in all, written for the prompt ``digest``; waits while there are too few."""
        needed = self.needed(tokens)
        if self._waiting or needed > len(self._free):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((needed, turn))
            try:
                await turn
            except asyncio.CancelledError:
                self._admit()
                raise
        taken = [self._free.popleft() for _ in range(needed)]
        for block in taken:
            self._written[block] = digest
        self._admit()
        return taken

    def give(self, blocks: list[int]) -> None:
        """Blocks that nobody needs any more; they are the last to be taken again."""
        self._free.extend(blocks)
        self._admit()

    def rewrite(self, blocks: list[int], digest: int) -> None:
        """What a transfer has put into blocks."""
        for block in blocks:
            self._written[block] = digest

    def content(self, block: object) -> int:
        """The digest of the prompt a block was last written for; 0: of none."""
        return self._written.get(block, 0) if isinstance(block, int) else 0

    def cached(self, ids: list[int]) -> int:
        """How many of a prompt's tokens are in the prefix cache, where the whole prompt is put by this."""
        hits = digest = 0
        unbroken = True
        new: list[int] = []
        parent: int | None = None
        for end in range(self.size, len(ids) + 1, self.size):
            before, digest = digest, zlib.crc32(repr(ids[end - self.size : end]).encode(), digest)
            unbroken = unbroken and digest in self._prefixes
            if unbroken and end < len(ids):  # the last token is always computed
                hits = end
            if not unbroken:
                if not new and end > self.size:
                    parent = before
                new.append(digest)
            self._prefixes[digest] = None
        gone = [self._forget_oldest() for _ in range(len(self._prefixes) - _PREFIXES)]
        if self.tell is not None:
            start = len(ids) // self.size - len(new)
            tokens = ids[start * self.size : (start + len(new)) * self.size]
            self.tell(*([_stored(new, parent, tokens, self.size)] if new else []), *([_removed(gone)] if gone else []))
        return hits

    def _forget_oldest(self) -> int:
        oldest = next(iter(self._prefixes))
        del self._prefixes[oldest]
        return oldest

    def reset(self) -> bool:
        """Forget what is in the prefix cache; not while any block is in use (``v1/core/block_pool.py``)."""
        if len(self._free) < self.count:
            return False
        self._prefixes.clear()
        if self.tell is not None:
            self.tell({"type": "AllBlocksCleared"})
        return True

    def _admit(self) -> None:
        while self._waiting:
            needed, turn = self._waiting[0]
            if turn.done():  # left
                self._waiting.popleft()
            elif needed <= len(self._free):
                self._waiting.popleft()
                turn.set_result(None)
                return  # it takes its blocks, then lets the next one in
            else:
                return


def _stored(names: list[int], parent: int | None, tokens: list[int], size: int) -> dict[str, Any]:
    """As ``v1/core/block_pool.py`` says it, by numbers (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }


def _removed(names: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}


@dataclass(frozen=True, slots=True)
class _Pin:
    blocks: list[int]
    digest: int
    timer: asyncio.TimerHandle


class Pins:
    """Blocks that outlive their request until a decode has read them, or nobody came for ``lease`` seconds."""

    def __init__(self, blocks: Blocks, lease: float) -> None:
        self.expired = 0
        self._blocks = blocks
        self._lease = lease
        self._held: dict[str, _Pin] = {}
        self._on_change: Callable[[], None] | None = None

    @property
    def count(self) -> int:
        """How many blocks are pinned."""
        return sum(len(pin.blocks) for pin in self._held.values())

    @property
    def keys(self) -> tuple[str, ...]:
        """Whose blocks are pinned, oldest first."""
        return tuple(self._held)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` whenever blocks are pinned or freed."""
        self._on_change = on_change

    def hold(self, key: str, blocks: list[int], digest: int) -> None:
        """Pin blocks under a key; those that were pinned under it before are nobody's any more, and stay taken."""
        if (before := self._held.pop(key, None)) is not None:
            before.timer.cancel()
        timer = asyncio.get_running_loop().call_later(self._lease, self._expire, key)
        self._held[key] = _Pin(blocks, digest, timer)
        self._changed()

    def digest(self, key: str) -> int | None:
        """The prompt for which blocks are pinned under a key; None: there are none."""
        pin = self._held.get(key)
        return None if pin is None else pin.digest

    def release(self, key: str) -> bool:
        """Free the blocks under a key; False: there are none."""
        pin = self._held.pop(key, None)
        if pin is None:
            return False
        pin.timer.cancel()
        self._blocks.give(pin.blocks)
        self._changed()
        return True

    def clear(self) -> None:
        """Free everything."""
        for key in self.keys:
            self.release(key)

    def _expire(self, key: str) -> None:
        self.expired += 1
        self.release(key)

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()
