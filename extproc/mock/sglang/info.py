"""What the engine tells about itself. ``/server_info`` has some 400 fields there; here are those that routers read."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from extproc.mock.generation import CONTEXT
from extproc.mock.sglang.engine import Layout, Mode

VERSION = "0.5.23"
CAPACITY = 8192
MAX_RUNNING = 2048


@dataclass(frozen=True, slots=True)
class Identity:
    """One engine process."""

    mode: Mode
    model: str
    host: str
    port: int
    bootstrap_port: int
    layout: Layout
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
            "max_running_requests": None,
            "max_total_tokens": CAPACITY,
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
            **asdict(self.layout),
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "max_req_input_len": CONTEXT - 5,
            "internal_states": [
                {
                    "load": load,
                    "last_gen_throughput": 0.0,
                    "effective_max_running_requests_per_dp": MAX_RUNNING,
                    "memory_usage": {"token_capacity": CAPACITY},
                }
                for load in running
            ],
            "version": self.version,
            "frontend": "python",
        }
