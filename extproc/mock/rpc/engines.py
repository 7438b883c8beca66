"""What each engine's gRPC server says of itself, in the messages of its service.

As ``smg-grpc-servicer`` 0.14.1 fills them in, seen with vLLM 0.32 and SGLang 0.5.23 on a CPU (of SGLang's some 500
settings those that routers read); TokenSpeed's by its servicer's code and what the peer shows of such a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

from extproc.mock.rpc.model import BEGIN, CONTEXT, END, MARGIN, VOCABULARY

NIXL: Final = "NixlConnector"
MOONCAKE: Final = "MooncakeConnector"
BLOCKS: Final = 1024
BLOCK_SIZE: Final = 32
CAPACITY: Final = 8192
MAX_RUNNING: Final = 2048
_KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(slots=True)
class Facts:
    """What differs from one server to the next; may be changed while it runs.

    Attributes:
        engine: ``sglang``, ``vllm`` or ``tokenspeed``.
        role: ``prefill``, ``decode`` or ``regular``.
        connector: vLLM's; empty for none.
        more: fields of ``GetServerInfoResponse`` (vLLM), or settings (the others), to add or replace.
        running, waiting: requests, of each rank, as it says.
        ranks_that_report: those that have said how loaded they are; None: all.
    """

    engine: str
    role: str
    model: str = "tiny"
    connector: str = ""
    engine_id: str = ""
    dp_size: int = 1
    bootstrap_port: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    ranks_that_report: int | None = None

    @property
    def service(self) -> str:
        """The full name of the engine's service."""
        return _SERVICES[self.engine]

    @property
    def mode(self) -> str:
        """``disaggregation_mode``."""
        return "null" if self.role == "regular" else self.role

    def messages(self) -> Any:
        """The module with the engine's messages."""
        return _MESSAGES[self.engine]

    def model_info(self) -> Any:
        """``GetModelInfoResponse``."""
        said: dict[str, Any] = {
            "model_path": f"/models/{self.model}",
            "tokenizer_path": f"/models/{self.model}",
            "served_model_name": self.model,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "max_context_length": CONTEXT,
            "vocab_size": VOCABULARY,
            "eos_token_ids": [END],
        }
        own: dict[str, dict[str, Any]] = {
            "vllm": {"is_generation": True, "max_req_input_len": CONTEXT},
            "sglang": {
                "is_generation": True,
                "max_req_input_len": CONTEXT - MARGIN,
                "bos_token_id": BEGIN,
                "weight_version": "default",
            },
            "tokenspeed": {"max_req_input_len": CONTEXT - MARGIN, "bos_token_id": BEGIN, "model_dtype": "bfloat16"},
        }
        return ParseDict(said | own[self.engine], self.messages().GetModelInfoResponse())

    def server_info(self) -> Any:
        """``GetServerInfoResponse``."""
        answer = self.messages().GetServerInfoResponse()
        if self.engine == "vllm":
            return ParseDict(self._of_vllm() | self.more, answer)
        settings = self._of_sglang() if self.engine == "sglang" else self._of_tokenspeed()
        answer.server_args.update(settings | self.more)
        if self.engine == "sglang":
            answer.sglang_version, answer.server_type = "0.5.23", "grpc"
            # The setting is left open; the scheduler says what became of it.
            answer.scheduler_info.update({"status": "ready", "hicache_object_layout": {"page_size": 1}})
        else:
            answer.tokenspeed_version = "0.1.0"
            answer.scheduler_info.update({"max_req_input_len": CONTEXT - MARGIN})
        answer.max_total_num_tokens = CAPACITY
        return answer

    def loads(self, busy: Sequence[int] = ()) -> Any:
        """``GetLoadsResponse``; ``busy``: requests that each rank really has, besides those of ``running``."""
        versions = {"vllm": "0.32.0", "sglang": "0.5.23", "tokenspeed": "tokenspeed"}
        reported = self.dp_size if self.ranks_that_report is None else self.ranks_that_report
        loads = [self._load(rank, busy[rank] if rank < len(busy) else 0) for rank in range(reported)]
        said = {"version": versions[self.engine], "dp_rank_count": len(loads), "loads": loads}
        return ParseDict(said, self.messages().GetLoadsResponse())

    def _load(self, rank: int, busy: int) -> dict[str, Any]:
        running = self.running + busy
        used = 16 * running
        said: dict[str, Any] = {
            "dp_rank": rank,
            "num_running_reqs": running,
            "num_waiting_reqs": self.waiting,
            "num_total_reqs": running + self.waiting,
        }
        if self.engine == "vllm":
            capacity = BLOCKS * BLOCK_SIZE
            return said | {
                "max_total_num_tokens": capacity,
                "max_running_requests": 16,
                "token_usage": used / capacity,
            }
        said |= {
            "num_used_tokens": used,
            "max_total_num_tokens": CAPACITY,
            "max_running_requests": MAX_RUNNING,
            "token_usage": used / CAPACITY,
        }
        if self.engine == "sglang":
            queue = {"prefill": "prefill_prealloc_queue_reqs", "decode": "decode_transfer_queue_reqs"}.get(self.role)
            queues = {queue: self.waiting} if queue else {}
            said["disaggregation"] = {"mode": self.mode, **queues}
        return said

    def _of_vllm(self) -> dict[str, Any]:
        connected = {
            "kv_connector": self.connector,
            "kv_role": _KV_ROLES.get(self.role, "kv_both"),
            "kv_engine_id": self.engine_id,
        }
        return {
            "server_type": "vllm-grpc",
            "uptime_seconds": 1.5,
            "data_parallel_size": self.dp_size,
            "kv_cache_dtype": "auto",
            "block_size": BLOCK_SIZE,
            "model_dtype": "torch.float32",
            "max_num_seqs": 16,
            **(connected if self.connector else {}),
        }

    def _of_sglang(self) -> dict[str, Any]:
        return {
            "model_path": f"/models/{self.model}",
            "served_model_name": self.model,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": self.dp_size,
            "load_balance_method": "auto",
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "disaggregation_transfer_backend": "mooncake",
            "kv_cache_dtype": "auto",
            "page_size": None,
            "attention_backend": "torch_native",
            "dtype": "float32",
            "max_running_requests": MAX_RUNNING,
            "max_total_tokens": CAPACITY,
            "is_embedding": False,
            "api_key": "the engine's secret",
        }

    def _of_tokenspeed(self) -> dict[str, Any]:
        """The number of ranks is there only where there are several."""
        return {
            "model": f"/models/{self.model}",
            "served_model_name": self.model,
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "disaggregation_transfer_backend": "mooncake",
            "kv_cache_dtype": "auto",
            "attention_backend": "fa3",
            **({"dp_size": self.dp_size} if self.dp_size > 1 else {}),
        }


_SERVICES: Final = {
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "vllm": "vllm.grpc.engine.VllmEngine",
    "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
}
_MESSAGES: Final[dict[str, Any]] = {
    "sglang": sglang_scheduler_pb2,
    "vllm": vllm_engine_pb2,
    "tokenspeed": tokenspeed_scheduler_pb2,
}
COMMON: Final[Any] = common_pb2
