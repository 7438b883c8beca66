"""What an API server would say to an object: by Kubernetes' own schemas, and by tests/data/crds for custom kinds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml

Json = dict[str, Any]
VERSION: Final = "1.33"  # of Kubernetes: the oldest that is still looked after where most clusters are
_DEFINITIONS: Final = Path(__file__).parent / "data/crds"


def load(path: Path) -> list[Json]:
    """The objects of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def check(object_: Json) -> None:
    """Raises jsonschema.ValidationError, or kubernetes_validate's, for what would be refused."""
    custom = _schemas().get(object_["apiVersion"])
    if custom is None:
        kubernetes_validate.validate(object_, VERSION, strict=True)
        return
    assert set(object_) == {"apiVersion", "kind", "metadata", "spec"}
    assert object_["metadata"]["name"]
    jsonschema.validate(object_["spec"], _closed(custom[object_["kind"]]))


@cache
def _schemas() -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = {}
    for path in sorted(_DEFINITIONS.glob("*.yaml")):
        found |= yaml.safe_load(path.read_text())
    return found


def _closed(schema: Json) -> Json:
    """As JSON Schema has it: objects take no field that is not named."""
    if "anything" in schema:
        return {}
    rest = {key: value for key, value in schema.items() if key not in ("properties", "list", "map")}
    if "properties" in schema:
        properties = {name: _closed(each) for name, each in schema["properties"].items()}
        return {**rest, "type": "object", "properties": properties, "additionalProperties": False}
    if "list" in schema:
        return {**rest, "type": "array", "items": _closed(schema["list"])}
    if "map" in schema:
        return {**rest, "type": "object", "additionalProperties": _closed(schema["map"])}
    return rest
