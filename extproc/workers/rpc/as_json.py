"""Messages of engines as JSON has them: by the names of their fields. Pure."""

from __future__ import annotations

from typing import Any, Final

_LARGEST_EXACT: Final = 2**53  # integer in a double


def as_json(message: Any) -> dict[str, Any]:
    """The fields of a message that say something.

    In proto3 a number or text that is not said is 0 or empty: it is left out. Booleans are there always.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and not field.is_repeated:
            if message.HasField(field.name):
                found[field.name] = _message(value)
        elif value or (field.type == field.TYPE_BOOL and not field.is_repeated):
            found[field.name] = _plain(field, value)
    return found


def of_struct(struct: Any) -> dict[str, Any]:
    """A ``google.protobuf.Struct``, in which a whole number is an integer again."""
    return {name: _value(value) for name, value in struct.fields.items()}


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return [_message(item) for item in value]
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        return [names[item].name for item in value] if field.is_repeated else names[value].name
    return list(value) if field.is_repeated else value


def _message(message: Any) -> Any:
    match message.DESCRIPTOR.full_name:
        case "google.protobuf.Struct":
            return of_struct(message)
        case "google.protobuf.Timestamp":
            return message.ToJsonString()
    return as_json(message)


def _value(value: Any) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return of_struct(value.struct_value)
        case "list_value":
            return [_value(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() and abs(number) < _LARGEST_EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None
