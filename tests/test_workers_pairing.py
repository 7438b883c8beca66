"""Which workers may hand a KV cache over to each other."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.workers.pairing import may_pair, pairing_key, why_none
from extproc.workers.worker import MOONCAKE, NIXL, Role, Worker, WorkerUrl


def worker(role: Role, runtime: str, connector: str = "", **labels: str) -> Worker:
    return Worker(role.value, WorkerUrl("http", "w", 1), role, runtime=runtime, kv_connector=connector, labels=labels)


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        (("sglang", ""), ("sglang", ""), ""),
        (("vllm", NIXL), ("vllm", NIXL), ""),
        (("vllm", NIXL), ("vllm", MOONCAKE), "transport"),
        (("vllm", ""), ("vllm", MOONCAKE), ""),
        (("vllm", NIXL), ("vllm", ""), ""),
        (("vllm", ""), ("sglang", ""), "runtime"),
        (("vllm", NIXL), ("sglang", ""), "runtime"),
    ],
)
def test_what_is_known_on_both_sides_must_agree(prefill: Any, decode: Any, problem: str) -> None:
    one, other = worker(Role.PREFILL, *prefill), worker(Role.DECODE, *decode)
    assert may_pair(one, other) is (not problem)
    assert (f"mismatch on {problem};" in why_none([one], [other])) is bool(problem)


@pytest.mark.parametrize(
    ("own", "its", "expected"),
    [("a", "a", True), ("a", "b", False), ("a", "", False), ("", "b", False)],
)
def test_the_operators_word_counts_where_both_have_one(own: str, its: str, expected: bool) -> None:  # noqa: FBT001
    labels = [{"pairing_protocol": said} if said else {} for said in (own, its)]
    prefill = worker(Role.PREFILL, "vllm", NIXL, **labels[0])
    decode = worker(Role.DECODE, "sglang", **labels[1])
    assert may_pair(prefill, decode) is expected


def test_sglangs_transport_is_a_label() -> None:
    prefill = worker(Role.PREFILL, "sglang", disaggregation_transfer_backend="nixl")
    assert not may_pair(prefill, worker(Role.DECODE, "sglang", disaggregation_transfer_backend="mooncake"))
    assert may_pair(prefill, worker(Role.DECODE, "sglang"))


@pytest.mark.parametrize(
    ("shown", "fields"),
    [
        ("sglang/?/?", ("sglang",)),
        ("vllm/nixl/?", ("vllm", NIXL)),
        ("vllm/mooncake/?", ("vllm", MOONCAKE)),
        ("vllm/moriio/?", ("vllm", "MoRIIOConnector")),
        ("vllm/lmcacheconnectorv1/?", ("vllm", "LMCacheConnectorV1")),
    ],
)
def test_the_key_is_the_peers(shown: str, fields: tuple[str, ...]) -> None:
    assert pairing_key(worker(Role.PREFILL, *fields)) == shown


def test_why_none_names_both_sides() -> None:
    prefills = [worker(Role.PREFILL, "vllm", NIXL), worker(Role.PREFILL, "vllm", NIXL)]
    assert why_none(prefills, [worker(Role.DECODE, "sglang"), worker(Role.DECODE, "vllm", MOONCAKE)]) == (
        "no usable prefill and decode worker share a KV transfer protocol (mismatch on runtime, transport; "
        "prefill: vllm/nixl/?; decode: sglang/?/?, vllm/mooncake/?)"
    )
    assert why_none(prefills, [worker(Role.DECODE, "sglang"), worker(Role.DECODE, "vllm", NIXL)]) == ""
    assert why_none([], []) == ""
