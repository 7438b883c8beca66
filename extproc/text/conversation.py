"""Messages as clients send them, made what chat templates expect.

Templates are written for texts or for lists of parts, for arguments of tool calls that are objects, and for the roles
they know. Engines bring the one into the form of the other before they render (vLLM 0.32: ``renderers/chat_utils.py``
and ``hf.py``; SGLang 0.5.23: ``parser/jinja_template_utils.py``), and so is it done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from jinja2 import nodes

_TEXT_TYPES: Final = ("text", "input_text")
_OF_MEDIA: Final = ("image", "audio", "video", "vision")  # what has these goes through contents, to SGLang
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """What a template expects.

    Attributes:
        parts: contents are lists of parts; else texts.
        developer: it knows the role; where not, it is a system message (vLLM).
        wrap: contents that are texts become lists of one part, too (vLLM).
        joint: what is between the texts of parts that are made one.
    """

    parts: bool = False
    developer: bool = False
    wrap: bool = True
    joint: str = "\n"

    @classmethod
    def of(cls, template: str, tree: nodes.Template | None, runtime: str = "vllm") -> Style:
        """That of a template with this syntax tree, as the engine treats it."""
        parts = tree is not None and _goes_through_contents(tree)
        if runtime == "vllm":
            return cls(parts, developer='"developer"' in template or "'developer'" in template)
        return cls(parts or any(word in template for word in _OF_MEDIA), developer=True, wrap=False, joint=" ")


def suited(messages: Sequence[Message], style: Style) -> list[dict[str, Any]]:
    """The messages in that style. They are copied as far as they are changed."""
    made = [_suited(message, style) for message in messages]
    if not style.developer and any(message.get("role") == "developer" for message in made):
        made = _one_system_message([_without_developer(message) for message in made])
    return made


def _suited(message: Message, style: Style) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    role, content = made.get("role"), made.get("content", "")
    if isinstance(content, list) and (not style.parts or role == "tool"):
        content = style.joint.join(_texts(content))
    elif isinstance(content, list):
        content = [_part(part) for part in content]
    elif style.parts and style.wrap and role != "tool":
        content = [{"type": "text", "text": content}] if content else []
    made["content"] = content
    if role == "assistant" and isinstance(calls := made.get("tool_calls"), list):
        if calls:
            made["tool_calls"] = [_call(call) for call in calls]
        else:
            del made["tool_calls"]
    return made


def _texts(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES:
            yield str(part.get("text", ""))


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES:
        return {"type": "text", "text": part.get("text", "")}
    return part


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object; what is none becomes an empty one, since it is history."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates may take a system message as the first one only."""
    system = [message for message in messages if message.get("role") == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [
        "\n".join(_texts(message["content"])) if isinstance(message["content"], list) else message["content"]
        for message in system
    ]
    others = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _goes_through_contents(tree: nodes.Template) -> bool:
    """Whether the template has a loop over a message's content, be it under another name.

    A name stands for a content that is set to one, or that is a macro's parameter, where a macro is called with one.
    Of the 55 templates that come with vLLM 0.32 and SGLang 0.5.23 it says what vLLM's ``_detect_content_format`` does.
    """
    from jinja2 import nodes  # noqa: PLC0415 -- not before there is a template

    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            names |= {
                parameter.name
                for parameter, argument in zip(macro.args, call.args, strict=False)
                if _is_content(argument, names)
            }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: Iterable[str]) -> bool:
    """Whether this is ``x.content`` or ``x['content']``, or one of ``names``, through whatever filters and slices."""
    from jinja2 import nodes  # noqa: PLC0415

    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
