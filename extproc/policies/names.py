"""The words by which an operator chooses among policies: the values of settings, which are the peer's."""

from __future__ import annotations

from enum import Enum


class PolicyName(Enum):
    """How one worker is chosen among those that can serve a request; each has a module of its name."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    CACHE_AWARE = "cache_aware"
    PASSTHROUGH = "passthrough"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOAD = "least_load"
    CONSISTENT_HASHING = "consistent_hashing"
    PREFIX_HASH = "prefix_hash"
    MANUAL = "manual"
    BUCKET = "bucket"


class LoadMetric(Enum):
    """What power_of_two compares."""

    EXPECTED_WAIT = "expected_wait"
    REQUESTS = "requests"
    LEAST_REQUESTS = "least_requests"


class AssignmentMode(Enum):
    """Who gets a routing key that has no worker yet."""

    RANDOM = "random"
    MIN_LOAD = "min_load"
    MIN_GROUP = "min_group"
    DELEGATE = "delegate"
