"""Reading requests under way per host out of Envoy's ``/clusters``."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.dataplane.active import ActiveRequests

PAGE = (Path(__file__).parent / "data" / "load" / "envoy-1.40-clusters.txt").read_bytes()
EXPECTED = {("prefill", "127.0.0.1:8001"): 2, ("prefill", "[::1]:8002"): 0, ("decode", "127.0.0.1:8001"): 1}


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_a_page_in_pieces(size: int) -> None:
    active = ActiveRequests({"prefill": "prefill", "decode": "decode"})
    for at in range(0, len(PAGE), size):
        active.feed(PAGE[at : at + size])
    assert active.found == EXPECTED


def test_other_clusters_and_what_is_no_number_are_left_out() -> None:
    active = ActiveRequests({"prefill": "prefill", "prefill_grpc": "prefill"})
    active.feed(b"control::10.0.0.1:1::rq_active::1\nprefill::10.0.0.2:1::rq_active::x\n")
    active.feed(b"prefill::10.0.0.3:1::rq_active::\n::rq_active::\nprefill::10.0.0.4:1::rq_active::4\n")
    active.feed(b"prefill_grpc::10.0.0.5:1::rq_active::5\n")
    assert active.found == {("prefill", "10.0.0.4:1"): 4, ("prefill", "10.0.0.5:1"): 5}
