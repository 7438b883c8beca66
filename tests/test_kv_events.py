"""What KV events say, and the index of blocks that is made of them."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from fakes import Asked, worker
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import CLEARED, batch, removed, stored

from extproc.policies.block_index import BlockIndex
from extproc.policies.event_prefixes import EventPrefixes
from extproc.policies.token_prompt import TokenPrompt
from extproc.workers.kv_events import Cleared, GarbageError, Removed, Stored, decode, packed
from extproc.workers.worker import Role

W1, W2, W3 = (worker(Role.PREFILL, port) for port in (1, 2, 3))


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_of_maps() -> None:
    assert decode(batch(stored([7, 8], range(8), parent=6), removed(b"\x01" * 32), CLEARED)) == [
        Stored([7, 8], 6, packed(range(8)), 4, None, ()),
        Removed([b"\x01" * 32]),
        Cleared(),
    ]


def test_a_batch_of_lists_as_older_engines_have_it() -> None:
    older = [["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]
    assert decode(msgspec.msgpack.encode([1.5, older])) == [
        Stored([7], None, packed([1, 2]), 2, None, ()),
        Removed([7]),
        Cleared(),
    ]
    newer = [["BlockStored", [7], None, [1, 2], 2, None, "CPU"], ["BlockRemoved", [7], "GPU"]]
    assert decode(msgspec.msgpack.encode([1.5, newer, 3])) == [Removed([7])]


def test_only_the_engines_own_cache_counts() -> None:
    """Neither other tiers nor the windows of a hybrid model; SGLang names its tiers otherwise."""
    for more in ({"medium": "CPU"}, {"medium": "CPU_PINNED"}, {"medium": "STORAGE"}, {"group_idx": 1}):
        assert decode(batch(stored([1], range(4), **more), removed(1, **more))) == []
    for more in ({"medium": None}, {"group_idx": 0}):
        assert len(decode(batch(stored([1], range(4), **more), removed(1, **more)))) == 2


def test_what_keeps_caches_apart() -> None:
    def spaces(**more: Any) -> tuple[Any, Any]:
        (event,) = decode(batch(stored([1, 2], range(8), **more)))
        assert isinstance(event, Stored)
        return event.space, event.extras

    assert spaces(lora_name="a", extra_keys=[["a"], ["a"]]) == (("a", None), ())
    assert spaces(lora_id=3) == ((3, None), ())
    assert spaces(cache_salt="s") == ((None, "s"), ())
    assert spaces(extra_keys=[None, None]) == (None, ())
    space, (first, second) = spaces(extra_keys=[["salt"], [["image", 0]]])
    assert space is None
    assert first != second != b""


def test_what_is_left_out() -> None:
    assert decode(batch({"type": "SomethingNew", "block_hashes": 3})) == []
    assert decode(batch(stored([1, 2], range(4)))) == []  # a block between is not cached
    assert decode(batch(stored([1], [[1, 2]] * 4))) == []  # pairs of tokens: speculative decoding
    assert decode(batch()) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000 + b"\xc0",  # lists in lists
        b"{}",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [{}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1]]]]),
        batch({"type": ["x"]}),
        batch(removed("name")),
        batch({"type": "BlockRemoved", "block_hashes": 3}),
        batch(stored([1], range(4), parent="x")),
        batch(stored([1], range(4), size="x")),
        batch(stored([], [], size=0)),
        batch(stored([1], [2**32] * 4)),
        batch(stored([1], range(4), extra_keys=[None, None])),
    ],
)
def test_garbage(payload: bytes) -> None:
    with pytest.raises(GarbageError):
        decode(payload)


@given(st.binary(max_size=60))
def test_any_bytes_are_events_or_garbage(payload: bytes) -> None:
    with contextlib.suppress(GarbageError):
        decode(payload)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from([*stored([1], [1]), "extra_keys", "group_idx", "cache_salt"])


@given(field=_fields, value=_values)
def test_any_field_may_be_something_else(field: str, value: Any) -> None:
    payload = batch(stored([1], range(4)) | {field: value})
    try:
        events = decode(payload)
    except GarbageError:
        return
    index = BlockIndex(100)
    holder = index.holder()
    for event in events:
        index.apply(holder, event)


# -- prompts ----------------------------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=3000), spaces=st.sampled_from(["", " ", "\n "]))
def test_a_prompt_of_token_ids_is_read_piece_by_piece(tokens: list[int], spaces: str) -> None:
    raw = json.dumps(tokens, separators=("," + spaces, ":")).encode()
    prompt = TokenPrompt.of(raw)
    assert prompt is not None
    for width in (4, 64):
        whole = b"".join(prompt.pieces(width))
        assert whole == packed(tokens)[: len(tokens) * 4 // width * width]


@pytest.mark.parametrize("raw", [b'"text"', b'[{"role":"user"}]', b"[[1,2],[3]]", b'["a"]', b"[]", b"[-1]"])
def test_other_prompts_are_none(raw: bytes) -> None:
    assert TokenPrompt.of(raw) is None


@pytest.mark.parametrize("raw", [b'[1,2,"x"]', b"[1,2.5]", b"[1,[2]]", b"[1,99999999999999999999]", b"[1,2", b"[1,,2]"])
def test_what_is_no_list_of_token_ids_after_all(raw: bytes) -> None:
    prompt = TokenPrompt.of(raw)
    assert prompt is not None
    assert len(b"".join(prompt.pieces(4))) <= 8


def test_only_what_is_needed_is_read() -> None:
    raw = json.dumps([*range(100_000)]).encode()
    prompt = TokenPrompt.of(raw)
    assert prompt is not None
    next(prompt.pieces(64))
    assert prompt._next < 5000


# -- the index --------------------------------------------------------------------------------------------------------


def asked(tokens: list[int], model: str = "tiny") -> Asked:
    return Asked(model, prompt=json.dumps(tokens).encode())


class Fleet:
    """Prefixes that follow some workers from their beginning."""

    def __init__(self, *workers: Any, most: int = 1000) -> None:
        self.emptied: list[Any] = []
        self.prefixes = EventPrefixes(most, self.emptied.append)
        for one in workers:
            self.prefixes.begin(one)
            self.prefixes.restart(one)

    def says(self, who: Any, *events: Any) -> None:
        self.prefixes.apply(who, decode(batch(*events)))

    def held(self, tokens: list[int], *workers: Any, model: str = "tiny") -> dict[Any, int] | None:
        found = self.prefixes.overlaps(asked(tokens, model), workers or (W1, W2, W3))
        return None if found is None else dict(found)


def test_the_longest_prefix_of_each() -> None:
    fleet = Fleet(W1, W2)
    fleet.says(W1, stored([1, 2, 3], range(12)))
    fleet.says(W2, stored([90], range(4)), stored([91], [9] * 4, parent=90))
    assert fleet.held([*range(14)]) == {W1: 12, W2: 4}
    assert fleet.held([*range(4), *[9] * 5]) == {W1: 4, W2: 8}
    assert fleet.held([*range(3)]) == {W1: 0, W2: 0}
    assert fleet.held([7, *range(12)]) == {W1: 0, W2: 0}
    assert fleet.held([*range(12)], W1) == {W1: 12}
    fleet.says(W1, removed(2))
    assert fleet.held([*range(12)]) == {W1: 4, W2: 4}
    fleet.says(W1, stored([2], range(4, 8), parent=1))
    assert fleet.held([*range(12)]) == {W1: 12, W2: 4}
    fleet.says(W1, CLEARED)
    assert fleet.held([*range(12)]) == {W1: 0, W2: 4}
    assert fleet.emptied == [W1]


def test_of_what_is_not_known_nothing_is_said() -> None:
    fleet = Fleet(W1)
    fleet.prefixes.begin(W2)  # from the middle on
    assert fleet.held([*range(4)]) == {W1: 0}
    fleet.says(W2, stored([5], range(4)), stored([7], range(4), parent=6))
    assert fleet.held([*range(4)]) == {W1: 0, W2: 4}
    assert fleet.held([1, 1, 1, 1]) == {W1: 0}
    assert fleet.prefixes.overlaps(Asked(prompt=b'"text"'), (W1, W2)) is None
    assert fleet.prefixes.overlaps(Asked(prompt=b'[{"role":"user","content":"x"}]'), (W1, W2)) is None
    assert EventPrefixes(10).overlaps(asked([1]), (W1,)) is None
    fleet.says(W2, CLEARED)
    assert fleet.held([*range(4)]) == {W1: 0, W2: 0}
    fleet.prefixes.lose(W1)
    assert fleet.held([*range(4)]) == {W2: 0}
    fleet.prefixes.end(W2)
    assert fleet.held([*range(4)]) == {}


def test_blocks_of_different_sizes() -> None:
    fleet = Fleet(W1, W2)
    fleet.says(W1, stored([1, 2], range(8)))
    fleet.says(W2, stored([1], range(6), size=6))
    assert fleet.held([*range(8)]) == {W1: 8, W2: 6}
    fleet.says(W1, stored([3], [8, 9], parent=2, size=2))  # a part of a block
    assert fleet.held([*range(10)]) == {W1: 8, W2: 6}


def test_adapters_and_images_are_not_the_model_itself() -> None:
    fleet = Fleet(W1)
    fleet.says(W1, stored([1], range(4), lora_name="adapter", extra_keys=[["adapter"]]))
    assert fleet.held([*range(4)]) == {W1: 0}
    assert fleet.held([*range(4)], model="adapter") == {W1: 4}
    fleet.says(W1, stored([2], range(4), extra_keys=[[["image", 0]]]))
    assert fleet.held([*range(4)]) == {W1: 0}


def test_memory_is_bounded() -> None:
    fleet = Fleet(W1, W2, most=10)
    fleet.says(W1, stored([*range(8)], range(32)))
    fleet.says(W2, stored([*range(8)], range(32)))
    assert fleet.prefixes.blocks(W1) == 8
    assert fleet.prefixes.blocks(W2) == 2
    assert fleet.held([*range(32)]) == {W1: 32, W2: 8}
    assert fleet.prefixes.is_whole(W1)
    assert not fleet.prefixes.is_whole(W2)
    fleet.says(W1, removed(*range(8)))
    fleet.says(W2, stored([*range(8)], range(32)))
    assert fleet.held([*range(32)]) == {W1: 0, W2: 32}


def test_a_name_may_come_to_mean_another_block() -> None:
    fleet = Fleet(W1)
    fleet.says(W1, stored([1], range(4)), stored([1], range(4, 8)))
    assert fleet.held([*range(4)]) == {W1: 0}
    assert fleet.held([*range(4, 8)]) == {W1: 4}


def test_workers_come_and_go() -> None:
    fleet = Fleet()
    for _ in range(3):
        for one in (W1, W2, W3):
            fleet.prefixes.begin(one)
            fleet.prefixes.restart(one)
            fleet.says(one, stored([1], range(4)))
        assert fleet.held([*range(4)]) == {W1: 4, W2: 4, W3: 4}
        for one in (W2, W1, W3):
            fleet.prefixes.end(one)
            fleet.prefixes.end(one)
    assert fleet.prefixes._index._bits == 3
    assert fleet.prefixes._index.blocks == 0
    assert fleet.prefixes._index._holders_of == {}


_prompts = st.lists(st.integers(0, 2), max_size=12)


@given(
    st.lists(
        st.tuples(st.sampled_from([W1, W2]), st.sampled_from(["store", "remove", "clear", "lose"]), _prompts),
        max_size=30,
    ),
    _prompts,
)
def test_it_knows_what_a_set_of_prefixes_would(steps: list[tuple[Any, str, list[int]]], asked_for: list[int]) -> None:
    """Against a model that remembers, for each worker, every prefix as a tuple of its tokens; blocks of 2."""
    fleet = Fleet(W1, W2)
    caches: dict[Any, set[tuple[int, ...]]] = {W1: set(), W2: set()}
    for who, what, tokens in steps:
        blocks = [tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)]
        names = [json.dumps(block).encode() for block in blocks]
        if what == "store" and blocks:
            fleet.says(who, stored(names, tokens[: 2 * len(blocks)], size=2))
            caches[who] |= set(blocks)
        elif what == "remove" and blocks:
            fleet.says(who, removed(names[-1]))
            caches[who].discard(blocks[-1])
        elif what in ("clear", "lose"):
            fleet.says(who, CLEARED)
            caches[who].clear()
    expected = {}
    for who, cache in caches.items():
        depth = 0
        while depth + 2 <= len(asked_for) and tuple(asked_for[: depth + 2]) in cache:
            depth += 2
        expected[who] = depth
    if asked_for:
        assert fleet.held(asked_for) == expected
    assert fleet.prefixes._index.blocks == sum(map(len, caches.values()))


def test_what_a_block_takes() -> None:
    """The help of --kv-event-max-blocks names it."""
    index = BlockIndex(1_000_000)
    holder = index.holder()
    tracemalloc.start()
    for number in range(2000):
        names = [(number * 16 + block) << 40 for block in range(16)]
        index.apply(holder, Stored(names, None, packed(range(number, number + 256)), 16, None, ()))
    taken = tracemalloc.get_traced_memory()[0] / index.blocks
    tracemalloc.stop()
    assert 100 < taken < 250, taken


def test_of_a_salted_request_nothing_is_known() -> None:
    fleet = Fleet(W1)
    fleet.says(W1, stored([1], range(4)))
    salted = Asked(prompt=json.dumps([*range(4)]).encode(), context=b'"salt"')
    assert fleet.prefixes.overlaps(salted, (W1,)) is None
