"""A request to ``/v1/messages/count_tokens`` as a conversation for a chat template.

As vLLM 0.32 turns the one into the other (``entrypoints/anthropic/serving.py``); blocks that are no text, no tool's and
no thought are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from extproc.errors import GatewayError
from extproc.generation.asked import ChatPrompt


def conversation(body: Mapping[str, Any]) -> ChatPrompt:
    """The conversation of ``system``, ``messages`` and ``tools``. Raises GatewayError (400)."""
    messages: list[dict[str, Any]] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "must be a list of messages")
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise _wrong("messages", "every message needs a role, user or assistant")
        messages += _messages(message["role"], message.get("content"))
    return ChatPrompt(messages, tools=_tools(body.get("tools")))


def _messages(role: str, content: object) -> Iterable[dict[str, Any]]:
    """The messages that one of Anthropic's is: results of tools are messages of their own."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise _wrong("messages", "content must be a text or a list of blocks")
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(call_id), "name": str(name)}:
                arguments = orjson.dumps(block.get("input") or {}).decode()
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                said = block.get("content")
                yield {"role": "tool", "tool_call_id": call_id, "content": _text(said or "", "messages")}
            case _:
                raise _wrong("messages", f"blocks of this type cannot be counted: {_type_of(block)}")
    if texts or calls or thoughts:
        yield {
            "role": role,
            "content": texts,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": "\n".join(thoughts)} if thoughts else {}),
        }


def _text(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(b, dict) and isinstance(b.get("text"), str) for b in value):
        return "\n".join(block["text"] for block in value)
    raise _wrong(param, "must be a text or a list of text blocks")


def _tools(value: object) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool.get("name") for tool in value):
        raise _wrong("tools", "must be a list of tools with names")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in value
    ]


def _type_of(block: object) -> str:
    return str(block.get("type"))[:40] if isinstance(block, dict) else "not an object"


def _wrong(param: str, message: str) -> GatewayError:
    return GatewayError("invalid_type", f"{param}: {message}", param=param)
