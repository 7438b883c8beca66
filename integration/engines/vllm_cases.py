"""Requests to real vLLM, by name: path and body. All give the same answer whenever they are asked."""

from __future__ import annotations

from rig import Body

GREEDY: Body = {"temperature": 0, "ignore_eos": True}
SAMPLED: Body = {"temperature": 1, "seed": 7, "ignore_eos": True}
USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS: Body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LONG = "hello there, é\u2028\u0000 \\ " * 60

CHAT: Body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 6}
COMPLETION: Body = {"model": "tiny", "prompt": "def foo(self, name", "max_tokens": 6}
LIST: Body = {**COMPLETION, "prompt": ["def foo(self, name", "import os", LONG]}
MESSAGES: Body = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 6, "temperature": 0}
RESPONSES: Body = {"model": "tiny", "input": "hello there", "max_output_tokens": 6, "temperature": 0}
TOKENS: Body = {"model": "tiny", "token_ids": [455, 284, 1631, 806, 604, 7]}


def generate(stream: bool = False, **sampling: object) -> Body:  # noqa: FBT001, FBT002 - a body's field
    """An /inference/v1/generate body."""
    return {**TOKENS, "stream": stream, "sampling_params": {"max_tokens": 6, **GREEDY, **sampling}}


CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES_PATH, RESPONSES_PATH = "/v1/messages", "/v1/responses"

# Answers and streams in the form of the OpenAI APIs: choices.
CHATS: dict[str, Body] = {
    "chat": {**CHAT, **GREEDY},
    "chat_stream": {**CHAT, **GREEDY, "stream": True},
    "chat_stream_usage": {**CHAT, **GREEDY, **USAGE},
    "chat_stream_continuous": {**CHAT, **GREEDY, **CONTINUOUS},
    "chat_long": {**CHAT, **GREEDY, "messages": [{"role": "user", "content": LONG}], "max_tokens": 40},
    "chat_one_token": {**CHAT, **GREEDY, "max_tokens": 1},
    "chat_no_cap": {"model": "tiny", "messages": CHAT["messages"], **GREEDY, "stop": ["the", "a"]},
    "chat_both_caps": {**CHAT, **GREEDY, "max_completion_tokens": 9},
    "chat_min_tokens": {**CHAT, **GREEDY, "min_tokens": 5},
    "chat_token_ids": {**CHAT, **GREEDY, "return_token_ids": True},
    "chat_end_at_once": {**CHAT, "temperature": 0, "logit_bias": {"2": 100}},
    "chat_json": {**CHAT, **GREEDY, "max_tokens": 20, "structured_outputs": {"regex": "[a-c]{12}"}},
    "chat_logprobs": {**CHAT, **GREEDY, "logprobs": True, "top_logprobs": 2},
    "chat_prompt_logprobs": {**CHAT, **GREEDY, "prompt_logprobs": 1},
    "chat_echo": {**CHAT, **GREEDY, "echo": True},
    "chat_n2": {**CHAT, **SAMPLED, "n": 2},
    "chat_n2_stream": {**CHAT, **SAMPLED, **USAGE, "n": 2},
}
COMPLETION_CASES: dict[str, Body] = {
    "completion": {**COMPLETION, **GREEDY},
    "completion_stream": {**COMPLETION, **GREEDY, **USAGE},
    "completion_stream_continuous": {**COMPLETION, **GREEDY, **CONTINUOUS},
    "completion_default_cap": {"model": "tiny", "prompt": LONG, **GREEDY},
    "completion_tokens": {**COMPLETION, **GREEDY, "prompt": TOKENS["token_ids"]},
    "completion_one_token": {**COMPLETION, **GREEDY, "max_tokens": 1},
    "completion_stop_token": {**COMPLETION, "temperature": 0, "stop_token_ids": list(range(4096))},
    "completion_logprobs": {**COMPLETION, **GREEDY, "logprobs": 2},
    "completion_echo": {**COMPLETION, **GREEDY, "echo": True},
    "completion_echo_logprobs": {**COMPLETION, **GREEDY, "echo": True, "logprobs": 2},
    "completion_echo_logprobs_stream": {**COMPLETION, **GREEDY, "echo": True, "logprobs": 2, **USAGE},
    "completion_echo_scoring": {**COMPLETION, **GREEDY, "echo": True, "logprobs": 1, "max_tokens": 0},
    "completion_prompt_logprobs": {**COMPLETION, **GREEDY, "prompt_logprobs": 1},
    "completion_beam": {**COMPLETION, "temperature": 0, "use_beam_search": True, "n": 2},
    "completion_n2": {**COMPLETION, **SAMPLED, "n": 2},
    "list": {**LIST, **GREEDY},
    "list_stream": {**LIST, **GREEDY, "stream": True},
    "list_stream_usage": {**LIST, **GREEDY, **USAGE},
    "list_of_one": {**LIST, **GREEDY, "prompt": LIST["prompt"][:1]},
    "list_of_tokens": {**LIST, **GREEDY, "prompt": [[455, 284], [806, 604, 7]]},
    "list_one_token": {**LIST, **GREEDY, "max_tokens": 1},
    "list_logprobs": {**LIST, **GREEDY, "logprobs": 1},
    "list_echo_logprobs": {**LIST, **GREEDY, "echo": True, "logprobs": 1},
    "list_echo_logprobs_stream": {**LIST, **GREEDY, "echo": True, "logprobs": 1, "stream": True},
    "list_n2": {**LIST, **SAMPLED, "n": 2},
}
GENERATES: dict[str, Body] = {
    "generate": generate(),
    "generate_stream": generate(stream=True),
    "generate_logprobs": generate(logprobs=2),
    "generate_prompt_logprobs": generate(prompt_logprobs=1),
    "generate_prompt_logprobs_stream": generate(stream=True, prompt_logprobs=1),
    "generate_n2": generate(n=2, temperature=1, seed=7),
    "generate_one_token": generate(max_tokens=1),
}
CASES: dict[str, tuple[str, Body]] = {
    **{name: (CHAT_PATH, body) for name, body in CHATS.items()},
    **{name: (COMPLETIONS_PATH, body) for name, body in COMPLETION_CASES.items()},
    **{name: (GENERATE_PATH, body) for name, body in GENERATES.items()},
}
