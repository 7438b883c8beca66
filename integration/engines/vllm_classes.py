"""What vLLM makes of prefill legs: run by the interpreter of vLLM's environment, as test_vllm_classes.py does.

Reads ``[{"path", "leg"}, ...]`` and prints as many objects: ``{"error"}`` where the engine's own request class refuses
the leg, else ``{"max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos", "stream"}`` as sampled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter, ValidationError
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

CLASSES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/inference/v1/generate": GenerateRequest,
}
LEFT = 1000  # tokens of the context that the prompt leaves


def sampling_of(request: Any) -> SamplingParams:
    """As the engine's handlers get from a request to how it is sampled."""
    if isinstance(request, GenerateRequest):
        return request.sampling_params
    if isinstance(request, AnthropicMessagesRequest):
        request = AnthropicServingMessages.to_chat_completion_request(request)
    if isinstance(request, ChatCompletionRequest):
        cap = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        return request.to_sampling_params(LEFT if cap is None else cap, {})
    if isinstance(request, CompletionRequest):
        return request.to_sampling_params(LEFT if request.max_tokens is None else request.max_tokens, {})
    return request.to_sampling_params(LEFT, {})


def read(path: str, leg: dict[str, Any]) -> dict[str, Any]:
    """What the engine makes of one leg."""
    try:
        request = TypeAdapter(CLASSES[path]).validate_python(leg)
        sampling = sampling_of(request)
    except (ValidationError, ValueError) as error:
        return {"error": str(error)}
    names = ("max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos")
    return {name: getattr(sampling, name) for name in names} | {"stream": bool(getattr(request, "stream", False))}


if __name__ == "__main__":
    print(json.dumps([read(one["path"], one["leg"]) for one in json.load(sys.stdin)]))
