"""All policies by name, and what may be laid over any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.policies.bucket import BucketPolicy
from extproc.policies.cache_aware import CacheAwarePolicy, CachedPrefixes
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.consistent_hashing import ConsistentHashingPolicy
from extproc.policies.least_load import LeastLoadPolicy
from extproc.policies.manual import manual, sticky
from extproc.policies.minimum_tokens import MinimumTokens
from extproc.policies.names import PolicyName
from extproc.policies.passthrough import PassthroughPolicy
from extproc.policies.policy import Policy
from extproc.policies.power_of_two import PowerOfTwoPolicy
from extproc.policies.prefix_hash import PrefixHashPolicy
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Role

Clock = Callable[[], float]  # seconds, monotonic

_POLICIES: Final[dict[PolicyName, Callable[[Tuning, Clock], Policy]]] = {
    PolicyName.RANDOM: lambda _tuning, _now: RandomPolicy(),
    PolicyName.ROUND_ROBIN: lambda _tuning, _now: RoundRobinPolicy(),
    PolicyName.PASSTHROUGH: lambda _tuning, _now: PassthroughPolicy(),
    PolicyName.POWER_OF_TWO: PowerOfTwoPolicy,
    PolicyName.LEAST_LOAD: LeastLoadPolicy,
    PolicyName.CONSISTENT_HASHING: lambda tuning, _now: ConsistentHashingPolicy(tuning),
    PolicyName.PREFIX_HASH: lambda tuning, _now: PrefixHashPolicy(tuning),
    PolicyName.MANUAL: manual,
    PolicyName.BUCKET: BucketPolicy,
}
# Keep keys together by a rule of their own, over which sticky sessions are not laid (as with the peer).
OF_KEYS: Final = frozenset({PolicyName.MANUAL, PolicyName.CONSISTENT_HASHING})


def policy_of(
    name: PolicyName,
    tuning: Tuning,
    now: Clock,
    role: Role = Role.PREFILL,
    cache: CacheAwareSettings | None = None,
    exact: CachedPrefixes | None = None,
) -> Policy:
    """A policy for one role. Each role must have one of its own: they learn apart.

    ``role``, ``cache`` and ``exact`` are for cache_aware: see there.
    """
    if name is PolicyName.CACHE_AWARE:
        policy: Policy = CacheAwarePolicy(cache or CacheAwareSettings(), now, role, exact=exact)
    else:
        policy = _POLICIES[name](tuning, now)
    if tuning.dp_minimum_tokens_scheduler:
        policy = MinimumTokens(policy)
    if tuning.routing_key_override and name not in OF_KEYS:
        policy = sticky(policy, tuning, now)
    return policy
