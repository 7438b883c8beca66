"""What a client wants the answer to look like: OpenAI's ``response_format``, and the engines' names for the same.

Of several, vLLM (0.32) lets ``response_format`` stand for the one of its kind and refuses two kinds, SGLang (0.5.23)
refuses two kinds; so two of them are refused here.
Source: vllm entrypoints/generate/base/protocol.py, sampling_params.py (StructuredOutputsParams); sglang
srt/entrypoints/openai/protocol.py, srt/sampling/sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from extproc.errors import GatewayError
from extproc.generation import values
from extproc.generation.sampling import Constraint, Shape
from extproc.generation.values import Fields

_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")


def _schema(value: Any, name: str) -> Constraint | None:
    if isinstance(value, str):
        if not value:
            return None
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError:
            values.wrong(name, "a JSON schema")
        return Constraint(Shape.JSON_SCHEMA, value)
    return Constraint(Shape.JSON_SCHEMA, values.json_text(values.mapping(value, name)))


def _expression(value: Any, name: str) -> Constraint | None:
    found = values.text(value, name)
    return Constraint(Shape.REGEX, found) if found else None


def _grammar(value: Any, name: str) -> Constraint | None:
    found = values.text(value, name)
    return Constraint(Shape.GRAMMAR, found) if found else None


def _tag(value: Any, name: str) -> Constraint | None:
    if not isinstance(value, str):
        value = values.json_text(values.mapping(value, name))
    return Constraint(Shape.STRUCTURAL_TAG, value) if value else None


def _choice(value: Any, name: str) -> Constraint:
    found = values.texts(value, name)
    if isinstance(value, str) or not found:
        values.wrong(name, "a list of strings, of one at least")
    return Constraint(Shape.CHOICE, orjson.dumps(found).decode())


def _object(value: Any, name: str) -> Constraint | None:
    return Constraint(Shape.JSON_OBJECT) if values.boolean(value, name) else None


_Reader = Callable[[Any, str], Constraint | None]
# fmt: off
_TOP: Final[Mapping[str, _Reader]] = {
    "guided_json": _schema, "guided_regex": _expression, "guided_grammar": _grammar, "guided_choice": _choice,
    "guided_json_object": _object, "json_schema": _schema, "regex": _expression, "ebnf": _grammar,
}
_NATIVE: Final[Mapping[str, _Reader]] = {
    "json_schema": _schema, "regex": _expression, "ebnf": _grammar, "structural_tag": _tag,
}
_STRUCTURED: Final[Mapping[str, _Reader]] = {
    "json": _schema, "regex": _expression, "choice": _choice, "grammar": _grammar, "json_object": _object,
    "structural_tag": _tag,
}
# fmt: on
# How a schema may be bent: engines over gRPC are not told, and what they would make of it is another answer.
_BENT: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
TOP_FIELDS: Final = frozenset({*_TOP, "response_format", "structured_outputs"})
NATIVE_FIELDS: Final = frozenset(_NATIVE)


def constraint_of(fields: Fields) -> Constraint | None:
    """What a body of Chat Completions or Completions demands. Raises GatewayError."""
    found = _read(fields, _TOP)
    outputs = fields.mapping("structured_outputs")
    if outputs is not None:
        found |= _structured(outputs)
    response_format = fields.mapping("response_format")
    if response_format is not None and (wanted := _response_format(response_format)) is not None:
        found["response_format"] = wanted
    return _one(found)


def native_constraint_of(fields: Fields) -> Constraint | None:
    """What ``sampling_params`` of ``/generate`` demand. Raises GatewayError."""
    return _one(_read(fields, _NATIVE))


def _read(fields: Fields, readers: Mapping[str, _Reader]) -> dict[str, Constraint]:
    found = {}
    for name in readers.keys() & fields.members.keys():
        wanted = readers[name](fields.members[name], fields.name(name))
        if wanted is not None:
            found[fields.name(name)] = wanted
    return found


def _structured(outputs: Mapping[str, Any]) -> dict[str, Constraint]:
    fields = Fields(outputs, "structured_outputs")
    for name in _BENT:
        if fields.get(name):
            values.refuse(fields.name(name), "engines cannot be told of it over gRPC")
    found = _read(fields, _STRUCTURED)
    if not found:
        raise GatewayError(
            "invalid_value", "`structured_outputs` must have one kind of constraint", param="structured_outputs"
        )
    return found


def _response_format(members: Mapping[str, Any]) -> Constraint | None:
    fields = Fields(members, "response_format")
    kind = fields.get("type")
    if kind not in _FORMATS:
        values.wrong("response_format.type", f"one of {', '.join(_FORMATS)}")
    if kind == "json_object":
        return Constraint(Shape.JSON_OBJECT)
    if kind == "json_schema":
        described = fields.mapping("json_schema")
        # SGLang also takes the schema itself beside the type.
        schema = members.get("schema") if described is None else described.get("schema")
        if schema is None:
            name = "response_format.json_schema"
            raise GatewayError("invalid_value", f"`{name}` must have a `schema`", param=name)
        return _schema(values.mapping(schema, "response_format.json_schema.schema"), "response_format.json_schema")
    if kind == "structural_tag":
        if "format" not in fields and not ("structures" in fields and "triggers" in fields):
            values.wrong("response_format", "a structural tag with a `format`, or with `structures` and `triggers`")
        return _tag(members, "response_format")
    return None


def _one(found: Mapping[str, Constraint]) -> Constraint | None:
    if len(found) > 1:
        names = " and ".join(f"`{name}`" for name in sorted(found))
        raise GatewayError("invalid_value", f"only one constraint can hold, not {names}", param=min(found))
    return next(iter(found.values()), None)
