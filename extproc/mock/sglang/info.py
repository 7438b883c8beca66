"""What the engine tells about itself. ``/server_info`` has some 400 fields there; here are those that routers read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from extproc.mock.generation import CONTEXT
from extproc.mock.sglang.engine import Mode

VERSION = "0.5.23"
_CAPACITY = 8192
_MAX_RUNNING = 2048


@dataclass(frozen=True, slots=True)
class Identity:
    """One engine process."""

    mode: Mode
    model: str
    host: str
    port: int
    bootstrap_port: int
    dp_size: int = 1
    version: str = VERSION

    def model_card(self) -> dict[str, Any]:
        """An entry of ``/v1/models``."""
        return {
            "id": self.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": self.model,
            "parent": None,
            "max_model_len": CONTEXT,
        }

    def model_info(self) -> dict[str, Any]:
        """``/model_info``."""
        return {
            "model_path": self.model,
            "served_model_name": self.model,
            "tokenizer_path": self.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": self.mode.value,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }

    def server_info(self, running: list[int]) -> dict[str, Any]:
        """``/server_info``; ``running``: requests by rank."""
        return {
            "model_path": self.model,
            "tokenizer_path": self.model,
            "context_length": None,
            "is_embedding": False,
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "max_running_requests": None,
            "max_total_tokens": _CAPACITY,
            "page_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": self.dp_size,
            "load_balance_method": "follow_bootstrap_room" if self.mode is Mode.PREFILL else "round_robin",
            "host": self.host,
            "port": self.port,
            "served_model_name": self.model,
            "weight_version": "default",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "enable_metrics": False,
            "disaggregation_mode": self.mode.value,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "max_req_input_len": CONTEXT - 5,
            "internal_states": [
                {
                    "load": load,
                    "last_gen_throughput": 0.0,
                    "effective_max_running_requests_per_dp": _MAX_RUNNING,
                    "memory_usage": {"token_capacity": _CAPACITY},
                }
                for load in running
            ],
            "version": self.version,
            "frontend": "python",
        }

    def loads(self, running: list[int], include: set[str]) -> dict[str, Any]:
        """``/v1/loads``; ``running``: requests by rank; ``include`` empty: every section."""
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self.version,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [self._load(rank, load, include) for rank, load in enumerate(running)],
        }

    def _load(self, rank: int, running: int, include: set[str]) -> dict[str, Any]:
        load: dict[str, Any] = {
            "timestamp": time.time(),
            "dp_rank": rank,
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "max_total_num_tokens": _CAPACITY,
            "max_running_requests": _MAX_RUNNING,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
        }
        sections: dict[str, tuple[str, dict[str, Any]]] = {
            "memory": ("memory", {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": _CAPACITY}),
            "disagg": ("disaggregation", {"mode": self.mode.value, "kv_transfer_latency_ms": 0.0}),
            "queues": ("queues", {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0}),
        }
        for name, (key, section) in sections.items():
            if not include or "all" in include or name in include:
                load[key] = section
        return load


def metrics(running: int, handled: int) -> bytes:
    """``/metrics`` (the engine has it only with ``--enable-metrics``)."""
    return (
        "# TYPE sglang:num_running_reqs gauge\n"
        f"sglang:num_running_reqs {running}\n"
        "# TYPE sglang:num_requests_total counter\n"
        f"sglang:num_requests_total {handled}\n"
    ).encode()
