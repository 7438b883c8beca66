"""What engines say of their load: answers of real ones (``data/load``), older ones, and what is no such answer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from extproc.workers.load import EngineLoad, RankLoad, of_get_load, of_v1_loads, with_limit
from extproc.workers.load_metrics import of_metrics

DATA = Path(__file__).parent / "data" / "load"
VLLM = [RankLoad(0, running=16, waiting=3, kv_usage=0.03589305335123916, max_tokens=262144)]


def recorded(name: str) -> bytes:
    return (DATA / name).read_bytes()


class TestLoads:
    def test_a_decode_that_waits_for_a_kv_cache(self) -> None:
        assert of_v1_loads(recorded("sglang-0.5.23-decode.json")) == [
            RankLoad(
                rank=0,
                running=0,
                waiting=1,
                waiting_tokens=0,
                used_tokens=28,
                total_tokens=28,
                max_tokens=8192,
                kv_usage=0.0034,
                max_running=2048,
                throughput=0.0,
                cache_hit_rate=0.0,
                utilization=0.0,
                decode_queue=1,
            )
        ]

    def test_a_prefill(self) -> None:
        (rank,) = of_v1_loads(recorded("sglang-0.5.23-prefill.json")) or ()
        assert (rank.prefill_queue, rank.decode_queue, rank.running, rank.max_tokens) == (0, None, 0, 8192)

    def test_an_aggregated_engine_has_no_queues_of_pairs(self) -> None:
        (rank,) = of_v1_loads(recorded("sglang-0.5.23-aggregated.json")) or ()
        assert (rank.prefill_queue, rank.decode_queue, rank.waiting) == (None, None, 0)

    def test_ranks_and_queues(self) -> None:
        disagg = {"mode": "prefill", "prefill_bootstrap_queue_reqs": 2, "prefill_inflight_queue_reqs": 3}
        found = of_v1_loads(_loads({"dp_rank": 1, "num_running_reqs": 5, "disaggregation": disagg}, {"dp_rank": 0}))
        assert found == [RankLoad(1, running=5, prefill_queue=5), RankLoad(0)]

    def test_older_names_of_a_queue(self) -> None:
        disagg = {"mode": "prefill", "prefill_prealloc_queue_reqs": 2, "prefill_inflight_queue_reqs": 1}
        (rank,) = of_v1_loads(_loads({"num_running_reqs": 0, "disaggregation": disagg})) or ()
        assert rank.prefill_queue == 3

    def test_a_rank_that_has_not_reported_yet_is_left_out(self) -> None:
        entry = {"timestamp": 0.0, "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}
        assert of_v1_loads(_loads(entry, entry | {"dp_rank": 1, "timestamp": 1.5})) == [
            RankLoad(1, running=0, waiting=0, kv_usage=0.0)
        ]
        assert of_v1_loads(b'{"loads": []}') == []

    def test_figures_that_cannot_be_are_none(self) -> None:
        entry = {
            "num_running_reqs": -1,
            "num_waiting_reqs": True,
            "token_usage": "0.5",
            "num_used_tokens": None,
            "max_total_num_tokens": 0,
            "max_running_requests": 0,
            "gen_throughput": 1.5,
            "dp_rank": None,
        }
        assert of_v1_loads(_loads(entry)) == [RankLoad(throughput=1.5)]

    @pytest.mark.parametrize(
        "body",
        [b"", b"<html>", b"{}", b"[]", b"7", b'{"loads": 1}', b'{"loads": [1]}', b'{"loads": [{"worker": "x"}]}'],
    )
    def test_what_is_no_such_answer(self, body: bytes) -> None:
        assert of_v1_loads(body) is None

    @pytest.mark.parametrize("figure", [-1, 1e13, 1e300, 2**63])
    def test_figures_that_nobody_can_believe(self, figure: float) -> None:
        entry = {
            "num_running_reqs": figure,
            "num_waiting_reqs": 2,
            "token_usage": figure,
            "max_running_requests": figure,
            "gen_throughput": figure,
            "disaggregation": {"mode": "decode", "decode_transfer_queue_reqs": figure},
        }
        assert of_v1_loads(_loads(entry)) == [RankLoad(waiting=2)]


def _loads(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"timestamp": "2026-01-01T00:00:00+00:00", "version": "0.5.9", "loads": entries}).encode()


class TestGetLoad:
    def test_requests_and_tokens_of_each_rank(self) -> None:
        body = (
            b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":900,"num_pending_tokens":100,"ts_tic":1.5},'
            b'{"rid":null,"dp_rank":1,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}]'
        )
        assert of_get_load(body) == [
            RankLoad(0, running=3, waiting=2, used_tokens=800, total_tokens=900),
            RankLoad(1, running=0, waiting=0, total_tokens=0),
        ]

    def test_before_it_said_which_tokens_wait(self) -> None:
        body = b'[{"dp_rank":0,"num_reqs":3,"num_waiting_reqs":1,"num_tokens":70}]'
        assert of_get_load(body) == [RankLoad(0, running=2, waiting=1, total_tokens=70)]

    def test_an_engine_without_ranks_names_none(self) -> None:
        body = (
            b'[{"dp_rank":null,"num_reqs":1,"num_waiting_reqs":0,"num_tokens":7,"num_pending_tokens":0,"ts_tic":0.0}]'
        )
        assert of_get_load(body) == [RankLoad(0, running=1, waiting=0, used_tokens=7, total_tokens=7)]

    def test_an_older_engine_says_tokens_only(self) -> None:
        assert of_get_load(b'{"load": 120}') == [RankLoad(total_tokens=120)]

    @pytest.mark.parametrize(
        "body", [b"", b"[]", b"{}", b'{"load": "x"}', b'{"load": -1}', b"[1]", b'[{"waiting": 1}]']
    )
    def test_what_is_no_such_answer(self, body: bytes) -> None:
        assert of_get_load(body) is None


class TestMetrics:
    @pytest.mark.parametrize("name", ["vllm-0.32.0-metrics.txt", "vllm-0.32.0-few-metrics.txt"])
    def test_a_whole_page_says_the_same_as_a_few_lines(self, name: str) -> None:
        assert of_metrics(recorded(name)) == VLLM

    def test_two_ranks_of_a_real_one(self) -> None:
        assert of_metrics(recorded("vllm-0.32.0-two-ranks-metrics.txt")) == [
            RankLoad(0, running=3, waiting=0, kv_usage=0.0015871078012452688, max_tokens=262144),
            RankLoad(1, running=3, waiting=0, kv_usage=0.0014650225857648635, max_tokens=262144),
        ]

    def test_ranks_and_the_older_name_of_the_usage(self) -> None:
        page = (
            b'vllm:num_requests_running{model_name="a",engine="1"} 2.0\n'
            b'vllm:num_requests_running{model_name="a \\" } 7",engine="0"} 1.0\n'
            b'vllm:num_requests_waiting{engine="0"} 4.0 1700000000000\n'
            b'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0\n'
            b'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
            b'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0\n'
            b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1.0\n'
            b'vllm:cache_config_info{block_size="16",engine="7",num_gpu_blocks="1"} 1.0\n'
        )
        assert of_metrics(page) == [
            RankLoad(1, running=2, max_tokens=1600),
            RankLoad(0, running=1, waiting=4, kv_usage=0.5),
        ]

    def test_a_page_without_ranks(self) -> None:
        assert of_metrics(b"vllm:num_requests_running 2.0") == [RankLoad(running=2)]

    @pytest.mark.parametrize("mark", [":", "_"])
    def test_sglang(self, mark: str) -> None:
        lines = (
            'num_running_reqs{dp_rank="0",priority="",tp_rank="0"} 3',
            'num_running_reqs{dp_rank="0",priority="7",tp_rank="0"} 1',
            'num_running_reqs{dp_rank="0",priority="",tp_rank="1"} 99',
            'num_running_reqs{dp_rank="1",priority="",tp_rank="0"} 4',
            'num_queue_reqs{dp_rank="0"} 2',
            'token_usage{dp_rank="0"} 0.25',
            'max_total_num_tokens{dp_rank="0"} 8192',
        )
        page = "".join(f"sglang{mark}{line}\n" for line in lines).encode()
        assert of_metrics(page) == [
            RankLoad(0, running=3, waiting=2, kv_usage=0.25, max_tokens=8192),
            RankLoad(1, running=4),
        ]

    def test_numbers_that_are_none(self) -> None:
        page = b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        page += b'vllm:kv_cache_usage_perc{engine="0"} x\nvllm:kv_cache_usage_perc{engine="0"}\n'
        assert of_metrics(page) == [RankLoad(waiting=1)]

    @pytest.mark.parametrize("digits", [14, 400, 5000])  # of which Python reads 4300
    def test_numbers_that_nobody_can_believe(self, digits: int) -> None:
        nines = b"9" * digits
        page = b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} %b\n' % nines
        page += b'vllm:cache_config_info{engine="0",%b} 1\n'
        one = RankLoad(running=1)
        assert of_metrics(page % b'kv_cache_size_tokens="%b"' % nines) == [one]
        assert of_metrics(page % b'num_gpu_blocks="%b",block_size="16"' % nines) == [one]
        assert of_metrics(page % b'num_gpu_blocks="999999999",block_size="999999999"') == [one]
        assert of_metrics(b'vllm:num_requests_running{engine="%b"} 1\n' % nines) == [one]

    @pytest.mark.parametrize(
        "page",
        [
            b"",
            b"\n",
            b"<html>",
            b"process_cpu_seconds_total 1.0\n",
            b"# TYPE vllm:num_requests_running gauge\n",
            b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n',
            b'sglang:max_total_num_tokens{dp_rank="0"} 8192\n',
            b'vllm:num_requests_running_ever{engine="0"} 1.0\n',
        ],
    )
    def test_pages_that_say_nothing(self, page: bytes) -> None:
        assert of_metrics(page) is None

    def test_a_large_page_takes_no_time_to_speak_of(self) -> None:
        page = recorded("vllm-0.32.0-metrics.txt")
        noise = b'vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 0.0\n' * 12_000
        took = []
        for _ in range(20):  # one of them is not interrupted
            began = time.perf_counter()
            assert of_metrics(noise + page) == VLLM
            took.append(time.perf_counter() - began)
        assert min(took) < 0.1  # 1 MB; it takes 3 ms


class TestSums:
    def test_what_every_rank_says_is_added_up(self) -> None:
        load = EngineLoad(
            5.0,
            [
                RankLoad(1, running=2, waiting=1, kv_usage=0.8, max_running=8, used_tokens=10, throughput=1.5),
                RankLoad(0, running=3, waiting=0, kv_usage=0.2, max_running=8, throughput=0.5),
            ],
        )
        assert (load.at, [rank.rank for rank in load.ranks]) == (5.0, [0, 1])
        assert (load.running, load.waiting, load.max_running, load.throughput) == (5, 1, 16, 2.0)
        assert (load.kv_usage, load.kv_peak) == (0.5, 0.8)
        assert load.used_tokens is None, "one rank does not say it"
        assert load.max_tokens is None

    def test_one_rank(self) -> None:
        load = EngineLoad(5.0, [RankLoad(0, running=3), RankLoad(1, running=4)])
        one = load.of_rank(1)
        assert one is not None
        assert (one.running, one.at) == (4, 5.0)
        assert load.of_rank(2) is None

    def test_a_limit_known_otherwise(self) -> None:
        ranks = [RankLoad(0), RankLoad(1, max_running=4)]
        assert [rank.max_running for rank in with_limit(ranks, 16)] == [16, 4]
        assert with_limit(ranks, None) == ranks
