"""The options of cache_aware: the settings' fields of the same names, with the same defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum


class CacheIndex(Enum):
    """What becomes of what is known: it goes when there is no room for it, or also by age."""

    TREE = "tree"
    HASH = "hash"


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """The options of the same names.

    Attributes:
        cache_threshold: share of a prompt; a worker that holds less of it is taken to hold nothing.
        balance_abs_threshold, balance_rel_threshold: a worker that has so many requests more, and so many times as
            many, as the mean is not chosen.
        balance_token_usage_threshold: with so much between the fullest KV cache and the emptiest, of 1, load decides
            alone; 1: never.
        overload_token_usage_threshold: the same with one KV cache so full.
        overlap_decay: what a worker holds counts by ``1 / (1 + overlap_decay * requests under way there)``.
        selection_temperature: 0: the best; else any, by ``exp(-extra cost / (temperature * prompt))``.
        max_tree_size: memory for what is known, in bytes, for each role.
        block_size: tokens; beginnings of prompts are told apart by 4 blocks, long ones by a sixteenth.
        cache_boundaries: tokens; only there instead.
        cache_index: ``hash``: of a beginning at most three workers are known, for ``cache_ttl_secs``.
        cache_ttl_secs: see there.
        eviction_interval_secs: how often what is lost by age, or with its worker, is removed.
    """

    cache_threshold: float = 0.0
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    balance_token_usage_threshold: float = 1.0
    overload_token_usage_threshold: float = 1.0
    overlap_decay: float = 0.0
    selection_temperature: float = 0.0
    max_tree_size: int = 67_108_864
    block_size: int = 16
    cache_boundaries: tuple[int, ...] = ()
    cache_index: CacheIndex = CacheIndex.TREE
    cache_ttl_secs: float = 180.0
    eviction_interval_secs: float = 60.0

    @classmethod
    def of(cls, settings: object) -> CacheAwareSettings:
        """Taken from an object that has all of them."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})
