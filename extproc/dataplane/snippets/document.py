"""How a snippet is written down: comments, and YAML documents that hold Envoy's messages or Kubernetes' objects."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml
from betterproto2 import Casing, Message

WIDTH = 120


def as_dict(message: Message) -> dict[str, Any]:
    """An Envoy message as Envoy's YAML and the objects of meshes have it."""
    fields: dict[str, Any] = message.to_dict(casing=Casing.SNAKE)
    _say_that_it_fails_closed(fields)
    return fields


def _say_that_it_fails_closed(value: Any) -> None:
    """Show the one default that must not be changed: without the service's word a request goes nowhere."""
    if isinstance(value, dict):
        if str(value.get("@type")).endswith(".ExternalProcessor"):
            value["failure_mode_allow"] = False
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            _say_that_it_fails_closed(inner)


def comment(text: str) -> str:
    """``text`` as lines of comment, wrapped anew: paragraphs, items of lists (``- ``), commands (``$ ``)."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        lines += [*([""] if lines else []), *_wrapped(paragraph)]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _wrapped(paragraph: str) -> list[str]:
    lines: list[str] = []
    for item in re.split(r"\n(?=- )", paragraph):
        further = "  " if item.startswith(("- ", "$ ")) else ""
        lines += textwrap.wrap(" ".join(item.split()), WIDTH - 2, subsequent_indent=further, break_on_hyphens=False)
    return lines


def documents(head: str, *parts: tuple[str, dict[str, Any]]) -> str:
    """``head``, then each part: what it is for (maybe nothing), and a document."""
    texts = [f"{comment(said) if said else ''}{_yaml(document)}" for said, document in parts]
    return f"{head}\n" + "---\n".join(texts)


def kubernetes(api: str, kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object of Kubernetes."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


class _Dumper(yaml.SafeDumper):
    """Repeats what occurs twice: anchors are for machines."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - yaml's signature
        return True


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=WIDTH)
