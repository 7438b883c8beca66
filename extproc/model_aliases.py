"""Other names for models: ``--model-alias ALIAS=MODEL``, the peer's option.

A request for an alias is one for the model: that is what is placed, what workers are told, and what their answers name,
as with the peer and as OpenAI answers for its own aliases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, InstanceOf

from extproc.given_workers import items


class ModelAlias(NamedTuple):
    """``alias`` stands for ``model``, by which workers know it."""

    alias: str
    model: str


def _alias(value: object) -> object:
    """One alias, from its text; a model's name may have ``=`` in it, an alias may not."""
    if not isinstance(value, str):
        return value
    alias, mark, model = (part.strip() for part in value.partition("="))
    if not (alias and mark and model):
        raise ValueError(f"{value!r}: expected ALIAS=MODEL")
    return ModelAlias(alias, model)


def _listed(value: object) -> object:
    """In YAML a mapping will do, too."""
    if isinstance(value, Mapping):
        return [f"{alias}={model}" for alias, model in value.items()]
    return items(value)


def _consistent(aliases: tuple[ModelAlias, ...]) -> tuple[ModelAlias, ...]:
    known = dict(aliases)
    for alias, model in aliases:
        if known[alias] != model:
            raise ValueError(f"alias {alias} is given for both {model} and {known[alias]}")
        if model in known:
            raise ValueError(f"alias {alias} stands for {model}, which is an alias itself")
    return aliases


ModelAliases = Annotated[
    tuple[Annotated[InstanceOf[ModelAlias], BeforeValidator(_alias)], ...],
    BeforeValidator(_listed),
    AfterValidator(_consistent),
]
