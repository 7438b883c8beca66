"""The settings of how workers are found; :mod:`extproc.settings` has the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, InstanceOf, model_validator

from extproc.discovery.pod_workers import PRECEDENCE, Annotations, ModelIdSource, PodRules
from extproc.discovery.selectors import Selector, is_qualified_name
from extproc.discovery.source import FileSource, KubernetesSource
from extproc.options import Group, Option
from extproc.text_settings import TextSettings
from extproc.values import Duration, File, WorkerPort
from extproc.workers.worker import Role


class DiscoveryProvider(Enum):
    """Where workers are found."""

    KUBERNETES = "kubernetes"
    FILE = "file"


def _selector(value: object) -> object:
    """From a mapping, or from ``KEY=VALUE`` items: a list, or text with blanks or commas between them."""
    if isinstance(value, Mapping):
        return Selector.of({str(name): str(text) for name, text in value.items()})
    parts = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(part, str) for part in parts):
        return value
    return Selector.parse([item for part in parts for item in re.split(r"[,\s]+", part) if item])


def _model_id_source(value: object) -> object:
    return ModelIdSource.parse(value) if isinstance(value, str) else value


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError("Must be the name of a namespace")
    return text


def _annotation(text: str) -> str:
    if not is_qualified_name(text):
        raise ValueError("Must be the name of an annotation")
    return text


_Selector = Annotated[InstanceOf[Selector], BeforeValidator(_selector)]
_ModelIdSource = Annotated[InstanceOf[ModelIdSource], BeforeValidator(_model_id_source)]
_Namespace = Annotated[str, AfterValidator(_namespace)]
_Annotation = Annotated[str, AfterValidator(_annotation)]
_NAMES = Annotations()
_HOW = "--service-discovery (or --discovery-provider kubernetes)"
# Of no use without Kubernetes.
_OF_PODS = (
    *("selector", "prefill_selector", "decode_selector", "encode_selector", "service_discovery_namespace"),
    *("service_discovery_port", "model_id_from", "bootstrap_port_annotation", "worker_ports_annotation"),
    *("kv_connector_annotation", "kv_engine_id_annotation"),
)


class DiscoverySettings(TextSettings):
    """A part of :class:`extproc.settings.Settings`."""

    # fmt: off
    service_discovery: Annotated[bool, Option(
        Group.DISCOVERY, "in Kubernetes; same as --discovery-provider kubernetes")] = False
    discovery_provider: Annotated[DiscoveryProvider | None, Option(
        Group.DISCOVERY, "kubernetes or file", "NAME", "none")] = None
    discovery_file: Annotated[File | None, Option(
        Group.DISCOVERY, "a list of workers, YAML or JSON; it may come later", "FILE", "none")] = None
    discovery_check_interval_secs: Annotated[Duration, Option(
        Group.DISCOVERY, "read the file, or renew the watch, that often anyhow", "SECONDS")] = 30
    prefill_selector: Annotated[_Selector | None, Option(
        Group.DISCOVERY, "labels of pods with prefill workers", "KEY=VALUE", "none")] = None
    decode_selector: Annotated[_Selector | None, Option(
        Group.DISCOVERY, "labels of pods with decode workers", "KEY=VALUE", "none")] = None
    encode_selector: Annotated[_Selector | None, Option(
        Group.DISCOVERY, "encode workers (not served yet)", "KEY=VALUE", "none")] = None
    selector: Annotated[_Selector | None, Option(
        Group.DISCOVERY, "regular workers (not served in PD mode)", "KEY=VALUE", "none")] = None
    service_discovery_namespace: Annotated[_Namespace | None, Option(
        Group.DISCOVERY, "the pods' namespace", "NAME", "all")] = None
    service_discovery_port: Annotated[WorkerPort, Option(
        Group.DISCOVERY, "the workers' port, where pods name none", "PORT")] = 80
    model_id_from: Annotated[_ModelIdSource | None, Option(
        Group.DISCOVERY, "namespace, label:KEY or annotation:KEY of pods", "WHAT", "as workers say")] = None
    bootstrap_port_annotation: Annotated[_Annotation, Option(
        Group.DISCOVERY, "a pod's bootstrap port", "KEY")] = _NAMES.bootstrap_port
    worker_ports_annotation: Annotated[_Annotation, Option(
        Group.DISCOVERY, "a pod's workers' ports", "KEY")] = _NAMES.worker_ports
    kv_connector_annotation: Annotated[_Annotation, Option(
        Group.DISCOVERY, "vLLM: a pod's KV connector", "KEY")] = _NAMES.kv_connector
    kv_engine_id_annotation: Annotated[_Annotation, Option(
        Group.DISCOVERY, "Mooncake: a pod's engine id", "KEY")] = _NAMES.kv_engine_id
    # fmt: on

    @model_validator(mode="after")
    def _one_provider(self) -> Self:
        """The peer's rule, and that nothing is given for the other one."""
        if self.service_discovery and self.discovery_provider is not None:
            raise ValueError("Give --service-discovery or --discovery-provider, not both")
        provider = self.provider
        if (provider is DiscoveryProvider.FILE) != (self.discovery_file is not None):
            raise ValueError("--discovery-provider file and --discovery-file belong together")
        turned_off = "service_discovery" in self.model_fields_set and not self.service_discovery
        if provider is DiscoveryProvider.KUBERNETES or (provider is None and turned_off):
            return self
        given = [f"--{name.replace('_', '-')}" for name in _OF_PODS if name in self.model_fields_set]
        if given:
            raise ValueError(f"{', '.join(given)}: only with {_HOW}")
        return self

    @model_validator(mode="after")
    def _each_role_is_found(self) -> Self:
        selectors = self.selectors
        for later, role in enumerate(PRECEDENCE):
            for first in PRECEDENCE[:later]:
                if first in selectors and role in selectors and selectors[first].covers(selectors[role]):
                    raise ValueError(
                        f"{_flag(role)} selects nothing that {_flag(first)} does not select, too, which goes first"
                    )
        return self

    @model_validator(mode="after")
    def _annotations_differ(self) -> Self:
        names = [getattr(self, name) for name in _OF_PODS if name.endswith("_annotation")]
        if len(set(names)) < len(names):
            raise ValueError("two of the --...-annotation options name the same annotation")
        return self

    @property
    def provider(self) -> DiscoveryProvider | None:
        """Where workers are found; None: they are registered only."""
        return DiscoveryProvider.KUBERNETES if self.service_discovery else self.discovery_provider

    @property
    def selectors(self) -> dict[Role, Selector]:
        """Those that are given."""
        each = {
            Role.ENCODE: self.encode_selector,
            Role.PREFILL: self.prefill_selector,
            Role.DECODE: self.decode_selector,
            Role.REGULAR: self.selector,
        }
        return {role: selector for role, selector in each.items() if selector is not None}

    def source(self, api_key: str | None) -> FileSource | KubernetesSource | None:
        """What discovery is told; None where there is none. Workers are trusted with ``api_key``."""
        if self.discovery_file is not None:
            return FileSource(self.discovery_file, self.discovery_check_interval_secs, api_key)
        if self.provider is None:
            return None
        names = Annotations(
            self.bootstrap_port_annotation,
            self.worker_ports_annotation,
            self.kv_connector_annotation,
            self.kv_engine_id_annotation,
        )
        rules = PodRules(self.selectors, self.service_discovery_port, names, self.model_id_from, api_key)
        return KubernetesSource(rules, self.service_discovery_namespace or "", self.discovery_check_interval_secs)


def _flag(role: Role) -> str:
    return "--selector" if role is Role.REGULAR else f"--{role.value}-selector"
