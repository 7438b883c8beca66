"""The workers of a pod, by its labels and annotations; pure.

Names and rules are the peer's (``service_discovery``) unless said.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from extproc.discovery.pod import Pod, PodState
from extproc.discovery.selectors import Selector, is_qualified_name
from extproc.discovery.wanted import (
    POD_NAME_LABEL,
    POD_NAMESPACE_LABEL,
    POD_UID_LABEL,
    PROVIDER_LABEL,
    Wanted,
)
from extproc.workers.registration import RegistrationError, registration
from extproc.workers.worker import Role

# A pod that several selectors select has the first of these roles.
PRECEDENCE: Final = (Role.ENCODE, Role.PREFILL, Role.DECODE, Role.REGULAR)
_HAVE_BOOTSTRAP: Final = (Role.PREFILL, Role.ENCODE)
_GOING: Final = (PodState.TERMINATING, PodState.FINISHED)
# Where a worker is, if the pod says so: clusters of Kubernetes 1.35 and newer copy the first of their node.
_PLACES: Final = ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack")
_NODE: Final = "kubernetes.io/hostname"


class _NoAnnotationError(ValueError):
    """An annotation is not what it should be; the message says how."""


class ModelIdFrom(Enum):
    """What of a pod names its model."""

    NAMESPACE = "namespace"
    LABEL = "label"
    ANNOTATION = "annotation"


@dataclass(frozen=True, slots=True)
class ModelIdSource:
    """``namespace``, ``label:KEY`` or ``annotation:KEY``."""

    of: ModelIdFrom
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelIdSource:
        """Raises ValueError."""
        kind, colon, key = text.partition(":")
        if text == ModelIdFrom.NAMESPACE.value:
            return cls(ModelIdFrom.NAMESPACE)
        if kind not in ("label", "annotation") or not colon:
            raise ValueError("expected namespace, label:KEY or annotation:KEY")
        if not is_qualified_name(key):
            raise ValueError(f"{key!r} cannot be the name of a label or an annotation")
        return cls(ModelIdFrom(kind), key)

    def model_of(self, pod: Pod) -> str:
        """The name; empty where the pod has none."""
        match self.of:
            case ModelIdFrom.NAMESPACE:
                return pod.metadata.namespace
            case ModelIdFrom.LABEL:
                return (pod.metadata.labels or {}).get(self.key, "")
        return (pod.metadata.annotations or {}).get(self.key, "")

    def __str__(self) -> str:
        return f"{self.of.value}:{self.key}" if self.key else self.of.value


@dataclass(frozen=True, slots=True)
class Annotations:
    """What annotations are called."""

    bootstrap_port: str = "sglang.ai/bootstrap-port"
    worker_ports: str = "smg.ai/worker-ports"
    kv_connector: str = "smg.ai/kv-connector"
    kv_engine_id: str = "smg.ai/kv-engine-id"


@dataclass(frozen=True, slots=True)
class PodRules:
    """How pods are read.

    Attributes:
        selectors: by role.
        port: of workers whose pod does not say it.
        model_id: what names their models; None: they do.
        api_key: they are trusted with it, as with the peer.
    """

    selectors: Mapping[Role, Selector]
    port: int = 80
    annotations: Annotations = field(default_factory=Annotations)
    model_id: ModelIdSource | None = None
    api_key: str | None = field(default=None, repr=False)

    def role_of(self, labels: Mapping[str, str]) -> Role | None:
        """What a pod with ``labels`` is; None: nothing of ours."""
        for role in PRECEDENCE:
            selector = self.selectors.get(role)
            if selector is not None and selector.matches(labels):
                return role
        return None


@dataclass(frozen=True, slots=True)
class PodReading:
    """What a pod comes to.

    Attributes:
        workers: one for each of its ports; none when it is going, has no address yet or cannot be served.
        problem: why it cannot be served; empty when it can.
        warnings: what of its annotations is not obeyed.
    """

    role: Role
    state: PodState
    workers: tuple[Wanted, ...] = ()
    problem: str = ""
    warnings: tuple[str, ...] = ()


def read_pod(pod: Pod, rules: PodRules) -> PodReading | None:
    """What ``pod`` comes to; None when it is nothing of ours."""
    role = rules.role_of(pod.metadata.labels or {})
    if role is None:
        return None
    state = pod.state
    if state in _GOING or not pod.status.ip or not pod.metadata.uid:
        return PodReading(role, state)
    warnings: list[str] = []
    try:
        workers = _workers(pod, role, rules, warnings)
    except (ValueError, RegistrationError) as error:
        return PodReading(role, state, problem=str(error), warnings=tuple(warnings))
    return PodReading(role, state, workers, warnings=tuple(warnings))


def _workers(pod: Pod, role: Role, rules: PodRules, warnings: list[str]) -> tuple[Wanted, ...]:
    """Raises ValueError, InvalidUrlError, RegistrationError."""
    said, names = pod.metadata.annotations or {}, rules.annotations
    ports = _ports(said[names.worker_ports], names.worker_ports) if names.worker_ports in said else (rules.port,)
    common: dict[str, object] = {"worker_type": role.value, "labels": _labels(pod)}
    if rules.api_key is not None:
        common["api_key"] = rules.api_key
    if names.kv_connector in said:
        common["kv_connector"] = said[names.kv_connector].strip()
    model = rules.model_id.model_of(pod) if rules.model_id is not None else ""
    if model:
        common["models"] = [{"id": model}]
    elif rules.model_id is not None:
        warnings.append(f"--model-id-from {rules.model_id}: the pod has none; what the engine says counts")
    bootstrap = _bootstrap_ports(said, role, names, len(ports), warnings)
    engine_ids = _each(said.get(names.kv_engine_id), names.kv_engine_id, len(ports))
    host = ipaddress.ip_address(pod.status.ip or "")
    literal = f"[{host}]" if host.version == 6 else str(host)
    workers = []
    for index, port in enumerate(ports):
        own: dict[str, object] = {"url": f"http://{literal}:{port}"}
        if bootstrap:
            own["bootstrap_port"] = bootstrap[index]
        if engine_ids:
            own["kv_engine_id"] = engine_ids[index]
        spec = registration(common | own)
        workers.append(
            Wanted(
                replace(spec, engine_models_too=bool(model)),
                name=pod.name,
                owner=pod.metadata.uid,
                since=pod.metadata.created or "",
                ready=pod.state is PodState.READY,
                protocol_known=False,
            )
        )
    return tuple(workers)


def _labels(pod: Pod) -> dict[str, str]:
    labels = pod.metadata.labels or {}
    found = {name: labels[name] for name in _PLACES if labels.get(name)}
    if pod.spec.node:
        found[_NODE] = pod.spec.node
    return found | {
        PROVIDER_LABEL: "kubernetes",
        POD_NAMESPACE_LABEL: pod.metadata.namespace,
        POD_NAME_LABEL: pod.metadata.name,
        POD_UID_LABEL: pod.metadata.uid,
    }


def _ports(text: str, annotation: str) -> tuple[int, ...]:
    """Ports, each once, in their order. Raises _NoAnnotationError."""
    ports = [_port(item, annotation) for item in text.split(",") if item.strip()]
    if not ports:
        raise _NoAnnotationError(f"{annotation}: expected ports, with commas between them")
    return tuple(dict.fromkeys(ports))


def _port(text: str, annotation: str) -> int:
    bare = text.strip()
    if not (bare.isascii() and bare.isdigit() and len(bare) < 6 and 1 <= int(bare) <= 65535):
        raise _NoAnnotationError(f"{annotation}: {bare!r} is not a port between 1 and 65535")
    return int(bare)


def _bootstrap_ports(
    said: Mapping[str, str], role: Role, names: Annotations, count: int, warnings: list[str]
) -> tuple[int, ...]:
    """The bootstrap port of each worker; none where the pod does not say it, or nothing that can be understood.

    The peer ignores what cannot be understood, too: the engine tells its port itself, or has a usual one.
    """
    text = said.get(names.bootstrap_port)
    if text is None or role not in _HAVE_BOOTSTRAP:
        return ()
    try:
        ports = tuple(_port(item, names.bootstrap_port) for item in text.split(","))
        if len(ports) not in (1, count):
            raise _NoAnnotationError(f"{names.bootstrap_port}: {len(ports)} ports for {count} workers")
    except _NoAnnotationError as error:
        warnings.append(f"{error}; ignored")
        return ()
    return ports * count if len(ports) == 1 else ports


def _each(text: str | None, annotation: str, count: int) -> tuple[str, ...]:
    """A value for each worker of a pod, with commas between them; none where the pod says none.

    Raises _NoAnnotationError.
    """
    if text is None:
        return ()
    values = tuple(value.strip() for value in text.split(","))
    if len(values) != count or not all(values):
        raise _NoAnnotationError(f"{annotation}: expected one for each of {count} workers, with commas between them")
    return values
