"""What the peer's documentation says of policies, each by its name: it is here, or is refused with what to do instead.

Of smg 1.13.0 (``smg launch --help``) and its user documentation.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.flags import add_arguments, read_settings, split_prefill
from extproc.peer_options import ALIASES, INSTEAD, NOT_AVAILABLE_YET
from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.names import AssignmentMode, LoadMetric, PolicyName
from extproc.policies.policy import Policy
from extproc.policies.power_of_two import PowerOfTwoPolicy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.policy_settings import PolicySettings
from extproc.settings import Settings
from extproc.sources import SettingsError
from extproc.workers.worker import Role

ROOT = Path(__file__).parents[1]
POLICIES = (ROOT / "docs/policies.md").read_text()
BEHAVIOUR = (ROOT / "docs/behaviour.md").read_text()

ALL = (
    "random", "round_robin", "passthrough", "cache_aware", "power_of_two", "least_load", "prefix_hash",
    "consistent_hashing", "manual", "bucket",
)  # fmt: skip
BUCKET_DECODES = "Decode policy should not be allowed to be bucket: give --decode-policy another"
# What each flag takes; where it is refused, what the message says of it.
NAMES: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "policy": (ALL[:-1], {"bucket": BUCKET_DECODES, "dp_min_token": "dp_min_token"}),
    "prefill-policy": (ALL, {}),
    "decode-policy": (ALL[:-1], {"bucket": BUCKET_DECODES}),
    "encode-policy": (
        ("random", "round_robin", "consistent_hashing"),
        dict.fromkeys(("cache_aware", "manual"), "supports random, round_robin, or consistent_hashing"),
    ),
    "pd-pairing-mode": (("off", "lenient", "strict"), {}),
    "assignment-mode": (("random", "min_load", "min_group", "delegate"), {}),
    "power-of-two-load-metric": (("expected_wait", "requests", "least_requests"), {}),
    "cache-index": (("tree", "hash"), {}),
    "kv-index": ((), {"positional": INSTEAD["kv-index"], "chain": INSTEAD["kv-index"]}),
    "selection-accounting-ttl-ms": ((), {"0": INSTEAD["selection-accounting-ttl-ms"]}),
}  # fmt: skip
# Option: the peer's default, and another value that it takes.
OPTIONS: Mapping[str, tuple[Any, str]] = {
    "cache-threshold": (0.3, "0.5"),
    "cache-match-threshold": (0.3, "0.5"),
    "balance-abs-threshold": (64, "32"),
    "balance-rel-threshold": (1.5, "1.1"),
    "balance-token-usage-threshold": (1.0, "0.2"),
    "overload-token-usage-threshold": (1.0, "0.9"),
    "overlap-decay": (0.0, "0.5"),
    "selection-temperature": (0.0, "0.1"),
    "eviction-interval-secs": (60, "30"),
    "eviction-interval": (60, "30"),
    "max-tree-size": (67108864, "1000000"),
    "block-size": (16, "64"),
    "cache-boundaries": ((), "128,1024"),
    "cache-ttl-secs": (180, "60"),
    "prefix-token-count": (256, "64"),
    "prefix-hash-load-factor": (1.25, "2"),
    "prefix-hash-balance-abs-threshold": (10, "0"),
    "least-load-kv-pressure-weight": (0.15, "0"),
    "least-load-default-throughput": (2000, "500"),
    "least-load-mean-prefill-tokens": (1024, "4096"),
    "least-load-max-waiting-requests": (0, "8"),
    "bucket-adjust-interval-secs": (5, "10"),
    "max-idle-secs": (14400, "60"),
    "routing-key-headers": (("x-smg-routing-key",), "x-session x-tenant"),
    "routing-key-override": (False, ""),
    "sticky-sessions": (False, ""),
    "dp-minimum-tokens-scheduler": (False, " --dp-aware"),
    "policy": (PolicyName.CACHE_AWARE, "random"),
    "encode-policy": (PolicyName.CONSISTENT_HASHING, "random"),
    "assignment-mode": (None, "min_load"),
    "power-of-two-load-metric": (LoadMetric.EXPECTED_WAIT, "requests"),
}
# Where ours is another, which docs/policies.md gives the reason of.
OTHER_DEFAULTS = {"cache-threshold": 0.0}
HEADERS = ("x-smg-routing-key", "x-smg-target-worker", "x-smg-routing-tokens", "x-smg-priority", "x-smg-tenant-id")
PAIR = "--pd-disaggregation --prefill http://prefill:8000 8998 --decode http://decode:8001"
SEVERAL = """--pd-disaggregation --prefill http://prefill1:8000 8998 --prefill http://prefill2:8000 8998
    --decode http://decode1:8001 --decode http://decode2:8001 --prefill-policy cache_aware
    --decode-policy power_of_two"""


def launch(options: str) -> Settings:
    """What ``pd-extproc launch`` makes of them; a name that it does not take ends it with a message."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return read_settings(parser.parse_args(split_prefill(options.split())))


def field_of(option: str) -> str:
    return ALIASES.get(option, option).replace("-", "_")


@pytest.mark.parametrize(("option", "name"), [(option, name) for option, (names, _) in NAMES.items() for name in names])
def test_every_name_is_taken(option: str, name: str) -> None:
    more = " --decode-policy random" if option == "prefill-policy" else ""
    value = getattr(launch(f"{PAIR} --{option} {name}{more}"), field_of(option))
    assert getattr(value, "value", value) == name


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [(option, name, why) for option, (_, more) in NAMES.items() for name, why in more.items()],
)
def test_a_name_that_is_not_is_refused_with_what_to_do(option: str, name: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        launch(f"{PAIR} --{option} {name}")
    (problem,) = refused.value.problems
    assert why in problem
    assert f"--{option}" in problem or "--decode-policy" in problem


@pytest.mark.parametrize("name", ALL[:-1])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_every_policy_is_made(name: str, role: Role) -> None:
    settings = launch(f"{PAIR} --policy {name}")
    chosen = settings.prefill_policy if role is Role.PREFILL else settings.decode_policy
    assert chosen.value == name
    made = policy_of(chosen, Tuning.of(settings), lambda: 0.0, role, CacheAwareSettings.of(settings))
    assert isinstance(made, Policy)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_peers_default_and_takes_what_it_takes(option: str) -> None:
    default, other = OPTIONS[option]
    field, usual = field_of(option), launch(PAIR)
    ours = OTHER_DEFAULTS.get(ALIASES.get(option, option), default)
    assert getattr(usual, field) == ours
    assert getattr(launch(f"{PAIR} --{option} {other}"), field) != ours


def test_no_option_of_the_peers_is_forgotten() -> None:
    """Each is an option here, another name of one, or refused by its own."""
    known = {name.replace("_", "-") for name in Settings.model_fields} | ALIASES.keys() | NOT_AVAILABLE_YET
    assert {*NAMES, *OPTIONS, "dp-aware", "decode-policy", "prefill-policy"} <= known
    ours = {name.replace("_", "-") for name in PolicySettings.model_fields}
    assert ours <= {*NAMES, *OPTIONS}


@pytest.mark.parametrize("option", INSTEAD)
def test_what_will_not_come_says_what_there_is_instead(option: str) -> None:
    assert option in NOT_AVAILABLE_YET
    for named in re.findall(r"--([a-z-]+)", INSTEAD[option]):
        assert named.replace("-", "_") in Settings.model_fields
    assert f"`--{option}`" in POLICIES


@pytest.mark.parametrize("name", HEADERS)
def test_every_header_is_documented(name: str) -> None:
    assert f"`{name}`" in POLICIES + BEHAVIOUR


def rows(name: str) -> list[list[str]]:
    (text,) = re.findall(rf"^#+ {name}\n(.*?)(?=^#|\Z)", POLICIES, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]


def test_every_option_is_in_the_table_with_its_default_and_the_peers() -> None:
    told = {}
    for cells in rows("All options"):
        first, *others = re.findall(r"`--([a-z-]+)`", cells[0])
        assert others == [alias for alias, name in ALIASES.items() if name == first and alias in others]
        told[first] = cells[1:3]
    fields = PolicySettings.model_fields
    assert told.keys() == {name.replace("_", "-") for name in fields}
    usual = launch(PAIR)
    for option, (ours, peers) in told.items():
        value = getattr(usual, option.replace("-", "_"))
        if option in ("prefill-policy", "decode-policy"):
            assert (ours, peers) == ("as `--policy`", "")
            continue
        assert ours == shown(value), option
        differs = option in OTHER_DEFAULTS
        assert peers == (shown(OPTIONS[option][0]) if differs else ""), option


def shown(value: Any) -> str:
    match value:
        case None | ():
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return ", ".join(f"`{each}`" for each in value)
        case PolicyName() | LoadMetric() | AssignmentMode():
            return f"`{value.value}`"
        case int() | float():
            return f"{value:.10g}"
    return f"`{getattr(value, 'value', value)}`"


def test_what_its_user_document_launches_with_policies() -> None:
    settings = launch(SEVERAL)
    assert settings.pd_disaggregation
    made: list[Callable[[], Any]] = [
        lambda: policy_of(settings.prefill_policy, Tuning.of(settings), lambda: 0.0, Role.PREFILL),
        lambda: policy_of(settings.decode_policy, Tuning.of(settings), lambda: 0.0, Role.DECODE),
    ]
    assert [type(make()) for make in made] == [CacheAwarePolicy, PowerOfTwoPolicy]


@pytest.mark.parametrize("options", ["", "--host 0.0.0.0 --port 30000", "--encode-policy consistent_hashing"])
def test_what_its_user_document_launches_without_gets_its_default(options: str) -> None:
    for workers in (PAIR, "--pd-disaggregation"):
        settings = launch(f"{workers} {options}")
        assert settings.prefill_policy is settings.decode_policy is PolicyName.CACHE_AWARE
        assert settings.encode_policy is PolicyName.CONSISTENT_HASHING
