"""Label selectors of the simplest kind, which is the peer's: labels that a pod must have with just these values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def is_qualified_name(text: str) -> bool:
    """Whether a label or an annotation may be called so: ``name`` or ``prefix/name``."""
    prefix, slash, name = text.rpartition("/")
    return bool(_NAME.fullmatch(name)) and (not slash or bool(_PREFIX.fullmatch(prefix)))


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects pods that have all of ``labels``, name and value; in order of the names, at least one."""

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Selector:
        """Raises ValueError for what no label can be."""
        if not labels:
            raise ValueError("expected KEY=VALUE, at least one")
        for name, value in labels.items():
            if not is_qualified_name(name):
                raise ValueError(f"{name!r} cannot be the name of a label")
            if value and not _NAME.fullmatch(value):
                raise ValueError(f"{name}={value}: {value!r} cannot be the value of a label")
        return cls(tuple(sorted(labels.items())))

    @classmethod
    def parse(cls, items: Sequence[str]) -> Selector:
        """Read ``KEY=VALUE`` items. The peer drops those that are none; here they raise ValueError."""
        labels: dict[str, str] = {}
        for item in items:
            name, equals, value = item.partition("=")
            if not equals or name.endswith("!") or value.startswith("="):
                raise ValueError(f"{item!r}: expected KEY=VALUE (labels are compared for equality only)")
            if labels.setdefault(name, value) != value:
                raise ValueError(f"no pod can have both {name}={labels[name]} and {name}={value}")
        return cls.of(labels)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with ``labels`` is selected."""
        return all(labels.get(name) == value for name, value in self.labels)

    def covers(self, other: Selector) -> bool:
        """Whether this selects whatever ``other`` selects."""
        return set(self.labels) <= set(other.labels)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.labels)


def query(selectors: Sequence[Selector]) -> str:
    """A ``labelSelector`` of the Kubernetes API for all that any of ``selectors`` selects, and little else.

    There is no "or" between labels, but there is one between values: of names that all have, the values of each.
    """
    every = [dict(selector.labels) for selector in selectors]
    common = sorted(name for name in (every[0] if every else {}) if all(name in labels for labels in every))
    return ",".join(_requirement(name, sorted({labels[name] for labels in every})) for name in common)


def _requirement(name: str, values: Sequence[str]) -> str:
    return f"{name}={values[0]}" if len(values) == 1 else f"{name} in ({','.join(values)})"
