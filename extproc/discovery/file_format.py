"""The file that lists workers; pure.

YAML, of which JSON is a part: a list of what ``POST /workers`` takes, or, as the peer's manifest, ``{"version": 1,
"workers": [...]}``. It is right as a whole or not at all: a worker must not go because somebody mistyped another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
import yaml

from extproc.discovery.wanted import PROVIDER_LABEL, Key, Wanted
from extproc.errors import InvalidUrlError
from extproc.workers.registration import RegistrationError, registration

_VERSION: Final = 1  # of the peer's manifest
_FILE: Final = "file"


class FileError(ValueError):
    """The file cannot be used; the message says why."""


def read_workers(content: bytes, api_key: str | None) -> dict[Key, Wanted]:
    """The workers of a file. ``api_key``: of those that have none of their own. Raises FileError."""
    found: dict[Key, Wanted] = {}
    for place, entry in enumerate(_entries(_document(content)), 1):
        wanted = _wanted(entry, place, api_key)
        if wanted.key in found:
            raise FileError(f"worker {place}: {wanted.name} is a {wanted.key.role.value} worker further up already")
        found[wanted.key] = wanted
    return found


def _document(content: bytes) -> object:
    if not content.strip():
        raise FileError("it is empty; a fleet without workers is []")
    if content.lstrip().startswith((b"[", b"{")):  # much faster than by YAML, and the loop is held while it is read
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            pass  # flow style
    try:
        return yaml.load(content, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # a date of no month, "!!int x", ...
        raise FileError(f"neither YAML nor JSON: {' '.join(str(error).split())}") from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # libyaml's, where it is there
    """PyYAML keeps the last of several equal keys; here they are a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        """The mapping; raises ConstructorError when a key occurs twice."""
        keys = [key.value for key, _ in node.value if isinstance(key.value, Hashable)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _entries(document: object) -> list[object]:
    if isinstance(document, Mapping):
        if unknown := document.keys() - {"version", "workers"}:
            raise FileError(f"expected a list of workers, or version and workers; not {', '.join(map(str, unknown))}")
        if document.get("version", _VERSION) != _VERSION:
            raise FileError(f"version is {document['version']!r}, expected {_VERSION}")
        document = document.get("workers")
    if not isinstance(document, list):
        raise FileError("expected a list of workers")
    return document


def _wanted(entry: object, place: int, api_key: str | None) -> Wanted:
    if not isinstance(entry, Mapping) or not all(isinstance(name, str) for name in entry):
        raise FileError(f"worker {place}: expected the fields of POST /workers")
    try:
        spec = registration(entry)
    except InvalidUrlError as error:
        raise FileError(f"worker {place}: url: {error.reason}") from None
    except RegistrationError as error:
        raise FileError(f"worker {place}: {error}") from None
    labels = {**spec.labels, PROVIDER_LABEL: _FILE}
    return Wanted(replace(spec, labels=labels, api_key=spec.api_key or api_key), name=str(spec.url))
