"""Which class of priority each tenant may ask for at most: ``TENANT=CLASS``, any number of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from extproc.given_workers import items
from extproc.values import PriorityName


def _pair(text: object) -> object:
    """A tenant and its class, from text or from the pair that is made of it."""
    if not isinstance(text, str):
        return text
    tenant, mark, name = text.partition("=")
    names = [priority.value for priority in PriorityName]
    if not mark or not tenant or name not in names:
        raise ValueError(f"{text!r}: expected TENANT=CLASS, with a class of {', '.join(names)}")
    return tenant, PriorityName(name)


def _listed(value: object) -> object:
    """In YAML a mapping will do, too."""
    return [f"{tenant}={name}" for tenant, name in value.items()] if isinstance(value, Mapping) else items(value)


def _once(pairs: tuple[tuple[str, PriorityName], ...]) -> tuple[tuple[str, PriorityName], ...]:
    classes = dict(pairs)
    for tenant, priority in pairs:
        if classes[tenant] is not priority:
            raise ValueError(f"tenant {tenant} is given both {priority.value} and {classes[tenant].value}")
    return pairs


TenantClasses = Annotated[
    tuple[Annotated[tuple[str, PriorityName], BeforeValidator(_pair)], ...],
    BeforeValidator(_listed),
    AfterValidator(_once),
]
