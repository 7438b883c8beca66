"""Chat Completions: what the template is rendered with, and what else the body says.

Content that is not text, and tools that may be called, are refused: a later matter. What a template is told of
reasoning is told; the answer is not parsed for it.
Source: vllm 0.32 entrypoints/openai/chat_completion/protocol.py, entrypoints/chat_utils.py; sglang 0.5.23
srt/entrypoints/openai/protocol.py (``normalize_reasoning_inputs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from extproc.errors import GatewayError
from extproc.generation import values
from extproc.generation.asked import ChatPrompt
from extproc.generation.values import Fields

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_LATER: Final = "not yet supported over gRPC workers"


def chat_prompt(fields: Fields) -> ChatPrompt:
    """What the template is rendered with. Raises GatewayError."""
    continues = fields.boolean("continue_final_message")
    generates = fields.boolean("add_generation_prompt", default=not continues)
    if continues and generates:
        raise GatewayError(
            "invalid_value",
            "`continue_final_message` and `add_generation_prompt` cannot both be true",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=_messages(fields),
        tools=_tools(fields),
        template_kwargs=_template_kwargs(fields),
        add_generation_prompt=generates,
        continue_final_message=continues,
        chat_template=fields.text("chat_template"),
        documents=fields.objects("documents"),
        add_special_tokens=fields.boolean("add_special_tokens"),
    )


def chat_limit(fields: Fields) -> int | None:
    """The most tokens that may be generated: by the newer name, else the older one."""
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return fields.count(name, least=1)


def chat_logprobs(fields: Fields) -> int | None:
    """How many alternatives are told per token; None for no log probabilities."""
    wanted = fields.boolean("logprobs")
    alternatives = fields.count("top_logprobs", least=-1)
    if alternatives == -1:
        values.refuse("top_logprobs", "-1, for all of the vocabulary: the engines' gRPC services do not send as many")
    if alternatives and not wanted:
        raise GatewayError("invalid_value", "`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return (alternatives or 0) if wanted else None


def _messages(fields: Fields) -> Sequence[Mapping[str, Any]]:
    messages = fields.objects("messages")
    if not messages:
        values.wrong("messages", "a list of messages, of one at least")
    for position, message in enumerate(messages):
        name = f"messages[{position}]"
        if not isinstance(message.get("role"), str):
            values.wrong(f"{name}.role", "a string")
        if message.get("tools"):
            values.refuse(f"{name}.tools", _LATER)
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, f"{name}.content")
        elif content is not None and not isinstance(content, str):
            values.wrong(f"{name}.content", "a string or a list of parts")
    return messages


def _check_parts(parts: Sequence[Any], name: str) -> None:
    for part in parts:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            values.wrong(name, "made of objects with a `type`")
        kind = part.get("type", "text" if "text" in part else None)
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            what = "images and other media are" if isinstance(kind, str) else "a part without a `type` is"
            values.refuse(name, f"{what} {_LATER}" + (f" (`{kind}`)" if isinstance(kind, str) else ""))
        if not isinstance(part.get(key), str):
            values.wrong(f"{name}.{key}", "a string")


def _tools(fields: Fields) -> Sequence[Mapping[str, Any]] | None:
    """Tools that the template shows although none may be called."""
    tools, choice = fields.objects("tools"), fields.get("tool_choice")
    if choice not in (None, "none", "auto", "required") and not isinstance(choice, dict):
        values.wrong("tool_choice", "one of none, auto, required, or an object")
    if tools is None:
        if choice in (None, "none"):
            return None
        raise GatewayError("invalid_value", "`tool_choice` needs `tools`", param="tool_choice")
    if not tools:
        raise GatewayError("invalid_value", "`tools` must not be empty", param="tools")
    if choice != "none":
        values.refuse("tools", f'tool calls are {_LATER}; `tool_choice` "none" only shows the tools to the model')
    return tools


def _template_kwargs(fields: Fields) -> Mapping[str, Any]:
    """``chat_template_kwargs`` and what else templates are told of reasoning, by the names that different ones know."""
    kwargs = dict(fields.mapping("chat_template_kwargs") or {})
    if "chat_template" in kwargs:
        values.refuse("chat_template_kwargs.chat_template", "the place for it is `chat_template`")
    effort, thinks = _effort(fields)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if "thinking" in fields:
        said = fields.get("thinking")
        thinks = said.get("type") != "disabled" if isinstance(said, dict) else bool(said)
    if thinks is not None:
        kwargs.setdefault("thinking", thinks)
        kwargs.setdefault("enable_thinking", thinks)
    return kwargs


def _effort(fields: Fields) -> tuple[str | float | None, bool | None]:
    """How much is to be reasoned, and whether at all; None where that is not said."""
    effort, name, enabled = fields.get("reasoning_effort"), "reasoning_effort", None
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict):
        said = reasoning.get("effort") or reasoning.get("reasoning_effort")
        effort, name = (said, "reasoning.effort") if said is not None else (effort, name)
        enabled = True if reasoning.get("enabled", reasoning.get("enable")) in (True, "true") else None
    if effort is None:
        return None, enabled
    if isinstance(effort, str) and effort in _EFFORTS:
        return effort, effort != "none"
    if isinstance(effort, int | float) and not isinstance(effort, bool) and 0.0 <= effort < 1.0:
        return float(effort), True
    return values.wrong(name, f"one of {', '.join(_EFFORTS)}")
