"""The gRPC services of the engines, and the messages that are asked of each alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

# Every method that is asked here has a request of this name and ``Request``, and such a ``Response``.
HEALTH_CHECK: Final = "HealthCheck"
GET_MODEL_INFO: Final = "GetModelInfo"
GET_SERVER_INFO: Final = "GetServerInfo"
GET_LOADS: Final = "GetLoads"
FLUSH_CACHE: Final = "FlushCache"
START_PROFILE: Final = "StartProfile"
STOP_PROFILE: Final = "StopProfile"
GET_TOKENIZER: Final = "GetTokenizer"

_COMMON: Final = {
    FLUSH_CACHE: (common_pb2.FlushCacheRequest, common_pb2.FlushCacheResponse),
    START_PROFILE: (common_pb2.StartProfileRequest, common_pb2.ProfileResponse),
    STOP_PROFILE: (common_pb2.StopProfileRequest, common_pb2.ProfileResponse),
    GET_TOKENIZER: (common_pb2.GetTokenizerRequest, common_pb2.GetTokenizerChunk),
}


class Messages(Protocol):
    """A module of generated messages."""

    DESCRIPTOR: object


@dataclass(frozen=True, slots=True)
class Service:
    """One engine's service.

    Attributes:
        runtime: the engine, as registrations name it.
        title: its name for people.
        name: the service's full name.
        messages: the module that has its messages; None for an engine that is only known by name.
    """

    runtime: str
    title: str
    name: str
    messages: Messages | None = None

    def path(self, method: str) -> str:
        """What HTTP/2 calls the method."""
        return f"/{self.name}/{method}"

    def request(self, method: str) -> Message:
        """An empty request."""
        made: Message = self._types(method)[0]()
        return made

    def response(self, method: str) -> type[Message]:
        """What an answer is read into."""
        return self._types(method)[1]

    def _types(self, method: str) -> tuple[type[Message], type[Message]]:
        if method in _COMMON:
            return _COMMON[method]
        return getattr(self.messages, f"{method}Request"), getattr(self.messages, f"{method}Response")


SGLANG: Final = Service("sglang", "SGLang", "sglang.grpc.scheduler.SglangScheduler", sglang_scheduler_pb2)
VLLM: Final = Service("vllm", "vLLM", "vllm.grpc.engine.VllmEngine", vllm_engine_pb2)
TOKENSPEED: Final = Service(
    "tokenspeed", "TokenSpeed", "tokenspeed.grpc.scheduler.TokenSpeedScheduler", tokenspeed_scheduler_pb2
)
SERVED: Final = (SGLANG, VLLM, TOKENSPEED)
# Known only to say what a server is that was registered by mistake.
REFUSED: Final = (
    Service("trtllm", "TensorRT-LLM", "trtllm.TrtllmService"),
    Service("mlx", "MLX", "mlx.grpc.engine.MlxEngine"),
)


def service_of(runtime: str) -> Service:
    """The service of an engine that is served; SGLang's where the engine is not known."""
    return next((service for service in SERVED if service.runtime == runtime), SGLANG)
