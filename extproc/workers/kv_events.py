"""KV cache events, as engines publish them: which blocks of tokens came into an engine's prefix cache, and which left.

A message has three frames: topic, sequence number (8 bytes, big endian), and a batch in msgpack, ``[time, events,
data-parallel rank]``. An event is a map with the class's name as ``type``; before vLLM 0.12 and in older SGLang a list
that begins with it. Pure.

Source: vllm 0.32 distributed/kv_events.py, v1/core/block_pool.py; sglang 0.5.23 srt/disaggregation/kv_events.py,
srt/mem_cache/events.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes  # whatever the engine calls a block by
Space: TypeAlias = tuple[str | int | None, str | None]  # LoRA adapter, by name or number, and salt
TOKEN_BYTES: Final = 4  # of a token id in what :func:`packed` returns

# The tiers that count as the cache: a block in an engine's CPU memory or in a shared store must be loaded first.
_DEVICE: Final = (None, "GPU")
_STORED: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_STORED_TAIL: Final = ("extra_keys", "group_idx")
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": (*_STORED, *_STORED_TAIL),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class GarbageError(ValueError):
    """This is no batch of events."""


class Stored(NamedTuple):
    """Blocks that follow each other are in the cache.

    Attributes:
        hashes: the blocks' names.
        parent: that of the block before the first; None where it is the first of a prompt.
        tokens: their token ids, packed.
        size: tokens of a block.
        space: what else must be the same for the cache to be of use; None: nothing.
        extras: the same of each block, such as an image in it; empty: nothing.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    size: int
    space: Space | None
    extras: Sequence[bytes]


class Removed(NamedTuple):
    """These blocks have left the cache."""

    hashes: Sequence[BlockHash]


class Cleared(NamedTuple):
    """So have all."""


Event: TypeAlias = Stored | Removed | Cleared


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, TOKEN_BYTES each. Raises TypeError or OverflowError for what is no token id."""
    return array("I", tokens).tobytes()


def decode(payload: bytes) -> list[Event]:
    """The events of a batch that are about the engine's own cache, in order. Raises GarbageError.

    Kinds of events that are not known, and caches of a kind of their own (sliding windows beside full attention), are
    left out.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        _, events = batch[:2]
        return [found for event in events if (found := _event(event)) is not None]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise GarbageError(f"{type(error).__name__}: {error}") from None


def _event(event: Any) -> Event | None:
    if isinstance(event, dict):
        kind, fields = event["type"], event
    else:
        kind = event[0]
        fields = dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in _FIELDS or fields.get("medium") not in _DEVICE or fields.get("group_idx") not in (None, 0):
        return None
    hashes = fields["block_hashes"]
    if not isinstance(hashes, list) or not all(type(name) in (int, bytes) for name in hashes):
        raise GarbageError("block_hashes are no list of numbers or bytes")
    return Removed(hashes) if kind == "BlockRemoved" else _stored(hashes, fields)


def _stored(hashes: Sequence[BlockHash], fields: Mapping[str, Any]) -> Stored | None:
    tokens, size, parent = fields["token_ids"], fields["block_size"], fields["parent_block_hash"]
    if type(size) is not int or size < 1 or type(parent) not in (int, bytes, type(None)):
        raise GarbageError("block_size or parent_block_hash is something else")
    if len(tokens) != len(hashes) * size:
        return None  # blocks are left out in between: who knows where the others stand
    try:
        ids = packed(tokens)
    except TypeError:  # pairs of tokens, of speculative decoding
        return None
    lora = fields.get("lora_name") or fields.get("lora_id")
    salt = fields.get("cache_salt")
    if not isinstance(lora, str | int | None) or not isinstance(salt, str | None):
        raise GarbageError("lora_name, lora_id or cache_salt is something else")
    space = None if lora is None and salt is None else (lora, salt)
    return Stored(hashes, parent, ids, size, space, _extras(fields.get("extra_keys"), lora, len(hashes)))


def _extras(keys: Any, lora: object, count: int) -> Sequence[bytes]:
    """What each block needs besides; the LoRA adapter, which is in the space, apart."""
    if keys is None:
        return ()
    if len(keys) != count:
        raise GarbageError("extra_keys are not one for each block")
    own = [[key for key in entry or () if lora is None or key != lora] for entry in keys]
    return [msgspec.msgpack.encode(entry) if entry else b"" for entry in own] if any(own) else ()
