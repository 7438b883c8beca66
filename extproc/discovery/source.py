"""Where workers are found, as the operator says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from extproc.discovery.pod_workers import PodRules


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file at ``path``; the rest as :class:`extproc.discovery.file.FileWatcher` has it."""

    path: Path
    reread: float = 30.0
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Pods that ``rules`` select, in ``namespace``; empty: in all. ``renewal``: seconds that one watch lasts."""

    rules: PodRules
    namespace: str = ""
    renewal: float = 30.0
