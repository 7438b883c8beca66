"""The settings of how workers are chosen; :mod:`extproc.settings` has the others."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, model_validator

from extproc.options import Group, Option, from_settings_before
from extproc.policies.cache_options import CacheIndex
from extproc.policies.names import AssignmentMode, LoadMetric, PolicyName
from extproc.values import (
    Boundaries,
    Count,
    Duration,
    EncodePolicy,
    Growth,
    HeaderNames,
    Share,
    Tally,
    Weight,
)

_ASSIGNMENT = "of a new key: random, min_load, min_group, delegate"


class PolicySettings(BaseModel):
    """A part of :class:`extproc.settings.Settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # fmt: off
    policy: Annotated[PolicyName, Option(
        Group.POLICIES, "for both roles; docs/policies.md has them all", "NAME")
    ] = PolicyName.CACHE_AWARE
    prefill_policy: Annotated[PolicyName, Option(
        Group.POLICIES, "policy for prefill workers", "NAME", "as --policy")
    ] = from_settings_before(lambda data: data["policy"])
    decode_policy: Annotated[PolicyName, Option(
        Group.POLICIES, "policy for decode workers: any but bucket", "NAME", "as --policy")
    ] = from_settings_before(lambda data: data["policy"])
    encode_policy: Annotated[EncodePolicy, Option(
        Group.POLICIES, "encode workers (not served yet: no effect)", "NAME")
    ] = PolicyName.CONSISTENT_HASHING
    dp_minimum_tokens_scheduler: Annotated[bool, Option(
        Group.POLICIES, "--dp-aware: the server's rank with fewest tokens")] = False

    routing_key_override: Annotated[bool, Option(
        Group.STICKY, "a conversation stays with its workers, by any policy")] = False
    routing_key_headers: Annotated[HeaderNames, Option(
        Group.STICKY, "headers with a routing key; the first counts", "NAME")] = ("x-smg-routing-key",)
    max_idle_secs: Annotated[Duration, Option(
        Group.STICKY, "a key not used for so long is forgotten", "SECONDS")] = 14400
    assignment_mode: Annotated[AssignmentMode | None, Option(
        Group.STICKY, _ASSIGNMENT, "NAME", "manual: random")] = None

    power_of_two_load_metric: Annotated[LoadMetric, Option(
        Group.TUNING, "expected_wait, requests, least_requests", "NAME")] = LoadMetric.EXPECTED_WAIT
    least_load_kv_pressure_weight: Annotated[Weight, Option(
        Group.TUNING, "seconds that a half full KV cache is worth", "SECONDS")] = 0.15
    least_load_default_throughput: Annotated[Duration, Option(
        Group.TUNING, "tokens per second of engines that do not say it", "TOKENS")] = 2000
    least_load_mean_prefill_tokens: Annotated[Count, Option(
        Group.TUNING, "tokens of a waiting prompt, where unknown", "TOKENS")] = 1024
    least_load_max_waiting_requests: Annotated[Tally, Option(
        Group.TUNING, "so many in its queue: pass over; 0: never", "COUNT")] = 0
    prefix_token_count: Annotated[Count, Option(
        Group.TUNING, "prefix_hash: tokens of a prompt that are its key", "TOKENS")] = 256
    prefix_hash_load_factor: Annotated[Growth, Option(
        Group.TUNING, "prefix_hash: times the average load is too much", "FACTOR")] = 1.25
    prefix_hash_balance_abs_threshold: Annotated[Tally, Option(
        Group.TUNING, "... if it is so many requests above it, too", "COUNT")] = 10
    bucket_adjust_interval_secs: Annotated[Duration, Option(
        Group.TUNING, "bucket: time between two cuts of its ranges", "SECONDS")] = 5
    balance_abs_threshold: Annotated[Tally, Option(
        Group.TUNING, "imbalance: so much more than others, and", "COUNT")] = 64
    balance_rel_threshold: Annotated[Growth, Option(
        Group.TUNING, "... so many times as much", "FACTOR")] = 1.5
    cache_threshold: Annotated[Share, Option(
        Group.TUNING, "cache_aware: who holds less of a prompt, holds nothing", "SHARE")] = 0.0
    balance_token_usage_threshold: Annotated[Share, Option(
        Group.TUNING, "cache_aware: only load counts if KV usage differs so much", "GAP")] = 1.0
    overload_token_usage_threshold: Annotated[Share, Option(
        Group.TUNING, "cache_aware: only load counts if one KV cache is so full", "MAX")] = 1.0
    overlap_decay: Annotated[Weight, Option(
        Group.TUNING, "cache_aware: what is held counts 1 / (1 + this * load)", "FACTOR")] = 0.0
    selection_temperature: Annotated[Weight, Option(
        Group.TUNING, "cache_aware: 0: the best; more: others, too, by chance", "FACTOR")] = 0.0
    max_tree_size: Annotated[Count, Option(
        Group.TUNING, "cache_aware: memory for what workers hold, per role", "BYTES")] = 67108864
    block_size: Annotated[Count, Option(
        Group.TUNING, "cache_aware: prompts are told apart by 4 such blocks", "TOKENS")] = 16
    cache_boundaries: Annotated[Boundaries, Option(
        Group.TUNING, "cache_aware: only at these places instead", "TOKENS", "none")] = ()
    cache_index: Annotated[CacheIndex, Option(
        Group.TUNING, "cache_aware: tree; hash: known for a time, of three workers", "NAME")] = CacheIndex.TREE
    cache_ttl_secs: Annotated[Duration, Option(
        Group.TUNING, "cache_aware: that time", "SECONDS")] = 180
    eviction_interval_secs: Annotated[Duration, Option(
        Group.TUNING, "cache_aware: between two looks at what is lost by age", "SECONDS")] = 60
    # fmt: on

    @model_validator(mode="after")
    def _bucket_is_for_prefill(self) -> Self:
        if self.decode_policy is PolicyName.BUCKET:
            raise ValueError("Decode policy should not be allowed to be bucket: give --decode-policy another")
        return self
